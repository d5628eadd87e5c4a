"""A rank of test_client.py that ends badly: `python -m tests.gpu.client_child HOW ENDPOINT RANKS`. Prints one word."""

from __future__ import annotations

import ctypes
import os
import sys

from engram_client import connect
from engram_client.errors import CudaCallFailed
from engram_client.lookup import nvrtc

POKE = 'extern "C" __global__ void poke(unsigned long long* words) { words[threadIdx.x] = 7; }'


def poke(endpoint: str, wild: bool, ranks: int) -> str:
    """A kernel of rank 0 writes to the table (of several ranks, to the last one's shard), or where nothing is; the name
    of the error it ends in."""
    client = connect(endpoint, rank=0, world_size=ranks, device="cuda:0")
    local = client.table(1).local
    code, _ = nvrtc.compile_source(POKE, f"sm_{''.join(map(str, capability()))}")
    driver = local.kernels.driver  # type: ignore[attr-defined]
    try:
        with driver.context(0):
            # Reserved and not mapped: nobody else's address, and nothing is there.
            target = driver.address_reserve(2 << 20, 0) if wild else local.parts[-1].address  # type: ignore[attr-defined]
            address = ctypes.c_uint64(target)
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(address))
            kernel = driver.library_kernel(driver.library_load(code), "poke")
            driver.launch(kernel, (1, 1), 32, 0, ctypes.addressof(pointers))
            driver.synchronize()
    except CudaCallFailed as error:
        return error.name
    return "written"


def capability() -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(0)


if __name__ == "__main__":
    print(poke(sys.argv[2], sys.argv[1] == "wild", int(sys.argv[3])), flush=True)
    os._exit(0)  # nothing can be given back to a context that is lost
