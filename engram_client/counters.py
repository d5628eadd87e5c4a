"""What a rank has looked up, and how the daemon hears of it: at most once a second, and never in the way.

No thread and no wait: a report leaves with a lookup, and is dropped where the daemon does not take it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

import zmq

from engram_client.protocol import MAX_REQUEST_BYTES, LookupCounters, Report, encode, ipc_path

REPORT_EVERY_S = 1.0
LAST_REPORT_MS = 100
"""How long close() lets the last report leave."""
_RECONNECT_MS = 1_000
_RECONNECT_MAX_MS = 60_000
"""A daemon that is gone is not asked for ten times a second for ever."""


class Counters:
    """Totals since the attach. Plain numbers: two threads that look up at once may lose a count."""

    __slots__ = ("invalid_ids", "prefetch_hits", "prefetch_late", "rows")

    def __init__(self) -> None:
        self.rows = self.invalid_ids = self.prefetch_hits = self.prefetch_late = 0

    def snapshot(self) -> LookupCounters:
        return LookupCounters(
            rows=self.rows,
            invalid_ids=self.invalid_ids,
            prefetch_hits=self.prefetch_hits,
            prefetch_late=self.prefetch_late,
        )


class Reporter:
    """Sends the counters of one client under its lease. `tick` is cheap and is called with every lookup."""

    def __init__(
        self, endpoint: str, address: Callable[[], tuple[str, int]], counters: Counters, attach_s: float
    ) -> None:
        """`address`: epoch and number of the lease as it is now. Nothing here refers to the client."""
        self._address = address
        self._counters = counters
        self._attach_s = attach_s
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 2)
        self._socket.setsockopt(zmq.RCVHWM, 2)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.connect(f"ipc://{ipc_path(endpoint)}")
        self._next = 0.0
        self.tick()

    def __repr__(self) -> str:
        return f"<Reporter of lease {self._address()[1]}>"

    def tick(self) -> None:
        """Sends a report when the last one is a second old. Never waits, never raises."""
        now = time.monotonic()
        if now < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            self._next = now + REPORT_EVERY_S
            self._send()
        finally:
            self._lock.release()

    def _send(self) -> None:
        epoch, lease = self._address()
        report = Report(epoch=epoch, lease=lease, lookups=self._counters.snapshot(), attach_s=self._attach_s)
        with contextlib.suppress(zmq.ZMQError):  # nobody takes it, or the socket is closed
            self._socket.send(encode(report, limit=MAX_REQUEST_BYTES), zmq.NOBLOCK)

    def close(self) -> None:
        """A last report, then the end. Harmless twice, and in a forked child."""
        if self._socket.closed or os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._send()
            self._socket.close(LAST_REPORT_MS)
            self._context.term()
