"""Who may have descriptors, and who has them: tickets and leases as plain data, no sockets.

A ticket is random, single-use and short-lived: it ties an Attach on the control socket to the handover
connection that redeems it. A lease lives exactly as long as that connection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engram_client.errors import TicketInvalid, UnknownLease
from engram_client.protocol import LeaseStatus
from engram_server.tickets import Tickets


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
        self._tickets: Tickets[Grant] = Tickets(now, "unredeemed tickets")
        self._leases: dict[int, Lease] = {}
        self._seen: dict[int, float] = {}
        self._last_id = 0

    def __repr__(self) -> str:
        return f"<Leases: {len(self._tickets)} tickets, {len(self._leases)} held>"

    @property
    def open_tickets(self) -> int:
        return len(self._tickets)

    @property
    def held(self) -> int:
        return len(self._leases)

    def issue(self, grant: Grant) -> bytes:
        """A new ticket for `grant`. Raises TooManyClients when too many are unredeemed."""
        return self._tickets.issue(grant)

    def redeem(self, ticket: bytes, peer: Peer) -> Lease:
        """Turns a ticket into a lease, once. Raises TicketInvalid."""
        grant = self._tickets.take(ticket)
        if grant is None:
            raise TicketInvalid()
        self._last_id += 1
        lease = Lease(self._last_id, grant, peer, self._now())
        self._leases[lease.id] = lease
        self._seen[lease.id] = lease.since
        return lease

    def seen(self, lease: Lease) -> None:
        """The holder has given a sign of life."""
        self._seen[lease.id] = self._now()

    def release(self, lease: Lease) -> None:
        self._leases.pop(lease.id, None)
        self._seen.pop(lease.id, None)

    def find(self, lease_id: int) -> Lease:
        """The lease of that number. Raises UnknownLease."""
        if lease_id not in self._leases:
            raise UnknownLease(lease=lease_id, held=list(self._leases)[:100])
        return self._leases[lease_id]

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
                last_seen_s=now - self._seen[lease.id],
            )
            for lease in self._leases.values()
        )
