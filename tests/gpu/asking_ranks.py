"""Ranks on real GPUs that ask a daemon's tables in every way and compare: for run_ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_client import connect
from tests.support.asking import Asking, hashed_ids
from tests.support.daemon import Daemon, running
from tests.support.reference import CheckpointReference


@contextlib.contextmanager
def daemon_of(folder: Path, checkpoint: Path, engram: dict[str, str], **rest: Any) -> Iterator[Daemon]:
    with running(folder, {"model_path": str(checkpoint), "engram_config": engram, **rest}) as daemon:
        yield daemon


def bits(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.int16).cpu().numpy()


def ask(
    rank: int,
    world_size: int,
    endpoint: str,
    checkpoint: str,
    nccl: bool = False,
    options: dict[str, Any] | None = None,
) -> int:
    """Everything that asking.py asks, all rows of all tables, and with nccl captured lookups; the number of rows
    compared. options: of connect()."""
    warnings.simplefilter("default")  # torch's own are not ours to refuse
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = torch.distributed.new_group(backend="nccl") if nccl else None
    reference = CheckpointReference(Path(checkpoint))
    settle = torch.cuda.synchronize
    name = f"cuda:{device.index}"
    with connect(endpoint, rank=rank, world_size=world_size, device=name, group=group, **options or {}) as client:
        compared = Asking(client, reference, device, settle).everything()
        for layer in client.layers:
            ids = torch.arange(client.table(layer).rows, device=device)
            rows = bits(client.table(layer).lookup(ids))
            for first in range(0, len(rows), 4096):
                part = np.arange(first, min(first + 4096, len(rows)))
                assert np.array_equal(rows[part], reference.rows(layer, part).view(np.int16))
            compared += len(rows)
        if nccl:
            for tokens in (32, 64):  # few are summed, more exchanged
                capture_collective(client, reference, device, tokens)
    return compared


def capture_collective(client: Any, reference: CheckpointReference, device: torch.device, tokens: int) -> None:
    table = client.table(1)
    ids = hashed_ids(table.columns, tokens, 1).to(device)
    out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device=device)
    table.lookup(ids, out, hashed=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        table.lookup(ids, out, hashed=True)
    for seed in range(20):
        ids.copy_(hashed_ids(table.columns, tokens, seed))
        graph.replay()
        Asking(client, reference, device, torch.cuda.synchronize).same(out, 1, ids, True)
