"""The daemon's side of a check: is what lies in memory still what was loaded? A child does the reading."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

from engram_client.errors import LoaderDied
from engram_client.protocol import Failed, LoadProgress
from engram_server import child
from engram_server.load_job import Checked, CheckMessage, CheckOrder, PieceDigest, frame, read_message
from engram_server.segments import Segment

_MODULE = "engram_server.check_child"
MAX_THREADS = 16

Pieces = Mapping[str, Sequence[PieceDigest]]


def a_few(pieces: Pieces) -> dict[str, tuple[PieceDigest, ...]]:
    """One piece of each segment, another one each time: what a restart has time for."""
    return {name: (random.choice(found),) for name, found in pieces.items() if found}


async def check(
    segments: Sequence[Segment],
    pieces: Pieces,
    *,
    threads: int,
    gentle: bool,
    on_progress: Callable[[LoadProgress], None] = lambda progress: None,
) -> Checked:
    """Digests `pieces` of `segments` again. Cancelling kills the child.

    Raises what the child raised (MapFailed), or LoaderDied when it cannot be started or dies.
    """
    fds = tuple(segment.readable_fd for segment in segments)
    process, ours = await child.start(_MODULE, fds)
    order = CheckOrder(
        segments=tuple(segment.info for segment in segments),
        fds=fds,
        pieces={segment.info.id: tuple(pieces.get(segment.info.id, ())) for segment in segments},
        threads=max(1, min(threads, MAX_THREADS)),
        gentle=gentle,
    )
    try:
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(frame(order))
            await writer.drain()
            while True:
                message = await read_message(reader, CheckMessage)
                if isinstance(message, Failed):
                    raise message.error()
                if isinstance(message, Checked):
                    return message
                on_progress(message.progress)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise LoaderDied(how=await child.end_of(process), doing="checking") from None
        finally:
            writer.close()
    finally:
        await child.reap(process)
