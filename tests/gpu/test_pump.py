"""The C loop with the driver's own functions: from a file into a segment of a real GPU."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from engram_client.cuda.driver import HandleTypes, Location
from engram_client.errors import CudaCallFailed
from engram_client.layout import RowFormat, Shard, TableGeometry
from engram_client.protocol import Backing, SegmentInfo
from engram_server import device_pump
from engram_server.device_fill import address_of
from engram_server.device_target import DeviceTarget
from engram_server.load_job import LoadJob
from engram_server.tensor_file import Extent
from tests.gpu.real import real_driver

if not device_pump.NATIVE:
    pytest.skip("the extension is not built", allow_module_level=True)
DRIVER = real_driver()

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

ROWS = 777_777
HEADER = 1000


def target_on(ordinal: int) -> DeviceTarget:
    unit = DRIVER.granularity(Location.device(ordinal), HandleTypes.POSIX_FD)
    nbytes = -(-ROWS * 264 // unit) * unit
    handle = DRIVER.mem_create(nbytes, Location.device(ordinal), HandleTypes.POSIX_FD)
    fd = DRIVER.export_fd(handle)
    DRIVER.mem_release(handle)
    info = SegmentInfo(
        id=f"gpu{ordinal}",
        layer_id=1,
        shard=Shard(row_start=0, row_stop=ROWS, columns=None),
        rank=None,
        nbytes=nbytes,
        backing=Backing.CUDA_DEVICE,
        row_format=RowFormat.PLANAR,
        page_bytes=unit,
        device=DRIVER.device_uuid(ordinal),
    )
    try:
        return DeviceTarget(info, fd, DRIVER)
    finally:
        os.close(fd)


@pytest.mark.parametrize(("slot_bytes", "slots"), [(256 << 10, 2), (1 << 20, 4)])
@pytest.mark.parametrize("ordinal", range(DRIVER.device_count()))
def test_every_byte_of_a_file_arrives(tmp_path: Path, ordinal: int, slot_bytes: int, slots: int) -> None:
    raw = np.random.default_rng(slots).integers(0, 256, HEADER + ROWS * 264, np.uint8)
    path = tmp_path / "rows"
    raw.tofile(path)
    job = LoadJob(
        source="random",
        tables=(TableGeometry(layer_id=1, columns=(ROWS,)),),
        values=(Extent(str(path), HEADER, ROWS * 256),),
        scales=(Extent(str(path), HEADER + ROWS * 256, ROWS * 8),),
        threads=8,
        drop_cache=False,
        device_slot_bytes=slot_bytes,
        device_slots=slots,
    )
    target = target_on(ordinal)
    with DRIVER.context(ordinal):
        staging = device_pump.make_staging(DRIVER, job)
    device_pump.fill(job, [target], staging)
    stored = memoryview(bytearray(ROWS * 264))
    with DRIVER.context(ordinal):
        DRIVER.copy_from_device(address_of(stored), target.span(0, ROWS).values, len(stored))
    assert stored == raw[HEADER:].data


def test_the_driver_names_the_codes_that_its_functions_give() -> None:
    calls = DRIVER.copy_calls()
    assert calls.copy
    assert calls.mark
    assert calls.query
    error = calls.failed("cuMemcpyHtoDAsync", 1)
    assert isinstance(error, CudaCallFailed)
    assert (error.call, error.name) == ("cuMemcpyHtoDAsync", "CUDA_ERROR_INVALID_VALUE")
