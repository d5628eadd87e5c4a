"""What was wanted of the GPU path beside what the benchmarks measured: `python -m tests.bench.bars [FOLDER]`.

Reads the CSV files that `make bench-gpu` and `make bench-full` leave in bench-results. A bar whose numbers are not
there is listed as not measured. "not slower" is within 5 %, for that is what a median differs by from run to run.
"""

from __future__ import annotations

import argparse
import csv
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

NOT_SLOWER = 0.95
FULL_GIB = 94
"""Of each of the two tables: what takes longer the larger they are is not judged by smaller ones."""
Rows = list[dict[str, str]]


class Bar(NamedTuple):
    """value: None where it was not measured."""

    what: str
    wanted: str
    value: float | None
    unit: str
    met: bool

    @property
    def verdict(self) -> str:
        return "not measured" if self.value is None else "met" if self.met else "MISSED"


def bar(what: str, value: float | None, compare: str, limit: float, unit: str) -> Bar:
    good = value is not None and COMPARE[compare](value, limit)
    return Bar(what, f"{compare} {limit:g} {unit}".rstrip(), value, unit, good)


COMPARE: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<": operator.lt}


def ratio(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or ours is None else theirs / ours


def gathers(rows: Rows) -> Iterator[Bar]:
    """One table on one GPU, against SGLang's gather."""
    found: dict[tuple[str, str, int, str], float] = {}
    for row in rows:
        found[row["memory"], row["ids"], int(row["tokens"]), row["arm"]] = float(row["median_us"])

    def times(memory: str, ids: str, tokens: int, ours: str, theirs: str) -> float | None:
        return ratio(found.get((memory, ids, tokens, theirs)), found.get((memory, ids, tokens, ours)))

    for ids in ("random", "text"):
        for tokens, limit in ((1, NOT_SLOWER), (16, NOT_SLOWER), (1024, 2), (8192, 2.3)):
            value = times("device", ids, tokens, "ours_planar", "sglang")
            yield bar(f"GPU memory, {ids} ids, T={tokens}: faster than SGLang", value, ">=", limit, "x")
        for tokens, limit in ((1, NOT_SLOWER), (16, 1.5), (128, 1.5), (1024, 1.5)):
            value = times("host", ids, tokens, "ours_packed", "sglang")
            yield bar(f"host, {ids} ids in their order, T={tokens}: faster than SGLang", value, ">=", limit, "x")
        for name, limit in (("", NOT_SLOWER), (" (goal)", 1.3)):
            value = times("host", ids, 8192, "ours_packed_sorted", "sglang_sorted")
            yield bar(f"host, {ids} ids, sorted, T=8192: faster than SGLang's sorted{name}", value, ">=", limit, "x")


def named(rows: Rows, pattern: str) -> float | None:
    """The value of the last line whose name matches."""
    values = [float(row["value"]) for row in rows if re.fullmatch(pattern, row["name"])]
    return values[-1] if values else None


def groups(rows: Rows) -> Iterator[Bar]:
    """Of two ranks: what larger groups take has nothing to be compared with."""
    rows = [row for row in rows if row["ranks"] == "2"]
    for tokens, limit in ((1, NOT_SLOWER), (16, NOT_SLOWER), (1024, 1.4), (8192, 1.4)):
        theirs = named(rows, f"peer_read, T={tokens}: SGLang's peer kernel")
        value = ratio(theirs, named(rows, f"peer_read, T={tokens}: peer_read"))
        yield bar(f"peer_read, half the rows local, T={tokens}: faster than SGLang", value, ">=", limit, "x")
    for tokens, limit in ((1, NOT_SLOWER), (16, NOT_SLOWER), (128, NOT_SLOWER), (1024, 1.3), (8192, 1.8)):
        summed = named(rows, f"collective, T={tokens}: zero-fill .*")
        value = ratio(summed, named(rows, f"collective, T={tokens}: collective .*"))
        yield bar(f"collective, T={tokens}: faster than a sum with our gather", value, ">=", limit, "x")


def client(rows: Rows) -> Iterator[Bar]:
    slower = named(rows, r"prefetch of 2 layers, T=128: GEMMs slower by")
    yield bar("prefetch of two layers, T=128: GEMMs beside it slower", slower, "<", 3, "%")
    waits = named(rows, r"prefetch of 2 layers, T=128: consumer waits")
    yield bar("prefetch of two layers, T=128: its consumer waits", waits, "<", 10, "us")


def loads(rows: Rows) -> Iterator[Bar]:
    yield bar(
        "load from the page cache, of what the links copy", named(rows, r".*of what the links copy"), ">=", 0.7, ""
    )


def full_size(rows: Rows) -> Iterator[Bar]:
    attach = "two ranks at once, slowest attach"
    full = [row for row in rows if (size := re.match(r"2 x ([\d.]+) GiB", row["note"])) and float(size[1]) >= FULL_GIB]
    yield bar("189 GiB of host memory, two ranks attach", named(full, f"cuda_host: {attach}"), "<", 5, "s")
    yield bar("a 94 GiB shard, attach", named(full, "shards: one rank alone attach"), "<", 0.02, "s")
    yield bar("a 94 GiB shard each, two ranks attach", named(full, f"shards: {attach}"), "<", 0.02, "s")
    for way in ("gpu", "shards", "cuda_host", "memfd"):
        beside = named(rows, f"{way}: GPU memory beside the tables, a GPU")
        yield bar(f"{way}: GPU memory that the daemon takes, a GPU", beside, "<", 16, "MiB")


FILES: dict[str, Callable[[Rows], Iterator[Bar]]] = {
    "gather_gpu.csv": gathers,
    "groups.csv": groups,
    "client_gpu.csv": client,
    "load_gpu.csv": loads,
    "full_size.csv": full_size,
}


def bars(folder: Path) -> list[Bar]:
    found = []
    for name, judge in FILES.items():
        rows: Rows = []
        if (folder / name).exists():
            with (folder / name).open(newline="") as file:
                rows = list(csv.DictReader(file))
        found += judge(rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("bench-results"))
    for each in bars(parser.parse_args().folder):
        value = "" if each.value is None else f"{each.value:.3g} {each.unit}"
        print(f"{each.what:72s} {each.wanted:10s} {value:>10s}  {each.verdict}")


if __name__ == "__main__":
    main()
