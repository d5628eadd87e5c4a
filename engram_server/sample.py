"""A digest of rows from all over a table: tells checkpoints of equal shape apart where no node reads all of one.

It is read from the checkpoint's files beside the load, a few thousand small reads, and travels with the table.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from typing import Final

from engram_client.errors import ReadFailed
from engram_client.identity import new_digest
from engram_client.layout import ROW_SCALES, ROW_VALUES, TableGeometry
from engram_server.checkpoint import TableSource
from engram_server.tensor_file import Extent

SAMPLE_ROWS: Final = 1024
"""Checkpoints that differ in one row of a hundred are told apart but for one in thirty thousand."""
_DOMAIN: Final = b"engram-sample-1\0"


def sample_digests(sources: Sequence[TableSource], stop: threading.Event) -> dict[int, str]:
    """By layer, 32 hex digits. Raises ReadFailed, and CancelledError at the next row when `stop` is set: reads of a
    slow file system may take minutes in all, and the process does not end before its threads."""
    return {source.geometry.layer_id: _of_files(source, stop) for source in sources}


def generated_digests(tables: Sequence[TableGeometry], seed: int) -> dict[int, str]:
    """The same for tables that are made from a seed: that decides all of their rows."""
    found = {}
    for table in tables:
        digest = new_digest()
        digest.update(_DOMAIN + f"generated {table.layer_id} {table.rows} {seed}".encode())
        found[table.layer_id] = str(digest.hexdigest())
    return found


def sampled_rows(rows: int) -> list[int]:
    """The first, the last, and others at equal distances."""
    count = min(rows, SAMPLE_ROWS)
    return [index * (rows - 1) // max(count - 1, 1) for index in range(count)]


def _of_files(source: TableSource, stop: threading.Event) -> str:
    digest = new_digest()
    digest.update(_DOMAIN)
    with _opened(source.values) as values, _opened(source.scales) as scales:
        for row in sampled_rows(source.geometry.rows):
            if stop.is_set():
                raise CancelledError
            digest.update(_read(values, source.values, row, ROW_VALUES))
            digest.update(_read(scales, source.scales, row, ROW_SCALES))
    return str(digest.hexdigest())


@contextlib.contextmanager
def _opened(extent: Extent) -> Iterator[int]:
    try:
        fd = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ReadFailed(path=extent.path, offset=extent.offset, problem=error.strerror or str(error)) from error
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead: each read is of one page
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, extent: Extent, row: int, width: int) -> bytes:
    offset = extent.offset + row * width
    try:
        data = os.pread(fd, width, offset)
    except OSError as error:
        raise ReadFailed(path=extent.path, offset=offset, problem=error.strerror or str(error)) from error
    if len(data) < width:
        raise ReadFailed(path=extent.path, offset=offset, problem="the file ended: it was truncated meanwhile")
    return data
