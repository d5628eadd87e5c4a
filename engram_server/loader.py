"""The daemon's side of a load: starts the loader child, passes it the segments, and hears how it goes.

The child is exec'd, so the daemon keeps no mapping, no buffer and no numpy of the load, and a machine that
runs short of memory kills the child, whose death is then reported as an error with a name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from engram_client.errors import LoaderDied
from engram_client.protocol import Failed, LoadProgress
from engram_server import child
from engram_server.load_job import ChildMessage, LoadJob, LoadResult, Order, ProgressUpdate, frame, read_message
from engram_server.segments import Segment

_MODULE = "engram_server.load_child"


async def load(
    job: LoadJob,
    segments: Sequence[Segment],
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> LoadResult:
    """Fills the segments. When this returns or raises, the child is gone and nobody maps them for writing.

    Cancelling kills the child. Raises what the child raised (an EngramError), or LoaderDied.
    """
    fds = tuple(segment.writable_fd for segment in segments)
    process, ours = await child.start(_MODULE, fds)
    order = Order(job=job, segments=tuple(segment.info for segment in segments), fds=fds)
    conversation = _Conversation(on_progress)
    try:
        outcome = await conversation.run(ours, order)
        if outcome is None:
            raise LoaderDied(how=await child.end_of(process), doing=conversation.phase)
    finally:
        await child.reap(process)
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
