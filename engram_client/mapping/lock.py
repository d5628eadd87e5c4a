"""One process at a time through work that the driver serialises anyway, or fails when many try at once."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from typing import Final

WAIT_LIMIT_S: Final = 120.0
"""Longer than eight ranks need to register a table; then a stopped rank must not stop the others."""
_POLL_S = 0.01

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def exclusively(path: str | None) -> Iterator[bool]:
    """Holds a lock on `path`, which all ranks of a node can open for reading: the sockets' folder will do, in
    containers too. The kernel gives the lock back when its holder dies.

    The lock is a courtesy: without a path, where it cannot be opened, and after WAIT_LIMIT_S, the work goes on
    without it. Yields whether it is held.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path is not None else None
    except OSError as error:
        _log.debug("no lock on %s: %s", path, error)
        fd = None
    if fd is None:
        yield False
        return
    try:
        yield _acquire(fd)
    finally:
        os.close(fd)


def _acquire(fd: int) -> bool:
    deadline = time.monotonic() + WAIT_LIMIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                _log.warning("another rank has been registering memory for %.0f s; going on beside it", WAIT_LIMIT_S)
                return False
            time.sleep(_POLL_S)
        except OSError as error:  # a file system without locks
            _log.debug("no lock: %s", error)
            return False
