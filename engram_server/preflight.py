"""Will it work here? The checks before anything is allocated: the daemon's own, and `engram-ctl doctor`'s.

Reads files of the checkpoint's folder and of the kernel, takes no memory and changes nothing. What cannot work
is an error of `engram_client.errors`; everything else is a finding.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from engram_client.errors import EngramError, NotEnoughMemory
from engram_client.layout import ModelGeometry, parse_model_geometry
from engram_client.protocol import Backing
from engram_server import gpus, surroundings
from engram_server.checkpoint import TableSource, open_checkpoint, read_model_geometry
from engram_server.config import Config
from engram_server.findings import Finding, Level, gib, of_error
from engram_server.gpus import Gpus
from engram_server.machine import Machine, available_host_bytes
from engram_server.plan import COLLAPSE_KERNEL, LOADER_BYTES, SHMEM_KNOB, HugePages, Plan, make_plan
from engram_server.plan_gpu import LOADER_HOST_BYTES
from engram_server.process import UNLIMITED, Process

POPULATE_KERNEL = (5, 14)
"""The first Linux with MADV_POPULATE_WRITE, which takes memory or fails, and never gives SIGBUS later."""
OPEN_FILES = 4096
"""Descriptors that let a node's usual clients attach: one a lease, and the segments."""
SHMEM_REFUSES = ("never", "deny", None)
PLAN_SAYS = frozenset({"memory", "thp", "numa"})
"""Findings that a plan makes remarks or errors of itself."""


class Source(msgspec.Struct, frozen=True):
    """The tables' shape, and where their bytes are: None where they are generated."""

    model: ModelGeometry
    tables: tuple[TableSource, ...] | None


class Prepared(msgspec.Struct, frozen=True):
    """All that is known before the first byte of memory is taken."""

    source: Source
    machine: Machine
    gpus: Gpus
    plan: Plan
    findings: tuple[Finding, ...]
    """Of level warn: what the plan itself does not remark on."""


def prepare(config: Config, *, check_resources: bool = True) -> Prepared:
    """What the daemon does before it allocates. check_resources=False: the tables are in memory already.

    Slow where a CUDA driver is asked for the first time. Raises the error that `engram-server` would end with:
    a CheckpointError, ConfigError or ResourceError.
    """
    source = read_source(config)
    machine = Machine.read(folder=config.host.path)
    found = gpus.read(config)
    plan = make_plan(config, source.model, machine, found, check_resources=check_resources)
    seen = (finding for finding in _seen(config, machine, found, plan) if finding.level is not Level.OK)
    return Prepared(source, machine, found, plan, tuple(finding for finding in seen if finding.id not in PLAN_SAYS))


def _seen(config: Config, machine: Machine, found: Gpus, plan: Plan) -> Iterator[Finding]:
    """What `engram-ctl doctor` finds too, but for what it measures."""
    yield from surroundings.place_findings(found, plan)
    yield from surroundings.memory_link_findings(found, config)
    yield from surroundings.imex_findings(found)
    yield from machine_findings(machine, config, plan)
    yield from process_findings(Process.read(), plan)


def read_source(config: Config) -> Source:
    """Raises a CheckpointError, or ConfigInvalid for a geometry that makes no table."""
    if config.load_format == "auto":
        opened = open_checkpoint(str(config.model_path))
        return Source(opened.model, opened.sources)
    if config.geometry is not None:
        return Source(parse_model_geometry(config.geometry, "geometry"), None)
    return Source(read_model_geometry(str(config.model_path)), None)


def process_findings(process: Process, plan: Plan | None) -> Iterator[Finding]:
    """What this process is allowed: descriptors, locked memory, system calls, namespaces."""
    yield _open_files(process)
    yield _memlock(process, plan)
    yield _system_calls(process, plan)
    if process.own_pid_namespace is not None:
        seen = "a PID namespace of its own" if process.own_pid_namespace else "the host's PID namespace"
        yield Finding(id="pid_namespace", level=Level.OK, seen=f"{seen}; handing tables over needs none in common")


def machine_findings(machine: Machine, config: Config | None, plan: Plan | None) -> Iterator[Finding]:
    """What the machine has, judged against the plan where there is one."""
    yield _memory(machine, config, plan)
    for limit in machine.limits:
        yield Finding(
            id="cgroup",
            level=Level.OK,
            seen=f"{limit.path} allows {gib(limit.limit)}, {gib(limit.available)} of it free",
        )
    yield _huge_pool(machine, plan)
    yield _thp(machine, config, plan)
    yield _shm(machine)
    yield _numa(machine, config)
    yield _kernel(machine)


# The machine


def _memory(machine: Machine, config: Config | None, plan: Plan | None) -> Finding:
    available, source = available_host_bytes(machine)
    seen = f"{gib(available)} of {gib(machine.mem_total)} available ({source})"
    if plan is None or config is None or plan.huge_pages is HugePages.HUGETLB or config.host.memory_check == "off":
        return Finding(id="memory", level=Level.OK, seen=seen)
    needed = LOADER_BYTES + plan.needed_bytes
    if plan.backing is Backing.CUDA_DEVICE:
        needed = LOADER_HOST_BYTES * len({segment.device for segment in plan.segments})
    if needed <= available:
        return Finding(id="memory", level=Level.OK, seen=f"{seen}; the tables and their loader need {gib(needed)}")
    level = Level.FAIL if config.host.memory_check == "strict" else Level.WARN
    return of_error("memory", NotEnoughMemory(needed=needed, available=available, source=source), level)


def _huge_pool(machine: Machine, plan: Plan | None) -> Finding:
    pool = machine.huge_pool
    if pool is None:
        return Finding(id="hugetlb", level=Level.OK, seen="this kernel has no pool of 2 MiB pages")
    seen = f"{pool.free} of {pool.total} reserved huge pages are free, {gib(pool.available)}"
    used = plan is not None and plan.huge_pages is HugePages.HUGETLB
    return Finding(id="hugetlb", level=Level.OK, seen=seen + (": the tables will be in them" if used else ""))


def _thp(machine: Machine, config: Config | None, plan: Plan | None) -> Finding:
    """Judged as the plan does, which falls back to small pages without failing."""
    knob = f"{SHMEM_KNOB} is {machine.thp_shmem}"
    if plan is not None and plan.huge_pages in (HugePages.HUGETLB, HugePages.DRIVER):
        return Finding(id="thp", level=Level.OK, seen=f"{knob}; not needed, the tables are in other huge pages")
    if config is not None and config.host.huge_pages == "off":
        return Finding(id="thp", level=Level.OK, seen=f"{knob}; huge pages are switched off by host.huge_pages")
    remedy = f'write "advise" to {SHMEM_KNOB}, or reserve pages with vm.nr_hugepages: lookups get faster'
    if machine.thp_enabled is None:
        return Finding(
            id="thp", level=Level.WARN, seen="this kernel has no transparent huge pages", remedy="reserve huge pages"
        )
    if machine.thp_shmem not in SHMEM_REFUSES:
        return Finding(id="thp", level=Level.OK, seen=f"{knob}: shared memory gets huge pages when it is touched")
    if machine.kernel >= COLLAPSE_KERNEL:
        return Finding(id="thp", level=Level.OK, seen=f"{knob}; this kernel collapses pages afterwards all the same")
    return Finding(
        id="thp", level=Level.WARN, seen=f"{knob} and this kernel cannot collapse pages afterwards", remedy=remedy
    )


def _shm(machine: Machine) -> Finding:
    if machine.shm is None:
        return Finding(id="dev_shm", level=Level.OK, seen='there is no /dev/shm; only host.backing "posix_shm" uses it')
    size = f"/dev/shm has {gib(machine.shm.available)} of {gib(machine.shm.total)} free"
    return Finding(id="dev_shm", level=Level.OK, seen=f'{size}; only host.backing "posix_shm" uses it')


def _numa(machine: Machine, config: Config | None) -> Finding:
    nodes = ", ".join(f"node {node.id}: {gib(node.available)} of {gib(node.total)} free" for node in machine.nodes)
    if len(machine.nodes) < 2:
        return Finding(id="numa", level=Level.OK, seen=nodes or "one node, or this kernel does not tell its nodes")
    if config is not None and config.host.numa != "none":
        return Finding(id="numa", level=Level.OK, seen=f"{nodes}; host.numa is {config.host.numa}")
    remedy = "set host.numa to \"interleave\" or to the GPUs' nodes: pages else go where the loader's threads run"
    return Finding(id="numa", level=Level.WARN, seen=f"{nodes}; host.numa is none", remedy=remedy)


def _kernel(machine: Machine) -> Finding:
    name = f"Linux {machine.kernel[0]}.{machine.kernel[1]}"
    if machine.kernel >= COLLAPSE_KERNEL:
        return Finding(id="kernel", level=Level.OK, seen=f"{name} has MADV_POPULATE_WRITE and MADV_COLLAPSE")
    if machine.kernel >= POPULATE_KERNEL:
        return Finding(id="kernel", level=Level.OK, seen=f"{name} has MADV_POPULATE_WRITE, no MADV_COLLAPSE")
    return Finding(
        id="kernel",
        level=Level.WARN,
        seen=f"{name} has no MADV_POPULATE_WRITE: memory is taken with fallocate, in small pages",
        remedy="use Linux 5.14 or newer (6.1 or newer for huge pages in shared memory)",
    )


# The process


def _open_files(process: Process) -> Finding:
    limit = process.open_files
    if limit is None or limit >= OPEN_FILES:
        return Finding(id="open_files", level=Level.OK, seen=f"{limit or 'an unknown number of'} descriptors allowed")
    return Finding(
        id="open_files",
        level=Level.WARN,
        seen=f"the hard limit of open files is {limit}, and each client holds one here",
        remedy=f"raise it: LimitNOFILE={OPEN_FILES} or more in the unit, ulimit -Hn in a shell",
    )


def _memlock(process: Process, plan: Plan | None) -> Finding:
    """Nobody here locks memory; what pins it for a GPU counts against this limit with some drivers."""
    if process.memlock is None or process.memlock == UNLIMITED:
        return Finding(id="memlock", level=Level.OK, seen="locked memory is not limited")
    seen = f"locked memory is limited to {gib(process.memlock)}"
    return Finding(id="memlock", level=Level.OK, seen=f"{seen}; only ranks that register the tables with a GPU mind")


def _system_calls(process: Process, plan: Plan | None) -> Finding:
    filtered = {None: "unknown filters", True: "system calls are filtered", False: "no filter"}[process.seccomp]
    if process.memfd_problem:
        return Finding(
            id="system_calls",
            level=Level.FAIL,
            seen=f"{filtered}; {process.memfd_problem}",
            remedy='allow memfd_create and fcntl, or set host.backing to "posix_shm"',
        )
    if process.mbind_problem and plan is not None and plan.numa.mode != "none":
        return Finding(
            id="system_calls",
            level=Level.FAIL,
            seen=f"{filtered}; memory cannot be bound to NUMA nodes ({process.mbind_problem})",
            remedy='add CAP_SYS_NICE to the container, or set host.numa to "none"',
        )
    return Finding(id="system_calls", level=Level.OK, seen=f"{filtered}; memfds can be made and sealed")


def of_refusal(error: EngramError) -> Finding:
    """The finding of an error that `make_plan` or `read_source` raised."""
    return of_error(_SUBJECT.get(error.code, "plan" if error.exit_code != 4 else "checkpoint"), error)


_SUBJECT = {
    "NotEnoughGpuMemory": "gpu",
    "TooFewGpus": "gpu",
    "PeerAccessMissing": "peer_access",
    "NotEnoughMemory": "memory",
    "NotEnoughSpace": "space",
    "NotEnoughHugePages": "hugetlb",
    "NoGpu": "gpu",
    "GpuNotFound": "gpu",
    "BackingUnavailable": "backing",
}
