"""What a lookup on a GPU costs the calling thread in Python, with a launch that does nothing: needs no GPU.

    python -m tests.bench.call_cost

The launch itself (the driver's 3 to 4 us) comes on top; `gather_gpu` and `client_gpu` measure both together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from engram_client.identity import TableIdentity
from engram_client.layout import RowFormat, TableGeometry, whole
from engram_client.lookup.counters import Counters
from engram_client.lookup.cuda import GpuRows
from engram_client.lookup.kernels import Ids, Kernels, Out, Part
from engram_client.lookup.shapes import KERNELS, Memory
from engram_client.protocol import TableInfo
from engram_client.table import MappedTable
from tests.support import fake_runtime

CALLS = 20_000
RUNS = 7


class IdleDriver:
    """As much of a driver as a lookup that launches nothing needs."""

    def launch(self, kernel: Any, grid: tuple[int, int], threads: int, stream: int, parameters: int) -> None:
        pass

    def retain_context(self, ordinal: int) -> None:
        pass

    release_context = retain_context

    def context(self, ordinal: int) -> Any:
        import contextlib

        return contextlib.nullcontext()

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        pass

    def host_unregister(self, address: int) -> None:
        pass

    def host_device_pointer(self, address: int) -> int:
        return address

    def synchronize(self) -> None:
        pass


def idle_kernels() -> Kernels:
    kernels = Kernels.__new__(Kernels)
    driver: Any = IdleDriver()
    kernels.ordinal, kernels.driver, kernels.multiprocessors = 0, driver, 132
    kernels.functions, kernels.launch = dict.fromkeys(KERNELS, None), driver.launch
    return kernels


def per_call_us(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return min(times)


def run() -> dict[str, float]:
    """Microseconds a call, the least of some runs."""
    fake_runtime.install()
    geometry = TableGeometry(layer_id=1, columns=(101,) * 24)
    kernels = idle_kernels()
    counters = Counters(kernels.driver, 0, 1)
    side: Any = fake_runtime.FakeSide(0)
    parts = [Part(4096, 0, geometry.rows)]
    local = GpuRows(kernels, parts, geometry, whole(geometry), RowFormat.PACKED, Memory.HOST, counters, 0, side)
    info = TableInfo(geometry=geometry, identity=TableIdentity.of(geometry, None), segments=())
    tables = {
        strict: MappedTable(info, local, 0, 1, None, strict, lambda what: None, whole=True) for strict in (False, True)
    }
    ids = torch.zeros(16, 24, dtype=torch.int64)
    out = torch.empty(16, 24, 256, dtype=torch.bfloat16)
    gather, given, outs = local._plain[True], Ids(ids.data_ptr(), 8, 16, 24, 192, 8), [Out(out.data_ptr())]
    found = {
        "gather_us": per_call_us(lambda: gather(given, outs, 0)),
        "lookup_out_us": per_call_us(lambda: tables[False].lookup(ids, out, hashed=True)),
        "lookup_out_strict_us": per_call_us(lambda: tables[True].lookup(ids, out, hashed=True)),
        "lookup_us": per_call_us(lambda: tables[False].lookup(ids, hashed=True)),
        "prefetch_wait_us": per_call_us(lambda: tables[False].prefetch(ids, hashed=True).wait()),
    }
    counters.close()
    return found


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name:24s} {value:7.2f}")
