"""How a lookup is cut into blocks: from the amount of work and the kind of memory. Pure arithmetic.

The thresholds were measured (benchmarks/gather_gpu.py) on an H200 over PCIe 5.0 and stand here, in one place.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from engram_client.layout import RowFormat

SORT_FROM_IDS = 1024 * 24
"""Host tables: from this many ids on, putting them in order of address costs less than it saves."""
BUCKET_ROWS_SHIFT = 13
"""2^13 rows are 2.06 MiB: about the page that a translation covers."""
MAX_BUCKETS_SHIFT = 16
"""At most 2^16 buckets a table: one block scans their counters."""
ORDERED_BLOCKS = 16
"""Blocks of 8 warps, a row in flight each, for ordered reads: more rows in flight spread over more pages than
the translation caches hold at a time and are slower."""
FILL_BLOCKS = 4
"""Blocks a multiprocessor that write what an ordered launch does not read: zeros and copies."""
THREADS = 256
FULL_WARPS = 64
"""From this many rows a multiprocessor on, more rows in flight a warp pay; before, only their latency shows."""


class Memory(enum.Enum):
    """Where a table is, seen from the GPU that reads it."""

    DEVICE = "device"
    HOST = "host"
    PEER = "peer"


class Kind(NamedTuple):
    """What does not change from launch to launch."""

    memory: Memory
    row_format: RowFormat
    tables: int
    raw: bool
    peer: bool


class Shape(NamedTuple):
    """One launch: the kernel's name, blocks in x and y, threads a block; `then` finishes an ordered launch."""

    kernel: str
    grid: tuple[int, int]
    threads: int
    then: str = ""


def sorts(kind: Kind, items: int) -> bool:
    """Whether `items` ids of each table are put in order of address first."""
    return kind.memory is Memory.HOST and not kind.peer and items * kind.tables >= SORT_FROM_IDS


def bucket_shift(rows: int) -> int:
    """Log2 of the rows of a bucket, for a shard of `rows` rows."""
    return max(BUCKET_ROWS_SHIFT, (rows >> MAX_BUCKETS_SHIFT).bit_length())


def shape_for(kind: Kind, items: int, multiprocessors: int, *, ordered: bool) -> Shape:
    """The launch that reads `items` rows of each table."""
    suffix = "raw" if kind.raw else "bf16"
    if ordered:
        return Shape(f"gather_ordered_{suffix}", (ORDERED_BLOCKS, 1), THREADS, f"fill_ordered_{suffix}")
    full = items * kind.tables >= multiprocessors * FULL_WARPS
    wide = full and kind.row_format is RowFormat.PLANAR and not kind.raw and not kind.peer
    rows = 2 if full and not wide and kind.memory is not Memory.HOST else 1
    prefix = "peer_" if kind.peer else "one_" if kind.tables == 1 and not kind.raw and rows == 1 else ""
    lanes = 16 if wide else 32
    blocks = -(-items // (rows * THREADS // lanes))
    return Shape(f"gather_{prefix}{suffix}_w{256 // lanes}_r{rows}", (blocks, kind.tables), THREADS)


def exchange_shape(items: int) -> Shape:
    """The launch that dequantises `items` exchanged rows: 4 rows a warp."""
    return Shape("dequantise_exchanged", (-(-items // (4 * THREADS // 32)), 1), THREADS)
