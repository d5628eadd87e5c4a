"""The load's progress on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

from engram_client.protocol import LoadProgress

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0


class ProgressDisplay:
    """Shows LoadProgress for as long as it is open."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._phase = ""
        self._next_line = time.monotonic() + LINE_EVERY_S

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            # rich costs 60 ms of import: only where somebody watches
            from engram_client.bar import load_bar

            self._bar = load_bar()
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def show(self, progress: LoadProgress) -> None:
        try:
            self._show(progress)
        except OSError:  # the terminal is gone; the load does not need it
            self._bar = None

    def _show(self, progress: LoadProgress) -> None:
        if self._bar is not None:
            self._bar.update(
                self._task, description=progress.phase, completed=progress.done_bytes, total=progress.total_bytes
            )
        elif progress.phase != self._phase or time.monotonic() >= self._next_line:
            self._phase = progress.phase
            self._next_line = time.monotonic() + LINE_EVERY_S
            share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 1.0
            log.info("%s: %.0f %% of %d bytes", progress.phase, 100 * share, progress.total_bytes)
