"""connect(): attach to the node's daemon, map its tables, hold the lease."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import msgspec

from engram_client import attaching
from engram_client.counters import Reporter
from engram_client.errors import (
    ClientClosed,
    ForkedClient,
    IdsShapeInvalid,
    InvalidIds,
    RankInvalid,
    UnknownLayer,
)
from engram_client.handover import REPLY_LEAST_S
from engram_client.identity import TableIdentity
from engram_client.layout import ROW_VALUES
from engram_client.lease import Lease
from engram_client.lookup import numbers
from engram_client.mapping.segments import CpuMapping, GpuMapping, gpu_ordinal, map_for_cpu, map_for_gpu
from engram_client.nodes import Nodes
from engram_client.protocol import (
    DEFAULT_ENDPOINT,
    Attach,
    Attached,
    Progress,
    ResolvedOptions,
    TableInfo,
    handover_path,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from engram_client.gpu import GpuTables
    from engram_client.lookup.collective import LocalRows
    from engram_client.lookup.kernels import Kernels
    from engram_client.table import MappedTable


def connect(
    endpoint: str = DEFAULT_ENDPOINT,
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
) -> MappedClient:
    """Attaches to the daemon at `endpoint` and maps its tables: see `engram_client.api.Connect`."""
    nodes = Nodes(endpoint, handover, rank, world_size, group, split_reads)
    try:
        if not 0 <= rank < world_size:
            raise RankInvalid(rank=rank, world_size=world_size)
        request = Attach(
            rank=rank,
            world_size=world_size,
            device=device,
            name=_printable(name or os.path.basename(sys.argv[0] or sys.executable)),
            layers=None if layers is None else tuple(layers),
            identity=_identities(identity or {}),
            roots={str(layer): d for layer, d in (identity or {}).items() if isinstance(d, str)},
            wait=timeout > 0,
        )
        return _open(endpoint, handover, request, timeout, on_progress, nodes, group, strict)
    except Exception as error:
        nodes.give_up(error)
        raise


def _open(
    endpoint: str,
    handover: str | None,
    request: Attach,
    timeout: float,
    on_progress: Callable[[Progress], None] | None,
    nodes: Nodes,
    group: ProcessGroup | None,
    strict: bool,
) -> MappedClient:
    ordinal = nodes.ordinal = gpu_ordinal(request.device)
    kernels = None
    if ordinal is not None:
        from engram_client.gpu import prepare  # brings torch, which a rank has and a tool may not

        kernels = prepare(ordinal)
    started = time.monotonic()
    deadline = started + timeout
    sockets = handover_path(endpoint, handover)

    def heard(progress: Progress) -> None:
        nodes.hear(progress)
        if on_progress is not None:
            on_progress(progress)

    with contextlib.ExitStack() as undo:
        received = contextlib.ExitStack()
        question = attaching.Question(endpoint, sockets, request, deadline, timeout, heard)
        lease, control, attached, descriptors = attaching.receive(question, nodes, undo, received)
        together = attached.options.reads_across_nodes
        with received:
            handles = lease.export(max(deadline - time.monotonic(), REPLY_LEAST_S)) if together else ()
            # From here on beats are sent: other nodes may take long to load their tables.
            kept = Lease(lease, functools.partial(attaching.renew, endpoint, handover, request, attached))
            undo.callback(kept.close)
            sources: dict[str, int | bytes] = {**descriptors}
            if nodes.split_reads:
                nodes.compare(attached)
            if together:
                tables, foreign = nodes.exchange(attached, handles)
                attached, sources = msgspec.structs.replace(attached, tables=tables), {**foreign, **sources}
            mappings = _map(attached.tables, sources, ordinal, os.path.dirname(sockets))
        for mapping in mappings.values():
            undo.callback(mapping.close)
        reporter = Reporter(*control.give_away(), lambda: kept.address, time.monotonic() - started)
        undo.callback(reporter.close)
        client = MappedClient(
            endpoint, request, attached, kept, mappings, group, strict, reporter, split_reads=nodes.split_reads
        )
        if kernels is not None:
            undo.callback(client.close)
            client.open_on_gpu(kernels)
        nodes.agree()
        undo.pop_all()
    return client


def _identities(demanded: Mapping[int, TableIdentity | str]) -> tuple[TableIdentity, ...]:
    """The key says whose identity is demanded; another table's identity under it is a demand that fails."""
    return tuple(
        msgspec.structs.replace(demand, layer_id=layer)
        for layer, demand in demanded.items()
        if isinstance(demand, TableIdentity)
    )


def _printable(name: str) -> str:
    """A program's name need not be text: its odd bytes are spelled out, and the message has room for 64."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")[:64]


def _map(
    tables: Sequence[TableInfo], sources: Mapping[str, int | bytes], ordinal: int | None, lock_path: str
) -> Mapping[str, CpuMapping | GpuMapping]:
    """Maps every segment read-only; all or none.

    lock_path: the sockets' folder, which all ranks of a node share: those that register memory take turns.
    """
    segments = [segment for table in tables for segment in table.segments]
    if ordinal is None:
        return map_for_cpu(segments, sources)
    return map_for_gpu(segments, sources, ordinal, lock_path=lock_path)


class MappedClient:
    """A rank's mapped tables and its lease on them: see `engram_client.api.Client`."""

    def __init__(
        self,
        endpoint: str,
        request: Attach,
        attached: Attached,
        lease: Lease,
        mappings: Mapping[str, CpuMapping | GpuMapping],
        group: ProcessGroup | None,
        strict: bool,
        reporter: Reporter,
        *,
        split_reads: bool,
    ) -> None:
        self._endpoint = endpoint
        self._rank = request.rank
        self._world_size = request.world_size
        self._options = attached.options
        self._infos = {info.geometry.layer_id: info for info in attached.tables}
        self._lease = lease
        self._mappings = mappings
        self._group = group
        self._strict = strict
        self._split_reads = split_reads
        self._reporter = reporter
        self._tables: dict[int, MappedTable] = {}
        self._gpu: GpuTables | None = None
        self._owner_pid = os.getpid()
        self._closed = False
        self._number = numbers.register(self)
        # A client that is dropped without close() gives its lease up all the same.
        weakref.finalize(self, lease.close)
        weakref.finalize(self, reporter.close)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"layers {list(self._infos)}"
        return f"<engram client, rank {self._rank} of {self._world_size} at {self._endpoint}: {state}>"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def options(self) -> ResolvedOptions:
        return self._options

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._infos)

    @property
    def server_alive(self) -> bool:
        return not self._closed and self._owner_pid == os.getpid() and self._lease.alive

    @property
    def stale(self) -> bool:
        return self._lease.stale

    def table(self, layer_id: int) -> MappedTable:
        self.check_usable(f"table {layer_id}")
        if layer_id not in self._infos:
            raise UnknownLayer(layer_id=layer_id, served=list(self._infos))
        if layer_id not in self._tables:
            made = self._opened(self._infos[layer_id])
            return self._tables.setdefault(layer_id, made)  # another thread may have been faster
        return self._tables[layer_id]

    def _opened(self, info: TableInfo) -> MappedTable:
        from engram_client.table import MappedTable  # brings torch, which a rank has and a tool may not

        local: LocalRows
        meter = self._reporter.meter(info.geometry.layer_id)
        if self._gpu is not None:
            gpu_rows, whole = self._gpu.rows(info, cast("Mapping[str, GpuMapping]", self._mappings))
            gpu_rows.on_wait = meter.waited
            local = gpu_rows
        else:
            from engram_client.lookup.cpu import SegmentRows

            (part,) = info.segments
            view = cast("CpuMapping", self._mappings[part.id]).view
            rows = SegmentRows(view, info.geometry, part.shard, part.row_format)
            rows.on_wait = meter.waited
            local, whole = rows, part.rank is None
        return MappedTable(
            info,
            local,
            self._rank,
            self._world_size,
            self._group,
            self._strict,
            self.check_usable,
            meter,
            whole=whole,
            split=self._split_reads,
        )

    def open_on_gpu(self, kernels: Kernels) -> None:
        """Opens all tables on the kernels' GPU, so that nothing is left to fail, or to be captured, later."""
        from engram_client.gpu import GpuTables

        self._gpu = GpuTables(kernels, list(self._infos.values()))
        for layer in self._infos:
            self.table(layer)

    def lookup_all(self, ids: Tensor, *, hashed: bool = False) -> Tensor:
        import torch

        if torch.compiler.is_compiling():
            from engram_client.lookup import ops

            rows: Tensor = ops.lookup_all(ids, self._number, hashed)
            return rows.transpose(0, 1)
        return self.lookup_all_now(ids, hashed).transpose(0, 1)

    def lookup_all_now(self, ids: Tensor, hashed: bool) -> Tensor:
        """bfloat16 `[layers, tokens, columns, 256]`; compiled code calls it through an operator."""
        import torch

        from engram_client.lookup.checks import check_ids

        tables = [self.table(layer) for layer in self._infos]
        columns = len(tables[0].columns)
        check_ids(ids, tables[0].local.device, hashed=False, columns=columns)
        if ids.dim() != 3 or ids.shape[1] != len(tables) or (hashed and ids.shape[2] != columns):
            expected = f"[tokens, {len(tables)}, {columns}]"
            raise IdsShapeInvalid(found=str(list(ids.shape)), expected=expected)
        tokens, _, width = ids.shape
        shape = (len(tables), tokens, width, ROW_VALUES)
        out = torch.empty(shape, dtype=torch.bfloat16, device=ids.device)
        split = tokens * width >= tables[0].splits_from
        at_once = not split and self._gpu is not None and self._gpu.lookup_all(tables, ids, out, hashed)
        refused: InvalidIds | None = None
        for index, table in enumerate(tables):
            try:
                if at_once:
                    table.count(tokens * width)
                    table.refuse_counted()
                else:
                    table.lookup(ids[:, index], out[index], hashed=hashed)
            except InvalidIds as error:  # raised when all is done: other ranks may wait for this one at the next table
                refused = refused or error
        if refused is not None:
            raise refused
        return out

    def check(self) -> None:
        self.check_usable("check()")
        for table in self._tables.values():
            table.check()

    def check_usable(self, what: str) -> None:
        """Raises ForkedClient in a forked child and ClientClosed after close()."""
        if os.getpid() != self._owner_pid:
            raise ForkedClient(owner=self._owner_pid)
        if self._closed:
            raise ClientClosed(what=what)

    def close(self) -> None:
        self._closed = True  # first, so that no lookup starts while tables go
        for table in list(self._tables.values()):
            table.close()
        self._reporter.close()
        if self._gpu is not None:
            self._gpu.close()
        for mapping in self._mappings.values():
            mapping.close()
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
