"""Gives a writable mapping its pages, before anything is read into it: where, how large, and all of them.

Once this has succeeded no write can fail for want of memory. Runs in the loader child.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from engram_client.mapping.hostmem import (
    HUGE_PAGE_BYTES,
    MADV_COLLAPSE,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    MADV_POPULATE_WRITE,
    HostMapping,
    madvise,
    try_madvise,
)
from engram_server.plan import SHMEM_KNOB, HugePages, NumaPolicy

PIECE_BYTES = 64 << 20
"""What one thread populates at a time: large beside a system call, small beside a table."""
NOTABLE_COVERAGE = 0.95
"""Below this share of huge pages the user is told which knob to turn."""

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL = {"bind": 2, "interleave": 3}

Advise = Callable[[int, int, int], None]


def populate(
    mapping: HostMapping,
    fd: int,
    huge_pages: HugePages,
    threads: int,
    on_done: Callable[[int], None] = lambda nbytes: None,
    advise: Advise = madvise,
) -> None:
    """Allocates every page of `mapping`, which maps `fd` from its start; `on_done` hears of bytes done, from
    any thread. `advise` is madvise, or a test's.

    Raises OSError: ENOMEM, or EFAULT or ENOSPC where a file system is full.
    """
    if huge_pages is HugePages.THP:
        try_madvise(mapping.address, mapping.nbytes, MADV_HUGEPAGE)
    elif huge_pages is HugePages.BASE:
        try_madvise(mapping.address, mapping.nbytes, MADV_NOHUGEPAGE)

    def piece(start: int) -> None:
        nbytes = min(PIECE_BYTES, mapping.nbytes - start)
        _populate_piece(mapping.address + start, nbytes, fd, start, huge_pages, advise)
        on_done(nbytes)

    with ThreadPoolExecutor(threads, thread_name_prefix="populate") as pool:
        futures = [pool.submit(piece, start) for start in range(0, mapping.nbytes, PIECE_BYTES)]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _populate_piece(address: int, nbytes: int, fd: int, offset: int, huge_pages: HugePages, advise: Advise) -> None:
    try:
        if huge_pages is HugePages.THP:
            # The first page of each huge page, then collapse: the kernel makes the huge page out of one small
            # one. Populating all small pages first and collapsing them is 20 times slower, and collapsing
            # untouched memory is refused. Where a fault gives a huge page by itself, this costs nothing.
            for huge in range(0, nbytes, HUGE_PAGE_BYTES):
                advise(address + huge, mmap.PAGESIZE, MADV_POPULATE_WRITE)
            try_madvise(address, nbytes, MADV_COLLAPSE)
        advise(address, nbytes, MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Before Linux 5.14 only fallocate takes memory without the risk of SIGBUS; its pages are small on
        # most kernels, but they are there.
        os.posix_fallocate(fd, offset, nbytes)


def bind(mapping: HostMapping, policy: NumaPolicy) -> None:
    """Sets where pages go; before the first touch. Raises OSError, ENOSYS on an unknown architecture."""
    if policy.mode == "none":
        return
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind on {platform.machine()}")
    words = max(policy.nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in policy.nodes:
        mask[node // 64] |= 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (mapping.address, mapping.nbytes, _MPOL[policy.mode])
    # The kernel reads one bit less than it is told (mbind(2), "maxnode").
    if libc.syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments), mask, ctypes.c_ulong(words * 64 + 1), 0):
        code = ctypes.get_errno()
        raise OSError(code, f"mbind: {os.strerror(code)}")


_HUGE_FIELDS = ("ShmemPmdMapped", "FilePmdMapped", "Shared_Hugetlb", "Private_Hugetlb")


def huge_bytes(mapping: HostMapping) -> int:
    """Bytes of the mapping that are mapped by pages of 2 MiB or more."""
    with open("/proc/self/smaps") as file:
        return read_smaps(file.read(), mapping.address, mapping.address + mapping.nbytes)


def read_smaps(text: str, start: int, stop: int) -> int:
    """Bytes in huge pages of the mappings inside `[start, stop)`, from the text of a smaps file."""
    total, inside = 0, False
    for line in text.splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = start <= int(span[1], 16) < stop
        elif inside:
            name, _, size = line.partition(":")
            if name in _HUGE_FIELDS:
                total += int(size.split()[0]) * 1024
    return total


def coverage_remark(segment: str, huge: int, nbytes: int, huge_pages: HugePages) -> str | None:
    """What to tell a user whose segment has few huge pages, else None."""
    if huge_pages is HugePages.BASE or huge >= nbytes * NOTABLE_COVERAGE:
        return None
    return (
        f"segment {segment}: {huge * 100 // nbytes} % of {nbytes} bytes are in huge pages, lookups are slower for it; "
        f'write "advise" to {SHMEM_KNOB}, or reserve pages with vm.nr_hugepages, and free memory before the load'
    )
