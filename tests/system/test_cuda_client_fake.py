"""GPU ranks end to end on the fake driver: real daemon and rank processes, kernels as numpy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_client import connect
from engram_client.cuda.access import DRIVER_VARIABLE, cuda_driver
from engram_client.errors import (
    InvalidIds,
)
from engram_client.layout import TableGeometry
from tests.support import fake_runtime
from tests.support.daemon import Daemon, running
from tests.support.fake_driver import FakeDriver
from tests.support.ranks import run_ranks
from tests.support.reference import CheckpointReference

FAKE = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver"}
TOKENS = 5


def on_fake(machine: dict[str, Any], fail: str = "") -> None:
    """Makes this process one on the fake machine."""
    os.environ.update(FAKE, ENGRAM_FAKE_CUDA=json.dumps(machine), ENGRAM_FAKE_FAIL=fail)
    fake_runtime.install()


@contextmanager
def daemon_of(
    folder: Path, checkpoint: Path, engram: dict[str, str], machine: dict[str, Any], **rest: Any
) -> Iterator[Daemon]:
    config = {"model_path": str(checkpoint), "engram_config": engram, **rest}
    with running(folder, config, environ=FAKE | {"ENGRAM_FAKE_CUDA": json.dumps(machine)}) as daemon:
        yield daemon


def hashed_ids(columns: tuple[int, ...], tokens: int, seed: int) -> torch.Tensor:
    starts = TableGeometry(layer_id=0, columns=columns).column_starts
    generator = np.random.default_rng(seed)
    ids = np.stack([generator.integers(low, high, tokens) for low, high in pairwise(starts)], axis=1)
    if tokens > 2:
        ids[0] = 0  # an idle slot
        ids[1, 3], ids[2, 5] = -1, -(2**62)
    return torch.from_numpy(ids)


def ask_everything(rank: int, world_size: int, endpoint: str, checkpoint: str, machine: dict[str, Any]) -> int:
    """Every way of asking, against the checkpoint's files; the number of rows compared."""
    on_fake(machine)
    reference = CheckpointReference(Path(checkpoint))
    compared = 0

    def same(rows: torch.Tensor, layer: int, ids: torch.Tensor, hashed: bool) -> None:
        nonlocal compared
        expected = reference.rows(layer, ids.numpy()).view(np.int16)
        if hashed:
            starts = np.array(TableGeometry(layer_id=0, columns=client.table(layer).columns).column_starts)
            inside = (ids.numpy() >= starts[:-1]) & (ids.numpy() < starts[1:])
            expected = np.where(inside[..., None], expected, 0)
        np.testing.assert_array_equal(rows.view(torch.int16).numpy(), expected)
        compared += ids.numel()

    def raw_is(found: Any, layer: int, ids: torch.Tensor) -> None:
        good = (ids >= 0).numpy()[..., None]
        values, scales = reference.raw(layer, np.maximum(ids.numpy(), 0))
        np.testing.assert_array_equal(found.values.numpy(), np.where(good, values.reshape(*ids.shape, 256), 0))
        np.testing.assert_array_equal(found.scales.numpy(), np.where(good, scales.reshape(*ids.shape, 8), 0))

    with connect(endpoint, rank=rank, world_size=world_size, device=f"cuda:{rank % machine['gpus']}") as client:
        assert client.layers == (1, 14)
        for layer in client.layers:
            table = client.table(layer)
            ids = hashed_ids(table.columns, TOKENS, seed=layer)
            plain = torch.from_numpy(np.random.default_rng(layer).integers(-1, table.rows, (TOKENS, 24)))
            out = torch.full((TOKENS, 24, 256), 5.0, dtype=torch.bfloat16)
            for hashed, batch in ((True, ids), (False, plain)):
                same(table.lookup(batch, hashed=hashed), layer, batch, hashed)
                assert table.lookup(batch, out, hashed=hashed) is out
                same(out, layer, batch, hashed)
                same(table.lookup(batch.int(), hashed=hashed), layer, batch.int().long(), hashed)
                strided = torch.stack([batch, batch.flip(0), batch], dim=1)
                for at in range(2):
                    same(table.lookup(strided[:, at], hashed=hashed), layer, strided[:, at], hashed)
                same(table.lookup(strided, hashed=hashed), layer, strided, hashed)
                pending = table.prefetch(batch, hashed=hashed)
                same(pending.wait(), layer, batch, hashed)
                assert pending.wait() is pending.wait()
                own = batch[: rank % 3]
                counts = [min(r % 3, TOKENS) for r in range(world_size)]
                for given in (counts, None):
                    same(table.lookup(own, hashed=hashed, tokens="own", counts=given), layer, own, hashed)
                same(table.prefetch(own, hashed=hashed, tokens="own", counts=counts).wait(), layer, own, hashed)
            same(table.lookup(plain.view(-1)[:7]), layer, plain.view(-1)[:7], False)
            same(table.lookup(plain[0, 0]), layer, plain[0, 0], False)
            same(table.lookup(plain.view(TOKENS, 12, 2)), layer, plain.view(TOKENS, 12, 2), False)
            same(table.lookup(plain[:0]), layer, plain[:0], False)
            same(table.lookup(plain.view(TOKENS, 2, 12)[:, :0]), layer, plain.view(TOKENS, 2, 12)[:, :0], False)
            raw_is(table.lookup(plain, raw=True), layer, plain)
            given = torch.empty(TOKENS, 24, 256, dtype=torch.uint8), torch.empty(TOKENS, 24, 8, dtype=torch.uint8)
            assert table.lookup(plain, given, raw=True).values is given[0]
            raw_is(table.lookup(plain, given, raw=True), layer, plain)
            assert table.invalid_ids == 0
            client.check()
            bad = ids.clone()
            bad[1, 0], bad[2, 1], bad[3, 23], bad[0, 2] = table.rows, 2**62, table.columns[0], 0
            same(table.lookup(bad, hashed=True), layer, bad, True)
            assert table.invalid_ids == 3
            with pytest.raises(InvalidIds) as caught:
                client.check()
            assert (caught.value.layer_id, caught.value.count) == (layer, 3)
            assert (caught.value.first, caught.value.position) == (table.rows, 24)
            client.check()
        tables = [client.table(layer) for layer in client.layers]
        for hashed in (True, False):
            both = torch.stack([hashed_ids(t.columns, TOKENS, seed=9) for t in tables], dim=1)
            rows = client.lookup_all(both, hashed=hashed)
            assert rows.shape == (TOKENS, 2, 24, 256)
            for index, layer in enumerate(client.layers):
                assert rows[:, index].is_contiguous()
                same(rows[:, index], layer, both[:, index], hashed)
    driver = cuda_driver()
    assert isinstance(driver, FakeDriver)
    assert driver.leaks() == [f"1 of context {rank % machine['gpus']}"], "the kernels' own"
    return compared


@pytest.mark.parametrize(
    ("engram", "host", "world_size", "gpus"),
    [
        ({"placement": "cpu", "replication": "per_node"}, "cuda_host", 2, 2),
        ({"placement": "cpu", "replication": "per_node"}, "memfd", 1, 1),
        ({"placement": "cpu", "replication": "per_node"}, "posix_shm", 1, 1),
        ({"placement": "cpu"}, "cuda_host", 3, 2),
        ({"placement": "cpu"}, "memfd", 5, 1),
        ({"placement": "gpu"}, "auto", 1, 1),
        ({"placement": "gpu"}, "auto", 3, 3),
        ({"placement": "gpu"}, "auto", 5, 5),
        ({"placement": "gpu", "lookup": "peer_read"}, "auto", 2, 2),
        ({"placement": "gpu", "lookup": "peer_read"}, "auto", 7, 7),
        ({"placement": "gpu", "replication": "per_node"}, "auto", 3, 2),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_every_way_of_asking_gives_the_checkpoints_rows(
    folder: Path, checkpoint: Path, engram: dict[str, str], host: str, world_size: int, gpus: int
) -> None:
    machine = {"gpus": gpus}
    size = {} if "replication" in engram else {"tp_size": world_size}
    with daemon_of(folder, checkpoint, engram, machine, host={"backing": host}, **size) as daemon:
        compared = run_ranks(world_size, ask_everything, daemon.endpoint, str(checkpoint), machine, timeout_s=100)
        assert len(set(compared)) <= 3
        assert min(compared) > 4000
