"""Segments of every backing, on real memory: who can write when, what is left behind, which pages they get."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engram_client.errors import AllocationFailed, BackingUnavailable, MapFailed, NotEnoughHugePages
from engram_client.layout import ModelGeometry
from engram_client.mapping.hostmem import MADV_POPULATE_READ, MADV_POPULATE_WRITE, HostMapping, madvise
from engram_client.protocol import Backing, Placement, Replication
from engram_server.config import Config, EngramConfig, HostConfig
from engram_server.gpus import Gpus
from engram_server.machine import Machine, is_hugetlb
from engram_server.plan import HugePages, NumaPolicy, Plan, make_plan
from engram_server.segments import Segment, adopt_segment, create_segments, remove_stale
from engram_server.segments.pages import bind, coverage_remark, huge_bytes, populate, read_smaps
from tests.support.loads import open_descriptors, shm_names

MIB = 1 << 20
MAP_FIXED_NOREPLACE = 0x100000
TAG = f"t{os.getpid()}"
MODEL = ModelGeometry(engram_layer_ids=(1, 2), engram_max_ngram_size=4, engram_vocab_size=700, engram_n_heads=8)
"""Two tables of 4.3 MiB: three huge pages each."""
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def plan(folder: Path | None = None, **host: Any) -> Plan:
    settings = Config(
        model_path="/m",
        engram_config=EngramConfig(placement=Placement.CPU, replication=Replication.PER_NODE),
        host=HostConfig(**host),
    )
    return make_plan(settings, MODEL, Machine.read(folder=host.get("path")), Gpus.none("a test"))


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder in memory: /dev/shm is a tmpfs."""
    path = Path(f"/dev/shm/{TAG}-folder")
    path.mkdir()
    yield str(path)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture
def hugetlb() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root to reserve huge pages")
    before = NR_HUGEPAGES.read_text()
    NR_HUGEPAGES.write_text(str(int(before) + 8))
    if int(NR_HUGEPAGES.read_text()) < int(before) + 8:
        NR_HUGEPAGES.write_text(before)
        pytest.skip("this machine has no huge pages to reserve")
    yield
    NR_HUGEPAGES.write_text(before)


@contextmanager
def created(made: Plan) -> Iterator[list[Segment]]:
    segments = create_segments(made, TAG)
    try:
        yield segments
    finally:
        for segment in segments:
            segment.discard()


@pytest.fixture(params=["memfd", "memfd-base", "memfd-hugetlb", "posix_shm", "file"])
def backed(request: pytest.FixtureRequest) -> Iterator[list[Segment]]:
    """Unsealed segments of each backing."""
    kind = request.param
    host: dict[str, Any] = {"backing": kind.partition("-")[0]}
    if kind == "memfd-hugetlb":
        request.getfixturevalue("hugetlb")
        host["huge_pages"] = "hugetlb"
    elif kind == "memfd-base":
        host["huge_pages"] = "off"
    elif kind == "file":
        host["path"] = request.getfixturevalue("folder")
    with created(plan(**host)) as segments:
        yield segments


def put(segment: Segment, text: bytes) -> None:
    with HostMapping(segment.writable_fd, segment.info.nbytes, True, segment.info.page_bytes) as mapping:
        mapping.view[: len(text)] = text


def in_child(code: str, *fds: int) -> int:
    """Exit status of a Python process that has the descriptors."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, fds)], pass_fds=fds, check=False, timeout=60
    ).returncode


class TestEveryBacking:
    def test_what_was_written_before_the_seal_is_read_after_it(self, backed: list[Segment]) -> None:
        segment = backed[0]
        put(segment, b"rows")
        segment.seal()
        with HostMapping(segment.readable_fd, segment.info.nbytes, False, segment.info.page_bytes) as mapping:
            assert mapping.address % segment.info.page_bytes == 0
            assert bytes(mapping.view[:4]) == b"rows"
            assert mapping.view.readonly
            with pytest.raises(TypeError):
                mapping.view[0] = 1

    def test_readers_get_a_descriptor_that_cannot_write(self, backed: list[Segment]) -> None:
        segment = backed[0]
        segment.seal()
        fd = segment.readable_fd
        assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with pytest.raises(MapFailed):
            HostMapping(fd, segment.info.nbytes, True, segment.info.page_bytes)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")

    def test_a_store_through_a_read_only_mapping_ends_the_writer_alone(self, backed: list[Segment]) -> None:
        segment = backed[0]
        put(segment, b"rows")
        segment.seal()
        code = (
            "import sys, ctypes; from engram_client.mapping.hostmem import HostMapping\n"
            f"m = HostMapping(int(sys.argv[1]), {segment.info.nbytes}, False, {segment.info.page_bytes})\n"
            "ctypes.c_char.from_address(m.address).value = b'x'"
        )
        assert in_child(code, segment.readable_fd) == -signal.SIGSEGV
        assert os.pread(segment.readable_fd, 4, 0) == b"rows" or is_hugetlb(segment.readable_fd)

    def test_the_life_of_a_segment_is_checked_and_told(self, backed: list[Segment]) -> None:
        segment = backed[0]
        assert "writable" in repr(segment)
        with pytest.raises(ValueError, match="readable"):
            _ = segment.readable_fd
        segment.seal()
        segment.seal()
        assert "sealed" in repr(segment)
        with pytest.raises(ValueError, match="writable"):
            _ = segment.writable_fd
        segment.close()
        segment.close()
        assert "closed" in repr(segment)

    def test_memory_truncated_during_the_load_is_not_sealed(self, backed: list[Segment]) -> None:
        segment = backed[0]
        os.ftruncate(segment.writable_fd, 0)
        with pytest.raises(AllocationFailed):
            segment.seal()

    def test_every_page_is_allocated_before_the_fill(self, backed: list[Segment]) -> None:
        segment = backed[0]
        info = segment.info
        with HostMapping(segment.writable_fd, info.nbytes, True, info.page_bytes) as mapping:
            huge = HugePages.HUGETLB if is_hugetlb(segment.writable_fd) else HugePages.THP
            done: list[int] = []
            populate(mapping, segment.writable_fd, huge, 2, done.append)
            assert sum(done) == info.nbytes
            assert os.fstat(segment.writable_fd).st_blocks * 512 >= info.nbytes
            assert not any(mapping.view[:: mmap.PAGESIZE])

    def test_nothing_is_left_open_or_named_after_a_discard(self, backed: list[Segment]) -> None:
        for segment in backed:
            segment.discard()
        assert not [target for target in open_descriptors() if TAG in target]
        assert shm_names(TAG) == []


class TestMemfd:
    def test_a_sealed_memfd_refuses_every_way_to_write(self) -> None:
        with created(plan(backing="memfd")) as segments:
            segments[0].seal()
            again = os.open(f"/proc/self/fd/{segments[0].readable_fd}", os.O_RDWR)  # as root may
            try:
                refusals: list[Callable[[], object]] = [
                    lambda: mmap.mmap(again, MIB, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
                    lambda: os.write(again, b"x"),
                    lambda: os.ftruncate(again, 0),
                    lambda: os.ftruncate(again, 1 << 30),
                    lambda: fcntl.fcntl(again, 1033, 0x8),
                ]
                for refused in refusals:
                    with pytest.raises(PermissionError):
                        refused()
            finally:
                os.close(again)

    def test_its_content_cannot_be_executed(self) -> None:
        if Machine.read().kernel < (6, 3):
            pytest.skip("needs MFD_NOEXEC_SEAL")
        with created(plan(backing="memfd")) as segments:
            assert os.fstat(segments[0].writable_fd).st_mode & 0o111 == 0

    @root_only
    def test_another_user_cannot_open_it_again_for_writing(self) -> None:
        with created(plan(backing="memfd")) as segments:
            segments[0].seal()
            code = (
                "import os, sys; os.setuid(65534)\n"
                "try: os.open(f'/proc/self/fd/{sys.argv[1]}', os.O_RDWR)\n"
                "except PermissionError: sys.exit(7)"
            )
            assert in_child(code, segments[0].readable_fd) == 7

    def test_hugetlb_pages_are_reserved_at_creation(self, hugetlb: None) -> None:
        made = plan(backing="memfd", huge_pages="hugetlb")
        assert made.huge_pages is HugePages.HUGETLB
        before = Machine.read().huge_pool
        with created(made) as segments:
            after = Machine.read().huge_pool
            assert before is not None
            assert after is not None
            assert after.available == before.available - made.needed_bytes
            info, fd = segments[0].info, segments[0].writable_fd
            with HostMapping(fd, info.nbytes, True, info.page_bytes) as mapping:
                populate(mapping, fd, HugePages.HUGETLB, 1)
                assert huge_bytes(mapping) == info.nbytes
        assert Machine.read().huge_pool == before

    def test_a_pool_that_has_shrunk_is_an_error_only_where_the_user_insisted(self) -> None:
        made = plan(backing="memfd")
        if Machine.read().huge_pool is None:
            pytest.skip("no huge page pool")
        wish = msgspec.structs.replace(made, huge_pages=HugePages.HUGETLB)
        with created(wish) as segments:
            assert not any(is_hugetlb(segment.writable_fd) for segment in segments)
        with pytest.raises(NotEnoughHugePages):
            create_segments(msgspec.structs.replace(wish, huge_pages_required=True), TAG)

    def test_only_a_sealed_read_only_memfd_of_the_right_size_is_adopted(self) -> None:
        with created(plan(backing="memfd")) as segments:
            first, second = segments
            first.seal()
            fd = os.dup(first.readable_fd)
            adopted = adopt_segment(first.info, TAG, fd=fd)
            assert adopted.readable_fd == fd
            adopted.close()
            larger = msgspec.structs.replace(first.info, nbytes=first.info.nbytes * 2)
            for info, refused in ((second.info, second.writable_fd), (larger, first.readable_fd)):
                with pytest.raises(BackingUnavailable):
                    adopt_segment(info, TAG, fd=refused)
            with open("/dev/null") as other, pytest.raises(BackingUnavailable):
                adopt_segment(first.info, TAG, fd=other.fileno())


class TestNamed:
    @pytest.fixture(params=["posix_shm", "file"])
    def named(self, request: pytest.FixtureRequest) -> tuple[Plan, str]:
        if request.param == "posix_shm":
            return plan(backing="posix_shm"), "/dev/shm"
        path: str = request.getfixturevalue("folder")
        return plan(backing="file", path=path), path

    def test_names_carry_the_tag_and_modes_tell_the_state(self, named: tuple[Plan, str]) -> None:
        made, folder = named
        with created(made) as segments:
            assert shm_names(TAG, folder) == [f"engram-{TAG}-L1", f"engram-{TAG}-L2"]
            path = Path(folder) / f"engram-{TAG}-L1"
            assert path.stat().st_mode & 0o777 == 0o600
            segments[0].seal()
            assert path.stat().st_mode & 0o777 == 0o440

    def test_a_name_that_is_taken_is_refused_and_nothing_of_the_attempt_stays(self, named: tuple[Plan, str]) -> None:
        made, folder = named
        taken = Path(folder) / f"engram-{TAG}-L2"
        taken.touch()
        before = open_descriptors()
        try:
            with pytest.raises(BackingUnavailable):
                create_segments(made, TAG)
            assert shm_names(TAG, folder) == [taken.name]
            assert open_descriptors() == before
        finally:
            taken.unlink()

    def test_closing_keeps_the_name_so_that_the_next_daemon_adopts_it(self, named: tuple[Plan, str]) -> None:
        made, folder = named
        segments = create_segments(made, TAG)
        put(segments[0], b"kept")
        segments[0].seal()
        for segment in segments:
            segment.close()
        adopted = adopt_segment(made.segments[0], TAG, folder)
        assert os.pread(adopted.readable_fd, 4, 0) == b"kept"
        with pytest.raises(BackingUnavailable):
            adopt_segment(made.segments[1], TAG, folder)  # its load never ended
        adopted.discard()
        with pytest.raises(BackingUnavailable):
            adopt_segment(made.segments[0], TAG, folder)
        assert remove_stale(TAG, folder) == [f"{folder}/engram-{TAG}-L2"]

    def test_stale_names_of_this_tag_are_removed_and_no_others(self, named: tuple[Plan, str]) -> None:
        made, folder = named
        other = Path(folder) / f"engram-{TAG}0-L1"
        other.touch()
        try:
            for segment in create_segments(made, TAG):
                segment.close()
            assert len(remove_stale(TAG, folder)) == 2
            assert remove_stale(TAG, folder) == []
            assert other.exists()
        finally:
            other.unlink()

    def test_a_folder_on_a_disk_is_refused(self, tmp_path: Path) -> None:
        if Machine.read(folder=str(tmp_path)).folder.kind == "tmpfs":  # type: ignore[union-attr]
            pytest.skip("the temporary folder is in memory")
        made = msgspec.structs.replace(plan(), folder=str(tmp_path))
        info = msgspec.structs.replace(made.segments[0], backing=Backing.FILE)
        with pytest.raises(BackingUnavailable):
            create_segments(msgspec.structs.replace(made, segments=(info,)), TAG)
        assert list(tmp_path.iterdir()) == []


class TestMapping:
    def test_a_descriptor_shorter_than_promised_is_not_mapped(self) -> None:
        fd = os.memfd_create("short")
        os.ftruncate(fd, MIB - 1)
        with pytest.raises(MapFailed):
            HostMapping(fd, MIB)
        os.close(fd)
        with pytest.raises(MapFailed):
            HostMapping(fd, MIB)

    def test_a_mapping_in_use_is_not_unmapped(self) -> None:
        fd = os.memfd_create("used")
        os.ftruncate(fd, MIB)
        mapping = HostMapping(fd, MIB)
        os.close(fd)
        for use in (lambda: mapping.view[5:9], lambda: np.frombuffer(mapping.view, np.uint8)[3:]):
            user = use()
            with pytest.raises(BufferError):
                mapping.close()
            assert bytes(mapping.view[:2]) == bytes(2) == bytes(user[:2])
            del user
        mapping.close()
        mapping.close()
        with pytest.raises(ValueError, match="closed"):
            _ = mapping.view

    def test_advice_reaches_the_kernel_and_its_refusal_is_raised(self) -> None:
        fd = os.memfd_create("advised")
        os.ftruncate(fd, 4 * MIB)
        with HostMapping(fd, 4 * MIB) as mapping:
            mapping.advise(MADV_POPULATE_READ)
            with pytest.raises(OSError, match="madvise"):
                mapping.advise(MADV_POPULATE_WRITE)  # a read-only mapping
        os.close(fd)

    def test_a_dropped_mapping_goes_with_the_last_slice_of_it_and_a_closed_one_at_once(self) -> None:
        fd = os.memfd_create("dropped")
        os.ftruncate(fd, 4 * MIB)
        os.pwrite(fd, b"end", 4 * MIB - 3)

        def mapped() -> bool:
            return "memfd:dropped" in Path("/proc/self/maps").read_text()

        mapping = HostMapping(fd, 4 * MIB)
        mapping.unmap_when_dropped()
        array = np.frombuffer(mapping.view[-3:], np.uint8)
        del mapping
        assert (mapped(), bytes(array)) == (True, b"end")
        del array
        assert not mapped()
        closed = HostMapping(fd, 4 * MIB)
        closed.unmap_when_dropped()
        address = closed.address
        closed.close()
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        arguments = (4 * MIB, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED_NOREPLACE, fd, ctypes.c_long(0))
        assert libc.mmap(ctypes.c_void_p(address), *arguments) == address
        try:
            del closed
            gc.collect()
            assert mapped(), "what lies there now is somebody else's"
        finally:
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(4 * MIB))
            os.close(fd)


class TestPages:
    @pytest.fixture
    def mapping(self) -> Iterator[tuple[HostMapping, int]]:
        fd = os.memfd_create("pages")
        os.ftruncate(fd, 8 * MIB)
        with HostMapping(fd, 8 * MIB, True) as mapping:
            yield mapping, fd
        os.close(fd)

    def test_collapse_gives_huge_pages_though_shmem_enabled_says_never(self, mapping: tuple[HostMapping, int]) -> None:
        machine = Machine.read()
        if machine.kernel < (6, 1) or machine.thp_enabled is None:
            pytest.skip("needs MADV_COLLAPSE")
        populate(*mapping, HugePages.THP, 2)
        assert huge_bytes(mapping[0]) >= 6 * MIB, "fragmented memory may leave one out"

    def test_base_pages_stay_base_pages(self, mapping: tuple[HostMapping, int]) -> None:
        populate(*mapping, HugePages.BASE, 2)
        assert huge_bytes(mapping[0]) == 0
        assert os.fstat(mapping[1]).st_blocks * 512 == 8 * MIB

    def test_an_old_kernel_gets_its_pages_from_fallocate(self, mapping: tuple[HostMapping, int]) -> None:
        def refuse(address: int, nbytes: int, advice: int) -> None:
            raise OSError(errno.EINVAL, "unknown advice")

        populate(*mapping, HugePages.THP, 2, advise=refuse)
        assert os.fstat(mapping[1]).st_blocks * 512 == 8 * MIB

    @pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOMEM])
    def test_memory_that_runs_out_half_way_is_an_os_error(self, mapping: tuple[HostMapping, int], code: int) -> None:
        calls = []

        def run_out(address: int, nbytes: int, advice: int) -> None:
            calls.append(address)
            if len(calls) > 2:
                raise OSError(code, "no more")
            madvise(address, nbytes, advice)

        with pytest.raises(OSError, match="no more") as failed:
            populate(*mapping, HugePages.THP, 2, advise=run_out)
        assert failed.value.errno == code

    def test_the_numa_policy_is_set_on_the_memory_itself(self, mapping: tuple[HostMapping, int]) -> None:
        node = Machine.read().nodes[0].id
        bind(mapping[0], NumaPolicy("bind", (node,)))
        populate(*mapping, HugePages.BASE, 1)
        line = next(
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if line.startswith(f"{mapping[0].address:x} ")
        )
        assert f"bind:{node}" in line
        bind(mapping[0], NumaPolicy("none"))
        with pytest.raises(OSError, match="mbind"):
            bind(mapping[0], NumaPolicy("bind", (63,)))

    def test_smaps_are_summed_inside_the_mapping_only(self) -> None:
        text = (
            "00200000-00400000 rw-s 00000000 00:01 5 /memfd:a\nShmemPmdMapped:     2048 kB\nRss: 9 kB\n"
            "00400000-00600000 rw-s 00200000 00:01 5 /memfd:a\nShared_Hugetlb: 4 kB\nPrivate_Hugetlb: 2 kB\n"
            "00600000-00800000 rw-s 00000000 00:01 6 /memfd:b\nShmemPmdMapped: 2048 kB\n"
        )
        assert read_smaps(text, 0x200000, 0x600000) == 2054 * 1024

    def test_low_coverage_is_told_with_the_knob_and_base_pages_are_no_news(self) -> None:
        remark = coverage_remark("L1", 10 * MIB, 100 * MIB, HugePages.THP)
        assert remark is not None
        assert "/sys/kernel/mm/transparent_hugepage/shmem_enabled" in remark
        assert "vm.nr_hugepages" in remark
        assert coverage_remark("L1", 98 * MIB, 100 * MIB, HugePages.THP) is None
        assert coverage_remark("L1", 0, 100 * MIB, HugePages.BASE) is None
