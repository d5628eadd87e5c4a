"""CUDA driver calls, each checked: a code other than success becomes CudaCallFailed with a remedy.

Importing this module needs no driver; the first call does. The bindings come from `cuda.bindings`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from engram_client.errors import CudaCallFailed, CudaUnavailable

_EARLIER_FAULT = (
    "an earlier kernel of this process failed and its context is lost: restart the process, "
    "and run it under compute-sanitizer to find the kernel"
)
_REMEDIES = {
    "CUDA_ERROR_ILLEGAL_ADDRESS": _EARLIER_FAULT,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _EARLIER_FAULT,
    "CUDA_ERROR_LAUNCH_FAILED": _EARLIER_FAULT,
    "CUDA_ERROR_ASSERT": _EARLIER_FAULT,
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is faulty: see nvidia-smi -q -d ECC",
    "CUDA_ERROR_OUT_OF_MEMORY": "free GPU memory, or lower what the engine reserves for its cache",
    "CUDA_ERROR_NO_DEVICE": "make a GPU visible to this process (CUDA_VISIBLE_DEVICES, the container's GPUs)",
    "CUDA_ERROR_INVALID_DEVICE": "name a GPU that this process sees (CUDA_VISIBLE_DEVICES)",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA does not survive a fork: start the process with spawn or exec",
    "CUDA_ERROR_INVALID_CONTEXT": "make the table's GPU current (torch.cuda.set_device) before the call",
    "CUDA_ERROR_INVALID_HANDLE": "use a stream of the GPU that the table is mapped on",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "remove the kernel cache, and update nvidia-cuda-nvrtc to a version for this GPU",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the container's CUDA libraries and the driver differ: update the older",
}
_NO_REMEDY = "see the driver's log (dmesg, Xid) and report it with this message"


@functools.cache
def bindings() -> Any:
    """The module `cuda.bindings.driver`, initialised. Raises CudaUnavailable, or CudaCallFailed when cuInit fails."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise CudaUnavailable(
            problem=f"cuda.bindings cannot be imported ({error})", remedy="install engram-table-server[cuda]"
        ) from error
    try:
        result = driver.cuInit(0)
    except RuntimeError as error:  # what the bindings raise when there is no libcuda to load
        raise CudaUnavailable(
            problem=f"no driver ({error})", remedy="install the NVIDIA driver, or run the container with GPUs"
        ) from error
    _check(driver, "cuInit", result[0])
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Calls `cuda.bindings.driver.<name>`; returns its one result, a tuple of several, or None.

    Raises CudaCallFailed or CudaUnavailable.
    """
    driver = bindings()
    code, *results = getattr(driver, name)(*arguments)
    _check(driver, name, code)
    return results[0] if len(results) == 1 else tuple(results) or None


def _check(driver: Any, name: str, code: Any) -> None:
    if int(code) != 0:
        raise failure(driver, name, code)


def failure(driver: Any, name: str, code: Any) -> CudaCallFailed:
    """The error that says what `code`, returned by `name`, means."""
    code = driver.CUresult(int(code))
    _, text = driver.cuGetErrorString(code)
    meaning = text.decode() if text else "no description"
    return CudaCallFailed(call=name, name=code.name, meaning=meaning, remedy=_REMEDIES.get(code.name, _NO_REMEDY))


def attribute(device: Any, name: str) -> int:
    """Device attribute `name` without its prefix, e.g. "MULTIPROCESSOR_COUNT"."""
    kind = bindings().CUdevice_attribute
    return int(call("cuDeviceGetAttribute", getattr(kind, f"CU_DEVICE_ATTRIBUTE_{name}"), device))


@contextlib.contextmanager
def primary_context(ordinal: int) -> Iterator[Any]:
    """Makes the primary context of GPU `ordinal` (the one torch uses) current; yields the device."""
    device = call("cuDeviceGet", ordinal)
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", device))
    try:
        yield device
    finally:
        # Never released: kernels stay loaded in it for the life of the process.
        call("cuCtxPopCurrent")
