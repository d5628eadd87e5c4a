"""One table as a rank reads it: counts and refuses what the lookups report. Needs torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from engram_client.api import RawRows
from engram_client.counters import Meter
from engram_client.errors import InvalidIds, OutInvalid
from engram_client.identity import TableIdentity
from engram_client.layout import ROW_SCALES, ROW_VALUES
from engram_client.lookup import numbers, ops, runtime
from engram_client.lookup.checks import Found, Invalid, check_ids, stored_out
from engram_client.lookup.collective import LocalRows, ShardedLookup
from engram_client.lookup.cuda import GpuRows
from engram_client.lookup.pending import PendingRows
from engram_client.lookup.split import SplitLookup
from engram_client.protocol import TableInfo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from engram_client.api import Tokens


_Again = Callable[[Tensor, Tensor, bool], bool]


class MappedTable:
    """A mapped table: see `engram_client.api.Table`.

    local: its rows on the device; whole: all of them are there; split: the group's ranks share out the reads of a
    larger batch all the same. `check_usable` raises when the client behind it is closed or forked. `meter` counts what
    is looked up.
    """

    def __init__(
        self,
        info: TableInfo,
        local: LocalRows,
        rank: int,
        world_size: int,
        group: ProcessGroup | None,
        strict: bool,
        check_usable: Callable[[str], None],
        meter: Meter,
        *,
        whole: bool,
        split: bool = False,
    ) -> None:
        self._info = info
        self._strict = strict
        self._check_usable = check_usable
        self._meter = meter
        self._returned = 0
        self._counting = threading.Lock()
        self._seen = 0
        self._found = Invalid()
        self._name = f"table {info.geometry.layer_id}"
        self.local = local
        self.whole = whole
        self.splits_from = sys.maxsize
        """Ids from which on a lookup is shared out among the ranks."""
        self._lookup: ShardedLookup | SplitLookup
        alone = whole or world_size == 1
        together = world_size > 1 and (split or not whole)
        self._refuses_before = strict and not together
        self._refuses_after = strict and together
        """Where lookups may be collectives a rank joins them before it raises what was counted since the last one: the
        others, whose kernels may come to the invalid ids later, join too."""
        again = local.lookup_again if alone and isinstance(local, GpuRows) else None
        if split and world_size > 1:
            self._lookup = SplitLookup(group, rank, world_size, info.geometry, local)
            self.splits_from = self._lookup.from_ids
            self._again = None if again is None else self._unless_split(again)
        else:
            self._lookup = ShardedLookup(group, rank, world_size, info.geometry, local, whole=whole)
            self._again = again
        self._number = numbers.register(self)

    def _unless_split(self, again: _Again) -> _Again:
        def few(ids: Tensor, out: Tensor, hashed: bool) -> bool:
            return isinstance(ids, Tensor) and ids.numel() < self.splits_from and again(ids, out, hashed)

        return few

    def __repr__(self) -> str:
        return f"<table of layer {self.layer_id}: {self.rows} rows, {self.invalid_ids} invalid ids seen>"

    @property
    def layer_id(self) -> int:
        return self._info.geometry.layer_id

    @property
    def rows(self) -> int:
        return self._info.geometry.rows

    @property
    def columns(self) -> tuple[int, ...]:
        return self._info.geometry.columns

    @property
    def identity(self) -> TableIdentity:
        return self._info.identity

    @property
    def invalid_ids(self) -> int:
        return self._returned + self.local.counted.count

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
        if torch.compiler.is_compiling():
            return self._compiled(ids, out, hashed, tokens, counts, raw)
        if self._again is not None and counts is None and not raw and isinstance(out, Tensor):
            self._check_usable(self._name)
            if self._refuses_before:
                self.refuse_counted()
            if self._again(ids, out, hashed):
                self.count(ids.numel())
                if self._refuses_after:
                    self.refuse_counted()
                return out
        if raw:
            return RawRows(*self.lookup_raw_now(ids, out, hashed=hashed, tokens=tokens, counts=counts))
        return self.lookup_now(ids, out, hashed=hashed, tokens=tokens, counts=counts)

    def _compiled(
        self,
        ids: Tensor,
        out: Any,
        hashed: bool,
        tokens: Tokens,
        counts: Sequence[int] | None,
        raw: bool,
    ) -> Tensor | RawRows:
        if raw:
            found = RawRows(*ops.lookup_raw(ids, self._number, hashed, tokens, counts))
            if out is None:
                return found
            out[0].copy_(found.values)
            out[1].copy_(found.scales)
            return RawRows(out[0], out[1])
        if out is None:
            rows: Tensor = ops.lookup(ids, self._number, hashed, tokens, counts)
            return rows
        ops.lookup_out(ids, out, self._number, hashed, tokens, counts)
        given: Tensor = out
        return given

    def lookup_now(
        self, ids: Tensor, out: Any, *, hashed: bool, tokens: Tokens, counts: Sequence[int] | None
    ) -> Tensor:
        """The lookup itself, which compiled code calls through an operator."""
        self._check_usable(self._name)
        if self._refuses_before:
            self.refuse_counted()
        try:
            found = self._lookup.lookup(ids, out, hashed=hashed, tokens=tokens, counts=counts)
        except ValueError:  # the segment is gone: closed by another thread since the look above?
            self._check_usable(self._name)
            raise
        try:
            return self._settled(found)
        finally:
            self.count(ids.numel())

    def lookup_raw_now(
        self,
        ids: Tensor,
        out: Any,
        *,
        hashed: bool,
        tokens: Tokens,
        counts: Sequence[int] | None,
    ) -> tuple[Tensor, Tensor]:
        self._check_usable(self._name)
        if self._refuses_before:
            self.refuse_counted()
        check_ids(ids, self.local.device, hashed, len(self.columns))
        if out is not None and not (isinstance(out, tuple) and len(out) == 2):
            raise OutInvalid(found=type(out).__name__, expected="values and scales, for raw rows")
        values, scales = out or (None, None)
        values = stored_out(values, ids.shape, ROW_VALUES, self.local.device)
        scales = stored_out(scales, ids.shape, ROW_SCALES, self.local.device)
        invalid = self._lookup.lookup_stored(ids, values, scales, hashed=hashed, tokens=tokens, counts=counts)
        try:
            self._settled(Found(values, invalid))
        finally:
            self.count(ids.numel())
        return values, scales

    def prefetch(
        self, ids: Tensor, *, hashed: bool = False, tokens: Tokens = "same", counts: Sequence[int] | None = None
    ) -> PendingRows:
        if torch.compiler.is_compiling():
            from engram_client.lookup.uncompiled import eagerly

            begun: PendingRows = eagerly(self.prefetch, ids, hashed=hashed, tokens=tokens, counts=counts)
            return begun
        self._check_usable(self._name)
        if self._refuses_before:
            self.refuse_counted()
        finish = self._lookup.prefetch(ids, hashed=hashed, tokens=tokens, counts=counts)

        def rows() -> Tensor:
            self._check_usable(self._name)
            try:
                return self._settled(finish())
            finally:
                self.count(ids.numel())

        return PendingRows(rows, self._name)

    def check(self) -> None:
        """Raises InvalidIds when ids were counted since the last time that this, or a strict lookup, raised."""
        total = self.invalid_ids
        if total > self._seen:
            first = self._found if self._found.count else self.local.counted
            new, self._seen, self._found = total - self._seen, total, Invalid()
            raise InvalidIds(layer_id=self.layer_id, count=new, first=first.first, position=first.position)

    def refuse_counted(self) -> None:
        """For a strict client of a device that counts by itself: raises InvalidIds for what it has counted since. Never
        in the middle of a capture."""
        if self._strict and self.local.counts_itself and self.invalid_ids > self._seen and not runtime.capturing():
            self.check()

    def count(self, ids: int) -> None:
        """That many ids have been looked up."""
        self._meter.looked_up(ids, lambda: self.invalid_ids)

    def _settled(self, found: Found) -> Tensor:
        invalid = found.invalid
        if invalid.count:
            with self._counting:
                self._returned += invalid.count
                self._found = self._found.then(invalid, 0)
            if self._strict:
                self.check()
        if self._refuses_after:
            self.refuse_counted()
        return found.rows

    def close(self) -> None:
        """Gives the mapped memory back; only the client calls it."""
        self._meter.invalid_ids = self.invalid_ids
        self.local.close()
