"""Counters of invalid ids that a GPU writes and the CPU reads: three 64-bit words a table in host memory.

Only an invalid id makes a kernel touch them, so the way of a good id is free of them, and reading them takes
neither a launch nor a wait: what a kernel that still runs has found is not in them yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Final

from engram_client.cuda.driver import Driver
from engram_client.lookup.checks import Invalid
from engram_client.mapping.registered import wait_for

_WORDS: Final = 3
_WORD_BYTES: Final = 8
_NONE: Final = Invalid()


class Counters:
    """`count` counters and one that nobody reads, registered for GPU `ordinal`. Raises CudaCallFailed."""

    def __init__(self, driver: Driver, ordinal: int, count: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        nbytes = -(-(count + 1) * _WORDS * _WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._words = (ctypes.c_uint64 * (nbytes // _WORD_BYTES)).from_buffer(self._memory)
        address = ctypes.addressof(self._words)
        with contextlib.ExitStack() as undo:
            driver.retain_context(ordinal)
            undo.callback(driver.release_context, ordinal)
            with driver.context(ordinal):
                driver.host_register(address, nbytes, read_only=False)
                undo.callback(self._unregister, address)
                self._device_address = driver.host_device_pointer(address)
            self._undo: contextlib.ExitStack | None = undo.pop_all()
        self.nobody = self.address(count)
        """Address of the counter for launches that judge ids which another launch, or another rank, reports."""

    def address(self, index: int) -> int:
        """Where kernels find counter `index`."""
        return self._device_address + index * _WORDS * _WORD_BYTES

    def read(self, index: int) -> Invalid:
        """What was counted since the start: how many, and which was the first that a kernel found."""
        if not self._words[index * _WORDS]:
            return _NONE
        return Invalid(*self._words[index * _WORDS : (index + 1) * _WORDS])

    def close(self) -> None:
        """Waits for the GPU. Twice is harmless; the counts stay readable."""
        if self._undo is None:
            return
        undo, self._undo = self._undo, None
        with undo:
            wait_for(self._driver, self._ordinal)

    def _unregister(self, address: int) -> None:
        with self._driver.context(self._ordinal):
            self._driver.host_unregister(address)
