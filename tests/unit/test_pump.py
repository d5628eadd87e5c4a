"""The C loop alone, on functions that record what a driver's would have done."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_server import device_pump
from tests.support.fake_driver import COPY, MARK, NOT_READY, QUERY

if not device_pump.NATIVE:
    pytest.skip("the extension is not built", allow_module_level=True)

from engram_server._pump import pump

pytestmark = pytest.mark.timeout(method="thread")  # no signal reaches a thread that waits in C

ROOT = Path(__file__).parents[2]
SHIM = Path(__file__).parents[1] / "support" / "short_reads.c"
COMPILER = shutil.which("cc") or shutil.which("gcc")
TARGET = 1 << 40
STREAM = 1000
ELSEWHERE = 1 << 50
"""Where the GPU has the tallies."""
NOWHERE = (0, 0, 0)


class Tally(ctypes.Structure):
    _fields_ = (("fetched", ctypes.c_uint32), ("sent", ctypes.c_uint32))


class Gpu:
    """Slots with a stream each, and driver's calls of which one may fail. What is on a stream is done when somebody
    asks for it: a slot that is used too early would be found out."""

    def __init__(self, slots: int, slot_bytes: int, fail: tuple[str, int, int] = ("", 0, 0)) -> None:
        self.slot_bytes, self.fail = slot_bytes, fail
        self.memories = [ctypes.create_string_buffer(slot_bytes) for _ in range(slots)]
        self.tallies = [Tally() for _ in range(slots)]
        self.addresses = tuple(ctypes.addressof(memory) for memory in self.memories)
        self.streams = tuple(STREAM + index for index in range(slots))
        self.calls: list[tuple[Any, ...]] = []
        self.counts = {"copy": 0, "mark": 0, "query": 0}
        self.pending: dict[int, tuple[int, int, int]] = {}
        self.marks: dict[int, int] = {}
        self.arrived: dict[int, bytes] = {}
        self.on_copy = lambda: None
        self.ready_says = NOT_READY
        """What a query answers that has just finished what was left; later ones answer 0."""
        self.prompt = False
        """Whether all is done at once, before anybody asks."""
        self._callbacks = COPY(self._copy), MARK(self._mark), QUERY(self._query)

    def _failing(self, call: str) -> int:
        self.counts[call] += 1
        what, nth, code = self.fail
        return code if (what, nth) == (call, self.counts[call]) else 0

    def _copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.calls.append(("copy", target, source, nbytes, stream))
        if code := self._failing("copy"):
            return code
        assert stream not in self.pending
        self.pending[stream] = (target, source, nbytes)
        self.on_copy()
        return 0

    def _mark(self, stream: int, address: int, value: int, flags: int) -> int:
        self.calls.append(("mark", stream))
        if code := self._failing("mark"):
            return code
        assert (address, flags) == (ELSEWHERE + 4 * stream, 0)
        assert stream in self.pending
        self.marks[stream] = value
        if self.prompt:
            self._finish(stream)
        return 0

    def _query(self, stream: int) -> int:
        self.calls.append(("query", stream))
        if code := self._failing("query"):
            return code
        return self.ready_says if self._finish(stream) else 0

    def _finish(self, stream: int) -> bool:
        if stream not in self.pending:
            return False
        target, source, nbytes = self.pending.pop(stream)
        self.arrived[target] = ctypes.string_at(source, nbytes)
        self.tallies[stream - STREAM].fetched = self.marks.pop(stream, 0)
        return True

    def pump(self, fd: int, offset: int, nbytes: int) -> tuple[str, int, int]:
        tallies = map(ctypes.addressof, self.tallies)
        marks = (ELSEWHERE + 4 * stream for stream in self.streams)
        slots = tuple(zip(self.addresses, self.streams, tallies, marks, strict=True))
        calls = [ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks]
        return pump(fd, offset, nbytes, TARGET, slots, self.slot_bytes, *calls)

    def content(self) -> bytes:
        """What is at TARGET and following, once all copies have come to their end."""
        for stream in list(self.pending):
            self._finish(stream)
        at, parts = TARGET, []
        for target, part in sorted(self.arrived.items()):
            assert target == at
            parts.append(part)
            at += len(part)
        return b"".join(parts)


@pytest.fixture
def file() -> Iterator[int]:
    """A file in memory of 100,000 bytes."""
    fd = os.memfd_create("pumped")
    os.pwrite(fd, os.urandom(100_000), 0)
    yield fd
    os.close(fd)


@given(
    prompt=st.booleans(),
    size=st.integers(1, 70_000),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    slots=st.integers(1, 5),
    slot_bytes=st.sampled_from([1, 7, 1000, 4096, 65536]),
)
def test_every_byte_arrives_once_through_the_slots_in_turn(
    prompt: bool, size: int, cut: tuple[float, float], slots: int, slot_bytes: int
) -> None:
    size = min(size, (200 if prompt else 40) * slot_bytes)  # else each is waited for until the driver is asked
    start, stop = sorted(round(share * size) for share in cut)
    raw = os.urandom(size)
    fd = os.memfd_create("pumped")
    try:
        os.pwrite(fd, raw, 0)
        gpu = Gpu(slots, slot_bytes)
        gpu.prompt = prompt
        assert gpu.pump(fd, start, stop - start) == ("done", stop, 0)
    finally:
        os.close(fd)
    copies = [call for call in gpu.calls if call[0] == "copy"]
    for index, (_, target, source, nbytes, stream) in enumerate(copies):
        assert (source, stream) == (gpu.addresses[index % slots], gpu.streams[index % slots])
        end = start + target - TARGET + nbytes
        assert end % slot_bytes == 0 or end == stop
        assert gpu.calls[gpu.calls.index(copies[index]) + 1] == ("mark", stream)
    waits = 0 if prompt else max(0, len(copies) - slots)
    assert gpu.counts["query"] == waits, "the driver is asked once, and then the mark is there"
    assert gpu.content() == raw[start:stop]


def test_without_a_copy_it_reads_alone(file: int) -> None:
    memory = ctypes.create_string_buffer(4096)
    outcome = pump(file, 4096, 8192, 0, ((ctypes.addressof(memory), *NOWHERE),), 4096, 0, 0, 0)
    assert outcome == ("done", 12288, 0)
    assert memory.raw == os.pread(file, 4096, 8192)


def test_a_file_that_is_cut_while_it_is_read_ends_where_it_was_cut(file: int) -> None:
    gpu = Gpu(2, 4096)
    gpu.on_copy = lambda: os.ftruncate(file, 10_000) if gpu.counts["copy"] == 2 else None
    assert gpu.pump(file, 100, 90_000) == ("end", 10_000, 0)
    assert gpu.counts["copy"] == 2
    assert gpu.content() == os.pread(file, 8192 - 100, 100)


def test_a_file_that_ends_before_the_range_says_so_at_once(file: int) -> None:
    assert Gpu(2, 4096).pump(file, 200_000, 1) == ("end", 200_000, 0)


@pytest.mark.parametrize("kind", ["closed", "folder", "pipe"])
def test_an_error_of_a_read_is_its_errno_and_its_place(tmp_path: Path, kind: str) -> None:
    if kind == "pipe":
        fd, writer = os.pipe()
        os.close(writer)
    else:
        fd = os.open(tmp_path, os.O_RDONLY)
    if kind == "closed":
        os.close(fd)
    gpu = Gpu(3, 4096)
    code = {"closed": errno.EBADF, "folder": errno.EISDIR, "pipe": errno.ESPIPE}[kind]
    assert gpu.pump(fd, 5000, 10_000) == ("read", 5000, code)
    assert gpu.counts["copy"] == 0
    if kind != "closed":
        os.close(fd)


@pytest.mark.parametrize("call", ["copy", "mark", "query"])
@pytest.mark.parametrize("nth", [1, 2, 9])
def test_a_call_that_fails_is_the_last_and_its_code_comes_back(file: int, call: str, nth: int) -> None:
    gpu = Gpu(2, 4096, fail=(call, nth, 719))
    piece = nth + 1 if call == "query" else nth - 1  # the first two pieces need no wait
    assert gpu.pump(file, 0, 90_000) == ("wait" if call == "query" else call, piece * 4096, 719)
    assert gpu.calls[-1][0] == call
    assert gpu.counts[call] == nth


def test_a_slot_that_is_marked_costs_no_call_of_the_driver(file: int) -> None:
    gpu = Gpu(2, 4096)
    gpu.prompt = True
    assert gpu.pump(file, 0, 50_000) == ("done", 50_000, 0)
    assert gpu.pump(file, 50_000, 50_000)[0] == "done", "the tallies go on"
    assert gpu.counts["query"] == 0


@pytest.mark.parametrize("start", [0, 2**32 - 2])
@pytest.mark.parametrize("prompt", [False, True])
def test_the_tallies_count_every_copy_and_begin_anew_after_their_last_number(
    file: int, start: int, prompt: bool
) -> None:
    gpu = Gpu(2, 333 if prompt else 4096)
    gpu.prompt = prompt
    for tally in gpu.tallies:
        tally.fetched = tally.sent = start
    assert gpu.pump(file, 0, 100_000) == ("done", 100_000, 0)
    assert sum(tally.sent - start for tally in gpu.tallies) % 2**32 == gpu.counts["copy"]
    assert gpu.content() == os.pread(file, 100_000, 0)


def test_a_stream_that_is_done_is_enough_where_the_mark_is_not_seen(file: int) -> None:
    gpu = Gpu(1, 4096)
    gpu.ready_says = 0
    gpu._callbacks = (gpu._callbacks[0], MARK(lambda *_: 0), gpu._callbacks[2])
    assert gpu.pump(file, 0, 30_000) == ("done", 30_000, 0)
    assert gpu.content() == os.pread(file, 30_000, 0)


def test_other_threads_run_meanwhile(file: int) -> None:
    """What it asks meanwhile is abs itself, which never takes the interpreter lock and says that nothing is ready: only
    another thread of Python ends the wait."""
    memory, tally = ctypes.create_string_buffer(65536), Tally()
    copied = threading.Semaphore(0)
    copy, mark = COPY(lambda *_: 0), MARK(lambda *_: copied.release() or 0)
    calls = [ctypes.cast(call, ctypes.c_void_p).value or 0 for call in (copy, mark, ctypes.CDLL(None).abs)]
    slots = ((ctypes.addressof(memory), NOT_READY, ctypes.addressof(tally), ELSEWHERE),)
    done: list[tuple[str, int, int]] = []
    thread = threading.Thread(target=lambda: done.append(pump(file, 0, 200_000, TARGET, slots, 65536, *calls)))
    os.pwrite(file, b"x", 199_999)
    thread.start()
    for number in (1, 2, 3):
        copied.acquire()
        assert tally.sent == number
        assert not done
        tally.fetched = number
    thread.join()
    assert done == [("done", 200_000, 0)]


def test_signals_change_nothing() -> None:
    """/dev/zero cuts a read short for a signal, or refuses it before the first page."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    stop, me = threading.Event(), threading.main_thread().ident
    assert me is not None

    def disturb() -> None:
        signal.pthread_kill(me, signal.SIGUSR1)
        while not stop.is_set():
            signal.pthread_kill(me, signal.SIGUSR1)

    thread = threading.Thread(target=disturb)
    fd = os.open("/dev/zero", os.O_RDONLY)
    memory = ctypes.create_string_buffer(b"x" * (1 << 20), 1 << 20)
    try:
        thread.start()
        assert pump(fd, 0, 64 << 20, 0, ((ctypes.addressof(memory), *NOWHERE),), 1 << 20, 0, 0, 0) == (
            "done",
            64 << 20,
            0,
        )
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
        os.close(fd)
    assert heard
    assert memory.raw == bytes(1 << 20)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_reads_that_are_short_or_interrupted_are_continued_and_an_io_error_ends_it(tmp_path: Path) -> None:
    shim, path = tmp_path / "shim.so", tmp_path / "file"
    raw = os.urandom(300_000)
    path.write_bytes(raw)
    build = [str(COMPILER), "-shared", "-fPIC", "-Wall", "-Werror", str(SHIM), "-o", str(shim), "-ldl"]
    subprocess.run(build, check=True)
    code = """if True:
        import ctypes, os, sys
        from engram_server._pump import pump
        memory = ctypes.create_string_buffer(1 << 20)
        fd = os.open(sys.argv[1], os.O_RDONLY)
        print(*pump(fd, 7, 299_993, 0, ((ctypes.addressof(memory) + 7, 0, 0, 0),), 1 << 20, 0, 0, 0))
        sys.stdout.flush()
        sys.stdout.buffer.write(memory.raw[7:300_000])
    """

    def run(**environ: str) -> tuple[str, bytes]:
        command = [sys.executable, "-c", code, str(path)]
        environment = {**os.environ, "LD_PRELOAD": str(shim), "SHIM_PATH": str(path), **environ}
        out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True).stdout
        head, _, content = out.partition(b"\n")
        return head.decode(), content

    assert run(SHIM_MOST="1000", SHIM_EINTR="3") == ("done 300000 0", raw[7:])
    outcome, content = run(SHIM_MOST="1000", SHIM_EINTR="3", SHIM_EIO="50000")
    assert outcome == f"read 50007 {errno.EIO}"
    assert content[:50_000] == raw[7:50_007]


ALL_CALLS = {"copy": 1, "mark": 1, "query": 1}


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"offset": -1}, ValueError, "a range of a file is needed"),
        ({"nbytes": -1}, ValueError, "a range of a file is needed"),
        ({"slot_bytes": 0}, ValueError, "a range of a file is needed"),
        ({"offset": 2**63 - 1}, ValueError, "a range of a file is needed"),
        ({"copy": 1}, ValueError, "all three calls or none"),
        ({"copy": 1, "mark": 1}, ValueError, "all three calls or none"),
        ({"slots": ()}, ValueError, "1 to 64 slots are needed"),
        ({"slots": ((1, 0, 0, 0),) * 65}, ValueError, "1 to 64 slots are needed"),
        ({"slots": (1,)}, TypeError, "four addresses"),
        ({"slots": ((1, 2, 3),)}, TypeError, "four addresses"),
        ({"slots": (("1", 0, 0, 0),)}, TypeError, "int"),
        ({"slots": ((-1, 0, 0, 0),)}, OverflowError, "int"),
        ({"slots": ((2**64, 0, 0, 0),)}, OverflowError, "int"),
        (ALL_CALLS | {"slots": ((1, 0, 0, 8),)}, ValueError, "a tally is needed"),
        (ALL_CALLS | {"slots": ((1, 0, 8, 0),)}, ValueError, "a tally is needed"),
        (ALL_CALLS | {"slots": ((1, 0, 10, 8),)}, ValueError, "a tally is needed"),
        (ALL_CALLS | {"slots": ((1, 0, 8, 6),)}, ValueError, "a tally is needed"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(
    file: int, changed: dict[str, Any], error: type[Exception], says: str
) -> None:
    sensible = {"offset": 0, "nbytes": 1, "target": 0, "slots": ((1, 0, 0, 0),), "slot_bytes": 1}
    given_ = {**sensible, "copy": 0, "mark": 0, "query": 0, **changed}
    with pytest.raises(error, match=says):
        pump(file, *given_.values())


def test_the_c_loop_is_not_used_where_the_environment_forbids_it() -> None:
    code = "from engram_server import device_pump; print(device_pump.NATIVE)"
    for pure, expected in (("1", "False"), ("0", "True")):
        environment = {**os.environ, "ENGRAM_PURE": pure}
        out = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True)
        assert out.strip() == expected
