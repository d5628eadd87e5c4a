"""One table as a rank reads it: counts and refuses what the lookups report. Needs torch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engram_client.counters import Counters
from engram_client.errors import InvalidIds
from engram_client.identity import TableIdentity
from engram_client.lookup.collective import ShardedLookup
from engram_client.lookup.cpu import SegmentRows
from engram_client.protocol import TableInfo

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from engram_client.api import Tokens


class MappedTable:
    """A mapped table: see `engram_client.api.Table`.

    `check_usable` raises when the client behind it is closed or forked. `counters` are the client's, and
    `tick` lets it report them.
    """

    def __init__(
        self,
        info: TableInfo,
        segment: memoryview,
        rank: int,
        world_size: int,
        group: ProcessGroup | None,
        strict: bool,
        check_usable: Callable[[str], None],
        counters: Counters,
        tick: Callable[[], None],
    ) -> None:
        self._info = info
        self._strict = strict
        self._check_usable = check_usable
        self._counters = counters
        self._tick = tick
        self._invalid = 0
        self._counting = threading.Lock()
        (part,) = info.segments
        self._local = SegmentRows(segment, info.geometry, part.shard, part.row_format)
        self._lookup = ShardedLookup(group, rank, world_size, info.geometry, self._local, whole=part.rank is None)

    def __repr__(self) -> str:
        return f"<table of layer {self.layer_id}: {self.rows} rows, {self._invalid} invalid ids seen>"

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
        return self._invalid

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool = False,
        tokens: Tokens = "same",
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        self._check_usable(f"table {self.layer_id}")
        try:
            found = self._lookup.lookup(ids, out, hashed=hashed, tokens=tokens, counts=counts)
        except ValueError:  # the segment is gone: closed by another thread since the look above?
            self._check_usable(f"table {self.layer_id}")
            raise
        self._counters.rows += ids.numel()
        self._counters.invalid_ids += found.invalid.count
        self._tick()
        if found.invalid.count:
            with self._counting:
                self._invalid += found.invalid.count
            if self._strict:
                raise InvalidIds(
                    layer_id=self.layer_id,
                    count=found.invalid.count,
                    first=found.invalid.first,
                    position=found.invalid.position,
                )
        return found.rows

    def close(self) -> None:
        """Gives the mapped memory back; only the client calls it."""
        self._local.close()
