"""How much of a file is in the page cache, asked of the kernel about each of its pages (mincore)."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def cached_bytes(path: Path) -> int:
    """Bytes of a file of ours (of another user's the kernel would say: all)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        nbytes = os.fstat(fd).st_size
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    finally:
        os.close(fd)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    try:
        pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
        if _libc.mincore(address, nbytes, pages):
            raise OSError(ctypes.get_errno(), "mincore")
        return sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
    finally:
        _libc.munmap(address, nbytes)


def drop(path: Path) -> None:
    """Out of the cache, where the file system has another place for it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # dirty pages stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
