"""The CPU lookup against plain torch: random rows of a packed table of 1 GiB, every repetition other rows.

    python -m tests.bench.lookup_cpu [--tokens 8192] [--gib 1.0]

Plain torch is `index_select` of the stored rows (uint8 `[rows, 264]`) into a buffer made beforehand, and the
fastest of several ways to dequantise them; each is measured, and the best counts. Both sides read the same
memory, with the same number of threads, warm, and their rows are compared. Prints one JSON object; `ratio` is
plain torch's time over ours (above 1: ours is faster).
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram_client import rows
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES, RowFormat, TableGeometry, whole
from engram_client.lookup.cpu import SegmentRows

COLUMNS = 24
REPETITIONS = 5
HUGE_PAGE = 2 << 20


def run(tokens: int = 8192, gib: float = 1.0) -> dict[str, Any]:
    """Medians in milliseconds of REPETITIONS lookups of `tokens` x 24 rows, and their ratio."""
    geometry, packed = _table(gib)
    stored = torch.from_numpy(packed)
    table = SegmentRows(packed, geometry, whole(geometry), RowFormat.PACKED)
    out = torch.empty(tokens, COLUMNS, ROW_VALUES, dtype=torch.bfloat16)
    raw = torch.empty(tokens * COLUMNS, ROW_BYTES, dtype=torch.uint8)

    ours = _median_ms(lambda ids: table.lookup(ids, out, hashed=True), geometry, tokens)
    select = _median_ms(lambda ids: torch.index_select(stored, 0, ids.view(-1), out=raw), geometry, tokens)
    plain = {}
    for name, dequantise in PLAIN.items():

        def whole_way(ids: Tensor, dequantise: Callable[[Tensor, Tensor], None] = dequantise) -> None:
            torch.index_select(stored, 0, ids.view(-1), out=raw)
            dequantise(raw, out.view(-1, ROW_VALUES))

        plain[name] = _median_ms(whole_way, geometry, tokens)
        _compare(table, whole_way, out, geometry, tokens)
    best = min(plain, key=lambda name: plain[name])
    return {
        "benchmark": "lookup_cpu",
        "tokens": tokens,
        "rows": tokens * COLUMNS,
        "table_bytes": packed.nbytes,
        "threads": torch.get_num_threads(),
        "native": rows.NATIVE,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "repetitions": REPETITIONS,
        "ours_ms": round(ours, 3),
        "torch_index_select_ms": round(select, 3),
        "torch_ms": {name: round(value, 3) for name, value in plain.items()},
        "torch_best": best,
        "ratio": round(plain[best] / ours, 3),
    }


def _table(gib: float) -> tuple[TableGeometry, np.ndarray]:
    """Random rows with the scales of a real table (near 2**-10), in huge pages where the kernel gives them."""
    column = int(gib * (1 << 30)) // ROW_BYTES // COLUMNS
    geometry = TableGeometry(layer_id=1, columns=(column,) * COLUMNS)
    room = mmap.mmap(-1, geometry.nbytes + HUGE_PAGE)
    room.madvise(mmap.MADV_HUGEPAGE)
    packed = np.frombuffer(room, np.uint8, geometry.nbytes).reshape(geometry.rows, ROW_BYTES)
    generator = np.random.default_rng(0)
    # One block again and again: filling is not what is measured, and no row is read from a cache for it.
    block = generator.integers(0, 256, (1 << 16, ROW_BYTES), dtype=np.uint8)
    block[:, ROW_VALUES:] = generator.integers(110, 124, (1 << 16, ROW_SCALES))
    for start in range(0, geometry.rows, len(block)):
        part = packed[start : start + len(block)]
        part[:] = block[: len(part)]
    return geometry, packed


def _batches(geometry: TableGeometry, tokens: int) -> list[Tensor]:
    generator = np.random.default_rng(1)
    starts = np.array(geometry.column_starts)
    # The first one warms up: threads, and the pages of the output.
    return [
        torch.from_numpy(generator.integers(starts[:-1], starts[1:], (tokens, COLUMNS))) for _ in range(REPETITIONS + 1)
    ]


def _median_ms(lookup: Callable[[Tensor], object], geometry: TableGeometry, tokens: int) -> float:
    first, *batches = _batches(geometry, tokens)
    lookup(first)
    times = []
    for ids in batches:
        start = time.perf_counter()
        lookup(ids)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _compare(
    table: SegmentRows, plain: Callable[[Tensor], None], out: Tensor, geometry: TableGeometry, tokens: int
) -> None:
    """Plain torch keeps the sign of zeros and the bits of NaNs; values must be equal."""
    ids = _batches(geometry, tokens)[0]
    plain(ids)
    ours = table.lookup(ids, hashed=True).rows
    if not torch.equal(out.isnan(), ours.isnan()) or not torch.equal(out.nan_to_num(), ours.nan_to_num()):
        raise RuntimeError("plain torch and the lookup disagree")


# Ways to dequantise stored rows `[n, 264]` into bfloat16 `[n, 256]` in plain torch.


def _by_bfloat16(raw: Tensor, out: Tensor) -> None:
    values = raw[:, :ROW_VALUES].view(torch.float8_e4m3fn).view(-1, ROW_SCALES, 32)
    scales = raw[:, ROW_VALUES:].view(torch.float8_e8m0fnu).to(torch.bfloat16)
    groups = out.view(-1, ROW_SCALES, 32)
    groups.copy_(values)
    groups.mul_(scales.unsqueeze(-1))


def _by_float32(raw: Tensor, out: Tensor) -> None:
    values = raw[:, :ROW_VALUES].view(torch.float8_e4m3fn).float().view(-1, ROW_SCALES, 32)
    scales = raw[:, ROW_VALUES:].view(torch.float8_e8m0fnu).float()
    out.view(-1, ROW_SCALES, 32).copy_(values.mul_(scales.unsqueeze(-1)))


def _in_cached_pieces(raw: Tensor, out: Tensor) -> None:
    for start in range(0, len(raw), 4096):
        _by_bfloat16(raw[start : start + 4096], out[start : start + 4096])


_codes = torch.arange(256, dtype=torch.uint8)
_LOOKUP = (
    (_codes.view(torch.float8_e8m0fnu).float().unsqueeze(1) * _codes.view(torch.float8_e4m3fn).float())
    .to(torch.bfloat16)
    .view(-1)
)


def _by_table(raw: Tensor, out: Tensor) -> None:
    index = raw[:, ROW_VALUES:].int().mul_(256).unsqueeze(-1) + raw[:, :ROW_VALUES].view(-1, ROW_SCALES, 32)
    torch.index_select(_LOOKUP, 0, index.view(-1), out=out.view(-1))


PLAIN: dict[str, Callable[[Tensor, Tensor], None]] = {
    "bfloat16": _by_bfloat16,
    "float32": _by_float32,
    "bfloat16_in_pieces": _in_cached_pieces,
    "table": _by_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU lookup against plain torch")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--gib", type=float, default=1.0)
    options = parser.parse_args()
    sys.stdout.write(json.dumps(run(options.tokens, options.gib)) + "\n")


if __name__ == "__main__":
    main()
