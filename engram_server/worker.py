"""Work that takes seconds, off the event loop, and never left half done.

The kernel frees 94 GiB in seconds, inside the unlink or the close that gives the last hold on it up. Meanwhile
the loop must answer; and what comes after (a name taken anew, the endpoint given up) must not begin before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def to_the_end(work: Awaitable[_T]) -> _T:
    """Waits until `work` has ended, even when cancelled meanwhile; the CancelledError comes then."""
    running = asyncio.ensure_future(work)
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait({running})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not running.cancelled():
            running.exception()  # looked at, so that the loop does not warn of it
        raise asyncio.CancelledError
    return running.result()


async def in_thread(work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """`work(...)` in a thread, to the end. The loop serves others; the caller's next line comes after it."""
    return await to_the_end(asyncio.to_thread(work, *args, **kwargs))
