"""How near `engram-ctl doctor` comes to the load that follows: predicted seconds over measured ones."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon

VOCAB = 40_000
"""About half a GiB in two tables."""
ROUNDS = 5


def run() -> dict[str, Any]:
    """The median ratio over five pairs of runs, and the ratios; wanted: 0.5 to 2."""
    with tempfile.TemporaryDirectory(prefix="eb-") as name:
        folder = Path(name)
        make_checkpoint(folder / "model", engram_vocab_size=VOCAB, seed=1)
        config = {
            "model_path": str(folder / "model"),
            "engram_config": {"placement": "cpu", "replication": "per_node"},
            "host": {"keep": "off"},
        }
        ratios = [_ratio(folder / str(number), config) for number in range(ROUNDS)]
    return {"predicted_over_measured": statistics.median(ratios), "ratios": str([round(each, 2) for each in ratios])}


def _ratio(folder: Path, config: dict[str, Any]) -> float:
    folder.mkdir()
    path = folder / "doctor.json"
    path.write_text(json.dumps(config))
    command = [sys.executable, "-m", "engram_server.ctl", "doctor", "--config", str(path), "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    daemon = Daemon(folder, config)
    try:
        report = daemon.wait_for().report
    finally:
        daemon.stop()
    if report is None:
        raise RuntimeError("a daemon that is ready has no load report")
    return float(json.loads(said)["forecast"]["load_seconds"]) / report.seconds
