"""Every split, backing and way of asking gives the checkpoint's rows, bit for bit, in real rank processes."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_client import connect
from engram_client.layout import shard
from tests.support.daemon import Daemon, running, wait_until
from tests.support.ranks import run_ranks
from tests.support.reference import CheckpointReference

TP_SIZES = (1, 2, 3, 4, 5, 7, 8, 32)
BACKINGS = ("memfd", "posix_shm", "file")
TOKENS = 6


@contextlib.contextmanager
def tmpfs(folder: Path, size: str = "256m") -> Iterator[Path]:
    """A tmpfs of the test's own; who may not mount one gets a folder in /dev/shm, which is one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},huge=advise", "engram-test", folder]).returncode:
        with tempfile.TemporaryDirectory(prefix="engram-test-", dir=roomy_shm()) as instead:
            yield Path(instead)
        return
    try:
        yield folder
    finally:
        # a killed daemon's child, which dies right after it, may still hold a file there
        wait_until(lambda: subprocess.run(["umount", folder], check=False).returncode == 0, f"umount {folder}")


def roomy_shm() -> str:
    if shutil.disk_usage("/dev/shm").free < 256 << 20:
        pytest.skip("/dev/shm has less than 256 MiB free")
    return "/dev/shm"


@contextlib.contextmanager
def host_section(backing: str, folder: Path) -> Iterator[dict[str, Any]]:
    if backing == "file":
        with tmpfs(folder / "tmpfs") as path:
            yield {"backing": backing, "path": str(path), "keep": "off"}
        return
    if backing == "posix_shm":
        roomy_shm()
    yield {"backing": backing, "keep": "off"}


def ask_everything(rank: int, world_size: int, endpoint: str, checkpoint: str) -> int:
    """One rank: looks rows up in every way there is, compares each with the reference, returns how many."""
    import torch

    torch.set_num_threads(1)
    reference = CheckpointReference(Path(checkpoint))
    verified = 0

    def same(rows: torch.Tensor, layer: int, ids: np.ndarray[Any, Any]) -> int:
        expected = reference.rows(layer, ids)
        assert rows.dtype == torch.bfloat16
        assert rows.shape == expected.shape
        np.testing.assert_array_equal(rows.view(torch.int16).numpy(), expected.view(np.int16))
        return ids.size

    with connect(endpoint, rank=rank, world_size=world_size) as client:
        for layer in client.layers:
            table = client.table(layer)
            starts = np.concatenate([[0], np.cumsum(table.columns)])
            shared = np.random.default_rng(layer)
            hashed = shared.integers(starts[:-1], starts[1:], (TOKENS, 24))
            hashed[0], hashed[1] = starts[:-1], starts[1:] - 1
            for tp in (3, 5, 7, 32):  # both sides of every border of a split that ignores columns
                borders = [shard(table_geometry(table), r, tp).row_start for r in range(tp)]
                plain = np.array([*borders, *(b - 1 for b in borders), -1, table.rows - 1])
                verified += same(table.lookup(torch.from_numpy(plain)), layer, plain)
            verified += same(table.lookup(torch.from_numpy(hashed), hashed=True), layer, hashed)
            narrow = hashed.astype(np.int32)
            out = torch.full((TOKENS, 24, 256), 7.0, dtype=torch.bfloat16)
            assert table.lookup(torch.from_numpy(narrow), out, hashed=True) is out
            verified += same(out, layer, hashed)
            counts = [(r * 2) % 5 for r in range(world_size)]  # rank 0 has no tokens
            own = np.random.default_rng(100 + rank).integers(starts[:-1], starts[1:], (counts[rank], 24))
            for given in (counts, None):
                rows = table.lookup(torch.from_numpy(own), hashed=True, tokens="own", counts=given)
                verified += same(rows, layer, own)
            rows = table.lookup(torch.from_numpy(own), tokens="own", counts=counts)
            verified += same(rows, layer, own)
            assert table.invalid_ids == 0
    return verified


def table_geometry(table: Any) -> Any:
    from engram_client.layout import TableGeometry

    return TableGeometry(layer_id=table.layer_id, columns=tuple(table.columns))


@pytest.mark.parametrize("backing", BACKINGS)
def test_with_per_node_any_world_size_reads_the_checkpoints_rows(backing: str, folder: Path, checkpoint: Path) -> None:
    with host_section(backing, folder) as host:
        config = {
            "model_path": str(checkpoint),
            "engram_config": {"placement": "cpu", "replication": "per_node"},
            "host": host,
        }
        with running(folder, config) as daemon:
            assert all(s.info.backing == backing for s in daemon.status().segments)
            for world_size in TP_SIZES:
                verified = run_ranks(world_size, ask_everything, daemon.endpoint, str(checkpoint))
                assert len(verified) == world_size
                assert min(verified) > 0
            assert daemon.stop() == 0
            assert daemon.names_left() == []


@pytest.mark.parametrize("backing", BACKINGS)
@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_with_replication_none_the_shards_add_up_to_the_checkpoints_rows(
    tp_size: int, backing: str, folder: Path, checkpoint: Path
) -> None:
    with host_section(backing, folder) as host:
        config = {
            "model_path": str(checkpoint),
            "tp_size": tp_size,
            "engram_config": {"placement": "cpu", "replication": "none"},
            "host": host,
        }
        with running(folder, config) as daemon:
            assert len(daemon.status().segments) == 2 * tp_size
            verified = run_ranks(tp_size, ask_everything, daemon.endpoint, str(checkpoint))
            assert min(verified) > 0
            assert daemon.stop() == 0
            assert daemon.names_left() == []


def test_the_dummy_format_gives_the_rows_that_its_generator_names(folder: Path) -> None:
    """Any rank can check any row without files: the rows come from (seed, layer, row) alone."""
    import torch

    from engram_server import generate
    from tests.support.reference import dequantise

    keys = {
        "engram_layer_ids": [1, 14],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 500,
        "engram_n_heads": 8,
    }
    config = {
        "load_format": "dummy",
        "geometry": keys,
        "seed": 5,
        "engram_config": {"placement": "cpu", "replication": "per_node"},
    }
    with running(folder, config) as daemon, connect(daemon.endpoint, rank=0, world_size=1) as client:
        for layer in client.layers:
            table = client.table(layer)
            ids = np.array([0, 1, 777, table.rows - 1])
            rows = table.lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
            for row, row_id in zip(rows, ids, strict=True):
                expected = dequantise(*generate.rows(layer, 5, int(row_id), 1))[0]
                np.testing.assert_array_equal(row, expected.view(np.int16))


def test_two_engines_and_a_tool_share_one_copy_at_once(per_node: Daemon, checkpoint: Path) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(connect(per_node.endpoint, rank=r, world_size=n, name=f"engine-{n}"))
            for n in (2, 3)
            for r in range(n)
        ]
        status = per_node.status()
        assert sorted((lease.name, lease.rank) for lease in status.leases) == [
            ("engine-2", 0),
            ("engine-2", 1),
            ("engine-3", 0),
            ("engine-3", 1),
            ("engine-3", 2),
        ]
        assert len(status.segments) == 2
        assert all(client.server_alive for client in clients)
    wait_until(lambda: not per_node.status().leases, "the leases' end")
