"""What will be allocated where, or why not: pure decisions over a configuration and a machine.

Refusals come here, in milliseconds, before a byte of the checkpoint is read or a page is taken.
"""

from __future__ import annotations

import enum
import mmap
import re

import msgspec

from engram_client.errors import (
    BackingUnavailable,
    EngramError,
    NotEnoughHugePages,
    NotEnoughMemory,
    NotEnoughSpace,
)
from engram_client.layout import ROW_BYTES, ModelGeometry, RowFormat, Shard, TableGeometry, shard, whole
from engram_client.protocol import Backing, Lookup, Placement, Replication, ResolvedOptions, SegmentInfo
from engram_server.config import Config
from engram_server.gpus import Gpus
from engram_server.machine import FileSystem, Machine, available_host_bytes
from engram_server.plan_gpu import LOADER_HOST_BYTES, plan_devices

THP_BYTES = 2 << 20
LOADER_BYTES = 256 << 20
"""What the loader needs beside tables in host memory: its interpreter, a few MiB of buffers for each thread."""
COLLAPSE_KERNEL = (6, 1)
"""The first Linux with MADV_COLLAPSE, which makes huge pages whatever shmem_enabled says."""
SHMEM_KNOB = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"


class HugePages(enum.StrEnum):
    """Which pages the segments get."""

    HUGETLB = "hugetlb"
    THP = "thp"
    BASE = "base"
    DRIVER = "driver"
    """What the CUDA driver gives: 2 MiB or more, on any host."""


class NumaPolicy(msgspec.Struct, frozen=True):
    """Where pages go: wherever they are first touched (none), or to `nodes`, spread or bound."""

    mode: str
    """none, interleave or bind"""
    nodes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.mode if self.mode == "none" else f"{self.mode}:{','.join(map(str, self.nodes))}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    options: ResolvedOptions
    backing: Backing
    backing_reason: str
    huge_pages: HugePages
    huge_pages_required: bool
    """Whether the user insisted: then fewer is an error, not a remark."""
    numa: NumaPolicy
    folder: str | None
    """Folder of backing file."""
    tables: tuple[TableGeometry, ...]
    segments: tuple[SegmentInfo, ...]
    """This node's, by table and then by rank."""
    needed_bytes: int
    log_line: str
    remarks: tuple[str, ...]
    fabric: bool = False
    """Whether GPU memory is made so that it can be handed out as FABRIC handles too."""
    fabric_problem: str = ""
    """Why not, where it is GPU memory."""


def make_plan(
    config: Config, model: ModelGeometry, machine: Machine, gpus: Gpus, *, check_resources: bool = True
) -> Plan:
    """What this node will hold, on `gpus` or in the host's memory.

    check_resources=False leaves out memory and space: for tables that are in memory already.

    Raises NoGpu, TooFewGpus, PeerAccessMissing, NotEnoughGpuMemory, BackingUnavailable, NotEnoughMemory,
    NotEnoughSpace, NotEnoughHugePages or RowCountMismatch.
    """
    options = _options(config, gpus.count)
    tables = model.tables()
    if options.placement is Placement.GPU:
        return _gpu_plan(config, options, tables, machine, gpus, check_resources)
    wanted = _segment_bytes(tables, options, THP_BYTES)
    numa, remarks = _numa(config, machine)
    backing, reason = _backing(config, machine, gpus, numa, wanted)
    file_system = _file_system(config, backing, machine)
    if backing is Backing.CUDA_HOST:
        huge_pages, page_bytes = HugePages.DRIVER, gpus.host_granularity
        numa, remarks = NumaPolicy("bind", (_driver_node(numa, gpus),)), []
    else:
        huge_pages, page_remarks = _huge_pages(config, backing, file_system, machine, wanted, check_resources)
        page_bytes = _page_bytes(huge_pages, file_system)
        remarks = page_remarks + remarks
    segments = _segments(tables, options, backing, page_bytes)
    needed = sum(segment.nbytes for segment in segments)
    if check_resources:
        if file_system is not None and file_system.available < needed:
            raise NotEnoughSpace(path=file_system.path, needed=needed, available=file_system.available)
        if huge_pages is not HugePages.HUGETLB:  # the pool's pages are taken out of MemAvailable already
            remarks += _check_memory(config, machine, needed + LOADER_BYTES, numa)
    return Plan(
        options=options,
        backing=backing,
        backing_reason=reason,
        huge_pages=huge_pages,
        huge_pages_required=config.host.huge_pages in ("hugetlb", "thp"),
        numa=numa,
        folder=config.host.path,
        tables=tables,
        segments=segments,
        needed_bytes=needed,
        log_line=_log_line(options, backing, reason, huge_pages, numa, tables, segments),
        remarks=tuple(remarks),
    )


def _options(config: Config, gpu_count: int) -> ResolvedOptions:
    engram = config.engram
    return ResolvedOptions(
        placement=engram.placement,
        replication=engram.replication,
        lookup=engram.lookup or Lookup.COLLECTIVE,
        tp_size=config.tp_size or max(gpu_count, 1) * config.nnodes,
        nnodes=config.nnodes,
        node_rank=config.node_rank,
    )


def _gpu_plan(
    config: Config,
    options: ResolvedOptions,
    tables: tuple[TableGeometry, ...],
    machine: Machine,
    gpus: Gpus,
    check_resources: bool,
) -> Plan:
    segments = plan_devices(options, options.ranks_of_node, tables, gpus, check_resources)
    numa = NumaPolicy("none")
    loaders = LOADER_HOST_BYTES * len({segment.device for segment in segments})
    remarks = _check_memory(config, machine, loaders, numa) if check_resources else []
    if options.reads_across_nodes and gpus.fabric_problem:
        remarks.append(
            f"no rank will be able to attach: peer_read across nodes needs FABRIC handles, and {gpus.fabric_problem}; "
            'set "lookup": "collective" on all nodes, or give them an IMEX domain'
        )
    fabric = "usable" if not gpus.fabric_problem else f"unusable: {gpus.fabric_problem}"
    reason = f"GPU memory; fabric {fabric}"
    return Plan(
        options=options,
        backing=Backing.CUDA_DEVICE,
        backing_reason=reason,
        huge_pages=HugePages.DRIVER,
        huge_pages_required=False,
        numa=numa,
        folder=None,
        tables=tables,
        segments=segments,
        needed_bytes=sum(segment.nbytes for segment in segments),
        log_line=_log_line(options, Backing.CUDA_DEVICE, reason, HugePages.DRIVER, numa, tables, segments),
        remarks=tuple(remarks),
        fabric=not gpus.fabric_problem,
        fabric_problem=gpus.fabric_problem,
    )


def _backing(config: Config, machine: Machine, gpus: Gpus, numa: NumaPolicy, wanted: int) -> tuple[Backing, str]:
    asked = config.host.backing
    if asked not in ("auto", "cuda_host"):
        return Backing(asked), "as configured"
    problem = _cuda_host_problem(config, machine, gpus, numa, wanted)
    if asked == "cuda_host":
        if problem:
            raise BackingUnavailable(backing=asked, problem=problem, remedy='set host.backing to "auto" or "memfd"')
        return Backing.CUDA_HOST, "as configured"
    if not problem:
        # Measured on an H200 host: 2 ranks on 2 GPUs at once import 189 GiB in 5.2 s and register it in 12.6 s, 8
        # ranks on one GPU 48 GiB in 3 and in 9 s. Reads are equally fast; to create it takes the driver a minute more.
        return (
            Backing.CUDA_HOST,
            "auto: 2 MiB pages on any host, and ranks attach in half the time (189 GiB in 5 s instead of 13) at each "
            "start, for a minute more at the load",
        )
    reason = "auto: sealed against every writer, needs no /dev/shm, takes hugetlb pages or THP"
    return Backing.MEMFD, reason + (f"; not cuda_host: {problem}" if gpus.count else "")


def _cuda_host_problem(config: Config, machine: Machine, gpus: Gpus, numa: NumaPolicy, wanted: int) -> str:
    """Why the CUDA driver's host memory cannot be used, or ""."""
    if gpus.host_problem:
        return gpus.host_problem
    if config.host.huge_pages != "auto":
        return f'its pages are the driver\'s, and host.huge_pages is "{config.host.huge_pages}"'
    if len(numa.nodes) > 1:
        return f'one allocation lies on one NUMA node, and host.numa is "{config.host.numa}"'
    node = _driver_node(numa, gpus)
    room = {found.id: found.available for found in machine.nodes}
    if len(room) > 1 and config.host.memory_check == "strict" and room.get(node, 0) < wanted + LOADER_BYTES:
        return f"NUMA node {node} has {room.get(node, 0)} bytes available and {wanted} are needed on one node"
    return ""


def _driver_node(numa: NumaPolicy, gpus: Gpus) -> int:
    """The NUMA node of the driver's host memory: as bound, else the one beside the first GPU."""
    return numa.nodes[0] if numa.nodes else gpus.devices[0].host_node


def _file_system(config: Config, backing: Backing, machine: Machine) -> FileSystem | None:
    """The memory file system behind a named backing, None for memfd."""
    if backing is Backing.POSIX_SHM:
        return check_memory_file_system(machine.shm, backing, "/dev/shm")
    if backing is Backing.FILE:
        return check_memory_file_system(machine.folder, backing, config.host.path or "")
    return None


def check_memory_file_system(found: FileSystem | None, backing: Backing, path: str) -> FileSystem:
    """`found`, if tables can be in it. Raises BackingUnavailable."""
    allowed = ("tmpfs", "hugetlbfs") if backing is Backing.FILE else ("tmpfs",)
    if found is not None and found.kind in allowed:
        return found
    problem = f"{path} is on file system type {found.kind}, not in memory" if found else f"there is no folder {path}"
    remedy = f'mount a {" or ".join(allowed)} there, or set host.backing to "memfd"'
    raise BackingUnavailable(backing=backing, problem=problem, remedy=remedy)


def _huge_pages(
    config: Config,
    backing: Backing,
    file_system: FileSystem | None,
    machine: Machine,
    needed: int,
    check_resources: bool,
) -> tuple[HugePages, list[str]]:
    asked = config.host.huge_pages
    if file_system is not None and file_system.kind == "hugetlbfs":
        if asked in ("thp", "off"):
            raise BackingUnavailable(
                backing=backing,
                problem=f'{file_system.path} is a hugetlbfs, and host.huge_pages is "{asked}"',
                remedy='set host.huge_pages to "auto", or host.path to a tmpfs',
            )
        return HugePages.HUGETLB, []
    if asked == "off":
        return HugePages.BASE, []
    pool = machine.huge_pool.available if machine.huge_pool else 0
    if asked == "hugetlb":
        if backing is not Backing.MEMFD:
            raise BackingUnavailable(
                backing=backing,
                problem="a tmpfs has no hugetlb pages",
                remedy='set host.backing to "memfd", or to "file" with a hugetlbfs in host.path',
            )
        if check_resources and pool < needed:
            raise NotEnoughHugePages(needed=needed, available=pool)
        return HugePages.HUGETLB, []
    if asked == "auto" and backing is Backing.MEMFD and pool >= needed:
        return HugePages.HUGETLB, []
    return _thp(asked == "thp", backing, machine)


def _thp(insist: bool, backing: Backing, machine: Machine) -> tuple[HugePages, list[str]]:
    problem = None
    if machine.thp_enabled is None:
        problem = "this kernel has no transparent huge pages"
    elif machine.thp_shmem in ("never", "deny", None) and machine.kernel < COLLAPSE_KERNEL:
        problem = f"{SHMEM_KNOB} is {machine.thp_shmem} and this kernel cannot collapse pages afterwards"
    if problem is None:
        return HugePages.THP, []
    remedy = f'write "advise" to {SHMEM_KNOB}, or reserve pages with vm.nr_hugepages'
    if insist:
        raise BackingUnavailable(backing=backing, problem=problem, remedy=remedy)
    return HugePages.BASE, [f"no huge pages: {problem}; {remedy}"]


def _page_bytes(huge_pages: HugePages, file_system: FileSystem | None) -> int:
    if huge_pages is HugePages.HUGETLB and file_system is not None:
        return file_system.page_bytes
    return mmap.PAGESIZE if huge_pages is HugePages.BASE else THP_BYTES


# Segments


def _shards(table: TableGeometry, options: ResolvedOptions) -> list[tuple[str, int | None, Shard]]:
    """The shards of a table on this node: (segment id, rank, rows)."""
    if options.replication is Replication.PER_NODE:
        return [(f"L{table.layer_id}", None, whole(table))]
    size = options.tp_size
    return [(f"L{table.layer_id}.r{rank}of{size}", rank, shard(table, rank, size)) for rank in options.ranks_of_node]


def _round_up(rows: Shard, page_bytes: int) -> int:
    """Bytes of a segment. An empty shard gets a page too: it is mapped and handed out like any other."""
    return max(1, -(-rows.rows * ROW_BYTES // page_bytes)) * page_bytes


def _segment_bytes(tables: tuple[TableGeometry, ...], options: ResolvedOptions, page_bytes: int) -> int:
    return sum(_round_up(rows, page_bytes) for table in tables for _, _, rows in _shards(table, options))


def _segments(
    tables: tuple[TableGeometry, ...], options: ResolvedOptions, backing: Backing, page_bytes: int
) -> tuple[SegmentInfo, ...]:
    return tuple(
        SegmentInfo(
            id=name,
            layer_id=table.layer_id,
            shard=rows,
            rank=rank,
            nbytes=_round_up(rows, page_bytes),
            backing=backing,
            row_format=RowFormat.PACKED,
            page_bytes=page_bytes,
        )
        for table in tables
        for name, rank, rows in _shards(table, options)
    )


# Checks


def _numa(config: Config, machine: Machine) -> tuple[NumaPolicy, list[str]]:
    present = tuple(node.id for node in machine.nodes)
    if config.host.numa == "none":
        if len(present) < 2:
            return NumaPolicy("none"), []
        return NumaPolicy("none"), [
            f"host.numa is none on {len(present)} NUMA nodes: pages go to the nodes of the loader's threads, unevenly; "
            'set host.numa to "interleave" or to the GPUs\' nodes'
        ]
    if not present:
        raise BackingUnavailable(
            backing="NUMA policy",
            problem="this machine does not tell its NUMA nodes",
            remedy='set host.numa to "none"',
        )
    if config.host.numa == "interleave":
        return NumaPolicy("interleave", present), []
    nodes: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", config.host.numa):
        span = range(int(first), int(last or first) + 1)
        # The ends first: the list between may be of any length.
        if not span or not {span[0], span[-1]} <= set(present) or not set(present) >= set(span):
            raise BackingUnavailable(
                backing="NUMA policy",
                problem=f'host.numa "{config.host.numa}" names nodes that have no memory',
                remedy=f"use nodes of {list(present)}",
            )
        nodes.update(span)
    return NumaPolicy("bind", tuple(sorted(nodes))), []


def _check_memory(config: Config, machine: Machine, needed: int, numa: NumaPolicy) -> list[str]:
    if config.host.memory_check == "off":
        return []
    available, source = available_host_bytes(machine)
    if numa.mode == "bind":
        bound = sum(node.available for node in machine.nodes if node.id in numa.nodes)
        available, source = min((available, source), (bound, f"NUMA nodes {','.join(map(str, numa.nodes))}"))
    if needed <= available:
        return []
    refusal: EngramError = NotEnoughMemory(needed=needed, available=available, source=source)
    if config.host.memory_check == "strict":
        raise refusal
    return [f"going on, since host.memory_check is warn: {refusal}"]


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _log_line(
    options: ResolvedOptions,
    backing: Backing,
    reason: str,
    huge_pages: HugePages,
    numa: NumaPolicy,
    tables: tuple[TableGeometry, ...],
    segments: tuple[SegmentInfo, ...],
) -> str:
    layers = ", ".join(f"layer {table.layer_id}: {table.rows} rows {_gib(table.nbytes)}" for table in tables)
    total = _gib(sum(segment.nbytes for segment in segments))
    return (
        f"DeepSeek-V4.1 Engram tables: placement={options.placement} replication={options.replication} "
        f"lookup={options.lookup} tp_size={options.tp_size} nnodes={options.nnodes} node_rank={options.node_rank} "
        f"backing={backing} ({reason}) row_format={segments[0].row_format} huge_pages={huge_pages} numa={numa}; "
        f"{layers}; this node holds {len(segments)} segments, {total}"
    )
