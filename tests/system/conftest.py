"""Fixtures of the system tests: a checkpoint with every code in it, and short folders for sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon, running
from tests.support.reference import CheckpointReference

VOCAB = 1500


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: socket paths end at 107 bytes, pytest's own folders may not."""
    path = Path(tempfile.mkdtemp(prefix="eg-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 19 MiB in two tables, with all FP8 codes and all scale bytes."""
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    make_checkpoint(path, engram_vocab_size=VOCAB, seed=11, every_code=True)
    return path


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> CheckpointReference:
    return CheckpointReference(checkpoint)


@pytest.fixture
def per_node(folder: Path, checkpoint: Path) -> Iterator[Daemon]:
    """A ready daemon that serves whole tables."""
    config = {
        "model_path": str(checkpoint),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
    }
    with running(folder, config) as daemon:
        yield daemon
