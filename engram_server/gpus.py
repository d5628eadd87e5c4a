"""The GPUs of this node and what can be allocated on them, asked without a context and before any plan.

A driver's attributes promise more than it keeps: what matters (memory at a host node, FABRIC handles) is tried
once with a small block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from engram_client.cuda.access import cuda_driver
from engram_client.cuda.driver import Driver, HandleTypes, Location
from engram_client.errors import CudaCallFailed, CudaError, GpuNotFound
from engram_client.protocol import Placement
from engram_server.config import Config

log = logging.getLogger(__name__)

EXPORTS = HandleTypes.POSIX_FD
"""How host memory is handed out; memory of GPUs also as FABRIC, where that works."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `ordinal` is for this process's own driver calls; others know it by `uuid` only."""

    ordinal: int
    uuid: str
    name: str
    free: int
    total: int
    granularity: int
    """Bytes that allocations on it are multiples of."""
    host_node: int
    """The host's NUMA node beside it; 0 where the driver does not tell."""
    peers: tuple[str, ...] = ()
    """UUIDs of the GPUs whose memory it can read."""
    ats: bool = False
    """Whether it reads pageable host memory through the CPU's page tables."""
    integrated: bool = False
    """Whether its memory is the host's own."""
    numa_node: int | None = None
    """The NUMA node that its memory is to the host, where a coherent link makes it one."""


class Gpus(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs that the daemon uses, in rank order. Each `..._problem` is "" where the thing works."""

    count: int
    devices: tuple[Gpu, ...] = ()
    """Empty where only their number was asked for."""
    problem: str = ""
    """Why no GPU can be used."""
    device_problem: str = ""
    """Why the driver cannot allocate GPU memory that other processes map."""
    host_problem: str = ""
    """Why the driver cannot allocate host memory."""
    host_granularity: int = 2 << 20
    fabric_problem: str = ""
    asked: str = ""
    """The `question` that this answers."""

    @classmethod
    def none(cls, problem: str) -> Gpus:
        return cls(count=0, problem=problem, device_problem=problem, host_problem=problem, fabric_problem=problem)


def read(config: Config) -> Gpus:
    """The GPUs of `config.devices`, or all in PCI order, as far as the configuration needs to know them.

    Host memory that is not the driver's needs their number only: such a daemon never initialises CUDA.
    Raises GpuNotFound when `devices` names one that is not there.
    """
    return msgspec.structs.replace(_read(config), asked=question(config))


def question(config: Config) -> str:
    """What of the configuration decides how its GPUs are asked for: equal ones had the same answer a while ago."""
    return f"{config.engram.placement}, backing {config.host.backing}, devices {config.devices}"


def _read(config: Config) -> Gpus:
    needs_driver = config.engram.placement is Placement.GPU or config.host.backing in ("auto", "cuda_host")
    if not needs_driver:
        number = len(config.devices) if config.devices is not None else count()
        return Gpus(count=number, host_problem="not asked for")
    try:
        return ask(cuda_driver(), config.devices)
    except CudaError as error:
        return Gpus.none(str(error))


def ask(driver: Driver, wanted: Sequence[int | str] | None) -> Gpus:
    """What `driver` knows of the GPUs `wanted`. Raises GpuNotFound or CudaCallFailed."""
    ordinals = choose(driver, wanted)
    uuids = {ordinal: driver.device_uuid(ordinal) for ordinal in ordinals}
    fabric_problem = _fabric_problem(driver, ordinals)
    devices = []
    device_problem = ""
    for ordinal in ordinals:
        free, total = driver.memory_info(ordinal)
        try:
            unit = driver.granularity(Location.device(ordinal), device_exports(fabric_problem))
        except CudaCallFailed as error:  # no virtual memory management: host tables can be served all the same
            unit, device_problem = 2 << 20, f"{error.call} answers {error.name}"
        devices.append(
            Gpu(
                ordinal=ordinal,
                uuid=uuids[ordinal],
                name=driver.device_name(ordinal),
                free=free,
                total=total,
                granularity=unit,
                host_node=max(0, driver.attribute(ordinal, "HOST_NUMA_ID")),
                peers=tuple(uuids[o] for o in ordinals if o != ordinal and driver.can_access_peer(ordinal, o)),
                ats=bool(driver.attribute(ordinal, "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")),
                integrated=bool(driver.attribute(ordinal, "INTEGRATED")),
                numa_node=driver.attribute(ordinal, "NUMA_ID") if driver.attribute(ordinal, "NUMA_CONFIG") else None,
            )
        )
    node = devices[0].host_node if devices else 0
    host_problem = _host_problem(driver, ordinals, node)
    return Gpus(
        count=len(devices),
        devices=tuple(devices),
        problem="" if devices else "no CUDA device was found",
        device_problem=device_problem,
        host_problem=host_problem,
        host_granularity=2 << 20 if host_problem else driver.granularity(Location.host(node), EXPORTS),
        fabric_problem=fabric_problem,
    )


def device_exports(fabric_problem: str) -> HandleTypes:
    """How memory of GPUs is handed out."""
    return EXPORTS if fabric_problem else EXPORTS | HandleTypes.FABRIC


def choose(driver: Driver, wanted: Sequence[int | str] | None) -> list[int]:
    """Ordinals of the GPUs wanted: indices in PCI order (as nvidia-smi counts), or UUIDs. Raises GpuNotFound."""
    present = sorted(range(driver.device_count()), key=driver.device_pci_bus_id)
    if wanted is None:
        return present
    by_name = {driver.device_uuid(ordinal): ordinal for ordinal in present}
    chosen = []
    for one in wanted:
        if isinstance(one, int) and 0 <= one < len(present):
            chosen.append(present[one])
        elif isinstance(one, str) and one in by_name:
            chosen.append(by_name[one])
        else:
            raise GpuNotFound(device=str(one), present=list(by_name))
    return chosen


def _host_problem(driver: Driver, ordinals: Sequence[int], node: int) -> str:
    if not ordinals:
        return "no CUDA device was found"
    if not driver.attribute(ordinals[0], "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
        return "the driver does not allocate at the host's NUMA nodes"
    return _probe(driver, Location.host(node), EXPORTS)


def _fabric_problem(driver: Driver, ordinals: Sequence[int]) -> str:
    """On any of the GPUs: "supported" says nothing about what the node's configuration permits."""
    if not ordinals:
        return "no CUDA device was found"
    for ordinal in ordinals:
        if not driver.attribute(ordinal, "HANDLE_TYPE_FABRIC_SUPPORTED"):
            return f"GPU {driver.device_uuid(ordinal)} does not support it"
        if problem := _probe(driver, Location.device(ordinal), EXPORTS | HandleTypes.FABRIC):
            log.warning("fabric unusable: %s; descriptors are used", problem)
            return problem
    return ""


def _probe(driver: Driver, location: Location, types: HandleTypes) -> str:
    """Creates, exports and imports a small block; what failed, or ""."""
    handles = []
    try:
        handles.append(driver.mem_create(driver.granularity(location, types), location, types))
        if HandleTypes.FABRIC in types:
            handles.append(driver.import_fabric(driver.export_fabric(handles[0])))
        return ""
    except CudaCallFailed as error:
        return f"{error.call} answers {error.name}"
    finally:
        for handle in handles:
            driver.mem_release(handle)


def count() -> int:
    """How many GPUs the driver shows, asked from NVML: no CUDA, no import on a machine without a driver."""
    import pynvml  # costs 40 ms, so only when asked

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("no GPU: %s", error)
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
