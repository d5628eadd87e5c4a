"""Host memory of the CUDA driver: 2 MiB pages on any host, imported by ranks instead of registered."""

from __future__ import annotations

from engram_client.cuda.driver import Driver, Location, Space
from engram_client.protocol import SegmentInfo
from engram_server.gpus import EXPORTS
from engram_server.segments.vmm import VmmSegment


class CudaHostSegment(VmmSegment):
    @classmethod
    def create(cls, info: SegmentInfo, driver: Driver, node: int) -> CudaHostSegment:
        """An empty segment at NUMA node `node`. Raises AllocationFailed or BackingUnavailable."""
        return cls.allocate(info, driver, Location.host(node), EXPORTS)

    @classmethod
    def adopt(cls, info: SegmentInfo, driver: Driver, fd: int) -> CudaHostSegment:
        """The segment behind `fd`: see VmmSegment.adopt_descriptor."""
        return cls.adopt_descriptor(info, driver, fd, Space.HOST_NUMA)
