"""The lookup kernels as Python calls on addresses: packs the structs of gather.cu and launches.

Nothing here allocates, synchronises or knows torch: callers pass device addresses and a stream, so every
call can be captured in a CUDA graph. `Gather` is made once for a set of mapped tables; calling it packs a
few numbers and launches.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from engram_client.cuda.access import cuda_driver
from engram_client.errors import Unsupported
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES, RowFormat
from engram_client.lookup import nvrtc
from engram_client.lookup.packing import (
    ARGS_BYTES,
    BF16_ROW_BYTES,
    HEAD,
    IDS_WORD,
    MAX_ITEMS,
    MAX_PART_ROWS,
    MAX_SHARDS,
    MAX_TABLES,
    OUT,
    OUT_WORD,
    SHARD,
    SPREAD_BUCKETS,
    TABLE,
    TARGET_BYTES,
    UNUSED,
    Ids,
    Out,
    Parameters,
    Source,
    division_constants,
)
from engram_client.lookup.shapes import (
    FILL_BLOCKS,
    KERNELS,
    Kind,
    Memory,
    bucket_shift,
    shape_for,
    sorts_from,
)

_PLANS_KEPT = 1024
_ORDER_THREADS = 256
_SCAN_THREADS = 1024


class Kernels:
    """The compiled kernels, loaded on one GPU. `Kernels.on(ordinal)` gives the process's one set a GPU."""

    _loaded: ClassVar[dict[int, Kernels]] = {}
    _lock = threading.Lock()

    @classmethod
    def on(cls, ordinal: int) -> Kernels:
        """Compiles (or reads from the cache) and loads at first use.

        Raises CudaUnavailable, KernelCompileFailed or CudaCallFailed.
        """
        with cls._lock:
            if ordinal not in cls._loaded:
                cls._loaded[ordinal] = cls(ordinal)
            return cls._loaded[ordinal]

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        driver = self.driver = cuda_driver()
        major, minor = (driver.attribute(ordinal, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.multiprocessors = driver.attribute(ordinal, "MULTIPROCESSOR_COUNT")
        self.cubin = nvrtc.cubin(f"sm_{major}{minor}")
        driver.retain_context(ordinal)  # never released: kernels stay loaded in it for the life of the process
        with driver.context(ordinal):
            library = driver.library_load(self.cubin.code)
            # All of them now: loading one may wait for the GPU, which a stream that is being captured must not.
            self.functions = {name: driver.library_kernel(library, name) for name in KERNELS}
        self.launch = driver.launch


class _Plan(NamedTuple):
    """What a launch for one batch size needs beyond its addresses; made once a batch size."""

    items: int
    function: Any
    grid: tuple[int, int]
    threads: int
    division: tuple[int, int]
    slots: int
    fill: Any
    fill_grid: tuple[int, int]


class Gather:
    """Looks ids up in `sources`, one launch for all of them.

    memory: where the tables are; it decides the launch shape. raw: outputs are values and scales as stored,
    with `out_strides` bytes from row to row of each; else bfloat16 [rows, 256]. blocks: how many may read rows at
    a time, 0 for as many as the work fills. density: see Kind.

    Raises Unsupported for more tables, shards or rows than one launch takes.
    """

    def __init__(
        self,
        kernels: Kernels,
        sources: Sequence[Source],
        row_format: RowFormat,
        memory: Memory,
        *,
        raw: bool = False,
        out_strides: tuple[int, int] = (ROW_BYTES, ROW_BYTES),
        blocks: int = 0,
        density: int = 1,
    ) -> None:
        shards = [part for source in sources for part in source.parts]
        for what, count, limit in (("tables", len(sources), MAX_TABLES), ("shards", len(shards), MAX_SHARDS)):
            if count > limit:
                raise Unsupported(
                    feature=f"{count} {what} in one launch", reason=f"at most {limit}", remedy="look up fewer at once"
                )
        self._kernels = kernels
        self._blocks = blocks
        self.tables = len(sources)
        peer = any(len(source.parts) > 1 for source in sources)
        hashed = sources[0].column_starts != 0
        self._kind = Kind(memory, row_format, self.tables, raw=raw, peer=peer, hashed=hashed, density=density)
        self.sorts_from = sorts_from(self._kind)
        """The fewest ids a table that are put in order of address first."""
        row_span = max(part.stop - part.start for part in shards)
        if row_span > MAX_PART_ROWS:
            raise Unsupported(
                feature=f"{row_span} rows in one part", reason="fewer than 2^32", remedy="split the table"
            )
        shift = bucket_shift(row_span)
        self._buckets = (row_span >> shift) + 1
        table_strides = (ROW_BYTES, ROW_BYTES) if row_format is RowFormat.PACKED else (ROW_VALUES, ROW_SCALES)
        out_value_stride, out_scale_stride = out_strides if raw else (BF16_ROW_BYTES, 0)
        self._strides = (*table_strides, out_value_stride)
        self._fixed = (self.tables, out_scale_stride, shift, self._buckets)
        self._plans: dict[tuple[int, int, int, bool], _Plan] = {}
        self._lock = threading.Lock()
        packed = b"".join(SHARD.pack(*part.planes(row_format), part.start) for part in shards)
        self._parameters = Parameters(packed.ljust(MAX_SHARDS * SHARD.size, b"\0") if peer else None)
        self._pack_tables(sources, row_format)

    def _pack_tables(self, sources: Sequence[Source], row_format: RowFormat) -> None:
        shard = 0
        for index, source in enumerate(sources):
            first, last = source.parts[0], source.parts[-1]
            TABLE.pack_into(
                self._parameters.args,
                HEAD.size + index * TARGET_BYTES + OUT.size,
                *first.planes(row_format),
                first.start,
                last.stop - first.start,
                source.rows,
                source.column_starts,
                source.invalid,
                shard,
                len(source.parts),
                source.owner_multiplier,
            )
            shard += len(source.parts)

    def workspace_bytes(self, items: int) -> int:
        """Bytes of workspace, 16-byte aligned, that a launch for `items` ids a table takes; 0 for none."""
        if not self.sorts(items):
            return 0
        ids = self.tables * items
        return 4 * (self._counters + _slots(ids)) + (4 + 4 + 16) * _round4(ids)

    def sorts(self, items: int) -> bool:
        """Whether a launch for `items` ids a table puts them in order of address first."""
        return items >= self.sorts_from

    @property
    def _counters(self) -> int:
        return _round4(self.tables * self._buckets + SPREAD_BUCKETS)

    def __call__(self, ids: Ids, outs: Sequence[Out], stream: int, workspace: int = 0) -> None:
        """Launches the lookup of `ids` into `outs` (one a table) on `stream`.

        workspace: device memory of `workspace_bytes(tokens * columns)`; 0 reads the ids in their own order.
        Raises Unsupported for 2^31 ids or more or strides of 4 GiB, CudaCallFailed.
        """
        key = (ids.tokens, ids.columns, ids.id_bytes, workspace != 0)
        plan = self._plans.get(key) or self._plan(*key)
        if plan.items == 0:
            return
        with self._lock:
            self._pack(self._parameters.args, plan, ids, outs, workspace)
            self._run(plan, stream, workspace, self._parameters.address)

    def for_layout(self, ids: Ids, *, ordered: bool) -> FixedGather:
        """The same for one table and ids that always lie like `ids`, whose address does not count. Raises
        Unsupported."""
        plan = self._plan(ids.tokens, ids.columns, ids.id_bytes, ordered)
        parameters = self._parameters.copy()
        self._pack(parameters.args, plan, ids, [Out(0)], 0)
        return FixedGather(self, plan, parameters)

    def _run(self, plan: _Plan, stream: int, workspace: int, parameters: int) -> None:
        kernels = self._kernels
        if plan.slots:
            self._order(plan, stream, workspace, parameters)
        kernels.launch(plan.function, plan.grid, plan.threads, stream, parameters)
        if plan.slots:
            kernels.launch(plan.fill, plan.fill_grid, _ORDER_THREADS, stream, parameters)

    def _pack(
        self, arguments: ctypes.Array[ctypes.c_char], plan: _Plan, ids: Ids, outs: Sequence[Out], workspace: int
    ) -> None:
        address, id_bytes, _, columns, token_stride, column_stride, table_stride = ids
        try:
            HEAD.pack_into(
                arguments,
                0,
                workspace,
                table_stride,
                *self._fixed,
                plan.slots - 1 if plan.slots else 0,
                *UNUSED,
                address,
                token_stride,
                column_stride,
                plan.items,
                columns,
                *plan.division,
                *self._strides,
                id_bytes,
            )
        except struct.error as error:
            raise Unsupported(
                feature=f"ids with strides of {token_stride} and {column_stride} bytes",
                reason="fewer than 2^32",
                remedy="make the ids contiguous",
            ) from error
        at = HEAD.size
        for out in outs:
            OUT.pack_into(arguments, at, *out)
            at += TARGET_BYTES

    def _plan(self, tokens: int, columns: int, id_bytes: int, has_workspace: bool) -> _Plan:
        items = tokens * columns
        if items > MAX_ITEMS // self.tables:
            raise Unsupported(feature=f"{items} ids a table", reason="fewer than 2^31 in all", remedy="look up parts")
        ordered = has_workspace and self.sorts(items)
        shape = shape_for(
            self._kind,
            tokens,
            columns,
            self._kernels.multiprocessors,
            id_bytes=id_bytes,
            ordered=ordered,
            blocks=self._blocks,
        )
        plan = _Plan(
            items,
            self._kernels.functions[shape.kernel],
            shape.grid,
            shape.threads,
            division_constants(max(columns, 1)),
            _slots(items * self.tables) if ordered else 0,
            self._kernels.functions[shape.then] if shape.then else None,
            (min(self._blocks or MAX_ITEMS, self._kernels.multiprocessors * FILL_BLOCKS), 1),
        )
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        self._plans[tokens, columns, id_bytes, has_workspace] = plan
        return plan

    def _order(self, plan: _Plan, stream: int, workspace: int, parameters: int) -> None:
        """Leaves the ids in order of address in the workspace."""
        kernels = self._kernels
        kernels.driver.memset_words_async(workspace, 0, self._counters + plan.slots, stream)
        grid = (-(-plan.items // _ORDER_THREADS), self.tables)
        kernels.launch(kernels.functions["order_count"], grid, _ORDER_THREADS, stream, parameters)
        kernels.launch(kernels.functions["order_scan"], (1, 1), _SCAN_THREADS, stream, parameters)
        kernels.launch(kernels.functions["order_place"], grid, _ORDER_THREADS, stream, parameters)


class FixedGather:
    """A gather of one table for ids of one layout: only addresses are left to be filled in."""

    def __init__(self, gather: Gather, plan: _Plan, parameters: Parameters) -> None:
        self._plan = plan
        self._parameters = parameters
        self._words = (ctypes.c_uint64 * (ARGS_BYTES // 8)).from_buffer(parameters.args)
        self._run = gather._run
        self._launch = gather._kernels.launch
        self._lock = threading.Lock()

    def __call__(self, ids: int, out: int, stream: int, workspace: int = 0) -> None:
        """Addresses of the ids, of the bfloat16 rows, and of the workspace, if it was made to order. Raises
        CudaCallFailed."""
        plan = self._plan
        if not plan.items:
            return
        with self._lock:
            words = self._words
            words[IDS_WORD] = ids
            words[OUT_WORD] = out
            if plan.slots:
                words[0] = workspace
                self._run(plan, stream, workspace, self._parameters.address)
            else:
                self._launch(plan.function, plan.grid, plan.threads, stream, self._parameters.address)


def _round4(count: int) -> int:
    return -(-count // 4) * 4


def _slots(ids: int) -> int:
    """Slots of the hash table that finds repeats among `ids` ids: a power of two, at most half full."""
    return 1 << (2 * ids - 1).bit_length()
