"""The daemon's side of a load: starts the loader child, passes it the segments, and hears how it goes.

The child is exec'd, so the daemon keeps no mapping, no buffer and no numpy of the load, and a machine that
runs short of memory kills the child, whose death is then reported as an error with a name.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from engram_client.errors import LoaderDied
from engram_client.protocol import Failed, LoadProgress
from engram_server.load_job import ChildMessage, LoadJob, LoadResult, Order, ProgressUpdate, frame, read_message
from engram_server.segments import Segment

_MODULE = "engram_server.load_child"
_PACKAGES = Path(__file__).resolve().parent.parent


async def load(
    job: LoadJob,
    segments: Sequence[Segment],
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> LoadResult:
    """Fills the segments. When this returns or raises, the child is gone and nobody maps them for writing.

    Cancelling kills the child. Raises what the child raised (an EngramError), or LoaderDied.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        fds = tuple(segment.writable_fd for segment in segments)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *fds),
            env=_environment(),
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
    order = Order(job=job, segments=tuple(segment.info for segment in segments), fds=fds)
    conversation = _Conversation(on_progress)
    try:
        outcome = await conversation.run(ours, order)
        if outcome is None:
            raise LoaderDied(how=await _end_of(child), doing=conversation.phase)
    finally:
        await _reap(child)
    if isinstance(outcome, Failed):
        raise outcome.error()
    return outcome


class _Conversation:
    def __init__(self, on_progress: Callable[[LoadProgress], None]) -> None:
        self._on_progress = on_progress
        self.phase = "starting"

    async def run(self, connection: socket.socket, order: Order) -> LoadResult | Failed | None:
        """What the child ends with; None when it ended without a word."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            writer.write(frame(order))
            await writer.drain()
            while True:
                message = await read_message(reader, ChildMessage)
                if not isinstance(message, ProgressUpdate):
                    result: LoadResult | Failed = message
                    return result
                self.phase = message.progress.phase
                self._on_progress(message.progress)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        finally:
            writer.close()


async def _end_of(child: asyncio.subprocess.Process) -> str:
    status = await child.wait()
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


async def _reap(child: asyncio.subprocess.Process) -> None:
    """Kills the child unless it has ended, and waits until it has, even when cancelled meanwhile: only then
    are its mappings gone."""
    if child.returncode is None:
        with suppress(ProcessLookupError):
            child.kill()
    waiting = asyncio.ensure_future(child.wait())
    cancelled = False
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def _environment() -> dict[str, str]:
    """Ours, and where these packages are when they are not installed. (-P keeps the working folder, which
    anyone may have written to, out of the child's path.)"""
    environment = dict(os.environ)
    if _PACKAGES.name not in ("site-packages", "dist-packages"):
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(_PACKAGES), *([known] if known else [])])
    return environment
