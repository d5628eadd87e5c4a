"""Host memory that a descriptor leads to, mapped read-only and made readable for a GPU by registration.

Registration pins every page, so it takes seconds for a table, and some drivers refuse half a TiB in one call:
it goes in ranges, all of them or none. On machines where GPUs walk the CPU's page tables (ATS) it is not
needed.
"""

from __future__ import annotations

import contextlib
from typing import Final

from engram_client.cuda.driver import Driver
from engram_client.errors import AddressesScattered, CudaCallFailed, RegistrationFailed
from engram_client.mapping.hostmem import HUGE_PAGE_BYTES, HostMapping
from engram_client.mapping.lock import exclusively
from engram_client.mapping.window import Window

RANGE_BYTES: Final = 64 << 30
"""The largest range in one call."""


class RegisteredMapping:
    """`nbytes` of the descriptor `fd`, for the CPU at `address` and for GPU `ordinal` at `device_address`.

    The descriptor stays the caller's and may be closed at once. `lock_path`: see `lock.exclusively`.
    `range_bytes` is a multiple of `page_bytes`.

    Raises MapFailed, RegistrationFailed, AddressesScattered or CudaCallFailed; everything is undone then.
    Nothing is left to be cleared either: the driver's calls, unlike the runtime's, keep no last error that a
    later kernel launch would find.
    """

    def __init__(
        self,
        fd: int,
        nbytes: int,
        driver: Driver,
        ordinal: int,
        *,
        page_bytes: int = HUGE_PAGE_BYTES,
        name: str = "",
        range_bytes: int = RANGE_BYTES,
        lock_path: str | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.name = name
        self.ordinal = ordinal
        self._driver = driver
        self._undo: contextlib.ExitStack | None = None
        with contextlib.ExitStack() as undo:
            self._host = HostMapping(fd, nbytes, page_bytes=page_bytes, name=name)
            undo.callback(self._host.close)
            self._window = Window(self._host.address, nbytes, writable=False)
            self.address = self.device_address = self._host.address
            self.registered = not driver.attribute(ordinal, "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")
            if self.registered:
                driver.retain_context(ordinal)
                undo.callback(driver.release_context, ordinal)
                with driver.context(ordinal), exclusively(lock_path):
                    undo.enter_context(self._register(range_bytes))
            self._undo = undo.pop_all()

    def _register(self, range_bytes: int) -> contextlib.ExitStack:
        """Registers all ranges; closing what is returned undoes it."""
        with contextlib.ExitStack() as undo:
            for start in range(0, self.nbytes, range_bytes):
                stop = min(start + range_bytes, self.nbytes)
                try:
                    self._driver.host_register(self.address + start, stop - start, read_only=True)
                    undo.callback(self._unregister, self.address + start)
                    found = self._driver.host_device_pointer(self.address + start)
                except CudaCallFailed as error:
                    raise RegistrationFailed(
                        segment=self.name,
                        device=self.ordinal,
                        start=start,
                        stop=stop,
                        name=error.name,
                        remedy=error.remedy,
                    ) from error
                if start == 0:
                    self.device_address = found
                elif found != self.device_address + start:
                    raise AddressesScattered(
                        segment=self.name,
                        device=self.ordinal,
                        offset=start,
                        expected=self.device_address,
                        found=found,
                    )
            return undo.pop_all()

    def _unregister(self, address: int) -> None:
        with self._driver.context(self.ordinal):
            self._driver.host_unregister(address)

    @property
    def view(self) -> memoryview:
        """The bytes for the CPU. Raises ValueError after `close()`."""
        return self._window.view

    def close(self) -> None:
        """Waits for the GPU, unregisters, unmaps. Closing twice is harmless. Raises BufferError, and keeps
        everything, while an object made from `view` is alive."""
        if self._undo is None:
            return
        self._window.close()
        undo, self._undo = self._undo, None
        with undo:
            if self.registered:
                wait_for(self._driver, self.ordinal)

    def __repr__(self) -> str:
        state = "closed" if self._undo is None else f"at {self.device_address:#x} of GPU {self.ordinal}"
        return f"RegisteredMapping({self.name!r}, {self.nbytes} bytes, {state})"


def wait_for(driver: Driver, ordinal: int) -> None:
    """Lets kernels that still read a mapping end. Whatever failed in them is not for its `close()` to tell."""
    with driver.context(ordinal), contextlib.suppress(CudaCallFailed):
        driver.synchronize()
