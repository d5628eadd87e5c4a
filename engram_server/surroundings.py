"""What else a node tells before a daemon starts: what fills /dev/shm, IMEX channels, how GPUs reach host memory.

Looks only. The files are read under a root, so that a recorded machine can be judged too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from engram_client.protocol import Backing, Placement
from engram_server.config import Config
from engram_server.findings import Finding, Level, gib
from engram_server.gpus import Gpu, Gpus
from engram_server.machine import Machine
from engram_server.plan import Plan

SHM = "dev/shm"
IMEX = "dev/nvidia-caps-imex-channels"
SHOWN = 5
"""Entries of /dev/shm that are named."""
LOOKED_AT = 20_000
"""Files that are looked at, so that a folder of very many does not cost the promise of seconds."""


class Entry(msgspec.Struct, frozen=True):
    """A file of /dev/shm, or a folder with all that is in it; bytes of memory taken, not of length."""

    name: str
    nbytes: int


def largest_entries(root: str | Path, count: int = SHOWN) -> tuple[Entry, ...]:
    """The `count` entries of /dev/shm that take most memory, largest first. What may not be read counts nothing."""
    left = LOOKED_AT
    found = []
    for path in _sorted_children(Path(root) / SHM):
        nbytes = 0
        for file in _files(path):
            if left == 0:
                break
            left -= 1
            with contextlib.suppress(OSError):
                nbytes += os.lstat(file).st_blocks * 512
        found.append(Entry(path.name, nbytes))
    return tuple(sorted(found, key=lambda entry: -entry.nbytes)[:count])


def _sorted_children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _files(path: Path) -> Iterator[str]:
    yield str(path)
    if path.is_dir() and not path.is_symlink():
        for folder, _, names in os.walk(path):
            yield from (os.path.join(folder, name) for name in names)


def shm_findings(machine: Machine, plan: Plan | None, root: str | Path = "/") -> Iterator[Finding]:
    """Names what fills /dev/shm where it is short. A recording has no free bytes, so its entries are named always."""
    if machine.shm is None:
        return
    wanted = plan.needed_bytes if plan is not None and plan.backing is Backing.POSIX_SHM else 0
    short = machine.shm.available < max(wanted, machine.shm.total // 2)
    entries = [entry for entry in largest_entries(root) if entry.nbytes] if short or Path(root) != Path("/") else []
    if not entries:
        return
    seen = "largest in /dev/shm: " + ", ".join(f"{entry.name!r} {gib(entry.nbytes)}" for entry in entries)
    if wanted <= machine.shm.available:
        yield Finding(id="dev_shm_use", level=Level.OK, seen=seen)
        return
    remedy = 'remove what nobody uses (engram-ctl purge does for what a daemon left), or set host.backing to "memfd"'
    yield Finding(id="dev_shm_use", level=Level.WARN, seen=seen, remedy=remedy)


def imex_findings(found: Gpus | None, root: str | Path = "/") -> Iterator[Finding]:
    """IMEX channels: device files without which no FABRIC handle can be made or opened."""
    folder = Path(root) / IMEX
    channels = [path for path in _sorted_children(folder) if re.fullmatch(r"channel\d+", path.name)]
    if not channels:
        seen = "no IMEX channel: FABRIC handles, for GPU memory of other nodes, cannot be had"
        yield Finding(id="imex", level=Level.OK, seen=seen)
        return
    names = ", ".join(sorted((path.name for path in channels), key=lambda name: int(name.removeprefix("channel"))))
    closed = [path.name for path in channels if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        seen = f"IMEX channels {names}; uid {os.geteuid()} may not open {', '.join(closed)}"
        remedy = f"let the daemon's user read and write /{IMEX}, or give its container the channel"
        yield Finding(id="imex", level=Level.WARN, seen=seen, remedy=remedy)
        return
    refused = (
        f", but FABRIC handles fail: {found.fabric_problem}" if found and found.devices and found.fabric_problem else ""
    )
    yield Finding(id="imex", level=Level.OK, seen=f"IMEX channels {names}{refused}")


def memory_link_findings(found: Gpus | None, config: Config | None) -> Iterator[Finding]:
    """Whether GPUs walk the CPU's page tables (ATS), and whether their memory is the host's own."""
    if found is None or not found.devices:
        return
    yield Finding(id="ats", level=Level.OK, seen=_ats([gpu for gpu in found.devices if gpu.ats], len(found.devices)))
    integrated = [gpu.name for gpu in found.devices if gpu.integrated]
    coherent = [gpu.name for gpu in found.devices if gpu.numa_node is not None]
    if integrated:
        seen = f"{_names(integrated)}: memory is the host's own, so a table takes the same bytes in either placement"
        yield Finding(id="unified_memory", level=Level.OK, seen=seen)
    elif coherent:
        nodes = ", ".join(str(gpu.numa_node) for gpu in found.devices if gpu.numa_node is not None)
        seen = f"{_names(coherent)}: coherent link, GPU memory is NUMA node {nodes} of the host"
        if config is not None and config.host.numa == "interleave":
            remedy = "name the CPUs' nodes in host.numa: interleaving puts rows of host tables in GPU memory too"
            yield Finding(id="unified_memory", level=Level.WARN, seen=seen, remedy=remedy)
        else:
            yield Finding(id="unified_memory", level=Level.OK, seen=seen)
    else:
        yield Finding(id="unified_memory", level=Level.OK, seen="GPUs have memory of their own, over a bus")


def place_findings(found: Gpus | None, plan: Plan | None) -> Iterator[Finding]:
    """Beside which NUMA node each GPU is, and whether a table that lies on one node is beside any of them."""
    if found is None or not found.devices:
        return
    beside: dict[int, list[str]] = {}
    for gpu in found.devices:
        beside.setdefault(gpu.host_node, []).append(str(gpu.ordinal))
    seen = "; ".join(f"node {node}: GPU {', '.join(beside[node])}" for node in sorted(beside))
    tables = plan.numa.nodes if plan is not None and plan.options.placement is Placement.CPU else ()
    if tables and not set(tables) & set(beside):
        seen = f"{seen}; the tables will be on node {', '.join(map(str, tables))}, beside none of them"
        remedy = f'set host.numa to "{min(beside)}": GPUs reach the memory of their own node faster'
        yield Finding(id="gpu_places", level=Level.WARN, seen=seen, remedy=remedy)
        return
    away = [node for node in sorted(beside) if node not in tables] if len(tables) == 1 else []
    if away:
        seen = (
            f"{seen}; the tables will be on node {tables[0]}, so those of node {', '.join(map(str, away))} read across"
        )
    yield Finding(id="gpu_places", level=Level.OK, seen=seen)


def _ats(walking: list[Gpu], count: int) -> str:
    if len(walking) == count:
        return "yes: GPUs read host memory through the CPU's page tables, and ranks register nothing"
    if walking:
        return f"on {_names([gpu.name for gpu in walking])} only; ranks on other GPUs register the tables first"
    return "no: a rank registers host memory with its GPU first, which pins it and takes seconds for a large table"


def _names(names: list[str]) -> str:
    return ", ".join(sorted(set(names)))
