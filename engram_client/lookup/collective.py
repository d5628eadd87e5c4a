"""Lookups in a table whose shards lie in the memory of a whole group: each rank reads its own shard and
torch.distributed brings the rows together. Knows neither device nor backend: what runs on a device comes in
as `LocalRows`, what moves between ranks is a collective of the group's backend (gloo, NCCL).

Hash columns, where the shards follow them, travel as stored bytes (264 a row) in one all-gather, or in an
all-to-all if each rank has tokens of its own. Everything else is summed: rows of other shards are zero and
each row has one owner, so that a sum of the bits as int32 is the row itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engram_client.api import Tokens
from engram_client.errors import CountsInvalid, GroupInvalid, GroupRankMismatch, IdsShapeInvalid
from engram_client.layout import ROW_BYTES, ROW_VALUES, Shard, TableGeometry
from engram_client.lookup.checks import Found, Invalid, bf16_out, check_ids

PADDING = -1

# One function; torch 2.13 renamed it and warns about the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class LocalRows(Protocol):
    """The shard of this rank on its device; `lookup.cpu.SegmentRows` is the reference."""

    @property
    def device(self) -> torch.device: ...

    @property
    def shard(self) -> Shard: ...

    def lookup(
        self, ids: Tensor, out: Tensor | None = None, *, hashed: bool, columns: tuple[int, int] | None = None
    ) -> Found: ...

    def lookup_raw(
        self, ids: Tensor, out: Tensor | None = None, *, hashed: bool, columns: tuple[int, int] | None = None
    ) -> Found: ...

    def count_invalid(self, ids: Tensor, *, hashed: bool) -> Invalid: ...

    def assemble(self, packed: Tensor, order: Tensor, out: Tensor) -> None: ...


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
        self._group = group
        self._rank = rank
        self._world_size = world_size
        self._columns = len(geometry.columns)
        self._local = local
        self._alone = whole or world_size == 1
        if not self._alone:
            found = dist.get_world_size(group) if dist.is_initialized() else 1
            if found != world_size:
                raise GroupInvalid(found=found, rank=rank, world_size=world_size)
            group_rank = dist.get_rank(group)
            if group_rank != rank:
                raise GroupRankMismatch(group_rank=group_rank, rank=rank)

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
        check_ids(ids, self._local.device, hashed, self._columns)
        if self._alone:
            self._check_counts(ids, counts, same=tokens == "same")
            return self._local.lookup(ids, out, hashed=hashed)
        out = bf16_out(out, ids.shape, self._local.device)
        by_columns = hashed and self._local.shard.columns is not None
        if tokens == "same":
            self._check_counts(ids, counts, same=True)
            return self._same_by_columns(ids, out) if by_columns else self._same_by_sum(ids, out, hashed)
        all_ids, counts = self._everybodys(ids, counts)
        if all_ids is not None:
            if by_columns:
                self._own_by_columns(all_ids, counts, out)
            else:
                self._own_by_sum(all_ids, counts, out, hashed)
        return Found(out, self._local.count_invalid(ids, hashed=hashed))

    def _same_by_columns(self, ids: Tensor, out: Tensor) -> Found:
        """Each rank reads its columns of all tokens; every rank gets all columns."""
        own = self._local.shard.columns
        rows = ids.numel() // self._columns
        if rows:
            mine = self._local.lookup_raw(ids, hashed=True, columns=own).rows
            everything = mine.new_empty(self._world_size * mine.numel())
            _all_gather(everything, mine.view(-1), group=self._group)
            self._interleave(everything, rows, out)
        return Found(out, self._local.count_invalid(ids, hashed=True))

    def _same_by_sum(self, ids: Tensor, out: Tensor, hashed: bool) -> Found:
        found = self._local.lookup(ids, out, hashed=hashed)
        if ids.numel():
            dist.all_reduce(_as_int32(out), group=self._group)
        return found

    def _own_by_columns(self, all_ids: Tensor, counts: Sequence[int], out: Tensor) -> None:
        """Each rank reads its columns of everybody's tokens and sends every rank those of its tokens."""
        own = self._local.shard.columns
        all_ids = all_ids.view(all_ids.shape[0], -1, self._columns)
        row_bytes = all_ids.shape[1] * (self._columns // self._world_size) * ROW_BYTES
        send = self._local.lookup_raw(all_ids, hashed=True, columns=own).rows
        mine = counts[self._rank]
        receive = send.new_empty(self._world_size * mine * row_bytes)
        dist.all_to_all_single(
            receive,
            send.view(-1),
            output_split_sizes=[mine * row_bytes] * self._world_size,
            input_split_sizes=[count * row_bytes for count in counts],
            group=self._group,
        )
        if mine:
            self._interleave(receive, mine * all_ids.shape[1], out)

    def _own_by_sum(self, all_ids: Tensor, counts: Sequence[int], out: Tensor, hashed: bool) -> None:
        if hashed:
            all_ids = all_ids.view(all_ids.shape[0], -1, self._columns)
        rows = self._local.lookup(all_ids, hashed=hashed).rows
        dist.all_reduce(_as_int32(rows), group=self._group)
        begin = sum(counts[: self._rank])
        out.copy_(rows[begin : begin + counts[self._rank]].view(out.shape))

    def _interleave(self, received: Tensor, rows: int, out: Tensor) -> None:
        """received: stored rows `[rank, rows, columns of a rank]`; out: dequantised `[rows, column, 256]`."""
        width = self._columns // self._world_size
        order = torch.arange(self._world_size * rows * width, device=received.device)
        order = order.view(self._world_size, rows, width).transpose(0, 1).reshape(rows, self._columns)
        self._local.assemble(received.view(-1, ROW_BYTES), order, out.view(rows, self._columns, ROW_VALUES))

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
        _all_gather(gathered.view(-1), padded.view(-1), group=self._group)
        return torch.cat([gathered[rank, :count] for rank, count in enumerate(counts)]), counts

    def _exchange_counts(self, tokens: int, width: int) -> tuple[list[int], int]:
        """Everybody's number of tokens, and the number of ids a token: a rank without tokens need not know it.

        Raises IdsShapeInvalid, on every rank, when ranks with tokens disagree about the latter.
        """
        mine = torch.tensor([tokens, width], dtype=torch.int64, device=self._local.device)
        everybodys = mine.new_empty(2 * self._world_size)
        _all_gather(everybodys, mine, group=self._group)
        pairs = everybodys.view(-1, 2).tolist()
        widths = {each for count, each in pairs if count}
        if len(widths) > 1:
            raise IdsShapeInvalid(found=f"{sorted(widths)} ids a token", expected="equal numbers on all ranks")
        return [count for count, _ in pairs], widths.pop() if widths else width

    def _check_counts(self, ids: Tensor, counts: Sequence[int] | None, same: bool = False) -> None:
        if counts is None:
            return
        tokens = ids.shape[0] if ids.dim() else 1
        good = len(counts) == self._world_size and all(count >= 0 for count in counts)
        if good and (all(count == tokens for count in counts) if same else counts[self._rank] == tokens):
            return
        where = "everywhere" if same else f"at {self._rank}"
        raise CountsInvalid(found=str(list(counts)), expected=f"{self._world_size} counts, {tokens} {where}")


def _as_int32(rows: Tensor) -> Tensor:
    return rows.view(torch.int32)
