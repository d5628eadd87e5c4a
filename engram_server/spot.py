"""The check before a restarted daemon serves: a piece of each segment, read as a file.

A child that maps, as for full checks, takes longer to start than these few bytes take to read. Nothing is mapped
here, so a segment that somebody shortens meanwhile is an error and no SIGBUS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engram_client import rows
from engram_client.errors import MapFailed
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES, RowFormat
from engram_client.protocol import SegmentInfo
from engram_server.verify import damage

__all__ = ["OpenSegment", "damage"]


@dataclass(frozen=True)
class OpenSegment:
    """A segment behind a descriptor that can be read."""

    info: SegmentInfo
    fd: int

    def read(self, row: int, count: int, values: memoryview, scales: memoryview) -> None:
        """See verify.Readable. Raises MapFailed."""
        shard = self.info.shard
        at = row - shard.row_start
        if self.info.row_format is RowFormat.PACKED:
            packed = memoryview(bytearray(count * ROW_BYTES))
            self._fill(packed, at * ROW_BYTES)
            rows.unpack(packed, values, scales)
            return
        self._fill(values, at * ROW_VALUES)
        self._fill(scales, shard.rows * ROW_VALUES + at * ROW_SCALES)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        filled = 0
        while filled < len(buffer):
            try:
                count = os.preadv(self.fd, [buffer[filled:]], offset + filled)
            except OSError as error:
                raise self._failed(error.strerror or str(error)) from error
            if count == 0:
                raise self._failed(f"it ends at byte {offset + filled}")
            filled += count

    def _failed(self, problem: str) -> MapFailed:
        return MapFailed(segment=self.info.id, nbytes=self.info.nbytes, problem=problem)
