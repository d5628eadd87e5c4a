"""The verdicts on GPU benchmarks: each bar can be missed, and what was not measured is not called met."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.bench.bars import FILES, bars


def write(path: Path, lines: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def measured(folder: Path, ours: float) -> None:
    """Everything at a moderate speed, but for our own arms: `ours` times as long, or as much."""
    gathers: list[dict[str, object]] = [
        {"memory": memory, "ids": ids, "tokens": tokens, "arm": arm, "median_us": 100 * (ours if "ours" in arm else 1)}
        for memory in ("device", "host")
        for ids in ("random", "text")
        for tokens in (1, 16, 128, 1024, 8192)
        for arm in ("ours_planar", "ours_packed", "ours_packed_sorted", "sglang", "sglang_sorted")
    ]
    write(folder / "gather_gpu.csv", gathers)
    pairs: list[dict[str, object]] = []
    for tokens in (1, 16, 128, 1024, 8192):
        pairs += [
            {"name": name, "value": value, "ranks": ranks}
            for ranks, ours in ((2, ours), (8, 1 / ours))  # of eight nothing is asked
            for name, value in (
                (f"peer_read, T={tokens}: peer_read", 10 * ours),
                (f"peer_read, T={tokens}: SGLang's peer kernel", 10),
                (f"peer_read, T={tokens}: all ranks at once", 1000),
                (f"collective, T={tokens}: collective (all-gather of stored rows)", 1000),
                (f"collective, T={tokens}: collective (as the client chooses)", 10 * ours),
                (f"collective, T={tokens}: zero-fill + all-reduce, our gather", 10),
                (f"collective, T={tokens}: SGLang's gather + all-reduce", 1000),
            )
        ]
    write(folder / "groups.csv", pairs)
    beside: list[dict[str, object]] = [
        {"name": "prefetch of 2 layers, T=128: GEMMs slower by", "value": 4 * ours},
        {"name": "prefetch of 2 layers, T=128: consumer waits", "value": 20 * ours},
    ]
    write(folder / "client_gpu.csv", beside)
    write(folder / "load_gpu.csv", [{"name": "page cache, 16 threads: of what the links copy", "value": 0.3 / ours}])
    sizes: list[dict[str, object]] = [
        {"name": f"{way}: {name}", "value": value, "note": "2 x 94.4 GiB, 2 GPUs"}
        for way, attach in (("gpu", 0.1), ("shards", 0.02), ("cuda_host", 5), ("memfd", 12))
        for name, value in (
            ("two ranks at once, slowest attach", attach * 1.9 * ours),
            ("one rank alone attach", attach * 1.9 * ours),
            ("GPU memory beside the tables, a GPU", 30 * ours),
        )
    ]
    write(folder / "full_size.csv", sizes)


@pytest.mark.parametrize(("ours", "verdict"), [(0.25, "met"), (2.0, "MISSED")])
def test_a_fast_path_meets_every_bar_and_a_slow_one_misses_every_bar(tmp_path: Path, ours: float, verdict: str) -> None:
    measured(tmp_path, ours)
    found = bars(tmp_path)
    assert {bar.what: bar.verdict for bar in found} == {bar.what: verdict for bar in found}


def test_what_was_not_measured_is_called_neither_met_nor_missed(tmp_path: Path) -> None:
    assert {bar.verdict for bar in bars(tmp_path)} == {"not measured"}
    measured(tmp_path, 0.25)
    for name in FILES:
        (tmp_path / name).rename(tmp_path / "away")
        assert {bar.verdict for bar in bars(tmp_path)} == {"met", "not measured"}
        (tmp_path / "away").rename(tmp_path / name)


def test_an_attach_of_smaller_tables_meets_no_bar(tmp_path: Path) -> None:
    measured(tmp_path, 2.0)
    path = tmp_path / "full_size.csv"
    with path.open("a", newline="") as file:
        csv.writer(file).writerow(["cuda_host: two ranks at once, slowest attach", 1.4, "2 x 24.0 GiB, 2 GPUs"])
    (attach,) = [bar for bar in bars(tmp_path) if bar.what.startswith("189 GiB")]
    assert attach.verdict == "MISSED"
