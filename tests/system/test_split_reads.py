"""Ranks that share out their reads of whole host tables: real daemons and ranks, on CPUs and on the fake driver."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_client import connect
from engram_client.errors import EngramError, GroupInvalid, InvalidIds
from tests.support.asking import Asking, hashed_ids
from tests.support.daemon import Daemon, running
from tests.support.fake_machinery import kernels_in
from tests.support.fake_runtime import FAKE, on_fake
from tests.support.ranks import run_ranks
from tests.support.reference import CheckpointReference

WHOLE = {"placement": "cpu", "replication": "per_node"}


def ask_everything(rank: int, world_size: int, endpoint: str, checkpoint: str, gpus: int) -> int:
    device = "cpu"
    if gpus:
        on_fake({"gpus": gpus})
        device = f"cuda:{rank % gpus}"
    with connect(endpoint, rank=rank, world_size=world_size, device=device, split_reads=True) as client:
        reference = CheckpointReference(Path(checkpoint))
        return Asking(client, reference, torch.device("cpu"), lambda: None).everything()


@pytest.mark.parametrize(
    ("world_size", "gpus", "backing"),
    [(1, 1, "memfd"), (2, 2, "cuda_host"), (3, 3, "memfd"), (5, 2, "cuda_host"), (2, 0, "memfd"), (3, 0, "posix_shm")],
)
def test_every_way_of_asking_gives_the_checkpoints_rows(
    folder: Path, checkpoint: Path, world_size: int, gpus: int, backing: str
) -> None:
    config = {"model_path": str(checkpoint), "engram_config": WHOLE, "host": {"backing": backing, "keep": "off"}}
    environ = FAKE | {"ENGRAM_FAKE_CUDA": json.dumps({"gpus": gpus})} if gpus else {}
    with running(folder, config, environ=environ) as daemon:
        compared = run_ranks(world_size, ask_everything, daemon.endpoint, str(checkpoint), gpus, timeout_s=100)
    assert min(compared) > 4000


def launches(rank: int, world_size: int, endpoint: str, checkpoint: str, log: str) -> list[list[str]]:
    """The kernels of a lookup of few ids, of more, and of both tables."""
    on_fake({"gpus": 2})
    os.environ["ENGRAM_FAKE_LOG"] = log = f"{log}.{rank}"
    reference = CheckpointReference(Path(checkpoint))

    def kernels() -> list[str]:
        launched = kernels_in(log)
        os.truncate(log, 0)
        return launched

    found = []
    with connect(endpoint, rank=rank, world_size=world_size, device=f"cuda:{rank}", split_reads=True) as client:
        for layer in client.layers:
            client.table(layer).splits_from = client.table(layer)._lookup.from_ids = 100  # type: ignore[attr-defined]
        table = client.table(1)
        for tokens in (4, 5):
            ids = hashed_ids(table.columns, tokens, seed=1)
            out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16)
            for _ in range(2):  # the second time, what was checked the first time is known
                kernels()
                table.lookup(ids, out, hashed=True)
                found.append(kernels())
            expected = reference.rows(1, ids.clamp(min=0).numpy()).view(np.int16)
            same = (out.view(torch.int16).numpy() == expected).all(axis=-1)
            assert same[ids.numpy() > 0].all()
        both = torch.stack([ids, hashed_ids(client.table(14).columns, 5, seed=2)], dim=1)
        for batch in (both[:4], both):
            kernels()
            client.lookup_all(batch, hashed=True)
            found.append(kernels())
    return found


def test_larger_batches_are_read_in_parts_and_smaller_ones_in_one_launch(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": WHOLE}
    with running(folder, config, environ=FAKE | {"ENGRAM_FAKE_CUDA": '{"gpus": 2}'}) as daemon:
        for few, again, more, more_again, few_of_all, all_of_them in run_ranks(
            2, launches, daemon.endpoint, str(checkpoint), str(folder / "calls.log")
        ):
            assert few == again == ["gather_few_packed_hashed_i64"]
            assert more == more_again == ["gather_raw_w8_r1", "dequantise_exchanged"]
            assert len(few_of_all) == 1
            assert all_of_them == 2 * more


def refuse_at_different_times(rank: int, world_size: int, endpoint: str, checkpoint: str, gpus: int) -> None:
    device = "cpu"
    if gpus:
        on_fake({"gpus": gpus})
        device = f"cuda:{rank}"
    reference = CheckpointReference(Path(checkpoint))
    with connect(
        endpoint, rank=rank, world_size=world_size, device=device, split_reads=True, strict=rank == 0
    ) as client:
        asking = Asking(client, reference, torch.device("cpu"), lambda: None)
        both = torch.stack([hashed_ids(client.table(layer).columns, 5, seed=3) for layer in client.layers], dim=1)
        bad = both.clone()
        bad[2] = 2**40

        def refused(ask: Callable[[], Any]) -> None:
            """By rank 0 alone, which has counted an invalid id, as kernels of one rank are done before another's."""
            if rank:
                ask()
                return
            if gpus:
                client.table(1).local.lookup(torch.tensor([2**41]), hashed=False)  # type: ignore[attr-defined]
            with pytest.raises(InvalidIds):
                ask()

        table, ids, wrong = client.table(1), both[:, 0], both[:, 0] if gpus else bad[:, 0]
        asked: list[Callable[[], Any]] = [
            lambda: table.lookup(wrong, hashed=True),
            lambda: table.lookup(wrong, hashed=True, out=torch.empty(5, 24, 256, dtype=torch.bfloat16)),
            lambda: table.lookup(wrong, hashed=True, raw=True),
            lambda: table.prefetch(wrong, hashed=True).wait(),
            lambda: client.lookup_all(both if gpus else bad, hashed=True),
        ]
        for ask in asked:
            refused(ask)
            asking.same(table.lookup(ids, hashed=True), 1, ids, True)  # both are at the same place again


@pytest.mark.parametrize("gpus", [0, 2])
def test_a_strict_rank_that_raises_has_done_its_part_for_the_others(folder: Path, checkpoint: Path, gpus: int) -> None:
    config = {"model_path": str(checkpoint), "engram_config": WHOLE}
    environ = FAKE | {"ENGRAM_FAKE_CUDA": json.dumps({"gpus": gpus})} if gpus else {}
    with running(folder, config, environ=environ) as daemon:
        run_ranks(2, refuse_at_different_times, daemon.endpoint, str(checkpoint), gpus, timeout_s=60)


# Attaching together


@contextmanager
def serving(folder: Path, config: dict[str, Any]) -> Iterator[Daemon]:
    """A daemon that is killed at the end: draining waits for the tickets of ranks that have given up."""
    daemon = Daemon(folder, config)
    try:
        daemon.wait_for()
        yield daemon
    finally:
        daemon.kill()


def attach(rank: int, world_size: int, endpoints: list[str], options: dict[str, Any]) -> Any:
    """What an attach comes to: "attached", or the error's code and some of its fields."""
    identity = options.get("identity", {}).get(rank)
    try:
        with connect(
            endpoints[rank % len(endpoints)],
            rank=rank,
            world_size=world_size,
            split_reads=True,
            identity=identity,
            layers=options.get("layers", {}).get(rank),
            timeout=options.get("timeout", 30),
        ) as client:
            client.table(1).lookup(torch.arange(24))
            return "attached"
    except EngramError as error:
        return error.code, {name: getattr(error, name) for name in ("cause_code", "differing") if hasattr(error, name)}


@pytest.mark.parametrize("engram", [{"placement": "cpu"}, {"placement": "cpu", "replication": "none"}])
def test_split_tables_are_refused_on_all_ranks(folder: Path, checkpoint: Path, engram: dict[str, str]) -> None:
    config = {"model_path": str(checkpoint), "engram_config": engram, "tp_size": 2}
    with serving(folder, config) as daemon:
        assert run_ranks(2, attach, [daemon.endpoint], {}) == [("SplitReadsRefused", {})] * 2


def test_one_rank_that_cannot_attach_is_heard_of_by_all(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": WHOLE}
    with serving(folder, config) as daemon:
        found = run_ranks(3, attach, [daemon.endpoint], {"identity": {1: {1: "0" * 32}}})
    other = "OtherRankFailed", {"cause_code": "IdentityMismatch"}
    assert found == [other, ("IdentityMismatch", {"differing": ["root"]}), other]


def test_one_rank_whose_daemon_serves_no_whole_tables_is_heard_of_by_all(folder: Path, checkpoint: Path) -> None:
    model = {"model_path": str(checkpoint), "tp_size": 2}
    daemons = [
        Daemon(folder / kind, {**model, "engram_config": {"placement": "cpu", "replication": kind}})
        for kind in ("per_node", "none")
    ]
    try:
        for daemon in daemons:
            daemon.wait_for()
        found = run_ranks(2, attach, [daemon.endpoint for daemon in daemons], {})
    finally:
        for daemon in daemons:
            daemon.kill()
    assert found == [("OtherRankFailed", {"cause_code": "SplitReadsRefused"}), ("SplitReadsRefused", {})]


def test_ranks_that_ask_for_other_layers_are_refused(folder: Path, checkpoint: Path) -> None:
    """A lookup of a layer that one rank lacks would wait for it."""
    config = {"model_path": str(checkpoint), "engram_config": WHOLE}
    with serving(folder, config) as daemon:
        found = run_ranks(2, attach, [daemon.endpoint], {"layers": {1: [1]}})
    assert [code for code, _ in found] == ["NodesDiffer"] * 2
    assert "layers" in found[0][1]["differing"]


def test_one_rank_without_a_daemon_is_heard_of_by_all(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": WHOLE}
    with serving(folder, config) as daemon:
        found = run_ranks(2, attach, [daemon.endpoint, "ipc:///nowhere/control.sock"], {"timeout": 1})
    assert found == [("OtherRankFailed", {"cause_code": "NoServer"}), ("NoServer", {})]


def test_ranks_of_daemons_with_other_tables_are_refused(folder: Path) -> None:
    """Each would read its part of another table for the others."""
    geometry = {"engram_layer_ids": [1], "engram_max_ngram_size": 4, "engram_vocab_size": 300, "engram_n_heads": 8}
    dummy = {"load_format": "dummy", "geometry": geometry, "engram_config": WHOLE}
    daemons = [Daemon(folder / str(seed), {**dummy, "seed": seed}) for seed in (1, 2)]
    try:
        for daemon in daemons:
            daemon.wait_for()
        found = run_ranks(2, attach, [daemon.endpoint for daemon in daemons], {})
        assert [code for code, _ in found] == ["NodesDiffer"] * 2
        assert all("layer 1 root" in fields["differing"] for _, fields in found)
        assert run_ranks(2, attach, [daemons[0].endpoint], {}) == ["attached"] * 2
    finally:
        for daemon in daemons:
            daemon.kill()


def test_without_a_group_of_its_ranks_a_client_is_told_so(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": WHOLE}
    with serving(folder, config) as daemon, pytest.raises(GroupInvalid) as caught:
        connect(daemon.endpoint, rank=0, world_size=2, split_reads=True)
    assert (caught.value.found, caught.value.world_size) == (1, 2)
