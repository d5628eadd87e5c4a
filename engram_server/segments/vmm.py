"""Segments that the CUDA driver allocates and exports. The daemon makes no context for them and maps nothing.

The exported descriptor is the segment: whoever holds it keeps the memory, here or in another process. It
carries no read-only right and has no size that could be asked; ranks protect the rows by mapping read-only.
"""

from __future__ import annotations

from typing import Self

from engram_client.cuda.driver import Driver, HandleTypes, Location, Space
from engram_client.errors import AllocationFailed, BackingUnavailable, CudaCallFailed
from engram_client.protocol import SegmentInfo
from engram_server.segments.base import Segment

_REMEDY = 'see the driver\'s message; for host tables "host": {"backing": "memfd"} needs no driver'


class VmmSegment(Segment):
    """The common part of cuda_host and cuda_device."""

    def __init__(self, info: SegmentInfo, driver: Driver, handle: int, fd: int, sealed: bool = False) -> None:
        super().__init__(info, None if sealed else fd, fd if sealed else None)
        self._driver = driver
        self._handle: int | None = handle

    @classmethod
    def allocate(cls, info: SegmentInfo, driver: Driver, location: Location, types: HandleTypes) -> Self:
        """An empty (zeroed) segment. Host memory takes the driver seconds for every 16 GiB, GPU memory does not.

        Raises AllocationFailed or BackingUnavailable.
        """
        handle = None
        try:
            handle = driver.mem_create(info.nbytes, location, types)
            segment = cls(info, driver, handle, driver.export_fd(handle))
        except CudaCallFailed as error:
            if handle is not None:
                driver.mem_release(handle)
            if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
                raise AllocationFailed(backing=info.backing, needed=info.nbytes, problem=str(error)) from error
            raise BackingUnavailable(backing=info.backing, problem=str(error), remedy=_REMEDY) from error
        return segment

    @classmethod
    def adopt_descriptor(cls, info: SegmentInfo, driver: Driver, fd: int, where: Space | Location) -> Self:
        """The sealed segment behind `fd`, which becomes the segment's and stays the caller's on an error. Its
        size cannot be asked; a digest of its last rows tells.

        Raises BackingUnavailable when it is no allocation `where` it should be.
        """
        try:
            handle = driver.import_fd(fd)
        except CudaCallFailed as error:
            raise BackingUnavailable(
                backing=info.backing, problem=str(error), remedy="load the tables again"
            ) from error
        found = driver.mem_location(handle)
        if where not in (found, found.space):
            driver.mem_release(handle)
            problem = f"the descriptor of {info.id} is memory at {found}, not at {where}"
            raise BackingUnavailable(backing=info.backing, problem=problem, remedy="load the tables again")
        return cls(info, driver, handle, fd, sealed=True)

    def seal(self) -> None:
        """Ends writing: call it when the loader has exited, for it alone had a writable map."""
        if self.sealed:
            return
        self._readable, self._writable = self.writable_fd, None

    def close(self) -> None:
        super().close()
        if self._handle is not None:
            self._driver.mem_release(self._handle)
            self._handle = None
