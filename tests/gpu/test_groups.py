"""Groups of 2, 4 and 8 ranks on as many real GPUs: every way to place, split and look up gives the checkpoint's rows,
and a rank that is killed is nobody else's trouble."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from engram_client.cuda.access import DRIVER_VARIABLE  # noqa: E402
from engram_client.protocol import State  # noqa: E402
from tests.gpu.asking_ranks import ask, daemon_of  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.reading import one_killed_while_the_others_read  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
if os.environ.get(DRIVER_VARIABLE):
    pytest.skip("needs the real driver", allow_module_level=True)

DEVICES = torch.cuda.device_count()
LIMIT_S = 240
SPLITS = {"split_reads": True}
ranks_on_gpus = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(n, marks=pytest.mark.skipif(n > DEVICES, reason=f"needs {n} GPUs, there are {DEVICES}"))
        for n in (2, 4, 8)
    ],
)

SHARDS = {"placement": "gpu", "replication": "none", "lookup": "collective"}
PEERS = {"placement": "gpu", "replication": "none", "lookup": "peer_read"}
GPU_WHOLE = {"placement": "gpu", "replication": "per_node"}
HOST_SHARDS = {"placement": "cpu", "replication": "none", "lookup": "collective"}
WHOLE = {"placement": "cpu", "replication": "per_node"}
MEMFD, CUDA_HOST = {"backing": "memfd"}, {"backing": "cuda_host"}


def rest_of(engram: dict[str, str], ranks: int, host: dict[str, str]) -> dict[str, Any]:
    rest: dict[str, Any] = {"host": host} if host else {"devices": list(range(ranks))}
    return rest if engram == WHOLE else rest | {"tp_size": ranks}


@ranks_on_gpus
@pytest.mark.parametrize(
    ("engram", "host", "nccl", "options"),
    [
        (SHARDS, {}, True, None),
        (SHARDS, {}, False, None),
        (PEERS, {}, False, None),
        (GPU_WHOLE, {}, False, None),
        (HOST_SHARDS, MEMFD, True, None),
        (HOST_SHARDS, CUDA_HOST, False, None),
        (WHOLE, MEMFD, False, None),
        (WHOLE, CUDA_HOST, False, None),
        (WHOLE, CUDA_HOST, True, SPLITS),
    ],
    ids=[
        *("gpu-nccl", "gpu-gloo", "gpu-peer_read", "gpu-per_node", "cpu-nccl", "cpu-gloo"),
        *("cpu-per_node-memfd", "cpu-per_node-cuda_host", "cpu-per_node-split"),
    ],
)
def test_every_configuration_gives_a_group_the_checkpoints_rows(
    folder: Path,
    checkpoint: Path,
    engram: dict[str, str],
    host: dict[str, str],
    nccl: bool,
    options: dict[str, Any] | None,
    ranks: int,
) -> None:
    with daemon_of(folder, checkpoint, engram, **rest_of(engram, ranks, host)) as daemon:
        compared = run_ranks(ranks, ask, daemon.endpoint, str(checkpoint), nccl, options, timeout_s=LIMIT_S)
        assert min(compared) > 70_000
        assert daemon.status().state is State.READY


def enter(rank: int) -> tuple[torch.device, Callable[[], None]]:
    warnings.simplefilter("default")  # torch's own are not ours to refuse
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank), torch.cuda.synchronize


@ranks_on_gpus
@pytest.mark.parametrize(
    ("engram", "host"),
    [(PEERS, {}), (GPU_WHOLE, {}), (WHOLE, MEMFD), (WHOLE, CUDA_HOST)],
    ids=["peer_read", "gpu", "memfd", "cuda_host"],
)
def test_one_rank_of_a_group_is_killed_and_the_others_read_on(
    folder: Path, checkpoint: Path, engram: dict[str, str], host: dict[str, str], ranks: int
) -> None:
    """Not with the collective: a lookup that needs the dead rank waits for it until the group's own limit."""
    with daemon_of(folder, checkpoint, engram, **rest_of(engram, ranks, host)) as daemon:
        one_killed_while_the_others_read(daemon, checkpoint, ranks, enter)
