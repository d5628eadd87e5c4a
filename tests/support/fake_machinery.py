"""The parts under the fake driver: its settings, what makes a method a driver call, and mmap at chosen addresses."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import msgspec

from engram_client.cuda.driver import call_failed
from engram_client.errors import CudaCallFailed


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    driver: bool = True
    """False: a machine without a driver."""
    gpus: int = 2
    gpu_bytes: int = 1 << 30
    host_numa: bool = True
    """Whether memory can be created at a NUMA node of the host."""
    fabric: str = "no"
    """no, yes, or lies: the attribute says yes and creating answers NOT_PERMITTED."""
    export_again: bool = False
    """Whether imported memory can be exported; the driver 580 answers INVALID_VALUE, whatever the kind of handle."""
    node: int = 0
    """Which machine of several it is: no GPU of one has the UUID of another's."""
    peers: bool = True
    ats: bool = False
    """Whether GPUs read pageable host memory through the CPU's page tables."""
    integrated: bool = False
    """Whether GPU memory is the host's own."""
    coherent: bool = False
    """Whether GPU memory is a NUMA node of the host: GPU 0's is node 8."""
    granularity: int = 2 << 20
    register_limit: int = 1 << 62
    """A larger range in one call is refused, as some drivers do from 512 GiB."""
    scattered: bool = False
    """Registered ranges get device addresses that are not in line."""
    bad_copy: int = 0
    """The copy to the GPU, counted from 1 in each process, that arrives with one bit wrong."""
    exclusive: str | None = None
    """Lock file: registering while another process does fails."""


_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="Caller")


class Caller(Protocol):
    """What a driver does around each of its calls."""

    lock: Any

    def enter(self, call: str, context: bool) -> None: ...

    def log(self, **event: Any) -> None: ...


def calls_in(log: Path | str) -> list[dict[str, Any]]:
    """What ENGRAM_FAKE_LOG names, a call an item; nothing where nobody has called. Without a line that another process
    is still writing."""
    path = Path(log)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kernels_in(log: Path | str) -> list[str]:
    """The names of the kernels that were launched."""
    return [event["args"][0].split("'")[1] for event in calls_in(log) if event["call"] == "cuLaunchKernel"]


def fail(call: str, name: str, meaning: str = "the fake driver says so") -> CudaCallFailed:
    return call_failed(call, f"CUDA_ERROR_{name}", meaning)


def driver_call(
    name: str, *, context: bool = False
) -> Callable[[Callable[Concatenate[_S, _P], _T]], Callable[Concatenate[_S, _P], _T]]:
    """A method that is the driver call `name`: counted, logged, made to fail on demand."""

    def decorate(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
        @functools.wraps(method)
        def wrapped(self: _S, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self.lock:
                try:
                    self.enter(name, context)
                    result = method(self, *args, **kwargs)
                except CudaCallFailed as error:
                    self.log(call=name, args=[str(a)[:200] for a in args], error=error.name)
                    raise
                self.log(call=name, args=[str(a)[:200] for a in args], result=str(result))
                return result

        return cast(Callable[Concatenate[_S, _P], _T], wrapped)

    return decorate


# mmap at chosen addresses

MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def mmap_at(address: int | None, nbytes: int, rights: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, rights, flags, fd, 0)
    if result is None or result == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return int(result)


def munmap(address: int, nbytes: int) -> None:
    if nbytes and _libc.munmap(address, nbytes):
        raise OSError(ctypes.get_errno(), "munmap")


def is_mapped(address: int, nbytes: int, writable: bool) -> bool:
    at = address
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            start, stop = (int(part, 16) for part in span.split("-"))
            if start <= at < stop and rights[0] == "r" and (rights[1] == "w" or not writable):
                at = stop
    return at >= address + nbytes
