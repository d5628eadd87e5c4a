"""Does a segment still hold what was read into it? Unpacks pieces of it and compares their digests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engram_client.errors import DigestMismatch
from engram_client.identity import new_digest
from engram_client.layout import BLOCK_ROWS, ROW_BYTES, ROW_SCALES, ROW_VALUES
from engram_client.protocol import SegmentInfo
from engram_server.fill import run_threads
from engram_server.load_job import PieceDigest
from engram_server.reader import aligned_buffer

SAMPLE_PIECES = 4
"""Pieces a segment that a sample looks at; the first and the last are among them."""
_CHUNK_ROWS = 1 << 10  # 264 KiB: stays in a core's cache between the copy and the digest


class Readable(Protocol):
    """A mapped segment; `fill.Target` is one."""

    @property
    def info(self) -> SegmentInfo: ...

    def read(self, row: int, count: int, values: memoryview, scales: memoryview) -> None: ...


def sample(pieces: Sequence[PieceDigest], how_much: str) -> list[PieceDigest]:
    """What `how_much` ("off", "sample" or "full") asks to be verified, evenly spread."""
    if how_much == "off":
        return []
    if how_much == "full" or len(pieces) <= SAMPLE_PIECES:
        return list(pieces)
    last = len(pieces) - 1
    return [pieces[last * index // (SAMPLE_PIECES - 1)] for index in range(SAMPLE_PIECES)]


def verify(
    work: Sequence[tuple[Readable, PieceDigest]],
    threads: int,
    on_done: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Digests the pieces anew. Raises DigestMismatch, naming the segment and rows of the first that differs."""

    def stop_at(mismatch: DigestMismatch) -> None:
        raise mismatch

    _compare(work, threads, on_done, stop_at)


def damage(
    work: Sequence[tuple[Readable, PieceDigest]],
    threads: int,
    on_done: Callable[[int], None] = lambda nbytes: None,
) -> list[DigestMismatch]:
    """Digests all pieces anew; every one that differs, by segment and rows."""
    found: list[DigestMismatch] = []
    _compare(work, threads, on_done, found.append)
    return sorted(found, key=lambda mismatch: (mismatch.segment, mismatch.row_start))


def _compare(
    work: Sequence[tuple[Readable, PieceDigest]],
    threads: int,
    on_done: Callable[[int], None],
    on_mismatch: Callable[[DigestMismatch], None],
) -> None:
    def check(items: Iterator[tuple[Readable, PieceDigest]], stop: threading.Event) -> None:
        values = aligned_buffer(_CHUNK_ROWS * ROW_VALUES)[: _CHUNK_ROWS * ROW_VALUES]
        scales = aligned_buffer(BLOCK_ROWS * ROW_SCALES)
        for segment, piece in items:
            found = _digest(segment, piece, values, scales, on_done)
            if found != piece.digest:
                on_mismatch(
                    DigestMismatch(
                        segment=segment.info.id,
                        row_start=piece.row_start,
                        row_stop=piece.row_stop,
                        expected=piece.digest.hex(),
                        found=found.hex(),
                    )
                )

    run_threads(check, work, threads)


def _digest(
    segment: Readable, piece: PieceDigest, values: memoryview, scales: memoryview, on_done: Callable[[int], None]
) -> bytes:
    running = new_digest()
    for row in range(piece.row_start, piece.row_stop, _CHUNK_ROWS):
        count = min(_CHUNK_ROWS, piece.row_stop - row)
        at = (row - piece.row_start) * ROW_SCALES
        segment.read(row, count, values[: count * ROW_VALUES], scales[at : at + count * ROW_SCALES])
        running.update(values[: count * ROW_VALUES])
        on_done(count * ROW_BYTES)
    running.update(scales[: (piece.row_stop - piece.row_start) * ROW_SCALES])
    return bytes(running.digest())
