"""Runs a command under the system call filter of a unit, with systemd's own lists and libseccomp, without systemd.

`python -m tests.support.call_filter UNIT -- COMMAND`: calls that SystemCallFilter= leaves out answer EPERM, as
SystemCallErrorNumber=EPERM has it. Exit status 77 where systemd-analyze or libseccomp is not there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

UNAVAILABLE = 77
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000


def lists() -> dict[str, list[str]]:
    """What is in each of systemd's named sets: calls, and other sets."""
    printed = subprocess.run(["systemd-analyze", "syscall-filter"], capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    name = ""
    for line in re.sub(r"\x1b\[[0-9;]*m", "", printed).splitlines():
        if line.startswith("@"):
            name = line.strip()
            found[name] = []
        elif name and line.startswith("    ") and not line.strip().startswith("#"):
            found[name].append(line.strip())
    return found


def allowed(unit: str, sets: dict[str, list[str]]) -> set[str]:
    """Calls that the unit's SystemCallFilter= lines let through, in their order: "~" takes away what was given."""

    def expand(word: str) -> set[str]:
        return set().union(*map(expand, sets[word])) if word.startswith("@") else {word}

    calls = expand("@default")
    for line in re.findall(r"^SystemCallFilter=(.*)$", unit, re.MULTILINE):
        named = set().union(*map(expand, line.lstrip("~").split()))
        calls = calls - named if line.startswith("~") else calls | named
    return calls


def apply(calls: set[str]) -> None:
    """From here on, and in all children, any other call answers EPERM. Raises OSError."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ERRNO | errno.EPERM)))
    for name in sorted(calls):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # others are of other architectures
            library.seccomp_rule_add(context, ctypes.c_uint32(_ALLOW), ctypes.c_int(number), ctypes.c_uint(0))
    if code := library.seccomp_load(context):
        raise OSError(-code, "seccomp_load")


def main() -> None:
    unit, command = Path(sys.argv[1]).read_text(), sys.argv[3:]
    if shutil.which("systemd-analyze") is None:
        sys.exit(UNAVAILABLE)
    try:
        apply(allowed(unit, lists()))
    except OSError as error:
        print(error, file=sys.stderr)
        sys.exit(UNAVAILABLE)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
