"""What a rank has looked up, and how the daemon hears of it: at most once a second, and never in the way.

No thread and no wait: a report leaves with a lookup, and is dropped where the daemon does not take it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Final

import zmq

from engram_client.protocol import MAX_REQUEST_BYTES, LookupCounters, Report, encode

REPORT_EVERY_S: Final = 1.0
LAST_REPORT_MS: Final = 100
"""How long close() lets the last report leave."""


class Meter:
    """Counts one table's lookups. Plain numbers: two threads that look up at once may lose a count.

    Refers to no table and no client: what reports must not keep them alive.
    """

    __slots__ = ("_next", "_report", "invalid_ids", "prefetch_hits", "prefetch_late", "rows")

    def __init__(self, report: Callable[[], None]) -> None:
        self.rows = self.invalid_ids = self.prefetch_hits = self.prefetch_late = 0
        self._report = report
        self._next = 0.0

    def looked_up(self, ids: int, invalid_ids: Callable[[], int]) -> None:
        """`invalid_ids()`, the table's total, is asked for only when a report is due."""
        self.rows += ids
        now = time.monotonic()
        if now >= self._next:
            self._next = now + REPORT_EVERY_S
            self.invalid_ids = invalid_ids()
            self._report()

    def waited(self, was_ready: bool) -> None:
        """A prefetch was waited for."""
        if was_ready:
            self.prefetch_hits += 1
        else:
            self.prefetch_late += 1


class Reporter:
    """Sends what the meters of one client have counted, over the control socket that it attached with.

    `give_away()` of a ControlConnection makes `context` and `connected`. `address`: epoch and number of the
    lease as it is now. Nothing here may refer to the client.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connected: zmq.Socket[bytes],
        address: Callable[[], tuple[str, int]],
        attach_s: float,
    ) -> None:
        self._context = context
        self._socket = connected
        self._address = address
        self._attach_s = attach_s
        self._meters: dict[int, Meter] = {}
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._next = 0.0
        self.report()

    def __repr__(self) -> str:
        return f"<Reporter of lease {self._address()[1]}>"

    def meter(self, layer: int) -> Meter:
        """The meter of a table, one a layer."""
        return self._meters.setdefault(layer, Meter(self.report))

    def report(self) -> None:
        """Sends the totals, unless that was less than a second ago. Never waits, never raises."""
        now = time.monotonic()
        if now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + REPORT_EVERY_S
            self._send()
        finally:
            self._lock.release()

    def _send(self) -> None:
        meters = list(self._meters.values())
        epoch, lease = self._address()
        report = Report(
            epoch=epoch,
            lease=lease,
            lookups=LookupCounters(
                rows=sum(meter.rows for meter in meters),
                invalid_ids=sum(meter.invalid_ids for meter in meters),
                prefetch_hits=sum(meter.prefetch_hits for meter in meters),
                prefetch_late=sum(meter.prefetch_late for meter in meters),
            ),
            attach_s=self._attach_s,
        )
        with contextlib.suppress(zmq.ZMQError):  # nobody takes it, or the socket is closed
            self._socket.send(encode(report, limit=MAX_REQUEST_BYTES), zmq.NOBLOCK)

    def close(self) -> None:
        """A last report, then the end. Harmless twice, and in a forked child."""
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            if self._socket.closed:
                return
            self._send()
            self._socket.close(LAST_REPORT_MS)
            self._context.term()
