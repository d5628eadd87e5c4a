"""What this node has: memory, its limits, huge pages, NUMA nodes, CPUs and memory file systems.

Everything is read under one root folder, so that the files of another machine, recorded, can be read too.
Reading takes milliseconds and changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import msgspec

_TMPFS_MAGIC = 0x01021994
_RAMFS_MAGIC = 0x858458F6
_HUGETLBFS_MAGIC = 0x958458F6
_NAMES = {
    _TMPFS_MAGIC: "tmpfs",
    _RAMFS_MAGIC: "ramfs",
    _HUGETLBFS_MAGIC: "hugetlbfs",
}
_OTHER_NAMES = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0x6969: "nfs",
    0x0BD00BD0: "lustre",
    0x00C36400: "ceph",
    0x65735546: "fuse",
    0x01021997: "9p",
    0x794C7630: "overlay",
    0xFE534D42: "smb",
}
_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as the largest multiple of a page; no machine has an exbibyte."""


class _Fact(msgspec.Struct, frozen=True, kw_only=True):
    pass


class MemoryLimit(_Fact, frozen=True):
    """A cgroup's memory limit. `reclaimable` is the file cache counted in `used` that the kernel would drop."""

    path: str
    limit: int
    used: int
    reclaimable: int

    @property
    def available(self) -> int:
        return max(0, self.limit - self.used + self.reclaimable)


class HugePool(_Fact, frozen=True):
    """The pool of huge pages of 2 MiB, in pages; reserved pages are promised to someone already."""

    total: int
    free: int
    reserved: int
    page_bytes: int = 2 << 20

    @property
    def available(self) -> int:
        return max(0, self.free - self.reserved) * self.page_bytes


class NumaNode(_Fact, frozen=True):
    """A NUMA node that has memory; `available` = free + file cache, in bytes."""

    id: int
    total: int
    available: int


class FileSystem(_Fact, frozen=True):
    """A folder's file system. `kind`: tmpfs, hugetlbfs, or another's magic number in hex."""

    path: str
    kind: str
    total: int
    available: int
    page_bytes: int


class Machine(_Fact, frozen=True):
    mem_total: int
    mem_available: int
    limits: tuple[MemoryLimit, ...]
    huge_pool: HugePool | None
    """None: the kernel has no huge page pool of this size."""
    thp_enabled: str | None
    """always, madvise or never; None: the kernel has no transparent huge pages."""
    thp_shmem: str | None
    """The same for shared memory, from shmem_enabled."""
    kernel: tuple[int, int]
    nodes: tuple[NumaNode, ...]
    cpus: int
    """CPUs this process may use, by affinity and by the cgroups' quotas."""
    shm: FileSystem | None
    """/dev/shm; None when there is no such folder."""
    folder: FileSystem | None = None
    """The folder of host.path; None when it was not asked for or does not exist."""

    @classmethod
    def read(cls, root: str | Path = "/", folder: str | None = None) -> Machine:
        """This machine, or the one recorded under `root`; `folder` is host.path, looked up under it too."""
        base = Path(root)
        meminfo = _key_values(_text(base / "proc/meminfo"))
        groups = _cgroups(base)
        return cls(
            mem_total=meminfo.get("MemTotal", 0),
            # MemAvailable is missing before Linux 3.14 only; MemFree is then the cautious answer.
            mem_available=meminfo.get("MemAvailable", meminfo.get("MemFree", 0)),
            limits=tuple(_limits_v2(base, groups) + _limits_v1(base, groups)),
            huge_pool=_huge_pool(base),
            thp_enabled=_chosen(base / "sys/kernel/mm/transparent_hugepage/enabled"),
            thp_shmem=_chosen(base / "sys/kernel/mm/transparent_hugepage/shmem_enabled"),
            kernel=_kernel(base),
            nodes=_nodes(base),
            cpus=_cpus(base, groups),
            shm=file_system(base, "/dev/shm"),
            folder=file_system(base, folder) if folder else None,
        )


def available_host_bytes(machine: Machine) -> tuple[int, str]:
    """Host memory that can be taken without swapping or being killed, and where that number comes from:
    the smallest of MemAvailable and what each cgroup above this process leaves."""
    choices = [(machine.mem_available, "MemAvailable of /proc/meminfo")]
    choices += [(limit.available, f"cgroup limit {limit.path}") for limit in machine.limits]
    return min(choices)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""  # an absent or unreadable file is a machine without that feature


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _key_values(text: str) -> dict[str, int]:
    """`Name: 12 kB` and `name 12` lines as bytes or counts."""
    found = re.findall(r"^(?:Node \d+ )?([\w()]+):?[ \t]+(\d+)([ \t]kB)?$", text, re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in found}


def _chosen(path: Path) -> str | None:
    match = re.search(r"\[(.+?)\]", _text(path))
    return match[1] if match else None


def _kernel(base: Path) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", _text(base / "proc/sys/kernel/osrelease"))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _list_size(text: str) -> int:
    """How many numbers a kernel list such as `0-3,8` names."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return sum(int(last or first) - int(first) + 1 for first, last in spans)


# cgroups


def _cgroups(base: Path) -> dict[str, str]:
    """Path of this process's group by controller; "" is the unified (v2) hierarchy."""
    found = {}
    for line in _text(base / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            found[controller] = path
    return found


def _upwards(mount: Path, group: str) -> list[Path]:
    """The group's folder and those above it, up to the mount. Without a cgroup namespace a container sees
    the host's path under a mount that is its own group: then only the mount exists, and it counts."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _v2_groups(base: Path, groups: dict[str, str]) -> list[Path]:
    if "" not in groups:
        return []
    mount = next(
        (m for m in (base / "sys/fs/cgroup", base / "sys/fs/cgroup/unified") if (m / "cgroup.procs").exists()),
        base / "sys/fs/cgroup",
    )
    return _upwards(mount, groups[""])


def _limits_v2(base: Path, groups: dict[str, str]) -> list[MemoryLimit]:
    limits = []
    for group in _v2_groups(base, groups):
        used = _number(group / "memory.current")
        if used is None:
            continue
        stat = _key_values(_text(group / "memory.stat"))
        for name in ("memory.max", "memory.high"):
            limit = _number(group / name)  # "max" is no number: no limit
            if limit is not None:
                limits.append(_limit(base, group / name, limit, used, stat, ("inactive_file", "active_file")))
    return limits


def _limits_v1(base: Path, groups: dict[str, str]) -> list[MemoryLimit]:
    limits = []
    for group in _upwards(base / "sys/fs/cgroup/memory", groups["memory"]) if "memory" in groups else ():
        used, limit = _number(group / "memory.usage_in_bytes"), _number(group / "memory.limit_in_bytes")
        if used is None or limit is None or limit >= _UNLIMITED:
            continue
        stat = _key_values(_text(group / "memory.stat"))
        file = group / "memory.limit_in_bytes"
        limits.append(_limit(base, file, limit, used, stat, ("total_inactive_file", "total_active_file")))
    return limits


def _limit(base: Path, file: Path, limit: int, used: int, stat: dict[str, int], cache: tuple[str, str]) -> MemoryLimit:
    reclaimable = sum(stat.get(name, 0) for name in cache)
    path = "/" + str(file.relative_to(base))
    return MemoryLimit(path=path, limit=limit, used=used, reclaimable=reclaimable)


def _cpus(base: Path, groups: dict[str, str]) -> int:
    allowed = re.search(r"^Cpus_allowed_list:\s*(\S+)", _text(base / "proc/self/status"), re.MULTILINE)
    cpus = _list_size(allowed[1]) if allowed else (os.cpu_count() or 1)
    for group in _v2_groups(base, groups):
        quota, _, period = _text(group / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            cpus = min(cpus, max(1, -(-int(quota) // int(period))))
    return cpus


# Pages and nodes


def _huge_pool(base: Path) -> HugePool | None:
    folder = base / "sys/kernel/mm/hugepages/hugepages-2048kB"
    total, free, reserved = (_number(folder / name) for name in ("nr_hugepages", "free_hugepages", "resv_hugepages"))
    if total is None or free is None or reserved is None:
        return None
    return HugePool(total=total, free=free, reserved=reserved)


def _nodes(base: Path) -> tuple[NumaNode, ...]:
    nodes = []
    for folder in (base / "sys/devices/system/node").glob("node[0-9]*"):
        facts = _key_values(_text(folder / "meminfo"))
        if not facts.get("MemTotal"):
            continue  # a node of CPUs only cannot hold a table
        cache = facts.get("Active(file)", 0) + facts.get("Inactive(file)", 0)
        nodes.append(
            NumaNode(id=int(folder.name[4:]), total=facts["MemTotal"], available=facts.get("MemFree", 0) + cache)
        )
    return tuple(sorted(nodes, key=lambda node: node.id))


def file_system(base: Path, path: str) -> FileSystem | None:
    folder = base / path.lstrip("/")
    if not folder.is_dir():
        return None
    magic = _magic(folder)
    stat = os.statvfs(folder)
    return FileSystem(
        path=path,
        kind=_NAMES.get(magic, f"{magic:#x}"),
        total=stat.f_blocks * stat.f_frsize,
        available=stat.f_bavail * stat.f_frsize,
        page_bytes=stat.f_bsize,
    )


def file_system_name(path: str) -> str:
    """What a person calls the file system of `path`, or its magic number. Raises OSError."""
    magic = _magic(Path(path))
    return (_NAMES | _OTHER_NAMES).get(magic, f"file system {magic:#x}")


def is_hugetlb(fd: int) -> bool:
    """Whether the descriptor's memory comes from a huge page pool. (st_blksize does not tell: a tmpfs with
    huge pages switched on reports them too.)"""
    return _magic(Path(f"/proc/self/fd/{fd}")) == _HUGETLBFS_MAGIC


def is_memory(path: str) -> bool:
    """Whether a file's file system is memory itself. Raises OSError."""
    return _magic(Path(path)) in _NAMES


def _magic(folder: Path) -> int:
    """f_type, which Python's statvfs leaves out: the first word of struct statfs on every 64-bit Linux."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_ulong * 32)()
    if libc.statfs(os.fsencode(folder), ctypes.byref(buffer)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
    return int(buffer[0])
