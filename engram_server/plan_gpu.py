"""Tables in GPU memory: which GPU holds which rows, and whether the GPUs can do it. Pure decisions.

replication none: rank k of this node has its shard on the k-th GPU (`devices` sets the order). per_node: the
node's copy of a table is several segments, one a GPU, that hold equal ranges of its rows; every rank maps all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from engram_client.errors import NoGpu, NotEnoughGpuMemory, PeerAccessMissing, TooFewGpus
from engram_client.layout import ROW_BYTES, RowFormat, Shard, TableGeometry, shard
from engram_client.protocol import Backing, Lookup, Replication, ResolvedOptions, SegmentInfo
from engram_server.gpus import Gpu, Gpus

LOADER_CONTEXT_BYTES: Final = 640 << 20
"""GPU memory that the loader's context takes while it fills a table; given back when it exits."""

LOADER_HOST_BYTES: Final = 512 << 20
"""Host memory that a GPU's loader takes: pinned slots for 16 threads, and the driver's own."""


def plan_devices(
    options: ResolvedOptions, ranks: range, tables: Sequence[TableGeometry], gpus: Gpus, check_resources: bool
) -> tuple[SegmentInfo, ...]:
    """This node's segments. `ranks`: those that live on it.

    Raises NoGpu, TooFewGpus, PeerAccessMissing or NotEnoughGpuMemory. A peer_read over several nodes without FABRIC
    is refused to ranks that attach, for those of the other nodes must hear of it too.
    """
    if not gpus.devices:
        raise NoGpu(problem=gpus.problem or "no CUDA device was found")
    if gpus.device_problem:
        raise NoGpu(problem=gpus.device_problem)
    per_node = options.replication is Replication.PER_NODE
    # Ranks may share a GPU; a copy is spread over each GPU once.
    used = tuple(dict.fromkeys(gpus.devices)) if per_node else gpus.devices[: len(ranks)]
    if not per_node and len(ranks) > len(gpus.devices):
        raise TooFewGpus(ranks=len(ranks), gpus=len(gpus.devices))
    peer_read = options.lookup is Lookup.PEER_READ and not per_node
    if per_node or peer_read:
        _check_peers(used)
    segments = tuple(
        segment
        for table in tables
        for segment in (_spread(table, used) if per_node else _by_rank(table, options.tp_size, ranks, used))
    )
    if check_resources:
        _check_memory(segments, used)
    return segments


def _by_rank(table: TableGeometry, tp_size: int, ranks: range, used: Sequence[Gpu]) -> list[SegmentInfo]:
    return [
        _segment(f"L{table.layer_id}.r{rank}of{tp_size}", table, shard(table, rank, tp_size), rank, gpu)
        for rank, gpu in zip(ranks, used, strict=True)
    ]


def _spread(table: TableGeometry, used: Sequence[Gpu]) -> list[SegmentInfo]:
    """Equal ranges of rows: the lookups search by row, so columns need not be whole."""
    parts = []
    for index, gpu in enumerate(used):
        start, stop = (table.rows * part // len(used) for part in (index, index + 1))
        rows = Shard(row_start=start, row_stop=stop, columns=(0, len(table.columns)) if len(used) == 1 else None)
        parts.append(_segment(f"L{table.layer_id}.g{index}of{len(used)}", table, rows, None, gpu))
    return parts


def _segment(name: str, table: TableGeometry, rows: Shard, rank: int | None, gpu: Gpu) -> SegmentInfo:
    unit = gpu.granularity
    return SegmentInfo(
        id=name,
        layer_id=table.layer_id,
        shard=rows,
        rank=rank,
        nbytes=max(1, -(-rows.rows * ROW_BYTES // unit)) * unit,
        backing=Backing.CUDA_DEVICE,
        row_format=RowFormat.PLANAR,
        page_bytes=unit,
        device=gpu.uuid,
    )


def _check_peers(used: Sequence[Gpu]) -> None:
    for gpu in used:
        for other in used:
            if other.uuid != gpu.uuid and other.uuid not in gpu.peers:
                raise PeerAccessMissing(device=gpu.uuid, peer=other.uuid, reason="the driver reports no peer access")


def _check_memory(segments: Sequence[SegmentInfo], used: Sequence[Gpu]) -> None:
    needed: dict[str, int] = defaultdict(int)
    for segment in segments:
        needed[str(segment.device)] += segment.nbytes
    short = [gpu for gpu in dict.fromkeys(used) if needed[gpu.uuid] + LOADER_CONTEXT_BYTES > gpu.free]
    if short:
        raise NotEnoughGpuMemory(
            gpus=[gpu.uuid for gpu in short],
            needed=[needed[gpu.uuid] + LOADER_CONTEXT_BYTES for gpu in short],
            free=[gpu.free for gpu in short],
        )
