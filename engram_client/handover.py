"""The client's end of the descriptor socket: it tells whether a daemon is there, receives descriptors, and
is the lease afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from engram_client.errors import (
    AccessDenied,
    ConnectTimeout,
    EngramError,
    MalformedMessage,
    NoServer,
    ServerRefused,
    TransferCut,
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
    Redeem,
    decode,
    encode,
)

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""Every connection of this process, also those just being opened by another thread."""

_RETRY_FIRST_S, _RETRY_LAST_S = 0.01, 0.25
_BEAT = encode(Beat(), limit=MAX_HANDOVER_BYTES)
_LONGEST_WAIT_S = 1e6
"""What a system call is asked to wait at most: it counts milliseconds in 32 bits, and users write infinity."""
REPLY_LEAST_S = 1.0
"""What a reply may take even when the caller does not want to wait: a daemon that accepts is there."""


class HandoverConnection:
    """A connection that the daemon has accepted and greeted. A context manager that closes it."""

    def __init__(self, connected: socket.socket, epoch: str) -> None:
        self._socket = connected
        self.epoch = epoch
        self.lease = 0
        """The daemon's number for this connection, once descriptors have come over it."""

    @classmethod
    def open(cls, path: str, timeout: float) -> Self:
        """Connects to `path` and reads the greeting; while `timeout` seconds last, a socket that is not there
        yet, or that nobody serves yet, is tried again.

        Raises NoServer, ServerRefused, AccessDenied, ConnectTimeout, TransferCut, ProtocolMismatch,
        MalformedMessage, or what a daemon that takes no more clients says instead of a greeting.
        """
        deadline = time.monotonic() + timeout
        pause = _RETRY_FIRST_S
        while True:
            try:
                connected = _connect(path, deadline, timeout)
                break
            except (NoServer, ServerRefused):
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _RETRY_LAST_S)
        try:
            patience = max(deadline, time.monotonic() + REPLY_LEAST_S)
            greeting, _ = _receive(connected, patience, timeout, "waiting for the daemon's greeting", 0)
            if not isinstance(greeting, Greeting):
                raise MalformedMessage(problem=f"a {type(greeting).__name__} instead of a greeting")
            return cls(connected, greeting.epoch)
        except BaseException:
            connected.close()
            raise

    def __repr__(self) -> str:
        return f"<HandoverConnection {'closed' if self.closed else 'open'}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    @property
    def alive(self) -> bool:
        """Whether the daemon still holds its end: the kernel closes it when the daemon dies."""
        if self.closed:
            return False
        poller = select.poll()
        try:
            poller.register(self._socket, 0)
        except ValueError:  # another thread has closed it this moment
            return False
        return not poller.poll(0)  # POLLHUP and POLLERR come unasked

    @property
    def server_pid(self) -> int:
        """Of the process that listens, as this PID namespace knows it; 0 where it does not."""
        credentials = struct.Struct("iII")
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
        return int(credentials.unpack(raw)[0])

    def authorize(self, timeout: float) -> bytes:
        """A permit for one request of the daemon's owner.

        Raises NotPermitted, TransferCut, ConnectTimeout or MalformedMessage.
        """
        doing = "asking for a permit"
        _send(self._socket, encode(Authorize(), limit=MAX_HANDOVER_BYTES), doing)
        message, _ = _receive(self._socket, time.monotonic() + timeout, timeout, doing, 0)
        if not isinstance(message, Authorized):
            raise MalformedMessage(problem=f"a {type(message).__name__} instead of a permit")
        return message.permit

    @contextlib.contextmanager
    def redeemed(self, ticket: bytes, timeout: float) -> Iterator[dict[str, int]]:
        """`redeem`, with the descriptors closed at the end: a mapping needs none."""
        descriptors = self.redeem(ticket, timeout)
        try:
            yield descriptors
        finally:
            _close_all(list(descriptors.values()))

    def export(self, timeout: float) -> tuple[FabricHandle, ...]:
        """FABRIC handles of the shards of the rank whose lease this is.

        Raises FabricUnavailable, which ends the lease, TransferCut, ConnectTimeout or MalformedMessage.
        """
        doing = "receiving handles for other nodes"
        _send(self._socket, encode(Export(), limit=MAX_HANDOVER_BYTES), doing)
        message, _ = _receive(self._socket, time.monotonic() + timeout, timeout, doing, 0)
        if not isinstance(message, Exported):
            raise MalformedMessage(problem=f"a {type(message).__name__} instead of handles")
        return message.handles

    def beat(self) -> None:
        """Tells the daemon that this process runs. Raises nothing: an end of the connection shows by itself."""
        with contextlib.suppress(OSError):
            self._socket.send(_BEAT, socket.MSG_NOSIGNAL)

    def last_error(self) -> EngramError | None:
        """What the daemon said before it closed, if it said anything."""
        try:
            _receive(self._socket, time.monotonic(), 0, "listening", 0)
        except (TransferCut, ConnectTimeout):
            return None
        except EngramError as error:
            return error
        return None

    def redeem(self, ticket: bytes, timeout: float) -> dict[str, int]:
        """Turns a ticket into descriptors, by segment id; the caller owns them. All or none.

        Raises TicketInvalid, TransferCut, ConnectTimeout or MalformedMessage.
        """
        deadline = time.monotonic() + timeout
        doing = "receiving descriptors"
        _send(self._socket, encode(Redeem(ticket=ticket), limit=MAX_HANDOVER_BYTES), doing)
        received: dict[str, int] = {}
        try:
            while True:
                message, descriptors = _receive(self._socket, deadline, timeout, doing, MAX_FDS_PER_MESSAGE)
                if not isinstance(message, Granted) or len(message.segments) != len(descriptors):
                    _close_all(descriptors)
                    raise MalformedMessage(problem="not as many descriptors as segments")
                self.lease = message.lease
                received.update(zip(message.segments, descriptors, strict=True))
                if message.last:
                    return received
        except BaseException:
            _close_all(list(received.values()))
            raise


def wait_for_end(connection: HandoverConnection | None, deadline: float) -> None:
    """Until the daemon has closed its end, which it does when it has drained, or until `deadline`. Without a
    connection (it was refused instead of greeted) a moment, so that asking again is not a busy loop."""
    poller = select.poll()
    longest = deadline
    if connection is not None and not connection.closed:
        poller.register(connection, 0)
    else:
        longest = min(deadline, time.monotonic() + _RETRY_LAST_S)
    poller.poll(milliseconds_until(longest))


def milliseconds_until(deadline: float) -> int:
    """From now to `deadline` (of time.monotonic, infinity too), as poll(2) takes it."""
    return round(min(max(0.0, deadline - time.monotonic()), _LONGEST_WAIT_S) * 1000)


def _connect(path: str, deadline: float, timeout: float) -> socket.socket:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    _sockets.add(connecting)
    # A full backlog makes connect block; the least wait lets a zero timeout still mean "try once".
    connecting.settimeout(min(max(deadline - time.monotonic(), 0.05), _LONGEST_WAIT_S))
    try:
        connecting.connect(path)
    except OSError as error:
        connecting.close()
        raise _translate(error, path, timeout) from error
    connecting.setblocking(False)
    return connecting


def _translate(error: OSError, path: str, timeout: float) -> EngramError:
    if isinstance(error, TimeoutError) or error.errno == errno.EAGAIN:
        return ConnectTimeout(timeout_s=timeout, doing="connecting", cause="the daemon does not accept clients")
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NoServer(path=path)
    if error.errno in (errno.ECONNREFUSED, errno.EPROTOTYPE, errno.ENOTSOCK):
        return ServerRefused(path=path)
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(path=path, uid=os.geteuid(), problem=error.strerror or "permission denied")
    return TransferCut(doing=f"connecting to {path} ({error.strerror})")


def _send(connected: socket.socket, frame: bytes, doing: str) -> None:
    try:
        connected.send(frame, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise TransferCut(doing=doing) from error


def _receive(
    connected: socket.socket, deadline: float, timeout: float, doing: str, descriptors: int
) -> tuple[HandoverReply, list[int]]:
    """One message and its descriptors; a Failed raises the error it carries."""
    poller = select.poll()
    poller.register(connected, select.POLLIN)
    # At least one look, so that what has arrived already counts even when the time is over.
    if not poller.poll(milliseconds_until(deadline)):
        raise ConnectTimeout(timeout_s=timeout, doing=doing, cause="the daemon does not answer")
    try:
        frame, ancillary, flags, _ = connected.recvmsg(
            MAX_HANDOVER_BYTES, socket.CMSG_SPACE(4 * descriptors), socket.MSG_CMSG_CLOEXEC
        )
    except OSError as error:
        raise TransferCut(doing=doing) from error
    received = _descriptors(ancillary)
    try:
        if not frame:
            raise TransferCut(doing=doing)
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            # The kernel drops descriptors that do not fit, also when this process may open no more of them.
            raise TransferCut(doing=f"{doing}: a message came truncated (limit of open files reached?)")
        message: Any = decode(frame, HandoverReply, limit=MAX_HANDOVER_BYTES)[1]
        if isinstance(message, Failed):
            raise message.error()
    except BaseException:
        _close_all(received)
        raise
    return message, received


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        descriptor
        for level, kind, data in ancillary
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        for (descriptor,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])
    ]


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _after_fork_in_child() -> None:
    """A forked child's copy of a connection would keep the lease alive after the rank's death."""
    for each in list(_sockets):
        each.close()


os.register_at_fork(after_in_child=_after_fork_in_child)
