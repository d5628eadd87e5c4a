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

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

WORDS_PER_ROW = ROW_BYTES // 8
SCALE_LOW, SCALE_COUNT = 118, 13
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_CHUNK_ROWS = 512
"""Rows made at once: their words and a scratch copy (264 KiB) stay in a core's second cache."""


def rows(layer_id: int, seed: int, row_start: int, count: int, every_code: bool = False) -> tuple[Bytes, Bytes]:
    """Rows `[row_start, row_start + count)` of a layer's table: values uint8 [count, 256], scales uint8 [count, 8].

    `seed` counts modulo 2^64. Raises ValueError when row_start or count is negative.
    """
    if row_start < 0 or count < 0:
        raise ValueError(f"rows {row_start} to {row_start + count} do not exist")
    values = np.empty((count, ROW_VALUES), np.uint8)
    scales = np.empty((count, ROW_SCALES), np.uint8)
    for first, words, scratch in _chunks(table_key(layer_id, seed), row_start, count):
        raw = words.view(np.uint8).reshape(-1, ROW_BYTES)
        part = slice(first, first + len(raw))
        scales[part] = raw[:, ROW_VALUES:]
        if not every_code:
            _remove_nan(words, scratch)
        values[part] = raw[:, :ROW_VALUES]
    if every_code:
        values[:, 0] = scales[:, 0] = (np.arange(count) + row_start % 256).astype(np.uint8)
    else:
        scales[:] = (scales.astype(np.uint16) * SCALE_COUNT >> 8) + SCALE_LOW
    return values, scales


def table_key(layer_id: int, seed: int) -> int:
    """The state from which a table's sequence of words starts (unsigned, 64 bits)."""
    return _mix_int(_mix_int(seed + _GAMMA) + (layer_id + 1) * _GAMMA)


def _mix_int(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * _MIX1 & _MASK
    z = (z ^ (z >> 27)) * _MIX2 & _MASK
    return z ^ (z >> 31)


def _chunks(key: int, row_start: int, count: int) -> Iterator[tuple[int, Words, Words]]:
    """Index of each chunk's first row, its words (little-endian uint64 [rows * 33]), and as much scratch space;
    both are good until the next chunk."""
    size = min(count, _CHUNK_ROWS) * WORDS_PER_ROW
    steps = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    words, scratch = np.empty(size, "<u8"), np.empty(size, np.uint64)
    for first in range(0, count, _CHUNK_ROWS):
        used = min(_CHUNK_ROWS, count - first) * WORDS_PER_ROW
        state = (key + (row_start + first) * WORDS_PER_ROW * _GAMMA) & _MASK
        z, t = words[:used], scratch[:used]
        np.add(steps[:used], np.uint64(state), out=z)
        for shift, factor in ((30, _MIX1), (27, _MIX2)):
            np.right_shift(z, np.uint64(shift), out=t)
            np.bitwise_xor(z, t, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=t)
        np.bitwise_xor(z, t, out=z)
        yield first, z, t


def _remove_nan(words: Words, scratch: Words) -> None:
    """Clears the lowest bit of every byte whose seven low bits are all set, eight bytes at a time: adding one to
    those seven bits sets the eighth just then, and never carries into the next byte."""
    np.bitwise_and(words, np.uint64(0x7F7F7F7F7F7F7F7F), out=scratch)
    np.add(scratch, np.uint64(0x0101010101010101), out=scratch)
    np.right_shift(scratch, np.uint64(7), out=scratch)
    np.bitwise_and(scratch, np.uint64(0x0101010101010101), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
