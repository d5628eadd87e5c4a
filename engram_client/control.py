"""The client's end of the control socket: requests with a deadline."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self, TypeVar

import zmq

from engram_client.errors import ConnectTimeout, MalformedMessage, TooFewDescriptors, TransferCut
from engram_client.handover import REPLY_LEAST_S, HandoverConnection, milliseconds_until
from engram_client.protocol import (
    MAX_REQUEST_BYTES,
    Done,
    Failed,
    Progress,
    Reply,
    Request,
    Status,
    StatusReply,
    decode,
    encode,
    handover_path,
    ipc_path,
)

_SPARE_DESCRIPTORS = 16
_R = TypeVar("_R", bound=Reply)

_UNSENT = 8
"""Messages kept for a daemon that is away: of an attached client's reports only the last one counts."""
_RECONNECT_MAX_MS = 60_000
"""A daemon that is gone is not knocked for ten times a second for ever."""
LAST_WORDS_MS = 250
"""How long to listen for a Failed after the daemon has closed its other socket."""


class ControlConnection:
    """One conversation with a daemon whose handover connection stands. A context manager.

    ZeroMQ tells nothing about a peer that is not there; `handover` does, by ending.
    """

    def __init__(self, endpoint: str, handover: HandoverConnection) -> None:
        _check_descriptors()
        self._handover = handover
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _UNSENT)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._socket.connect(f"ipc://{ipc_path(endpoint)}")
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(handover.fileno(), zmq.POLLIN)
        self._last_id = 0
        self._given_away = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if not self._given_away:
            self._context.destroy(linger=0)

    def give_away(self) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
        """The context and the connected socket, which are the caller's from then on."""
        self._given_away = True
        return self._context, self._socket

    def request(self, message: Request, timeout: float, doing: str) -> Iterator[Reply]:
        """Sends `message` and yields its replies; the caller stops when it has the one it waited for.

        A Failed raises the error it carries. Raises ConnectTimeout after `timeout` seconds, TransferCut when
        the daemon ends, MalformedMessage when it sends what cannot be read.
        """
        self._last_id += 1
        self._socket.send(encode(message, self._last_id, limit=MAX_REQUEST_BYTES))
        deadline = time.monotonic() + timeout
        cause = "no reply yet"
        while True:
            for reply in self._receive(deadline, timeout, doing, cause):
                if isinstance(reply, Failed):
                    raise reply.error()
                if isinstance(reply, Progress):
                    cause = f"the daemon is {reply.state}"
                yield reply

    def _receive(self, deadline: float, timeout: float, doing: str, cause: str) -> Iterator[Reply]:
        events = dict(self._poller.poll(milliseconds_until(deadline)))
        cut = self._handover.fileno() in events
        if cut and self._socket not in events:
            events = dict(self._poller.poll(0)) if self._socket.poll(LAST_WORDS_MS) else {}
        if self._socket in events:
            frames = self._socket.recv_multipart()
            if len(frames) != 1:
                raise MalformedMessage(problem=f"{len(frames)} frames instead of one")
            reply: Reply
            request_id, reply = decode(frames[0], Reply)
            if request_id in (self._last_id, 0):  # 0 answers a frame whose id could not be read
                yield reply
            return
        if cut:
            raise self._handover.last_error() or TransferCut(doing=doing)
        if time.monotonic() >= deadline:
            raise ConnectTimeout(timeout_s=timeout, doing=doing, cause=cause)


def _check_descriptors() -> None:
    """libzmq aborts the whole process, an engine's rank, when it cannot have its descriptors. It takes eight.

    Raises TooFewDescriptors.
    """
    spare: list[int] = []
    try:
        spare.extend(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(_SPARE_DESCRIPTORS))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise TooFewDescriptors(limit=limit, needed=_SPARE_DESCRIPTORS) from error
    finally:
        for descriptor in spare:
            os.close(descriptor)


def query_status(endpoint: str, *, timeout: float = 5.0, handover: str | None = None) -> StatusReply:
    """The state of the daemon at `endpoint`; waits up to `timeout` seconds for one. Changes nothing there.

    Raises NoServer, ServerRefused, AccessDenied, ProtocolMismatch, TransferCut or ConnectTimeout.
    """
    with HandoverConnection.open(handover_path(endpoint, handover), timeout) as connection:
        with ControlConnection(endpoint, connection) as control:
            for reply in control.request(Status(), max(timeout, REPLY_LEAST_S), "asking for the status"):
                if isinstance(reply, StatusReply):
                    return reply
    raise TransferCut(doing="asking for the status")


def ask_owner(
    endpoint: str,
    request: Callable[[bytes], Request],
    *,
    expected: type[_R] = Done,  # type: ignore[assignment]
    timeout: float = 5.0,
    handover: str | None = None,
) -> _R:
    """Sends the request that `request(permit)` makes, for which the daemon's own user or root is needed, and
    waits for its reply.

    Raises NotPermitted, what the request itself raises, and what `query_status` raises.
    """
    doing = "asking the daemon"
    with HandoverConnection.open(handover_path(endpoint, handover), timeout) as connection:
        permit = connection.authorize(max(timeout, REPLY_LEAST_S))
        with ControlConnection(endpoint, connection) as control:
            for reply in control.request(request(permit), max(timeout, REPLY_LEAST_S), doing):
                if isinstance(reply, expected):
                    return reply
    raise TransferCut(doing=doing)
