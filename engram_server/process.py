"""What this process may do here: limits, system call filters, namespaces. Read under a root like the machine."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from contextlib import suppress
from pathlib import Path

import msgspec

UNLIMITED = (1 << 63) - 1
_INITIAL_PID_NAMESPACE = 4026531836
"""Inode of the first PID namespace, a constant of the kernel (PROC_PID_INIT_INO)."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the process that asks; a None means that the kernel does not tell."""

    open_files: int | None
    """Hard limit of open descriptors, which the daemon raises its soft one to."""
    memlock: int | None
    """Soft limit of locked memory, in bytes."""
    seccomp: bool | None
    """Whether system calls are filtered."""
    own_pid_namespace: bool | None
    memfd_problem: str = ""
    """Why no sealed memfd can be made; empty where one can."""
    mbind_problem: str = ""
    """Why memory cannot be bound to NUMA nodes."""

    @classmethod
    def read(cls, root: str | Path = "/") -> Process:
        """This process, or the one recorded under `root`. System calls are tried only where it is this one."""
        base = Path(root)
        here = base == Path("/")
        limits, status = _text(base / "proc/self/limits"), _text(base / "proc/self/status")
        filtered = re.search(r"^Seccomp:\s*(\d)", status, re.MULTILINE)
        return cls(
            open_files=_limit(limits, "Max open files", hard=True),
            memlock=_limit(limits, "Max locked memory", hard=False),
            seccomp=filtered[1] != "0" if filtered else None,
            own_pid_namespace=_own_pid_namespace(base),
            memfd_problem=_try_memfd() if here else "",
            mbind_problem=_try_mbind() if here else "",
        )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _limit(text: str, name: str, *, hard: bool) -> int | None:
    match = re.search(rf"^{name}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    if match is None:
        return None
    value = match[2 if hard else 1]
    return UNLIMITED if value == "unlimited" else int(value)


def _own_pid_namespace(base: Path) -> bool | None:
    try:
        match = re.search(r"\d+", os.readlink(base / "proc/self/ns/pid"))
    except OSError:
        return None
    return int(match[0]) != _INITIAL_PID_NAMESPACE if match else None


def _try_memfd() -> str:
    """A sandbox that refuses memfd_create or its seals is found by trying."""
    import fcntl

    try:
        fd = os.memfd_create("engram-try", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        fcntl.fcntl(fd, 1033, 0x2)  # F_ADD_SEALS, F_SEAL_SHRINK: Python 3.11 has no names for them
    except OSError as error:
        return f"sealing a memfd: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def _try_mbind() -> str:
    """Asks for this thread's own policy: containers' usual filters refuse all of these calls together."""
    import platform

    number = {"x86_64": 239, "aarch64": 236}.get(platform.machine())  # get_mempolicy
    if number is None:
        return f"not known on {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    mode = ctypes.c_int()
    with suppress(OSError):
        if libc.syscall(ctypes.c_long(number), ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0)):
            code = ctypes.get_errno()
            return f"get_mempolicy: {os.strerror(code)}" if code in (errno.EPERM, errno.ENOSYS) else ""
    return ""
