"""Restart of a daemon with a loaded 2 GiB table: from exec to ready, and what a reader sees meanwhile."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_client import Client, connect
from engram_client.errors import ConnectError
from engram_client.handover import HandoverConnection
from engram_client.protocol import Placement, Replication
from engram_server import generate
from tests.support.daemon import Daemon
from tests.support.reference import dequantise
from tests.support.service_manager import ServiceManager

TABLE_GIB = 2
ROWS_GIB = (1 << 30) // 264
RESTARTS = 7
SEED = 3
IDS = 64
LIMIT_S = 60.0


def run() -> dict[str, Any]:
    """Milliseconds from exec to the first attach that succeeds, median and worst, by way of keeping."""
    return {way: _measure(way) for way in ("posix_shm", "fd_store")}


def _measure(way: str) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eb-")))
        manager = stack.enter_context(ServiceManager(folder / "manager")) if way == "fd_store" else None
        daemon = _start(folder, way, manager, "auto")
        daemon.wait_for()
        reader = stack.enter_context(connect(daemon.endpoint, rank=0, world_size=1))
        looking = stack.enter_context(_Looking(reader))
        took = []
        for restart in range(RESTARTS):
            (daemon.kill if restart % 2 else daemon.stop)()
            # the last one keeps nothing, and so leaves nothing
            daemon = _start(folder, way, manager, "off" if restart == RESTARTS - 1 else "auto")
            took.append(_until_ready_ms(daemon))
            if not daemon.status().adopted:
                raise RuntimeError(f"the tables were loaded again:\n{daemon.log}")
        daemon.stop()
        return {
            "exec_to_ready_ms": statistics.median(took),
            "worst_ms": max(took),
            "lookups_meanwhile": looking.done,
            "wrong_rows_meanwhile": looking.wrong,
        }


def _start(folder: Path, way: str, manager: ServiceManager | None, keep: str) -> Daemon:
    config = {
        "load_format": "dummy",
        "seed": SEED,
        "geometry": {
            "engram_layer_ids": [1],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": TABLE_GIB * ROWS_GIB // 24,
            "engram_n_heads": 8,
        },
        "engram_config": {"placement": str(Placement.CPU), "replication": str(Replication.PER_NODE)},
        "host": {"backing": "memfd" if way == "fd_store" else way, "keep": keep},
        "load": {"verify": "off"},
    }
    if manager is None:
        return Daemon(folder, config)
    return Daemon(folder, config, wrapper=manager.wrapper(), environ=manager.environ(), pass_fds=manager.descriptors())


def _until_ready_ms(daemon: Daemon) -> float:
    started = time.perf_counter()
    while time.perf_counter() - started < LIMIT_S:
        try:
            with HandoverConnection.open(str(daemon.handover_path), 0):
                with connect(daemon.endpoint, rank=0, world_size=1, timeout=5):
                    return 1e3 * (time.perf_counter() - started)
        except ConnectError:
            time.sleep(0.002)
    raise TimeoutError(daemon.log)


class _Looking:
    """Lookups in a thread, each compared with the rows that the seed names."""

    def __init__(self, client: Client) -> None:
        self.done = self.wrong = 0
        self._table = client.table(client.layers[0])
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="looking")

    def _run(self) -> None:
        for ids, expected in self._batches():
            rows = self._table.lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
            self.wrong += int((rows != expected).any(axis=1).sum())
            self.done += 1
            if self._stop.wait(0.01):
                return

    def _batches(self) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        random = np.random.default_rng(1)
        while True:
            first = int(random.integers(0, self._table.rows - IDS))
            made = dequantise(*generate.rows(self._table.layer_id, SEED, first, IDS))
            yield np.arange(first, first + IDS), made.view(np.int16)

    def __enter__(self) -> _Looking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
