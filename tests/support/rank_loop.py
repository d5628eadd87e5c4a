"""A rank for tests to kill, stop and outlive: attaches and looks rows up in a loop, and says what it saw.

`python -m tests.support.rank_loop MODE ENDPOINT CHECKPOINT SECONDS`; MODE attach: only attaches, without
torch, so that it starts fast; lookup: attaches once and looks rows up for ever; churn: attaches, looks rows up,
compares them, detaches, until SECONDS have passed, and prints a JSON line of what it counted.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from engram_client import connect
from engram_client.errors import ConnectError
from engram_client.protocol import Progress

ATTACH_LIMIT_S = 60.0
IDS = 32


def attach(endpoint: str) -> None:
    print("go", flush=True)
    while True:
        with connect(endpoint, rank=0, world_size=1, timeout=ATTACH_LIMIT_S):
            pass


def lookup(endpoint: str, checkpoint: str) -> None:
    import torch

    reference = _reference(checkpoint)
    with connect(endpoint, rank=0, world_size=1, timeout=ATTACH_LIMIT_S) as client:
        torch.set_num_threads(1)
        print("go", flush=True)
        while True:
            if _wrong_rows(client, reference):
                os._exit(3)


def churn(endpoint: str, checkpoint: str, seconds: float) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    reference = _reference(checkpoint)
    counted: dict[str, Any] = {"attached": 0, "wrong": 0, "cut": 0}
    print("go", flush=True)
    until = time.monotonic() + seconds
    before: tuple[int, int] | None = None
    while time.monotonic() < until:
        try:
            with connect(endpoint, rank=0, world_size=1, timeout=ATTACH_LIMIT_S, on_progress=_ignore) as client:
                counted["wrong"] += _wrong_rows(client, reference)
                counted["attached"] += 1
        except ConnectError:  # the daemon went away in the middle, and said so by a name
            counted["cut"] += 1
        if before is None and counted["attached"] >= 3:  # what is loaded at first use has been
            before = _held()
    after = _held()
    counted["descriptors"] = after[0] - (before or after)[0]
    counted["grown_bytes"] = after[1] - (before or after)[1]
    return counted


def _ignore(progress: Progress) -> None:
    pass


def _held() -> tuple[int, int]:
    """Open descriptors, and bytes of private memory, when the threads of clients that were closed have ended."""
    import gc

    for thread in threading.enumerate():
        if thread.name == "engram-lease":
            thread.join(ATTACH_LIMIT_S)
    gc.collect()
    status = Path("/proc/self/status").read_text()
    anonymous = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    return len(os.listdir("/proc/self/fd")), anonymous * 1024


def _reference(checkpoint: str) -> Any:
    from tests.support.reference import CheckpointReference

    return CheckpointReference(Path(checkpoint))


def _wrong_rows(client: Any, reference: Any) -> int:
    import numpy as np
    import torch

    wrong = 0
    for layer in client.layers:
        table = client.table(layer)
        ids = np.random.default_rng().integers(0, table.rows, IDS)
        found = table.lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
        wrong += int((found != reference.rows(layer, ids).view(np.int16)).any(axis=1).sum())
    return wrong


def main() -> int:
    mode, endpoint, checkpoint, seconds = sys.argv[1:]
    if mode == "attach":
        attach(endpoint)
    elif mode == "lookup":
        lookup(endpoint, checkpoint)
    else:
        print(json.dumps(churn(endpoint, checkpoint, float(seconds))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
