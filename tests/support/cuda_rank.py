"""A rank on a GPU of the fake driver, as a process: attaches, maps, reads rows the way a kernel would, verifies.

    python -m tests.support.cuda_rank ENDPOINT CHECKPOINT RANK WORLD_SIZE DEVICE [RANGE_BYTES]

Prints one JSON line: the number of rows verified, or the error's code and fields; what leaked; whether its
context was usable afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engram_client.control import ControlConnection
from engram_client.cuda.access import cuda_driver
from engram_client.endpoint import handover_path
from engram_client.errors import EngramError
from engram_client.handover import HandoverConnection
from engram_client.mapping.registered import RANGE_BYTES
from engram_client.mapping.segments import GpuMapping, gpu_ordinal, map_for_gpu
from engram_client.protocol import Attach, Attached, SegmentInfo
from tests.support.fake_driver import FakeDriver
from tests.support.reference import CheckpointReference


def main(endpoint: str, checkpoint: str, rank: int, world_size: int, device: str, range_bytes: int) -> dict[str, Any]:
    reference = CheckpointReference(Path(checkpoint))
    ordinal = gpu_ordinal(device)
    assert ordinal is not None
    path = handover_path(endpoint)
    with HandoverConnection.open(path, 30) as lease:
        with ControlConnection(endpoint, lease) as control:
            request = Attach(rank=rank, world_size=world_size, device=device, name="test")
            replies = control.request(request, 30, "waiting for the tables")
            attached = next(reply for reply in replies if isinstance(reply, Attached))
        segments = [segment for table in attached.tables for segment in table.segments]
        with lease.redeemed(attached.ticket, 30) as descriptors:
            mapped = map_for_gpu(
                segments, {**descriptors}, ordinal, lock_path=os.path.dirname(path), range_bytes=range_bytes
            )
        verified = sum(verify(segment, mapped[segment.id], ordinal, reference) for segment in segments)
        for mapping in mapped.values():
            mapping.close()
    return {"rows": verified, "segments": [segment.id for segment in segments]}


def verify(segment: SegmentInfo, mapping: GpuMapping, ordinal: int, reference: CheckpointReference) -> int:
    """Every byte of the segment's rows against the checkpoint's; the GPU may read and not write."""
    driver = cuda_driver()
    assert isinstance(driver, FakeDriver)
    rows, first = segment.shard.rows, segment.shard.row_start
    raw = np.frombuffer(driver.gpu_read(mapping.device_address, max(1, rows * 264), ordinal), np.uint8)[: rows * 264]
    if segment.row_format == "planar":
        values, scales = raw[: rows * 256].reshape(rows, 256), raw[rows * 256 :].reshape(rows, 8)
    else:
        values, scales = np.split(raw.reshape(rows, 264), [256], axis=1)
    expected = reference.raw(segment.layer_id, np.arange(first, first + rows))
    assert np.array_equal(values, expected[0])
    assert np.array_equal(scales, expected[1])
    assert not driver.gpu_may(mapping.device_address, 1, ordinal, write=True)
    return rows


if __name__ == "__main__":
    endpoint, checkpoint, rank, world_size, device, *rest = sys.argv[1:]
    try:
        report = main(endpoint, checkpoint, int(rank), int(world_size), device, int(rest[0]) if rest else RANGE_BYTES)
    except EngramError as error:
        report = {"error": error.code, "fields": msgspec.to_builtins(error.fields)}
    try:
        driver = cuda_driver()
        assert isinstance(driver, FakeDriver)
        report["leaks"] = driver.leaks()
        with driver.context(0):
            driver.stream_destroy(driver.stream_create())  # something unrelated
        report["usable"] = True
    except EngramError as error:
        report["usable"] = error.code
    print(json.dumps(report))
