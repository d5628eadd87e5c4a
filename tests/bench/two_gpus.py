"""Tables split over two GPUs: collective against zero-fill and all-reduce, peer_read against SGLang's peer kernel.

    python -m tests.bench.two_gpus [--sglang engram_gather.py] [--gib 16] [--tokens 1,16,128,1024,8192]

Device time of graph replays, ids fresh before each. `--sglang`: see gather_gpu. In "collective" both arms use our
gather kernel; SGLang's gather with a bfloat16 all-reduce is reported beside them. Results as CSV.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engram_client import connect
from engram_client.lookup.cuda import GpuRows
from tests.bench.gpu_support import ColumnIds, Results, commit_of, dummy_daemon, replay_us
from tests.support.ranks import run_ranks

LIMIT_S = 150
IDS_A_GRAPH = 400_000


def sglang_kernel(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("sglang_engram_gather", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sets_of(table: Any, tokens: int, device: torch.device) -> ColumnIds:
    return ColumnIds(table.columns, tokens, max(4, min(50, IDS_A_GRAPH // (24 * tokens))), device)


def collective(rank: int, world_size: int, endpoint: str, token_counts: list[int], sglang: str) -> Any:
    """[(tokens, arm, us)] of rank 0."""
    warnings.simplefilter("default")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    found = []
    with connect(endpoint, rank=rank, world_size=world_size, device=f"cuda:{rank}", group=group) as client:
        table = client.table(1)
        local = table.local
        assert isinstance(local, GpuRows)
        (part,) = local.parts
        values, scales = part.planes(local.row_format)
        kernel = sglang_kernel(sglang) if sglang else None
        for tokens in token_counts:
            sets = sets_of(table, tokens, device)
            out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device=device)
            expected = torch.empty_like(out)

            def theirs(ids: torch.Tensor, out: torch.Tensor = out) -> None:
                flat = out.view(-1, 256)
                assert kernel is not None
                kernel.engram_gather(values, scales, ids.view(-1), flat, 256, 32, part.start, part.stop)
                dist.all_reduce(flat, group=group)

            arms = {
                "collective (all-gather of stored rows)": lambda ids, out=out: table.lookup(ids, out, hashed=True),
                "zero-fill + all-reduce, our gather": lambda ids, out=out: table.lookup(ids, out),
            }
            if kernel is not None:
                arms["SGLang's gather + all-reduce"] = theirs
            table.lookup(sets.ids[0], expected)
            for name, launch in arms.items():
                launch(sets.ids[0])
                if name[0] != "S" and not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
                    raise SystemExit(f"{name} gives other rows")
                dist.barrier()
                found.append((tokens, name, replay_us(sets, launch)))
                sets = sets_of(table, tokens, device)
                table.lookup(sets.ids[0], expected)
    return found


def peer_read(rank: int, world_size: int, endpoint: str, token_counts: list[int], sglang: str) -> Any:
    """Rank 0 reads, half the rows local; rank 1 only holds its lease."""
    warnings.simplefilter("default")
    if rank:
        return []
    device = torch.device("cuda", 0)
    found = []
    with connect(endpoint, rank=0, world_size=world_size, device="cuda:0") as client:
        table = client.table(1)
        local = table.local
        assert isinstance(local, GpuRows)
        planes = [part.planes(local.row_format) for part in local.parts]
        starts = torch.tensor([part.start for part in local.parts], device=device)
        weights = torch.tensor([v - part.start * 256 for (v, _), part in zip(planes, local.parts, strict=True)])
        scales = torch.tensor([s - part.start * 8 for (_, s), part in zip(planes, local.parts, strict=True)])
        weights, scales = weights.to(device), scales.to(device)
        kernel = sglang_kernel(sglang) if sglang else None
        for tokens in token_counts:
            sets = sets_of(table, tokens, device)
            out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device=device)
            arms = {"peer_read": lambda ids, out=out: table.lookup(ids, out, hashed=True)}
            if kernel is not None:
                arms["SGLang's peer kernel"] = lambda ids, out=out: kernel.engram_gather_peer(
                    ids, out, weights, scales, starts, 256, 32
                )
            rows = []
            for name, launch in arms.items():
                launch(sets.ids[0])
                rows.append(out.view(torch.int16).clone())
                found.append((tokens, name, replay_us(sets, launch)))
                sets = sets_of(table, tokens, device)
            if len(rows) == 2 and not torch.equal(rows[0], rows[1]):
                print("note: SGLang's peer kernel gives other bits for some rows (NaN)", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", default="")
    parser.add_argument("--gib", type=float, default=16)
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--commit", default=commit_of())
    parser.add_argument("--out", type=Path, default=Path("bench-results/two_gpus.csv"))
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("needs two GPUs")
    counts = [int(count) for count in options.tokens.split(",")]
    sglang = os.path.abspath(options.sglang) if options.sglang else ""
    results = Results(options.out, options.commit, "cold")
    for lookup, work in (("collective", collective), ("peer_read", peer_read)):
        engram = {"placement": "gpu", "lookup": lookup}
        with dummy_daemon(engram, options.gib, [1], devices=[0, 1], tp_size=2) as daemon:
            found = run_ranks(2, work, daemon.endpoint, counts, sglang, timeout_s=LIMIT_S)[0]
        first: dict[int, float] = {}
        for tokens, name, took in found:
            ours = first.setdefault(tokens, took)
            note = f"{took / ours:.2f} x ours, {options.gib} GiB over 2 GPUs"
            results.add(f"{lookup}, T={tokens}: {name}", took, "us", note)


if __name__ == "__main__":
    main()
