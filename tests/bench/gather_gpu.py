"""Device time of the lookup kernels, beside SGLang's gather kernel on the same bytes, as CSV.

    python -m tests.bench.gather_gpu --sglang engram_gather.py --device-gib 16 --host-gib 90 --out gather.csv

`--sglang` is the file `sglang/kernels/ops/embeddings/engram_gather.py` of an installed sglang wheel (0.5.23);
without it only our arms run. Each number is the median over graph replays; every launch of a replay reads
other ids, and all ids are drawn anew before each replay, so no row and no translation is warm. Before it is
timed each arm is compared with the plain lookup. `--host-gib` wants that much host memory free.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_client.cuda.access import cuda_driver
from engram_client.cuda.driver import HandleTypes, Location
from engram_client.layout import ROW_BYTES, RowFormat
from engram_client.lookup.kernels import Gather, Kernels
from engram_client.lookup.packing import Ids, Out, Part, Source
from engram_client.lookup.shapes import Memory
from tests.bench.gpu_support import sglang_kernel

COLUMNS = 24
TEXT_REPEATS = 0.36  # of the ids in a chunk of 8,192 tokens of mixed documents
REPLAYS = 5
SMALL_TOKENS, ROUNDS = 128, 7
TILE_BYTES = 64 << 20


class HostTable:
    """Host memory from the CUDA driver (HOST_NUMA, 2 MiB pages), mapped for the GPU and this process."""

    def __init__(self, nbytes: int) -> None:
        driver = self._driver = cuda_driver()
        begin = time.perf_counter()
        with driver.context(torch.cuda.current_device()):
            granularity = driver.granularity(Location.host(0), HandleTypes.NONE)
            self.nbytes = -(-nbytes // granularity) * granularity
            self._handle = driver.mem_create(self.nbytes, Location.host(0), HandleTypes.NONE)
            self.address = driver.address_reserve(self.nbytes, granularity)
            driver.mem_map(self.address, self.nbytes, self._handle)
            readers = (Location.device(torch.cuda.current_device()), Location.host(0))
            driver.set_access(self.address, self.nbytes, readers, writable=True)
        self._fill()
        print(f"host table {self.nbytes / 2**30:.1f} GiB made in {time.perf_counter() - begin:.0f} s", flush=True)

    def _fill(self) -> None:
        """One tile of valid rows, over and over: timing does not depend on what the bytes are, only on where."""
        tile = tile_bytes()
        source = tile.ctypes.data
        offsets = range(0, self.nbytes, TILE_BYTES)
        with ThreadPoolExecutor(16) as pool:
            list(
                pool.map(lambda o: ctypes.memmove(self.address + o, source, min(TILE_BYTES, self.nbytes - o)), offsets)
            )

    def free(self) -> None:
        torch.cuda.synchronize()
        self._driver.mem_unmap(self.address, self.nbytes)
        self._driver.address_free(self.address, self.nbytes)
        self._driver.mem_release(self._handle)


def tile_bytes() -> np.ndarray:
    """Bytes that are sound as FP8 codes and as scales: 112 to 126, and no NaN."""
    return np.random.default_rng(1).integers(112, 127, TILE_BYTES, np.uint8)


def device_table(nbytes: int) -> torch.Tensor:
    tile = torch.from_numpy(tile_bytes()).cuda()
    table = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    for offset in range(0, nbytes, TILE_BYTES):
        piece = table[offset : offset + TILE_BYTES]
        piece.copy_(tile[: piece.numel()])
    return table


class IdSets:
    """Sets of ids `[tokens, 24]`, column c drawn from its 24th of the rows; `fresh()` draws all anew, in place."""

    def __init__(self, tokens: int, rows: int, kind: str, sets: int) -> None:
        self.kind, self.span = kind, rows // COLUMNS
        self.ids = [torch.empty(tokens, COLUMNS, dtype=torch.int64, device="cuda") for _ in range(sets)]
        self.base = torch.arange(COLUMNS, device="cuda") * self.span
        self.fresh()

    def fresh(self) -> None:
        for ids in self.ids:
            ids.random_(0, self.span)
            tokens = ids.shape[0]
            if self.kind == "text" and tokens > 1:
                # A share of the slots repeats an id of the same column, a few of them very often.
                repeats = int(tokens * TEXT_REPEATS)
                pool = ids[repeats:]
                pick = (torch.rand(repeats, COLUMNS, device="cuda") ** 3 * pool.shape[0]).long()
                ids[:repeats] = pool.gather(0, pick)
                ids.copy_(ids[torch.randperm(tokens, device="cuda")])
            ids += self.base


def replays_us(sets: IdSets, launch: Callable[[int], None]) -> list[float]:
    """Device microseconds a launch, of each replay of a graph, with fresh ids."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(len(sets.ids)):
            launch(index)
    times = []
    for _ in range(REPLAYS):
        sets.fresh()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(sets.ids))
    return times


def ids_of(ids: torch.Tensor) -> Ids:
    size = ids.element_size()
    return Ids(ids.data_ptr(), size, ids.shape[0], ids.shape[1], ids.stride(0) * size, ids.stride(1) * size)


class Lookup:
    """Our lookup of one table at `address`, with its workspace."""

    def __init__(self, address: int, rows: int, row_format: RowFormat, memory: Memory, tokens: int) -> None:
        self.invalid = torch.zeros(3, dtype=torch.int64, device="cuda")
        source = Source((Part(address, 0, rows),), rows, self.invalid.data_ptr())
        self.gather = Gather(Kernels.on(torch.cuda.current_device()), [source], row_format, memory)
        size = self.gather.workspace_bytes(tokens * COLUMNS)
        self.workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")

    def __call__(self, ids: torch.Tensor, out: torch.Tensor, *, ordered: bool) -> None:
        workspace = self.workspace.data_ptr() if ordered else 0
        self.gather(ids_of(ids), [Out(out.data_ptr())], torch.cuda.current_stream().cuda_stream, workspace)


def arms(
    address: int, rows: int, memory: Memory, tokens: int, sets: IdSets, sglang: Any
) -> dict[str, Callable[[int], None]]:
    """What is timed on one table: name -> launch of set i. Planar and packed read the same bytes."""
    out = torch.empty(tokens * COLUMNS, 256, dtype=torch.bfloat16, device="cuda")
    ours = RowFormat.PLANAR if memory is Memory.DEVICE else RowFormat.PACKED
    lookup = Lookup(address, rows, ours, memory, tokens)
    found: dict[str, Callable[[int], None]] = {f"ours_{ours.value}": lambda i: lookup(sets.ids[i], out, ordered=False)}
    if lookup.gather.sorts(tokens * COLUMNS):
        found[f"ours_{ours.value}_sorted"] = lambda i: lookup(sets.ids[i], out, ordered=True)
    plain, expected = Lookup(address, rows, ours, Memory.DEVICE, tokens), torch.empty_like(out)
    for launch in found.values():
        plain(sets.ids[0], expected, ordered=False)
        out.zero_()
        launch(0)
        if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
            raise SystemExit("an arm gives other rows than the plain lookup")
    if sglang is not None:
        scales = address + rows * 256
        for name, order in (("sglang", False), ("sglang_sorted", True)):
            if order and memory is Memory.DEVICE:
                continue
            found[name] = lambda i, order=order: sglang.engram_gather(
                address, scales, sets.ids[i].view(-1), out, 256, 32, sort_ids=order
            )
    return found


def host_cost_us(lookup: Lookup, ids: torch.Tensor, out: torch.Tensor, calls: int = 2000) -> float:
    """Microseconds of the calling thread a launch, unsorted, addresses and stream at hand."""
    arguments = (ids_of(ids), [Out(out.data_ptr())], torch.cuda.current_stream().cuda_stream)
    begin = 0.0
    for call in range(calls + 100):
        if call == 100:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        lookup.gather(*arguments)
    cost = (time.perf_counter() - begin) / calls * 1e6
    torch.cuda.synchronize()
    return cost


def measure(address: int, nbytes: int, memory: Memory, options: argparse.Namespace, write: Callable[..., None]) -> None:
    rows = nbytes // ROW_BYTES
    for kind in options.kinds.split(","):
        for tokens in map(int, options.tokens.split(",")):
            sets = IdSets(tokens, rows, kind, max(4, min(100, 400_000 // (tokens * COLUMNS))))
            launches = arms(address, rows, memory, tokens, sets, options.kernel)
            # By turns: a launch of a microsecond differs by a tenth from graph to graph.
            rounds = ROUNDS if tokens <= SMALL_TOKENS else 1
            found: dict[str, list[float]] = {name: [] for name in launches}
            for _ in range(rounds):
                for name, launch in launches.items():
                    found[name] += replays_us(sets, launch)
            for name, times in found.items():
                write(memory.value, nbytes, kind, tokens, name, statistics.median(times), min(times), max(times))


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--device-gib", type=float, default=16)
    parser.add_argument("--host-gib", type=float, default=90)
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--kinds", default="random,text")
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--out", type=Path, default=Path("bench-results/gather_gpu.csv"))
    options = parser.parse_args()
    options.kernel = sglang_kernel(options.sglang)
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    machine = (torch.cuda.get_device_name(), driver_version(), options.commit, "cold")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file)
        names = "memory table_bytes ids tokens arm median_us least_us most_us gpu driver commit cache"
        writer.writerow(names.split())

        def write(memory: str, nbytes: int, kind: str, tokens: int, arm: str, *times: float) -> None:
            writer.writerow([memory, nbytes, kind, tokens, arm, *(f"{t:.2f}" for t in times), *machine])
            file.flush()
            print(f"{memory:7s} {kind:7s} T={tokens:5d} {arm:22s} {times[0]:10.2f} us", flush=True)

        if options.device_gib:
            nbytes = int(options.device_gib * 2**30)
            table = device_table(nbytes)
            measure(table.data_ptr(), nbytes, Memory.DEVICE, options, write)
            lookup = Lookup(table.data_ptr(), nbytes // ROW_BYTES, RowFormat.PLANAR, Memory.DEVICE, 1)
            ids = torch.zeros(1, COLUMNS, dtype=torch.int64, device="cuda")
            cost = host_cost_us(lookup, ids, torch.empty(COLUMNS, 256, dtype=torch.bfloat16, device="cuda"))
            write("host_call", nbytes, "zero", 1, "ours_call", cost, cost, cost)
            del table
            torch.cuda.empty_cache()
        if options.host_gib:
            host = HostTable(int(options.host_gib * 2**30))
            measure(host.address, host.nbytes, Memory.HOST, options, write)
            host.free()


if __name__ == "__main__":
    sys.exit(main())
