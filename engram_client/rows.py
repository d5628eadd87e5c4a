"""Operations on the bytes of rows: pack, unpack, gather, dequantise. Numpy at most; torch is never imported.

Each exists twice, in C (`engram_client._native`, built where a compiler is at hand) and in numpy
(`engram_client._pure`); this module hands out the faster one that is there. Both give the same bits.
`ENGRAM_PURE=1` in the environment forces numpy. The C versions release the GIL while they work.

Buffers are anything with the buffer protocol: memoryview, numpy, ctypes arrays. They must be C-contiguous,
and writable where they are written (BufferError), and their sizes must agree (ValueError).

Row formats and sizes are those of `engram_client.layout`. The value of a code is
fp32(e4m3) * 2**(scale - 127) rounded once to bfloat16 (to nearest even, subnormals kept); scale byte 255 is
NaN; -0, or what rounds to it, becomes +0; every NaN becomes 0x7FC0.

    pack(values, scales, packed)          n*256 and n*8 bytes -> n*264 bytes
    unpack(packed, values, scales)        the reverse
    dequantise(packed_rows, out)          n*264 bytes -> n*256 bfloat16
    gather(segment, packed, row_start, row_stop, table_rows, column_starts, ids, out, raw)
    count_invalid(ids, table_rows, column_starts)
    make(key, row_start, every_code, values, scales)

`gather` reads the rows named by `ids` from `segment`, which holds rows [row_start, row_stop) of a table of
`table_rows` rows, packed or planar, and writes them in the order of the ids: 264 bytes a row if `raw`, else
256 bfloat16. ids: a 2-D numpy array `[n, c]`, int32 or int64, any strides. Rows of other shards, negative
ids (padding) and invalid ids give zero rows. An id is invalid when it is not below table_rows; given
column_starts (int64 `[c + 1]`, first rows and the end of the columns that ids' columns belong to), when it
is outside its column and not 0. `gather` and `count_invalid` return (number of invalid ids, the first of them, its
flat position in ids), with position -1 when there is none.

`make` writes the rows of a made table from `row_start` on, as many as `values` and `scales` hold (n*256 and n*8
bytes); engram_server/generate.py has the formula. `key` and `row_start` count modulo 2^64.
"""

from __future__ import annotations

import os

__all__ = ["NATIVE", "count_invalid", "dequantise", "gather", "make", "pack", "unpack"]

NATIVE: bool
"""Whether the operations here are the C ones."""

try:
    if os.environ.get("ENGRAM_PURE") == "1":
        raise ImportError("ENGRAM_PURE=1")
    from engram_client import _native as _chosen

    NATIVE = True
except ImportError:
    # Not before it is needed: numpy costs 90 ms, which a restarted daemon's first check would wait for.
    from engram_client import _pure as _chosen  # type: ignore[no-redef]

    NATIVE = False

pack = _chosen.pack
unpack = _chosen.unpack
dequantise = _chosen.dequantise
gather = _chosen.gather
count_invalid = _chosen.count_invalid
make = _chosen.make
