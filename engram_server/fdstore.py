"""The service manager's protocols by hand: sd_notify, its file descriptor store, and LISTEN_FDS.

A notification is one datagram of KEY=VALUE lines on $NOTIFY_SOCKET, descriptors ride along as SCM_RIGHTS. What
is stored so comes back at the next start as descriptors 3 and up, named by $LISTEN_FDNAMES. See sd_notify(3)
and sd_listen_fds(3); no library of systemd is needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import MutableMapping, Sequence

log = logging.getLogger(__name__)

LISTEN_FDS_START = 3
_VARIABLES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE")
SEND_LIMIT_S = 1.0
"""A manager that does not read for so long is not waited for: the tables matter more than its news."""


class ServiceManager:
    """Whoever started the daemon, as far as the environment tells; harmless where it tells nothing.

    Descriptors that came back from the store are in `received`, by name, until somebody takes them.
    """

    def __init__(
        self,
        notify_path: str | None = None,
        received: dict[str, int] | None = None,
        watchdog_s: float | None = None,
        store_limit: int | None = None,
    ) -> None:
        self._path = notify_path
        self._socket: socket.socket | None = None
        self._warned = False
        self.received = received if received is not None else {}
        self.watchdog_s = watchdog_s
        """The manager expects a sign of life this often, in seconds; None where it does not."""
        self.store_limit = store_limit
        """How many descriptors the store takes; None where the manager (systemd before 254) does not say."""

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str], pid: int) -> ServiceManager:
        """Takes the manager's variables out of `environ`, so that no child believes them meant for itself.

        Its descriptors become close-on-exec here. What names another process is passed over.
        """
        found = {name: environ.pop(name, "") for name in _VARIABLES}
        received: dict[str, int] = {}
        if found["LISTEN_PID"] == str(pid):
            received = _named_descriptors(_number(found["LISTEN_FDS"]) or 0, found["LISTEN_FDNAMES"])
        watchdog = _number(found["WATCHDOG_USEC"])
        if found["WATCHDOG_PID"] not in ("", str(pid)):
            watchdog = None
        return cls(
            notify_path=found["NOTIFY_SOCKET"] or None,
            received=received,
            watchdog_s=watchdog / 1e6 if watchdog else None,
            store_limit=_number(found["FDSTORE"]),
        )

    def __repr__(self) -> str:
        return f"<ServiceManager at {self._path or 'nowhere'}, gave back {sorted(self.received)}>"

    @property
    def present(self) -> bool:
        return self._path is not None

    def can_store(self, count: int) -> bool:
        """Whether `count` descriptors may be stored, as far as one can know."""
        return self.present and (self.store_limit is None or self.store_limit >= count)

    def notify(self, *lines: str, fds: Sequence[int] = ()) -> bool:
        """Sends one notification; whether it left. Raises nothing: a manager that is gone ends no daemon."""
        if self._path is None:
            return False
        try:
            if self._socket is None:
                self._socket = _connected(self._path)
            data = "\n".join(lines).encode()
            if fds:
                socket.send_fds(self._socket, [data], list(fds), socket.MSG_NOSIGNAL)
            else:
                self._socket.send(data, socket.MSG_NOSIGNAL)
        except OSError as error:
            if not self._warned:
                log.warning("the service manager does not hear us at %s: %s", self._path, error.strerror or error)
            self._warned = True
            self.close()
            return False
        return True

    def ready(self, status: str) -> None:
        self.notify("READY=1", f"STATUS={status}")

    def status(self, status: str, extend_start_s: float | None = None) -> None:
        """Says what the daemon does; `extend_start_s` asks for so much more time to become ready."""
        extend = [f"EXTEND_TIMEOUT_USEC={round(extend_start_s * 1e6)}"] if extend_start_s else []
        self.notify(f"STATUS={status}", *extend)

    def stopping(self) -> None:
        self.notify("STOPPING=1", "STATUS=draining")

    def alive(self) -> None:
        self.notify("WATCHDOG=1")

    def store(self, name: str, fd: int) -> bool:
        """Puts `fd` into the store under `name`; whether it left. FDPOLL=0: the manager would otherwise drop
        a descriptor that poll() calls hung up, and CUDA's own may."""
        return self.notify("FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", fds=[fd])

    def remove(self, name: str) -> None:
        """Takes every descriptor of that name out of the store."""
        self.notify("FDSTOREREMOVE=1", f"FDNAME={name}")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connected(path: str) -> socket.socket:
    connecting = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        connecting.settimeout(SEND_LIMIT_S)
        # "@name" is how the manager writes an abstract socket
        connecting.connect("\0" + path[1:] if path.startswith("@") else path)
    except BaseException:
        connecting.close()
        raise
    return connecting


def _named_descriptors(count: int, names: str) -> dict[str, int]:
    """The descriptors that were handed in, by name; of two with one name the later one counts."""
    received: dict[str, int] = {}
    listed = names.split(":") if names else []
    for index in range(count):
        fd = LISTEN_FDS_START + index
        try:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        except OSError:
            continue
        name = listed[index] if index < len(listed) else f"unknown-{index}"
        if name in received:
            with contextlib.suppress(OSError):
                os.close(received[name])
        received[name] = fd
    return received


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None
