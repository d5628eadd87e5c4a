"""The full check of what lies in memory, while the daemon serves: on request, and after a restart."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from engram_client.errors import DigestMismatch, EngramError, InternalError
from engram_client.protocol import CheckState, CheckStatus, LoadProgress
from engram_server import checker
from engram_server.holding import Holding

log = logging.getLogger(__name__)


class BackgroundCheck:
    """One check at a time. `on_damage` hears of the damaged segments' ids, `on_end` whether all was well."""

    def __init__(
        self,
        holding: Holding,
        on_damage: Callable[[set[str]], None],
        on_end: Callable[[bool], None] = lambda well: None,
    ) -> None:
        self._holding = holding
        self._on_damage = on_damage
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._started = 0.0
        self.status: CheckStatus | None = None
        """Of the check that runs, else of the last one; None before the first."""

    def __repr__(self) -> str:
        return f"<BackgroundCheck {self.status.state if self.status else 'never ran'}>"

    def start(self) -> None:
        """Begins a check, unless one runs."""
        if self._task is not None and not self._task.done():
            return
        self._started = time.monotonic()
        self._tell(CheckState.RUNNING, 0, 0)
        self._task = asyncio.create_task(self._run(), name="check")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        holding = self._holding
        pieces = holding.result.pieces if holding.result else {}

        def report(progress: LoadProgress) -> None:
            self._tell(CheckState.RUNNING, progress.done_bytes, progress.total_bytes)

        try:
            checked = await checker.check(
                list(holding.segments.values()), pieces, threads=1, gentle=True, on_progress=report
            )
            damage = [failed.error() for failed in checked.damage]
        except EngramError as error:
            log.warning("the tables in memory could not be checked: %s", error)
            self._tell(CheckState.FAILED, 0, 0, problem=str(error))
            return
        except Exception as error:  # a bug of ours must not pass for a check
            log.exception("the check failed")
            internal = InternalError(doing="checking", problem=repr(error)[:500])
            self._tell(CheckState.FAILED, 0, 0, problem=str(internal))
            return
        for each in damage:
            log.error("%s: %s", each.code, each)
        state = CheckState.DAMAGED if damage else CheckState.PASSED
        self._tell(state, checked.nbytes, checked.nbytes, damage=tuple(map(str, damage)))
        self._on_end(not damage)
        if damage:
            self._on_damage({each.segment for each in damage if isinstance(each, DigestMismatch)})
        else:
            log.info("checked: all %d bytes are as loaded (%.1f s)", checked.nbytes, checked.seconds)

    def _tell(
        self, state: CheckState, done: int, total: int, damage: tuple[str, ...] = (), problem: str | None = None
    ) -> None:
        self.status = CheckStatus(
            state=state,
            done_bytes=done,
            total_bytes=total,
            elapsed_s=time.monotonic() - self._started,
            damage=damage[:100],
            problem=problem,
        )
