"""How a lookup is cut into blocks: from the amount of work and the kind of memory. Pure arithmetic.

The thresholds were measured (tests/bench/gather_gpu.py) on an H200 over PCIe 5.0 and stand here, in one place.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from engram_client.layout import RowFormat

SORT_FROM_IDS = 16_384
"""Host tables: from this many ids on, putting them in order of address costs less than it saves. Of ids of some hash
columns alone, which lie that much closer together, fewer will do: of half of them, half as many (12,288 ids on an H200:
394 us in order, 484 as they come)."""
SORT_LEAST_IDS = 2_048
"""Putting ids in order takes some 15 us, whatever they gain."""
BUCKET_ROWS_SHIFT = 13
"""2^13 rows are 2.06 MiB: about the page that a translation covers."""
MAX_BUCKETS_SHIFT = 16
"""At most 2^16 buckets a table: one block scans their counters."""
DENSE_IDS = 49_152
ORDERED_BLOCKS = 12
SPARSE_BLOCKS = 11
"""Blocks of 8 warps, a row in flight each, for ordered reads of DENSE_IDS ids or more, and of fewer. More rows
in flight lose what the order gains (112 rows: a fifth slower than 96), fewer leave the link idle."""
FILL_BLOCKS = 4
"""Blocks a multiprocessor that write what an ordered launch does not read: zeros and copies."""
THREADS = 256
FEW_THREADS = 256
FEW_COLUMNS = 65_535 * 8
"""More ids a token than this do not fit the grid of gather_few."""
FULL_ROWS = 64
"""From this many rows a multiprocessor on, more bytes in flight a lane pay; before, only their latency shows."""


PREFETCH_BLOCKS = 24
"""Blocks of a prefetch, each on a multiprocessor at most: with 16 to 32 a host table is read as fast as with
more, and the GPU's other work keeps the rest."""
COUNT_BLOCKS = 2
"""Blocks a multiprocessor that only judge ids."""
KERNELS = (
    *(
        f"gather_few_{row_format}{hashed}_i{bits}"
        for row_format in ("planar", "packed")
        for hashed in ("", "_hashed")
        for bits in (32, 64)
    ),
    "gather_bf16_w8_r1",
    "gather_bf16_w8_r2",
    "gather_bf16_w16_r1",
    "gather_raw_w8_r1",
    "gather_raw_w8_r2",
    "gather_peer_bf16_w8_r1",
    "gather_peer_bf16_w8_r2",
    "gather_peer_raw_w8_r1",
    "gather_peer_raw_w8_r2",
    "dequantise_exchanged",
    "count_invalid",
    "order_count",
    "order_scan",
    "order_place",
    "gather_ordered_bf16",
    "gather_ordered_raw",
    "fill_ordered_bf16",
    "fill_ordered_raw",
)


class Memory(enum.Enum):
    """Where a table is, seen from the GPU that reads it."""

    DEVICE = "device"
    HOST = "host"
    """Over PCIe: address translation limits the reads, so that order helps and more rows in flight hurt."""
    COHERENT = "coherent"
    """The host's, over a link by which the GPU walks the CPU's page tables (ATS): some ten times as fast, and read
    like a peer's, in the order of the ids and with as many rows in flight as there are. Not measured."""
    PEER = "peer"


class Kind(NamedTuple):
    """What does not change from launch to launch."""

    memory: Memory
    row_format: RowFormat
    tables: int
    raw: bool
    peer: bool
    hashed: bool = False
    density: int = 1
    """How many times as close together the ids lie as those of all hash columns."""


class Shape(NamedTuple):
    """One launch: the kernel's name, blocks in x and y, threads a block; `then` finishes an ordered launch."""

    kernel: str
    grid: tuple[int, int]
    threads: int
    then: str = ""


def sorts_from(kind: Kind) -> float:
    """The fewest ids of each table that are put in order of address first; infinite where none are."""
    if kind.memory is not Memory.HOST or kind.peer:
        return math.inf
    return -(-max(SORT_LEAST_IDS, SORT_FROM_IDS // kind.density) // kind.tables)


def bucket_shift(rows: int) -> int:
    """Log2 of the rows of a bucket, for a shard of `rows` rows."""
    return max(BUCKET_ROWS_SHIFT, (rows >> MAX_BUCKETS_SHIFT).bit_length())


def shape_for(
    kind: Kind, tokens: int, columns: int, multiprocessors: int, *, id_bytes: int = 8, ordered: bool, blocks: int = 0
) -> Shape:
    """The launch that reads `tokens * columns` rows of each table, with at most `blocks` blocks in all if not 0."""
    suffix = "raw" if kind.raw else "bf16"
    items = tokens * columns
    ids = items * kind.tables
    if ordered:
        best = ORDERED_BLOCKS if ids >= DENSE_IDS else SPARSE_BLOCKS
        return Shape(f"gather_ordered_{suffix}", (min(best, blocks or best), 1), THREADS, f"fill_ordered_{suffix}")
    full = ids >= multiprocessors * FULL_ROWS
    host = kind.memory is Memory.HOST
    few = kind.tables == 1 and not kind.raw and not kind.peer and columns <= FEW_COLUMNS and (host or not full)
    if few and not blocks:  # its grid is the ids', so it cannot be held back
        name = f"gather_few_{kind.row_format.value}{'_hashed' * kind.hashed}_i{8 * id_bytes}"
        return Shape(name, (tokens, -(-columns // (FEW_THREADS // 32))), FEW_THREADS)
    lanes = 16 if full and kind.row_format is RowFormat.PLANAR and not kind.raw and not kind.peer else 32
    rows = 2 if full and lanes == 32 and not host else 1
    wanted = -(-items // (rows * THREADS // lanes))
    wanted = min(wanted, max(1, blocks // kind.tables)) if blocks else wanted
    prefix = "peer_" if kind.peer else ""
    return Shape(f"gather_{prefix}{suffix}_w{256 // lanes}_r{rows}", (wanted, kind.tables), THREADS)


def exchange_shape(items: int) -> Shape:
    """The launch that dequantises `items` exchanged rows: 4 rows a warp."""
    return Shape("dequantise_exchanged", (-(-items // (4 * THREADS // 32)), 1), THREADS)


def count_shape(items: int, multiprocessors: int) -> Shape:
    """The launch that judges `items` ids, a thread an id."""
    return Shape("count_invalid", (min(-(-items // THREADS), multiprocessors * COUNT_BLOCKS), 1), THREADS)
