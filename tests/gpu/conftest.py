"""Fixtures of the GPU tests: a checkpoint with every code in it, and short folders for sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram_server.make_checkpoint import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="eg-", dir="/dev/shm"))
    make_checkpoint(folder / "model", engram_vocab_size=1500, seed=11, every_code=True)
    yield folder / "model"
    shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eg-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
