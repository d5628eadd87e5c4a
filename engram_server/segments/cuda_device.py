"""Memory of one GPU, found by its UUID; handed out as a descriptor, to other nodes as a FABRIC handle."""

from __future__ import annotations

from engram_client.cuda.driver import Driver, HandleTypes, Location
from engram_client.errors import GpuNotFound
from engram_client.mapping.segments import visible_gpus
from engram_client.protocol import SegmentInfo
from engram_server.gpus import EXPORTS
from engram_server.segments.vmm import VmmSegment


class CudaDeviceSegment(VmmSegment):
    @classmethod
    def create(cls, info: SegmentInfo, driver: Driver, fabric: bool) -> CudaDeviceSegment:
        """An empty segment on GPU `info.device`; with `fabric`, one that `export_fabric` can export.

        Raises GpuNotFound, AllocationFailed, BackingUnavailable or CudaCallFailed.
        """
        types = EXPORTS | HandleTypes.FABRIC if fabric else EXPORTS
        return cls.allocate(info, driver, device_location(driver, info), types)

    @classmethod
    def adopt(cls, info: SegmentInfo, driver: Driver, fd: int) -> CudaDeviceSegment:
        """The segment behind `fd`: see VmmSegment.adopt_descriptor. Raises GpuNotFound too."""
        return cls.adopt_descriptor(info, driver, fd, device_location(driver, info))

    def export_fabric(self) -> bytes:
        """Its FABRIC handle, a secret. Raises CudaCallFailed: also for memory that was made without, and by a
        driver that does not export again what it has imported."""
        if self._handle is None:
            raise ValueError(f"{self!r} is closed")
        return self._driver.export_fabric(self._handle)


def device_location(driver: Driver, info: SegmentInfo) -> Location:
    """Where `info.device` is for this process. Raises GpuNotFound."""
    present = visible_gpus(driver)
    if info.device not in present:
        raise GpuNotFound(device=str(info.device), present=present)
    return Location.device(present.index(info.device))
