"""One process of test_memory.py: `python -m tests.gpu.memory_child COMMAND JSON`. Prints one JSON object.

Each command runs in a process of its own, since CUDA does not survive a fork and a refused write costs the
context. No torch: what is tested is what a rank does beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import sys
import time
from typing import Any

import numpy as np

from engram_client.cuda.access import cuda_driver
from engram_client.cuda.driver import Driver, HandleTypes, Location
from engram_client.errors import EngramError
from engram_client.layout import RowFormat, Shard, TableGeometry
from engram_client.mapping.registered import RegisteredMapping
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import Backing, SegmentInfo
from engram_server import device_fill
from engram_server.device_target import DeviceTarget
from engram_server.load_job import LoadJob

PIECE = 64 << 20
SOURCE = r"""
typedef unsigned long long u64;
extern "C" __global__ void checksum(const u64* words, u64 count, u64* out) {
    u64 sum = 0;
    for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)
        sum += words[i] * (i | 1);
    atomicAdd(out, sum);
}
extern "C" __global__ void poke(u64* words) { words[threadIdx.x] = 7; }
"""


def pattern(start: int, nbytes: int) -> np.ndarray:
    """The bytes that memory is filled with, from byte `start` on."""
    index = np.arange(start // 8, (start + nbytes) // 8, dtype=np.uint64)
    return (index * np.uint64(0x9E3779B97F4A7C15) ^ (index >> np.uint64(7))).view(np.uint8)


def expected_checksum(nbytes: int) -> int:
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for start in range(0, nbytes, PIECE):
            words = pattern(start, min(PIECE, nbytes - start)).view(np.uint64)
            index = np.arange(start // 8, start // 8 + len(words), dtype=np.uint64)
            total += (words * (index | np.uint64(1))).sum(dtype=np.uint64)
    return int(total)


class Kernels:
    """The two kernels, in the current context."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        from cuda.bindings import driver as cu
        from cuda.core import Program, ProgramOptions

        self._cu = cu
        arch = "".join(str(driver.attribute(ordinal, f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR"))
        code = Program(SOURCE, code_type="c++", options=ProgramOptions(std="c++17", arch=f"sm_{arch}")).compile("cubin")
        self._library = self._call("cuLibraryLoadData", bytes(code.code), [], [], 0, [], [], 0)

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *rest = getattr(self._cu, name)(*arguments)
        if int(code):
            raise RuntimeError(code.name)
        return rest[0] if rest else None

    def _launch(self, name: str, blocks: int, values: tuple[int, ...], kinds: tuple[Any, ...]) -> None:
        kernel = self._call("cuLibraryGetKernel", self._library, name.encode())
        function = self._call("cuKernelGetFunction", kernel)
        self._call("cuLaunchKernel", function, blocks, 1, 1, 256, 1, 1, 0, 0, (values, kinds), 0)
        self._call("cuCtxSynchronize")

    def checksum(self, address: int, nbytes: int) -> int:
        out = int(self._call("cuMemAlloc", 8))
        self._call("cuMemsetD32", out, 0, 2)
        self._launch(
            "checksum", 1024, (address, nbytes // 8, out), (ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_void_p)
        )
        found = ctypes.c_uint64()
        self._call("cuMemcpyDtoH", ctypes.addressof(found), out, 8)
        self._call("cuMemFree", out)
        return found.value

    def poke(self, address: int) -> str:
        """The name of the error that a write ends in."""
        try:
            self._launch("poke", 1, (address,), (ctypes.c_void_p,))
        except RuntimeError as error:
            return str(error)
        return "written"


def location(spec: list[Any]) -> Location:
    return Location.device(spec[1]) if spec[0] == "device" else Location.host(spec[1])


def owner(spec: list[Any], nbytes: int, channel: int) -> dict[str, Any]:
    """Creates without a context, sends the descriptor, and says what that cost; waits until its stdin ends."""
    import pynvml

    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def used() -> list[int]:
        return [int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in gpus]

    before = used()
    started = time.perf_counter()
    driver = cuda_driver()
    init_s = time.perf_counter() - started
    where, types = location(spec), HandleTypes.POSIX_FD
    unit = driver.granularity(where, types)
    started = time.perf_counter()
    handle = driver.mem_create(nbytes, where, types)
    create_s = time.perf_counter() - started
    socket.send_fds(socket.socket(fileno=channel), [b"x"], [driver.export_fd(handle)])
    taken = [after - at for after, at in zip(used(), before, strict=True)]
    print(json.dumps({"init_s": init_s, "create_s": create_s, "granularity": unit, "taken": taken}), flush=True)
    sys.stdin.read()
    driver.mem_release(handle)
    return {}


def fill_host(fd: int, nbytes: int) -> dict[str, Any]:
    """Through a context-free map, as the loader does."""
    started = time.perf_counter()
    mapping = VmmMapping(fd, nbytes, cuda_driver(), None, host_access=True, writable=True)
    map_s = time.perf_counter() - started
    target = np.frombuffer(mapping.view, np.uint8)
    for start in range(0, nbytes, PIECE):
        target[start : start + PIECE] = pattern(start, min(PIECE, nbytes - start))
    return {"map_s": map_s}


def fill_device(fd: int, nbytes: int, uuid: str) -> dict[str, Any]:
    """Through the loader's staging buffers, as rows; planar, so that the bytes are the pattern's."""
    rows = nbytes // 264
    info = SegmentInfo(
        id="test",
        layer_id=0,
        shard=Shard(row_start=0, row_stop=rows, columns=None),
        rank=None,
        nbytes=nbytes,
        backing=Backing.CUDA_DEVICE,
        row_format=RowFormat.PLANAR,
        page_bytes=2 << 20,
        device=uuid,
    )
    driver = cuda_driver()
    target = DeviceTarget(info, fd, driver)
    whole = target.span(0, rows)
    job = LoadJob(source="a pattern", tables=(TableGeometry(layer_id=0, columns=(rows,)),))
    with driver.context(target.ordinal):
        staging = device_fill.Staging(driver, job.threads, device_fill.chunk_bytes(job))
    started = time.perf_counter()
    device_fill.fill(job, [target], staging, lambda: PatternFeed(whole.values))
    fill_s = time.perf_counter() - started
    last = memoryview(bytearray(1 << 20))
    at = rows * 264 // 8 * 8 - len(last)
    with driver.context(target.ordinal):
        driver.copy_from_device(device_fill.address_of(last), whole.values + at, len(last))
    same = bytes(last) == pattern(at, len(last)).tobytes()
    return {"fill_s": fill_s, "rows_bytes": rows * 264, "read_back": same}


class PatternFeed:
    """The pattern in place of rows."""

    direct = False

    def __init__(self, base: int) -> None:
        self._base = base

    def fill(self, chunk: device_fill.RowChunk, view: memoryview) -> list[device_fill.Copy]:
        copies, used = [], 0
        for target, nbytes in (
            (chunk.values, (chunk.row_stop - chunk.row_start) * 256),
            (chunk.scales, (chunk.row_stop - chunk.row_start) * 8),
        ):
            view[used : used + nbytes] = pattern(target - self._base, nbytes)
            copies.append(device_fill.Copy(device_fill.address_of(view) + used, target, nbytes))
            used += nbytes
        return copies

    def close(self) -> None:
        pass


def mapped(kind: str, fd: int, nbytes: int, ordinal: int, range_bytes: int) -> VmmMapping | RegisteredMapping:
    if kind == "registered":
        return RegisteredMapping(fd, nbytes, cuda_driver(), ordinal, range_bytes=range_bytes)
    return VmmMapping(fd, nbytes, cuda_driver(), ordinal, page_bytes=2 << 20)


def rank(kind: str, fd: int, nbytes: int, ordinal: int, count: int, range_bytes: int = 64 << 30) -> dict[str, Any]:
    """Attaches as a rank does, and reads the first `count` bytes by a kernel."""
    driver = cuda_driver()
    with driver.context(ordinal):
        started = time.perf_counter()
        mapping = mapped(kind, fd, nbytes, ordinal, range_bytes)
        attach_s = time.perf_counter() - started
        found = Kernels(driver, ordinal).checksum(mapping.device_address, count)
        mapping.close()
        mapping.close()
    return {"attach_s": attach_s, "checksum": found}


def poke(kind: str, fd: int, nbytes: int, ordinal: int) -> dict[str, Any]:
    """A kernel of a rank tries to write."""
    driver = cuda_driver()
    with contextlib.suppress(EngramError), driver.context(ordinal):  # the context is lost afterwards
        mapping = mapped(kind, fd, nbytes, ordinal, 64 << 30)
        print(json.dumps({"outcome": Kernels(driver, ordinal).poke(mapping.device_address)}), flush=True)
    return {}


def poke_cpu(fd: int, nbytes: int) -> dict[str, Any]:
    mapping = VmmMapping(fd, nbytes, cuda_driver(), None, host_access=True)
    ctypes.memset(mapping.address, 7, 8)
    return {}


def failed_registration(fd: int, nbytes: int, ordinal: int, count: int) -> dict[str, Any]:
    """A registration that fails in its second range, for that is registered already; then a kernel runs."""
    driver = cuda_driver()
    half = nbytes // 2
    with driver.context(ordinal):
        first = RegisteredMapping(fd, nbytes, driver, ordinal)
        kernels = Kernels(driver, ordinal)
        real, calls = driver.host_register, []

        def once(address: int, length: int, read_only: bool) -> None:
            calls.append(address)
            real(first.address if len(calls) == 2 else address, length, read_only)

        driver.host_register = once  # type: ignore[method-assign]
        try:
            RegisteredMapping(fd, nbytes, driver, ordinal, range_bytes=half)
            outcome = "registered"
        except EngramError as error:
            outcome = f"{error.code} {error.fields.get('name')}"
        driver.host_register = real  # type: ignore[method-assign]
        found = kernels.checksum(first.device_address, count)
        again = RegisteredMapping(fd, nbytes, driver, ordinal, range_bytes=half)
        same = kernels.checksum(again.device_address, count) == found
        again.close()
        first.close()
    return {"outcome": outcome, "checksum": found, "again": same}


def reopened(fd: int) -> dict[str, Any]:
    import os

    try:
        cuda_driver().import_fd(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    except (EngramError, OSError) as error:
        return {"outcome": str(error)}
    return {"outcome": "imported"}


COMMANDS = {
    function.__name__: function
    for function in (owner, fill_host, fill_device, rank, poke, poke_cpu, failed_registration, reopened)
}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
