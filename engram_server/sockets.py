"""The places of the daemon's sockets: folder, lock, modes, stale files.

ZeroMQ lets a second bind steal a live ipc path without a word, so a flock'd file decides who owns an
endpoint, and only its owner removes what a dead daemon left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator

from engram_client.errors import AlreadyRunning, SocketUnavailable
from engram_client.protocol import handover_path, ipc_path
from engram_server.config import ControlConfig

LISTEN_BACKLOG = 512


class EndpointLock:
    """Ownership of a control endpoint, held until `release` or the process's end."""

    def __init__(self, control: ControlConfig) -> None:
        self.control_path = ipc_path(control.endpoint)
        self.handover_path = handover_path(control.endpoint, control.handover)
        for path in (self.control_path, self.handover_path):
            _make_folder(os.path.dirname(path), control)
        self._fds = [_locked(self.control_path + ".lock", control.endpoint)]
        try:
            if control.handover is not None:  # elsewhere, where the daemon of another endpoint may have its own
                self._fds.append(_locked(self.handover_path + ".lock", self.handover_path))
        except BaseException:
            os.close(self._fds.pop())
            raise
        try:
            for path in (self.control_path, self.handover_path):
                _remove_stale(path)
        except BaseException:
            self.release()
            raise

    def __repr__(self) -> str:
        return f"<EndpointLock {self.control_path}>"

    def release(self) -> None:
        """Removes the sockets, gives the endpoint up. The lock file itself stays: removing it would let two
        daemons lock two different files of one name."""
        if not self._fds:
            return
        for path in (self.control_path, self.handover_path):
            with contextlib.suppress(OSError, SocketUnavailable):
                _remove_stale(path)
        while self._fds:
            os.close(self._fds.pop())


def _make_folder(folder: str, control: ControlConfig) -> None:
    mode = 0o750 if control.gids else 0o700
    if set(control.uids) - {os.geteuid()}:
        mode |= 0o011  # users have to pass through; the sockets' modes and the peer's uid decide about the rest
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        try:
            os.mkdir(folder, mode)
        except FileExistsError:
            return
        os.chmod(folder, mode)  # mkdir's mode is cut by the umask
        if control.gids:
            os.chown(folder, -1, control.gids[0])
    except OSError as error:
        raise SocketUnavailable(path=folder, problem=error.strerror or str(error)) from error


def _locked(path: str, endpoint: str) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketUnavailable(path=path, problem=error.strerror or str(error)) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(fd, 32, 0).split(b"\n")[0]
        os.close(fd)
        if error.errno != errno.EWOULDBLOCK:
            raise SocketUnavailable(path=path, problem=error.strerror or str(error)) from error
        raise AlreadyRunning(endpoint=endpoint, pid=int(owner) if owner.isdigit() else 0) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def _remove_stale(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise SocketUnavailable(path=path, problem="something that is not a socket is in its place")
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise SocketUnavailable(path=path, problem=error.strerror or str(error)) from error


@contextlib.contextmanager
def private_bind(path: str, control: ControlConfig) -> Iterator[None]:
    """Around a bind of `path`: the socket is never more open than 0600, then gets its configured mode.

    The umask belongs to the whole process; the daemon binds before it starts any thread that makes files.
    """
    before = os.umask(0o177)
    try:
        yield
    except OSError as error:
        raise SocketUnavailable(path=path, problem=error.strerror or str(error)) from error
    finally:
        os.umask(before)
    try:
        if control.gids:
            os.chown(path, -1, control.gids[0])
        os.chmod(path, int(control.mode, 8))
    except OSError as error:
        raise SocketUnavailable(path=path, problem=error.strerror or str(error)) from error


def listen_for_handover(path: str, control: ControlConfig) -> socket.socket:
    """A bound, listening, non-blocking SOCK_SEQPACKET socket."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        with private_bind(path, control):
            listener.bind(path)
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
