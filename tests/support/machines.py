"""Machines for plans: facts as Machine.read would give them, and recorded trees for it to read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engram_server.machine import FileSystem, HugePool, Machine, NumaNode

GIB = 1 << 30
SHM = FileSystem(path="/dev/shm", kind="tmpfs", total=512 * GIB, available=512 * GIB, page_bytes=4096)


def machine(**changes: Any) -> Machine:
    """A large, plain machine; `changes` are fields of Machine."""
    facts: dict[str, Any] = {
        "mem_total": 1024 * GIB,
        "mem_available": 1000 * GIB,
        "limits": (),
        "huge_pool": HugePool(total=0, free=0, reserved=0),
        "thp_enabled": "madvise",
        "thp_shmem": "never",
        "kernel": (6, 8),
        "nodes": (NumaNode(id=0, total=1024 * GIB, available=1000 * GIB),),
        "cpus": 32,
        "shm": SHM,
        "folder": None,
    }
    return Machine(**facts | changes)


def record(root: Path, files: dict[str, str]) -> Path:
    """Writes a tree of files under `root`, as a machine's /proc and /sys were recorded."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       100000 kB\nMemFree:         1000 kB\nMemAvailable:    80000 kB\nHugePages_Total:       0\n"
