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


class Memory(enum.Enum):
    """Where a table is, seen from the GPU that reads it."""

    DEVICE = "device"
    HOST = "host"
    PEER = "peer"


class Shape(NamedTuple):
    """One launch: the kernel's name, blocks in x and y, threads a block."""

    kernel: str
    grid: tuple[int, int]
    threads: int


def sorts(memory: Memory, peer: bool, ids: int) -> bool:
    """Whether `ids` ids of all tables are put in order of address first."""
    return memory is Memory.HOST and not peer and ids >= SORT_FROM_IDS


def bucket_shift(rows: int) -> int:
    """Log2 of the rows of a bucket, for a shard of `rows` rows."""
    return max(BUCKET_ROWS_SHIFT, (rows >> MAX_BUCKETS_SHIFT).bit_length())


def shape_for(
    memory: Memory,
    row_format: RowFormat,
    items: int,
    tables: int,
    multiprocessors: int,
    raw: bool,
    peer: bool,
    ordered: bool,
) -> Shape:
    """The launch that reads `items` rows of each of `tables` tables."""
    kind = "raw" if raw else "bf16"
    if ordered:
        return Shape(f"gather_sorted_{kind}_r1", (multiprocessors, 1), 256)
    infix = "peer_" if peer else ""
    # More rows in flight a group only pays when every multiprocessor is full without them.
    rows = 4 if items * tables >= multiprocessors * 64 and memory is not Memory.HOST else 1
    threads = 256
    groups = -(-items // rows)
    return Shape(f"gather_{infix}{kind}_w8_r{rows}", (-(-groups // (threads // 32)), tables), threads)
