"""Maps all segments of a client, each by its kind: all of them or none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from engram_client.cuda.access import cuda_driver
from engram_client.cuda.driver import Driver
from engram_client.errors import DeviceUnsupported, GpuNotFound, MalformedMessage, MapFailed, PeerAccessMissing
from engram_client.mapping.hostmem import HostMapping
from engram_client.mapping.registered import RANGE_BYTES, RegisteredMapping
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import Backing, SegmentInfo


class CpuMapping(Protocol):
    """A segment as a CPU reads it."""

    @property
    def view(self) -> memoryview: ...

    def close(self) -> None: ...


class GpuMapping(Protocol):
    """A segment as one GPU reads it."""

    @property
    def device_address(self) -> int: ...

    def close(self) -> None: ...


_M = TypeVar("_M", CpuMapping, GpuMapping)


def gpu_ordinal(device: str) -> int | None:
    """The ordinal in "cuda:1"; "cuda" is GPU 0, "cpu" is None. Raises DeviceUnsupported for anything else."""
    if device == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(\d{1,4}))?", device)
    if match is None:
        raise DeviceUnsupported(device=device)
    return int(match[1] or 0)


def map_for_cpu(segments: Sequence[SegmentInfo], sources: Mapping[str, int | bytes]) -> dict[str, CpuMapping]:
    """Maps the segments read-only, by segment id. The descriptors stay the caller's.

    Raises MapFailed, MalformedMessage when a descriptor is missing, and for backing cuda_host NoDriver,
    CudaUnavailable or CudaCallFailed.
    """

    def one(segment: SegmentInfo, source: int | bytes) -> CpuMapping:
        if segment.backing is Backing.CUDA_DEVICE or isinstance(source, bytes):
            problem = 'it is in GPU memory, which the CPU cannot read; connect with device="cuda:N"'
            raise MapFailed(segment=segment.id, nbytes=segment.nbytes, problem=problem)
        if segment.backing is Backing.CUDA_HOST:
            return VmmMapping(
                source,
                segment.nbytes,
                cuda_driver(),
                None,
                host_access=True,
                page_bytes=segment.page_bytes,
                name=segment.id,
            )
        mapping = HostMapping(source, segment.nbytes, page_bytes=segment.page_bytes, name=segment.id)
        mapping.unmap_when_dropped()  # a client that is not closed must not hold a table's memory for ever
        return mapping

    return _all_or_none(segments, sources, one)


def map_for_gpu(
    segments: Sequence[SegmentInfo],
    sources: Mapping[str, int | bytes],
    ordinal: int,
    *,
    lock_path: str | None = None,
    range_bytes: int = RANGE_BYTES,
) -> dict[str, GpuMapping]:
    """Maps the segments read-only for GPU `ordinal`, by segment id.

    sources: by segment id, a descriptor, which stays the caller's, or a FABRIC handle.
    lock_path, range_bytes: see RegisteredMapping.

    Raises NoDriver, CudaUnavailable, GpuNotFound, PeerAccessMissing, MapFailed, RegistrationFailed,
    AddressesScattered, CudaCallFailed or MalformedMessage.
    """
    driver = cuda_driver()
    uuids = visible_gpus(driver)
    if ordinal >= len(uuids):
        raise GpuNotFound(device=f"cuda:{ordinal}", present=uuids)

    def one(segment: SegmentInfo, source: int | bytes) -> GpuMapping:
        if segment.backing in (Backing.CUDA_DEVICE, Backing.CUDA_HOST):
            if isinstance(source, int):  # the owner of a FABRIC handle is on another node as a rule
                check_peer(driver, uuids, ordinal, segment.device)
            return VmmMapping(source, segment.nbytes, driver, ordinal, page_bytes=segment.page_bytes, name=segment.id)
        if isinstance(source, bytes):
            raise MalformedMessage(problem=f"a FABRIC handle for {segment.backing} segment {segment.id}")
        return RegisteredMapping(
            source,
            segment.nbytes,
            driver,
            ordinal,
            page_bytes=segment.page_bytes,
            name=segment.id,
            range_bytes=range_bytes,
            lock_path=lock_path,
        )

    return _all_or_none(segments, sources, one)


def visible_gpus(driver: Driver) -> list[str]:
    """UUIDs of the GPUs that this process sees, by ordinal."""
    return [driver.device_uuid(ordinal) for ordinal in range(driver.device_count())]


def check_peer(driver: Driver, uuids: Sequence[str], ordinal: int, owner: str | None) -> None:
    """Raises PeerAccessMissing when GPU `ordinal` cannot read the memory of GPU `owner` (a UUID)."""
    if owner is None or uuids[ordinal] == owner:
        return
    reason = None
    if owner not in uuids:
        reason = "this process does not see it: check CUDA_VISIBLE_DEVICES"
    elif not driver.can_access_peer(ordinal, uuids.index(owner)):
        reason = "the driver reports no peer access"
    if reason is not None:
        raise PeerAccessMissing(device=uuids[ordinal], peer=owner, reason=reason)


def _all_or_none(
    segments: Sequence[SegmentInfo], sources: Mapping[str, int | bytes], one: Callable[[SegmentInfo, int | bytes], _M]
) -> dict[str, _M]:
    mapped: dict[str, _M] = {}
    with contextlib.ExitStack() as undo:
        for segment in segments:
            source = sources.get(segment.id)
            if source is None:
                raise MalformedMessage(problem=f"no descriptor for segment {segment.id}")
            mapped[segment.id] = one(segment, source)
            undo.callback(mapped[segment.id].close)
        undo.pop_all()
    return mapped
