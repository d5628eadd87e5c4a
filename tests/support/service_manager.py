"""A double of systemd for one service: notify socket, file descriptor store, start with LISTEN_FDS, watchdog.

It does what sd_notify(3) and sd_listen_fds(3) promise and no more: FDSTORE=1 keeps a descriptor under its
FDNAME as long as fewer than `store_max` are kept, FDSTOREREMOVE=1 drops all of a name, and a start hands the
stored ones back as descriptors 3 and up. Run as `service_manager.py FD... -- COMMAND` it is the last step of a
start: the process that becomes the daemon, which alone can know its own LISTEN_PID.

`python -m tests.support.service_manager run -- COMMAND` is the whole of it, for trying a restart where there is no
systemd: it starts COMMAND, and again whenever it fails as the unit would, until it ends by itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

STORE_MAX = 64
RESTART_S = 0.1
_FIRST = 3


class ServiceManager:
    """`store` holds (name, descriptor) pairs in the order they came, `lines` every line that was sent."""

    def __init__(self, folder: Path, store_max: int = STORE_MAX, watchdog_s: float | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "notify.sock"
        self.store: list[tuple[str, int]] = []
        self.lines: list[str] = []
        self._store_max = store_max
        self._watchdog_s = watchdog_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="service-manager", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._thread.join()
        self._socket.close()
        self.path.unlink()
        for _, fd in self.store:
            os.close(fd)

    @property
    def names(self) -> list[str]:
        with self._lock:
            return [name for name, _ in self.store]

    def said(self, line: str) -> bool:
        with self._lock:
            return line in self.lines

    def count(self, line: str) -> int:
        with self._lock:
            return self.lines.count(line)

    def environ(self) -> dict[str, str]:
        environ = {"NOTIFY_SOCKET": str(self.path), "FDSTORE": str(self._store_max)}
        if self._watchdog_s is not None:
            environ["WATCHDOG_USEC"] = str(round(self._watchdog_s * 1e6))
        if self.store:
            environ["LISTEN_FDNAMES"] = ":".join(self.names)
        return environ

    def wrapper(self) -> tuple[str, ...]:
        """Put in front of the daemon's command; the stored descriptors must be inherited by it."""
        return (sys.executable, __file__, *map(str, self.descriptors()), "--")

    def descriptors(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(fd for _, fd in self.store)

    def _listen(self) -> None:
        while True:
            data, fds, flags, _ = socket.recv_fds(self._socket, 65536, 253)
            assert not flags & socket.MSG_CTRUNC
            if not data:
                return
            lines = data.decode().split("\n")
            fields = dict(line.partition("=")[::2] for line in lines)
            with self._lock:
                self.lines += lines
                self._obey(fields, fds)

    def _obey(self, fields: Mapping[str, str], fds: list[int]) -> None:
        name = fields.get("FDNAME", "stored")
        if "FDSTOREREMOVE" in fields:
            for fd in [fd for each, fd in self.store if each == name]:
                os.close(fd)
            self.store = [entry for entry in self.store if entry[0] != name]
        for fd in fds:
            # without FDPOLL=0 systemd watches the descriptor and drops it when it looks hung up
            if "FDSTORE" in fields and fields.get("FDPOLL") == "0" and len(self.store) < self._store_max:
                self.store.append((name, fd))
            else:
                os.close(fd)


def become(arguments: list[str]) -> None:
    split = arguments.index("--")
    inherited = [int(text) for text in arguments[:split]]
    # Out of the way first, so that moving one to its place cannot overwrite another.
    moved = [os.dup(fd) for fd in inherited]
    high = [_above(fd, _FIRST + len(moved)) for fd in moved]
    for place, fd in enumerate(high):
        os.dup2(fd, _FIRST + place, inheritable=True)
    os.closerange(_FIRST + len(high), 4096)
    if high:
        os.environ |= {"LISTEN_FDS": str(len(high)), "LISTEN_PID": str(os.getpid())}
    os.execvp(arguments[split + 1], arguments[split + 1 :])


def _above(fd: int, least: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD, least)


def run(command: list[str]) -> int:
    """Restart=on-failure and RestartPreventExitStatus=2 4 5, as in the unit. Returns the last exit status."""
    with tempfile.TemporaryDirectory(prefix="engram-") as folder, ServiceManager(Path(folder)) as manager:
        while True:
            daemon = subprocess.Popen(
                [*manager.wrapper(), *command],
                env=os.environ | manager.environ(),
                pass_fds=manager.descriptors(),
            )
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, frame, process=daemon: process.send_signal(number))
            status = daemon.wait()
            if status in (0, 2, 4, 5):
                return status
            print(f"ended with {status}, started again; kept: {', '.join(manager.names) or 'nothing'}", file=sys.stderr)
            time.sleep(RESTART_S)


if __name__ == "__main__":
    if sys.argv[1:3] == ["run", "--"]:
        sys.exit(run(sys.argv[3:]))
    become(sys.argv[1:])
