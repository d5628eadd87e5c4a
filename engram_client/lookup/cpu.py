"""Lookups on the CPU: the reference that every other path must equal bit for bit.

The work is done by `engram_client.rows`, which releases the GIL; large batches are cut among threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engram_client import rows
from engram_client.layout import ROW_BYTES, RowFormat, Shard, TableGeometry
from engram_client.lookup.checks import Found, Invalid, bf16_out, check_ids, raw_out, unpack

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from engram_client._pure import AnyBuffer

CPU = torch.device("cpu")

INLINE_IDS = 1024
"""Ids a thread gets at least: some 0.1 ms of work, several times what handing it to a thread costs."""

_pools: dict[str, ThreadPoolExecutor] = {}
# The threads of a pool do not survive a fork; a child that found the pool would wait for them for ever.
os.register_at_fork(after_in_child=_pools.clear)


class SegmentRows:
    """One shard of a table as it lies in a mapped segment.

    segment: readable buffer with the bytes of the shard's rows; only `close` gives it back.
    `device` is where ids and results live.
    """

    device = CPU
    counts_itself = False

    def __init__(self, segment: AnyBuffer, geometry: TableGeometry, shard: Shard, row_format: RowFormat) -> None:
        """Raises ValueError when the segment is too small for the shard."""
        self._segment = memoryview(cast("Buffer", segment))
        needed = shard.rows * ROW_BYTES
        if self._segment.nbytes < needed:
            raise ValueError(f"the segment has {self._segment.nbytes} bytes and the shard needs {needed}")
        self.geometry = geometry
        self.shard = shard
        self.row_format = row_format
        self._starts = np.array(geometry.column_starts, np.int64)
        self._under_way: set[Future[Found]] = set()
        self.on_wait: Callable[[bool], None] = lambda was_ready: None
        """Hears, when a lookup that was begun is waited for, whether it was over."""

    def close(self) -> None:
        """Gives the buffer back, so that its owner can unmap it, when the lookups that were begun are over.
        Raises BufferError while another lookup reads it."""
        wait(self._under_way)
        self._segment.release()

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Found:
        """The rows of `ids` that this shard owns, dequantised; all others are zero.

        ids: int32 or int64, any shape and strides; `[..., C]` for C hash columns if `hashed`.
        columns: `(first, last)`, with hashed ids only: looks up those columns of ids.
        Returns bfloat16 `[*ids.shape, 256]` (`[..., last - first, 256]` given columns), in `out` if given.

        Negative ids are padding. Ids past the table's end are counted as invalid; so are hashed ids outside
        their column, except 0. With `columns`, only ids in these columns are judged; positions always count
        over the whole of ids. count=False: invalid ids are not reported.
        Raises IdsDtypeInvalid, IdsDeviceInvalid, IdsShapeInvalid or OutInvalid.
        """
        found = self._look(ids, out, bf16_out, hashed, columns)
        return found if count else Found(found.rows, Invalid())

    def lookup_raw(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Found:
        """As `lookup`, but the packed bytes as they are: uint8 `[..., 264]`, which an exchange moves cheaper."""
        found = self._look(ids, out, raw_out, hashed, columns)
        return found if count else Found(found.rows, Invalid())

    def count_invalid(self, ids: Tensor, *, hashed: bool) -> Invalid:
        """What `lookup` would report about `ids`; reads no row."""
        return count_invalid(ids, self.geometry, hashed)

    @property
    def counted(self) -> Invalid:
        """Invalid ids that were counted and not returned: none, on a CPU."""
        return Invalid()

    def lookup_stored(self, ids: Tensor, values: Tensor, scales: Tensor, *, hashed: bool) -> Invalid:
        """As `lookup`, but values and scales as stored, into uint8 `[*ids.shape, 256]` and `[*ids.shape, 8]`."""
        packed, invalid = self.lookup_raw(ids, hashed=hashed)
        unpack(packed, values, scales)
        return invalid

    def assemble(self, received: Tensor, ids: Tensor, out: Tensor, *, pieces: int, hashed: bool) -> Invalid:
        """See `engram_client.lookup.collective.LocalRows.assemble`."""
        packed = received.view(-1, ROW_BYTES)
        count = packed.shape[0]
        order = torch.arange(count)
        if pieces > 1:
            order = order.view(pieces, -1, len(self.geometry.columns) // pieces).transpose(0, 1).reshape(-1)
        everything = Shard(row_start=0, row_stop=count, columns=None)
        _gather(packed.numpy(), RowFormat.PACKED, everything, count, None, _plane(order, hashed=False), out)
        return self.count_invalid(ids, hashed=hashed)

    def begin(
        self,
        ids: Tensor,
        *,
        hashed: bool,
        raw: bool = False,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Callable[[], Found]:
        """Starts a lookup (or, with `raw`, a lookup_raw) in another thread; the call that it returns waits for it.

        A thread of its own, for the lookup itself may wait for those of the lookups' pool.
        """
        check_ids(ids, CPU, hashed or columns is not None, len(self.geometry.columns))
        how: Callable[..., Found] = self.lookup_raw if raw else self.lookup
        pool = _pool("engram-prefetch", 1)
        self._under_way = {one for one in self._under_way if not one.done()}
        started = pool.submit(how, ids, hashed=hashed, columns=columns, count=count)
        self._under_way.add(started)

        def finish() -> Found:
            self.on_wait(started.done())
            return started.result()

        return finish

    def _look(
        self,
        ids: Tensor,
        out: Tensor | None,
        make_out: Callable[[Tensor | None, torch.Size, torch.device], Tensor],
        hashed: bool,
        columns: tuple[int, int] | None,
    ) -> Found:
        count = len(self.geometry.columns)
        check_ids(ids, CPU, hashed or columns is not None, count)
        first, last = columns or (0, count)
        chosen = ids[..., first:last] if columns else ids
        out = make_out(out, chosen.shape, CPU)
        starts = self._starts[first : last + 1] if hashed else None
        plane = _plane(chosen, hashed)
        invalid = _gather(self._segment, self.row_format, self.shard, self.geometry.rows, starts, plane, out)
        if columns and invalid.count:
            token, column = divmod(invalid.position, last - first)
            invalid = replace(invalid, position=token * count + first + column)
        return Found(out, invalid)


def count_invalid(ids: Tensor, geometry: TableGeometry, hashed: bool) -> Invalid:
    """How many of `ids` (as `SegmentRows.lookup` takes them) name no row of the table, and the first of them.

    Raises IdsDtypeInvalid, IdsDeviceInvalid or IdsShapeInvalid.
    """
    check_ids(ids, CPU, hashed, len(geometry.columns))
    starts = np.array(geometry.column_starts, np.int64) if hashed else None
    return Invalid(*rows.count_invalid(_plane(ids, hashed), geometry.rows, starts))


def _plane(ids: Tensor, hashed: bool) -> npt.NDArray[Any]:
    """ids as a 2-D numpy array in the same order, without a copy where strides allow it.

    One id a row where columns mean nothing and memory allows it, so that any shape can be cut among threads.
    """
    ids = ids.detach()
    if not hashed and ids.is_contiguous():
        ids = ids.view(-1, 1)
    elif ids.dim() == 1:
        ids = ids.unsqueeze(0 if hashed else 1)
    elif ids.dim() != 2:
        ids = ids.reshape(-1, ids.shape[-1]) if ids.numel() else ids.new_empty((0, ids.shape[-1]))
    return ids.numpy()


def _gather(
    segment: AnyBuffer,
    row_format: RowFormat,
    shard: Shard,
    table_rows: int,
    starts: npt.NDArray[np.int64] | None,
    ids: npt.NDArray[Any],
    out: Tensor,
) -> Invalid:
    """`rows.gather` of `ids` into the contiguous tensor `out`, on as many threads as torch would use."""
    raw = out.dtype == torch.uint8
    # bfloat16 is unknown to numpy; the bytes are the same.
    target = (out if raw else out.view(torch.int16)).numpy().reshape(ids.shape[0], ids.shape[1], out.shape[-1])

    def part(begin: int, end: int) -> Invalid:
        return Invalid(
            *rows.gather(
                segment,
                row_format is RowFormat.PACKED,
                shard.row_start,
                shard.row_stop,
                table_rows,
                starts,
                ids[begin:end],
                target[begin:end],
                raw,
            )
        )

    threads = min(torch.get_num_threads(), ids.shape[0], ids.size // INLINE_IDS)
    if threads <= 1:
        return part(0, ids.shape[0])
    borders = [ids.shape[0] * k // threads for k in range(threads + 1)]
    pool = _pool(f"engram-lookup-{threads - 1}", threads - 1)
    futures = [pool.submit(part, begin, end) for begin, end in pairwise(borders[1:])]
    try:
        invalid = part(0, borders[1])
    finally:
        # Also when this part failed: no thread may write to `out` after the call has returned.
        wait(futures)
    for begin, future in zip(borders[1:], futures, strict=False):
        invalid = invalid.then(future.result(), begin * ids.shape[1])
    return invalid


def _pool(name: str, threads: int) -> ThreadPoolExecutor:
    pool = _pools.get(name)
    if pool is None:
        pool = _pools.setdefault(name, ThreadPoolExecutor(threads, thread_name_prefix=name))
    return pool
