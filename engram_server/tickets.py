"""Random, single-use and short-lived: what ties a request on one socket to a peer known on the other."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Generic, TypeVar

from engram_client.errors import TooManyClients
from engram_client.protocol import TICKET_BYTES, TICKET_LIFETIME_S

MAX_TICKETS = 4096
_T = TypeVar("_T")


class Tickets(Generic[_T]):
    """Tickets that were issued and not yet taken. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float], what: str) -> None:
        self._now = now
        self._what = what
        self._open: dict[bytes, tuple[float, _T]] = {}

    def __len__(self) -> int:
        self._expire()
        return len(self._open)

    def issue(self, meaning: _T) -> bytes:
        """A new ticket for `meaning`. Raises TooManyClients when too many have not been taken."""
        if len(self) >= MAX_TICKETS:
            raise TooManyClients(what=self._what, limit=MAX_TICKETS)
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._open[ticket] = (self._now() + TICKET_LIFETIME_S, meaning)
        return ticket

    def take(self, ticket: bytes) -> _T | None:
        """What the ticket means, once; None where it is unknown, used or expired."""
        self._expire()
        entry = self._open.pop(ticket, None)
        return entry[1] if entry else None

    def _expire(self) -> None:
        # Insertion order is expiry order: every ticket lives equally long.
        now = self._now()
        while self._open:
            ticket = next(iter(self._open))
            if self._open[ticket][0] > now:
                return
            del self._open[ticket]
