"""The operations of `engram_client.rows` in numpy: what an install without a compiler runs, and the plain
statement of what engram_client/_native.c does faster. Signatures and results are equal, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES, VALUES_PER_SCALE

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # numpy's stubs call arrays buffers from Python 3.12 on only.
    AnyBuffer = Buffer | npt.NDArray[Any]

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.signedinteger[Any]]

_CHUNK_ROWS = 1 << 13
"""Rows handled at once, so that the temporaries of numpy stay at a few MiB."""
_MADE_ROWS = 512
"""Rows made at once: their words and a scratch copy (264 KiB) stay in a core's second cache."""
_GAMMA = 0x9E3779B97F4A7C15

_BF16_NAN = 0x7FC0
_BF16_INFINITY = 0x7F80


def _table() -> npt.NDArray[np.uint16]:
    """bfloat16 bits of every E4M3 code under every E8M0 scale byte, at `scale * 256 + code`.

    Everything is computed in float64, where all products are normal and exact, so that the flush-to-zero
    mode that a host process may have switched on changes nothing.
    """
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    product = magnitude * 2.0 ** (np.arange(256)[:, None] - 127)
    # The step between neighbouring bfloat16 values around the product: 2**-133 among the subnormals.
    step_exponent = np.maximum(np.frexp(product)[1] - 8, -133)
    steps = np.rint(np.ldexp(product, -step_exponent)).astype(np.int64)
    # 128 steps make up the implicit leading bit; a mantissa that rounds up carries into the exponent by itself.
    bits = np.where(steps < 128, steps, ((step_exponent + 133) << 7) + steps)
    bits = np.minimum(bits, _BF16_INFINITY)
    bits = np.where((code >= 128) & (bits > 0), bits | 0x8000, bits)
    bits[:, (code & 0x7F) == 0x7F] = _BF16_NAN
    bits[255] = _BF16_NAN
    table: npt.NDArray[np.uint16] = bits.astype(np.uint16).ravel()
    return table


_TABLE = _table()


def _read(buffer: AnyBuffer) -> Bytes:
    view = memoryview(cast("Buffer", buffer))
    if not view.c_contiguous:
        raise BufferError("a contiguous buffer is needed")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _write(buffer: AnyBuffer) -> Bytes:
    if memoryview(cast("Buffer", buffer)).readonly:
        raise BufferError("a writable buffer is needed")
    return _read(buffer)


def _rows_in(size: int, row_bytes: int, what: str) -> int:
    if size % row_bytes:
        raise ValueError(f"{what} has {size} bytes, no multiple of {row_bytes}")
    return size // row_bytes


def _demand(size: int, expected: int, what: str) -> None:
    if size != expected:
        raise ValueError(f"{what} has {size} bytes, expected {expected}")


def _demand_bf16(target: Bytes) -> None:
    if target.ctypes.data % 2:
        raise ValueError("out must be aligned to 2 bytes")


def pack(values: AnyBuffer, scales: AnyBuffer, packed: AnyBuffer) -> None:
    source, source_scales, target = _read(values), _read(scales), _write(packed)
    rows = _rows_in(source.size, ROW_VALUES, "values")
    _demand(source_scales.size, rows * ROW_SCALES, "scales")
    _demand(target.size, rows * ROW_BYTES, "packed")
    joined = target.reshape(rows, ROW_BYTES)
    joined[:, :ROW_VALUES] = source.reshape(rows, ROW_VALUES)
    joined[:, ROW_VALUES:] = source_scales.reshape(rows, ROW_SCALES)


def unpack(packed: AnyBuffer, values: AnyBuffer, scales: AnyBuffer) -> None:
    source, target, target_scales = _read(packed), _write(values), _write(scales)
    rows = _rows_in(source.size, ROW_BYTES, "packed")
    _demand(target.size, rows * ROW_VALUES, "values")
    _demand(target_scales.size, rows * ROW_SCALES, "scales")
    joined = source.reshape(rows, ROW_BYTES)
    target.reshape(rows, ROW_VALUES)[:] = joined[:, :ROW_VALUES]
    target_scales.reshape(rows, ROW_SCALES)[:] = joined[:, ROW_VALUES:]


def dequantise(packed_rows: AnyBuffer, out: AnyBuffer) -> None:
    source, target = _read(packed_rows), _write(out)
    rows = _rows_in(source.size, ROW_BYTES, "packed_rows")
    _demand(target.size, rows * ROW_VALUES * 2, "out")
    _demand_bf16(target)
    joined = source.reshape(rows, ROW_BYTES)
    result = target.view(np.uint16).reshape(rows, ROW_VALUES)
    for start in range(0, rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        result[part] = _dequantised(joined[part, :ROW_VALUES], joined[part, ROW_VALUES:])


def _dequantised(values: Bytes, scales: Bytes) -> npt.NDArray[np.uint16]:
    """values `[n, 256]`, scales `[n, 8]` -> bfloat16 bits `[n, 256]`."""
    first = scales.astype(np.int32).repeat(VALUES_PER_SCALE, axis=1) << 8
    bits: npt.NDArray[np.uint16] = _TABLE[first | values]
    return bits


def count_invalid(ids: Ids, table_rows: int, column_starts: AnyBuffer | None) -> tuple[int, int, int]:
    invalid, _ = _judge(_checked_ids(ids), table_rows, _starts(ids, column_starts))
    return _offence(ids, invalid)


def gather(
    segment: AnyBuffer,
    packed: bool,
    row_start: int,
    row_stop: int,
    table_rows: int,
    column_starts: AnyBuffer | None,
    ids: Ids,
    out: AnyBuffer,
    raw: bool,
) -> tuple[int, int, int]:
    stored, target = _read(segment), _write(out)
    if not 0 <= row_start <= row_stop <= table_rows:
        raise ValueError(f"rows {row_start} to {row_stop} are not in a table of {table_rows}")
    shard_rows = row_stop - row_start
    if stored.size < shard_rows * ROW_BYTES:
        raise ValueError(f"segment has {stored.size} bytes, expected at least {shard_rows * ROW_BYTES}")
    _checked_ids(ids)
    starts = _starts(ids, column_starts)
    out_row = ROW_BYTES if raw else ROW_VALUES * 2
    _demand(target.size, ids.size * out_row, "out")
    if not raw:
        _demand_bf16(target)
    invalid, named = _judge(ids, table_rows, starts)
    here = (named & (ids >= row_start) & (ids < row_stop)).ravel()
    flat = ids.ravel()
    values, scales = _planes(stored, packed, shard_rows)
    result = target.reshape(flat.size, out_row)
    for begin in range(0, flat.size, _CHUNK_ROWS):
        part = slice(begin, begin + _CHUNK_ROWS)
        rows = flat[part][here[part]].astype(np.int64) - row_start
        rows_out = np.zeros((min(_CHUNK_ROWS, flat.size - begin), out_row), np.uint8)
        if raw:
            rows_out[here[part], :ROW_VALUES] = values[rows]
            rows_out[here[part], ROW_VALUES:] = scales[rows]
        else:
            rows_out.view(np.uint16)[here[part]] = _dequantised(values[rows], scales[rows])
        result[part] = rows_out
    return _offence(ids, invalid)


def _planes(stored: Bytes, packed: bool, rows: int) -> tuple[Bytes, Bytes]:
    """The stored values `[rows, 256]` and scales `[rows, 8]` as views."""
    if packed:
        joined = stored[: rows * ROW_BYTES].reshape(rows, ROW_BYTES)
        return joined[:, :ROW_VALUES], joined[:, ROW_VALUES:]
    border = rows * ROW_VALUES
    return (
        stored[:border].reshape(rows, ROW_VALUES),
        stored[border : border + rows * ROW_SCALES].reshape(rows, ROW_SCALES),
    )


def _checked_ids(ids: Ids) -> Ids:
    if ids.ndim != 2 or ids.dtype not in (np.int32, np.int64):
        raise ValueError("ids must be 2-D, int32 or int64")
    return ids


def _starts(ids: Ids, column_starts: AnyBuffer | None) -> npt.NDArray[np.int64] | None:
    if column_starts is None:
        return None
    starts = _read(column_starts)
    _demand(starts.size, (ids.shape[1] + 1) * 8, "column_starts")
    return starts.view(np.int64)


def _judge(
    ids: Ids, table_rows: int, starts: npt.NDArray[np.int64] | None
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which ids are invalid, and which name a row of the table (and of their column)."""
    if starts is None:
        return ids >= table_rows, (ids >= 0) & (ids < table_rows)
    named = (ids >= starts[:-1]) & (ids < starts[1:])
    return (ids > 0) & ~named, named


def _offence(ids: Ids, invalid: npt.NDArray[np.bool_]) -> tuple[int, int, int]:
    count = int(np.count_nonzero(invalid))
    if not count:
        return 0, 0, -1
    position = int(np.argmax(invalid))
    return count, int(ids.flat[position]), position


def make(key: int, row_start: int, every_code: bool, values: AnyBuffer, scales: AnyBuffer) -> None:
    target, target_scales = _write(values), _write(scales)
    count = _rows_in(target.size, ROW_VALUES, "values")
    _demand(target_scales.size, count * ROW_SCALES, "scales")
    target, target_scales = target.reshape(count, ROW_VALUES), target_scales.reshape(count, ROW_SCALES)
    for first, words, scratch in _made_words(key, row_start, count):
        raw = words.view(np.uint8).reshape(-1, ROW_BYTES)
        part = slice(first, first + len(raw))
        target_scales[part] = raw[:, ROW_VALUES:]
        if not every_code:
            _remove_nan(words, scratch)
        target[part] = raw[:, :ROW_VALUES]
    if every_code:
        target[:, 0] = target_scales[:, 0] = (np.arange(count) + row_start % 256).astype(np.uint8)
    else:
        target_scales[:] = (target_scales.astype(np.uint16) * 13 >> 8) + 118


def _made_words(
    key: int, row_start: int, count: int
) -> Iterator[tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
    """Index of each chunk's first row, its words (little-endian uint64 [rows * 33]), and as much scratch space;
    both are good until the next chunk."""
    row_words = ROW_BYTES // 8
    size = min(count, _MADE_ROWS) * row_words
    steps = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    words, scratch = np.empty(size, "<u8"), np.empty(size, np.uint64)
    for first in range(0, count, _MADE_ROWS):
        used = min(_MADE_ROWS, count - first) * row_words
        state = (key + (row_start + first) * row_words * _GAMMA) % 2**64
        z, t = words[:used], scratch[:used]
        np.add(steps[:used], np.uint64(state), out=z)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            np.right_shift(z, np.uint64(shift), out=t)
            np.bitwise_xor(z, t, out=z)
            np.multiply(z, np.uint64(factor), out=z)
        np.right_shift(z, np.uint64(31), out=t)
        np.bitwise_xor(z, t, out=z)
        yield first, z, t


def _remove_nan(words: npt.NDArray[np.uint64], scratch: npt.NDArray[np.uint64]) -> None:
    """Clears the lowest bit of every byte whose seven low bits are all set, eight bytes at a time: adding one to
    those seven bits sets the eighth just then, and never carries into the next byte."""
    np.bitwise_and(words, np.uint64(0x7F7F7F7F7F7F7F7F), out=scratch)
    np.add(scratch, np.uint64(0x0101010101010101), out=scratch)
    np.right_shift(scratch, np.uint64(7), out=scratch)
    np.bitwise_and(scratch, np.uint64(0x0101010101010101), out=scratch)
    np.bitwise_xor(words, scratch, out=words)
