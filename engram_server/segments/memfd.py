"""Segments without a name: memory that only descriptors reach, and that the kernel itself write-protects."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Any

from engram_client.errors import AllocationFailed, BackingUnavailable, NotEnoughHugePages
from engram_client.protocol import SegmentInfo
from engram_server.machine import is_hugetlb
from engram_server.plan import HugePages
from engram_server.segments.base import Segment

# Python 3.11's os and fcntl know these only in part.
_MFD_NOEXEC_SEAL = 0x8
_MFD_HUGE_2MB = 21 << 26
F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x1
F_SEAL_SHRINK = 0x2
F_SEAL_GROW = 0x4
F_SEAL_FUTURE_WRITE = 0x10
SEALS = F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE
"""Not F_SEAL_WRITE: before Linux 6.7 it refuses shared read-only maps too. FUTURE_WRITE protects as well once
nobody holds a writable map, and the loader has exited by then."""


class MemfdSegment(Segment):
    def __init__(
        self, info: SegmentInfo, writable_fd: int | None, readable_fd: int | None, huge_pages: HugePages
    ) -> None:
        super().__init__(info, writable_fd, readable_fd)
        self.huge_pages = huge_pages

    @classmethod
    def create(cls, info: SegmentInfo, tag: str, huge_pages: HugePages, required: bool) -> MemfdSegment:
        """An empty segment. Hugetlb pages are reserved here, so that the fill cannot fail for want of them.

        When the pool has become too small since the plan was made, THP are taken instead, unless `required`.
        Raises NotEnoughHugePages or AllocationFailed.
        """
        name = f"engram-{tag}-{info.id}"
        if huge_pages is HugePages.HUGETLB:
            try:
                return cls(info, _create(name, info.nbytes, hugetlb=True), None, huge_pages)
            except OSError as error:
                if required:
                    raise NotEnoughHugePages(needed=info.nbytes, available=0) from error
                huge_pages = HugePages.THP
        try:
            return cls(info, _create(name, info.nbytes, hugetlb=False), None, huge_pages)
        except OSError as error:
            raise AllocationFailed(backing=info.backing, needed=info.nbytes, problem=str(error)) from error

    @classmethod
    def adopt(cls, info: SegmentInfo, fd: int) -> MemfdSegment:
        """The sealed segment behind `fd`, which becomes the segment's and stays the caller's on an error.

        Raises BackingUnavailable when it is not a sealed memfd of that size.
        """
        try:
            seals = fcntl.fcntl(fd, F_GET_SEALS)
        except OSError:
            seals = 0
        size, writable = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
        if seals & SEALS != SEALS or size != info.nbytes or writable:
            raise BackingUnavailable(
                backing=info.backing,
                problem=f"the descriptor of {info.id} has {size} bytes, seals {seals:#x}, writable {writable}",
                remedy="load the tables again",
            )
        return cls(info, None, fd, HugePages.HUGETLB if is_hugetlb(fd) else HugePages.THP)

    def _seal(self, fd: int) -> int:
        # Others may re-open a descriptor they were handed: then only for reading.
        os.fchmod(fd, 0o400)
        fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def _facts(self) -> dict[str, Any]:
        return {"huge_pages": self.huge_pages}


def _create(name: str, nbytes: int, hugetlb: bool) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if hugetlb:
        flags |= os.MFD_HUGETLB | _MFD_HUGE_2MB
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # Linux before 6.3 does not know the flag
            raise
        fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, nbytes)
        if hugetlb:
            # Mapping reserves the pages for the file, and unmapping keeps the reservation.
            mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
    except OSError:
        os.close(fd)
        raise
    return fd
