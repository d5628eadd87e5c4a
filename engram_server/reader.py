"""Reads byte ranges of a file without leaving them in the page cache; one reader a thread.

Direct reads go past the cache, but only at aligned offsets: the range asked for is read with the few bytes
around it, into an aligned buffer. A file system that refuses is read through the cache, and what was read is
dropped from it afterwards, so that the cache does not grow against the tables.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress

from engram_client.errors import ReadFailed, TruncatedFile
from engram_server.machine import is_memory
from engram_server.tensor_file import Extent

ALIGNMENT = 4096
"""Offsets and lengths of direct reads; the largest logical block size of disks in use."""
_SAMPLES = 64

Preadv = Callable[[int, list[memoryview], int], int]


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed memory for `read`: room for `nbytes` and for what alignment adds, at a page's start."""
    return memoryview(mmap.mmap(-1, nbytes + 2 * ALIGNMENT))


class FileReader:
    """Reads inside one extent. `preadv` is os.preadv, or a test's."""

    def __init__(self, extent: Extent, direct: bool, preadv: Preadv = os.preadv) -> None:
        """Raises ReadFailed when the file cannot be opened."""
        self.extent = extent
        self._preadv = preadv
        self._fd = self._open(0)
        self._direct_fd: int | None = None
        self.direct = direct
        """Whether reads go past the page cache; false from the first one that the file system refused."""
        if direct:
            try:
                self._direct_fd = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system without direct reads
                    self.close()
                    raise self.failed(0, error) from error
                self.direct = False

    def read(self, start: int, nbytes: int, buffer: memoryview) -> memoryview:
        """Bytes `[start, start + nbytes)` of the extent, somewhere in `buffer` (see `aligned_buffer`).

        Raises TruncatedFile when the file ends before, ReadFailed for anything else.
        """
        offset = self.extent.offset + start
        if self._direct_fd is not None:
            head = offset % ALIGNMENT
            length = -(-(head + nbytes) // ALIGNMENT) * ALIGNMENT
            try:
                if self._fill(self._direct_fd, buffer[:length], offset - head, head + nbytes):
                    return buffer[head : head + nbytes]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise self.failed(offset, error) from error
            os.close(self._direct_fd)
            self._direct_fd, self.direct = None, False
        try:
            whole = self._fill(self._fd, buffer[:nbytes], offset, nbytes)
        except OSError as error:
            raise self.failed(offset, error) from error
        if not whole:
            raise self.truncated()
        return buffer[:nbytes]

    def _fill(self, fd: int, buffer: memoryview, offset: int, needed: int) -> bool:
        """Reads until `needed` bytes are there; False where the file ends before. Short reads are continued."""
        filled = 0
        while filled < needed:
            count = self._preadv(fd, [buffer[filled:]], offset + filled)
            if count == 0:
                return False
            filled += count
        return True

    @property
    def fd(self) -> int:
        """For reads through the page cache by others; `truncated` and `failed` are the errors to raise then."""
        return self._fd

    def truncated(self) -> TruncatedFile:
        size = os.fstat(self._fd).st_size
        return TruncatedFile(path=self.extent.path, size=size, expected=self.extent.offset + self.extent.nbytes)

    def failed(self, offset: int, error: OSError) -> ReadFailed:
        """`offset`: in the file."""
        return ReadFailed(path=self.extent.path, offset=offset, problem=error.strerror or str(error))

    def drop(self, start: int, nbytes: int) -> None:
        """Takes the range out of the page cache, as far as nobody else uses it."""
        with suppress(OSError):  # advice only
            os.posix_fadvise(self._fd, self.extent.offset + start, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                os.close(fd)
        self._direct_fd = None

    def _open(self, offset: int) -> int:
        try:
            fd = os.open(self.extent.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self.failed(offset, error) from error
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the readahead
        return fd


def is_cached(extents: Sequence[Extent]) -> bool:
    """Whether most of the extents' bytes are in the page cache, by a random sample of reads that may not wait.

    (mincore answers "all of it" for a file of somebody else, so it cannot be asked. A file system that is memory
    itself cannot either: its reads never wait, and it refuses to promise so.)
    """
    hits = samples = 0
    page = bytearray(1)
    for extent in extents:
        try:
            memory = is_memory(extent.path)
            fd = os.open(extent.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # the read itself tells it better
        try:
            if memory:
                hits += _SAMPLES
                samples += _SAMPLES
                continue
            with suppress(OSError):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no readahead around a page that is not there
            for _ in range(_SAMPLES):
                samples += 1
                at = extent.offset + random.randrange(extent.nbytes)
                try:
                    hits += os.preadv(fd, [page], at, os.RWF_NOWAIT)
                except OSError:  # EAGAIN: not cached, but it may be soon, for having been asked for
                    with suppress(OSError):
                        os.posix_fadvise(fd, at, 1, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    return hits * 2 > samples
