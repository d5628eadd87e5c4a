"""The memory of the tables, one file a backing.

memfd.py       no name, sealed by the kernel; hugetlb, transparent huge or base pages
posix_shm.py   a name in /dev/shm
file.py        a file in a folder of a tmpfs or hugetlbfs
cuda_host.py   host memory that the CUDA driver allocates
cuda_device.py GPU memory; both over vmm.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from engram_client.cuda.access import cuda_driver
from engram_client.protocol import Backing, SegmentInfo
from engram_server.plan import Plan
from engram_server.segments.base import Segment
from engram_server.segments.cuda_device import CudaDeviceSegment
from engram_server.segments.cuda_host import CudaHostSegment
from engram_server.segments.file import FileSegment
from engram_server.segments.memfd import MemfdSegment
from engram_server.segments.posix_shm import SHM_FOLDER, PosixShmSegment

__all__ = ["Segment", "adopt_segment", "create_segments", "discard_all", "remove_stale"]


def create_segments(plan: Plan, tag: str, infos: Sequence[SegmentInfo] | None = None) -> list[Segment]:
    """The plan's segments (or those of `infos`), empty, in order: all of them or none. `tag` marks the names
    of one daemon.

    Raises BackingUnavailable, NotEnoughHugePages, AllocationFailed or, from the CUDA driver, a CudaError.
    """
    segments: list[Segment] = []
    try:
        for info in plan.segments if infos is None else infos:
            segments.append(_create(plan, info, tag))
    except BaseException:
        discard_all(segments)
        raise
    return segments


def discard_all(segments: Iterable[Segment]) -> None:
    """Frees what no reader maps, which takes seconds where it is large: not on the event loop."""
    for segment in segments:
        segment.discard()


def _create(plan: Plan, info: SegmentInfo, tag: str) -> Segment:
    if info.backing is Backing.MEMFD:
        return MemfdSegment.create(info, tag, plan.huge_pages, plan.huge_pages_required)
    if info.backing is Backing.POSIX_SHM:
        return PosixShmSegment.create(info, tag)
    if info.backing is Backing.FILE and plan.folder is not None:
        return FileSegment.create(info, tag, plan.folder)
    if info.backing is Backing.CUDA_HOST:
        return CudaHostSegment.create(info, cuda_driver(), plan.numa.nodes[0])
    if info.backing is Backing.CUDA_DEVICE:
        return CudaDeviceSegment.create(info, cuda_driver(), plan.fabric)
    raise ValueError(f"no memory is made for backing {info.backing}")


def adopt_segment(info: SegmentInfo, tag: str, folder: str | None = None, fd: int | None = None) -> Segment:
    """A segment that an earlier daemon sealed: a named one by its name, a memfd by a descriptor kept for it.

    Raises BackingUnavailable when it is not there, or not whole; whether its rows are right is for `verify`.
    """
    if info.backing is Backing.MEMFD and fd is not None:
        return MemfdSegment.adopt(info, fd)
    if info.backing is Backing.POSIX_SHM:
        return PosixShmSegment.adopt(info, tag)
    if info.backing is Backing.FILE and folder is not None:
        return FileSegment.adopt(info, tag, folder)
    if info.backing is Backing.CUDA_HOST and fd is not None:
        return CudaHostSegment.adopt(info, cuda_driver(), fd)
    if info.backing is Backing.CUDA_DEVICE and fd is not None:
        return CudaDeviceSegment.adopt(info, cuda_driver(), fd)
    raise ValueError(f"nothing leads to a {info.backing} segment here")


def remove_stale(tag: str, folder: str | None = None, keep: Collection[str] = ()) -> list[str]:
    """Removes what a dead daemon of this tag left in /dev/shm and in `folder`, but for the segments whose ids
    are in `keep`; returns the paths removed. Readers that still map it keep it."""
    removed = []
    prefix = f"engram-{tag}-"
    for parent in {SHM_FOLDER, folder} - {None}:
        for path in sorted(Path(str(parent)).glob(f"{prefix}L*")):
            if path.name.removeprefix(prefix) in keep:
                continue
            with suppress(OSError):  # another user's: creating the segment will say so by name
                path.unlink()
                removed.append(str(path))
    return removed
