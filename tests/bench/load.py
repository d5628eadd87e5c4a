"""How fast a load is beside a plain copy of the same bytes, and how much memory it takes.

    python -m tests.bench.load [--gib 2]

Three arms in one run, with the same threads and chunks, from the page cache into populated memory that is
there before the clock starts: a plain copy of the file's bytes, the load without digests, and with them. The
arms take turns; a rate is the median of its runs, a ratio the median over the rounds, so that a machine whose
speed drifts does not sway it. Then one real load, by the loader child, from a cold
cache and from a warm one, for its peak of resident memory and page cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from engram_client import rows
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES
from engram_client.mapping.hostmem import HostMapping
from engram_client.protocol import Placement, Replication
from engram_server.checkpoint import Checkpoint, open_checkpoint
from engram_server.config import Config, EngramConfig
from engram_server.fill import FileSource, HostTarget, Item, fill, make_items, run_threads
from engram_server.gpus import Gpus
from engram_server.load_job import LoadJob, make_job
from engram_server.loader import load
from engram_server.machine import Machine
from engram_server.make_checkpoint import make_checkpoint
from engram_server.plan import Plan, make_plan
from engram_server.segments import create_segments
from engram_server.segments.pages import populate

RUNS = 5
MEMORY_ALLOWANCE = 1 << 30
TARGETS = {"load": 0.8, "load_digests": 0.6}


def run(gib: float = 2, threads: int = 0, folder: str | None = None, **job_changes: Any) -> dict[str, Any]:
    """Measures with tables of `gib` GiB; `job_changes` are fields of LoadJob, to try other chunk sizes.

    Rates are bytes of rows per second; `ratios` are against the plain copy.
    """
    place = Path(tempfile.mkdtemp(prefix="engram-load-", dir=folder))
    try:
        vocab = int(gib * (1 << 30) / ROW_BYTES / 24)
        make_checkpoint(place / "model", engram_vocab_size=vocab, seed=1, layer_ids=(1,))
        checkpoint = open_checkpoint(place / "model")
        _sync(checkpoint)
        return measure(checkpoint, threads, **job_changes)
    finally:
        shutil.rmtree(place)


def measure(checkpoint: Checkpoint, threads: int = 0, **job_changes: Any) -> dict[str, Any]:
    """The same for a checkpoint that is there."""
    machine = Machine.read()
    config = Config(
        model_path=checkpoint.path,
        engram_config=EngramConfig(placement=Placement.CPU, replication=Replication.PER_NODE),
    )
    plan = make_plan(config, checkpoint.model, machine, Gpus.none("not used here"))
    job = make_job(plan, config, checkpoint.sources, machine.cpus)
    job = msgspec.structs.replace(job, **({"threads": threads} if threads else {}), **job_changes)
    seconds = _seconds(plan, job)
    table = sum(table.nbytes for table in plan.tables)
    memory = {f"{state}_cache": _memory(plan, job, checkpoint, warm=state == "warm") for state in ("cold", "warm")}
    ratios = {
        arm: statistics.median(copy / load for copy, load in zip(seconds["copy"], seconds[arm], strict=True))
        for arm in TARGETS
    }
    peak = max(entry["peak_bytes"] for entry in memory.values())
    return {
        "table_bytes": table,
        "threads": job.threads,
        "chunk_bytes": job.chunk_bytes,
        "native_rows": rows.NATIVE,
        "bytes_per_second": {arm: table / statistics.median(times) for arm, times in seconds.items()},
        "ratios": ratios,
        "targets": TARGETS,
        "memory": memory,
        "met": {
            **{arm: ratios[arm] >= target for arm, target in TARGETS.items()},
            "memory": peak <= table + MEMORY_ALLOWANCE,
        },
    }


def _seconds(plan: Plan, job: LoadJob) -> dict[str, list[float]]:
    job = msgspec.structs.replace(job, drop_cache=False, direct_io="off")
    segments = create_segments(plan, "bench")
    mappings = [HostMapping(s.writable_fd, s.info.nbytes, True, s.info.page_bytes) for s in segments]
    try:
        targets = [
            HostTarget(segment.info, mapping, segment.writable_fd)
            for segment, mapping in zip(segments, mappings, strict=True)
        ]
        for target in targets:
            populate(target.mapping, target.fd, plan.huge_pages, job.threads)
        plain = msgspec.structs.replace(job, digests=False)
        arms: dict[str, Callable[[], object]] = {
            "copy": lambda: _copy(job, targets),
            "load": lambda: fill(plain, targets, lambda: FileSource(plain, False)),
            "load_digests": lambda: fill(job, targets, lambda: FileSource(job, False)),
        }
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        arms["copy"]()  # fills the page cache
        for _ in range(RUNS):
            for arm, work in arms.items():
                started = time.perf_counter()
                work()
                seconds[arm].append(time.perf_counter() - started)
        return seconds
    finally:
        for mapping in mappings:
            mapping.close()
        for segment in segments:
            segment.discard()


def _copy(job: LoadJob, targets: list[HostTarget]) -> None:
    """The plain copy: the same bytes by the same items and chunks, read straight into the memory."""
    chunk_rows = job.chunk_bytes // ROW_VALUES

    def read(fd: int, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(fd, [view], offset)
            view, offset = view[count:], offset + count

    def work(items: Iterator[Item], stop: threading.Event) -> None:
        values = [os.open(extent.path, os.O_RDONLY) for extent in job.values]
        for item in items:
            for piece in item.pieces:
                view = piece.target.mapping.view
                extent, scales = job.values[item.table], job.scales[item.table]
                first = piece.row_start - piece.target.info.shard.row_start
                scales_at = piece.target.info.shard.rows * ROW_VALUES
                for row in range(piece.row_start, piece.row_stop, chunk_rows):
                    count = min(chunk_rows, piece.row_stop - row)
                    at = (first + row - piece.row_start) * ROW_VALUES
                    read(values[item.table], view[at : at + count * ROW_VALUES], extent.offset + row * ROW_VALUES)
                at, length = scales_at + first * ROW_SCALES, (piece.row_stop - piece.row_start) * ROW_SCALES
                read(values[item.table], view[at : at + length], scales.offset + piece.row_start * ROW_SCALES)
        for fd in values:
            os.close(fd)

    run_threads(work, make_items(job.tables, targets), job.threads)


def _memory(plan: Plan, job: LoadJob, checkpoint: Checkpoint, warm: bool) -> dict[str, Any]:
    """One real load by the loader child."""
    for source in checkpoint.sources:
        with open(source.values.path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while warm and file.read(1 << 24):
                pass
    before, highest, stop = _file_cache(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.01):
            highest = max(highest, _file_cache() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    segments = create_segments(plan, "bench")
    try:
        result = asyncio.run(load(job, segments))
    finally:
        stop.set()
        watcher.join()
        for segment in segments:
            segment.discard()
    report = result.report
    return {
        "peak_bytes": plan.needed_bytes + report.peak_rss_bytes + highest,
        "loader_rss_bytes": report.peak_rss_bytes,
        "cache_growth_bytes": highest,
        "cache_after_bytes": _file_cache() - before,
        "direct_io": report.direct_io,
        "allocate_seconds": report.allocate_seconds,
        "fill_seconds": report.fill_seconds,
        "verify_seconds": report.verify_seconds,
        "seconds": report.seconds,
        "huge_bytes": sum(result.huge_bytes.values()),
    }


def _file_cache() -> int:
    """Bytes of files in the page cache; the segments, which count as cache too, are Shmem."""
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return sum(sign * int(facts[name].split()[0]) * 1024 for name, sign in (("Cached", 1), ("Shmem", -1)))


def _sync(checkpoint: Checkpoint) -> None:
    """Writes the files out: dirty pages cannot be dropped from the cache."""
    for source in checkpoint.sources:
        with open(source.values.path, "rb") as file:
            os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--folder", help="where to make the checkpoint")
    options = parser.parse_args()
    sys.stdout.write(json.dumps(run(options.gib, options.threads, options.folder), indent=2) + "\n")


if __name__ == "__main__":
    main()
