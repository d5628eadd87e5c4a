"""How long lookups will take in groups of 2, 4 and 8 ranks, on as many GPUs, predicted from two.

    python -m tests.bench.predict                   the table, from what was measured with two ranks
    python -m tests.bench.predict groups.csv        measured beside predicted, where groups.py measured
    python -m tests.bench.predict --write           the table into docs/measurements.md

The model: what was measured with two ranks, and what a larger group adds or saves.

- NVSwitch gives each GPU the same NVLink rate in any group, both ways at once.
- all-gather: (n-1)/n of T x 24 x 264 bytes come into each GPU, at the rate that two ranks reach with 8,192 tokens when
  their gather, the dequantising and what one token takes are left out; each rank more costs STEP_US; each rank gathers
  24/n rows a token.
- all-reduce: 2(n-1)/n of T x 24 x 512 bytes, at a rate found likewise; two steps for each rank more.
- peer_read: (n-1)/n of the rows lie elsewhere, and each costs what it does with 8,192 tokens; reads of a GPU's own
  memory hide behind them. Others that read meanwhile slow nothing more than one other does.
- host, per_node: every rank reads all rows over a link of its own, and no rank slows another: any group is alike.
- host, split reads: each rank reads 24/n rows a token, which lie in 1/n of the table, then the all-gather's exchange.
  A read in a smaller table misses fewer translations: its time falls as TRANSLATION_GB_S says, sorted or not, but not
  below what one token takes.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Sequence
from math import log2
from pathlib import Path

from engram_client.layout import ROW_BYTES
from engram_client.lookup.shapes import SORT_FROM_IDS
from tests.bench.group_table import TOKENS, Arm, Times, heading, read_rows, shown, times_of

RANKS = (2, 4, 8)
COLUMNS = 24
BF16_BYTES = 512
"""Of a row of 256 values."""

DOCS = Path(__file__).parents[2] / "docs" / "measurements.md"
MEASURED = DOCS.parent / "measurements"
TWO = times_of(read_rows(MEASURED / "groups.csv"))
ONE = {
    (row["memory"], row["arm"], int(row["tokens"])): float(row["median_us"])
    for row in read_rows(MEASURED / "gather_gpu.csv")
    if row["ids"] == "random"
}

ALL_GATHER = Arm("collective", "collective (all-gather of stored rows)")
ALL_REDUCE = Arm("collective", "zero-fill + all-reduce, our gather")
PEER_READ, PEER_READ_ALONE = Arm("peer_read", "all ranks at once"), Arm("peer_read", "peer_read")
PER_NODE, SPLIT = Arm("per_node", "all ranks at once"), Arm("per_node", "split reads")


def by_two(arm: Arm) -> tuple[float, ...]:
    return tuple(TWO[arm][2][tokens] for tokens in TOKENS)


def by_one(memory: str, arm: str, tokens: Sequence[int] = TOKENS) -> tuple[float, ...]:
    return tuple(ONE[memory, arm, count] for count in tokens)


# What was measured: microseconds at 1, 16, 128, 1,024 and 8,192 tokens, NVIDIA H200, in docs/measurements.
ALL_GATHER_US = by_two(ALL_GATHER)
"""groups.csv, two ranks."""
ALL_REDUCE_US = by_two(ALL_REDUCE)
"""groups.csv, two ranks."""
BOTH_READ = 2 in TWO.get(PEER_READ, {})
PEER_READ_US = by_two(PEER_READ if BOTH_READ else PEER_READ_ALONE)
"""groups.csv, two ranks, both reading, or where that was not measured rank 0 alone."""
GPU_US = by_one("device", "ours_planar")
"""gather_gpu.csv: 16 GiB, random ids."""
HOST_US = by_one("host", "ours_packed")
"""gather_gpu.csv: 90 GiB, random ids in their own order."""
HOST_SORTED_US = by_one("host", "ours_packed_sorted", TOKENS[-2:])
"""gather_gpu.csv: 90 GiB, random ids put in order, as from SORT_FROM_IDS ids on, at 1,024 and 8,192 tokens."""
HOST_GIB = 90
TRANSLATION_GB_S = {0.25: 37.0, 1: 27.0, 4: 12.0, 16: 9.5, 32: 8.2, 189: 6.2}
"""GB/s of 1,024 tokens by GiB of the table in host memory: measurements.md, "By group size"."""

# What was not.
STEP_US = 1.0
"""Of a ring of small messages, for each rank more. Assumed."""

BEGIN, END = "<!-- made by python -m tests.bench.predict --write -->", "<!-- end of what predict made -->"

ROWS = tuple(COLUMNS * tokens for tokens in TOKENS)
MOST = TOKENS[-1]
"""Tokens of the batch that rates are found at."""


def line(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Through the points, and on beyond the last two at either end."""
    at = min(max(bisect_right(xs, x), 1), len(xs) - 1)
    return ys[at - 1] + (ys[at] - ys[at - 1]) * (x - xs[at - 1]) / (xs[at] - xs[at - 1])


def gpu_us(rows: float) -> float:
    """A gather from the GPU's own memory."""
    return max(GPU_US[0], line(ROWS, GPU_US, rows))


def translation_ns(gib: float) -> float:
    """Of a row that a GPU reads in a host table of that size, in a batch."""
    sizes = sorted(TRANSLATION_GB_S)
    return line([log2(size) for size in sizes], [ROW_BYTES / TRANSLATION_GB_S[size] for size in sizes], log2(gib))


def host_us(rows: float, part: float = 1) -> float:
    """A gather from `part` of the table in host memory."""
    whole = line(ROWS, HOST_US, rows) if rows < SORT_FROM_IDS else line(ROWS[-2:], HOST_SORTED_US, rows)
    scale = translation_ns(HOST_GIB * part) / translation_ns(HOST_GIB)
    return HOST_US[0] + max(0.0, whole - HOST_US[0]) * scale


def elsewhere(ranks: int) -> float:
    """The part of all rows that other ranks hold."""
    return (ranks - 1) / ranks


DEQUANTISE_US = gpu_us(COLUMNS * MOST) - GPU_US[0]
"""Of all rows at MOST tokens: as long as a gather of them, but for the launch."""
GATHER_BYTES_A_US = (elsewhere(2) * COLUMNS * MOST * ROW_BYTES) / (
    ALL_GATHER_US[-1] - ALL_GATHER_US[0] - DEQUANTISE_US - (gpu_us(COLUMNS * MOST / 2) - GPU_US[0])
)
REDUCE_BYTES_A_US = (2 * elsewhere(2) * COLUMNS * MOST * BF16_BYTES) / (
    ALL_REDUCE_US[-1] - ALL_REDUCE_US[0] - DEQUANTISE_US
)
PEER_ROW_US = (PEER_READ_US[-1] - PEER_READ_US[0]) / (elsewhere(2) * COLUMNS * MOST)


def all_gather_us(ranks: int, tokens: int) -> float:
    rows = COLUMNS * tokens
    more_bytes = (elsewhere(ranks) - elsewhere(2)) * rows * ROW_BYTES
    gathers = gpu_us(rows / ranks) - gpu_us(rows / 2)
    return at(ALL_GATHER_US, tokens) + more_bytes / GATHER_BYTES_A_US + STEP_US * (ranks - 2) + gathers


def all_reduce_us(ranks: int, tokens: int) -> float:
    more_bytes = 2 * (elsewhere(ranks) - elsewhere(2)) * COLUMNS * tokens * BF16_BYTES
    return at(ALL_REDUCE_US, tokens) + more_bytes / REDUCE_BYTES_A_US + 2 * STEP_US * (ranks - 2)


def peer_read_us(ranks: int, tokens: int) -> float:
    return at(PEER_READ_US, tokens) + (elsewhere(ranks) - elsewhere(2)) * COLUMNS * tokens * PEER_ROW_US


def per_node_us(ranks: int, tokens: int) -> float:
    return host_us(COLUMNS * tokens)


def split_us(ranks: int, tokens: int) -> float:
    rows = COLUMNS * tokens / ranks
    return host_us(rows, 1 / ranks) + all_gather_us(ranks, tokens) - gpu_us(rows)


def at(measured: Sequence[float], tokens: int) -> float:
    return measured[TOKENS.index(tokens)]


MODEL = {
    "GPU memory, all-gather": (ALL_GATHER, all_gather_us),
    "GPU memory, all-reduce": (ALL_REDUCE, all_reduce_us),
    "GPU memory, `peer_read`": (PEER_READ, peer_read_us),
    "host memory, `per_node`": (PER_NODE, per_node_us),
    "host memory, split reads": (SPLIT, split_us),
}


def table() -> str:
    lines = [heading("microseconds, predicted", TOKENS)]
    for name, (_, model) in MODEL.items():
        for ranks in RANKS:
            cells = [shown(model(ranks, tokens)) for tokens in TOKENS]
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    lines += [
        "",
        f"What two ranks give for it: an all-gather {GATHER_BYTES_A_US / 1e3:.0f} GB/s, an all-reduce "
        f"{REDUCE_BYTES_A_US / 1e3:.0f} GB/s,",
        f"a row of another rank's memory {1e3 * PEER_ROW_US:.2f} ns, one token from host memory {HOST_US[0]:.2f} us.",
        f"`peer_read` by two ranks was measured while {'both' if BOTH_READ else 'one'} read.",
    ]
    if proved(TWO):
        lines += ["", beside(proved(TWO), only_measured=True)]
    return "\n".join(lines)


def proved(measured: Times) -> Times:
    """What the model has not been given: larger groups, and host memory."""
    taken = {ALL_GATHER, ALL_REDUCE, PEER_READ}
    return {
        arm: {ranks: line for ranks, line in measured[arm].items() if ranks > 2 or arm not in taken}
        for arm, _ in MODEL.values()
        if arm in measured and (arm not in taken or max(measured[arm]) > 2)
    }


def beside(measured: Times, only_measured: bool = False) -> str:
    """Measured / predicted = ratio, where there is a measurement."""
    lines = [heading("microseconds, measured / predicted", TOKENS)]
    for name, (arm, model) in MODEL.items():
        for ranks in RANKS:
            found = measured.get(arm, {}).get(ranks, {})
            if only_measured and not found:
                continue
            cells = [compared(found.get(tokens), model(ranks, tokens)) for tokens in TOKENS]
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compared(measured: float | None, predicted: float) -> str:
    if measured is None:
        return f"- / {shown(predicted)}"
    return f"{shown(measured)} / {shown(predicted)} = {measured / predicted:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.measured is not None:
        print(beside(times_of(read_rows(options.measured))))
        return
    print(table())
    if options.write:
        before, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
        DOCS.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
