"""A load into the memory of one GPU: fill, digest there, and compare with digests of the source made on the CPU.

The pieces' digests are of what the GPU reads in its memory, after the fill. So a sample of them, or all, is
compared with what the CPU makes of the source: file, bus and memory are all in between.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from engram_client.cuda.access import cuda_driver
from engram_client.cuda.driver import Driver
from engram_client.layout import BLOCK_ROWS, ROW_BYTES, ROW_SCALES, digest_pieces
from engram_client.mapping.segments import visible_gpus
from engram_server import device_digest, device_fill, device_pump
from engram_server.device_digest import Digester
from engram_server.device_target import DeviceTarget
from engram_server.fill import Digests, DummySource, FileSource, Source, digest_source, run_threads
from engram_server.load_job import CutBlock, LoadJob, Order, PartResult, PieceDigest
from engram_server.reader import aligned_buffer, is_cached
from engram_server.reporter import Reporter
from engram_server.verify import sample


def load_devices(order: Order, reporter: Reporter) -> PartResult:
    """Fills the order's segments, all of them on one GPU. Raises one of the project's errors."""
    driver, allocated = cuda_driver(), sum(info.nbytes for info in order.segments)
    cached = bool(order.job.values) and is_cached(order.job.values)
    # What others had put into the page cache stays there: GPU memory does not compete with it.
    job = msgspec.structs.replace(order.job, drop_cache=order.job.drop_cache and not cached)
    direct = bool(job.values) and (job.direct_io == "on" or (job.direct_io == "auto" and not cached))
    # Direct reads and made rows come at their own rates, which Python keeps up with.
    pumped = bool(job.values) and not direct and device_pump.NATIVE
    stored = sum(info.shard.rows * ROW_BYTES for info in order.segments)
    feeds: list[device_fill.Feed] = []

    def make_feed() -> device_fill.Feed:
        feed = device_fill.FileFeed(job, direct) if job.values else device_fill.DummyFeed(job)
        feeds.append(feed)
        return feed

    with ThreadPoolExecutor(1) as background:
        # First of all: it imports NVRTC and perhaps compiles while the driver makes its context, which takes longer.
        # During a fill every thread would wait for its Python.
        digester = background.submit(_digester, driver, order.segments[0].device) if job.digests else None
        with reporter.phase("allocating", allocated):
            # Never unmapped: the mappings end with this process, and it ends with the load.
            targets = [DeviceTarget(info, fd, driver) for info, fd in zip(order.segments, order.fds, strict=True)]
            with driver.context(targets[0].ordinal):
                if pumped:
                    staging = device_pump.make_staging(driver, job)
                else:
                    staging = device_fill.Staging(driver, job.threads, device_fill.chunk_bytes(job))
                first_row = targets[0].info.shard.row_start
                staging.warm(targets[0].span(first_row, first_row).values)
            reporter.add(allocated)
            if digester is not None:
                digester.result()  # a GPU that cannot digest is known before it is filled, which may take minutes
        with reporter.phase("loading", stored):
            if pumped:
                device_pump.fill(job, targets, staging, reporter.add)
            else:
                device_fill.fill(job, targets, staging, make_feed, reporter.add)
    digests = _digest(job, targets, digester, reporter, stored)
    _compare_with_source(job, targets, order.cut_blocks, digests, direct, reporter)
    return PartResult(
        report=reporter.report(job, stored, direct and all(feed.direct for feed in feeds)),
        phase_seconds=reporter.seconds,
        blocks=digests.block_digests(job.tables),
        pieces={target.info.id: digests.pieces_of(target.info.id) for target in targets},
        huge_bytes={target.info.id: target.info.nbytes for target in targets},
        remarks=(),
    )


def _digester(driver: Driver, device: str | None) -> Digester:
    return Digester.on(driver, visible_gpus(driver).index(str(device)))


def _digest(
    job: LoadJob, targets: Sequence[DeviceTarget], digester: Future[Digester] | None, reporter: Reporter, stored: int
) -> Digests:
    """Digests of all pieces, and of the blocks that are one piece."""
    digests = Digests()
    with reporter.phase("digesting", stored):
        if digester is None:
            return digests
        index = {table.layer_id: at for at, table in enumerate(job.tables)}
        work = [
            (target, piece)
            for target in targets
            for piece in digest_pieces(target.info.shard.row_start, target.info.shard.row_stop)
        ]
        spans = [target.span(piece.row_start, piece.row_stop) for target, piece in work]
        found = digester.result().digests(spans, on_done=reporter.add)
        for (target, piece), digest in zip(work, found, strict=True):
            digests.pieces[target.info.id, piece.row_start] = PieceDigest(piece.row_start, piece.row_stop, digest)
            at = index[target.info.layer_id]
            if piece.row_stop - piece.row_start == _rows_of(job, at, piece.block):
                digests.blocks[at, piece.block] = digest
    return digests


def _rows_of(job: LoadJob, table: int, block: int) -> int:
    return min(BLOCK_ROWS, job.tables[table].rows - block * BLOCK_ROWS)


def _compare_with_source(
    job: LoadJob,
    targets: Sequence[DeviceTarget],
    cut_blocks: Sequence[CutBlock],
    digests: Digests,
    direct: bool,
    reporter: Reporter,
) -> None:
    """Reads a sample of the pieces, or all, from the source again, and the cut blocks, whose digests nobody else
    can make. Raises DigestMismatch."""
    index = {table.layer_id: at for at, table in enumerate(job.tables)}
    Task = tuple[int, int, int, Callable[[bytes], None]]
    tasks: list[Task] = [
        (index[target.info.layer_id], piece.row_start, piece.row_stop, _comparison(target, piece))
        for target in targets
        for piece in sample(digests.pieces_of(target.info.id), job.verify)
    ]
    for cut in cut_blocks if job.digests else ():
        start = cut.block * BLOCK_ROWS
        keep = _keeping(digests, (cut.table, cut.block))
        tasks.append((cut.table, start, start + _rows_of(job, cut.table, cut.block), keep))

    def work(items: Iterator[Task], stop: threading.Event) -> None:
        source: Source = FileSource(job, direct) if job.values else DummySource(job)
        scales = aligned_buffer(BLOCK_ROWS * ROW_SCALES)
        try:
            for table, start, stop_row, use in items:
                use(digest_source(source, table, start, stop_row, scales))
                reporter.add((stop_row - start) * ROW_BYTES)
        finally:
            source.close()

    with reporter.phase("verifying", sum((stop - start) * ROW_BYTES for _, start, stop, _ in tasks)):
        run_threads(work, tasks, min(job.threads, len(tasks)))


def _comparison(target: DeviceTarget, piece: PieceDigest) -> Callable[[bytes], None]:
    def compare(digest: bytes) -> None:
        if digest != piece.digest:
            raise device_digest.mismatch(target, piece, expected=digest, found=piece.digest)

    return compare


def _keeping(digests: Digests, key: tuple[int, int]) -> Callable[[bytes], None]:
    def keep(digest: bytes) -> None:
        digests.blocks[key] = digest

    return keep
