"""How far a child of the loader is, as it tells its parent."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engram_client.protocol import LoadProgress, LoadReport
from engram_server.load_job import LoadJob, ProgressUpdate, frame

_PROGRESS_EVERY_S = 0.2


class Reporter:
    """Tells the parent how far the load is, five times a second, and keeps the peak of resident memory."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._phase, self._done, self._total = "starting", 0, 0
        self.peak_rss = 0
        self.seconds: dict[str, float] = {}
        self._thread = threading.Thread(target=self._tick, daemon=True, name="progress")

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[None]:
        with self._lock:
            self._phase, self._done, self._total = name, 0, total
        self._report()
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started

    def add(self, nbytes: int) -> None:
        """Bytes done in this phase; from any thread."""
        with self._lock:
            self._done += nbytes

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def report(self, job: LoadJob, nbytes: int, direct: bool) -> LoadReport:
        """The report of a load that has come to its end; digesting on a GPU counts as verifying."""
        seconds = self.seconds
        return LoadReport(
            source=job.source,
            bytes_read=nbytes,
            seconds=self.elapsed_s,
            allocate_seconds=seconds["allocating"],
            fill_seconds=seconds["loading"],
            verify_seconds=seconds["verifying"] + seconds.get("digesting", 0.0),
            direct_io=direct,
            threads=job.threads,
            peak_rss_bytes=max(self.peak_rss, resident_bytes()),
        )

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._stop.wait(_PROGRESS_EVERY_S):
            self._report()

    def _report(self) -> None:
        self.peak_rss = max(self.peak_rss, resident_bytes())
        with self._lock:
            progress = LoadProgress(
                phase=self._phase, done_bytes=self._done, total_bytes=self._total, elapsed_s=self.elapsed_s
            )
        self.send(ProgressUpdate(progress=progress))

    def send(self, message: Any) -> None:
        data = frame(message)
        with self._lock:
            self._connection.sendall(data)


def resident_bytes() -> int:
    """Resident memory without shared memory, which is the segments'."""
    with open("/proc/self/status") as file:
        return sum(int(kib) * 1024 for kib in re.findall(r"Rss(?:Anon|File):\s+(\d+) kB", file.read()))
