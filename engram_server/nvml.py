"""The GPUs as NVML describes them: no CUDA, no context, and nothing on a machine without a driver."""

from __future__ import annotations

from typing import Any

import msgspec


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    uuid: str
    total: int
    free: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """`problem` says why there are no GPUs; empty where there are some."""

    driver: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    problem: str = ""


def inventory() -> Inventory:
    """The GPUs that the driver shows. Raises nothing: no driver is an answer."""
    import pynvml  # costs 40 ms, so only when asked

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Inventory(problem=str(error))
    try:
        found = tuple(_facts(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return Inventory(driver=driver, gpus=found, problem="" if found else "the driver shows no GPU")
    except pynvml.NVMLError as error:
        return Inventory(problem=str(error))
    finally:
        pynvml.nvmlShutdown()


def _facts(pynvml: Any, index: int) -> GpuFacts:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return GpuFacts(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        total=int(memory.total),
        free=int(memory.free),
    )
