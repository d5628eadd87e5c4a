"""Memory that the CUDA driver allocated (on the host or on a GPU), imported and mapped into this process.

A handle carries no rights: whoever has it may map it for writing. What protects the tables is that every rank
maps them read-only, and then its GPU and its CPU refuse to write.
"""

from __future__ import annotations

import contextlib

from engram_client.cuda.driver import Driver, Location, Space
from engram_client.mapping.registered import wait_for
from engram_client.mapping.window import Window


class VmmMapping:
    """An exported allocation of `nbytes`, at `device_address` for GPU `ordinal`, and with `host_access` at the
    same address for the CPU.

    source: the descriptor, which stays the caller's and may be closed at once, or the bytes of a FABRIC handle.
    ordinal: None = for the CPU alone; then no context is made. host_access is for host memory only.
    writable: for the loader alone.

    Raises CudaCallFailed; everything is undone then.
    """

    def __init__(
        self,
        source: int | bytes,
        nbytes: int,
        driver: Driver,
        ordinal: int | None,
        *,
        host_access: bool = False,
        writable: bool = False,
        page_bytes: int = 0,
        name: str = "",
    ) -> None:
        self.nbytes = nbytes
        self.name = name
        self.ordinal = ordinal
        self._driver = driver
        self._window: Window | None = None
        self._undo: contextlib.ExitStack | None = None
        with contextlib.ExitStack() as undo:
            current = contextlib.ExitStack()
            if ordinal is not None:
                driver.retain_context(ordinal)
                undo.callback(driver.release_context, ordinal)
                current.enter_context(driver.context(ordinal))
            with current:
                self.address = self._map(source, page_bytes, host_access, writable, undo)
            if host_access:
                self._window = Window(self.address, nbytes, writable)
            self._undo = undo.pop_all()

    def _map(
        self, source: int | bytes, alignment: int, host_access: bool, writable: bool, undo: contextlib.ExitStack
    ) -> int:
        driver, nbytes = self._driver, self.nbytes
        handle = driver.import_fd(source) if isinstance(source, int) else driver.import_fabric(source)
        with contextlib.ExitStack() as handle_open:
            handle_open.callback(driver.mem_release, handle)  # in any case: a map keeps the memory alive itself
            # Of memory of another node the driver need not say where it is; it is in no GPU of this one.
            self.location = driver.mem_location(handle) if isinstance(source, int) else None
            address = driver.address_reserve(nbytes, alignment)
            undo.callback(driver.address_free, address, nbytes)
            driver.mem_map(address, nbytes, handle)
            undo.callback(driver.mem_unmap, address, nbytes)
        readers = [] if self.ordinal is None else [Location.device(self.ordinal)]
        if host_access and self.location is not None:
            readers.append(self.location)
        driver.set_access(address, nbytes, tuple(readers), writable)
        return address

    @property
    def device_address(self) -> int:
        return self.address

    @property
    def on_host(self) -> bool:
        """Whether the memory is the host's."""
        return self.location is not None and self.location.space is Space.HOST_NUMA

    @property
    def view(self) -> memoryview:
        """The bytes for the CPU. Raises ValueError after `close()`, and without host_access."""
        if self._window is None:
            raise ValueError(f"{self!r} is not mapped for the CPU")
        return self._window.view

    def close(self) -> None:
        """Waits for the GPU and unmaps. Closing twice is harmless. Raises BufferError, and keeps the mapping,
        while an object made from `view` is alive."""
        if self._undo is None:
            return
        if self._window is not None:
            self._window.close()
        undo, self._undo = self._undo, None
        with undo:
            if self.ordinal is not None:
                wait_for(self._driver, self.ordinal)

    def __repr__(self) -> str:
        state = "closed" if self._undo is None else f"at {self.address:#x}"
        return f"VmmMapping({self.name!r}, {self.nbytes} bytes, GPU {self.ordinal}, {state})"
