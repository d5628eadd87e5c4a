"""The Python signatures of the client, as types: what an engine may rely on.

`engram_client.connect` returns a `Client`. These are protocols so that engines and tests can put a fake in
place; tests/unit/test_contracts.py checks that the real classes have exactly these signatures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self, overload

from engram_client.identity import TableIdentity
from engram_client.protocol import Progress, ResolvedOptions

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Tokens = Literal["same", "own"]
"""Whose tokens the ids are: every rank passes equal ids, or each rank passes its own."""


class RawRows(NamedTuple):
    """Rows as stored: FP8 (E4M3) codes, uint8 `[..., 256]`, and their E8M0 scales, uint8 `[..., 8]`."""

    values: Tensor
    scales: Tensor


class Pending(Protocol):
    """A lookup under way; from `table.prefetch(ids)`."""

    def wait(self) -> Tensor:
        """The rows, bfloat16 `[*ids.shape, 256]`; a second call gives the same.

        On a GPU the current stream waits, not the caller. Exchanges between ranks run here, so where lookups
        are collective this is too, and all ranks wait for their prefetches in the same order. Raises as `lookup` does.
        """
        ...


class Table(Protocol):
    """One table as this rank reads it; from `client.table(layer_id)`."""

    @property
    def layer_id(self) -> int: ...

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> tuple[int, ...]:
        """Rows of each hash column, in column order."""
        ...

    @property
    def identity(self) -> TableIdentity: ...

    @property
    def invalid_ids(self) -> int:
        """How many ids this table has counted as invalid since it was attached."""
        ...

    @overload
    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
        raw: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def lookup(
        self,
        ids: Tensor,
        out: RawRows | tuple[Tensor, Tensor] | None = None,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
        raw: Literal[True],
    ) -> RawRows: ...

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | RawRows | tuple[Tensor, Tensor] | None = None,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
        raw: bool = False,
    ) -> Tensor | RawRows:
        """Rows of `ids`, dequantised: bfloat16 `[*ids.shape, 256]`, in `out` when given.

        ids: int32 or int64, any shape, on the client's device. Negative ids are padding and give zero rows.
        Ids past the end give zero rows and are counted; a strict client raises, on a GPU at the next eager
        lookup or `check()` after a kernel found them, and never in a capture. hashed=True: ids are
        `[..., 24]` as the hasher makes them, so that column paths may be used, and an id outside its
        column's range is invalid (0 in any column is not counted: idle batches send it).
        out: contiguous bfloat16 of that shape on that device; nothing is allocated then (but by an exchange
        between ranks, and on a GPU by the first larger batch of a host table).
        raw: rows as stored, in `out` (values and scales, contiguous uint8) when given.
        tokens, counts: with replication none or split reads, whose tokens these are (`Tokens`); counts is the number
        of tokens (rows of ids' first dimension) of every rank, exchanged when not given.

        A collective where shards are assembled by one: every rank of the group calls it, those without
        tokens too. With split reads so is every larger batch of tokens that all ranks share. Collectives come in the
        same order on all ranks; a strict client takes part before it raises InvalidIds.

        Raises IdsDtypeInvalid, IdsDeviceInvalid, IdsShapeInvalid, OutInvalid, CountsInvalid, InvalidIds
        (strict), ClientClosed or ForkedClient.
        """
        ...

    def prefetch(
        self,
        ids: Tensor,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
    ) -> Pending:
        """Starts a lookup beside the caller's work: on a GPU on the client's side stream and on few
        multiprocessors, on the CPU in a thread. `ids` must not change before `wait()`.

        On a GPU the rows lie in a buffer of this table, at the same address each time, until its next prefetch; rows
        that an exchange brings together are a tensor of their own.
        Both calls can be captured in a CUDA graph, in the same one; prefetch as many ids eagerly before, so
        that the buffer is not the graph's. torch.compile breaks its graph at either. Raises as `lookup` does.
        """
        ...


class Client(Protocol):
    """An attached rank: mapped tables and the lease on them. A context manager."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def options(self) -> ResolvedOptions:
        """What the daemon resolved: placement, replication, lookup."""
        ...

    @property
    def layers(self) -> tuple[int, ...]: ...

    @property
    def server_alive(self) -> bool:
        """Whether a daemon holds this client's lease. The tables stay readable when none does; the client takes
        a new lease by itself when a daemon serves the same tables again."""
        ...

    @property
    def stale(self) -> bool:
        """Whether the daemon that is there now serves other tables (or another split) than those mapped here,
        which stay readable and unchanged. Connect again for the new ones."""
        ...

    def table(self, layer_id: int) -> Table:
        """The table that backbone layer `layer_id` reads. Raises UnknownLayer or ClientClosed."""
        ...

    def lookup_all(self, ids: Tensor, *, hashed: bool = False) -> Tensor:
        """Rows of all layers at once: ids `[tokens, layers, columns]`, in the order of `layers`, to bfloat16
        `[tokens, layers, columns, 256]`, of which each layer's part is contiguous. One launch on a GPU that has
        the whole tables; else as `lookup` by table. Raises as `lookup` does."""
        ...

    def check(self) -> None:
        """Raises InvalidIds when a table counted ids as invalid since the last InvalidIds of this client.

        Waits for nothing: what kernels that are still under way find, a later call tells. On a GPU the id and
        the position are those of the first ever counted.
        """
        ...

    def close(self) -> None:
        """Waits for kernels that read the tables. Unmaps the tables and ends the lease. Closing twice is harmless.

        Raises BufferError while another thread looks rows up: no lookup starts any more, and the tables are
        unmapped by calling it again when the running ones have ended.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Connect(Protocol):
    """The signature of `engram_client.connect`."""

    def __call__(
        self,
        endpoint: str = ...,
        *,
        rank: int,
        world_size: int,
        device: str = "cpu",
        group: ProcessGroup | None = None,
        timeout: float = 60.0,
        layers: Sequence[int] | None = None,
        identity: Mapping[int, TableIdentity | str] | None = None,
        strict: bool = False,
        split_reads: bool = False,
        handover: str | None = None,
        name: str | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> Client:
        """Attaches to the daemon at `endpoint` and maps its tables.

        rank, world_size: this process's place in its tensor-parallel group; they select shards.
        device: "cpu", or "cuda:N", where lookups run on GPU N and tables of the host's memory are read in place.
        group: torch.distributed group for assembled lookups; None = WORLD. Its size must be world_size. Where the
        daemon reads across nodes (peer_read with nnodes over 1), connect is itself a collective of it: ranks
        exchange FABRIC handles, each waits for all as long as the group's timeout, and all raise if one fails. So it
        is with split_reads.
        timeout: seconds to wait for the socket, for the successor of a daemon that drains, and for the tables; 0 fails
            at once.
        layers: backbone layer ids to map; None = all.
        identity: tables demanded, by layer id: a TableIdentity, or the root's 32 hex digits.
        strict: invalid ids raise InvalidIds instead of giving zero rows.
        split_reads: for placement cpu with replication per_node, on all ranks or none. Where ranks pass equal ids
            (tokens "same") each reads a part of a larger batch (on GPUs with NCCL 1,024 ids, else any) over its own
            link, and an all-gather of `group` brings the parts together; such lookups are then collectives. Best among
            GPUs of one node that NVLink connects.
        handover: path of the descriptor socket, where the daemon was configured with one.
        name: shown in `engram-ctl status`; None = the program's name.
        on_progress: called with every Progress while the daemon loads.

        Raises NoServer, ServerRefused, AccessDenied, ProtocolMismatch, ConnectTimeout, TransferCut,
        LoadFailed, ServerDraining, IdentityMismatch, TpSizeMismatch, RankInvalid, UnknownLayer,
        TooManyClients, TooFewDescriptors, MapFailed, DeviceUnsupported, RankOnOtherNode or GroupInvalid; on a GPU
        also NoDriver, CudaUnavailable, GpuNotFound, KernelCompileFailed, RegistrationFailed, AddressesScattered,
        PeerAccessMissing, CudaCallFailed or Unsupported; across nodes also GroupNeeded, GroupRankMismatch,
        FabricUnavailable, NodesDiffer, RowsNotCovered, OtherRankFailed or ExchangeFailed; with split_reads
        SplitReadsRefused, GroupRankMismatch, NodesDiffer, OtherRankFailed or ExchangeFailed. A GPU that fails here
        stays usable for other work.
        """
        ...
