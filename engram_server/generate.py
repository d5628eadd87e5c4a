"""Rows made from a counter, for `load_format: dummy` and for made checkpoints.

Any row follows from (seed, layer_id, row) alone, so every process, thread and language makes the same row
without having made the ones before it. All arithmetic is on unsigned 64-bit words, modulo 2^64:

    G       = 0x9E3779B97F4A7C15
    mix(z)  : z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
              z = (z ^ (z >> 27)) * 0x94D049BB133111EB
              z ^ (z >> 31)
    key     = mix(mix(seed + G) + (layer_id + 1) * G)
    word(w) = mix(key + (33 * row + w + 1) * G)                   w = 0 .. 32

that is, a table is the SplitMix64 sequence (Steele, Lea and Flood, 2014) that starts from the state `key`, 33
words a row. Byte i of a row is bits 8*(i % 8) and following of word i // 8 (little-endian); bytes 0 to 255 are
the values, bytes 256 to 263 (word 32) the scales. Then

    dummy rows:  a value 0x7F or 0xFF (NaN) becomes 0x7E or 0xFE; a scale s becomes 118 + ((13 * s) >> 8), so
                 it lies in 118 .. 130: a model stays finite on such rows;
    every_code:  nothing is replaced but value 0 and scale 0, which both become row & 255: any 256 rows in
                 sequence hold all 256 value codes and all 256 scale codes, NaN included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engram_client.layout import ROW_SCALES, ROW_VALUES
from engram_client.rows import make

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def rows(layer_id: int, seed: int, row_start: int, count: int, every_code: bool = False) -> tuple[Bytes, Bytes]:
    """Rows `[row_start, row_start + count)` of a layer's table: values uint8 [count, 256], scales uint8 [count, 8].

    `seed` counts modulo 2^64. Raises ValueError when row_start or count is negative.
    """
    if row_start < 0 or count < 0:
        raise ValueError(f"rows {row_start} to {row_start + count} do not exist")
    import numpy as np  # a load does without

    values = np.empty((count, ROW_VALUES), np.uint8)
    scales = np.empty((count, ROW_SCALES), np.uint8)
    make_into(layer_id, seed, row_start, every_code, values, scales)
    return values, scales


def make_into(layer_id: int, seed: int, row_start: int, every_code: bool, values: Any, scales: Any) -> None:
    """The same rows into writable buffers of n*256 and n*8 bytes, without the GIL where the C helper is built."""
    make(table_key(layer_id, seed), row_start & _MASK, every_code, values, scales)


def table_key(layer_id: int, seed: int) -> int:
    """The state from which a table's sequence of words starts (unsigned, 64 bits)."""
    return _mix(_mix(seed + _GAMMA) + (layer_id + 1) * _GAMMA)


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
