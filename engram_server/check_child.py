"""The checking child: maps segments read-only, digests pieces of them again, reports what differs, and exits.
GPU memory is digested where it is.

Started by exec as `python -m engram_server.check_child FD`, as the loader child is. A segment that somebody
truncated kills this process (SIGBUS), not the daemon.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from engram_client.cuda.access import cuda_driver
from engram_client.errors import EngramError, InternalError
from engram_client.layout import ROW_BYTES
from engram_client.protocol import Backing, Failed, LoadProgress
from engram_server.device_target import DeviceTarget
from engram_server.fill import CpuTarget
from engram_server.load_child import be_killed_first, die_with_parent, open_target
from engram_server.load_job import Checked, CheckOrder, PieceDigest, ProgressUpdate, frame, receive_message
from engram_server.verify import damage

_PROGRESS_EVERY_S = 0.2
_GENTLE_NICENESS = 19


def check(order: CheckOrder, on_progress: Callable[[int, int], None]) -> Checked:
    """Raises MapFailed or a CudaError."""
    started = time.monotonic()
    # Never unmapped: the mappings end with this process.
    on_host: list[tuple[CpuTarget, PieceDigest]] = []
    on_gpu: list[tuple[DeviceTarget, PieceDigest]] = []
    for info, fd in zip(order.segments, order.fds, strict=True):
        pieces = order.pieces.get(info.id, ())
        if info.backing is Backing.CUDA_DEVICE:
            if pieces:  # a context costs time, and memory of the GPU
                device = DeviceTarget(info, fd, cuda_driver(), writable=False)
                on_gpu += [(device, piece) for piece in pieces]
        else:
            host = open_target(info, fd, writable=False)
            on_host += [(host, piece) for piece in pieces]
    total = sum((piece.row_stop - piece.row_start) * ROW_BYTES for _, piece in (*on_host, *on_gpu))
    done, due, lock = 0, started + _PROGRESS_EVERY_S, threading.Lock()

    def on_done(nbytes: int) -> None:
        nonlocal done, due
        with lock:
            done += nbytes
            if time.monotonic() >= due:
                due = time.monotonic() + _PROGRESS_EVERY_S
                on_progress(done, total)

    found = damage(on_host, order.threads, on_done)
    if on_gpu:
        from engram_server import device_digest  # CUDA's kernels, which host memory does without

        found += device_digest.damage(on_gpu, order.gentle, on_done)
    return Checked(
        nbytes=total, seconds=time.monotonic() - started, damage=tuple(Failed.of(mismatch) for mismatch in found)
    )


def main() -> int:
    """Exit status 0 when the parent has been told the outcome, good or bad."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setblocking(True)
    be_killed_first()
    with connection.makefile("rb") as stream:
        order: CheckOrder = receive_message(stream, CheckOrder)
    die_with_parent(connection)
    if order.gentle:
        os.nice(_GENTLE_NICENESS)
    started = time.monotonic()

    def on_progress(done: int, total: int) -> None:
        elapsed = time.monotonic() - started
        progress = LoadProgress(phase="checking", done_bytes=done, total_bytes=total, elapsed_s=elapsed)
        connection.sendall(frame(ProgressUpdate(progress=progress)))

    outcome: Checked | Failed
    try:
        outcome = check(order, on_progress)
    except EngramError as error:
        outcome = Failed.of(error)
    except Exception as error:
        traceback.print_exc()  # the daemon's log is this process's stderr
        outcome = Failed.of(InternalError(doing="checking", problem=f"{type(error).__name__}: {error}"))
    connection.sendall(frame(outcome))
    connection.detach()  # open until the very end: the parent reads its closing as this process's end
    return 0


if __name__ == "__main__":
    sys.exit(main())
