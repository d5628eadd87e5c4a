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
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        # As pip leaves an installation: compiled. A checkout whose bytecode may not be written compiles at each start.
        compiled = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        imports = {module: _import_ms(module, compiled) for module in ("engram_server.cli", "sys")}
        sockets = [_sockets_ms(Path(folder) / str(number), config, compiled) for number in range(IMPORTS)]
    return {
        "attach_ms": statistics.median(whole),
        "attach_worst_ms": max(whole),
        "control_plane_ms": statistics.median(control),
        "idle_daemon_percent_of_a_core": idle,
        "daemon_imports_ms": imports["engram_server.cli"],
        "python_itself_ms": imports["sys"],
        "exec_to_sockets_ms": statistics.median(sockets),
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


def _import_ms(module: str, environ: dict[str, str]) -> float:
    """A fresh interpreter that imports `module`, start and end of the interpreter included: the median of some, the
    first one, which may compile, left out."""
    took = []
    for _ in range(1 + IMPORTS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env={**os.environ, **environ})
        took.append(1e3 * (time.perf_counter() - started))
    return statistics.median(took[1:])


def _sockets_ms(folder: Path, config: dict[str, Any], environ: dict[str, str]) -> float:
    """From exec to both sockets bound, the interpreter's start included; the load that follows is cut short."""
    started = time.perf_counter()
    daemon = Daemon(folder, config, environ=environ)
    try:
        while not daemon.control_path.exists():  # the handover socket comes first
            if daemon.process.poll() is not None:
                raise RuntimeError(daemon.log)
            time.sleep(0.001)
        return 1e3 * (time.perf_counter() - started)
    finally:
        daemon.stop()
