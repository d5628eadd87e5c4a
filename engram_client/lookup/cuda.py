"""Lookups on a GPU, in tables that are mapped for it: torch tensors in, a launch out.

Nothing here waits for the GPU. Invalid ids are counted by the kernels (`counters.py`), so what a lookup returns
says nothing about them; `counted` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from engram_client.errors import CudaCallFailed
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES, RowFormat, Shard, TableGeometry
from engram_client.lookup import runtime, views
from engram_client.lookup.checks import Found, Invalid, bf16_out, check_ids, raw_out
from engram_client.lookup.counters import Counters
from engram_client.lookup.exchange import CountInvalid, Exchanged
from engram_client.lookup.kernels import FixedGather, Gather, Kernels
from engram_client.lookup.packing import BF16_ROW_BYTES, MAX_SHARDS, MAX_TABLES, Ids, Out, Part, Source, columns_a_part
from engram_client.lookup.shapes import PREFETCH_BLOCKS, Memory
from engram_client.lookup.views import ALIGNMENT
from engram_client.lookup.workspace import PrefetchBuffer, Workspaces

_NOTHING = Invalid()
_LAYOUTS_KEPT = 1024
_STORED = (ROW_VALUES, ROW_SCALES)
_PACKED = (ROW_BYTES, ROW_BYTES)


class GpuRows:
    """The rows of one table that GPU `kernels.ordinal` reads: this rank's shard, or all shards.

    parts: in row order; together they are `shard`. counter: this table's number in `counters`.
    """

    counts_itself = True

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[Part],
        geometry: TableGeometry,
        shard: Shard,
        row_format: RowFormat,
        memory: Memory,
        counters: Counters,
        counter: int,
        side: runtime.SideStream,
    ) -> None:
        """Raises CudaUnavailable, or Unsupported for more parts than one launch takes."""
        self.device = runtime.device(kernels.ordinal)
        self.geometry = geometry
        self.shard = shard
        self.row_format = row_format
        self.memory = memory
        self.kernels = kernels
        self.parts = tuple(parts)
        self._columns = len(geometry.columns)
        self._columns_a_part = columns_a_part(self.parts, geometry.column_starts)
        self._counters = counters
        self._counter = counter
        self._side = side
        self._starts = torch.tensor(geometry.column_starts, dtype=torch.int64, device=self.device)
        self._done = side.event()
        self.on_wait: Callable[[bool], None] = lambda was_ready: None
        """Hears, when a prefetch is waited for, whether it was over: not of those in a captured graph, whose waits
        the GPU does by itself."""
        self._workspaces = Workspaces(self.device)
        self._buffer = PrefetchBuffer(self.device)
        self._known: dict[tuple[object, ...], FixedGather] = {}
        self._gathers: dict[tuple[object, ...], Gather] = {}
        self._judges = {hashed: CountInvalid(kernels, self.source(hashed), self._columns) for hashed in (True, False)}
        self._exchanged: dict[tuple[int, bool], Exchanged] = {}
        self._plain = {hashed: self._gather(hashed) for hashed in (True, False)}

    def __repr__(self) -> str:
        return f"<GpuRows of layer {self.geometry.layer_id} on {self.device}: {len(self.parts)} parts, {self.memory}>"

    @property
    def counted(self) -> Invalid:
        """Invalid ids that kernels have counted so far."""
        return self._counters.read(self._counter)

    def close(self) -> None:
        """Nothing is held here that outlives the mappings: the client closes those."""

    # Lookups

    def lookup(
        self,
        ids: Tensor,
        out: Tensor | None = None,
        *,
        hashed: bool,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Found:
        """As `lookup.cpu.SegmentRows.lookup`, but counts invalid ids on the GPU."""
        check_ids(ids, self.device, hashed or columns is not None, self._columns)
        if columns is None and count:
            gather, chosen = self._plain[hashed], ids
        else:
            gather, chosen = self._gather(hashed, columns=columns, count=count), views.cut(ids, columns)
        given, out = out, bf16_out(out, chosen.shape, self.device)
        self._launch(gather, chosen, hashed, Out(views.address(out)))
        if given is not None and gather is self._plain[hashed]:
            self._remember(gather, ids, out, hashed)
        return Found(out, _NOTHING)

    def lookup_again(self, ids: Tensor, out: Tensor, hashed: bool) -> bool:
        """`lookup` for tensors that lie like some that it was given before, but at other addresses: what was checked
        then is not checked again. False where there were none; then nothing was done."""
        try:
            known = self._known.get(
                (hashed, ids.dtype, ids.device, ids.shape, ids.stride(), out.dtype, out.device, out.shape, out.stride())
            )
        except (AttributeError, RuntimeError):  # no tensor, or none with strides
            return False
        address, ordinal = out.data_ptr(), self.kernels.ordinal
        if known is None or address % ALIGNMENT or not runtime.is_current(ordinal):
            return False
        stream = runtime.current_stream(ordinal)
        try:
            known(ids.data_ptr(), address, stream)
        except CudaCallFailed as error:
            with _context_after(error, self.kernels):
                known(ids.data_ptr(), address, stream)
        return True

    def _remember(self, gather: Gather, ids: Tensor, out: Tensor, hashed: bool) -> None:
        """For `lookup_again`. Batches large enough to be put in order take so long that nothing is gained."""
        if ids.numel() >= gather.sorts_from or len(self._known) >= _LAYOUTS_KEPT or ids.dim() > 2:
            return
        key = (hashed, ids.dtype, ids.device, ids.shape, ids.stride(), out.dtype, out.device, out.shape, out.stride())
        if key not in self._known:
            self._known[key] = gather.for_layout(views.of(views.flat(ids, hashed)), ordered=False)

    def lookup_raw(
        self, ids: Tensor, *, hashed: bool, columns: tuple[int, int] | None = None, count: bool = True
    ) -> Found:
        """As `lookup`, but the stored bytes of each row side by side: uint8 `[..., 264]`, for an exchange."""
        check_ids(ids, self.device, hashed or columns is not None, self._columns)
        chosen = views.cut(ids, columns)
        out = raw_out(None, chosen.shape, self.device)
        self._launch(self._gather(hashed, _PACKED, columns, count), chosen, hashed, views.packed_out(out))
        return Found(out, _NOTHING)

    def lookup_stored(self, ids: Tensor, values: Tensor, scales: Tensor, *, hashed: bool) -> Invalid:
        """Values and scales as stored into uint8 `[*ids.shape, 256]` and `[*ids.shape, 8]`."""
        check_ids(ids, self.device, hashed, self._columns)
        self._launch(self._gather(hashed, _STORED), ids, hashed, Out(views.address(values), scales.data_ptr()))
        return _NOTHING

    def count_invalid(self, ids: Tensor, *, hashed: bool) -> Invalid:
        """Counts them on the GPU, in a launch that reads no row."""
        check_ids(ids, self.device, hashed, self._columns)
        self._judge(self._judges[hashed], ids, hashed)
        return _NOTHING

    def assemble(self, received: Tensor, ids: Tensor, out: Tensor, *, pieces: int, hashed: bool) -> Invalid:
        """See `LocalRows.assemble`. Counts invalid ids in the same launch."""
        key = (pieces, hashed)
        if key not in self._exchanged:
            self._exchanged[key] = Exchanged(self.kernels, self.source(hashed), self._columns, pieces)
        whole, source, target = self._exchanged[key], received.data_ptr(), views.address(out)
        self._judge(lambda view, stream: whole(view, source, target, stream), ids, hashed)
        return _NOTHING

    def begin(
        self,
        ids: Tensor,
        *,
        hashed: bool,
        raw: bool = False,
        columns: tuple[int, int] | None = None,
        count: bool = True,
    ) -> Callable[[], Found]:
        """Starts a lookup (or, with `raw`, a lookup_raw) on the side stream, on few multiprocessors.

        The call that it returns makes the current stream wait and gives the rows, which lie in this table's
        buffer until its next prefetch.
        """
        check_ids(ids, self.device, hashed or columns is not None, self._columns)
        chosen = views.cut(ids, columns)
        width = ROW_BYTES if raw else BF16_ROW_BYTES
        buffer = self._buffer.take(chosen.numel() * width)
        gather = self._gather(hashed, _PACKED if raw else None, columns, count, PREFETCH_BLOCKS)
        rows = (
            buffer.view(*chosen.shape, ROW_BYTES)
            if raw
            else buffer.view(torch.bfloat16).view(*chosen.shape, ROW_VALUES)
        )
        flat = views.flat(chosen, hashed)  # a copy, if it is one, is made before the streams part
        self._side.follow_current()
        out = views.packed_out(rows) if raw else Out(rows.data_ptr())
        launch(gather, self.kernels, self._workspaces, flat, (out,), self._side)
        self._side.record(self._done)
        in_use: list[Tensor] = [flat]

        def finish() -> Found:
            was_ready = self._was_ready()
            if was_ready is not None:
                self.on_wait(was_ready)
            if not was_ready:
                self._wait()
            in_use.clear()
            return Found(rows, _NOTHING)

        return finish

    def _wait(self) -> None:
        """Makes the current stream wait for the prefetch begun last. The driver's call: torch's, with an object for the
        stream, takes some times as long."""
        ordinal, driver = self.kernels.ordinal, self.kernels.driver
        if not runtime.is_current(ordinal):
            with runtime.current(ordinal):  # the default stream's handle is the same on every GPU
                return self._wait()
        stream, event = self._current_stream(), self._done.cuda_event
        try:
            driver.stream_wait(stream, event)
        except CudaCallFailed as error:
            with _context_after(error, self.kernels):
                driver.stream_wait(stream, event)

    def _current_stream(self) -> int:
        return runtime.current_stream(self.kernels.ordinal)

    def _was_ready(self) -> bool | None:
        """Whether the prefetch begun last is over; None in a capture. Then what is enqueued from now on finds its rows,
        and the wait can be left out.

        A capture of the current stream alone, with a prefetch from before it, is for the driver to refuse: rows that
        are there now are not those of a replay."""
        try:
            return self._asked()
        except CudaCallFailed as error:
            with _context_after(error, self.kernels):
                return self._asked()

    def _asked(self) -> bool | None:
        driver = self.kernels.driver
        if driver.stream_captured(self._side.handle) or driver.stream_captured(self._current_stream()):
            return None
        return driver.event_done(self._done.cuda_event)

    # Launches

    def source(self, hashed: bool, columns: tuple[int, int] | None = None, count: bool = True) -> Source:
        """This table as a launch reads it."""
        starts = self._starts.data_ptr() + 8 * (columns[0] if columns else 0)
        counter = self._counters.address(self._counter) if count else self._counters.nobody
        follow = 0 if columns else self._columns_a_part  # a cut batch counts its columns from another one
        return Source(self.parts, self.geometry.rows, counter, starts if hashed else 0, follow)

    def _gather(
        self,
        hashed: bool,
        raw: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
        count: bool = True,
        blocks: int = 0,
    ) -> Gather:
        """raw: bytes from row to row of values and of scales; None for bfloat16."""
        key = (hashed, raw, columns, count, blocks)
        found = self._gathers.get(key)
        if found is None:
            sources = [self.source(hashed, columns, count)]
            strides = raw or _PACKED
            found = self._gathers[key] = Gather(
                self.kernels,
                sources,
                self.row_format,
                self.memory,
                raw=raw is not None,
                out_strides=strides,
                blocks=blocks,
                density=self._columns // (columns[1] - columns[0]) if columns else 1,
            )
        return found

    def _launch(self, gather: Gather, ids: Tensor, hashed: bool, out: Out) -> None:
        launch(gather, self.kernels, self._workspaces, views.flat(ids, hashed), (out,))

    def _judge(self, work: CountInvalid | Callable[[Ids, int], None], ids: Tensor, hashed: bool) -> None:
        if not ids.numel():
            return
        flat = views.flat(ids, hashed)  # a copy, if it is one, must live until the launch is enqueued
        view, ordinal = views.of(flat), self.kernels.ordinal
        with runtime.current(ordinal):
            try:
                work(view, runtime.current_stream(ordinal))
            except CudaCallFailed as error:
                with _context_after(error, self.kernels):
                    work(view, runtime.current_stream(ordinal))


class AllTables:
    """Several tables in one launch; `AllTables.of` says whether they can be."""

    def __init__(self, tables: Sequence[GpuRows]) -> None:
        self._first = tables[0]
        self._workspaces = Workspaces(self._first.device)
        self._gathers = {
            hashed: Gather(
                self._first.kernels,
                [table.source(hashed) for table in tables],
                self._first.row_format,
                self._first.memory,
            )
            for hashed in (True, False)
        }

    @classmethod
    def of(cls, tables: Sequence[GpuRows]) -> AllTables | None:
        kinds = {(t.row_format, t.memory, len(t.geometry.columns), len(t.parts) > 1) for t in tables}
        parts = sum(len(table.parts) for table in tables)
        return cls(tables) if len(kinds) == 1 and len(tables) <= MAX_TABLES and parts <= MAX_SHARDS else None

    def lookup(self, ids: Tensor, out: Tensor, hashed: bool) -> None:
        """ids `[tokens, tables, columns]` into bfloat16 `[tables, tokens, columns, 256]`, contiguous."""
        check_ids(ids, self._first.device, hashed, len(self._first.geometry.columns))
        outs = tuple(Out(views.address(table)) for table in out)
        launch(self._gathers[hashed], self._first.kernels, self._workspaces, ids, outs)


def launch(
    gather: Gather,
    kernels: Kernels,
    workspaces: Workspaces,
    ids: Tensor,
    outs: tuple[Out, ...],
    side: runtime.SideStream | None = None,
) -> None:
    """ids: `[tokens, columns]` or fewer dimensions, `[tokens, tables, columns]` for several tables."""
    ordinal = kernels.ordinal
    if not runtime.is_current(ordinal):
        with runtime.current(ordinal):
            return launch(gather, kernels, workspaces, ids, outs, side)
    view = views.of(ids)
    stream = runtime.current_stream(ordinal) if side is None else side.handle
    workspace = workspaces.address(gather, view.tokens * view.columns, stream, side)
    try:
        gather(view, outs, stream, workspace)
    except CudaCallFailed as error:
        with _context_after(error, kernels):
            gather(view, outs, stream, workspace)


def _context_after(error: CudaCallFailed, kernels: Kernels) -> AbstractContextManager[None]:
    """For a thread that has no context yet, in which the first call fails and changes nothing; else raises.
    Torch would not make it one: it takes the GPU for current there already."""
    if error.name != "CUDA_ERROR_INVALID_CONTEXT":
        raise error
    return kernels.driver.context(kernels.ordinal)
