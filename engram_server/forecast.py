"""How long will a load take? Measured on a small part of it, with the loader's own code.

Scratch memory takes the place of the segments: it is given its pages like them, and rows from all over the
tables are read, digested and packed into it. For GPU memory, which the GPU digests, they are read and stored only,
and read and digested again. About a second, and nothing stays behind, in the page cache
neither. Uses what the loader child uses, so the daemon never imports this.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec

from engram_client.layout import BLOCK_ROWS, ROW_BYTES, Shard
from engram_client.mapping.hostmem import HostMapping
from engram_client.protocol import Backing, SegmentInfo
from engram_server import child
from engram_server.fill import Digests, DummySource, FileSource, HostTarget, fill
from engram_server.load_job import LoadJob
from engram_server.plan import THP_BYTES, HugePages, Plan
from engram_server.reader import FileReader, aligned_buffer, is_cached
from engram_server.segments.memfd import MemfdSegment
from engram_server.segments.pages import PIECE_BYTES, populate
from engram_server.verify import SAMPLE_PIECES, verify

READ_S = 0.4
"""How long reads are measured, and as long again the rows' whole way into memory."""
PART_BYTES = 4 << 20
PARTS_A_THREAD = 4
"""Parts that a thread fills in a turn: few enough to end in time on a slow disk, enough to hide its start."""
REGISTER_BYTES_PER_S = 36e9
"""How fast one rank makes host memory readable for its GPU: 48 GiB were measured to take 1.3 s."""
DRIVER_ZEROES_PER_S = 3e9
"""How fast the CUDA driver makes host memory, on one thread whatever is asked: 189 GiB were measured in 67 s."""
ATTACH_S = 0.02
"""Sockets and mapping, whatever the size."""


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions in seconds and the rates they are made of, in bytes per second."""

    bytes: int
    read_bytes_per_second: float | None
    """One thread's; None where rows are generated."""
    cached: bool
    """Whether the checkpoint is in the page cache: once it is not, a load may take longer than predicted."""
    direct_io: bool
    threads: int
    fill_bytes_per_second: float
    """Rows read, digested (for host memory) and stored by all threads."""
    populate_bytes_per_second: float | None
    """None: GPU memory, which takes no time worth naming."""
    start_seconds: float
    """Until the loader has imported what it needs: most of the load of a small table."""
    load_seconds: float
    """As LoadReport.seconds counts them."""
    attach_seconds: float
    """A rank's connect() against a daemon that is ready; without a GPU milliseconds at any size."""


def measure(job: LoadJob, plan: Plan, available: int, gpu_count: int) -> Forecast:
    """`available`: bytes of memory that may be taken for a moment. Raises ReadFailed, TruncatedFile or
    AllocationFailed."""
    total = sum(segment.shard.rows * ROW_BYTES for segment in plan.segments)
    cached = bool(job.values) and is_cached(job.values)
    direct = bool(job.values) and (job.direct_io == "on" or (job.direct_io == "auto" and not cached))
    # What somebody else has put into the page cache stays there.
    job = msgspec.structs.replace(job, drop_cache=not cached)
    starting = _start_time()
    reading = _read_rate(job, direct) if job.values else None
    populating = _allocation_rate(job, plan, available // 4)
    filling, verifying = _fill_rates(job, plan, direct)
    return Forecast(
        bytes=total,
        read_bytes_per_second=reading,
        cached=cached,
        direct_io=direct,
        threads=job.threads,
        fill_bytes_per_second=filling,
        populate_bytes_per_second=populating,
        start_seconds=starting,
        load_seconds=starting
        + (plan.needed_bytes / populating if populating else 0)
        + total / filling
        + _verified_bytes(job, plan) / verifying,
        attach_seconds=ATTACH_S + (total / REGISTER_BYTES_PER_S if gpu_count else 0),
    )


def _start_time() -> float:
    """Seconds of a fresh interpreter that imports what the loader child imports, and does nothing."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-P", "-c", "import engram_server.load_child"],
        stdin=subprocess.DEVNULL,
        env=child.environment(),
        check=False,
    )
    return _since(started)


def _verified_bytes(job: LoadJob, plan: Plan) -> int:
    """Bytes of rows that are digested once more after the load."""
    most = {"off": 0, "sample": SAMPLE_PIECES * BLOCK_ROWS * ROW_BYTES}
    return sum(min(s.shard.rows * ROW_BYTES, most.get(job.verify, s.nbytes)) for s in plan.segments)


def _read_rate(job: LoadJob, direct: bool) -> float:
    """Chunks at random places, read by one thread until READ_S have passed."""
    chunk = job.direct_chunk_bytes if direct else job.chunk_bytes
    readers = [FileReader(extent, direct) for extent in job.values]
    buffer = aligned_buffer(chunk)
    done, started = 0, time.monotonic()
    try:
        while not done or time.monotonic() - started < READ_S:
            reader = random.choice(readers)
            nbytes = min(chunk, reader.extent.nbytes)
            at = random.randrange(reader.extent.nbytes - nbytes + 1)
            done += len(reader.read(at, nbytes, buffer))
            if job.drop_cache:
                reader.drop(at, nbytes)
        return done / _since(started)
    finally:
        for reader in readers:
            reader.close()


def _allocation_rate(job: LoadJob, plan: Plan, most: int) -> float | None:
    if plan.backing is Backing.CUDA_DEVICE:
        return None
    return DRIVER_ZEROES_PER_S if plan.backing is Backing.CUDA_HOST else _populate_rate(job, plan, most)


def _populate_rate(job: LoadJob, plan: Plan, most: int) -> float:
    """Fresh memory, a piece for each thread at a time and none given back between them: pages that were in
    use a moment ago come faster, most of all in a virtual machine."""
    limit = min(plan.needed_bytes, max(most, PART_BYTES))
    piece = min(job.threads * PIECE_BYTES, limit)
    done, seconds = 0, 0.0
    with ExitStack() as stack:
        while not done or (seconds < READ_S and done + piece <= limit):
            target = stack.enter_context(_scratch(piece, plan))
            started = time.monotonic()
            populate(target.mapping, target.fd, _pages(plan), job.threads)
            seconds += _since(started)
            done += target.info.nbytes
    return done / seconds


def _fill_rates(job: LoadJob, plan: Plan, direct: bool) -> tuple[float, float]:
    """Rates of reading, digesting and storing rows, and of verifying them: in memory, or for a GPU at the source."""

    def filled(how: LoadJob) -> tuple[list[HostTarget], Digests, int]:
        targets = _anywhere(job, parts)
        digests = fill(how, targets, lambda: FileSource(job, direct) if job.values else DummySource(job))
        return targets, digests, sum(target.info.shard.rows * ROW_BYTES for target in targets)

    on_gpu = plan.backing is Backing.CUDA_DEVICE
    filling_job = msgspec.structs.replace(job, digests=job.digests and not on_gpu)
    done = 0
    with ExitStack() as stack:
        parts = [stack.enter_context(_scratch(PART_BYTES, plan)) for _ in range(job.threads * PARTS_A_THREAD)]
        for part in parts:
            populate(part.mapping, part.fd, _pages(plan), 1)
        started = time.monotonic()
        while not done or time.monotonic() - started < READ_S:
            targets, digests, stored = filled(filling_job)
            done += stored
        filling = done / _since(started)
        started = time.monotonic()
        if on_gpu:
            stored = filled(job)[2]
        else:
            verify([(target, piece) for target in targets for piece in digests.pieces_of(target.info.id)], job.threads)
        return filling, stored / _since(started)


def _anywhere(job: LoadJob, parts: list[HostTarget]) -> list[HostTarget]:
    """The parts as segments for rows at random places of the tables; no two have rows in common."""
    slots = [
        (table.layer_id, start, min(start + _ROWS, table.rows))
        for table in job.tables
        for start in _starts(table.rows, len(parts))
    ]
    chosen = random.sample(slots, min(len(parts), len(slots)))
    return [
        HostTarget(
            msgspec.structs.replace(
                part.info,
                id=f"part{index}",
                layer_id=layer,
                shard=Shard(row_start=start, row_stop=stop, columns=None),
            ),
            part.mapping,
            part.fd,
        )
        for index, (part, (layer, start, stop)) in enumerate(zip(parts, chosen, strict=False))
    ]


_ROWS = PART_BYTES // ROW_BYTES


def _starts(rows: int, wanted: int) -> list[int]:
    """First rows of at most `wanted` parts of a table: a table may have more than one cares to list."""
    slots = range(0, rows, _ROWS)
    return random.sample(slots, wanted) if len(slots) > wanted else list(slots)


@contextmanager
def _scratch(nbytes: int, plan: Plan) -> Iterator[HostTarget]:
    """Memory of the kind that the plan's segments are, without their reserved huge pages."""
    info = SegmentInfo(
        id="scratch",
        layer_id=0,
        shard=Shard(row_start=0, row_stop=0, columns=None),
        rank=None,
        nbytes=-(-nbytes // THP_BYTES) * THP_BYTES,
        backing=Backing.MEMFD,
        row_format=plan.segments[0].row_format,
        page_bytes=THP_BYTES,
    )
    segment = MemfdSegment.create(info, "doctor", _pages(plan), required=False)
    try:
        with HostMapping(segment.writable_fd, info.nbytes, True, THP_BYTES, "scratch") as mapping:
            yield HostTarget(info, mapping, segment.writable_fd)
    finally:
        segment.discard()


def _pages(plan: Plan) -> HugePages:
    """Taking reserved huge pages, even for a moment, would be a change; THP are as fast to fill."""
    return HugePages.BASE if plan.huge_pages is HugePages.BASE else HugePages.THP


def _since(started: float, now: Callable[[], float] = time.monotonic) -> float:
    return max(now() - started, 1e-6)
