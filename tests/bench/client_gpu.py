"""A GPU client against a real daemon, on one GPU: host cost of a call, prefetch beside GEMMs.

    python -m tests.bench.client_gpu [--parts call,prefetch] [--prefetch-gib 8]

Results as CSV in bench-results/client_gpu.csv.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engram_client import connect
from engram_client.lookup.cuda import GpuRows
from engram_client.lookup.packing import Ids, Out
from tests.bench.gpu_support import ColumnIds, Results, commit_of, dummy_daemon

CALLS = 2000
GEMM = 4096
GEMMS = 12
"""Of 4096^3 in bfloat16: some 2.5 ms, a few layers of a model between the hash of the ids and their use."""
ITERATIONS = 20


def host_us(call: Callable[[], Any]) -> float:
    """Microseconds of the calling thread, launches not waited for; the least of some runs."""
    found = []
    for _ in range(5):
        call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
        torch.cuda.synchronize()
    return min(found)


def call_cost(results: Results) -> None:
    with dummy_daemon({"placement": "gpu", "replication": "per_node"}, 0.25, [1, 14], devices=[0]) as daemon:
        with connect(daemon.endpoint, rank=0, world_size=1, device="cuda:0") as client:
            table = client.table(1)
            local = table.local
            if not isinstance(local, GpuRows):
                raise SystemExit("no table on a GPU")
            ids = ColumnIds(table.columns, 1, 1, torch.device("cuda:0")).ids[0]
            out = torch.empty(1, 24, 256, dtype=torch.bfloat16, device="cuda")
            stream = torch.cuda.current_stream().cuda_stream
            gather, view, outs = local._plain[True], Ids(ids.data_ptr(), 8, 1, 24, 192, 8), [Out(out.data_ptr())]
            both = torch.stack([ids, ids], dim=1)
            for name, call in {
                "host cost: Gather(), addresses at hand": lambda: gather(view, outs, stream),
                "host cost: table.lookup(ids, out, hashed=True)": lambda: table.lookup(ids, out, hashed=True),
                "host cost: table.lookup(ids, hashed=True)": lambda: table.lookup(ids, hashed=True),
                "host cost: table.prefetch(ids).wait()": lambda: table.prefetch(ids, hashed=True).wait(),
                "host cost: client.lookup_all(ids)": lambda: client.lookup_all(both),
                "host cost: torch.index_select, for comparison": lambda: torch.index_select(out[0], 0, ids[0] * 0),
            }.items():
                results.add(name, host_us(call), "us", cache="warm")
            for tokens in (1, 16, 128, 1024):
                sets = ColumnIds(table.columns, tokens, 50, torch.device("cuda:0"))
                rows = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device="cuda")
                eager = replay(lambda one, rows=rows: table.lookup(one, rows, hashed=True), sets)
                results.add(f"device: table.lookup(out) in a graph, 0.25 GiB HBM, T={tokens}", eager, "us")


def replay(launch: Callable[[torch.Tensor], Any], sets: ColumnIds) -> float:
    from tests.bench.gpu_support import replay_us

    return replay_us(sets, launch)


def prefetch_beside_gemms(results: Results, gib: float) -> None:
    """One iteration: prefetch two layers, GEMMs, use the rows. In a graph, so that the host's cost does not show."""
    whole = {"placement": "cpu", "replication": "per_node"}
    with dummy_daemon(whole, gib, [1, 14], host={"backing": "cuda_host"}) as daemon:
        with connect(daemon.endpoint, rank=0, world_size=1, device="cuda:0") as client:
            tables = [client.table(layer) for layer in client.layers]
            a, b = (torch.randn(GEMM, GEMM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            c = torch.empty_like(a)
            for tokens in (16, 128, 1024):
                sets = [ColumnIds(table.columns, tokens, 1, torch.device("cuda:0")) for table in tables]
                alone = iteration_us(lambda: None, lambda begun: None, (a, b, c), sets)

                def begin(sets: list[ColumnIds] = sets) -> list[Any]:
                    return [t.prefetch(s.ids[0], hashed=True) for t, s in zip(tables, sets, strict=True)]

                def use(begun: list[Any]) -> None:
                    for pending in begun:
                        pending.wait()

                beside = iteration_us(begin, use, (a, b, c), sets)
                slower = 100 * (beside[0] / alone[0] - 1)
                note = f"GEMMs {alone[0]:.0f} us alone, {beside[0]:.0f} us beside, {gib} GiB host tables"
                results.add(f"prefetch of 2 layers, T={tokens}: GEMMs slower by", slower, "%", note)
                results.add(f"prefetch of 2 layers, T={tokens}: consumer waits", beside[1] - alone[1], "us")


def iteration_us(begin: Callable[[], Any], use: Callable[[Any], Any], gemm: tuple[Any, Any, Any], sets: Any) -> Any:
    """Median microseconds of the GEMMs, and from their end to the rows' being there."""
    a, b, c = gemm
    marks = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(3)]

    def body() -> None:
        begun = begin()
        marks[0].record()
        for _ in range(GEMMS):
            torch.mm(a, b, out=c)
        marks[1].record()
        use(begun)
        marks[2].record()

    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for k in range(ITERATIONS + 5):
        for one in sets:
            one.fresh()
        graph.replay()
        torch.cuda.synchronize()
        if k >= 5:
            times.append((1e3 * marks[0].elapsed_time(marks[1]), 1e3 * marks[1].elapsed_time(marks[2])))
    return tuple(statistics.median(column) for column in zip(*times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="call,prefetch")
    parser.add_argument("--prefetch-gib", type=float, default=8)
    parser.add_argument("--commit", default=commit_of())
    parser.add_argument("--out", type=Path, default=Path("bench-results/client_gpu.csv"))
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    results = Results(options.out, options.commit, "cold")
    parts = options.parts.split(",")
    if "call" in parts:
        call_cost(results)
    if "prefetch" in parts:
        prefetch_beside_gemms(results, options.prefetch_gib)


if __name__ == "__main__":
    main()
