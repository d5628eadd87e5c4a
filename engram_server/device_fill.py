"""Fills segments of one GPU: from the file straight into pinned memory, and off.

A planar segment holds its values as they lie in the file, and its scales likewise, so a fill is two long
copies, cut into chunks where the file's offsets are multiples of the chunk: then a direct read takes exactly a
chunk. Each thread has two slots of pinned memory and reads into one while the GPU fetches the other. A chunk
costs a thread few calls, all of them without the interpreter lock: wait, read, start the copy. Files in the
page cache give their bytes faster than Python can take them: device_pump.py does the same for them in C. Nothing
is digested here: see device_digest.py.

Nothing is released before the loader exits, and with it go the context, the slots and the writable mappings.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from engram_client.cuda.driver import Driver
from engram_client.errors import AllocationFailed
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES
from engram_server.device_target import DeviceTarget
from engram_server.fill import run_threads
from engram_server.generate import make_into
from engram_server.load_job import LoadJob
from engram_server.reader import ALIGNMENT, FileReader, Preadv

SLOTS_PER_THREAD: Final = 2
STREAMS: Final = 4
"""For the first slots of all threads, as many for their second ones, and so on: threads share them. The driver takes
milliseconds to make a stream ready at its first copy (`Staging.warm`), and copies from so few overlap as well as from
many."""
HUGE_PAGE: Final = 2 << 20
TALLY_BYTES: Final = 64
"""A cache line, so that no two threads watch the same."""


class Chunk(NamedTuple):
    """Bytes `[start, start + nbytes)` of a table's values or scales, and the GPU address they go to."""

    table: int
    scales: bool
    start: int
    nbytes: int
    address: int


class RowChunk(NamedTuple):
    """Rows of a table, and where their values and scales go."""

    table: int
    row_start: int
    row_stop: int
    values: int
    scales: int

    @property
    def nbytes(self) -> int:
        return (self.row_stop - self.row_start) * ROW_BYTES


class Copy(NamedTuple):
    """One copy to the GPU: addresses and bytes."""

    source: int
    target: int
    nbytes: int


class Slot:
    """A piece of pinned memory, and the stream of the copies that last read it, which carries others' too.

    tally: address of pinned memory, a cache line, where the loop in C counts copies; mark: the same for the GPU."""

    def __init__(self, driver: Driver, stream: int, view: memoryview, tally: int = 0, mark: int = 0) -> None:
        self._driver = driver
        self.stream = stream
        self._busy = False
        self.view = view
        self.tally = tally
        self.mark = mark

    def wait(self) -> None:
        """Until the memory may be overwritten, and until what others had on the stream by then is done."""
        if self._busy:
            self._driver.stream_synchronize(self.stream)
            self._busy = False

    def send(self, copy: Copy) -> None:
        self._driver.copy_to_device_async(copy.target, copy.source, copy.nbytes, self.stream)
        self._busy = True


# What a GPU may still read, or the driver still counts as registered, must not be freed with its object.
_kept: list[mmap.mmap] = []


class Staging:
    """Pinned memory for `threads` threads, `per_thread` slots of at least `nbytes` each, registered in one call. To
    be made, and its slots used, in the GPU's context. Raises AllocationFailed or CudaCallFailed."""

    def __init__(self, driver: Driver, threads: int, nbytes: int, per_thread: int = SLOTS_PER_THREAD) -> None:
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        count = threads * per_thread
        total = -(-count * (size + TALLY_BYTES) // HUGE_PAGE) * HUGE_PAGE
        # Private: shared anonymous memory gets huge pages only where the machine allows them to tmpfs.
        try:
            memory = mmap.mmap(-1, total + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            problem = error.strerror or str(error)
            raise AllocationFailed(backing="pinned", needed=total, problem=problem) from error
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        _kept.append(memory)
        whole = memoryview(memory)
        first = -address_of(whole) % HUGE_PAGE
        begin = address_of(whole) + first
        driver.host_register(begin, total, read_only=False)
        on_gpu = driver.host_device_pointer(begin)
        streams = [[driver.stream_create() for _ in range(min(threads, STREAMS))] for _ in range(per_thread)]
        self._of_streams = [Slot(driver, stream, whole[first : first + size]) for each in streams for stream in each]
        self._sets: queue.SimpleQueue[list[Slot]] = queue.SimpleQueue()
        for thread in range(threads):
            shared = [of_slot[thread % STREAMS] for of_slot in streams]
            mine = []
            for number, stream in enumerate(shared, thread * per_thread):
                at, tally = first + number * size, count * size + number * TALLY_BYTES
                mine.append(Slot(driver, stream, whole[at : at + size], begin + tally, on_gpu + tally))
            self._sets.put(mine)

    def warm(self, target: int) -> None:
        """Makes every stream ready, by a copy of zeros to the GPU address `target`, where a fill will write."""
        for slot in self._of_streams:
            slot.send(Copy(address_of(slot.view), target, ALIGNMENT))
            slot.wait()

    def slots(self) -> list[Slot]:
        """One thread's slots."""
        return self._sets.get_nowait()


class Feed(Protocol):
    """Where one thread's chunks come from."""

    def fill(self, chunk: Any, view: memoryview) -> Sequence[Copy]:
        """Puts the chunk into `view`, and says what is to be copied from it."""
        ...

    def close(self) -> None: ...

    @property
    def direct(self) -> bool: ...


class FileFeed:
    """Reads chunks of the job's files. Raises TruncatedFile or ReadFailed. `preadv`: os.preadv, or a test's."""

    def __init__(self, job: LoadJob, direct: bool, preadv: Preadv = os.preadv) -> None:
        self._readers = [
            [FileReader(extent, direct, preadv) for extent in extents] for extents in (job.values, job.scales)
        ]
        self._drop = job.drop_cache

    @property
    def direct(self) -> bool:
        return all(reader.direct for readers in self._readers for reader in readers)

    def fill(self, chunk: Chunk, view: memoryview) -> Sequence[Copy]:
        reader = self._readers[chunk.scales][chunk.table]
        read = reader.read(chunk.start, chunk.nbytes, view)
        if self._drop:
            reader.drop(chunk.start, chunk.nbytes)
        return (Copy(address_of(read), chunk.address, chunk.nbytes),)

    def close(self) -> None:
        for readers in self._readers:
            for reader in readers:
                reader.close()


class DummyFeed:
    """Makes rows from the job's seed."""

    direct = False

    def __init__(self, job: LoadJob) -> None:
        self._job = job

    def fill(self, chunk: RowChunk, view: memoryview) -> Sequence[Copy]:
        job, count = self._job, chunk.row_stop - chunk.row_start
        split = count * ROW_VALUES
        values, scales = view[:split], view[split : split + count * ROW_SCALES]
        make_into(job.tables[chunk.table].layer_id, job.seed, chunk.row_start, job.every_code, values, scales)
        return (
            Copy(address_of(values), chunk.values, len(values)),
            Copy(address_of(scales), chunk.scales, len(scales)),
        )

    def close(self) -> None:
        pass


def chunk_bytes(job: LoadJob) -> int:
    """What is read at a time, and what a slot must hold: chunks end at its multiples in the file, so that what
    direct reads add to the first and to the last stays within it."""
    return max(ALIGNMENT, job.device_chunk_bytes // ALIGNMENT * ALIGNMENT)


def cut(job: LoadJob, targets: Sequence[DeviceTarget]) -> list[Chunk] | list[RowChunk]:
    """The work of a fill, in the order of the files."""
    if job.values:
        return cut_files(job, targets, chunk_bytes(job))
    index = {table.layer_id: at for at, table in enumerate(job.tables)}
    return [chunk for target in targets for chunk in _cut_rows(index[target.info.layer_id], target, job)]


def cut_files(job: LoadJob, targets: Sequence[DeviceTarget], nbytes: int) -> list[Chunk]:
    """What the segments need of the job's files, in their order, cut at the files' multiples of `nbytes`."""
    index = {table.layer_id: at for at, table in enumerate(job.tables)}
    return [chunk for target in targets for chunk in _cut_extents(index[target.info.layer_id], target, job, nbytes)]


def _cut_rows(table: int, target: DeviceTarget, job: LoadJob) -> Iterator[RowChunk]:
    shard = target.info.shard
    step = chunk_bytes(job) // ROW_BYTES
    for row in range(shard.row_start, shard.row_stop, step):
        stop = min(row + step, shard.row_stop)
        values, scales, _ = target.span(row, stop)
        yield RowChunk(table, row, stop, values, scales)


def _cut_extents(table: int, target: DeviceTarget, job: LoadJob, nbytes: int) -> Iterator[Chunk]:
    shard = target.info.shard
    whole = target.span(shard.row_start, shard.row_stop)
    for scales, extent, width, address in (
        (False, job.values[table], ROW_VALUES, whole.values),
        (True, job.scales[table], ROW_SCALES, whole.scales),
    ):
        first, last = shard.row_start * width, shard.row_stop * width
        at = first
        while at < last:
            stop = min(last, at + nbytes - (extent.offset + at) % nbytes)
            yield Chunk(table, scales, at, stop - at, address + at - first)
            at = stop


def fill(
    job: LoadJob,
    targets: Sequence[DeviceTarget],
    staging: Staging,
    make_feed: Callable[[], Feed],
    on_done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Fills the segments, all of them on one GPU, with `job.threads` threads; all is there when it returns.
    `on_done` hears of bytes on their way, from any thread. The first failure stops all threads and is raised."""
    driver, ordinal = targets[0].driver, targets[0].ordinal

    def work(chunks: Iterator[Any], stop: threading.Event) -> None:
        slots, feed = staging.slots(), make_feed()
        try:
            with driver.context(ordinal):
                for chunk in chunks:
                    slots.reverse()
                    slots[0].wait()
                    for copy in feed.fill(chunk, slots[0].view):
                        slots[0].send(copy)
                    on_done(chunk.nbytes)
                for slot in slots:
                    slot.wait()
        finally:
            feed.close()

    run_threads(work, cut(job, targets), job.threads)


def address_of(buffer: Any) -> int:
    """The address of a writable buffer's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
