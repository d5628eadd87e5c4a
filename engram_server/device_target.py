"""A segment of GPU memory as the loader and the checks see it: mapped, and where each of its rows lies."""

from __future__ import annotations

from typing import NamedTuple

from engram_client.cuda.driver import Driver
from engram_client.errors import GpuNotFound, Unsupported
from engram_client.layout import ROW_SCALES, ROW_VALUES, RowFormat
from engram_client.mapping.segments import visible_gpus
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import SegmentInfo


class Span(NamedTuple):
    """Consecutive rows in GPU memory: the address of their values (16-byte aligned), that of their scales
    (8-byte aligned), and how many they are."""

    values: int
    scales: int
    rows: int


class DeviceTarget:
    """A planar segment in GPU memory, mapped for writing unless told otherwise; unmapped when the process ends.

    Raises GpuNotFound, CudaCallFailed, or Unsupported for packed rows, which nothing plans for GPU memory.
    """

    def __init__(self, info: SegmentInfo, fd: int, driver: Driver, writable: bool = True) -> None:
        if info.row_format is not RowFormat.PLANAR:
            raise Unsupported(
                feature=f"{info.row_format} rows in GPU memory",
                reason="only planar ones",
                remedy="load the tables anew",
            )
        self.info = info
        self.driver = driver
        present = visible_gpus(driver)
        if info.device not in present:
            raise GpuNotFound(device=str(info.device), present=present)
        self.ordinal = present.index(info.device)
        self._mapping = VmmMapping(
            fd, info.nbytes, driver, self.ordinal, writable=writable, page_bytes=info.page_bytes, name=info.id
        )

    def span(self, row_start: int, row_stop: int) -> Span:
        """Where the table's rows `[row_start, row_stop)` lie; they are rows of this segment."""
        base, shard = self._mapping.address, self.info.shard
        at = row_start - shard.row_start
        scales = base + shard.rows * ROW_VALUES
        return Span(base + at * ROW_VALUES, scales + at * ROW_SCALES, row_stop - row_start)
