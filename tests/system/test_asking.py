"""CPU ranks asked in every way there is: prefetch, raw rows, all layers at once, invalid ids, tokens of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engram_client import connect
from engram_client.errors import ClientClosed, IdsDtypeInvalid
from tests.support.asking import Asking
from tests.support.daemon import Daemon, running
from tests.support.ranks import run_ranks
from tests.support.reference import CheckpointReference


def ask(rank: int, world_size: int, endpoint: str, checkpoint: str) -> int:
    with connect(endpoint, rank=rank, world_size=world_size) as client:
        return Asking(client, CheckpointReference(Path(checkpoint)), torch.device("cpu"), lambda: None).everything()


@pytest.mark.parametrize("ranks", [2, 5])
def test_every_way_of_asking_gives_the_checkpoints_rows(folder: Path, checkpoint: Path, ranks: int) -> None:
    config = {"model_path": str(checkpoint), "tp_size": ranks, "engram_config": {"placement": "cpu"}}
    with running(folder, config) as daemon:
        assert min(run_ranks(ranks, ask, daemon.endpoint, str(checkpoint))) > 4000


def test_a_whole_table_asked_in_every_way_gives_the_checkpoints_rows(per_node: Daemon, checkpoint: Path) -> None:
    assert ask(0, 1, per_node.endpoint, str(checkpoint)) > 4000


def test_a_client_that_closes_waits_for_its_prefetches_and_gives_no_rows_afterwards(per_node: Daemon) -> None:
    client = connect(per_node.endpoint, rank=0, world_size=1)
    table = client.table(1)
    begun = [table.prefetch(torch.arange(24_000).view(-1, 24)) for _ in range(20)]
    client.close()
    with pytest.raises(ClientClosed):
        begun[0].wait()
    with pytest.raises(ClientClosed):
        table.prefetch(torch.arange(24))
    with pytest.raises(ClientClosed):
        client.check()


def test_a_prefetch_of_wrong_ids_fails_at_once(per_node: Daemon) -> None:
    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        with pytest.raises(IdsDtypeInvalid):
            client.table(1).prefetch(torch.zeros(3))
