"""Children of the daemon: a fresh interpreter, a socket pair to talk over, and an end that is always waited for.

They are exec'd, never forked: the daemon keeps no mapping, no buffer and no numpy of theirs, and what kills
them (a short machine, a truncated file) does not kill the daemon.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from engram_client.errors import LoaderDied
from engram_server.worker import to_the_end

_PACKAGES = Path(__file__).resolve().parent.parent


async def start(module: str, fds: Sequence[int]) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Runs `module` with its end of a socket pair as argument and `fds` inherited; our end is the caller's.

    Raises LoaderDied when no process can be had.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:
        raise LoaderDied(how=error.strerror or str(error), doing="starting") from error
    try:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *fds),
            env=environment(),
            start_new_session=True,  # Ctrl-C reaches the whole group; the daemon alone decides what it means
        )
    except OSError as error:  # no process, no memory for one, no interpreter
        ours.close()
        raise LoaderDied(how=error.strerror or str(error), doing="starting") from error
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()  # so that the child's end is the only one, and its death an end of file
    return child, ours


async def end_of(child: asyncio.subprocess.Process) -> str:
    """Waits for the child's end, and how it came, in words."""
    status = await child.wait()
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


async def reap(child: asyncio.subprocess.Process) -> None:
    """Kills the child unless it has ended, and waits until it has, even when cancelled meanwhile: only then
    are its mappings gone."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()
    await to_the_end(child.wait())


def environment() -> dict[str, str]:
    """Ours, and where these packages are when they are not installed. (-P keeps the working folder, which
    anyone may have written to, out of the child's path.)"""
    environment = dict(os.environ)
    # Nobody multiplies matrices: numpy's library would start a thread a core in every child, on a large machine more
    # than the unit's TasksMax has room for.
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    if _PACKAGES.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), *([known] if known else [])])
    return environment
