"""A load as several children do it, one a GPU (host memory: one in all): who does what, and what it comes to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from engram_client.identity import table_root
from engram_client.layout import BLOCK_ROWS, TableGeometry, digest_pieces
from engram_client.protocol import LoadProgress, LoadReport, SegmentInfo
from engram_server.load_job import CutBlock, LoadJob, LoadResult, PartResult

PHASES = ("starting", "allocating", "loading", "digesting", "verifying")
"""In the order in which a child goes through them."""


class Part(NamedTuple):
    """What one child is to do: its job, its segments by their index, and the cut blocks that it digests."""

    job: LoadJob
    segments: tuple[int, ...]
    cut_blocks: tuple[CutBlock, ...]


def partition(job: LoadJob, segments: Sequence[SegmentInfo]) -> list[Part]:
    """One part a GPU, in the order of the segments; the job's threads are shared out among them."""
    groups: dict[str | None, list[int]] = defaultdict(list)
    for index, info in enumerate(segments):
        groups[info.device].append(index)
    cut = _cut_blocks(job.tables, segments)
    own = msgspec.structs.replace(job, threads=max(1, job.threads // max(1, len(groups))))
    return [
        Part(own, tuple(group), tuple(block for block, first in cut if device is not None and first in group))
        for device, group in groups.items()
    ]


def _cut_blocks(tables: Sequence[TableGeometry], segments: Sequence[SegmentInfo]) -> list[tuple[CutBlock, int]]:
    """The blocks that several segments have between them, whole, and the segment with a block's first row."""
    found = []
    for index, table in enumerate(tables):
        holders: dict[int, list[int]] = defaultdict(list)
        held: dict[int, int] = defaultdict(int)
        mine = [at for at, info in enumerate(segments) if info.layer_id == table.layer_id]
        for at in sorted(mine, key=lambda at: segments[at].shard.row_start):
            for piece in digest_pieces(segments[at].shard.row_start, segments[at].shard.row_stop):
                holders[piece.block].append(at)
                held[piece.block] += piece.row_stop - piece.row_start
        found += [
            (CutBlock(index, block), who[0])
            for block, who in holders.items()
            if len(who) > 1 and held[block] == min(BLOCK_ROWS, table.rows - block * BLOCK_ROWS)
        ]
    return found


def merge(tables: Sequence[TableGeometry], results: Sequence[PartResult]) -> LoadResult:
    """The whole load's result. The parts ran at the same time: what lasts longest counts, what they use adds up."""
    reports = [result.report for result in results]
    blocks = {(found.layer_id, found.block): found.digest for result in results for found in result.blocks}
    digests = {table.layer_id: _all_blocks(table, blocks) for table in tables}
    return LoadResult(
        report=LoadReport(
            source=reports[0].source,
            bytes_read=sum(report.bytes_read for report in reports),
            seconds=max(report.seconds for report in reports),
            allocate_seconds=max(report.allocate_seconds for report in reports),
            fill_seconds=max(report.fill_seconds for report in reports),
            verify_seconds=max(report.verify_seconds for report in reports),
            direct_io=all(report.direct_io for report in reports),
            threads=sum(report.threads for report in reports),
            peak_rss_bytes=sum(report.peak_rss_bytes for report in reports),
        ),
        roots={
            table.layer_id: table_root(table, found) if (found := digests[table.layer_id]) else None for table in tables
        },
        block_digests=digests,
        pieces={name: found for result in results for name, found in result.pieces.items()},
        huge_bytes={name: found for result in results for name, found in result.huge_bytes.items()},
        remarks=tuple(remark for result in results for remark in result.remarks),
        phase_seconds={
            phase: max(result.phase_seconds.get(phase, 0.0) for result in results)
            for phase in PHASES
            if any(phase in result.phase_seconds for result in results)
        },
    )


def _all_blocks(table: TableGeometry, blocks: dict[tuple[int, int], bytes]) -> tuple[bytes, ...]:
    """All block digests of a table in order, or none."""
    keys = [(table.layer_id, block) for block in range(-(-table.rows // BLOCK_ROWS))]
    return tuple(blocks[key] for key in keys) if all(key in blocks for key in keys) else ()


class JointProgress:
    """Progress of several children as that of one: the phase is that of the child that is furthest behind."""

    def __init__(self, on_progress: Callable[[LoadProgress], None], parts: int) -> None:
        self._on_progress = on_progress
        nothing = LoadProgress(phase=PHASES[0], done_bytes=0, total_bytes=0, elapsed_s=0.0)
        self._latest = [nothing] * parts
        self._totals: list[dict[str, int]] = [{} for _ in range(parts)]

    def hear(self, part: int, progress: LoadProgress) -> None:
        self._latest[part] = progress
        self._totals[part][progress.phase] = progress.total_bytes
        phase = min((one.phase for one in self._latest), key=PHASES.index)
        done = total = 0
        for one, totals in zip(self._latest, self._totals, strict=True):
            known = totals.get(phase, 0)
            total += known
            done += one.done_bytes if one.phase == phase else known
        elapsed = max(one.elapsed_s for one in self._latest)
        self._on_progress(LoadProgress(phase=phase, done_bytes=done, total_bytes=total, elapsed_s=elapsed))
