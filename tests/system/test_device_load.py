"""Loads into GPU memory by real children on the fake driver: a child a GPU, and the content proved end to end."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engram_client.cuda import access
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.errors import CudaCallFailed, DigestMismatch, LoaderDied, TruncatedFile
from engram_client.protocol import LoadProgress
from engram_server import checker, generate, gpus
from engram_server.checkpoint import open_checkpoint
from engram_server.load_job import LoadJob, LoadResult, make_job
from engram_server.make_checkpoint import make_checkpoint
from engram_server.plan import Plan, make_plan
from engram_server.reader import ALIGNMENT
from engram_server.segments import Segment, create_segments
from tests.support.fake_machinery import calls_in
from tests.support.loads import BLOCK, checkpoint_rows, config, digest, root, run_load
from tests.support.machines import machine

CHUNK = 76 << 12  # reads that end within rows


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One table of a whole canonical block and a part of a second one: 76 MiB."""
    path = tmp_path_factory.mktemp("large") / "model"
    make_checkpoint(path, engram_vocab_size=12000, seed=8, layer_ids=(5,))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables of 24 thousand rows with every value and scale code, NaN included."""
    path = tmp_path_factory.mktemp("small") / "model"
    make_checkpoint(path, engram_vocab_size=1000, seed=7, layer_ids=(1, 14), every_code=True)
    return path


class Scene:
    """A plan on the fake machine's GPUs, its segments and its job; all GPU memory is memfds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, kernels: Path) -> None:
        self._monkeypatch, self.log = monkeypatch, folder / "calls.log"
        self.segments: list[Segment] = []
        monkeypatch.setenv(DRIVER_VARIABLE, "tests.support.fake_driver:FakeDriver")
        monkeypatch.setenv("ENGRAM_FAKE_LOG", str(self.log))
        monkeypatch.setenv("ENGRAM_KERNEL_CACHE", str(kernels))

    def prepare(self, model: Path, fake: dict[str, Any] | None = None, **sections: Any) -> tuple[Plan, LoadJob]:
        changes = sections.pop("job", {})
        self._monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps(fake or {}))
        self._monkeypatch.setattr(access, "_driver", None)
        settings = config(model, **{"engram_config": {"placement": "gpu"}} | sections)
        found = gpus.ask(access.cuda_driver(), settings.devices)
        checkpoint = open_checkpoint(model)
        plan = make_plan(settings, checkpoint.model, machine(), found)
        job = make_job(plan, settings, None if settings.load_format == "dummy" else checkpoint.sources, 4)
        self.segments = create_segments(plan, "scene")
        changes = {"device_chunk_bytes": CHUNK, "device_slot_bytes": CHUNK} | changes
        return plan, msgspec.structs.replace(job, **changes)

    def load(self, model: Path, fake: dict[str, Any] | None = None, **sections: Any) -> tuple[Plan, LoadResult]:
        plan, job = self.prepare(model, fake, **sections)
        return plan, run_load(job, self.segments)

    def fail(self, what: str) -> None:
        """Makes calls of the children fail: this process's driver is there by then."""
        self._monkeypatch.setenv("ENGRAM_FAKE_FAIL", what)

    def who_called(self, call: str) -> Counter[int]:
        return Counter(event["pid"] for event in calls_in(self.log) if event["call"] == call)

    def copies(self) -> list[int]:
        """Bytes of each copy to a GPU."""
        return [int(event["args"][2]) for event in calls_in(self.log) if event["call"] == "cuMemcpyHtoDAsync"]

    def stored(self, segment: Segment) -> np.ndarray:
        rows = segment.info.shard.rows
        raw = np.frombuffer(os.pread(descriptor(segment), rows * 264, 0), np.uint8)
        return np.concatenate([raw[: rows * 256].reshape(rows, 256), raw[rows * 256 :].reshape(rows, 8)], axis=1)


def descriptor(segment: Segment) -> int:
    return segment.readable_fd if segment.sealed else segment.writable_fd


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kernels compiled once for all tests of this file."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernels: Path) -> Iterator[Scene]:
    made = Scene(monkeypatch, tmp_path, kernels)
    yield made
    for segment in made.segments:
        segment.discard()
    assert children() == []
    monkeypatch.setattr(access, "_driver", None)


def children() -> list[psutil.Process]:
    """Of the loader, and those that have ended and whose end nobody has asked for."""
    return [child for child in psutil.Process().children() if is_loaders(child)]


def is_loaders(child: psutil.Process) -> bool:
    try:
        return "engram_server.load_child" in child.cmdline()
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def check_content(scene: Scene, plan: Plan, result: LoadResult, expected: dict[int, np.ndarray]) -> None:
    """Rows, pieces, block digests and roots against those made of the checkpoint's bytes."""
    for segment in scene.segments:
        shard, rows = segment.info.shard, expected[segment.info.layer_id]
        assert np.array_equal(scene.stored(segment), rows[shard.row_start : shard.row_stop]), segment
        next_row = shard.row_start
        for piece in result.pieces[segment.info.id]:
            assert piece.row_start == next_row
            assert piece.row_start // BLOCK == (piece.row_stop - 1) // BLOCK
            assert piece.digest == digest(rows[piece.row_start : piece.row_stop])
            next_row = piece.row_stop
        assert next_row == shard.row_stop
    for table in plan.tables:
        rows = expected[table.layer_id]
        assert result.roots[table.layer_id] == root(table, rows)
        wanted = tuple(digest(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK))
        assert result.block_digests[table.layer_id] == wanted


@pytest.mark.parametrize(
    ("devices", "direct", "threads"),
    [([0, 1], "off", 4), ([0, 1, 2], "on", 3), ([1, 0, 1], "auto", 1)],
    ids=["two", "three", "shared"],
)
def test_each_gpu_has_a_child_and_what_their_borders_cut_is_digested_all_the_same(
    scene: Scene, blocks: Path, devices: Sequence[int], direct: str, threads: int
) -> None:
    plan, result = scene.load(
        blocks,
        {"gpus": 3},
        devices=list(devices),
        tp_size=len(devices),
        load={"direct_io": direct, "threads": threads, "verify": "full"},
    )
    check_content(scene, plan, result, {5: checkpoint_rows(blocks, 5)})
    assert len(scene.who_called("cuMemcpyHtoDAsync")) == len(set(devices))
    assert set(scene.who_called("cuLaunchKernel").values()) == {1}
    assert result.report.bytes_read == plan.tables[0].nbytes
    assert result.report.direct_io == (direct == "on")
    assert result.report.threads == max(len(set(devices)), threads // len(set(devices)) * len(set(devices)))
    assert list(result.phase_seconds) == ["allocating", "loading", "digesting", "verifying"]


def test_two_tables_on_gpus_that_do_not_divide_their_columns_are_filled_by_a_child_a_gpu(
    scene: Scene, small: Path
) -> None:
    plan, result = scene.load(small, {"gpus": 5}, load={"verify": "full"})
    check_content(scene, plan, result, {layer: checkpoint_rows(small, layer) for layer in (1, 14)})
    assert len(scene.who_called("cuMemcpyHtoDAsync")) == 5


SLOT = 12 << 12


@pytest.mark.parametrize("pure", ["0", "1"])
def test_a_file_out_of_the_page_cache_arrives_the_same_with_and_without_the_c_loop(
    scene: Scene, small: Path, monkeypatch: pytest.MonkeyPatch, pure: str
) -> None:
    monkeypatch.setenv("ENGRAM_PURE", pure)
    settings = {"load": {"direct_io": "off", "verify": "full", "threads": 4}}
    plan, result = scene.load(small, job={"device_slot_bytes": SLOT, "device_slots": 3}, **settings)
    check_content(scene, plan, result, {layer: checkpoint_rows(small, layer) for layer in (1, 14)})
    assert not result.report.direct_io
    in_c = pure == "0" and find_spec("engram_server._pump") is not None
    assert max(scene.copies()) == (SLOT if in_c else CHUNK)


def test_dummy_tables_are_the_generators_rows(scene: Scene, small: Path) -> None:
    plan, result = scene.load(small, load_format="dummy", seed=99, load={"verify": "full"})
    rows = {
        table.layer_id: np.concatenate(generate.rows(table.layer_id, 99, 0, table.rows), axis=1)
        for table in plan.tables
    }
    check_content(scene, plan, result, rows)


def test_a_node_of_several_reads_its_own_rows_only_and_claims_no_root(scene: Scene, blocks: Path) -> None:
    _, result = scene.load(blocks, {"gpus": 2}, tp_size=4, nnodes=2, node_rank=1, load={"verify": "full"})
    assert result.roots == {5: None}
    assert result.block_digests == {5: ()}
    assert result.report.bytes_read == sum(segment.info.shard.rows for segment in scene.segments) * 264
    assert all(result.pieces.values())


def test_progress_of_the_children_is_one_and_goes_through_the_phases_in_order(scene: Scene, small: Path) -> None:
    heard: list[LoadProgress] = []
    _, job = scene.prepare(small)
    run_load(job, scene.segments, heard.append)
    order = ["starting", "allocating", "loading", "digesting", "verifying"]
    assert [order.index(one.phase) for one in heard] == sorted(order.index(one.phase) for one in heard)
    total = sum(segment.info.shard.rows for segment in scene.segments) * 264
    assert max(one.total_bytes for one in heard if one.phase == "loading") == total


# What may go wrong


@pytest.mark.parametrize(("source", "verify"), [("auto", "sample"), ("dummy", "full")])
def test_a_bit_that_flips_on_its_way_to_the_gpu_is_found_and_placed(
    scene: Scene, blocks: Path, verify: str, source: str
) -> None:
    """The digest is of what arrived; the source's says what should have."""
    settings = {"load_format": source, "load": {"verify": verify, "threads": 1}}
    with pytest.raises(DigestMismatch) as failed:
        scene.load(blocks, {"gpus": 1, "bad_copy": 3}, **settings)
    found = failed.value
    assert (found.segment, found.row_start, found.row_stop) == ("L5.r0of1", 0, BLOCK)
    segment = scene.segments[0]
    assert found.found == digest(scene.stored(segment)[:BLOCK]).hex()
    if source == "auto":
        assert found.expected == digest(checkpoint_rows(blocks, 5)[:BLOCK]).hex()


@pytest.mark.parametrize(
    ("pure", "call"),
    [
        *itertools.product(
            ("0", "1"),
            (
                "cuMemSetAccess:1",
                "cuMemHostRegister:1",
                "cuMemcpyHtoDAsync:1",  # of those that make the streams ready
                "cuMemcpyHtoDAsync:9",  # of rows
                "cuStreamSynchronize:4",
                "cuLibraryLoadData:1",
                "cuLaunchKernel:1",
            ),
        ),
        ("0", "cuStreamWriteValue32:3"),
        ("0", "cuStreamQuery:1"),
        ("1", "cuStreamSynchronize:12"),
    ],
)
def test_a_driver_call_that_fails_in_the_children_is_named_and_leaves_no_child(
    scene: Scene, small: Path, monkeypatch: pytest.MonkeyPatch, call: str, pure: str
) -> None:
    monkeypatch.setenv("ENGRAM_PURE", pure)
    _, job = scene.prepare(small)
    scene.fail(f"{call}:CUDA_ERROR_LAUNCH_FAILED")
    with pytest.raises(CudaCallFailed) as failed:
        run_load(job, scene.segments)
    assert (failed.value.call, failed.value.name) == (call.split(":")[0], "CUDA_ERROR_LAUNCH_FAILED")
    assert children() == []


def stuck(job: LoadJob, tmp_path: Path) -> LoadJob:
    """The job, such that its children never end: opening the values, a FIFO, waits for a writer."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    return msgspec.structs.replace(job, values=tuple(replaced(extent, fifo) for extent in job.values))


def replaced(extent: Any, path: Path) -> Any:
    return type(extent)(path=str(path), offset=extent.offset, nbytes=extent.nbytes)


def test_a_digest_kernel_that_cannot_be_had_is_found_before_gigabytes_are_moved(scene: Scene, small: Path) -> None:
    _, job = scene.prepare(small, {"gpus": 1})
    scene.fail("cuLibraryLoadData:*:CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(CudaCallFailed) as failed:
        run_load(job, scene.segments)
    assert failed.value.name == "CUDA_ERROR_NO_BINARY_FOR_GPU"
    assert set(scene.copies()) <= {ALIGNMENT}, "streams were made ready, and no row was moved"


def test_one_killed_child_is_reported_and_the_others_are_ended(scene: Scene, small: Path, tmp_path: Path) -> None:
    _, job = scene.prepare(small, {"gpus": 3})
    killed: list[psutil.Process] = []

    def kill_one(progress: LoadProgress) -> None:
        there = children()
        if len(there) == 3 and not killed:
            killed.append(there[0])
            there[0].kill()

    with pytest.raises(LoaderDied) as failed:
        run_load(stuck(job, tmp_path), scene.segments, kill_one)
    assert failed.value.how == "SIGKILL"
    assert children() == []


def test_cancelling_ends_every_child(scene: Scene, small: Path, tmp_path: Path) -> None:
    from engram_server.loader import load

    _, job = scene.prepare(small)

    async def cancel() -> None:
        both = asyncio.Event()
        heard = lambda progress: both.set() if len(children()) == 2 else None  # noqa: E731
        task = asyncio.create_task(load(stuck(job, tmp_path), scene.segments, heard))
        await both.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert children() == []

    asyncio.run(cancel())


def test_a_file_that_one_child_finds_too_short_ends_the_load(scene: Scene, blocks: Path, tmp_path: Path) -> None:
    _, job = scene.prepare(blocks)
    copy = tmp_path / "short"
    shutil.copy(job.values[0].path, copy)
    os.truncate(copy, job.values[0].offset + job.values[0].nbytes * 3 // 4)  # in the second GPU's half
    values = tuple(replaced(extent, copy) for extent in job.values)
    with pytest.raises(TruncatedFile) as failed:
        run_load(msgspec.structs.replace(job, values=values, direct_io="off"), scene.segments)
    assert failed.value.path == str(copy)
    assert children() == []


def test_a_forecast_counts_a_second_reading_of_the_source(scene: Scene, small: Path) -> None:
    from engram_server import forecast

    plan, job = scene.prepare(small, load={"verify": "full"})
    found = forecast.measure(job, plan, 1 << 30, gpu_count=2)
    assert found.bytes == sum(segment.info.shard.rows for segment in scene.segments) * 264
    assert found.populate_bytes_per_second is None
    assert found.load_seconds > found.bytes / found.fill_bytes_per_second > 0


# Checks of what lies in memory


def test_a_check_digests_gpu_memory_where_it_is_and_names_what_has_changed(scene: Scene, blocks: Path) -> None:
    _, result = scene.load(blocks, {"gpus": 2}, tp_size=2)
    for segment in scene.segments:
        segment.seal()
    checked = asyncio.run(checker.check(scene.segments, result.pieces, threads=1, gentle=True))
    assert checked.damage == ()
    assert checked.nbytes == sum(segment.info.shard.rows for segment in scene.segments) * 264

    second = scene.segments[1]
    piece = result.pieces[second.info.id][-1]
    at = (second.info.shard.rows - 1) * 256 + 17  # a value of the last row
    fd = os.open(f"/proc/self/fd/{second.readable_fd}", os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
    os.close(fd)
    checked = asyncio.run(checker.check(scene.segments, result.pieces, threads=1, gentle=False))
    (found,) = (failed.error() for failed in checked.damage)
    assert isinstance(found, DigestMismatch)
    assert (found.segment, found.row_start, found.row_stop) == (second.info.id, piece.row_start, piece.row_stop)
    assert found.expected == piece.digest.hex()
    assert "cuMemcpyDtoH" not in scene.log.read_text()


def test_a_check_of_no_gpu_memory_makes_no_context(scene: Scene, small: Path) -> None:
    scene.load(small)
    for segment in scene.segments:
        segment.seal()
    before = scene.who_called("cuDevicePrimaryCtxRetain")
    checked = asyncio.run(checker.check(scene.segments, {}, threads=1, gentle=True))
    assert (checked.nbytes, checked.damage) == (0, ())
    assert scene.who_called("cuDevicePrimaryCtxRetain") == before
