"""Segments of the CUDA driver's memory, as the daemon owns them: on the fake driver."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from engram_client.cuda import access
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.cuda.driver import FABRIC_BYTES
from engram_client.errors import AllocationFailed, BackingUnavailable, CudaCallFailed, EngramError, GpuNotFound
from engram_client.layout import RowFormat, Shard
from engram_client.protocol import Backing, SegmentInfo
from engram_server.segments import Segment, adopt_segment
from engram_server.segments.cuda_device import CudaDeviceSegment
from engram_server.segments.cuda_host import CudaHostSegment
from tests.support.fake_driver import FakeDriver

SIZE = 4 << 20


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setenv(DRIVER_VARIABLE, "tests.support.fake_driver:FakeDriver")
    monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps({"fabric": "yes", "gpu_bytes": 2 * SIZE}))
    monkeypatch.setattr(access, "_driver", None)
    made = access.cuda_driver()
    assert isinstance(made, FakeDriver)
    yield made
    assert made.leaks() == []
    monkeypatch.setattr(access, "_driver", None)


def info(backing: Backing, **changes: Any) -> SegmentInfo:
    facts: dict[str, Any] = {
        "id": "L1",
        "layer_id": 1,
        "shard": Shard(row_start=0, row_stop=9, columns=None),
        "rank": None,
        "nbytes": SIZE,
        "backing": backing,
        "row_format": RowFormat.PLANAR,
        "page_bytes": 2 << 20,
    }
    return SegmentInfo(**facts | changes)


def make(driver: FakeDriver, backing: Backing) -> Segment:
    if backing is Backing.CUDA_HOST:
        return CudaHostSegment.create(info(backing), driver, 0)
    return CudaDeviceSegment.create(info(backing, device=driver.device_uuid(1)), driver, fabric=False)


both = pytest.mark.parametrize("backing", [Backing.CUDA_HOST, Backing.CUDA_DEVICE])


@both
def test_sealing_turns_the_loaders_descriptor_into_the_readers(driver: FakeDriver, backing: Backing) -> None:
    segment = make(driver, backing)
    loader = segment.writable_fd
    with pytest.raises(ValueError, match="no readable"):
        _ = segment.readable_fd
    segment.seal()
    segment.seal()
    assert segment.readable_fd == loader
    with pytest.raises(ValueError, match="no writable"):
        _ = segment.writable_fd
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(loader)


@both
def test_a_descriptor_that_was_kept_is_adopted(driver: FakeDriver, backing: Backing) -> None:
    first = make(driver, backing)
    kept = os.dup(first.writable_fd)
    first.discard()
    again = adopt_segment(first.info, "tag", fd=kept)
    assert again.sealed
    assert again.readable_fd == kept
    again.close()


def test_a_descriptor_of_other_memory_is_not_adopted(driver: FakeDriver) -> None:
    host, device = make(driver, Backing.CUDA_HOST), make(driver, Backing.CUDA_DEVICE)
    elsewhere = info(Backing.CUDA_DEVICE, device=driver.device_uuid(0))
    plain = os.memfd_create("plain")
    for wanted, fd in (
        (host.info, device.writable_fd),
        (device.info, host.writable_fd),
        (elsewhere, device.writable_fd),
        (host.info, plain),
    ):
        with pytest.raises(BackingUnavailable):
            adopt_segment(wanted, "tag", fd=fd)
        os.fstat(fd)  # still the caller's
    os.close(plain)
    host.close(), device.close()


def test_a_gpu_that_is_full_or_absent_is_named(driver: FakeDriver) -> None:
    with pytest.raises(AllocationFailed):
        CudaDeviceSegment.create(
            info(Backing.CUDA_DEVICE, device=driver.device_uuid(0), nbytes=3 * SIZE), driver, False
        )
    with pytest.raises(GpuNotFound) as refused:
        CudaDeviceSegment.create(info(Backing.CUDA_DEVICE, device="GPU-none"), driver, False)
    assert refused.value.present == [driver.device_uuid(0), driver.device_uuid(1)]


def test_memory_made_for_the_fabric_has_a_handle_and_other_memory_has_none(driver: FakeDriver) -> None:
    segment = CudaDeviceSegment.create(info(Backing.CUDA_DEVICE, device=driver.device_uuid(0)), driver, fabric=True)
    assert len(segment.export_fabric()) == FABRIC_BYTES
    segment.close()
    without = CudaDeviceSegment.create(info(Backing.CUDA_DEVICE, device=driver.device_uuid(0)), driver, fabric=False)
    with pytest.raises(CudaCallFailed):
        without.export_fabric()
    without.close()


@both
def test_an_export_that_fails_gives_the_memory_back(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, backing: Backing
) -> None:
    monkeypatch.setenv("ENGRAM_FAKE_FAIL", "cuMemExportToShareableHandle:1:CUDA_ERROR_UNKNOWN")
    failing = FakeDriver()
    with pytest.raises(EngramError) as failed:
        make(failing, backing)
    assert failed.value.code == "BackingUnavailable"
    assert failing.leaks() == []
