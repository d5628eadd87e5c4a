"""Loads into GPU memory, all GPUs at once, beside what their links copy from pinned memory in the same run.

    python -m tests.bench.load_gpu [--gib 16] [--devices 0,1/0,1,2,3] [--folder /dev/shm] [--threads 0]
        [--slots 262144,1048576] [--per-thread 2,4]     out of the page cache, by the C loop
        [--chunks 8]                                    what Python does: with --dummy or ENGRAM_PURE=1

Two tables, `--gib` GiB in all, split over the GPUs of a group; all is done for each group: by default for 2, 4 and 8 of
the GPUs that are there, and for all. They are made as a checkpoint in `--folder` and read once, so that every load
finds them in the page cache; `--dummy` makes the rows instead. A load is what the daemon does, by
the loader's children: GB/s are of the phase "loading", which the other phases' seconds stand beside. `--slots`
and `--chunks` (MiB), `--per-thread`, `--threads`: several, with commas, are compared first, by loads without digests,
beside what their processes read where nothing is copied; then the best one is measured whole, with a check of all
that lies in memory. Results as CSV.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from engram_client.cuda.access import cuda_driver
from engram_client.layout import parse_model_geometry
from engram_client.protocol import Placement
from engram_server import checker, device_pump, gpus
from engram_server.checkpoint import open_checkpoint
from engram_server.config import Config, EngramConfig, LoadConfig
from engram_server.load_job import (
    DEVICE_CHUNK_BYTES,
    DEVICE_SLOT_BYTES,
    DEVICE_SLOTS,
    LoadJob,
    LoadResult,
    make_job,
)
from engram_server.loader import load
from engram_server.machine import Machine
from engram_server.make_checkpoint import make_checkpoint
from engram_server.plan import Plan, make_plan
from engram_server.segments import create_segments
from tests.bench.gpu_support import ROWS_GIB, Results, commit_of
from tests.bench.read_only import read_rate

RUNS = 3
COPIES, COPY_BYTES = 24, 256 << 20
BAR = 0.7
SIZES = (2, 4, 8)
GIB_A_GPU = 4
LAYERS = (1, 14)
GB = 1e9


def link_rates(ordinals: list[int]) -> list[float]:
    """Bytes per second from pinned memory to each GPU, all at once."""
    pinned = [torch.empty(COPY_BYTES, dtype=torch.uint8).pin_memory() for _ in ordinals]
    targets = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{ordinal}") for ordinal in ordinals]
    events = []
    for _ in range(2):  # the first round warms up
        events = []
        for ordinal, source, target in zip(ordinals, pinned, targets, strict=True):
            with torch.cuda.device(ordinal):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(COPIES):
                    target.copy_(source, non_blocking=True)
                end.record()
                events.append((begin, end))
        for ordinal in ordinals:
            torch.cuda.synchronize(ordinal)
    return [COPIES * COPY_BYTES / (begin.elapsed_time(end) / 1e3) for begin, end in events]


@contextlib.contextmanager
def checkpoint_in(folder: str | None, vocab: int) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="engram-load-", dir=folder))
    try:
        begin = time.perf_counter()
        make_checkpoint(place / "model", engram_vocab_size=vocab, seed=1, layer_ids=LAYERS)
        print(f"checkpoint made in {time.perf_counter() - begin:.0f} s", flush=True)
        yield place / "model"
    finally:
        shutil.rmtree(place)


def warm(model: Path) -> None:
    buffer = bytearray(16 << 20)
    for path in model.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def plan_of(options: argparse.Namespace, ordinals: list[int], model: Path | None, vocab: int) -> tuple[Plan, LoadJob]:
    geometry = {
        "engram_layer_ids": list(LAYERS),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": vocab,
        "engram_n_heads": 8,
    }
    config = Config(
        model_path=str(model) if model else None,
        load_format="auto" if model else "dummy",
        geometry=geometry,
        engram_config=EngramConfig(placement=Placement.GPU),
        devices=tuple(ordinals),
        load=LoadConfig(verify=options.verify),
    )
    config = msgspec.structs.replace(config, host=msgspec.structs.replace(config.host, memory_check="warn"))
    machine = Machine.read()
    checkpoint = open_checkpoint(model) if model else None
    shape = checkpoint.model if checkpoint else parse_model_geometry(geometry, "geometry")
    plan = make_plan(config, shape, machine, gpus.ask(cuda_driver(), config.devices))
    job = make_job(plan, config, checkpoint.sources if checkpoint else None, machine.cpus)
    return plan, msgspec.structs.replace(job, drop_cache=False)


def numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def variants(options: argparse.Namespace, job: LoadJob) -> dict[str, LoadJob]:
    """What is to be compared, by name."""
    found = {}
    if not pumped(job):
        for chunk, threads in itertools.product(numbers(options.chunks), numbers(options.threads)):
            one = msgspec.structs.replace(
                job, device_chunk_bytes=int(chunk * (1 << 20)), threads=int(threads) or job.threads
            )
            kind = "page cache, by Python" if job.values else "dummy"
            found[f"{kind}, {chunk:g} MiB, {one.threads} threads"] = one
        return found
    each = numbers(options.slots), numbers(options.per_thread), numbers(options.threads)
    for slot, slots, threads in itertools.product(*each):
        one = msgspec.structs.replace(
            job, device_slot_bytes=int(slot), device_slots=int(slots), threads=int(threads) or job.threads
        )
        found[f"page cache, {slots:g} x {slot / 1024:g} KiB, {one.threads} threads"] = one
    return found


def pumped(job: LoadJob) -> bool:
    return bool(job.values) and device_pump.NATIVE


def compare(results: Results, plan: Plan, job: LoadJob, link: float, count: int, what: str) -> float:
    """A line for a variant, and one for what its reads alone can do. Returns its rate on each GPU."""
    quick = msgspec.structs.replace(job, verify="off", digests=False)
    rates = []
    for _ in range(RUNS):
        segments = create_segments(plan, "bench")
        try:
            report = asyncio.run(load(quick, segments)).report
        finally:
            for segment in segments:
                segment.discard()
        rates.append(report.bytes_read / report.fill_seconds / count)
    rate = statistics.median(rates)
    spread = " ".join(f"{one / GB:.1f}" for one in rates)
    note = f"{rate / link:.2f} of the link; runs {spread}"
    results.add(f"{what}: each GPU", rate / GB, "GB/s", note, ranks=count)
    if pumped(job):
        read = read_rate(job, count, RUNS)
        note = f"{read / link:.2f} of the link; {count} processes at once"
        results.add(f"{what}: read only", read / GB, "GB/s", note, ranks=count)
    return rate


def measure(results: Results, plan: Plan, job: LoadJob, link: float, count: int, what: str) -> None:
    found: list[tuple[float, LoadResult]] = []
    check_s = 0.0
    for run in range(RUNS):
        segments = create_segments(plan, "bench")
        try:
            begin = time.perf_counter()
            result = asyncio.run(load(job, segments))
            found.append((time.perf_counter() - begin, result))
            if run == RUNS - 1:
                for segment in segments:
                    segment.seal()
                begin = time.perf_counter()
                checked = asyncio.run(checker.check(segments, result.pieces, threads=job.threads, gentle=False))
                check_s = time.perf_counter() - begin
                if checked.damage:
                    raise SystemExit(f"damage: {checked.damage[0].error()}")
        finally:
            for segment in segments:
                segment.discard()
    wall, result = sorted(found, key=lambda one: one[1].report.fill_seconds)[RUNS // 2]
    rates = [one.report.bytes_read / one.report.fill_seconds / count for _, one in found]
    rate = statistics.median(rates)
    note = f"{count} GPUs at once, {result.report.bytes_read / GB:.1f} GB, {result.report.threads} threads"
    phases = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in result.phase_seconds.items())
    spread = " ".join(f"{one / GB:.1f}" for one in rates)
    add = functools.partial(results.add, ranks=count)
    add(f"{what}: load, each GPU", rate / GB, "GB/s", f"{note}; runs {spread}")
    add(f"{what}: of what the links copy", rate / link, "", f"bar {BAR}; {phases}")
    add(f"{what}: start to end of the children", wall, "s", note)
    digest_s = result.phase_seconds.get("digesting", 0.0)
    if digest_s:
        add(f"{what}: digests, each GPU", result.report.bytes_read / digest_s / count / GB, "GB/s", note)
    add(f"{what}: check of all, children and contexts included", check_s, "s", note)


def load_into(
    results: Results, options: argparse.Namespace, ordinals: list[int], model: Path | None, vocab: int
) -> None:
    """Everything, with one group of GPUs."""
    plan, job = plan_of(options, ordinals, model, vocab)
    links, count = link_rates(ordinals), len(ordinals)
    for ordinal, rate in zip(ordinals, links, strict=True):
        name = f"GPU {ordinal}: copies from pinned memory, all at once"
        results.add(name, rate / GB, "GB/s", "the link", ranks=count)
    link = statistics.mean(links)
    jobs = variants(options, job)
    rates = {what: compare(results, plan, one, link, count, what) for what, one in jobs.items()}
    best = max(rates, key=rates.__getitem__)
    measure(results, plan, jobs[best], link, count, best)


def groups_of(there: int) -> str:
    """2, 4 and 8 GPUs of those that are there, and all of them."""
    sizes = sorted({size for size in SIZES if size < there} | {there})
    return "/".join(",".join(map(str, range(size))) for size in sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    devices = torch.cuda.device_count()
    parser.add_argument("--gib", type=float, default=max(16, GIB_A_GPU * devices))
    parser.add_argument("--devices", default=groups_of(devices), help="groups of GPUs, with / between them")
    parser.add_argument("--folder")
    parser.add_argument("--chunks", default=f"{DEVICE_CHUNK_BYTES / (1 << 20):g}", help="MiB, of the loop in Python")
    parser.add_argument("--slots", default=str(DEVICE_SLOT_BYTES), help="bytes, of the loop in C")
    parser.add_argument("--per-thread", default=str(DEVICE_SLOTS), help="slots")
    parser.add_argument("--threads", default="0", help="of all GPUs; 0: as the daemon chooses")
    parser.add_argument("--verify", default="sample")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--commit", default=commit_of())
    parser.add_argument("--out", type=Path, default=Path("bench-results/load_gpu.csv"))
    options = parser.parse_args()
    groups = [[int(ordinal) for ordinal in group.split(",")] for group in options.devices.split("/")]
    results = Results(options.out, options.commit, "" if options.dummy else "warm")
    vocab = int(options.gib * ROWS_GIB / 24 / len(LAYERS))
    with contextlib.ExitStack() as stack:
        model = None if options.dummy else stack.enter_context(checkpoint_in(options.folder, vocab))
        if model is not None:
            warm(model)
        for ordinals in groups:
            load_into(results, options, ordinals, model, vocab)


if __name__ == "__main__":
    main()
