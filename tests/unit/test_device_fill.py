"""How a fill of GPU memory is cut, and who of several children does what."""

from __future__ import annotations

import errno
import json
import mmap
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.cuda import access
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.errors import AllocationFailed, CudaCallFailed, ReadFailed, TruncatedFile
from engram_client.identity import block_digest, table_root
from engram_client.layout import BLOCK_ROWS, RowFormat, Shard, TableGeometry, digest_pieces
from engram_client.protocol import Backing, LoadProgress, LoadReport, SegmentInfo
from engram_server import device_fill, device_pump
from engram_server.device_target import DeviceTarget, Span
from engram_server.load_job import BlockDigest, LoadJob, PartResult, PieceDigest
from engram_server.load_parts import PHASES, JointProgress, merge, partition
from engram_server.reader import FileReader
from engram_server.tensor_file import Extent
from tests.support.fake_driver import FakeDriver

MIB = 1 << 20


def table_of(rows: int, layer: int = 1) -> TableGeometry:
    return TableGeometry(layer_id=layer, columns=(rows,))


def info_of(start: int, stop: int, device: str | None, layer: int = 1, **changes: Any) -> SegmentInfo:
    facts: dict[str, Any] = {
        "id": f"L{layer}.{start}",
        "layer_id": layer,
        "shard": Shard(row_start=start, row_stop=stop, columns=None),
        "rank": None,
        "nbytes": max(1, -(-(stop - start) * 264 // (2 * MIB))) * 2 * MIB,
        "backing": Backing.CUDA_DEVICE,
        "row_format": RowFormat.PLANAR,
        "page_bytes": 2 * MIB,
        "device": device,
    }
    return SegmentInfo(**facts | changes)


class Placed:
    """A target at a made-up address."""

    def __init__(self, info: SegmentInfo, base: int) -> None:
        self.info, self.base = info, base

    def span(self, start: int, stop: int) -> Span:
        at, rows = start - self.info.shard.row_start, self.info.shard.rows
        return Span(self.base + at * 256, self.base + rows * 256 + at * 8, stop - start)


@given(
    start=st.integers(0, 5000),
    rows=st.integers(0, 40_000),
    value_offset=st.integers(0, 10_000),
    scale_offset=st.integers(0, 10_000),
    chunk=st.sampled_from([4096, 65536, MIB]),
)
def test_every_byte_of_a_shard_is_copied_once_and_reads_end_at_multiples_of_the_chunk(
    start: int, rows: int, value_offset: int, scale_offset: int, chunk: int
) -> None:
    total = start + rows + 3
    job = LoadJob(
        source="s",
        tables=(table_of(7, 9), table_of(total)),
        values=(Extent("a", 0, 7 * 256), Extent("v", value_offset, total * 256)),
        scales=(Extent("a", 0, 7 * 8), Extent("s", scale_offset, total * 8)),
        device_chunk_bytes=chunk,
    )
    target = cast(DeviceTarget, Placed(info_of(start, start + rows, "GPU-0"), 1 << 40))
    chunks = cast(list[device_fill.Chunk], device_fill.cut(job, [target]))
    for scales, width, extent in ((False, 256, job.values[1]), (True, 8, job.scales[1])):
        mine = [one for one in chunks if one.scales is scales]
        at = start * width
        address = (1 << 40) + (rows * 256 if scales else 0)
        for one in mine:
            assert (one.table, one.start, one.address) == (1, at, address)
            assert 0 < one.nbytes <= chunk
            at, address = at + one.nbytes, address + one.nbytes
        assert at == (start + rows) * width
        assert all((extent.offset + one.start) % chunk == 0 for one in mine[1:])


@given(rows=st.integers(0, 40_000), start=st.integers(0, 100), chunk=st.sampled_from([4096, 65536, MIB]))
def test_dummy_rows_are_cut_so_that_a_chunk_fits_a_slot(rows: int, start: int, chunk: int) -> None:
    job = LoadJob(source="s", tables=(table_of(rows + start),), device_chunk_bytes=chunk)
    target = cast(DeviceTarget, Placed(info_of(start, start + rows, "GPU-0"), 1 << 40))
    at = start
    for one in cast(list[device_fill.RowChunk], device_fill.cut(job, [target])):
        assert one.row_start == at
        assert one.nbytes <= device_fill.chunk_bytes(job)
        assert (one.values, one.scales, one.row_stop - at) == target.span(at, one.row_stop)
        at = one.row_stop
    assert at == start + rows


# With the fake driver


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setenv(DRIVER_VARIABLE, "tests.support.fake_driver:FakeDriver")
    monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps({"gpus": 1}))
    monkeypatch.setattr(access, "_driver", None)
    made = access.cuda_driver()
    assert isinstance(made, FakeDriver)
    yield made
    monkeypatch.setattr(access, "_driver", None)


class Stage:
    """A file of rows, a segment for them, and pinned memory."""

    def __init__(self, driver: FakeDriver, folder: Path, rows: int, threads: int) -> None:
        self.raw = os.urandom(rows * 264)
        path = folder / "rows"
        path.write_bytes(b"x" * 100 + self.raw)
        self.job = LoadJob(
            source="s",
            tables=(table_of(rows),),
            values=(Extent(str(path), 100, rows * 256),),
            scales=(Extent(str(path), 100 + rows * 256, rows * 8),),
            threads=threads,
            device_chunk_bytes=4096,
            device_slot_bytes=4096,
            device_slots=3,
        )
        self.info = info_of(0, rows, driver.device_uuid(0))
        from engram_server.segments.cuda_device import CudaDeviceSegment

        self.segment = CudaDeviceSegment.create(self.info, driver, fabric=False)
        self.target = DeviceTarget(self.info, self.segment.writable_fd, driver)
        self.fd = self.segment.writable_fd
        self.driver = driver

    def fill(self, road: str = "python", **options: Any) -> None:
        if road == "c":
            with self.driver.context(0):
                staging = device_pump.make_staging(self.driver, self.job)
            device_pump.fill(self.job, [self.target], staging)
            return
        with self.driver.context(0):
            staging = device_fill.Staging(self.driver, self.job.threads, device_fill.chunk_bytes(self.job))
        direct = options.pop("direct", False)
        device_fill.fill(self.job, [self.target], staging, lambda: device_fill.FileFeed(self.job, direct, **options))

    def close(self) -> None:
        self.segment.discard()

    @property
    def stored(self) -> bytes:
        return os.pread(self.fd, len(self.raw), 0)


needs_c = pytest.mark.skipif(not device_pump.NATIVE, reason="the extension is not built")
both_roads = pytest.mark.parametrize("road", ["python", pytest.param("c", marks=needs_c)])


@pytest.mark.parametrize("threads", [1, 3])
@both_roads
def test_what_is_in_the_file_is_in_the_segment(driver: FakeDriver, tmp_path: Path, threads: int, road: str) -> None:
    stage = Stage(driver, tmp_path, 777, threads)
    stage.fill(road)
    assert stage.stored == stage.raw


def test_what_is_read_directly_is_in_the_segment(driver: FakeDriver, tmp_path: Path) -> None:
    stage = Stage(driver, tmp_path, 777, 3)
    stage.fill(direct=True)
    assert stage.stored == stage.raw


@needs_c
@given(rows=st.integers(1, 9000), pages=st.integers(1, 5), slots=st.integers(1, 4), items=st.integers(1, 9))
def test_the_loop_in_c_moves_every_byte_whatever_the_sizes(rows: int, pages: int, slots: int, items: int) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setenv("ENGRAM_FAKE_CUDA", json.dumps({"gpus": 1}))
        patch.setattr(device_pump, "ITEM_BYTES", items * 5000)
        stage = Stage(FakeDriver(), Path(folder), rows, 2)
        stage.job = msgspec.structs.replace(stage.job, device_slot_bytes=pages * 4096, device_slots=slots)
        stage.fill("c")
        assert stage.stored == stage.raw
        stage.close()


@needs_c
def test_what_the_loop_in_c_has_read_leaves_the_page_cache_where_the_job_says_so(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, dropped = Stage(driver, tmp_path, 777, 1), []
    monkeypatch.setattr(FileReader, "drop", lambda reader, start, nbytes: dropped.append((start, nbytes)))
    stage.fill("c")
    assert sum(nbytes for _, nbytes in dropped) == len(stage.raw)
    dropped.clear()
    stage.job = msgspec.structs.replace(stage.job, drop_cache=False)
    stage.fill("c")
    assert dropped == []


def test_short_reads_are_continued(driver: FakeDriver, tmp_path: Path) -> None:
    stage = Stage(driver, tmp_path, 100, 2)
    stage.fill(preadv=lambda fd, views, offset: os.preadv(fd, [views[0][:1000]], offset))
    assert stage.stored == stage.raw


def test_pinned_memory_is_registered_in_one_call_and_huge_pages_begin_in_it(driver: FakeDriver) -> None:
    job = LoadJob(source="s", tables=(), threads=3)
    with driver.context(0):
        staging = device_fill.Staging(driver, 3, device_fill.chunk_bytes(job))
    (registered,) = driver._registered
    assert registered % (2 * MIB) == 0
    slots = [slot for _ in range(3) for slot in staging.slots()]
    starts = sorted(device_fill.address_of(slot.view) for slot in slots)
    assert len(starts) == 6
    assert all(len(slot.view) >= device_fill.chunk_bytes(job) for slot in slots)
    assert all(right - left >= len(slots[0].view) for left, right in pairwise(starts))
    assert all(start % mmap.PAGESIZE == 0 for start in starts)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    ("threads", "nbytes", "per_thread"), [(1, MIB, 2), (16, MIB, 2), (3, 4097, 3), (5, 2 * MIB, 4), (64, 4096, 1)]
)
def test_every_slot_has_a_cache_line_of_its_own_that_the_gpu_writes(
    monkeypatch: pytest.MonkeyPatch, scattered: bool, threads: int, nbytes: int, per_thread: int
) -> None:
    monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps({"scattered": scattered}))
    driver = FakeDriver()
    with driver.context(0):
        staging = device_fill.Staging(driver, threads, nbytes, per_thread)
        (begin,) = driver._registered
        size, _ = driver._registered[begin]
        shift = driver.host_device_pointer(begin) - begin
    slots = [slot for _ in range(threads) for slot in staging.slots()]
    taken = [(device_fill.address_of(slot.view), nbytes) for slot in slots] + [(slot.tally, 64) for slot in slots]
    ends = sorted((start, start + length) for start, length in taken)
    assert len(ends) == 2 * threads * per_thread
    assert begin <= ends[0][0]
    assert ends[-1][1] <= begin + size
    assert all(left[1] <= right[0] for left, right in pairwise(ends))
    assert all(slot.tally % 64 == 0 for slot in slots)
    assert {slot.mark - slot.tally for slot in slots} == {shift}
    assert (shift != 0) == scattered


@needs_c
def test_the_gpu_marks_where_it_has_the_tallies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps({"scattered": True}))
    stage = Stage(FakeDriver(), tmp_path, 3000, 3)
    stage.fill("c")
    assert stage.stored == stage.raw
    stage.close()


def test_pinned_memory_that_the_machine_does_not_have_is_an_allocation_that_failed(driver: FakeDriver) -> None:
    with driver.context(0), pytest.raises(AllocationFailed) as failed:
        device_fill.Staging(driver, threads=4, nbytes=1 << 56)
    assert failed.value.needed == (1 << 59) + 2 * MIB, "the slots, and their tallies"


def test_a_read_error_of_one_thread_ends_all_and_is_raised(driver: FakeDriver, tmp_path: Path) -> None:
    stage = Stage(driver, tmp_path, 3000, 3)
    reads: list[int] = []

    def preadv(fd: int, views: list[memoryview], offset: int) -> int:
        reads.append(offset)
        if len(reads) == 5:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, views, offset)

    with pytest.raises(ReadFailed):
        stage.fill(preadv=preadv)
    assert len(reads) < 3000 * 264 // 4096 // 2


@both_roads
def test_a_file_that_ends_early_is_named(driver: FakeDriver, tmp_path: Path, road: str) -> None:
    stage = Stage(driver, tmp_path, 3000, 3)
    os.truncate(tmp_path / "rows", 500_000)
    with pytest.raises(TruncatedFile) as failed:
        stage.fill(road)
    found = failed.value
    assert (found.path, found.size) == (str(tmp_path / "rows"), 500_000)
    assert found.expected in {100 + 3000 * 256, 100 + 3000 * 264}  # of the values or of the scales


@needs_c
def test_a_read_that_fails_in_c_is_named_with_its_place(
    driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(driver, tmp_path, 3000, 2)
    monkeypatch.setattr(FileReader, "fd", -1)
    with pytest.raises(ReadFailed) as failed:
        stage.fill("c")
    found = failed.value
    assert (found.path, found.problem) == (str(tmp_path / "rows"), os.strerror(errno.EBADF))
    assert found.offset in {100, 100 + 3000 * 256}


@pytest.mark.parametrize(
    ("road", "call", "nth"),
    [
        *(("python", call, nth) for call in ("cuMemcpyHtoDAsync", "cuStreamSynchronize") for nth in (1, 7)),
        *(
            pytest.param("c", call, nth, marks=needs_c)
            for call in ("cuMemcpyHtoDAsync", "cuStreamWriteValue32", "cuStreamQuery")
            for nth in (1, 7)
        ),
        pytest.param("c", "cuStreamSynchronize", 1, marks=needs_c),
    ],
)
def test_a_call_that_fails_ends_all_threads(driver: FakeDriver, tmp_path: Path, road: str, call: str, nth: int) -> None:
    stage = Stage(driver, tmp_path, 3000, 3)
    driver._failures = [[call, str(nth), "CUDA_ERROR_LAUNCH_FAILED"]]
    with pytest.raises(CudaCallFailed) as failed:
        stage.fill(road)
    assert (failed.value.call, failed.value.name) == (call, "CUDA_ERROR_LAUNCH_FAILED")


# Several children


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[TableGeometry], list[SegmentInfo], bool]:
    """Tables cut at random rows, each range on one of up to 4 GPUs; perhaps with a hole (another node's)."""
    tables, segments = [], []
    hole = draw(st.booleans())
    for layer in range(1, draw(st.integers(1, 2)) + 1):
        table = table_of(draw(st.integers(1, 3 * BLOCK_ROWS)), layer)
        inner = sorted(draw(st.sets(st.integers(1, max(1, table.rows - 1)), max_size=5)))
        borders = sorted({0, *inner, table.rows})
        tables.append(table)
        for index, (start, stop) in enumerate(pairwise(borders)):
            if not (hole and index == 0):
                segments.append(info_of(start, stop, f"GPU-{draw(st.integers(0, 3))}", layer))
    return tables, segments, hole


@given(layout=layouts(), threads=st.integers(1, 40))
def test_every_segment_has_one_child_by_its_gpu_and_every_whole_block_is_digested_once(
    layout: tuple[list[TableGeometry], list[SegmentInfo], bool], threads: int
) -> None:
    tables, segments, _ = layout
    job = LoadJob(source="s", tables=tuple(tables), threads=threads)
    parts = partition(job, segments)
    assert sorted(index for part in parts for index in part.segments) == list(range(len(segments)))
    assert len({tuple({segments[i].device for i in part.segments}) for part in parts}) == len(parts)
    for part in parts:
        assert len({segments[i].device for i in part.segments}) == 1
        assert 1 <= part.job.threads <= threads
    assert sum(part.job.threads for part in parts) <= max(threads, len(parts))
    for at, table in enumerate(tables):
        mine = [info.shard for info in segments if info.layer_id == table.layer_id]
        cut = [(part, one.block) for part in parts for one in part.cut_blocks if one.table == at]
        assert len({block for _, block in cut}) == len(cut)
        for block in range(-(-table.rows // BLOCK_ROWS)):
            first, last = block * BLOCK_ROWS, min(table.rows, (block + 1) * BLOCK_ROWS)
            here = [shard for shard in mine if shard.row_start < last and shard.row_stop > first]
            covered = sum(min(s.row_stop, last) - max(s.row_start, first) for s in here)
            whole_and_cut = covered == last - first and len(here) > 1
            assert whole_and_cut == (block in {b for _, b in cut})


@given(layout=layouts())
def test_the_parts_digests_make_the_root_where_this_node_has_every_block(
    layout: tuple[list[TableGeometry], list[SegmentInfo], bool],
) -> None:
    tables, segments, hole = layout
    job = LoadJob(source="s", tables=tuple(tables), threads=4)

    def digest(layer: int, block: int) -> bytes:
        return bytes([layer]) * 8 + block.to_bytes(8, "big")

    results = []
    for part in partition(job, segments):
        blocks = [BlockDigest(tables[b.table].layer_id, b.block, digest(b.table + 1, b.block)) for b in part.cut_blocks]
        for info in (segments[i] for i in part.segments):
            rows = tables[info.layer_id - 1].rows
            for piece in digest_pieces(info.shard.row_start, info.shard.row_stop):
                if piece.row_stop - piece.row_start == min(BLOCK_ROWS, rows - piece.block * BLOCK_ROWS):
                    blocks.append(BlockDigest(info.layer_id, piece.block, digest(info.layer_id, piece.block)))
        results.append(result_of(tuple(blocks), [segments[i].id for i in part.segments]))
    if not results:
        return
    merged = merge(tables, results)
    for table in tables:
        count = -(-table.rows // BLOCK_ROWS)
        expected = tuple(digest(table.layer_id, block) for block in range(count))
        if hole:
            assert (merged.roots[table.layer_id], merged.block_digests[table.layer_id]) == (None, ())
        else:
            assert merged.roots[table.layer_id] == table_root(table, expected)
            assert merged.block_digests[table.layer_id] == expected
    assert sorted(merged.pieces) == sorted(info.id for info in segments)


def result_of(blocks: tuple[BlockDigest, ...], names: list[str], **report: Any) -> PartResult:
    facts: dict[str, Any] = {
        "source": "s",
        "bytes_read": 10,
        "seconds": 2.0,
        "allocate_seconds": 0.1,
        "fill_seconds": 1.0,
        "verify_seconds": 0.5,
        "direct_io": True,
        "threads": 3,
        "peak_rss_bytes": 100,
    }
    return PartResult(
        report=LoadReport(**facts | report),
        phase_seconds={"loading": facts["fill_seconds"]},
        blocks=blocks,
        pieces={name: (PieceDigest(0, 1, b"d"),) for name in names},
        huge_bytes=dict.fromkeys(names, 5),
        remarks=tuple(f"remark of {name}" for name in names),
    )


def test_parts_ran_at_the_same_time_so_the_longest_counts_and_what_they_use_adds_up() -> None:
    merged = merge([], [result_of((), ["a"]), result_of((), ["b"], fill_seconds=4.0, seconds=9.0, direct_io=False)])
    report = merged.report
    assert (report.bytes_read, report.threads, report.peak_rss_bytes) == (20, 6, 200)
    assert (report.seconds, report.fill_seconds, report.direct_io) == (9.0, 4.0, False)
    assert merged.remarks == ("remark of a", "remark of b")
    assert merged.huge_bytes == {"a": 5, "b": 5}


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, len(PHASES) - 1), st.integers(0, 100), st.integers(0, 50)),
        max_size=30,
    )
)
def test_joint_progress_never_goes_back_a_phase_and_never_claims_more_than_there_is(
    steps: list[tuple[int, int, int, int]],
) -> None:
    heard: list[LoadProgress] = []
    joint = JointProgress(heard.append, 3)
    latest = [0, 0, 0]
    for part, phase, done, more in steps:
        latest[part] = max(latest[part], phase)  # a child never goes back
        total = 100 + more
        progress = LoadProgress(phase=PHASES[latest[part]], done_bytes=done, total_bytes=total, elapsed_s=1.0)
        joint.hear(part, progress)
        assert heard[-1].phase == PHASES[min(latest)]
        assert 0 <= heard[-1].done_bytes <= heard[-1].total_bytes
    phases = [PHASES.index(progress.phase) for progress in heard]
    assert phases == sorted(phases)


def test_one_childs_progress_is_handed_on_as_it_is() -> None:
    heard: list[LoadProgress] = []
    joint = JointProgress(heard.append, 1)
    said = [
        LoadProgress(phase="loading", done_bytes=3, total_bytes=9, elapsed_s=1.5),
        LoadProgress(phase="verifying", done_bytes=0, total_bytes=4, elapsed_s=2.5),
    ]
    for one in said:
        joint.hear(0, one)
    assert heard == said


def test_host_memory_has_one_child_that_finds_out_all_by_itself() -> None:
    rows = 2 * BLOCK_ROWS
    infos = [
        info_of(0, 1000, None, backing=Backing.MEMFD, row_format=RowFormat.PACKED),
        info_of(1000, rows, None, backing=Backing.MEMFD, row_format=RowFormat.PACKED),
    ]
    job = LoadJob(source="s", tables=(table_of(rows),), threads=5)
    (part,) = partition(job, infos)
    assert part == (job, (0, 1), ())


def test_the_threads_of_a_load_are_for_each_gpu() -> None:
    from engram_server.config import Config
    from engram_server.load_job import make_job

    config = Config(model_path="/m")
    segments = tuple(info_of(at, at + 1, f"GPU-{at}") for at in range(4))
    plan: Any = SimpleNamespace(
        tables=(table_of(4),), segments=segments, huge_pages="driver", huge_pages_required=False, numa=None
    )
    assert make_job(plan, config, None, cpus=192).threads == 64
    assert make_job(plan, config, None, cpus=20).threads == 20
    on_host: Any = SimpleNamespace(
        **vars(plan) | {"segments": tuple(msgspec.structs.replace(one, device=None) for one in segments)}
    )
    assert make_job(on_host, config, None, cpus=192).threads == 16


# Digests


@pytest.mark.parametrize(("gentle", "launches"), [(False, 1), (True, 3)])
def test_a_gentle_check_takes_a_few_pieces_at_a_time(
    driver: FakeDriver, tmp_path: Path, gentle: bool, launches: int
) -> None:
    pytest.importorskip("cuda.core")
    from engram_server.device_digest import GENTLE_PIECES, Digester

    stage = Stage(driver, tmp_path, 3 * GENTLE_PIECES - 5, 1)
    stage.fill()
    ranges = [(row, row + 1) for row in range(stage.info.shard.rows)]
    done: list[int] = []
    digester = Digester.on(driver, 0)
    assert Digester.on(driver, 0) is digester
    found = digester.digests([stage.target.span(*one) for one in ranges], gentle, done.append)
    values, scales = stage.raw[: len(ranges) * 256], stage.raw[len(ranges) * 256 :]
    for row, digest in enumerate(found):
        assert digest == block_digest(values[row * 256 : row * 256 + 256], scales[row * 8 : row * 8 + 8])
    assert driver._counts["cuLaunchKernel"] == launches == len(done)
    assert sum(done) == len(ranges) * 264
