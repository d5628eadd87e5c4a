"""How long the Engram part of an engine's restart takes: the daemon's tables against SGLang's own, in one run.

    make bench-sglang

Every row is a process started from nothing, on a warm page cache: SGLang's own loading never reads the disk here.
"Engram part" is what an engine spends on its tables: hooks, building the layer, loading its weights with the proof
of 256 rows, and the first lookup. The import of SGLang is shown beside it and is the same for both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engram_client.layout import ROW_BYTES
from engram_server.make_checkpoint import make_checkpoint
from tests.sglang.conftest import STAND_IN, write_engine_weights
from tests.support.daemon import running

PARTS = ("plugins", "build", "load", "first_lookup")
COLUMNS = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, help="size of the table")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eg-", dir="/tmp") as name:
        folder = Path(name)
        checkpoint = folder / "model"
        vocab_size = int(options.gib * 2**30 / ROW_BYTES / COLUMNS)
        make_checkpoint(checkpoint, engram_vocab_size=vocab_size, seed=1, layer_ids=[1])
        write_engine_weights(checkpoint)
        config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
        with running(folder / "run", config) as daemon:
            own, served = [], []
            for _ in range(options.rounds):
                own.append(engine(folder, checkpoint, {}))
                served.append(engine(folder, checkpoint, {"ENGRAM_ENDPOINT": daemon.endpoint}))
    print(f"{options.gib:g} GiB table, median of {options.rounds} (min to max), seconds")
    print(f"| {'tables':14} | import of SGLang | {' | '.join(PARTS)} | Engram part |")
    print(f"|---|---|{'---|' * len(PARTS)}---|")
    for title, runs in (("SGLang's own", own), ("the daemon's", served)):
        cells = [spread([run["import_s"] for run in runs])]
        cells += [spread([run["times"][part] for run in runs]) for part in PARTS]
        cells.append(spread([sum(run["times"][part] for part in PARTS) for run in runs]))
        print(f"| {title:14} | {' | '.join(cells)} |")
    return 0


def engine(folder: Path, checkpoint: Path, environ: dict[str, str]) -> dict[str, Any]:
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"checkpoint": str(checkpoint), "random_ids": True, "lengths": [16]}))
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sglang.engine", str(spec)],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        # Without GPUs: SGLang would import what tests/sglang/requirements.txt leaves out.
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([STAND_IN, str(root)]),
            **environ,
        },
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "error" in facts:
        raise RuntimeError(facts["trace"])
    return facts


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    sys.exit(main())
