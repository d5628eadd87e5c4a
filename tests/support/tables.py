"""Random tables for tests, and what a lookup in them must return, computed by ml_dtypes and float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

ROW_BYTES = 264


def reference_bf16(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """bfloat16 bits of values `[n, 256]` under scales `[n, 8]`."""
    code = values.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factor = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127)).repeat(32, axis=1)
    with np.errstate(over="ignore", invalid="ignore"):
        bits = (code * factor).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    bits = np.where((bits & 0x7FFF) > 0x7F80, np.uint16(0x7FC0), bits)
    return np.where(bits == 0x8000, np.uint16(0), bits)


def random_table(count: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """values `[count, 256]` and scales `[count, 8]`, every byte possible."""
    generator = np.random.default_rng(seed)
    return (
        generator.integers(0, 256, (count, 256), dtype=np.uint8),
        generator.integers(0, 256, (count, 8), dtype=np.uint8),
    )


def packed_of(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.concatenate([values, scales], axis=1))


def planar_of(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return np.concatenate([values.ravel(), scales.ravel()])


def reference_gather(
    values: np.ndarray,
    scales: np.ndarray,
    ids: np.ndarray,
    shard: tuple[int, int],
    starts: list[int] | None,
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Packed rows `[*ids.shape, 264]` of `shard` and (invalid ids, the first, its position), one id at a time.

    starts: first rows of the columns of ids' last dimension, and the end of the last one.
    """
    out = np.zeros((*ids.shape, ROW_BYTES), np.uint8)
    offenders = []
    for position, (where, each) in enumerate(np.ndenumerate(ids)):
        found = int(each)
        low, high = (starts[where[-1]], starts[where[-1] + 1]) if starts else (0, len(values))
        if low <= found < high:
            if shard[0] <= found < shard[1]:
                out[where] = np.concatenate([values[found], scales[found]])
        elif found > 0:
            offenders.append((found, position))
    return out, (len(offenders), *offenders[0]) if offenders else (0, 0, -1)


def dequantised(packed: np.ndarray) -> np.ndarray:
    """bfloat16 bits `[..., 256]` of stored rows `[..., 264]`; a row of zero bytes is zero."""
    flat = packed.reshape(-1, ROW_BYTES)
    bits = reference_bf16(np.ascontiguousarray(flat[:, :256]), flat[:, 256:])
    return bits.reshape(*packed.shape[:-1], 256)
