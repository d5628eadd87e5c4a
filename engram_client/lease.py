"""The lease of an attached rank, and its return after the daemon was replaced.

One daemonic thread a client waits on the connection and costs nothing while the daemon lives but a sign of
life every few seconds. When the daemon goes, the tables stay mapped and are read on; the thread knocks again,
ever more slowly, and takes a new lease where the same tables are served. Nothing is mapped anew: what a rank
reads never changes under it.
"""

from __future__ import annotations

import logging
import os
import random
import select
import signal
import threading
from collections.abc import Callable
from typing import Final

from engram_client.errors import EngramError, Evicted, IdentityMismatch, TpSizeMismatch, UnknownLayer
from engram_client.handover import HandoverConnection
from engram_client.protocol import BEAT_INTERVAL_S

log = logging.getLogger(__name__)

BACKOFF_FIRST_S: Final = 0.05
BACKOFF_LAST_S: Final = 5.0
_STALE = (IdentityMismatch, UnknownLayer, TpSizeMismatch)
"""What a daemon answers that serves other tables than those mapped here."""


class Lease:
    """`connection` holds the lease now. `renew()` opens, attaches and redeems anew and returns the new
    connection, or raises an EngramError; it is called in the thread and must not refer to the client."""

    def __init__(self, connection: HandoverConnection, renew: Callable[[], HandoverConnection]) -> None:
        self._connection = connection
        self._renew = renew
        self._stale = False
        self._closed = False
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._random = random.Random()  # the host's own generator keeps its state
        self._thread = threading.Thread(target=self._run, name="engram-lease", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "held" if self.alive else "stale" if self._stale else "lost"
        return f"<Lease {state}>"

    @property
    def alive(self) -> bool:
        """Whether a daemon holds the other end."""
        return self._connection.alive

    @property
    def stale(self) -> bool:
        """Whether the daemon that is there now serves other tables than this client has mapped."""
        return self._stale

    def close(self) -> None:
        """Ends the lease at once. Harmless twice, and in a forked child."""
        if os.getpid() != self._owner_pid:
            return  # handover.py has closed the child's copy, and the thread is the parent's
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._connection.close()
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        # Signals are the host's: none may be delivered to this thread and leave the host's own calls waiting.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            while self._watch():
                if not self._return():
                    return
        finally:
            with self._lock:
                os.close(self._wake)
                self._wake = -1

    def _watch(self) -> bool:
        """Until the connection ends; whether another one is wanted."""
        poller = select.poll()
        with self._lock:
            if self._closed:
                return False
            connection = self._connection
            poller.register(connection, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            ready = poller.poll(BEAT_INTERVAL_S * 1000)
            with self._lock:
                if self._closed:
                    return False
                if not ready:
                    connection.beat()
                    continue
                last_words = connection.last_error()
                connection.close()
            if isinstance(last_words, Evicted):
                log.info("%s", last_words)
                return False
            return True

    def _return(self) -> bool:
        """Knocks until a lease is held again; False when the client was closed meanwhile."""
        pause = BACKOFF_FIRST_S
        while not self._stopped_within(pause * self._random.uniform(0.75, 1.25)):
            try:
                renewed = self._renew()
            except EngramError as error:
                # A daemon that only loads, or none at all, says nothing about its tables.
                self._stale = isinstance(error, _STALE) or self._stale
                self._put_off(error)
            except Exception as error:  # out of descriptors or memory: the host's trouble, not its end
                self._put_off(error)
            else:
                return self._hold(renewed)
            pause = min(2 * pause, BACKOFF_LAST_S)
        return False

    def _hold(self, renewed: HandoverConnection) -> bool:
        with self._lock:
            if self._closed:
                renewed.close()
                return False
            self._connection = renewed
            self._stale = False
        return True

    @staticmethod
    def _put_off(error: Exception) -> None:
        log.debug("no new lease yet: %s", error)

    def _stopped_within(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.poll(seconds * 1000)
        return self._closed
