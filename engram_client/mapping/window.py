"""Mapped memory as a memoryview that knows whether it is still in use."""

from __future__ import annotations

import ctypes
import sys


class Window:
    """`nbytes` of memory at `address`, which somebody else has mapped and unmaps after `close()`."""

    def __init__(self, address: int, nbytes: int, writable: bool) -> None:
        self._memory = (ctypes.c_ubyte * nbytes).from_address(address)
        self._writable = writable
        self._view: memoryview | None = self._new_view()

    @property
    def view(self) -> memoryview:
        """The bytes; read-only unless writable. Raises ValueError after `close()`."""
        if self._view is None:
            raise ValueError("the mapping is closed")
        return self._view

    def close(self) -> None:
        """Gives the view up; twice is harmless. Raises BufferError, and stays open, while an object made from
        it (a slice, an array, a tensor) lives: after unmapping, that object would be a SIGSEGV."""
        if self._view is None:
            return
        self._view.release()
        # Slices hold the memory object and not the view: 2 = this attribute and getrefcount's argument.
        if sys.getrefcount(self._memory) > 2:
            self._view = self._new_view()
            raise BufferError("the mapping is still in use")
        self._view = None

    def _new_view(self) -> memoryview:
        view = memoryview(self._memory).cast("B")
        return view if self._writable else view.toreadonly()
