"""Who may have descriptors, and who has them: tickets and leases as plain data, no sockets.

A ticket is random, single-use and short-lived: it ties an Attach on the control socket to the handover
connection that redeems it. A lease lives exactly as long as that connection.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from engram_client.errors import TicketInvalid, TooManyClients
from engram_client.protocol import TICKET_BYTES, TICKET_LIFETIME_S, LeaseStatus, LookupCounters, Report

MAX_TICKETS = 4096


@dataclass(frozen=True)
class Grant:
    """What one Attach was promised."""

    segments: tuple[str, ...]
    layers: tuple[int, ...]
    rank: int
    world_size: int
    device: str
    name: str


@dataclass(frozen=True)
class Peer:
    """Who is at the other end of a handover connection, from SO_PEERCRED."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True)
class Lease:
    id: int
    grant: Grant
    peer: Peer
    since: float


class Leases:
    """Tickets that were issued and leases that are held. `now` is a monotonic clock in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tickets: dict[bytes, tuple[float, Grant]] = {}
        self._leases: dict[int, Lease] = {}
        self._lookups: dict[int, LookupCounters] = {}
        self._ended = LookupCounters()
        self._last_id = 0

    def __repr__(self) -> str:
        return f"<Leases: {len(self._tickets)} tickets, {len(self._leases)} held>"

    @property
    def open_tickets(self) -> int:
        self._expire()
        return len(self._tickets)

    @property
    def held(self) -> int:
        return len(self._leases)

    def issue(self, grant: Grant) -> bytes:
        """A new ticket for `grant`. Raises TooManyClients when too many are unredeemed."""
        self._expire()
        if len(self._tickets) >= MAX_TICKETS:
            raise TooManyClients(what="unredeemed tickets", limit=MAX_TICKETS)
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = (self._now() + TICKET_LIFETIME_S, grant)
        return ticket

    def redeem(self, ticket: bytes, peer: Peer) -> Lease:
        """Turns a ticket into a lease, once. Raises TicketInvalid."""
        self._expire()
        entry = self._tickets.pop(ticket, None)
        if entry is None:
            raise TicketInvalid()
        self._last_id += 1
        lease = Lease(self._last_id, entry[1], peer, self._now())
        self._leases[lease.id] = lease
        return lease

    def release(self, lease: Lease) -> None:
        self._leases.pop(lease.id, None)
        self._ended = _sum(self._ended, self._lookups.pop(lease.id, LookupCounters()))

    def report(self, report: Report) -> bool:
        """Takes a client's counters; False when they are not the first of its lease, or of no lease held."""
        if report.lease not in self._leases:
            return False
        first = report.lease not in self._lookups
        self._lookups[report.lease] = report.lookups
        return first

    @property
    def lookups(self) -> LookupCounters:
        """Totals of all clients, those that are gone included."""
        return _sum(self._ended, *self._lookups.values())

    @property
    def granted(self) -> int:
        """Leases given so far."""
        return self._last_id

    def snapshot(self) -> tuple[LeaseStatus, ...]:
        now = self._now()
        return tuple(
            LeaseStatus(
                id=lease.id,
                pid=lease.peer.pid,
                uid=lease.peer.uid,
                gid=lease.peer.gid,
                name=lease.grant.name,
                rank=lease.grant.rank,
                world_size=lease.grant.world_size,
                device=lease.grant.device,
                layers=lease.grant.layers,
                age_s=now - lease.since,
                lookups=self._lookups.get(lease.id, LookupCounters()),
            )
            for lease in self._leases.values()
        )

    def _expire(self) -> None:
        # Insertion order is expiry order: every ticket lives equally long.
        now = self._now()
        while self._tickets:
            ticket = next(iter(self._tickets))
            if self._tickets[ticket][0] > now:
                return
            del self._tickets[ticket]


_MOST = (1 << 63) - 1


def _sum(*counters: LookupCounters) -> LookupCounters:
    """Capped at what a message can carry: a client may report anything."""
    return LookupCounters(
        rows=min(_MOST, sum(each.rows for each in counters)),
        invalid_ids=min(_MOST, sum(each.invalid_ids for each in counters)),
        prefetch_hits=min(_MOST, sum(each.prefetch_hits for each in counters)),
        prefetch_late=min(_MOST, sum(each.prefetch_late for each in counters)),
    )
