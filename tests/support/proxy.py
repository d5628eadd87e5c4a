"""A man in the middle of both sockets, who counts messages and stops at the one he was told.

`Interference(direction, index, action)`: at message `index` (from 0) going "up" to the daemon or "down" to the
client, over all connections in order: "cut" closes both sides instead of passing it on; "half" passes it on and
shuts the way it took; "drop" swallows it. `seen` counts what has passed each way.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_ZMTP_GREETING = (10, 1, 53)
"""Signature, major version, the rest: each side waits for the other's before it goes on."""
_LONG, _FLAGS_BYTES, _LARGEST = 0x02, 1, 1 << 20


@dataclass(frozen=True)
class Interference:
    direction: str
    index: int
    action: str


class _Stop(Exception):
    """The connection has been cut."""


class Proxy:
    """Listens at `path`, passes everything on to `target` and back."""

    def __init__(self, path: Path, target: Path, kind: socket.SocketKind, plan: Interference | None) -> None:
        self.seen = {"up": 0, "down": 0}
        self._target = target
        self._kind = kind
        self._plan = plan
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket(socket.AF_UNIX, kind)
        self._listener.bind(str(path))
        self._listener.listen()
        self._begin(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            opened = [self._listener, *self._open]
        for each in opened:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in opened:
            each.close()

    def _begin(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True, name="proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX, self._kind)
            with self._lock:
                self._open += [client, server]
            try:
                server.connect(str(self._target))
            except OSError:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
                continue
            self._begin(lambda a=client, b=server: self._pass_on("up", a, b))  # type: ignore[misc]
            self._begin(lambda a=client, b=server: self._pass_on("down", b, a))  # type: ignore[misc]

    def _pass_on(self, direction: str, source: socket.socket, sink: socket.socket) -> None:
        read = _read_packet if self._kind == socket.SOCK_SEQPACKET else _Zmtp().read
        try:
            while True:
                data, fds = read(source)
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                try:
                    self._forward(direction, data, fds, source, sink)
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, ValueError, _Stop):  # ValueError: closed meanwhile
            for each in (source, sink):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _forward(self, direction: str, data: bytes, fds: list[int], source: socket.socket, sink: socket.socket) -> None:
        with self._lock:
            index = self.seen[direction]
            self.seen[direction] += 1
        action = (
            self._plan.action if self._plan and (self._plan.direction, self._plan.index) == (direction, index) else ""
        )
        if action == "cut":
            raise _Stop
        if action == "drop":
            return
        if fds:
            socket.send_fds(sink, [data], fds)
        else:
            sink.sendall(data)
        if action == "half":
            sink.shutdown(socket.SHUT_WR)


def _read_packet(source: socket.socket) -> tuple[bytes, list[int]]:
    data, fds, _, _ = socket.recv_fds(source, 1 << 20, 253)
    return data, list(fds)


class _Zmtp:
    """Cuts a ZMTP 3 stream into its greeting and frames."""

    def __init__(self) -> None:
        self._greeting = list(_ZMTP_GREETING)

    def read(self, source: socket.socket) -> tuple[bytes, list[int]]:
        if self._greeting:
            return _exactly(source, self._greeting.pop(0)), []
        flags = _exactly(source, _FLAGS_BYTES)
        if not flags:
            return b"", []
        length = _exactly(source, 8 if flags[0] & _LONG else 1)
        count = int.from_bytes(length, "big")
        if count > _LARGEST:  # a peer whose greeting was maimed speaks an older version
            raise _Stop
        return flags + length + _exactly(source, count), []


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        select.select([source], [], [])
        chunk = source.recv(count - len(data))
        if not chunk:
            return b""
        data += chunk
    return data
