"""Two nodes' daemons on one machine with real GPUs: their ranks read each other's shards, or are told why not.

A machine without an IMEX channel makes no FABRIC handles: there the refusal is what is tested.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from engram_client import connect  # noqa: E402
from engram_client.errors import FabricUnavailable  # noqa: E402
from engram_client.group import gather_bytes  # noqa: E402
from engram_server.gpus import ask  # noqa: E402
from engram_server.make_checkpoint import make_checkpoint  # noqa: E402
from tests.support.daemon import Daemon  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.reference import CheckpointReference  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
DEVICES = torch.cuda.device_count()
LIMIT_S = 120


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eg-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def group_of(backend: str, ordinal: int) -> Any:
    warnings.simplefilter("default")  # torch's own are not ours to refuse
    torch.cuda.set_device(ordinal)
    return torch.distributed.new_group(backend=backend)


def gather(rank: int, world_size: int, backend: str) -> list[bytes]:
    ordinal = rank % DEVICES
    return gather_bytes(bytes([65 + rank]) * (3 + 70_000 * rank), group_of(backend, ordinal), ordinal, 1 << 20)


def check_gathering(backend: str) -> None:
    for everybodys in run_ranks(2, gather, backend, timeout_s=LIMIT_S):
        assert everybodys == [b"A" * 3, b"B" * 70_003]


def look(rank: int, world_size: int, endpoints: list[str], checkpoint: str, backend: str) -> int | str:
    """Rows compared, or why there are none."""
    ordinal = rank % DEVICES
    group = group_of(backend, ordinal)
    try:
        client = connect(endpoints[rank], rank=rank, world_size=world_size, device=f"cuda:{ordinal}", group=group)
    except FabricUnavailable as error:
        return error.problem
    reference = CheckpointReference(Path(checkpoint))
    compared = 0
    with client:
        for layer in client.layers:
            ids = torch.arange(client.table(layer).rows, device=f"cuda:{ordinal}")
            rows = client.table(layer).lookup(ids).view(torch.int16).cpu().numpy()
            assert np.array_equal(rows, reference.rows(layer, ids.cpu().numpy()).view(np.int16))
            compared += len(rows)
    return compared


def check_nodes(folder: Path, backend: str) -> None:
    from engram_client.cuda.access import cuda_driver

    checkpoint = folder / "model"
    make_checkpoint(checkpoint, engram_vocab_size=600, seed=11, every_code=True)
    problem = ask(cuda_driver(), None).fabric_problem
    print(f"FABRIC: {problem or 'works'}")
    daemons = []
    try:
        for node in range(2):
            config = {
                "model_path": str(checkpoint),
                "engram_config": {"placement": "gpu", "lookup": "peer_read"},
                "devices": [node % DEVICES],
                "tp_size": 2,
                "nnodes": 2,
                "node_rank": node,
            }
            daemons.append(Daemon(folder / f"n{node}", config))
        for daemon in daemons:
            daemon.wait_for()
        endpoints = [daemon.endpoint for daemon in daemons]
        for outcome in run_ranks(2, look, endpoints, str(checkpoint), backend, timeout_s=LIMIT_S):
            assert outcome == problem if problem else int(outcome) > 20_000
    finally:
        for daemon in daemons:
            daemon.kill()


def test_ranks_on_one_gpu_gather_bytes_and_read_both_nodes_shards(folder: Path) -> None:
    check_gathering("gloo")
    check_nodes(folder, "gloo")


@pytest.mark.skipif(DEVICES < 2, reason="needs two GPUs")
def test_on_two_gpus_ranks_gather_bytes_over_nccl_and_read_both_nodes_shards(folder: Path) -> None:
    check_gathering("nccl")
    check_nodes(folder, "nccl")
