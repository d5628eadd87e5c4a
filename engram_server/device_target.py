"""GPU memory as the loader fills it: rows go through pinned staging buffers, copied while the next are read.

Each thread has two buffers: it fills one while the GPU fetches the other. Nothing is released before the
loader exits, and with it go the context, the buffers and the only writable mapping.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import Any, Final

from engram_client import rows
from engram_client.cuda.driver import Driver
from engram_client.errors import GpuNotFound
from engram_client.layout import ROW_BYTES, ROW_SCALES, ROW_VALUES, RowFormat
from engram_client.mapping.segments import visible_gpus
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import SegmentInfo

STAGING_ROWS: Final = 1 << 14
"""Rows of a staging buffer: 4.1 MiB, large beside what a copy costs to start."""


class _Slot:
    """One pinned buffer, and the stream of the copy that last read it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._memory = mmap.mmap(-1, -(-STAGING_ROWS * ROW_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        driver.host_register(self.address, len(self._memory), read_only=False)
        self._streams: dict[int, int] = {}
        self._busy: int | None = None

    def stream(self, ordinal: int) -> int:
        if ordinal not in self._streams:
            self._streams[ordinal] = self._driver.stream_create()
        return self._streams[ordinal]

    def wait(self) -> None:
        """Until the buffer may be overwritten."""
        if self._busy is not None:
            self._driver.stream_synchronize(self._busy)
            self._busy = None

    def send(self, at: int, target: int, nbytes: int, ordinal: int) -> None:
        """Starts the copy of `nbytes` at offset `at` of the buffer to the device address `target`."""
        self._busy = self.stream(ordinal)
        self._driver.copy_to_device_async(target, self.address + at, nbytes, self._busy)


# A thread's last copies outlast the thread: what the GPU still reads must not be freed with its locals.
_kept: list[_Slot] = []


class _Staging(threading.local):
    """This thread's two slots, shared by all its targets."""

    slots: list[_Slot] | None = None

    def next(self, driver: Driver) -> _Slot:
        if self.slots is None:
            self.slots = [_Slot(driver), _Slot(driver)]
            _kept.extend(self.slots)
        self.slots.reverse()
        self.slots[0].wait()
        return self.slots[0]


_staging = _Staging()


class DeviceTarget:
    """A segment in GPU memory, mapped for writing unless told otherwise: see fill.Target.

    Raises GpuNotFound or CudaCallFailed.
    """

    def __init__(self, info: SegmentInfo, fd: int, driver: Driver, writable: bool = True) -> None:
        self.info = info
        self._driver = driver
        present = visible_gpus(driver)
        if info.device not in present:
            raise GpuNotFound(device=str(info.device), present=present)
        self._ordinal = present.index(info.device)
        self._mapping = VmmMapping(
            fd, info.nbytes, driver, self._ordinal, writable=writable, page_bytes=info.page_bytes, name=info.id
        )
        self._scales_at = info.shard.rows * ROW_VALUES

    def write(self, row: int, values: Any, scales: Any) -> None:
        count = len(values) // ROW_VALUES
        with self._driver.context(self._ordinal):
            for first in range(0, count, STAGING_ROWS):
                last = min(count, first + STAGING_ROWS)
                self._send(
                    row + first,
                    last - first,
                    values[first * ROW_VALUES : last * ROW_VALUES],
                    scales[first * ROW_SCALES : last * ROW_SCALES],
                )

    def _send(self, row: int, count: int, values: Any, scales: Any) -> None:
        slot = _staging.next(self._driver)
        at, base = row - self.info.shard.row_start, self._mapping.address
        if self.info.row_format is RowFormat.PACKED:
            rows.pack(values, scales, slot.view[: count * ROW_BYTES])
            slot.send(0, base + at * ROW_BYTES, count * ROW_BYTES, self._ordinal)
            return
        split = count * ROW_VALUES
        # memmove, called through ctypes, runs without the GIL; a memoryview's assignment does not.
        ctypes.memmove(slot.address, _address(values), split)
        ctypes.memmove(slot.address + split, _address(scales), count * ROW_SCALES)
        slot.send(0, base + at * ROW_VALUES, split, self._ordinal)
        slot.send(split, base + self._scales_at + at * ROW_SCALES, count * ROW_SCALES, self._ordinal)

    def read(self, row: int, count: int, values: memoryview, scales: memoryview) -> None:
        at, base, copy = row - self.info.shard.row_start, self._mapping.address, self._driver.copy_from_device
        with self._driver.context(self._ordinal):
            if self.info.row_format is RowFormat.PACKED:
                packed = memoryview(bytearray(count * ROW_BYTES))
                copy(_address(packed), base + at * ROW_BYTES, count * ROW_BYTES)
                rows.unpack(packed, values, scales)
                return
            copy(_address(values), base + at * ROW_VALUES, count * ROW_VALUES)
            copy(_address(scales), base + self._scales_at + at * ROW_SCALES, count * ROW_SCALES)

    def check_size(self) -> None:
        pass  # an allocation of the driver has no size that anyone could change

    def flush(self) -> None:
        with self._driver.context(self._ordinal):
            self._driver.synchronize()


def _address(buffer: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
