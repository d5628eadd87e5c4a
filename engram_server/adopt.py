"""Takes over tables that an earlier daemon left in memory, after asking whether they are what they must be.

    before ready      manifest, configuration, checkpoint's files (looked at, not read), geometry, ranks,
                      size, seals and mode of every segment, and the digest of one piece of each
    after it          every other piece, in a child that lets all else on the machine go first

A table with a bad segment is dropped and loaded again; anything wrong with the whole drops the whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engram_client.errors import AdoptionRefused, DigestMismatch, EngramError
from engram_client.layout import ROW_BYTES
from engram_client.protocol import Backing, Placement, ResolvedOptions, SegmentInfo
from engram_server import checker, origin
from engram_server.config import Config
from engram_server.keep import NAMED, Kept
from engram_server.load_job import LoadResult, PieceDigest
from engram_server.manifest import Manifest
from engram_server.plan import Plan
from engram_server.segments import Segment, adopt_segment, discard_all

log = logging.getLogger(__name__)

_FREE_TO_DIFFER = frozenset({"nbytes", "page_bytes"})
"""Fields of a segment that follow from the pages it once got, not from the configuration."""
FILES = (Backing.MEMFD, *NAMED)
"""Memory that can be read without mapping it. The CUDA driver takes seconds to map its own, and a context for GPU
memory: that is checked when the daemon is ready."""


@dataclass
class Adoption:
    """Tables taken over. `segments` are the caller's, in the manifest's order; those of `missing` layers are
    not among them."""

    manifest: Manifest
    segments: list[Segment]
    missing: tuple[int, ...]

    @property
    def by_name(self) -> bool:
        return all(segment.info.backing in NAMED for segment in self.segments)

    @property
    def result(self) -> LoadResult:
        """What the load of these segments had found out."""
        result = self.manifest.result
        kept = {segment.info.id for segment in self.segments}
        return msgspec.structs.replace(
            result,
            roots={layer: root for layer, root in result.roots.items() if layer not in self.missing},
            block_digests={layer: d for layer, d in result.block_digests.items() if layer not in self.missing},
            pieces={name: found for name, found in result.pieces.items() if name in kept},
            huge_bytes={name: found for name, found in result.huge_bytes.items() if name in kept},
            remarks=(),
        )


def take(kept: Kept, config: Config, tag: str) -> Adoption:
    """The segments that are whole and are what `config` asks for; reads no checkpoint and no table.

    Takes the descriptors of `kept`. Raises AdoptionRefused when the configuration or the checkpoint changed.
    """
    manifest = kept.manifest
    try:
        if found := origin.changes(manifest.origin, config):
            raise AdoptionRefused(what="what was kept", reason=", ".join(found)[:1000])
        for path in origin.unreadable(manifest.origin):
            log.warning("%s cannot be looked at; the tables that were read from it are served on", path)
        segments, missing = [], []
        for table in manifest.tables:
            taken = _take_table(table.segments, kept.fds, manifest, tag)
            segments += taken
            if not taken:
                missing.append(table.geometry.layer_id)
    finally:
        for fd in kept.fds.values():  # what no segment took
            with contextlib.suppress(OSError):
                os.close(fd)
        kept.fds.clear()
    return Adoption(manifest, segments, tuple(missing))


def _take_table(infos: Sequence[SegmentInfo], fds: dict[str, int], manifest: Manifest, tag: str) -> list[Segment]:
    """All segments of a table, or none."""
    taken: list[Segment] = []
    for info in infos:
        try:
            if info.id in manifest.damaged:
                raise AdoptionRefused(what=f"segment {info.id}", reason="a check found it damaged")
            if info.id not in manifest.result.pieces:
                raise AdoptionRefused(what=f"segment {info.id}", reason="the manifest has no digests of it")
            if info.backing not in NAMED and info.id not in fds:
                raise AdoptionRefused(what=f"segment {info.id}", reason="no descriptor of it came back")
            taken.append(adopt_segment(info, tag, manifest.folder, fds.get(info.id)))
            fds.pop(info.id, None)
        except (EngramError, ValueError) as error:
            log.warning("segment %s is not taken over, its table is loaded again: %s", info.id, error)
            for segment in taken:
                segment.close()
            return []
    return taken


def fitted(plan: Plan, manifest: Manifest, config: Config) -> Plan:
    """`plan` with the segments of `manifest` for its own, which may have got other pages, and under backing
    "auto" be of another memory, than a load would choose now.

    Raises AdoptionRefused, naming what differs, where the rows or their places would be others.
    """
    what = "what was kept"
    if differing := _differing(manifest.options, plan.options):
        raise AdoptionRefused(what=what, reason=", ".join(differing))
    if tuple(table.geometry for table in manifest.tables) != plan.tables:
        raise AdoptionRefused(what=what, reason="the checkpoint's tables have another shape")
    before = tuple(segment for table in manifest.tables for segment in table.segments)
    chosen = config.host.backing == "auto" and plan.options.placement is Placement.CPU
    free = _FREE_TO_DIFFER | {"backing"} if chosen else _FREE_TO_DIFFER
    if [_shape(segment, free) for segment in before] != [_shape(segment, free) for segment in plan.segments]:
        raise AdoptionRefused(what=what, reason="the segments of this configuration are others")
    for segment in before:
        if not _covers(manifest.result.pieces.get(segment.id, ()), segment):
            raise AdoptionRefused(what=f"segment {segment.id}", reason="its digests do not cover its rows")
    return msgspec.structs.replace(plan, segments=before, needed_bytes=sum(segment.nbytes for segment in before))


def _covers(pieces: Sequence[PieceDigest], info: SegmentInfo) -> bool:
    row = info.shard.row_start
    for piece in pieces:
        if piece.row_start != row or piece.row_stop <= row:
            return False
        row = piece.row_stop
    return row == info.shard.row_stop


def _differing(before: ResolvedOptions, now: ResolvedOptions) -> list[str]:
    return [
        f"{name} was {getattr(before, name)} and is {getattr(now, name)}"
        for name in before.__struct_fields__
        if getattr(before, name) != getattr(now, name)
    ]


def _shape(info: SegmentInfo, free: frozenset[str]) -> dict[str, object]:
    return {name: getattr(info, name) for name in info.__struct_fields__ if name not in free}


def spot_check(adoption: Adoption, threads: int) -> None:
    """Digests one piece of each segment that is a file again. Tables with damage leave `adoption`, their segments
    discarded. Raises MapFailed for a segment that somebody has shortened."""
    from engram_server.spot import OpenSegment, damage  # only a restart needs what it imports

    few = checker.a_few(adoption.result.pieces)
    segments = [segment for segment in adoption.segments if segment.info.backing in FILES]
    work = [
        (OpenSegment(segment.info, segment.readable_fd), piece)
        for segment in segments
        for piece in few.get(segment.info.id, ())
    ]
    if not work:
        return
    started = time.monotonic()
    discard_all(drop_damaged(adoption, damage(work, min(threads, len(work)))))
    nbytes = sum(piece.row_stop - piece.row_start for _, piece in work) * ROW_BYTES
    log.info("digests of %d bytes are as loaded (%.2f s); the rest follows", nbytes, time.monotonic() - started)


def drop_damaged(adoption: Adoption, damage: Sequence[EngramError]) -> list[Segment]:
    """The segments of tables with damage leave `adoption`; they are the caller's to discard."""
    named = {error.segment for error in damage if isinstance(error, DigestMismatch)}
    for error in damage:
        log.error("not taken over: %s", error)
    layers = {segment.info.layer_id for segment in adoption.segments if segment.info.id in named}
    dropped = [segment for segment in adoption.segments if segment.info.layer_id in layers]
    adoption.segments = [segment for segment in adoption.segments if segment.info.layer_id not in layers]
    adoption.missing = (*adoption.missing, *sorted(layers))
    return dropped


def release(adoption: Adoption) -> None:
    """Gives the segments' descriptors up."""
    for segment in adoption.segments:
        segment.close()
    adoption.segments = []


def merge(adoption: Adoption, loaded: LoadResult) -> LoadResult:
    """The result of a load of the missing tables, and of what was taken over beside it."""
    old = adoption.result
    return msgspec.structs.replace(
        loaded,
        roots=old.roots | loaded.roots,
        block_digests=old.block_digests | loaded.block_digests,
        pieces=old.pieces | loaded.pieces,
        huge_bytes=old.huge_bytes | loaded.huge_bytes,
    )


def only(plan: Plan, layers: Sequence[int]) -> Plan:
    """The part of `plan` that makes the tables of `layers`."""
    segments = tuple(segment for segment in plan.segments if segment.layer_id in layers)
    return msgspec.structs.replace(
        plan,
        tables=tuple(table for table in plan.tables if table.layer_id in layers),
        segments=segments,
        needed_bytes=sum(segment.nbytes for segment in segments),
    )
