"""Attach of a rank to a loaded 2 GiB table, its control plane apart; the idle daemon; the daemon's imports."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from engram_client import connect
from engram_client.control import ControlConnection
from engram_client.handover import HandoverConnection
from engram_client.protocol import Attach, Attached
from tests.support.daemon import Daemon, running

TABLE_GIB = 2
ROWS_GIB = (1 << 30) // 264
ATTACHES = 50
IDLE_S = 10.0
IMPORTS = 7


def run() -> dict[str, Any]:
    """Milliseconds (median and worst of 50), percent of a core, and milliseconds of imports."""
    geometry = {
        "engram_layer_ids": [1],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": TABLE_GIB * ROWS_GIB // 24,
        "engram_n_heads": 8,
    }
    config = {
        "load_format": "dummy",
        "geometry": geometry,
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "load": {"verify": "off"},
    }
    with tempfile.TemporaryDirectory(prefix="eb-") as folder, running(Path(folder), config) as daemon:
        whole = [_attach_ms(daemon) for _ in range(ATTACHES)]
        control = [_control_ms(daemon) for _ in range(ATTACHES)]
        idle = _idle_percent(daemon)
    return {
        "attach_ms": statistics.median(whole),
        "attach_worst_ms": max(whole),
        "control_plane_ms": statistics.median(control),
        "idle_daemon_percent_of_a_core": idle,
        "daemon_imports_ms": statistics.median(_import_ms("engram_server.cli") for _ in range(IMPORTS)),
        "python_itself_ms": statistics.median(_import_ms("sys") for _ in range(IMPORTS)),
    }


def _attach_ms(daemon: Daemon) -> float:
    started = time.perf_counter()
    with connect(daemon.endpoint, rank=0, world_size=1):
        return 1e3 * (time.perf_counter() - started)


def _control_ms(daemon: Daemon) -> float:
    """Everything of an attach but the mapping: two connections, the request, the descriptors."""
    request = Attach(rank=0, world_size=1, device="cpu", name="bench")
    started = time.perf_counter()
    with HandoverConnection.open(str(daemon.handover_path), 5) as lease:
        with ControlConnection(daemon.endpoint, lease) as control:
            for reply in control.request(request, 5, "attaching"):
                if isinstance(reply, Attached):
                    break
        descriptors = lease.redeem(reply.ticket, 5)
        took = 1e3 * (time.perf_counter() - started)
        for descriptor in descriptors.values():
            os.close(descriptor)
    return took


def _idle_percent(daemon: Daemon) -> float:
    """Processor time that the daemon takes while one client is attached and nothing happens."""
    process = psutil.Process(daemon.pid)
    with connect(daemon.endpoint, rank=0, world_size=1):
        before = process.cpu_times()
        time.sleep(IDLE_S)
        after = process.cpu_times()
    return 100 * (after.user + after.system - before.user - before.system) / IDLE_S


def _import_ms(module: str) -> float:
    """A fresh interpreter that imports `module`, start and end of the interpreter included."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return 1e3 * (time.perf_counter() - started)
