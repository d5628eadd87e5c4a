"""What a client on a GPU has beside its mappings: kernels, counters, a side stream; and its tables' rows there.

Needs torch. Everything that can fail for want of a GPU, a driver or a compiler fails here, at attach.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from engram_client.cuda.access import cuda_driver
from engram_client.errors import GpuNotFound, MalformedMessage
from engram_client.layout import whole
from engram_client.lookup import runtime
from engram_client.lookup.counters import Counters
from engram_client.lookup.cuda import AllTables, GpuRows
from engram_client.lookup.kernels import Kernels
from engram_client.lookup.packing import Part
from engram_client.lookup.shapes import Memory
from engram_client.mapping.segments import GpuMapping, visible_gpus
from engram_client.protocol import Backing, Done, HandoverReply, Reply, SegmentInfo, TableInfo, decode, encode

if TYPE_CHECKING:
    from engram_client.table import MappedTable


_DESCRIPTORS = 64
"""Room for an attach, which takes some 25 for two segments on one GPU, and more for more."""


def prepare(ordinal: int) -> Kernels:
    """The kernels on GPU `ordinal`, compiled at first use on this machine, which takes seconds, and most of what else
    a first attach would wait for: before a ticket's time runs.

    Raises NoDriver, CudaUnavailable, GpuNotFound, KernelCompileFailed or CudaCallFailed.
    """
    uuids = visible_gpus(cuda_driver())
    if ordinal >= len(uuids):
        raise GpuNotFound(device=f"cuda:{ordinal}", present=uuids)
    runtime.device(ordinal)
    import engram_client.table  # noqa: F401  registers torch's operators: 80 ms

    decode(encode(Done()), Reply | HandoverReply)  # looks through the types of all messages, once: 3 ms
    kernels = Kernels.on(ordinal)
    runtime.make_streams(ordinal)
    _make_room_for_descriptors()  # last, for driver and kernels take some themselves
    return kernels


def _make_room_for_descriptors() -> None:
    """Where descriptors outgrow a process's table of them, Linux makes a larger one, for good. In a process with
    threads it then waits until no core may still read the old one: 20 ms and more."""
    with contextlib.suppress(OSError):  # no /proc, or not so many allowed: then the attach waits, or says what it lacks
        with open(os.devnull, "rb") as file:
            os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, len(os.listdir("/proc/self/fd")) + _DESCRIPTORS))


class GpuTables:
    """The tables of one client on one GPU. Raises CudaCallFailed."""

    def __init__(self, kernels: Kernels, tables: Sequence[TableInfo]) -> None:
        self._kernels = kernels
        self._uuid = kernels.driver.device_uuid(kernels.ordinal)
        self._order = [table.geometry.layer_id for table in tables]
        self._counters = Counters(kernels.driver, kernels.ordinal, len(tables))
        try:
            self._side = runtime.SideStream(kernels.ordinal)
        except BaseException:
            self._counters.close()
            raise
        self._all: AllTables | None = None
        self._asked = False

    def rows(self, info: TableInfo, mappings: Mapping[str, GpuMapping]) -> tuple[GpuRows, bool]:
        """The rows of a table as this GPU reads them, and whether they are the whole table.

        Raises Unsupported for too many shards, MalformedMessage for several that are not the whole table.
        """
        segments = sorted(info.segments, key=lambda segment: segment.shard.row_start)
        held = [segment for segment in segments if segment.shard.rows] or segments[:1]
        parts = [Part(mappings[one.id].device_address, one.shard.row_start, one.shard.row_stop) for one in held]
        everything = sum(part.stop - part.start for part in parts) == info.geometry.rows
        if len(info.segments) > 1 and not everything:
            raise MalformedMessage(
                problem=f"{len(info.segments)} segments that are not all of layer {info.geometry.layer_id}"
            )
        rows = GpuRows(
            self._kernels,
            parts,
            info.geometry,
            whole(info.geometry) if everything else segments[0].shard,
            segments[0].row_format,
            self._memory(held),
            self._counters,
            self._order.index(info.geometry.layer_id),
            self._side,
        )
        return rows, everything

    def _memory(self, segments: Sequence[SegmentInfo]) -> Memory:
        if any(segment.backing is not Backing.CUDA_DEVICE for segment in segments):
            walks = "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES"
            return Memory.COHERENT if self._kernels.driver.attribute(self._kernels.ordinal, walks) else Memory.HOST
        return Memory.DEVICE if all(segment.device == self._uuid for segment in segments) else Memory.PEER

    def lookup_all(self, tables: Sequence[MappedTable], ids: Tensor, out: Tensor, hashed: bool) -> bool:
        """Looks up in all tables by one launch, into `[tables, tokens, columns, 256]`; False where that cannot be."""
        if not self._asked:
            rows = [table.local for table in tables if table.whole and isinstance(table.local, GpuRows)]
            self._all = AllTables.of(rows) if len(rows) == len(tables) else None
            self._asked = True
        if self._all is None:
            return False
        self._all.lookup(ids, out, hashed)
        return True

    def close(self) -> None:
        self._counters.close()
