"""Checkpoints to load in tests, and what a load of them must give, computed without the code under test."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from engram_client.layout import TableGeometry
from engram_client.mapping.hostmem import HostMapping
from engram_client.protocol import LoadProgress, SegmentInfo
from engram_server.checkpoint import open_checkpoint
from engram_server.config import Config
from engram_server.gpus import Gpus
from engram_server.load_job import LoadJob, LoadResult, make_job
from engram_server.loader import load
from engram_server.machine import Machine
from engram_server.plan import Plan, make_plan
from engram_server.segments import Segment, create_segments

BLOCK = 1 << 18


def config(model: Path | str, **sections: Any) -> Config:
    """A configuration from plain dictionaries, as engram.json would give it."""
    raw = {"model_path": str(model), "engram_config": {"placement": "cpu", "replication": "per_node"}} | sections
    return msgspec.convert(raw, Config)


def prepare(settings: Config, **changes: Any) -> tuple[Plan, LoadJob]:
    """The plan and the job of a configuration on this machine; `changes` are fields of the job."""
    machine = Machine.read(folder=settings.host.path)
    checkpoint = open_checkpoint(str(settings.model_path))
    plan = make_plan(settings, checkpoint.model, machine, Gpus.none("a test"))
    sources = None if settings.load_format == "dummy" else checkpoint.sources
    job = make_job(plan, settings, sources, machine.cpus)
    return plan, msgspec.structs.replace(job, **changes)


@contextmanager
def loaded(settings: Config, tag: str, **changes: Any) -> Iterator[tuple[Plan, list[Segment], LoadResult]]:
    """Sealed segments of a real load by a child process; discarded at the end."""
    plan, job = prepare(settings, **changes)
    segments = create_segments(plan, tag)
    try:
        result = run_load(job, segments)
        for segment in segments:
            segment.seal()
        yield plan, segments, result
    finally:
        for segment in segments:
            segment.discard()


def run_load(
    job: LoadJob, segments: Sequence[Segment], on_progress: Callable[[LoadProgress], None] = lambda progress: None
) -> LoadResult:
    return asyncio.run(load(job, segments, on_progress))


def stored_rows(segment: Segment) -> np.ndarray:
    """The rows `[n, 264]` that a reader of the segment's descriptor sees."""
    info = segment.info
    with HostMapping(segment.readable_fd, info.nbytes, False, info.page_bytes) as mapping:
        return rows_of(info, mapping.view)


def rows_of(info: SegmentInfo, view: memoryview) -> np.ndarray:
    count = info.shard.rows
    raw = np.frombuffer(view, np.uint8)[: count * 264].copy()
    if info.row_format == "packed":
        return raw.reshape(count, 264)
    values, scales = raw[: count * 256].reshape(count, 256), raw[count * 256 :].reshape(count, 8)
    return np.concatenate([values, scales], axis=1)


def checkpoint_rows(model: Path, layer: int) -> np.ndarray:
    """The rows `[n, 264]` of a layer, straight from the bytes of its file."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            found = []
            for name, width in (
                (f"layers.{layer}.engram.embed.weight", 256),
                (f"layers.{layer}.engram.embed.scale", 8),
            ):
                if name not in header:
                    break
                start, stop = header[name]["data_offsets"]
                file.seek(8 + length + start)
                found.append(np.frombuffer(file.read(stop - start), np.uint8).reshape(-1, width))
            if len(found) == 2:
                return np.concatenate(found, axis=1)
    raise AssertionError(f"layer {layer} is in no file of {model}")


def digest(rows: np.ndarray) -> bytes:
    """xxh3-128 of rows `[n, 264]`: all values, then all scales."""
    return xxhash.xxh3_128_digest(rows[:, :256].tobytes() + rows[:, 256:].tobytes())


def root(geometry: TableGeometry, rows: np.ndarray) -> str:
    """The table's root by its definition."""
    head = [geometry.layer_id, 256, 32, BLOCK, len(geometry.columns), *geometry.columns]
    text = b"engram-table-1\0" + b"".join(number.to_bytes(8, "little") for number in head)
    for start in range(0, len(rows), BLOCK):
        text += digest(rows[start : start + BLOCK])
    return xxhash.xxh3_128_hexdigest(text)


def open_descriptors() -> set[str]:
    """What this process has open, by target; the listing's own descriptor is left out."""
    targets = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            targets.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return targets


def shm_names(tag: str, folder: str = "/dev/shm") -> list[str]:
    return sorted(path.name for path in Path(folder).glob(f"engram-{tag}-*"))
