"""Memory of one GPU, found by its UUID; handed out as a descriptor and, where FABRIC works, as its handle."""

from __future__ import annotations

import msgspec

from engram_client.cuda.driver import Driver, HandleTypes, Location
from engram_client.errors import CudaCallFailed, GpuNotFound
from engram_client.mapping.segments import visible_gpus
from engram_client.protocol import SegmentInfo
from engram_server.gpus import EXPORTS
from engram_server.segments.vmm import VmmSegment


class CudaDeviceSegment(VmmSegment):
    @classmethod
    def create(cls, info: SegmentInfo, driver: Driver, fabric: bool) -> CudaDeviceSegment:
        """An empty segment on GPU `info.device`; with `fabric`, `info.fabric` of the result is its handle.

        Raises GpuNotFound, AllocationFailed, BackingUnavailable or CudaCallFailed.
        """
        types = EXPORTS | HandleTypes.FABRIC if fabric else EXPORTS
        segment = cls.allocate(info, driver, device_location(driver, info), types)
        if fabric and segment._handle is not None:
            try:
                segment.info = msgspec.structs.replace(info, fabric=driver.export_fabric(segment._handle))
            except CudaCallFailed:
                segment.discard()
                raise
        return segment

    @classmethod
    def adopt(cls, info: SegmentInfo, driver: Driver, fd: int) -> CudaDeviceSegment:
        """The segment behind `fd`: see VmmSegment.adopt_descriptor. Raises GpuNotFound too."""
        return cls.adopt_descriptor(info, driver, fd, device_location(driver, info))


def device_location(driver: Driver, info: SegmentInfo) -> Location:
    """Where `info.device` is for this process. Raises GpuNotFound."""
    present = visible_gpus(driver)
    if info.device not in present:
        raise GpuNotFound(device=str(info.device), present=present)
    return Location.device(present.index(info.device))
