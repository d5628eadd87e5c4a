"""Fills segments of one GPU from files in the page cache: device_fill.py's loop in C, at three quarters of the link's
rate and more.

What limits such a load is the machine's memory, unless the pieces are so small that they stay in the processor's
caches between the read and the GPU's fetch. Threads of Python would wait for the interpreter lock at such a pace. So a
thread takes a long item of a file at a time, and _pump.c moves it piece by piece without that lock, and as a rule
without asking the driver when a piece has arrived: threads that wait watch what the GPU writes then.

Without the C helper (`NATIVE` false; `ENGRAM_PURE=1` in the environment forces it) device_fill.py does the same,
with larger chunks and slower.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from engram_client.cuda.driver import CopyCalls, Driver
from engram_client.errors import EngramError
from engram_server.device_fill import Chunk, Staging, address_of, cut_files
from engram_server.device_target import DeviceTarget
from engram_server.fill import run_threads
from engram_server.load_job import LoadJob
from engram_server.reader import ALIGNMENT, FileReader

NATIVE: bool
"""Whether `fill` is there to be used."""

try:
    if os.environ.get("ENGRAM_PURE") == "1":
        raise ImportError("ENGRAM_PURE=1")
    from engram_server import _pump

    NATIVE = True
except ImportError:
    NATIVE = False

_CALLS: Final = {"copy": "cuMemcpyHtoDAsync", "mark": "cuStreamWriteValue32", "wait": "cuStreamQuery"}
TURN_S: Final = 1e-4
ITEM_BYTES: Final = 16 << 20
"""What a thread takes at a time: some milliseconds of work, so that Python has none, and little enough that threads
end together. Between items a thread looks whether another has failed."""


def slot_bytes(job: LoadJob) -> int:
    """Whole pages, so that pieces of a file begin at its pages."""
    return max(ALIGNMENT, job.device_slot_bytes // ALIGNMENT * ALIGNMENT)


def make_staging(driver: Driver, job: LoadJob) -> Staging:
    """In the GPU's context."""
    return Staging(driver, job.threads, slot_bytes(job), job.device_slots)


def fill(
    job: LoadJob,
    targets: Sequence[DeviceTarget],
    staging: Staging,
    on_done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fills the segments, all of them on one GPU, from the job's files, with `job.threads` threads; all is there
    when it returns. `on_done` hears of bytes on their way, from any thread. The first failure stops all threads and
    is raised: ReadFailed, TruncatedFile or CudaCallFailed."""
    driver, ordinal, piece = targets[0].driver, targets[0].ordinal, slot_bytes(job)
    calls = driver.copy_calls()

    def work(chunks: Iterator[Chunk], stop: threading.Event) -> None:
        slots, readers = staging.slots(), open_readers(job)
        addresses = tuple((address_of(slot.view), slot.stream, slot.tally, slot.mark) for slot in slots)
        try:
            with driver.context(ordinal):
                for chunk in chunks:
                    _move(chunk, readers[chunk.scales][chunk.table], addresses, piece, calls)
                    if job.drop_cache:
                        readers[chunk.scales][chunk.table].drop(chunk.start, chunk.nbytes)
                    on_done(chunk.nbytes)
                for slot in slots:
                    driver.stream_synchronize(slot.stream)
        finally:
            for reader in (*readers[False], *readers[True]):
                reader.close()

    with _short_turns():
        run_threads(work, cut_files(job, targets, -(-ITEM_BYTES // piece) * piece), job.threads)


@contextmanager
def _short_turns() -> Iterator[None]:
    """While something else of this process runs Python, a thread that comes back from an item waits this long for
    the interpreter lock. The usual 5 ms are as long as the item took."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def open_readers(job: LoadJob) -> tuple[list[FileReader], list[FileReader]]:
    """Of the tables' values and of their scales, for one thread: readahead belongs to the open file."""
    values, scales = ([FileReader(extent, direct=False) for extent in extents] for extents in (job.values, job.scales))
    return values, scales


def _move(
    chunk: Chunk, reader: FileReader, slots: tuple[tuple[int, int, int, int], ...], piece: int, calls: CopyCalls
) -> None:
    outcome, at, code = _pump.pump(
        reader.fd,
        reader.extent.offset + chunk.start,
        chunk.nbytes,
        chunk.address,
        slots,
        piece,
        calls.copy,
        calls.mark,
        calls.query,
    )
    if outcome != "done":
        raise _error(outcome, at, code, reader, calls)


def _error(outcome: str, at: int, code: int, reader: FileReader, calls: CopyCalls) -> EngramError:
    if outcome == "end":
        return reader.truncated()
    if outcome == "read":
        return reader.failed(at, OSError(code, os.strerror(code)))
    return calls.failed(_CALLS[outcome], code)
