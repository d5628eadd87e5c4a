"""The daemon's side of a load: starts the loader's children, passes them the segments, and hears how it goes.

Host memory has one child, GPU memory one a GPU: each has an interpreter lock, a context and threads of its own,
and a link to fill. The children are exec'd, so the daemon keeps no mapping, no buffer and no numpy of the load,
and a machine that runs short of memory kills a child, whose death is then reported as an error with a name.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial

from engram_client.errors import LoaderDied
from engram_client.protocol import Failed, LoadProgress
from engram_server import child
from engram_server.load_job import (
    ChildMessage,
    LoadJob,
    LoadResult,
    Order,
    PartResult,
    ProgressUpdate,
    frame,
    read_message,
)
from engram_server.load_parts import JointProgress, Part, merge, partition
from engram_server.segments import Segment

_MODULE = "engram_server.load_child"
OnProgress = Callable[[LoadProgress], None]


async def load(
    job: LoadJob, segments: Sequence[Segment], on_progress: OnProgress = lambda progress: None
) -> LoadResult:
    """Fills the segments. When this returns or raises, the children are gone and nobody maps them for writing.

    Cancelling kills them. Raises what the first child to fail raised (an EngramError), or LoaderDied.
    """
    parts = partition(job, [segment.info for segment in segments])
    joint = JointProgress(on_progress, len(parts))
    tasks = [asyncio.create_task(_load_part(part, segments, partial(joint.hear, at))) for at, part in enumerate(parts)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        results = [task.result() for task in tasks if task in done]  # raises what the first of them raised
    finally:
        for task in tasks:
            task.cancel()
        # Each reaps its child, even when cancelled meanwhile.
        await _all_ended(tasks)
    return merge(job.tables, results)


async def _all_ended(tasks: Sequence[asyncio.Task[PartResult]]) -> None:
    cancelled = False
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that the loop does not warn of it
    if cancelled:
        raise asyncio.CancelledError


async def _load_part(part: Part, segments: Sequence[Segment], on_progress: OnProgress) -> PartResult:
    mine = [segments[index] for index in part.segments]
    fds = tuple(segment.writable_fd for segment in mine)
    process, ours = await child.start(_MODULE, fds)
    order = Order(job=part.job, segments=tuple(segment.info for segment in mine), fds=fds, cut_blocks=part.cut_blocks)
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
    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self.phase = "starting"

    async def run(self, connection: socket.socket, order: Order) -> PartResult | Failed | None:
        """What the child ends with; None when it ended without a word."""
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            writer.write(frame(order))
            await writer.drain()
            while True:
                message = await read_message(reader, ChildMessage)
                if not isinstance(message, ProgressUpdate):
                    result: PartResult | Failed = message
                    return result
                self.phase = message.progress.phase
                self._on_progress(message.progress)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        finally:
            writer.close()
