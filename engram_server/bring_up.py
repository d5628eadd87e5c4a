"""Allocates the segments and has them filled: in what order, and what overlaps.

The CUDA driver zeroes host memory on one thread (67 s for 189 GiB), and no other backing takes long. So host
memory of the driver is made table by table: while a loader child fills the first, a thread allocates the next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from engram_client.errors import EngramError, InternalError
from engram_client.layout import ROW_BYTES
from engram_client.protocol import Backing, LoadProgress, LoadReport, SegmentInfo
from engram_server.load_job import LoadJob, LoadResult
from engram_server.loader import load
from engram_server.plan import Plan
from engram_server.segments import Segment, create_segments, discard_all
from engram_server.worker import in_thread

OnProgress = Callable[[LoadProgress], None]


async def allocate_and_load(
    plan: Plan, tag: str, job: LoadJob, segments: dict[str, Segment], on_progress: OnProgress
) -> LoadResult:
    """Creates the plan's segments and loads them. They are put into `segments`, by id, as they come, and are
    the caller's from then on, also when this raises or is cancelled.

    Raises what create_segments and load raise.
    """
    started = time.monotonic()
    groups = _groups(plan)
    making = _Making(plan, tag, groups[0])
    results: list[LoadResult] = []
    waited = 0.0
    try:
        for index, group in enumerate(groups):
            waiting_since = time.monotonic()
            if index == 0:
                on_progress(LoadProgress(phase="allocating", done_bytes=0, total_bytes=plan.needed_bytes, elapsed_s=0))
            created = await making.segments()
            segments.update({segment.info.id: segment for segment in created})
            waited += time.monotonic() - waiting_since
            if index + 1 < len(groups):
                making = _Making(plan, tag, groups[index + 1])
            part = job if len(groups) == 1 else _part(job, group)
            shift = _Shift(on_progress, results, plan.segments, started)
            results.append(await load(part, created, shift))
    finally:
        await making.abandon()
    # The child counts from its first order on; its own start is most of the load of a small table.
    return _merge(results, time.monotonic() - started, waited)


def _groups(plan: Plan) -> list[tuple[SegmentInfo, ...]]:
    if plan.backing is not Backing.CUDA_HOST:
        return [plan.segments]
    return [tuple(segment for segment in plan.segments if segment.layer_id == table.layer_id) for table in plan.tables]


def _part(job: LoadJob, group: Sequence[SegmentInfo]) -> LoadJob:
    """The job of one table."""
    index = next(i for i, table in enumerate(job.tables) if table.layer_id == group[0].layer_id)
    one = slice(index, index + 1)
    return msgspec.structs.replace(job, tables=job.tables[one], values=job.values[one], scales=job.scales[one])


class _Making:
    """Segments being created in a thread that nobody has to wait for: a driver call cannot be interrupted, and
    a daemon that is told to stop meanwhile must not hang on it."""

    def __init__(self, plan: Plan, tag: str, infos: Sequence[SegmentInfo]) -> None:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[list[Segment]] = self._loop.create_future()
        self._lock = threading.Lock()
        self._abandoned = False
        self._made: list[Segment] = []
        threading.Thread(target=self._run, args=(plan, tag, infos), daemon=True, name="allocate").start()

    async def segments(self) -> list[Segment]:
        """The segments, once they are there; they are the caller's then."""
        made = await asyncio.shield(self._done)
        with self._lock:
            self._made = []
        return made

    async def abandon(self) -> None:
        """What was made and not fetched is discarded, now or when it is there. Harmless otherwise."""
        with self._lock:
            self._abandoned = True
            made, self._made = self._made, []
        if made:
            await in_thread(discard_all, made)
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # looked at, so that the loop does not warn of it

    def _run(self, plan: Plan, tag: str, infos: Sequence[SegmentInfo]) -> None:
        made: list[Segment] = []
        failure: Exception | None = None
        try:
            made = create_segments(plan, tag, infos)
        except EngramError as error:
            failure = error
        except Exception as error:
            failure = InternalError(doing="allocating", problem=repr(error)[:500])
        with self._lock:
            unwanted = made if self._abandoned else []
            self._made = [] if self._abandoned else made
        discard_all(unwanted)
        if not unwanted:
            self._tell(made, failure)

    def _tell(self, made: list[Segment], failure: Exception | None) -> None:
        def tell() -> None:
            if self._done.done():
                return
            if failure is not None:
                self._done.set_exception(failure)
            else:
                self._done.set_result(made)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:  # the loop has ended, and with it everybody who waited
            discard_all(made)


class _Shift:
    """Progress of one of several loads, as progress of all of them."""

    def __init__(
        self, on_progress: OnProgress, before: Sequence[LoadResult], segments: Sequence[SegmentInfo], started: float
    ) -> None:
        self._on_progress = on_progress
        self._loaded = sum(result.report.bytes_read for result in before)
        self._total = sum(segment.shard.rows * ROW_BYTES for segment in segments)
        self._started = started

    def __call__(self, progress: LoadProgress) -> None:
        if progress.phase == "loading":
            progress = msgspec.structs.replace(
                progress, done_bytes=self._loaded + progress.done_bytes, total_bytes=self._total
            )
        elapsed = time.monotonic() - self._started
        self._on_progress(msgspec.structs.replace(progress, elapsed_s=elapsed))


def _merge(results: Sequence[LoadResult], seconds: float, waited: float) -> LoadResult:
    reports = [result.report for result in results]
    return LoadResult(
        report=LoadReport(
            source=reports[0].source,
            bytes_read=sum(report.bytes_read for report in reports),
            seconds=seconds,
            allocate_seconds=waited + sum(report.allocate_seconds for report in reports),
            fill_seconds=sum(report.fill_seconds for report in reports),
            verify_seconds=sum(report.verify_seconds for report in reports),
            direct_io=all(report.direct_io for report in reports),
            threads=reports[0].threads,
            peak_rss_bytes=max(report.peak_rss_bytes for report in reports),
        ),
        roots={layer: root for result in results for layer, root in result.roots.items()},
        block_digests={layer: found for result in results for layer, found in result.block_digests.items()},
        pieces={name: found for result in results for name, found in result.pieces.items()},
        huge_bytes={name: found for result in results for name, found in result.huge_bytes.items()},
        remarks=tuple(remark for result in results for remark in result.remarks),
    )
