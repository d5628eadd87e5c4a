"""Maps a descriptor of host memory at an aligned address, and advises the kernel about its pages.

Python's mmap chooses the address itself; huge pages need a map that starts at a multiple of their size, so
the address is chosen here: reserve more than is needed, map the descriptor inside, give the rest back.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from types import TracebackType
from typing import Self

from engram_client.errors import MapFailed

MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_READ = 22
"""Linux 5.14."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14. Allocates like a write would; a full file system gives EFAULT instead of SIGBUS."""
MADV_COLLAPSE = 25
"""Linux 6.1. Makes huge pages now, whatever the THP settings say."""
HUGE_PAGE_BYTES = 2 << 20

_MAP_FIXED = 0x10  # the same number on x86-64 and aarch64
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, protection, flags, fd, 0)
    if result is None or result == _MAP_FAILED:
        raise _os_error("mmap")
    return int(result)


def _munmap(address: int, nbytes: int) -> None:
    if nbytes and _libc.munmap(address, nbytes):
        raise _os_error("munmap")


def madvise(address: int, nbytes: int, advice: int) -> None:
    """madvise(2) without the GIL; interrupted calls are repeated. Raises OSError."""
    while _libc.madvise(address, nbytes, advice):
        if ctypes.get_errno() != errno.EINTR:
            raise _os_error("madvise")


def try_madvise(address: int, nbytes: int, advice: int) -> bool:
    """Whether the kernel took the advice: for advice that only makes things faster. Raises nothing."""
    try:
        madvise(address, nbytes, advice)
    except OSError:
        return False
    return True


class HostMapping:
    """`nbytes` of the descriptor `fd`, shared, at an address that is a multiple of `page_bytes`.

    The descriptor stays the caller's and may be closed at once. `name` is the segment's id for errors.

    Raises MapFailed when the descriptor is shorter than that (reading it would be SIGBUS), may not be
    mapped so, or the address space is exhausted.
    """

    def __init__(
        self, fd: int, nbytes: int, writable: bool = False, page_bytes: int = HUGE_PAGE_BYTES, name: str = ""
    ) -> None:
        self.nbytes = nbytes
        self.writable = writable
        self.page_bytes = page_bytes
        self.name = name
        self._view: memoryview | None = None
        try:
            size = os.fstat(fd).st_size
            if size < nbytes or nbytes <= 0:
                raise MapFailed(segment=name, nbytes=nbytes, problem=f"the descriptor has {size} bytes")
            self.address = _map_aligned(fd, nbytes, writable, max(page_bytes, mmap.PAGESIZE))
        except OSError as error:
            raise MapFailed(segment=name, nbytes=nbytes, problem=error.strerror or str(error)) from error
        self._memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self._view = self._new_view()
        self._when_dropped: weakref.finalize[..., ctypes.Array[ctypes.c_ubyte]] | None = None

    def unmap_when_dropped(self) -> None:
        """Unmaps also when nobody calls `close()`: at the end of the last object made from `view`, never before.

        Not for memory that is registered with a driver, which must be told first."""
        self._when_dropped = weakref.finalize(self._memory, _munmap, self.address, self._mapped_bytes)
        self._when_dropped.atexit = False  # threads may still read then, and the process's end unmaps everything

    @property
    def _mapped_bytes(self) -> int:
        return _round_up(self.nbytes, max(self.page_bytes, mmap.PAGESIZE))

    @property
    def view(self) -> memoryview:
        """The mapped bytes; read-only unless `writable`. Raises ValueError after `close()`."""
        if self._view is None:
            raise ValueError(f"mapping {self.name or 'of host memory'} is closed")
        return self._view

    def advise(self, advice: int, start: int = 0, nbytes: int | None = None) -> None:
        """madvise on a part of the mapping. Raises OSError, or ValueError after `close()`."""
        length = self.view.nbytes - start if nbytes is None else nbytes
        madvise(self.address + start, length, advice)

    def close(self) -> None:
        """Unmaps. Closing twice is harmless. Raises BufferError, and keeps the mapping, while an object
        made from `view` (a slice, an array, a tensor) is alive: unmapping under it would be SIGSEGV."""
        if self._view is None:
            return
        self._view.release()  # BufferError where an array is made from the view itself
        # Slices of the view do not hold it, they hold the memory object: here and getrefcount's argument.
        if sys.getrefcount(self._memory) > 2:
            self._view = self._new_view()
            raise BufferError(f"{self!r} is still in use")
        self._view = None
        if self._when_dropped is not None:
            self._when_dropped.detach()  # or it would unmap whatever lies there by then
        _munmap(self.address, self._mapped_bytes)

    def _new_view(self) -> memoryview:
        view = memoryview(self._memory).cast("B")
        return view if self.writable else view.toreadonly()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._view is None else f"at {self.address:#x}"
        return f"HostMapping({self.name!r}, {self.nbytes} bytes, {'rw' if self.writable else 'ro'}, {state})"


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def _map_aligned(fd: int, nbytes: int, writable: bool, align: int) -> int:
    length = _round_up(nbytes, align)
    reserved = length + align
    base = _mmap(
        None,
        reserved,
        0,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        -1,
    )
    address = _round_up(base, align)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    try:
        _mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _munmap(base, reserved)
        raise
    _munmap(base, address - base)
    _munmap(address + length, base + reserved - (address + length))
    return address
