"""Launches that read no table: what an exchange of rows left becomes a batch, and ids are judged."""

from __future__ import annotations

import threading

from engram_client.layout import ROW_BYTES
from engram_client.lookup.kernels import Kernels
from engram_client.lookup.packing import (
    ADDRESS,
    BF16_ROW_BYTES,
    HEAD,
    OUT,
    TABLE,
    UNUSED,
    Ids,
    Parameters,
    Source,
    division_constants,
)
from engram_client.lookup.shapes import Shape, count_shape, exchange_shape


class _Once:
    """A launch for one table with what does not change packed already; calling it packs the rest."""

    def __init__(self, kernels: Kernels, source: Source, columns: int, shards: int) -> None:
        self._kernels = kernels
        self._columns = columns
        self._division = division_constants(columns)
        self._parameters = Parameters(None)
        self._lock = threading.Lock()
        at = HEAD.size + OUT.size
        # All rows of the table: what is judged is whether an id names any of them.
        TABLE.pack_into(
            self._parameters.args,
            at,
            0,
            0,
            0,
            source.rows,
            source.rows,
            source.column_starts,
            source.invalid,
            0,
            shards,
            0,
        )

    def _launch(self, shape: Shape, ids: Ids, received: int, out: int, stream: int) -> None:
        arguments = self._parameters.args
        items = ids.tokens * ids.columns
        columns, division = self._columns, self._division
        if ids.columns != columns:  # ids that are not hashed may have any shape
            columns, division = ids.columns, division_constants(ids.columns)
        strides = (ids.token_stride, ids.column_stride)
        fixed = (1, 0, 0, 0, 0, *UNUSED)
        rows = (ROW_BYTES, ROW_BYTES, BF16_ROW_BYTES, ids.id_bytes)
        with self._lock:
            HEAD.pack_into(arguments, 0, 0, 0, *fixed, ids.address, *strides, items, columns, *division, *rows)
            OUT.pack_into(arguments, HEAD.size, out, 0)
            ADDRESS.pack_into(arguments, HEAD.size + OUT.size, received)
            function = self._kernels.functions[shape.kernel]
            self._kernels.launch(function, shape.grid, shape.threads, stream, self._parameters.address)


class Exchanged(_Once):
    """Dequantises what an exchange of raw rows left: `[shards, tokens, columns / shards, 264]` to bfloat16
    `[tokens, columns, 256]`. Judges the ids in the same launch, for each rank has read its own columns only.

    Of `source` the rows, the columns and the counter count; its parts are not read."""

    def __init__(self, kernels: Kernels, source: Source, columns: int, shards: int) -> None:
        super().__init__(kernels, source, columns, shards)

    def __call__(self, ids: Ids, received: int, out: int, stream: int) -> None:
        """Raises CudaCallFailed."""
        if ids.tokens:
            self._launch(exchange_shape(ids.tokens * ids.columns), ids, received, out, stream)


class CountInvalid(_Once):
    """Counts the invalid ids of a batch and reads no row. Of `source` all but the parts counts."""

    def __init__(self, kernels: Kernels, source: Source, columns: int) -> None:
        super().__init__(kernels, source, columns, 1)

    def __call__(self, ids: Ids, stream: int) -> None:
        """Raises CudaCallFailed."""
        items = ids.tokens * ids.columns
        if items:
            self._launch(count_shape(items, self._kernels.multiprocessors), ids, 0, 0, stream)
