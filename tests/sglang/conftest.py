"""The real SGLang beside ours; `make test-sglang` makes the environment for it.

Nothing here is collected where SGLang is not installed: `make test` has no such environment.
Engines run on the CPU and see no GPU, whatever the machine has, unless a test asks for one on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest

HERE = Path(__file__).parent
STAND_IN = str(HERE / "stand_in")
STAND_IN_GPU = str(HERE / "stand_in_gpu")
"""What SGLang imports on a machine with a GPU only."""
ENGINE_LIMIT_S = 100.0
STOP_LIMIT_S = 10.0
VOCAB = 1500
GPUS = 0

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    given = os.environ.get("PYTHONPATH")
    sys.path.insert(0, STAND_IN)
    os.environ["PYTHONPATH"] = os.pathsep.join([STAND_IN, str(HERE.parents[1]), *([given] if given else [])])
    for name in [name for name in os.environ if name.startswith(("ENGRAM_", "SGLANG_"))]:
        del os.environ[name]
    # Forked from a process that has imported SGLang and has no threads: 8 s of CPU time less for each engine.
    FORKS = multiprocessing.get_context("forkserver")
    FORKS.set_forkserver_preload(["tests.sglang.engine"])
    SPAWNS = multiprocessing.get_context("spawn")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang's imports
        import torch

        GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if GPUS:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
                forkserver.ensure_running()
            sys.path.insert(1, STAND_IN_GPU)
        import tests.sglang.engine  # noqa: F401

from engram_server.make_checkpoint import make_checkpoint  # noqa: E402
from tests.support.daemon import Daemon, running  # noqa: E402
from tests.system.conftest import folder  # noqa: E402

__all__ = ["folder"]


def write_engine_weights(checkpoint: Path) -> None:
    """What SGLang's layers load besides their tables, seeded."""
    import torch
    from safetensors.torch import save_file

    from tests.sglang.engine import ENGINE_FILE, HIDDEN, STREAMS

    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / 8).to(torch.bfloat16)

    weights = {}
    for layer in json.loads((checkpoint / "config.json").read_text())["text_config"]["engram_layer_ids"]:
        weights[f"layers.{layer}.engram.wkv.weight"] = random(HIDDEN * (STREAMS + 1), 24 * 256)
        weights[f"layers.{layer}.engram.q_weight"] = random(STREAMS, HIDDEN)
        weights[f"layers.{layer}.engram.k_weight"] = random(STREAMS, HIDDEN)
    save_file(weights, str(checkpoint / ENGINE_FILE))


def _checkpoint(path: Path, **options: Any) -> Path:
    make_checkpoint(path, **{"engram_vocab_size": VOCAB, "seed": 11, **options})
    write_engine_weights(path)
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 19 MiB in two tables, harmless values: what a layer computes from them is finite."""
    return _checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="session")
def every_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with all FP8 codes and all scale bytes."""
    return _checkpoint(tmp_path_factory.mktemp("codes") / "model", every_code=True)


@pytest.fixture(scope="session")
def other_content(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other rows."""
    return _checkpoint(tmp_path_factory.mktemp("other") / "model", seed=12)


@pytest.fixture
def daemon(folder: Path, checkpoint: Path) -> Iterator[Daemon]:
    """A ready daemon that serves whole tables of `checkpoint`."""
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config) as ready:
        yield ready


class Engine:
    """A process of tests/sglang/engine.py: its facts, and the arrays it wrote."""

    def __init__(self, spec: Mapping[str, Any], environ: Mapping[str, str], arrays: Path) -> None:
        from tests.sglang.engine import run_forked

        self._arrays = arrays
        context = SPAWNS if spec.get("device") == "cuda" else FORKS
        self._connection, theirs = context.Pipe()
        given = {**spec, "out": str(arrays)}
        self._process = context.Process(target=run_forked, args=(given, dict(environ), theirs))
        self._process.start()
        theirs.close()

    def facts(self, limit_s: float = ENGINE_LIMIT_S) -> dict[str, Any]:
        """What it says when its layers have run, or have failed to. Raises TimeoutError."""
        if not self._connection.poll(limit_s):
            raise TimeoutError(f"the engine said nothing within {limit_s} s")
        found: dict[str, Any] = self._connection.recv()
        return found

    def table_share(self) -> int:
        """Pss of its table memory in bytes."""
        self._connection.send(True)
        return int(self._connection.recv())

    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self._arrays) as loaded:
            return dict(loaded)

    def end_soon(self) -> None:
        self._connection.close()

    def wait_for_end(self) -> None:
        self._process.join(STOP_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


Start = Callable[..., Engine]


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """start(checkpoint, endpoint=None, environ={}, **spec): a process; all are ended at the end."""
    engines: list[Engine] = []

    def begin(
        checkpoint: Path, endpoint: str | None = None, environ: Mapping[str, str] | None = None, **spec: Any
    ) -> Engine:
        given = {**({"ENGRAM_ENDPOINT": endpoint} if endpoint else {}), **(environ or {})}
        engine = Engine({"checkpoint": str(checkpoint), **spec}, given, folder / f"engine{len(engines)}.npz")
        engines.append(engine)
        return engine

    try:
        yield begin
    finally:
        for engine in engines:
            engine.end_soon()
        for engine in engines:
            engine.wait_for_end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Engines that are ended with the test."""
    with starting(tmp_path) as begin:
        yield begin
