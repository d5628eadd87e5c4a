"""The control socket: one ZeroMQ ROUTER, one task, one handler a request.

A handler's failure answers that request and nothing else. Nothing here waits for a peer: what a client does
not take is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from engram_client.errors import EngramError, FrameTooLarge, InternalError, MalformedMessage, ProtocolMismatch
from engram_client.protocol import (
    MAX_REQUEST_BYTES,
    Failed,
    Reply,
    Request,
    StatusReply,
    decode,
    encode,
    request_id_of,
)
from engram_server.config import ControlConfig
from engram_server.sockets import private_bind
from engram_server.tally import UNREADABLE

log = logging.getLogger(__name__)

# A frame somewhat too large gets a named error; one larger than this costs the sender its connection.
_DROP_BYTES = 4 * MAX_REQUEST_BYTES
_QUEUE = 64
"""Messages that wait for a peer, or for us, each way. A peer that takes no reply misses some; with libzmq's
1000 it could make the daemon keep a GiB of status replies."""
LINGER_MS = 500
"""How long a closing daemon gives its last replies to leave."""


@dataclass(frozen=True)
class Asker:
    """Where a reply goes: ZeroMQ's routing id and the request's own id."""

    route: bytes
    request_id: int


class Control:
    """Serves the control endpoint. `handle(asker, request)` returns the reply, or None to reply later.

    on_refused: hears which request, by name, was answered with which error that `handle` raised.
    """

    def __init__(
        self,
        path: str,
        control: ControlConfig,
        handle: Callable[[Asker, Request], Reply | None],
        on_refused: Callable[[str, EngramError], None] = lambda request, error: None,
    ) -> None:
        self._handle = handle
        self._on_refused = on_refused
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _DROP_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a peer that is gone is told, not swallowed
        if not control.gids:  # libzmq knows no supplementary groups: then the socket's mode must do
            for uid in {0, os.geteuid(), *control.uids}:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, uid - (1 << 32) if uid >> 31 else uid)
        try:
            with private_bind(path, control):
                self._socket.bind(f"ipc://{path}")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._task = asyncio.create_task(self._serve(), name="control")

    @property
    def task(self) -> asyncio.Task[None]:
        """Ends only by `close`, or by a fault of the socket itself."""
        return self._task

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        await asyncio.to_thread(self._context.term)  # waits for LINGER_MS at most

    async def _serve(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            asker, reply = self._answer(frames)
            if reply is not None:
                await self.send(asker, reply)

    def _answer(self, frames: list[bytes]) -> tuple[Asker, Reply | None]:
        asker = Asker(frames[0], request_id_of(frames[1]) if len(frames) == 2 else 0)
        name = UNREADABLE
        try:
            if len(frames) != 2:
                raise MalformedMessage(problem=f"{len(frames) - 1} frames instead of one")
            request: Request = decode(frames[1], Request, limit=MAX_REQUEST_BYTES)[1]
            name = str(request.__struct_config__.tag)
            return asker, self._handle(asker, request)
        except Exception as error:
            refusal = _refusal(error)
            self._on_refused(name, refusal)
            return asker, Failed.of(refusal)

    async def send(self, asker: Asker, reply: Reply) -> bool:
        """Sends at once or drops. False when the asker is gone for good."""
        try:
            await self._socket.send_multipart([asker.route, _frame(reply, asker.request_id)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True


def _refusal(error: Exception) -> EngramError:
    """What the asker is told."""
    if isinstance(error, ProtocolMismatch):
        return ProtocolMismatch(client=error.server, server=error.client)
    if isinstance(error, EngramError):
        log.info("refused a request: %s", error)
        return error
    # a bug of ours must cost one request, not the tables of the node
    log.error("a request failed", exc_info=error)
    return InternalError(doing="answering a request", problem=repr(error)[:500])


def _frame(reply: Reply, request_id: int) -> bytes:
    """The reply as bytes; of a status with thousands of leases, as many leases as a frame holds."""
    try:
        return encode(reply, request_id)
    except FrameTooLarge as error:
        if isinstance(reply, StatusReply) and reply.leases:
            fewer = reply.leases[: len(reply.leases) // 2]
            return _frame(msgspec.structs.replace(reply, leases=fewer), request_id)
        return encode(Failed.of(error), request_id)
