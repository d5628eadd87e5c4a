"""Loads in a process of its own, for tests that need another mount namespace, a cgroup, or a parent to kill.

    python -m tests.support.load_cli '{"config": {...}, "tag": "t", "job": {...}, "fill": "/dev/shm"}'

Prints one line of JSON: {"rows": true, "huge": …} or {"error": code, "fields": …}, with the names left behind.
`fill`: a folder whose free space is taken after the plan was made and the segments created.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engram_client.errors import EngramError
from engram_server.config import Config
from engram_server.loader import load
from engram_server.segments import create_segments
from tests.support.loads import checkpoint_rows, open_descriptors, prepare, shm_names, stored_rows


def main() -> None:
    order = json.loads(sys.argv[1])
    settings = msgspec.convert(order["config"], Config)
    before = open_descriptors()
    outcome = _outcome(settings, order)
    outcome["names"] = shm_names(order["tag"], settings.host.path or "/dev/shm")
    outcome["descriptors"] = sorted(open_descriptors() - before)
    print(json.dumps(outcome), flush=True)


def _outcome(settings: Config, order: dict[str, Any]) -> dict[str, Any]:
    segments = []
    phases: list[str] = []
    try:
        plan, job = prepare(settings, **order.get("job", {}))
        phases.append("planned")
        segments = create_segments(plan, order["tag"])
        if "fill" in order:
            _take_all_space(order["fill"])
        result = asyncio.run(load(job, segments, lambda progress: phases.append(progress.phase)))
        for segment in segments:
            segment.seal()
        same = all(
            np.array_equal(
                stored_rows(segment),
                checkpoint_rows(Path(str(settings.model_path)), segment.info.layer_id)[
                    segment.info.shard.row_start : segment.info.shard.row_stop
                ],
            )
            for segment in segments
        )
        return {
            "rows": same,
            "huge": sum(result.huge_bytes.values()),
            "needed": plan.needed_bytes,
            "remarks": [*plan.remarks, *result.remarks],
        }
    except EngramError as error:
        return {"error": error.code, "fields": msgspec.to_builtins(error.fields), "phases": phases}
    finally:
        for segment in segments:
            segment.discard()


def _take_all_space(folder: str) -> None:
    stat = os.statvfs(folder)
    with open(os.path.join(folder, "filler"), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, stat.f_bavail - 8) * stat.f_frsize)


if __name__ == "__main__":
    main()
