"""Lookups of a table that every rank of a group has whole in host memory, each rank reading a part of the rows.

Reading rows of host memory costs a GPU's link the same time for each, and ranks that pass equal ids would all read
the same rows. So each reads a part over a link of its own, and an all-gather brings the stored bytes (264 a row)
together, between GPUs over NVLink. The parts are hash columns where they divide evenly: then a rank's rows lie in a
part of the table, which its GPU's address translation covers better, and repeated ids meet on one rank. Else they
are tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from engram_client.api import Tokens
from engram_client.layout import ROW_BYTES, TableGeometry
from engram_client.lookup.checks import Found, Invalid, bf16_out, check_counts, check_ids, unpack
from engram_client.lookup.collective import LocalRows, ShardedLookup
from engram_client.lookup.wire import Wire

SPLIT_FROM_IDS = 1024
"""GPUs on NCCL: for fewer ids the exchange, and the launch after it, cost more than half of the reads."""


def splits_from(wire: Wire) -> int:
    """Ids from which on reads are split. Ranks for which it differs would wait for each other."""
    return SPLIT_FROM_IDS if wire.direct else 1


class _Part(NamedTuple):
    """What this rank reads of a batch."""

    ids: Tensor
    columns: tuple[int, int] | None
    """Of `ids`; None for all of them."""
    tokens: int
    """Tokens that each rank sends, where tokens are shared out: the last ranks may have fewer to read. Else 0."""


class SplitLookup:
    """Lookups of one table by the ranks of `group` (None = WORLD) together; `local` has the whole table.

    A call of `lookup` for `from_ids` ids or more is a collective, unless tokens are "own".
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        world_size: int,
        geometry: TableGeometry,
        local: LocalRows,
    ) -> None:
        """Raises GroupInvalid or GroupRankMismatch: see `Wire`."""
        self._rank = rank
        self._world_size = world_size
        self._columns = len(geometry.columns)
        self._local = local
        self._alone = ShardedLookup(group, rank, world_size, geometry, local, whole=True)
        self._wire = Wire(group, rank, world_size, local.device)
        self.from_ids = splits_from(self._wire)
        each = self._columns // world_size
        self._mine = None if self._columns % world_size else (each * rank, each * (rank + 1))

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
    ) -> Found:
        """As `ShardedLookup.lookup`, and raises the same."""
        if not self._splits(ids, hashed, tokens):
            return self._alone.lookup(ids, out, hashed=hashed, tokens=tokens, counts=counts)
        self._check_counts(ids, counts)
        out = bf16_out(out, ids.shape, self._local.device)
        part = self._part_of(ids, hashed)
        return self._together(self._read(part, hashed), part, ids, out, hashed)

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
        """As `ShardedLookup.lookup_stored`."""
        if not self._splits(ids, hashed, tokens):
            return self._alone.lookup_stored(ids, values, scales, hashed=hashed, tokens=tokens, counts=counts)
        self._check_counts(ids, counts)
        part = self._part_of(ids, hashed)
        rows = self._everything(self._read(part, hashed), part)
        if part.columns:  # [ranks, tokens, columns of each, 264]
            each = self._columns // self._world_size
            rows = rows.view(self._world_size, -1, each, ROW_BYTES).transpose(0, 1).reshape(-1)
        stored = rows[: ids.numel() * ROW_BYTES].view(*ids.shape, ROW_BYTES)
        unpack(stored, values, scales)
        return self._local.count_invalid(ids, hashed=hashed)

    def prefetch(
        self, ids: Tensor, *, hashed: bool = False, tokens: Tokens = "same", counts: Sequence[int] | None = None
    ) -> Callable[[], Found]:
        """Starts the reads of this rank's part; the call that it returns exchanges them."""
        if not self._splits(ids, hashed, tokens):
            return self._alone.prefetch(ids, hashed=hashed, tokens=tokens, counts=counts)
        self._check_counts(ids, counts)
        part = self._part_of(ids, hashed)
        begun = self._local.begin(part.ids, hashed=hashed, raw=True, columns=part.columns, count=False)

        def finish() -> Found:
            out = bf16_out(None, ids.shape, self._local.device)
            return self._together(begun().rows, part, ids, out, hashed)

        return finish

    def _splits(self, ids: Tensor, hashed: bool, tokens: Tokens) -> bool:
        check_ids(ids, self._local.device, hashed, self._columns)
        return tokens == "same" and ids.numel() >= self.from_ids

    def _check_counts(self, ids: Tensor, counts: Sequence[int] | None) -> None:
        check_counts(ids, counts, self._rank, self._world_size, same=True)

    def _part_of(self, ids: Tensor, hashed: bool) -> _Part:
        if hashed and self._mine is not None:
            return _Part(ids, self._mine, 0)
        rows = ids.reshape(-1, self._columns) if hashed else ids.reshape(-1)
        each = -(-rows.shape[0] // self._world_size)
        return _Part(rows[each * self._rank : each * (self._rank + 1)], None, each)

    def _read(self, part: _Part, hashed: bool) -> Tensor:
        return self._local.lookup_raw(part.ids, hashed=hashed, columns=part.columns, count=False).rows

    def _everything(self, mine: Tensor, part: _Part) -> Tensor:
        """The stored bytes of all parts, flat, in rank order."""
        if mine.shape[0] < part.tokens:
            padded = mine.new_empty((part.tokens, *mine.shape[1:]))  # what is left of it is cut off again
            padded[: mine.shape[0]] = mine
            mine = padded
        everything = mine.new_empty(self._world_size * mine.numel())
        self._wire.all_gather(everything, mine.view(-1))
        return everything

    def _together(self, mine: Tensor, part: _Part, ids: Tensor, out: Tensor, hashed: bool) -> Found:
        """The rows of the whole batch in `out`, from what this rank has read of it."""
        received = self._everything(mine, part)[: ids.numel() * ROW_BYTES]
        pieces = self._world_size if part.columns else 1
        return Found(out, self._local.assemble(received, ids, out, pieces=pieces, hashed=hashed))
