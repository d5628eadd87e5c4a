"""The descriptor socket: who connects is checked, tickets become descriptors, the connection is the lease.

SOCK_SEQPACKET keeps message borders and descriptors together. asyncio's servers refuse it, so the sockets
are watched with `add_reader`. Everything here is short and never blocks: a message that a peer does not
take at once ends that peer, not the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable

from engram_client.errors import (
    AccessDenied,
    EngramError,
    Evicted,
    InternalError,
    MalformedMessage,
    NotAllowedNow,
    NotPermitted,
    TooManyClients,
)
from engram_client.protocol import (
    MAX_FDS_PER_MESSAGE,
    MAX_HANDOVER_BYTES,
    Authorize,
    Authorized,
    Beat,
    Export,
    Exported,
    FabricHandle,
    Failed,
    Granted,
    Greeting,
    HandoverReply,
    HandoverRequest,
    decode,
    encode,
)
from engram_server.config import ControlConfig
from engram_server.leases import Grant, Lease, Leases, Peer
from engram_server.sockets import LISTEN_BACKLOG
from engram_server.tally import CONNECT, UNREADABLE

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
ACCEPT_PAUSE_S = 0.2
"""How long to leave the listener alone when the process is out of descriptors."""
_PEERCRED = struct.Struct("iII")
_SO_PEERGROUPS = 59
"""Linux 4.13; Python has no name for it."""
_MOST_GROUPS = 256
"""Python's getsockopt takes 1024 bytes at most; a peer in more groups is judged by its main group."""


class Handover:
    """Serves `listener` until `close`. `descriptor_of(segment_id)` gives the O_RDONLY descriptor to send,
    `handles_of(grant)` what the holder of a lease may hand to ranks of other nodes; `on_refused` hears which
    request, by name, was answered with which error."""

    def __init__(
        self,
        listener: socket.socket,
        control: ControlConfig,
        epoch: str,
        leases: Leases,
        descriptor_of: Callable[[str], int],
        handles_of: Callable[[Grant], tuple[FabricHandle, ...]],
        on_refused: Callable[[str, EngramError], None] = lambda request, error: None,
    ) -> None:
        self._listener = listener
        self.on_refused = on_refused
        self._path = listener.getsockname()
        self._uids = frozenset(control.uids)
        self._gids = frozenset(control.gids)
        self._epoch = epoch
        self._leases = leases
        self._descriptor_of = descriptor_of
        self._handles_of = handles_of
        self._connections: set[_Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(listener.fileno(), self._accept)

    def __repr__(self) -> str:
        return f"<Handover {self._path}: {len(self._connections)} connections>"

    @property
    def may_redeem(self) -> bool:
        """Whether a ticket that was given out may still be redeemed: by a peer that is connected and holds no lease.
        Who asks for a ticket has been connected before."""
        return any(connection.may_attach and connection.lease is None for connection in self._connections)

    def close(self, farewell: EngramError | None = None) -> None:
        """Ends all connections. Peers that hold no lease, those not accepted yet among them, are told `farewell`:
        what they wait for will not come, and a bare end would look like a crash."""
        if self._listener.fileno() >= 0:
            for _ in range(LISTEN_BACKLOG if farewell is not None else 0):
                if not self._accept():
                    break
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for connection in list(self._connections):
            if farewell is not None and connection.lease is None:
                connection.send(Failed.of(farewell))
            connection.close()

    def _accept(self) -> bool:
        """Whether somebody was there."""
        try:
            peer_socket, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:  # mostly EMFILE
            # The listener stays readable, so the loop would spin: leave it alone for a moment.
            log.warning("cannot accept a client: %s; raise the daemon's limit of open files", error.strerror)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
            return False
        peer_socket.setblocking(False)
        raw = peer_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
        peer = Peer(*_PEERCRED.unpack(raw))
        connection = _Connection(self, peer_socket, peer)
        self._connections.add(connection)
        try:
            connection.may_attach = self._admit(peer, peer_socket)
        except EngramError as error:
            log.warning("refused a client: %s", error)
            self.on_refused(CONNECT, error)
            connection.send(Failed.of(error))
            connection.close()
            return True
        connection.greet(self._epoch)
        return True

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _admit(self, peer: Peer, peer_socket: socket.socket) -> bool:
        """Whether the peer may attach. Root is let in to look and to command even where it may not."""
        listed = peer.uid == os.geteuid() or peer.uid in self._uids
        listed = listed or bool(self._gids & {peer.gid, *_groups_of(peer_socket)})
        if not listed and peer.uid != 0:
            raise self.denied(peer)
        if len(self._connections) > MAX_CONNECTIONS:
            raise TooManyClients(what="connections", limit=MAX_CONNECTIONS)
        return listed

    def denied(self, peer: Peer) -> AccessDenied:
        return AccessDenied(path=self._path, uid=peer.uid, problem="the daemon does not list it")

    def redeem(self, ticket: bytes, peer: Peer) -> tuple[Lease, list[tuple[Granted, list[int]]]]:
        """The lease of a ticket and the messages that carry its descriptors."""
        lease = self._leases.redeem(ticket, peer)
        try:
            return lease, self._messages(lease)
        except BaseException:
            self._leases.release(lease)
            raise

    def _messages(self, lease: Lease) -> list[tuple[Granted, list[int]]]:
        names = lease.grant.segments
        starts = range(0, max(len(names), 1), MAX_FDS_PER_MESSAGE)
        messages = []
        for start in starts:
            part = names[start : start + MAX_FDS_PER_MESSAGE]
            granted = Granted(segments=part, lease=lease.id, last=start == starts[-1])
            messages.append((granted, [self._descriptor_of(name) for name in part]))
        return messages

    def export(self, lease: Lease) -> Exported:
        """The FABRIC handles of the holder's own shards. Raises FabricUnavailable or NotAllowedNow."""
        return Exported(handles=self._handles_of(lease.grant))

    def authorize(self, peer: Peer) -> bytes:
        """A permit for one request of the owner. Raises NotPermitted for anyone else."""
        owner = os.geteuid()
        if peer.uid not in (0, owner):
            raise NotPermitted(request="authorize", owner=owner, problem=f"uid {peer.uid} asked")
        return self._leases.permits.issue(peer)

    def evict(self, lease_id: int) -> None:
        """Ends a lease, after telling its holder. Raises UnknownLease."""
        lease = self._leases.find(lease_id)
        for connection in list(self._connections):
            if connection.lease is lease:
                log.warning("evicting lease %d (pid %d)", lease.id, lease.peer.pid)
                connection.send(Failed.of(Evicted(lease=lease_id)))
                connection.close()

    def seen(self, lease: Lease) -> None:
        self._leases.seen(lease)

    def forget(self, connection: _Connection, lease: Lease | None) -> None:
        self._connections.discard(connection)
        if lease is not None:
            self._leases.release(lease)
            log.info(
                "lease %d ended: %s rank %d of %d (pid %d)",
                lease.id,
                lease.grant.name,
                lease.grant.rank,
                lease.grant.world_size,
                lease.peer.pid,
            )


class _Connection:
    """One accepted peer: greeted, then perhaps a lease, then gone."""

    def __init__(self, owner: Handover, peer_socket: socket.socket, peer: Peer) -> None:
        self._owner = owner
        self._socket = peer_socket
        self._peer = peer
        self._lease: Lease | None = None
        self._loop = asyncio.get_running_loop()
        self.may_attach = False

    def __repr__(self) -> str:
        return f"<_Connection of pid {self._peer.pid}, {self._lease or 'no lease'}>"

    def greet(self, epoch: str) -> None:
        if self.send(Greeting(epoch=epoch)):
            self._loop.add_reader(self._socket.fileno(), self._read)

    def _read(self) -> None:
        try:
            frame, ancillary, flags, _ = self._socket.recvmsg(
                MAX_HANDOVER_BYTES, socket.CMSG_LEN(4 * 8), socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        _close_unasked(ancillary)
        if not frame:
            self.close()
            return
        name = UNREADABLE
        try:
            if flags & socket.MSG_TRUNC or ancillary:
                raise MalformedMessage(problem="the message is too long, or came with descriptors")
            request: HandoverRequest = decode(frame, HandoverRequest, limit=MAX_HANDOVER_BYTES)[1]
            name = str(request.__struct_config__.tag)
            self._obey(request)
        except EngramError as error:
            log.warning("pid %d on the descriptor socket: %s", self._peer.pid, error)
            self._refuse(name, error)
        except Exception as error:  # a bug of ours costs this peer its connection; the loop would only log it
            log.exception("the descriptor socket failed pid %d", self._peer.pid)
            self._refuse(name, InternalError(doing="handing descriptors out", problem=repr(error)[:500]))

    def _refuse(self, request: str, error: EngramError) -> None:
        self._owner.on_refused(request, error)
        self.send(Failed.of(error))
        self.close()

    @property
    def lease(self) -> Lease | None:
        return self._lease

    def _obey(self, request: HandoverRequest) -> None:
        if isinstance(request, Authorize):
            self.send(Authorized(permit=self._owner.authorize(self._peer)))
            return
        if isinstance(request, Beat):
            if self._lease is None:
                raise NotAllowedNow(request="beat", state="without a lease on this connection")
            self._owner.seen(self._lease)
            return
        if isinstance(request, Export):
            if self._lease is None:
                raise NotAllowedNow(request="export", state="without a lease on this connection")
            exported = self._owner.export(self._lease)
            log.info("lease %d: handles of %d segments for other nodes", self._lease.id, len(exported.handles))
            self.send(exported)
            return
        if self._lease is not None:
            raise NotAllowedNow(request="redeem", state="leased to this connection")
        self._grant(request.ticket)

    def _grant(self, ticket: bytes) -> None:
        if not self.may_attach:
            raise self._owner.denied(self._peer)
        self._lease, messages = self._owner.redeem(ticket, self._peer)
        for granted, descriptors in messages:
            if not self.send(granted, descriptors):
                return
        grant = self._lease.grant
        log.info(
            "lease %d: %s rank %d of %d on %s (pid %d uid %d)",
            self._lease.id,
            grant.name,
            grant.rank,
            grant.world_size,
            grant.device,
            self._peer.pid,
            self._peer.uid,
        )

    def send(self, message: HandoverReply, descriptors: list[int] | None = None) -> bool:
        """Sends at once or closes; says whether the connection still stands."""
        try:
            frame = encode(message, limit=MAX_HANDOVER_BYTES)
            if descriptors:
                socket.send_fds(self._socket, [frame], descriptors, socket.MSG_NOSIGNAL)
            else:
                self._socket.send(frame, socket.MSG_NOSIGNAL)
        except OSError as error:
            log.debug("pid %d does not take its message: %s", self._peer.pid, error)
            self.close()
            return False
        return True

    def close(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._owner.forget(self, self._lease)


def _groups_of(peer_socket: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the peer, which let it through the socket's mode as its main group does."""
    try:
        raw = peer_socket.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def _close_unasked(ancillary: list[tuple[int, int, bytes]]) -> None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            for (descriptor,) in struct.iter_unpack("i", data[: len(data) // 4 * 4]):
                os.close(descriptor)
