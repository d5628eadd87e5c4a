"""Real loads by a real child: every row in its place, proof of it, and clean ends when something goes wrong."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from engram_client.errors import (
    AllocationFailed,
    DigestMismatch,
    LoaderDied,
    NotEnoughHugePages,
    NotEnoughMemory,
    NotEnoughSpace,
    ReadFailed,
    TruncatedFile,
)
from engram_client.layout import RowFormat
from engram_client.mapping.hostmem import HostMapping
from engram_client.protocol import LoadProgress
from engram_server import generate, load_child
from engram_server.checkpoint import open_checkpoint
from engram_server.child import environment
from engram_server.fill import FileSource, HostTarget, fill
from engram_server.load_job import LoadJob
from engram_server.loader import load
from engram_server.machine import is_memory
from engram_server.make_checkpoint import make_checkpoint
from engram_server.plan import HugePages
from engram_server.reader import FileReader, aligned_buffer, is_cached
from engram_server.segments import Segment, create_segments
from engram_server.tensor_file import Extent
from engram_server.verify import sample, verify
from tests.support.loads import (
    BLOCK,
    checkpoint_rows,
    config,
    digest,
    loaded,
    open_descriptors,
    prepare,
    root,
    rows_of,
    run_load,
    shm_names,
    stored_rows,
)

MIB = 1 << 20
TAG = f"l{os.getpid()}"
DEADLINE_S = 30.0
REPOSITORY = Path(__file__).resolve().parents[2]
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables of 24 thousand rows with every value and scale code, NaN included."""
    path = tmp_path_factory.mktemp("small") / "model"
    make_checkpoint(path, engram_vocab_size=1000, seed=7, layer_ids=(1, 14), every_code=True)
    return path


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One table of a whole canonical block and a part of a second one: 76 MiB."""
    path = tmp_path_factory.mktemp("large") / "model"
    make_checkpoint(path, engram_vocab_size=12000, seed=8, layer_ids=(5,))
    return path


@pytest.fixture(params=["memfd", "memfd-base", "memfd-hugetlb", "posix_shm", "file"])
def host(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The `host` section of each backing."""
    kind = request.param
    if kind == "memfd-hugetlb":
        if os.geteuid() != 0:
            pytest.skip("needs root to reserve huge pages")
        before = NR_HUGEPAGES.read_text()
        NR_HUGEPAGES.write_text(str(int(before) + 64))
        try:
            if int(NR_HUGEPAGES.read_text()) < int(before) + 64:
                pytest.skip("this machine has no huge pages to reserve")
            yield {"backing": "memfd", "huge_pages": "hugetlb"}
        finally:
            NR_HUGEPAGES.write_text(before)
    elif kind == "memfd-base":
        yield {"backing": "memfd", "huge_pages": "off"}
    elif kind == "file":
        folder = Path(f"/dev/shm/{TAG}-folder")
        folder.mkdir()
        yield {"backing": "file", "path": str(folder)}
        shutil.rmtree(folder)
    else:
        yield {"backing": kind}


def assert_rows(segments: Sequence[Segment], source: Path) -> None:
    for segment in segments:
        expected = checkpoint_rows(source, segment.info.layer_id)
        shard = segment.info.shard
        assert np.array_equal(stored_rows(segment), expected[shard.row_start : shard.row_stop]), segment


class TestRows:
    @pytest.mark.parametrize(("replication", "tp"), [("per_node", 4), ("none", 1), ("none", 5)])
    def test_every_backing_holds_the_checkpoints_rows(
        self, model: Path, host: dict[str, Any], replication: str, tp: int
    ) -> None:
        engram = {"placement": "cpu", "replication": replication}
        settings = config(model, host=host, tp_size=tp, engram_config=engram)
        with loaded(settings, TAG, verify="full") as (plan, segments, result):
            assert_rows(segments, model)
            for table in plan.tables:
                assert result.roots[table.layer_id] == root(table, checkpoint_rows(model, table.layer_id))
            if host.get("huge_pages") == "hugetlb":
                assert sum(result.huge_bytes.values()) == plan.needed_bytes
            if host.get("huge_pages") == "off":
                assert sum(result.huge_bytes.values()) == 0

    @pytest.mark.parametrize("tp", [2, 3, 32])
    def test_every_split_gives_the_same_rows_and_the_same_root(self, model: Path, tp: int) -> None:
        settings = config(model, tp_size=tp, engram_config={"placement": "cpu", "replication": "none"})
        with loaded(settings, TAG) as (plan, segments, result):
            assert len(segments) == 2 * tp
            assert_rows(segments, model)
            for table in plan.tables:
                assert result.roots[table.layer_id] == root(table, checkpoint_rows(model, table.layer_id))

    @pytest.mark.parametrize(("tp", "direct"), [(1, "on"), (5, "on"), (3, "off")])
    def test_shards_that_cut_canonical_blocks_have_digests_of_their_own(
        self, blocks: Path, tp: int, direct: str
    ) -> None:
        settings = config(
            blocks,
            tp_size=tp,
            engram_config={"placement": "cpu", "replication": "none"},
            load={"direct_io": direct, "threads": 2, "verify": "full"},
        )
        expected = checkpoint_rows(blocks, 5)
        with loaded(settings, TAG, chunk_bytes=300 << 10, direct_chunk_bytes=300 << 10) as (plan, segments, result):
            assert_rows(segments, blocks)
            assert result.roots == {5: root(plan.tables[0], expected)}
            wanted = tuple(digest(expected[start : start + BLOCK]) for start in range(0, len(expected), BLOCK))
            assert result.block_digests == {5: wanted}
            assert len(wanted) == 2
            for segment in segments:
                shard, next_row = segment.info.shard, segment.info.shard.row_start
                for piece in result.pieces[segment.info.id]:
                    assert piece.row_start == next_row
                    assert piece.row_start // BLOCK == (piece.row_stop - 1) // BLOCK
                    assert piece.digest == digest(expected[piece.row_start : piece.row_stop])
                    next_row = piece.row_stop
                assert next_row == shard.row_stop

    def test_a_node_of_several_reads_its_own_rows_only_and_claims_no_root(self, blocks: Path) -> None:
        settings = config(
            blocks, tp_size=4, nnodes=2, node_rank=1, engram_config={"placement": "cpu", "replication": "none"}
        )
        with loaded(settings, TAG, verify="full") as (_, segments, result):
            assert [segment.info.rank for segment in segments] == [2, 3]
            assert_rows(segments, blocks)
            assert result.roots == {5: None}
            assert result.block_digests == {5: ()}
            assert result.report.bytes_read == sum(segment.info.shard.rows for segment in segments) * 264
            assert all(result.pieces.values())

    def test_planar_segments_hold_values_and_then_scales(self, model: Path) -> None:
        plan, job = prepare(config(model), verify="full")
        infos = tuple(msgspec.structs.replace(info, row_format=RowFormat.PLANAR) for info in plan.segments)
        segments = create_segments(msgspec.structs.replace(plan, segments=infos), TAG)
        try:
            result = run_load(job, segments)
            for segment in segments:
                segment.seal()
            assert_rows(segments, model)
            assert result.roots[1] == root(plan.tables[0], checkpoint_rows(model, 1))
        finally:
            for segment in segments:
                segment.discard()

    def test_dummy_tables_are_the_generators_rows(self, model: Path) -> None:
        settings = config(model, load_format="dummy", seed=99, load={"verify": "full"})
        with loaded(settings, TAG) as (plan, segments, result):
            for segment, table in zip(segments, plan.tables, strict=True):
                expected = np.concatenate(generate.rows(table.layer_id, 99, 0, table.rows), axis=1)
                assert np.array_equal(stored_rows(segment), expected)
                assert result.roots[table.layer_id] == root(table, expected)

    def test_the_report_tells_what_happened_and_progress_only_grows(self, model: Path) -> None:
        plan, job = prepare(config(model, load={"threads": 2, "direct_io": "off"}))
        seen: list[LoadProgress] = []
        segments = create_segments(plan, TAG)
        try:
            result = run_load(job, segments, seen.append)
        finally:
            for segment in segments:
                segment.discard()
        assert result.report.source == str(model)
        assert result.report.bytes_read == sum(table.nbytes for table in plan.tables)
        assert not result.report.direct_io
        assert result.report.threads == 2
        assert 0 < result.report.peak_rss_bytes < 512 * MIB
        assert [progress.elapsed_s for progress in seen] == sorted(progress.elapsed_s for progress in seen)
        order = ["starting", "allocating", "loading", "verifying"]
        ranks = [order.index(progress.phase) for progress in seen]
        assert ranks == sorted(ranks)
        assert {1, 2, 3} <= set(ranks)
        assert all(progress.done_bytes <= progress.total_bytes for progress in seen)

    def test_the_loop_of_uvloop_works_too(self, model: Path) -> None:
        import uvloop

        plan, job = prepare(config(model))
        segments = create_segments(plan, TAG)
        try:
            assert uvloop.run(load(job, segments)).roots[1] == root(plan.tables[0], checkpoint_rows(model, 1))
        finally:
            for segment in segments:
                segment.discard()

    def test_the_daemons_own_side_imports_no_numpy(self) -> None:
        code = (
            "import sys, engram_server.loader, engram_server.plan, engram_server.segments, engram_server.machine\n"
            "sys.exit(any(name in sys.modules for name in ('numpy', 'torch')))"
        )
        assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False).returncode == 0


# In this process: faults that are injected


@contextmanager
def in_process(source: Path, **sections: Any) -> Iterator[tuple[LoadJob, list[HostTarget]]]:
    """A job and mapped targets for `fill` in this process."""
    plan, job = prepare(config(source, **sections))
    segments = create_segments(plan, TAG)
    mappings = [HostMapping(s.writable_fd, s.info.nbytes, True, s.info.page_bytes) for s in segments]
    try:
        yield job, [HostTarget(s.info, m, s.writable_fd) for s, m in zip(segments, mappings, strict=True)]
    finally:
        for mapping in mappings:
            with suppress(BufferError):  # a failed fill's traceback still holds slices
                mapping.close()
        for segment in segments:
            segment.discard()


class TestReading:
    def test_an_io_error_names_the_file_and_the_byte(self, model: Path) -> None:
        calls = []

        def failing(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            if len(calls) == 5:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return os.preadv(fd, buffers, offset)

        before = open_descriptors()
        with in_process(model) as (job, targets):
            job = msgspec.structs.replace(job, chunk_bytes=64 << 10, threads=1)
            with pytest.raises(ReadFailed) as failed:
                fill(job, targets, lambda: FileSource(job, False, failing))
            assert failed.value.offset == calls[4]
            assert failed.value.path in {extent.path for extent in job.values}
        assert open_descriptors() == before

    def test_a_file_cut_while_it_is_read_is_truncated_by_name(self, model: Path, tmp_path: Path) -> None:
        copy = tmp_path / "model"
        shutil.copytree(model, copy)
        calls = []

        def cutting(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            if len(calls) == 5:
                os.truncate(f"/proc/self/fd/{fd}", offset + 100)
            return os.preadv(fd, buffers, offset)

        with in_process(copy) as (job, targets):
            job = msgspec.structs.replace(job, chunk_bytes=64 << 10, threads=1)
            with pytest.raises(TruncatedFile) as failed:
                fill(job, targets, lambda: FileSource(job, False, cutting))
            assert failed.value.size == calls[4] + 100
            assert failed.value.expected == job.values[0].offset + job.values[0].nbytes

    @pytest.mark.parametrize("direct", [False, True])
    @pytest.mark.parametrize("most", [1, 513, 4096, 70000])
    def test_short_reads_are_continued(self, model: Path, direct: bool, most: int) -> None:
        extent = open_checkpoint(model).sources[0].values
        calls = []

        def short(fd: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            count = -(-most // 4096) * 4096 if direct else most  # a device hands out whole blocks only
            return os.preadv(fd, [buffers[0][:count]], offset)

        reader = FileReader(extent, direct, short)
        expected = checkpoint_rows(model, 1)[:, :256].tobytes()
        buffer = aligned_buffer(9000)
        for start, nbytes in ((0, 9000), (5, 1), (4095, 4098), (len(expected) - 8193, 8193)):
            assert bytes(reader.read(start, nbytes, buffer)) == expected[start : start + nbytes]
        assert len(calls) > 4 or most > 9000
        reader.close()

    def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(self, model: Path) -> None:
        def refusing(fd: int, buffers: list[memoryview], offset: int) -> int:
            import fcntl

            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return os.preadv(fd, buffers, offset)

        with in_process(model) as (job, targets):
            sources = []

            def make() -> FileSource:
                sources.append(FileSource(job, True, refusing))
                return sources[-1]

            fill(job, targets, make)
            assert not all(source.direct for source in sources)
            for target in targets:
                expected = checkpoint_rows(model, target.info.layer_id)
                assert np.array_equal(rows_of(target.info, target.mapping.view), expected)

    def test_what_is_in_the_page_cache_is_noticed(self, blocks: Path) -> None:
        extent = open_checkpoint(blocks).sources[0].values
        with open(extent.path, "rb") as file:
            os.fsync(file.fileno())
            while file.read(4 * MIB):
                pass
            assert is_cached([extent])
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert not is_cached([extent])
            assert not is_cached([extent]), "asking must not fill the cache"

    @pytest.mark.skipif(not is_memory("/dev/shm"), reason="/dev/shm is no file system in memory")
    def test_a_checkpoint_in_a_file_system_that_is_memory_counts_as_cached(self) -> None:
        with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="engram-test-") as file:
            file.write(bytes(MIB))
            file.flush()
            assert is_cached([Extent(file.name, 0, MIB)])

    def test_what_was_read_through_the_cache_is_dropped_from_it(self, blocks: Path) -> None:
        extent = open_checkpoint(blocks).sources[0].values
        with open(extent.path, "rb") as file:
            os.fsync(file.fileno())
            while file.read(4 * MIB):
                pass
        with loaded(config(blocks, load={"direct_io": "off"}), TAG):
            assert not is_cached([extent])


class TestProof:
    def test_a_flipped_byte_is_found_and_its_rows_are_named(self, blocks: Path) -> None:
        with in_process(blocks) as (job, targets):
            digests = fill(job, targets, lambda: FileSource(job, False))
            pieces = digests.pieces_of(targets[0].info.id)
            work = [(target, piece) for target in targets for piece in pieces]
            verify(work, 2)
            targets[0].mapping.view[BLOCK * 264 + 999] ^= 1
            verify(work[:1], 1)
            with pytest.raises(DigestMismatch) as failed:
                verify(work, 2)
            assert (failed.value.row_start, failed.value.segment) == (BLOCK, "L5")
            assert failed.value.expected == pieces[1].digest.hex() != failed.value.found

    def test_a_sample_has_the_first_and_the_last_piece(self) -> None:
        pieces = [object() for _ in range(50)]
        few = sample(pieces, "sample")  # type: ignore[arg-type]
        assert (few[0], few[-1], len(few)) == (pieces[0], pieces[-1], 4)
        assert sample(pieces, "full") == pieces  # type: ignore[arg-type]
        assert sample(pieces, "off") == []  # type: ignore[arg-type]
        assert sample(pieces[:3], "sample") == pieces[:3]  # type: ignore[arg-type]


# Failures of the real thing


@contextmanager
def stuck(model: Path, tmp_path: Path) -> Iterator[tuple[LoadJob, list[Segment]]]:
    """A load that never ends: opening its file, a FIFO, waits for a writer that does not come."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    plan, job = prepare(config(model, host={"backing": "posix_shm"}), direct_io="off")
    values = tuple(_at(extent, fifo) for extent in job.values)
    segments = create_segments(plan, TAG)
    try:
        yield msgspec.structs.replace(job, values=values), segments
    finally:
        for segment in segments:
            segment.discard()


def _at(extent: Any, path: Path) -> Any:
    return type(extent)(path=str(path), offset=extent.offset, nbytes=extent.nbytes)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "engram_server.load_child" in child.cmdline()]


def eventually(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = holds()
        if found:
            return found
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


class TestEnds:
    def test_a_killed_loader_is_reported_with_its_signal_and_its_phase(self, model: Path, tmp_path: Path) -> None:
        def kill(progress: LoadProgress) -> None:
            if progress.phase == "loading":
                for child in children():
                    child.kill()

        before = open_descriptors()
        with stuck(model, tmp_path) as (job, segments):
            with pytest.raises(LoaderDied) as failed:
                run_load(job, segments, kill)
        assert (failed.value.how, failed.value.doing) == ("SIGKILL", "loading")
        assert children() == []
        assert open_descriptors() == before
        assert shm_names(TAG) == []

    def test_cancelling_kills_the_child_and_waits_for_its_end(self, model: Path, tmp_path: Path) -> None:
        before = open_descriptors()

        async def cancel_while_loading(job: LoadJob, segments: list[Segment]) -> None:
            started = asyncio.Event()
            task = asyncio.create_task(load(job, segments, lambda progress: started.set()))
            await started.wait()
            assert len(children()) == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert children() == []

        with stuck(model, tmp_path) as (job, segments):
            asyncio.run(cancel_while_loading(job, segments))
        assert open_descriptors() == before
        assert shm_names(TAG) == []

    def test_a_fault_of_the_caller_while_it_hears_of_progress_ends_the_child_too(
        self, model: Path, tmp_path: Path
    ) -> None:
        def fault(progress: LoadProgress) -> None:
            raise ZeroDivisionError

        with stuck(model, tmp_path) as (job, segments), pytest.raises(ZeroDivisionError):
            run_load(job, segments, fault)
        assert children() == []

    def test_the_child_starts_no_threads_but_its_own(self) -> None:
        code = "import numpy, os; print(len(os.listdir('/proc/self/task')))"
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
        )
        assert done.stdout == "1\n"

    def test_the_child_is_the_first_to_be_killed_when_memory_is_short(self, model: Path, tmp_path: Path) -> None:
        scores: list[str] = []

        def look(progress: LoadProgress) -> None:
            for child in children():
                scores.append(Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip())
                child.kill()

        with stuck(model, tmp_path) as (job, segments), pytest.raises(LoaderDied):
            run_load(job, segments, look)
        assert scores[0] == "1000"

    def test_a_killed_parent_takes_its_child_along(self, model: Path, tmp_path: Path) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        copy = tmp_path / "model"
        shutil.copytree(model, copy)
        code = (
            "import asyncio, msgspec, sys; from pathlib import Path\n"
            "from tests.support.loads import *; from tests.system.test_loader import _at\n"
            f"plan, job = prepare(config({str(model)!r}), direct_io='off')\n"
            f"job = msgspec.structs.replace(job, values=tuple(_at(e, Path({str(fifo)!r})) for e in job.values))\n"
            "run_load(job, create_segments(plan, 'orphan'), lambda progress: print(progress.phase, flush=True))\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        ) as parent:
            assert parent.stdout is not None
            while parent.stdout.readline().strip() != "loading":
                assert parent.poll() is None
            (child,) = psutil.Process(parent.pid).children()
            parent.kill()
            parent.wait(DEADLINE_S)
            eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)

    def test_a_file_cut_before_the_load_is_reported_by_the_child(self, model: Path, tmp_path: Path) -> None:
        copy = tmp_path / "model"
        shutil.copytree(model, copy)
        plan, job = prepare(config(copy))
        os.truncate(job.values[0].path, job.values[0].offset + 1000)
        segments = create_segments(plan, TAG)
        with pytest.raises(TruncatedFile) as failed:
            run_load(job, segments)
        for segment in segments:
            segment.discard()
        assert failed.value.path == job.values[0].path

    def test_memory_truncated_under_the_loader_stops_it(self, blocks: Path) -> None:
        with in_process(blocks, host={"backing": "posix_shm"}) as (job, targets):
            os.truncate(targets[0].fd, targets[0].info.nbytes - MIB)
            with pytest.raises(AllocationFailed):
                fill(job, targets, lambda: FileSource(job, False))

    def test_a_demand_for_huge_pages_that_the_kernel_does_not_give_is_refused(self, model: Path) -> None:
        plan, job = prepare(config(model), huge_pages=HugePages.BASE, huge_pages_required=True)
        segments = create_segments(plan, TAG)
        with pytest.raises(NotEnoughHugePages) as failed:
            run_load(job, segments)
        for segment in segments:
            segment.discard()
        assert failed.value.available == 0

    @pytest.mark.parametrize(
        ("program", "how"), [(shutil.which("false"), "exit status 1"), ("/nowhere", os.strerror(errno.ENOENT))]
    )
    def test_a_loader_that_cannot_start_is_reported(
        self, model: Path, monkeypatch: pytest.MonkeyPatch, program: str, how: str
    ) -> None:
        plan, job = prepare(config(model))
        segments = create_segments(plan, TAG)
        monkeypatch.setattr(sys, "executable", program)
        with pytest.raises(LoaderDied) as failed:
            run_load(job, segments)
        for segment in segments:
            segment.discard()
        assert (failed.value.how, failed.value.doing) == (how, "starting")


# Small machines


def in_namespace(order: dict[str, Any], *mounts: str) -> dict[str, Any]:
    """The outcome of tests.support.load_cli after `mounts` in a mount namespace of its own."""
    script = " && ".join([*mounts, 'exec "$0" -m tests.support.load_cli "$1"'])
    return _outcome(["unshare", "--mount", "sh", "-c", script, sys.executable, json.dumps(order)])


def _outcome(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=100)
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert done.stdout, done.stderr
    outcome: dict[str, Any] = json.loads(done.stdout)
    assert outcome["names"] == [], "a name stays behind"
    assert outcome["descriptors"] == [], "a descriptor stays open"
    return outcome


def order(model: Path, host: dict[str, Any], **rest: Any) -> dict[str, Any]:
    raw = {"model_path": str(model), "engram_config": {"placement": "cpu", "replication": "per_node"}, "host": host}
    return {"config": raw, "tag": TAG, **rest}


def tmpfs(folder: str, size_mib: int) -> str:
    return f"mount -t tmpfs -o size={size_mib}m none {folder}"


@root_only
class TestSmallMachines:
    def test_a_dev_shm_of_64_mib_is_refused_before_a_byte_is_written(self, blocks: Path) -> None:
        outcome = in_namespace(order(blocks, {"backing": "posix_shm"}), tmpfs("/dev/shm", 64))
        assert outcome["error"] == NotEnoughSpace.__name__
        assert outcome["fields"]["available"] == 64 * MIB
        assert outcome["fields"]["needed"] > 64 * MIB
        assert outcome["phases"] == []

    def test_auto_does_without_dev_shm(self, model: Path) -> None:
        outcome = in_namespace(order(model, {}), tmpfs("/dev", 1), "test ! -e /dev/shm", "touch /dev/null")
        assert outcome["rows"] is True

    def test_posix_shm_without_dev_shm_is_unavailable(self, model: Path) -> None:
        outcome = in_namespace(order(model, {"backing": "posix_shm"}), tmpfs("/dev", 1), "touch /dev/null")
        assert outcome["error"] == "BackingUnavailable"

    def test_a_tmpfs_filled_by_others_is_found_at_allocation(self, blocks: Path, tmp_path: Path) -> None:
        host = {"backing": "file", "path": str(tmp_path)}
        for fill_up, mounted in ((str(tmp_path), tmp_path), ("/dev/shm", Path("/dev/shm"))):
            settings = host if mounted == tmp_path else {"backing": "posix_shm"}
            outcome = in_namespace(order(blocks, settings, fill=fill_up), tmpfs(str(mounted), 100))
            assert outcome["error"] == NotEnoughSpace.__name__
            assert outcome["fields"]["path"] == str(mounted)
            assert outcome["fields"]["available"] < outcome["fields"]["needed"]
            assert outcome["phases"][-1] == "allocating"

    def test_a_tmpfs_of_the_users_holds_the_tables(self, model: Path, tmp_path: Path) -> None:
        host = {"backing": "file", "path": str(tmp_path)}
        outcome = in_namespace(order(model, host), tmpfs(str(tmp_path), 64))
        assert outcome["rows"] is True
        assert outcome["huge"] >= 0.9 * outcome["needed"] or outcome["remarks"]

    def test_a_page_cache_full_of_the_checkpoint_leaves_huge_pages(self, blocks: Path) -> None:
        for path in blocks.glob("*.safetensors"):
            path.read_bytes()
        outcome = in_namespace(order(blocks, {}), "true")
        assert outcome["rows"] is True
        assert outcome["huge"] >= 0.9 * outcome["needed"] or outcome["remarks"]

    @pytest.fixture
    def limited(self) -> Iterator[Path]:
        """A memory cgroup of 300 MiB."""
        group = MEMORY_CGROUP / TAG
        if not (MEMORY_CGROUP / "memory.limit_in_bytes").exists():
            pytest.skip("no cgroup v1 memory controller here; recorded ones are in test_machine.py")
        try:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(300 * MIB))
        except OSError as error:
            pytest.skip(f"no cgroups to make here: {error}")
        yield group
        eventually(lambda: not (group / "cgroup.procs").read_text().strip())
        group.rmdir()

    def test_a_table_above_the_cgroups_limit_is_refused_at_once(self, blocks: Path, limited: Path) -> None:
        outcome = self._inside(limited, order(blocks, {}))
        assert outcome["error"] == NotEnoughMemory.__name__
        assert outcome["fields"]["source"] == f"cgroup limit {limited}/memory.limit_in_bytes"
        assert outcome["fields"]["available"] < 300 * MIB
        assert outcome["phases"] == []

    def test_memory_that_runs_out_kills_the_loader_and_not_the_daemon(self, blocks: Path, limited: Path) -> None:
        (limited / "memory.limit_in_bytes").write_text(str(110 * MIB))
        outcome = self._inside(limited, order(blocks, {"memory_check": "off"}))
        assert outcome["error"] == LoaderDied.__name__
        assert outcome["fields"]["how"] == "SIGKILL"

    def _inside(self, group: Path, what: dict[str, Any]) -> dict[str, Any]:
        script = f'echo $$ > {group}/cgroup.procs && exec "$0" -m tests.support.load_cli "$1"'
        return _outcome(["sh", "-c", script, sys.executable, json.dumps(what)])


def test_a_bug_in_the_child_is_an_internal_error_and_not_silence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    from engram_client.errors import InternalError
    from engram_server.load_job import ChildMessage, Order, ProgressUpdate, frame, receive_message

    def bug(*_: object) -> None:
        raise RuntimeError("surprise")

    plan, job = prepare(config(model))
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(load_child, "load", bug)
    monkeypatch.setattr(load_child, "die_with_parent", lambda connection: None)
    monkeypatch.setattr(load_child, "be_killed_first", lambda: None)
    number = theirs.detach()
    monkeypatch.setattr(sys, "argv", ["load_child", str(number)])
    ours.sendall(frame(Order(job=job, segments=plan.segments, fds=())))
    assert load_child.main() == 0
    os.close(number)
    with ours, ours.makefile("rb") as stream:
        message = receive_message(stream, ChildMessage)
        while isinstance(message, ProgressUpdate):
            message = receive_message(stream, ChildMessage)
    assert isinstance(message.error(), InternalError)
