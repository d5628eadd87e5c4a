"""Tables that a group of ranks reads, by the size of the group, on as many GPUs.

    python -m tests.bench.groups [--ranks 2,4,8] [--sglang engram_gather.py] [--gib 16] [--host-gib 90]
        [--tokens 1,16,128,1024,8192] [--kinds collective,peer_read,per_node]

`--ranks`: those that the machine has no GPUs for are left out. For each: tables of `--gib` GiB split over the GPUs, for
collective and for peer_read, and a whole one of `--host-gib` in host memory, made once for all groups. Lookups are the
device time of graph replays, ids fresh before each, of the slowest rank, all ranks at once, but where a name says
otherwise: "peer_read" is rank 0 alone, as SGLang's peer kernel beside it. In "collective" the first arms use our
gather kernel; SGLang's gather with a bfloat16 all-reduce is reported beside them. Attaches are by all ranks at once,
loads into all GPUs at once. Results as CSV; a table by group size at the end. `--sglang`: see gather_gpu.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.bench.gpu_support import Results, commit_of, dummy_daemon
from tests.bench.group_arms import LAYER, SEED, Gpus, Report, Task, work
from tests.bench.group_table import TOKENS, by_group, read_rows
from tests.support.daemon import Daemon
from tests.support.ranks import RankFailed, run_ranks

SIZES = (2, 4, 8)
KINDS = ("collective", "peer_read", "per_node")
WHOLE = {"placement": "cpu", "replication": "per_node"}
ATTACHES = 3
LIMIT_S = 300
GB = 1e9


class Groups:
    """One run: what it measures, and where that goes."""

    def __init__(self, options: argparse.Namespace, gpus: Gpus, results: Results) -> None:
        self._options, self._gpus, self._results = options, gpus, results
        self._sglang = os.path.abspath(options.sglang) if options.sglang else ""
        self.failed: list[str] = []
        """What could not be measured, while the rest was."""

    def run(self, sizes: Sequence[int]) -> None:
        kinds = self._options.kinds.split(",")
        for ranks in sizes:
            for kind in (kind for kind in kinds if kind != "per_node"):
                engram = {"placement": "gpu", "lookup": kind}
                with self._daemon(kind, ranks, engram, devices=list(range(ranks)), tp_size=ranks) as daemon:
                    self._measure(kind, ranks, daemon, f"{self._options.gib:g} GiB over {ranks} GPUs")
        if "per_node" in kinds:
            with self._daemon("per_node", max(sizes), WHOLE) as daemon:
                backing = daemon.status().segments[0].info.backing
                for ranks in sizes:
                    self._measure("per_node", ranks, daemon, f"{self._options.host_gib:g} GiB of {backing}")

    @contextmanager
    def _daemon(self, kind: str, ranks: int, engram: dict[str, str], **rest: Any) -> Iterator[Daemon]:
        """A daemon whose load is reported, of GPU memory also as a rate."""
        gib = self._options.host_gib if kind == "per_node" else self._options.gib
        begin = time.perf_counter()
        with dummy_daemon(engram, gib, [LAYER], seed=SEED, **rest) as daemon:
            took = time.perf_counter() - begin
            self._results.add(f"{kind}: exec to ready, rows made", took, "s", f"{gib:g} GiB", ranks=ranks)
            status = daemon.status()
            if engram["placement"] == "gpu" and status.report is not None and status.report.fill_seconds:
                nbytes = sum(segment.info.nbytes for segment in status.segments)
                rate = nbytes / status.report.fill_seconds / ranks / GB
                self._results.add(f"{kind}: rows made, each GPU", rate, "GB/s", "all at once", ranks=ranks)
            yield daemon

    def _measure(self, kind: str, ranks: int, daemon: Daemon, where: str) -> None:
        counts = tuple(int(count) for count in self._options.tokens.split(","))
        task = Task(daemon.endpoint, kind, counts, ATTACHES, self._sglang)
        try:
            reports: list[Report] = run_ranks(ranks, work, self._gpus, task, timeout_s=LIMIT_S)
        except (RankFailed, TimeoutError) as error:
            print(f"{kind}, {ranks} ranks: {error}", flush=True)
            self.failed.append(f"{kind} of {ranks} ranks")
            return
        attach_ms = [one for report in reports for one in report.attach_ms]
        note = f"all at once, {ATTACHES} times, {where}"
        self._results.add(f"{kind}: attach, median", statistics.median(attach_ms), "ms", note, ranks=ranks)
        self._results.add(f"{kind}: attach, worst", max(attach_ms), "ms", note, ranks=ranks)
        slowest: dict[tuple[int, str], float] = {}
        for report in reports:
            for tokens, arm, us in report.times:
                slowest[tokens, arm] = max(us, slowest.get((tokens, arm), 0.0))
        first: dict[int, float] = {}
        for (tokens, arm), us in slowest.items():
            ours = first.setdefault(tokens, us)
            note = f"{us / ours:.2f} x the first, {where}"
            self._results.add(f"{kind}, T={tokens}: {arm}", us, "us", note, ranks=ranks)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--ranks", default=",".join(map(str, SIZES)))
    found.add_argument("--kinds", default=",".join(KINDS))
    found.add_argument("--sglang", default="")
    found.add_argument("--gib", type=float, default=16)
    found.add_argument("--host-gib", type=float, default=90)
    found.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    found.add_argument("--commit", default=commit_of())
    found.add_argument("--out", type=Path, default=Path("bench-results/groups.csv"))
    return found


def sizes_that_fit(wanted: str, there: int) -> list[int]:
    """Of "2,4,8" those for which there are GPUs, in order; says which are not. Raises SystemExit for none at all."""
    asked = sorted({int(size) for size in wanted.split(",")})
    fitting = [size for size in asked if size <= there]
    if len(fitting) < len(asked):
        left_out = ", ".join(str(size) for size in asked if size > there)
        print(f"{there} GPUs: groups of {left_out} are left out", flush=True)
    if not fitting:
        raise SystemExit(f"needs {asked[0]} GPUs")
    return fitting


def main() -> None:
    options = parser().parse_args()
    sizes = sizes_that_fit(options.ranks, torch.cuda.device_count())
    with closing(Results(options.out, options.commit, "cold")) as results:
        measured = Groups(options, Gpus(), results)
        measured.run(sizes)
    print(by_group(read_rows(options.out)))
    if measured.failed:
        raise SystemExit(f"failed: {', '.join(measured.failed)}")


if __name__ == "__main__":
    main()
