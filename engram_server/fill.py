"""The hot loop: rows of the checkpoint into segments, digested on the way. Runs in the loader child.

One item of work is a canonical block: its scales are read first (the digest wants them last, packing wants
them at once), then its values in chunks that stay in a core's cache between the read, the digest and the
store. A block that shard borders cut goes to several segments in pieces; its digest covers the whole block,
and each piece has one of its own, so that every segment can be verified alone.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engram_client import rows
from engram_client.errors import AllocationFailed
from engram_client.identity import new_digest
from engram_client.layout import (
    BLOCK_ROWS,
    ROW_BYTES,
    ROW_SCALES,
    ROW_VALUES,
    RowFormat,
    TableGeometry,
    digest_pieces,
)
from engram_client.mapping.hostmem import HostMapping
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import SegmentInfo
from engram_server.generate import make_into
from engram_server.load_job import BlockDigest, LoadJob, PieceDigest
from engram_server.reader import FileReader, Preadv, aligned_buffer

_DUMMY_ROWS = 1 << 13
"""Rows made at a time: 2 MiB of values, as a load from files reads them."""


class Target(Protocol):
    """A segment as the loader sees it: mapped for writing. Called from many threads."""

    @property
    def info(self) -> SegmentInfo: ...

    def write(self, row: int, values: Any, scales: Any) -> None:
        """Stores consecutive rows, the first of them table row `row`. The buffers may be reused at once."""
        ...

    def read(self, row: int, count: int, values: memoryview, scales: memoryview) -> None:
        """The reverse: `count` rows from table row `row` as the checkpoint has them. Not before `flush`."""
        ...

    def check_size(self) -> None:
        """Raises AllocationFailed when someone has shortened the memory: the next store would be SIGBUS."""
        ...

    def flush(self) -> None:
        """Waits until everything written is in memory."""
        ...


@dataclass(frozen=True)
class CpuTarget:
    """Memory that the CPU stores to."""

    info: SegmentInfo
    mapping: HostMapping | VmmMapping

    def write(self, row: int, values: Any, scales: Any) -> None:
        at, count = row - self.info.shard.row_start, len(values) // ROW_VALUES
        if self.info.row_format is RowFormat.PACKED:
            rows.pack(values, scales, self.mapping.view[at * ROW_BYTES : (at + count) * ROW_BYTES])
            return
        base = self.mapping.address
        # memmove, called through ctypes, runs without the GIL; a memoryview's assignment does not.
        ctypes.memmove(base + at * ROW_VALUES, _address(values), len(values))
        ctypes.memmove(base + self._scales_at + at * ROW_SCALES, _address(scales), len(scales))

    def read(self, row: int, count: int, values: memoryview, scales: memoryview) -> None:
        at = row - self.info.shard.row_start
        if self.info.row_format is RowFormat.PACKED:
            rows.unpack(self.mapping.view[at * ROW_BYTES : (at + count) * ROW_BYTES], values, scales)
            return
        base = self.mapping.address
        ctypes.memmove(_address(values), base + at * ROW_VALUES, count * ROW_VALUES)
        ctypes.memmove(_address(scales), base + self._scales_at + at * ROW_SCALES, count * ROW_SCALES)

    @property
    def _scales_at(self) -> int:
        return self.info.shard.rows * ROW_VALUES

    def check_size(self) -> None:
        pass  # an allocation of the CUDA driver has no size that anyone could change

    def flush(self) -> None:
        pass


@dataclass(frozen=True)
class HostTarget(CpuTarget):
    """Memory behind the descriptor of a file."""

    mapping: HostMapping
    fd: int

    def check_size(self) -> None:
        size = os.fstat(self.fd).st_size
        if size < self.info.nbytes:
            problem = f"segment {self.info.id} was truncated to {size} bytes during the load"
            raise AllocationFailed(backing=self.info.backing, needed=self.info.nbytes, problem=problem)


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


@dataclass(frozen=True)
class Piece:
    target: Target
    row_start: int
    row_stop: int


@dataclass(frozen=True)
class Item:
    """One canonical block, or what this node has of it, in row order."""

    table: int
    block: int
    whole: bool
    pieces: tuple[Piece, ...]


def make_items(tables: Sequence[TableGeometry], targets: Sequence[Target]) -> list[Item]:
    """The work, in the order of the files."""
    items = []
    for index, table in enumerate(tables):
        blocks: dict[int, list[Piece]] = defaultdict(list)
        mine = (target for target in targets if target.info.layer_id == table.layer_id)
        for target in sorted(mine, key=lambda target: target.info.shard.row_start):
            for cut in digest_pieces(target.info.shard.row_start, target.info.shard.row_stop):
                blocks[cut.block].append(Piece(target, cut.row_start, cut.row_stop))
        for block, pieces in sorted(blocks.items()):
            rows_here = sum(piece.row_stop - piece.row_start for piece in pieces)
            whole = rows_here == min(BLOCK_ROWS, table.rows - block * BLOCK_ROWS)
            items.append(Item(index, block, whole, tuple(pieces)))
    return items


class Source(Protocol):
    """Where one thread's rows come from."""

    def chunks(self, table: int, start: int, stop: int, scales: memoryview) -> Iterator[tuple[int, Any]]:
        """Rows `[start, stop)` as (first row, its and the following rows' values), valid until the next chunk.
        `scales` receives their scales: those of a chunk are there when it comes."""
        ...

    def done(self, table: int, start: int, stop: int) -> None:
        """The rows will not be read again."""
        ...

    def close(self) -> None: ...

    @property
    def direct(self) -> bool: ...


class FileSource:
    def __init__(self, job: LoadJob, direct: bool, preadv: Preadv = os.preadv) -> None:
        self._values = [FileReader(extent, direct, preadv) for extent in job.values]
        # A 33rd of the bytes: not worth the alignment of direct reads.
        self._scales = [FileReader(extent, False, preadv) for extent in job.scales]
        self._drop = job.drop_cache
        chunk = job.direct_chunk_bytes if direct else job.chunk_bytes
        self._rows = max(1, chunk // ROW_VALUES)
        self._buffer = aligned_buffer(self._rows * ROW_VALUES)

    @property
    def direct(self) -> bool:
        return all(reader.direct for reader in self._values)

    def chunks(self, table: int, start: int, stop: int, scales: memoryview) -> Iterator[tuple[int, Any]]:
        self._scales[table].read(start * ROW_SCALES, (stop - start) * ROW_SCALES, scales)
        reader = self._values[table]
        for row in range(start, stop, self._rows):
            count = min(self._rows, stop - row)
            yield row, reader.read(row * ROW_VALUES, count * ROW_VALUES, self._buffer)

    def done(self, table: int, start: int, stop: int) -> None:
        if self._drop:
            for readers, width in ((self._values, ROW_VALUES), (self._scales, ROW_SCALES)):
                readers[table].drop(start * width, (stop - start) * width)

    def close(self) -> None:
        for reader in (*self._values, *self._scales):
            reader.close()


class DummySource:
    """Rows made from the job's seed."""

    direct = False

    def __init__(self, job: LoadJob) -> None:
        self._job = job
        self._buffer = aligned_buffer(_DUMMY_ROWS * ROW_VALUES)

    def chunks(self, table: int, start: int, stop: int, scales: memoryview) -> Iterator[tuple[int, Any]]:
        job, layer = self._job, self._job.tables[table].layer_id
        for row in range(start, stop, _DUMMY_ROWS):
            count = min(_DUMMY_ROWS, stop - row)
            values, at = self._buffer[: count * ROW_VALUES], (row - start) * ROW_SCALES
            make_into(layer, job.seed, row, job.every_code, values, scales[at : at + count * ROW_SCALES])
            yield row, values

    def done(self, table: int, start: int, stop: int) -> None:
        pass

    def close(self) -> None:
        pass


def digest_source(source: Source, table: int, start: int, stop: int, scales: memoryview) -> bytes:
    """Digest of rows `[start, stop)`, one or more and at most a block, as they are at their source. `scales`: room
    for their scales, a page's start as `aligned_buffer` gives it."""
    running = new_digest()
    for _, values in source.chunks(table, start, stop, scales):
        running.update(values)
    source.done(table, start, stop)
    running.update(scales[: (stop - start) * ROW_SCALES])
    return bytes(running.digest())


@dataclass
class Digests:
    """What a fill found out; each thread adds entries of its own keys."""

    blocks: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """By (table, block), of blocks read whole."""
    pieces: dict[tuple[str, int], PieceDigest] = field(default_factory=dict)
    """By (segment id, first row)."""

    def block_digests(self, tables: Sequence[TableGeometry]) -> tuple[BlockDigest, ...]:
        """Of the blocks read whole, in order."""
        return tuple(
            BlockDigest(tables[table].layer_id, block, self.blocks[table, block])
            for table, block in sorted(self.blocks)
        )

    def pieces_of(self, segment: str) -> tuple[PieceDigest, ...]:
        return tuple(self.pieces[key] for key in sorted(self.pieces) if key[0] == segment)


def fill(
    job: LoadJob,
    targets: Sequence[Target],
    make_source: Callable[[], Source],
    on_done: Callable[[int], None] = lambda nbytes: None,
) -> Digests:
    """Fills the segments with `job.threads` threads, each with a source of its own; `on_done` hears of bytes
    of rows stored, from any thread. The first failure stops all threads and is raised."""
    digests = Digests()

    def work(items: Iterator[Item], stop: threading.Event) -> None:
        source = make_source()
        scales = aligned_buffer(BLOCK_ROWS * ROW_SCALES)
        try:
            for item in items:
                if stop.is_set():
                    return
                _fill_item(item, source, scales, digests if job.digests else None, on_done)
        finally:
            source.close()

    run_threads(work, make_items(job.tables, targets), job.threads)
    return digests


def _fill_item(
    item: Item, source: Source, all_scales: memoryview, digests: Digests | None, on_done: Callable[[int], None]
) -> None:
    first = item.pieces[0].row_start
    cut = len(item.pieces) > 1
    block = new_digest() if digests and item.whole and cut else None
    for piece in item.pieces:
        piece.target.check_size()
        running = new_digest() if digests else None
        scales = all_scales[(piece.row_start - first) * ROW_SCALES :]
        for row, values in source.chunks(item.table, piece.row_start, piece.row_stop, scales):
            if running:
                running.update(values)
            if block:
                block.update(values)
            at = (row - piece.row_start) * ROW_SCALES
            count = len(values) // ROW_VALUES
            piece.target.write(row, values, scales[at : at + count * ROW_SCALES])
            on_done(count * ROW_BYTES)
        source.done(item.table, piece.row_start, piece.row_stop)
        if digests and running:
            running.update(scales[: (piece.row_stop - piece.row_start) * ROW_SCALES])
            found = PieceDigest(piece.row_start, piece.row_stop, running.digest())
            digests.pieces[piece.target.info.id, piece.row_start] = found
            if item.whole and not cut:
                digests.blocks[item.table, item.block] = found.digest
    if digests and block:
        block.update(all_scales[: (item.pieces[-1].row_stop - first) * ROW_SCALES])
        digests.blocks[item.table, item.block] = block.digest()


def run_threads(work: Callable[[Iterator[Any], threading.Event], None], items: Sequence[Any], threads: int) -> None:
    """Runs `work(items, stop)` in threads that share one iterator over the items; raises the first failure
    when all have ended, the others having been told to stop."""
    lock, stop = threading.Lock(), threading.Event()
    shared = iter(items)
    failures: list[BaseException] = []

    def take() -> Iterator[Any]:
        while not stop.is_set():
            with lock:
                item = next(shared, None)
            if item is None:
                return
            yield item

    def guarded() -> None:
        try:
            work(take(), stop)
        except BaseException as error:  # handed to the caller below
            failures.append(error)
            stop.set()

    crew = [threading.Thread(target=guarded, name=f"worker-{index}", daemon=True) for index in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    if failures:
        raise failures[0]
