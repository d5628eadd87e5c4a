"""A real daemon process for tests and the demo: started, waited for with a deadline, ended by its own id."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil

from engram_client.control import query_status
from engram_client.endpoint import endpoint_tag
from engram_client.errors import ConnectError
from engram_client.protocol import State, StatusReply

START_LIMIT_S = 60.0
STOP_LIMIT_S = 30.0
POLL_S = 0.01

_T = TypeVar("_T")


def wait_until(holds: Callable[[], _T | None], what: str, limit_s: float = START_LIMIT_S) -> _T:
    """The first true value of `holds()`, polled. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + limit_s
    while True:
        value = holds()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {limit_s} s")
        time.sleep(POLL_S)


class Daemon:
    """`engram-server` on a socket in `folder`, with `config` over the defaults of tests."""

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        arguments: tuple[str, ...] = (),
        environ: Mapping[str, str] | None = None,
        wrapper: tuple[str, ...] = (),
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.endpoint = f"ipc://{folder}/run/control.sock"
        self.control_path = folder / "run" / "control.sock"
        self.handover = config.get("control", {}).get("handover")
        self.handover_path = Path(self.handover or folder / "run" / "control.sock.handover")
        self.log_path = folder / "daemon.log"
        self.config_path = folder / "engram.json"
        control = {"endpoint": self.endpoint, **config.get("control", {})}
        self.config_path.write_text(json.dumps({"engram_config": {"placement": "cpu"}, **config, "control": control}))
        self._log = self.log_path.open("ab")
        self._log_start = self._log.tell()  # what its predecessors in this folder said goes before
        self.process = subprocess.Popen(
            [*wrapper, sys.executable, "-m", "engram_server.cli", "--config", str(self.config_path), *arguments],
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environ or {})},
            pass_fds=pass_fds,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def names_left(self) -> list[str]:
        """Sockets, manifest and named segments of this daemon that still exist; the lock file is meant to stay."""
        sockets = [path for path in self.control_path.parent.glob("*") if path.suffix != ".lock"]
        shared = Path("/dev/shm").glob(f"engram-{endpoint_tag(self.endpoint)}-*")
        return [str(path) for path in (*sockets, *shared, *self.folder.glob("tmpfs/*"))]

    @property
    def log(self) -> str:
        """What this daemon has said so far."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def status(self) -> StatusReply:
        return query_status(self.endpoint, handover=self.handover)

    def wait_for(self, state: State = State.READY, limit_s: float = START_LIMIT_S) -> StatusReply:
        """Waits for `state`. Raises RuntimeError with the log when the daemon ends first."""

        def reached() -> StatusReply | None:
            if self.process.poll() is not None:
                raise RuntimeError(f"the daemon ended with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(ConnectError):
                reply = query_status(self.endpoint, timeout=1.0, handover=self.handover)
                return reply if reply.state == state else None
            return None

        return wait_until(reached, f"daemon {state}", limit_s)

    def wait_for_exit(self, limit_s: float = STOP_LIMIT_S) -> int:
        code = self.process.wait(limit_s)
        self._log.close()
        return code

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait_for_exit()

    def kill_alone(self) -> None:
        """SIGKILL, as it comes in real life: its children have to notice by themselves."""
        self.process.send_signal(signal.SIGKILL)
        self.wait_for_exit()

    def kill(self) -> None:
        """SIGKILL, for its children too: a loader that a test has stopped would not notice."""
        children = []
        if self.process.poll() is None:
            children = psutil.Process(self.pid).children(recursive=True)
            self.process.kill()
        self.wait_for_exit()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def running(folder: Path, config: Mapping[str, Any], **options: Any) -> Iterator[Daemon]:
    """A daemon that is ready; stopped at the end if the test did not."""
    daemon = Daemon(folder, config, **options)
    try:
        daemon.wait_for(State.READY)
        yield daemon
    finally:
        try:
            daemon.stop()
        except subprocess.TimeoutExpired:
            daemon.kill()
            raise
