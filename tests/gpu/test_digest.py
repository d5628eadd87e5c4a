"""The digest kernel on a real GPU, bit for bit against the xxhash package; nothing here needs torch."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import xxhash

from engram_client.cuda.driver import HandleTypes, Location
from engram_client.layout import BLOCK_ROWS, RowFormat, Shard, TableGeometry
from engram_client.protocol import Backing, SegmentInfo
from engram_server import device_digest, device_fill
from engram_server.device_digest import Digester
from engram_server.device_target import DeviceTarget
from engram_server.load_job import LoadJob, PieceDigest
from tests.gpu.real import real_driver

DRIVER = real_driver()

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

ROWS = 2 * BLOCK_ROWS + 777
FIRST = BLOCK_ROWS - 1001
"""The table's row that the segment begins with: as shards do, it cuts a block."""


class Memory:
    """Random rows in a segment of one GPU, and on the host."""

    def __init__(self, ordinal: int) -> None:
        unit = DRIVER.granularity(Location.device(ordinal), HandleTypes.POSIX_FD)
        nbytes = -(-ROWS * 264 // unit) * unit
        handle = DRIVER.mem_create(nbytes, Location.device(ordinal), HandleTypes.POSIX_FD)
        fd = DRIVER.export_fd(handle)
        DRIVER.mem_release(handle)
        shard = Shard(row_start=FIRST, row_stop=FIRST + ROWS, columns=None)
        self.info = SegmentInfo(
            id=f"gpu{ordinal}",
            layer_id=3,
            shard=shard,
            rank=None,
            nbytes=nbytes,
            backing=Backing.CUDA_DEVICE,
            row_format=RowFormat.PLANAR,
            page_bytes=unit,
            device=DRIVER.device_uuid(ordinal),
        )
        self.target = DeviceTarget(self.info, fd, DRIVER)
        os.close(fd)
        self.raw = np.random.default_rng(ordinal).integers(0, 256, ROWS * 264, np.uint8)
        job = LoadJob(source="random", tables=(TableGeometry(layer_id=3, columns=(FIRST + ROWS,)),), threads=3)
        with DRIVER.context(ordinal):
            staging = device_fill.Staging(DRIVER, job.threads, device_fill.chunk_bytes(job))
        device_fill.fill(job, [self.target], staging, lambda: RandomFeed(self))

    def part(self, row: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        row, stop = row - FIRST, stop - FIRST
        return self.raw[row * 256 : stop * 256], self.raw[ROWS * 256 + row * 8 : ROWS * 256 + stop * 8]

    def expected(self, row: int, stop: int) -> bytes:
        values, scales = self.part(row, stop)
        return xxhash.xxh3_128_digest(values.tobytes() + scales.tobytes())


class RandomFeed:
    direct = False

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def fill(self, chunk: device_fill.RowChunk, view: memoryview) -> list[device_fill.Copy]:
        copies, used = [], 0
        parts = self._memory.part(chunk.row_start, chunk.row_stop)
        for target, part in zip((chunk.values, chunk.scales), parts, strict=True):
            view[used : used + len(part)] = part
            copies.append(device_fill.Copy(device_fill.address_of(view) + used, target, len(part)))
            used += len(part)
        return copies

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", params=range(DRIVER.device_count()), ids=lambda ordinal: f"gpu{ordinal}")
def memory(request: pytest.FixtureRequest) -> Memory:
    return Memory(request.param)


def check(memory: Memory, ranges: list[tuple[int, int]], gentle: bool = False) -> None:
    spans = [memory.target.span(row, stop) for row, stop in ranges]
    found = Digester.on(DRIVER, memory.target.ordinal).digests(spans, gentle)
    for (row, stop), digest in zip(ranges, found, strict=True):
        assert digest == memory.expected(row, stop), (row, stop)


def test_pieces_of_every_size_and_at_every_alignment_have_the_digest_that_xxhash_gives_them(memory: Memory) -> None:
    ranges = []
    row = FIRST
    for size in [*range(1, 300), 1000, 4095, 4096, 4097, 65_537]:
        ranges.append((row, row + size))
        row += size
    check(memory, ranges)


def test_whole_blocks_and_the_pieces_beside_the_shards_borders_are_right(memory: Memory) -> None:
    stop = FIRST + ROWS
    borders = [FIRST, BLOCK_ROWS, 2 * BLOCK_ROWS, stop]
    check(memory, [*itertools.pairwise(borders), (FIRST, stop), (stop - 1, stop)])


@pytest.mark.parametrize("gentle", [False, True])
def test_many_pieces_in_one_launch_are_all_right(memory: Memory, gentle: bool) -> None:
    starts = np.random.default_rng(7).integers(FIRST, FIRST + ROWS - 500, 3000 if not gentle else 150)
    sizes = np.random.default_rng(8).integers(1, 500, len(starts))
    check(memory, [(int(row), int(row + size)) for row, size in zip(starts, sizes, strict=True)], gentle)


def test_damage_is_found_by_segment_and_rows(memory: Memory) -> None:
    good = PieceDigest(FIRST, FIRST + 70, memory.expected(FIRST, FIRST + 70))
    bad = PieceDigest(FIRST + 70, FIRST + 99, memory.expected(FIRST + 70, FIRST + 98))
    (found,) = device_digest.damage([(memory.target, good), (memory.target, bad)], gentle=True)
    assert (found.segment, found.row_start, found.row_stop) == (memory.info.id, FIRST + 70, FIRST + 99)
    assert found.found == memory.expected(FIRST + 70, FIRST + 99).hex()
