"""Draws docs/lookup.svg from the CSV files in docs/measurements: `python -m tests.bench.plot`. Needs matplotlib."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

from tests.bench.group_table import read_rows, times_of

DOCS = Path(__file__).parents[2] / "docs"
GATHER = {
    ("device", "ours_planar"): "GPU memory, whole table",
    ("device", "sglang"): "GPU memory, SGLang's gather",
    ("host", "ours_packed"): "host memory, ids in their own order",
    ("host", "ours_packed_sorted"): "host memory, ids in order of address",
    ("host", "sglang_sorted"): "host memory, SGLang's sorted gather",
}
TWO_GPUS = {
    "peer_read": "two GPUs, peer_read",
    "collective (as the client chooses)": "two GPUs, collective",
    "split reads (as the client chooses)": "two GPUs, host memory, split reads",
}


def series() -> dict[str, dict[int, float]]:
    """Microseconds by tokens, by label."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    with (DOCS / "measurements" / "gather_gpu.csv").open() as file:
        for line in csv.DictReader(file):
            label = GATHER.get((line["memory"], line["arm"]))
            if label and line["ids"] == "random":
                found[label][int(line["tokens"])] = float(line["median_us"])
    for arm, sizes in times_of(read_rows(DOCS / "measurements" / "groups.csv")).items():
        if arm.name in TWO_GPUS:
            found[TWO_GPUS[arm.name]] |= sizes[2]
    return found


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "engram"  # the same file from the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for label, points in sorted(series().items(), key=lambda item: max(item[1].values())):
        theirs = "SGLang" in label
        axes.plot(*zip(*sorted(points.items()), strict=True), "--" if theirs else "-", marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens (24 rows each)", ylabel="microseconds a lookup")
    axes.set_title("Lookup by memory and batch, NVIDIA H200")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(DOCS / "lookup.svg", metadata={"Date": None}, bbox_inches="tight")


if __name__ == "__main__":
    main()
