"""A segment read as a file, for the check before a restarted daemon serves."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from engram_client.errors import MapFailed
from engram_client.identity import block_digest
from engram_client.layout import RowFormat, Shard
from engram_client.protocol import Backing, SegmentInfo
from engram_server.load_job import PieceDigest
from engram_server.spot import OpenSegment, damage
from tests.support.tables import packed_of, planar_of, random_table

FIRST, COUNT = 70, 3000


@contextmanager
def open_segment(row_format: RowFormat, keep: int | None = None, flip: int | None = None) -> Iterator[OpenSegment]:
    """Rows FIRST and following of a table; `keep`: bytes that are left of it; `flip`: a byte that is damaged."""
    made = (packed_of if row_format is RowFormat.PACKED else planar_of)(*random_table(COUNT))
    raw = bytearray(np.asarray(made).tobytes())
    if flip is not None:
        raw[flip] ^= 1
    with tempfile.TemporaryFile() as file:
        file.write(raw[:keep])
        file.flush()
        info = SegmentInfo(
            id="L1",
            layer_id=1,
            shard=Shard(row_start=FIRST, row_stop=FIRST + COUNT, columns=None),
            rank=None,
            nbytes=len(raw),
            backing=Backing.POSIX_SHM,
            row_format=row_format,
            page_bytes=4096,
            device=None,
        )
        reader = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY)
        try:
            yield OpenSegment(info, reader)
        finally:
            os.close(reader)


def piece(start: int, stop: int) -> PieceDigest:
    values, scales = random_table(COUNT)
    return PieceDigest(FIRST + start, FIRST + stop, block_digest(values[start:stop], scales[start:stop]))


@pytest.mark.parametrize("row_format", RowFormat)
@pytest.mark.parametrize(("start", "stop"), [(0, COUNT), (0, 1), (COUNT - 1, COUNT), (1023, 2049)])
def test_a_piece_is_digested_as_the_checkpoint_has_it(row_format: RowFormat, start: int, stop: int) -> None:
    with open_segment(row_format) as segment:
        assert damage([(segment, piece(start, stop))], threads=1) == []


@pytest.mark.parametrize("row_format", RowFormat)
def test_a_flipped_bit_is_found_in_its_piece(row_format: RowFormat) -> None:
    with open_segment(row_format, flip=5) as segment:
        (found,) = damage([(segment, piece(0, 100)), (segment, piece(100, 200))], threads=2)
        assert (found.segment, found.row_start, found.row_stop) == ("L1", FIRST, FIRST + 100)


@pytest.mark.parametrize("row_format", RowFormat)
def test_a_segment_that_somebody_shortened_is_an_error_and_no_signal(row_format: RowFormat) -> None:
    with open_segment(row_format, keep=264 * COUNT - 100) as segment:
        with pytest.raises(MapFailed, match="ends at byte"):
            damage([(segment, piece(0, COUNT))], threads=1)


def test_what_cannot_be_read_is_an_error_with_its_reason() -> None:
    with open_segment(RowFormat.PACKED) as segment:
        closed = OpenSegment(segment.info, os.open("/", os.O_RDONLY))
        try:
            with pytest.raises(MapFailed, match="directory"):
                damage([(closed, piece(0, 1))], threads=1)
        finally:
            os.close(closed.fd)
