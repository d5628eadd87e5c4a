"""Tables of full size: made, attached to by two ranks at once, and adopted by a new daemon after a SIGKILL.

    python -m tests.bench.full_size [--gib 94.4] [--ways cuda_host,memfd,gpu,shards]

`--gib` is the size of each of the two tables. "gpu" splits them over two GPUs for peer_read, "shards" for collective,
where a rank maps its own shard only and nothing is killed; the others are whole in host memory. Results as CSV in
bench-results/full_size.csv. A table in host memory takes a minute or two to make.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engram_client.cuda.access import cuda_driver
from engram_client.protocol import State
from tests.bench.gpu_support import READY_LIMIT_S, Results, commit_of, dummy_config
from tests.support.daemon import Daemon
from tests.support.service_manager import ServiceManager

SEED = 5
RANK = "tests.bench.full_size_rank"
SETTLED_S = 10
"""The driver gives the loader's context back in its own time."""


class Rank:
    def __init__(self, endpoint: str, rank: int, device: str, group: str) -> None:
        command = [sys.executable, "-m", RANK, endpoint, str(rank), device, str(SEED), group]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def go(self) -> None:
        if self._process.stdin is None:
            raise RuntimeError("no pipe")
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def report(self) -> dict[str, Any]:
        if self._process.stdout is None:
            raise RuntimeError("no pipe")
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Ranks:
    """Two at once, each on a GPU of its own if there are two."""

    def __init__(self, endpoint: str, looks: bool) -> None:
        devices = min(2, torch.cuda.device_count())
        self._folder = tempfile.TemporaryDirectory(prefix="eb-")
        group = "" if looks else f"file://{self._folder.name}/group"
        self._ranks = [Rank(endpoint, rank, f"cuda:{rank % devices}", group) for rank in range(2)]
        for rank in self._ranks:
            rank.report()

    def both(self) -> list[dict[str, Any]]:
        for rank in self._ranks:
            rank.go()
        return [rank.report() for rank in self._ranks]

    def first(self) -> list[dict[str, Any]]:
        """Of one of them, while the other does nothing."""
        self._ranks[0].go()
        return [self._ranks[0].report()]

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._folder.cleanup()


def measure(results: Results, way: str, gib: float, folder: Path) -> None:
    config = dummy_config({"placement": "cpu", "replication": "per_node"}, gib, [1, 14], host={"backing": way})
    if way in ("gpu", "shards"):
        engram = {"placement": "gpu", "lookup": "peer_read" if way == "gpu" else "collective"}
        config = dummy_config(engram, gib, [1, 14], devices=[0, 1], tp_size=2)
    config["seed"] = SEED
    note = f"2 x {gib} GiB, {min(2, torch.cuda.device_count())} GPUs"
    ordinals = range(torch.cuda.device_count())
    driver = cuda_driver()
    free = [driver.memory_info(ordinal)[0] for ordinal in ordinals]
    with ServiceManager(folder / "manager") as manager:
        daemon = start(folder, config, manager)
        try:
            status = daemon.wait_for(State.READY, READY_LIMIT_S)
            results.add(f"{way}: exec to ready, tables made", time.perf_counter() - daemon.started, "s", note)
            if status.report is not None:
                results.add(f"{way}: of that, filling", status.report.fill_seconds, "s", note)
            on_gpu = [
                sum(s.info.nbytes for s in status.segments if s.info.device == driver.device_uuid(k)) for k in ordinals
            ]
            time.sleep(SETTLED_S)
            beside = [was - driver.memory_info(k)[0] - on_gpu[k] for k, was in enumerate(free)]
            results.add(f"{way}: GPU memory beside the tables, a GPU", max(beside) / (1 << 20), "MiB", note)
            if way == "shards":
                attaches(results, way, daemon.endpoint, note)
                return
            ranks = Ranks(daemon.endpoint, looks=True)
            try:
                for name, value in slowest(ranks.both()).items():
                    results.add(f"{way}: two ranks at once, slowest {name[:-2]}", value, "s", note)
                daemon.kill()
                before = len(daemon.log)
                daemon = start(folder, config, manager)
                status = daemon.wait_for(State.READY, READY_LIMIT_S)
                ready_s = time.perf_counter() - daemon.started
                print(f"started {daemon.started_at}\n{daemon.log[before:]}", flush=True)
                kept = "adopted" if status.adopted else "LOADED AGAIN"
                results.add(f"{way}: SIGKILL, then exec to ready, {kept}", ready_s, "s", note)
                for name, value in slowest(ranks.both()).items():
                    results.add(f"{way}: {name} of the ranks meanwhile, most", value, "", note)
                results.add(f"{way}: two ranks at once, slowest close", slowest(ranks.both())["close_s"], "s", note)
            finally:
                ranks.end()
        finally:
            daemon.kill()


def attaches(results: Results, way: str, endpoint: str, note: str) -> None:
    """The first of a process, which is what an engine does, and a later one."""
    for what, attach in (("one rank alone", Ranks.first), ("two ranks at once, slowest", Ranks.both)):
        ranks = Ranks(endpoint, looks=False)
        try:
            for name in ("attach", "attach that is not the first"):
                results.add(f"{way}: {what} {name}", slowest(attach(ranks))["attach_s"], "s", note)
        finally:
            ranks.end()


class TimedDaemon(Daemon):
    """Knows when it was started."""

    started: float
    started_at: str


def start(folder: Path, config: dict[str, Any], manager: ServiceManager) -> TimedDaemon:
    begin, began_at = time.perf_counter(), datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    daemon = TimedDaemon(
        folder, config, wrapper=manager.wrapper(), environ=manager.environ(), pass_fds=manager.descriptors()
    )
    daemon.started, daemon.started_at = begin, began_at
    return daemon


def slowest(reports: list[dict[str, Any]]) -> dict[str, float]:
    return {name: max(report[name] for report in reports) for name in reports[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=94.4)
    parser.add_argument("--ways", default="cuda_host,memfd,gpu,shards")
    parser.add_argument("--commit", default=commit_of())
    parser.add_argument("--out", type=Path, default=Path("bench-results/full_size.csv"))
    options = parser.parse_args()
    results = Results(options.out, options.commit, "cold")
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory(prefix="eb-") as folder:
            measure(results, way, options.gib, Path(folder))


if __name__ == "__main__":
    main()
