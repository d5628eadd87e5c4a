"""Lookups in a table whose shards lie in the memory of a whole group: each rank reads its own shard and
torch.distributed brings the rows together. Knows neither device nor backend: what runs on a device comes in
as `LocalRows`, what moves between ranks is a collective of the group's backend (gloo, NCCL).

Hash columns, where the shards follow them, travel as stored bytes (264 a row) in one all-gather, or in an
all-to-all if each rank has tokens of its own. Everything else is summed: rows of other shards are zero and
each row has one owner, so that a sum of the bits as int32 is the row itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engram_client.api import Tokens
from engram_client.errors import CountsInvalid, IdsShapeInvalid
from engram_client.layout import ROW_BYTES, Shard, TableGeometry
from engram_client.lookup import runtime
from engram_client.lookup.checks import Found, Invalid, bf16_out, check_counts, check_ids, unpack
from engram_client.lookup.wire import Wire

PADDING = -1
SUM_UP_TO_IDS = 1024
"""GPUs on NCCL: for so few ids the sum of zero-filled rows costs less than an exchange and the launch after it.
Two H200 over NVLink: 384 ids 9.9 against 11.5 us, 3,072 ids 19.5 against 14.7 us (tests/bench/groups.py)."""


class LocalRows(Protocol):
    """The shard of this rank on its device; `lookup.cpu.SegmentRows` is the reference."""

    @property
    def device(self) -> torch.device: ...

    @property
    def shard(self) -> Shard: ...

    @property
    def counts_itself(self) -> bool:
        """Whether lookups tell nothing of invalid ids, for the device counts them when it comes to them."""
        ...

    @property
    def counted(self) -> Invalid:
        """Invalid ids that the device counted by itself since the start, and that no call returned."""
        ...

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Found: ...

    def lookup_raw(
        self, ids: Tensor, *, hashed: bool, columns: tuple[int, int] | None = None, count: bool = True
    ) -> Found: ...

    def lookup_stored(self, ids: Tensor, values: Tensor, scales: Tensor, *, hashed: bool) -> Invalid: ...

    def count_invalid(self, ids: Tensor, *, hashed: bool) -> Invalid: ...

    def assemble(self, received: Tensor, ids: Tensor, out: Tensor, *, pieces: int, hashed: bool) -> Invalid:
        """Dequantises what an exchange of raw rows left, uint8 `[pieces, tokens, columns / pieces, 264]` in any
        shape, into `out`, bfloat16 `[tokens, columns, 256]`; tells of the invalid ones of `ids`, which are hashed
        where there is more than one piece."""
        ...

    def begin(
        self,
        ids: Tensor,
        *,
        hashed: bool,
        raw: bool = False,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Callable[[], Found]: ...

    def close(self) -> None: ...


class ShardedLookup:
    """Lookups of one table by the ranks of `group` (None = WORLD) together.

    Every call of `lookup` is a collective: all ranks make it, those without tokens too.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
        geometry: TableGeometry,
        local: LocalRows,
        *,
        whole: bool = False,
    ) -> None:
        """whole: every rank's `local` has the whole table, so that nothing moves between ranks.

        Raises GroupInvalid when the group does not have world_size ranks, and GroupRankMismatch when this
        process has another place in it than `rank`. With whole, or world_size 1, no group is looked at."""
        self._rank = rank
        self._world_size = world_size
        self._columns = len(geometry.columns)
        self._local = local
        self._alone = whole or world_size == 1
        self._sum_up_to = 0
        if not self._alone:
            self._wire = Wire(group, rank, world_size, local.device)
            self._sum_up_to = SUM_UP_TO_IDS if self._wire.direct else 0

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
    ) -> Found:
        """Rows of `ids`, bfloat16 `[*ids.shape, 256]`; arguments as `engram_client.api.Table.lookup` says.

        tokens "own": ids' first dimension counts this rank's tokens and all other dimensions are equal on all
        ranks. Without counts they are exchanged first, which waits for the device.
        Invalid ids are those among the ids that this rank passed.
        Raises IdsDtypeInvalid, IdsDeviceInvalid, IdsShapeInvalid, OutInvalid or CountsInvalid, before anything
        was sent where one rank alone can tell.
        """
        if self._alone:
            if counts is not None:
                check_ids(ids, self._local.device, hashed, self._columns)
                self._check_counts(ids, counts, same=tokens == "same")
            return self._local.lookup(ids, out, hashed=hashed)
        check_ids(ids, self._local.device, hashed, self._columns)
        out = bf16_out(out, ids.shape, self._local.device)
        if tokens == "same":
            self._check_counts(ids, counts, same=True)
            if self._by_columns(hashed) and ids.numel() > self._sum_up_to:
                return self._exchange(self._read_columns(ids), ids, out)
            return self._sum(self._local.lookup(ids, out, hashed=hashed))
        all_ids, counts = self._everybodys(ids, counts)
        if all_ids is None:
            return Found(out, self._local.count_invalid(ids, hashed=hashed))
        if self._by_columns(hashed):
            return Found(out, self._own_by_columns(all_ids, counts, ids, out))
        self._own_by_sum(all_ids, counts, out, hashed)
        return Found(out, self._local.count_invalid(ids, hashed=hashed))

    def lookup_stored(
        self,
        ids: Tensor,
        values: Tensor,
        scales: Tensor,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
    ) -> Invalid:
        """As `lookup`, but values and scales as stored: uint8 `[*ids.shape, 256]` and `[*ids.shape, 8]`."""
        if self._alone:
            self._check_counts(ids, counts, same=tokens == "same")
            return self._local.lookup_stored(ids, values, scales, hashed=hashed)
        check_ids(ids, self._local.device, hashed, self._columns)
        if tokens == "same":
            self._check_counts(ids, counts, same=True)
            packed, invalid = self._local.lookup_raw(ids, hashed=hashed)
            if packed.numel():
                self._wire.all_reduce(_as_int32(packed))
        else:
            all_ids, counts = self._everybodys(ids, counts)
            packed = values.new_empty((*ids.shape, ROW_BYTES))
            if all_ids is not None:
                self._own_by_sum(all_ids, counts, packed, hashed)
            invalid = self._local.count_invalid(ids, hashed=hashed)
        unpack(packed, values, scales)
        return invalid

    def prefetch(
        self, ids: Tensor, *, hashed: bool = False, tokens: Tokens = "same", counts: Sequence[int] | None = None
    ) -> Callable[[], Found]:
        """Starts what needs no other rank; the call that it returns does the rest, and is a collective where
        `lookup` is one. With the tokens of each rank its own, ids travel first: then all is done in that call."""
        check_ids(ids, self._local.device, hashed, self._columns)
        self._check_counts(ids, counts, same=tokens == "same")
        if self._alone:
            return self._local.begin(ids, hashed=hashed)
        if tokens == "own":
            return lambda: self.lookup(ids, hashed=hashed, tokens=tokens, counts=counts)
        if not self._by_columns(hashed) or ids.numel() <= self._sum_up_to:
            begun = self._local.begin(ids, hashed=hashed)
            return lambda: self._sum(begun())
        begun = self._local.begin(ids, hashed=True, raw=True, columns=self._local.shard.columns, count=False)
        return lambda: self._exchange(begun().rows, ids, bf16_out(None, ids.shape, self._local.device))

    def _by_columns(self, hashed: bool) -> bool:
        return hashed and self._local.shard.columns is not None

    def _read_columns(self, ids: Tensor) -> Tensor:
        """This rank's columns of all tokens, as stored."""
        return self._local.lookup_raw(ids, hashed=True, columns=self._local.shard.columns, count=False).rows

    def _exchange(self, mine: Tensor, ids: Tensor, out: Tensor) -> Found:
        """Every rank gets all columns."""
        if not mine.numel():
            return Found(out, Invalid())
        everything = mine.new_empty(self._world_size * mine.numel())
        self._wire.all_gather(everything, mine.view(-1))
        return Found(out, self._local.assemble(everything, ids, out, pieces=self._world_size, hashed=True))

    def _sum(self, found: Found) -> Found:
        if found.rows.numel():
            self._wire.all_reduce(_as_int32(found.rows))
        return found

    def _own_by_columns(self, all_ids: Tensor, counts: Sequence[int], ids: Tensor, out: Tensor) -> Invalid:
        """Each rank reads its columns of everybody's tokens and sends every rank those of its tokens."""
        all_ids = all_ids.view(all_ids.shape[0], -1, self._columns)
        row_bytes = all_ids.shape[1] * (self._columns // self._world_size) * ROW_BYTES
        send = self._read_columns(all_ids)
        mine = counts[self._rank]
        receive = send.new_empty(self._world_size * mine * row_bytes)
        sizes = [mine * row_bytes] * self._world_size, [count * row_bytes for count in counts]
        self._wire.all_to_all(receive, send.view(-1), *sizes)
        if not mine:
            return Invalid()
        return self._local.assemble(receive, ids, out, pieces=self._world_size, hashed=True)

    def _own_by_sum(self, all_ids: Tensor, counts: Sequence[int], out: Tensor, hashed: bool) -> None:
        """out: bfloat16, or uint8 for rows as stored."""
        if hashed:
            all_ids = all_ids.view(all_ids.shape[0], -1, self._columns)
        look = self._local.lookup_raw if out.dtype == torch.uint8 else self._local.lookup
        rows = look(all_ids, hashed=hashed, count=False).rows
        self._wire.all_reduce(_as_int32(rows))
        begin = sum(counts[: self._rank])
        out.copy_(rows[begin : begin + counts[self._rank]].view(out.shape))

    def _everybodys(self, ids: Tensor, counts: Sequence[int] | None) -> tuple[Tensor | None, list[int]]:
        """The ids of all ranks in rank order, int64 `[sum of counts, ids a token]` (None if there are none),
        and the counts."""
        if ids.dim() == 0:
            raise IdsShapeInvalid(found="[]", expected='[tokens, ...] with tokens="own"')
        tokens = ids.shape[0]
        width = math.prod(ids.shape[1:])
        if counts is None:
            counts, width = self._exchange_counts(tokens, width)
        else:
            self._check_counts(ids, counts)
            counts = [int(count) for count in counts]
        longest = max(counts)
        if not longest or not width:
            return None, counts
        padded = ids.new_full((longest, width), PADDING, dtype=torch.int64)
        if tokens:
            padded[:tokens] = ids.reshape(tokens, width)
        gathered = padded.new_empty((self._world_size, longest, width))
        self._wire.all_gather(gathered.view(-1), padded.view(-1))
        return torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)]), counts

    def _exchange_counts(self, tokens: int, width: int) -> tuple[list[int], int]:
        """Everybody's number of tokens, and the number of ids a token: a rank without tokens need not know it.

        Raises IdsShapeInvalid, on every rank, when ranks with tokens disagree about the latter.
        """
        if self._local.counts_itself and runtime.capturing():
            raise CountsInvalid(
                found="None", expected=f"the tokens of all {self._world_size} ranks: a graph cannot ask"
            )
        mine = torch.tensor([tokens, width], dtype=torch.int64, device=self._local.device)
        everybodys = mine.new_empty(2 * self._world_size)
        self._wire.all_gather(everybodys, mine)
        pairs = everybodys.view(-1, 2).tolist()
        widths = {each for count, each in pairs if count}
        if len(widths) > 1:
            raise IdsShapeInvalid(found=f"{sorted(widths)} ids a token", expected="equal numbers on all ranks")
        return [count for count, _ in pairs], widths.pop() if widths else width

    def _check_counts(self, ids: Tensor, counts: Sequence[int] | None, same: bool = False) -> None:
        check_counts(ids, counts, self._rank, self._world_size, same=same)


def _as_int32(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)
