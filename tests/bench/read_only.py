"""What reading alone can do: the loader's C loop without its copies, as many processes at once as there are GPUs.

A child gets what a loader child would read, in JSON, and reads all of it for every line on its standard input; the
answer is its rate.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from engram_server import device_pump
from engram_server.fill import run_threads
from engram_server.load_job import LoadJob
from engram_server.tensor_file import Extent

HUGE_PAGE = 2 << 20


class Share(msgspec.Struct, frozen=True):
    ranges: tuple[Extent, ...]
    slot_bytes: int
    slots: int
    threads: int


def share_of(job: LoadJob, index: int, count: int) -> Share:
    """Of process `index`: its part of each table's values."""
    ranges = []
    for extent in job.values:
        first, last = (extent.nbytes * k // count for k in (index, index + 1))
        ranges.append(Extent(extent.path, extent.offset + first, last - first))
    threads = max(1, job.threads // count)
    return Share(tuple(ranges), device_pump.slot_bytes(job), job.device_slots, threads)


def read_rate(job: LoadJob, count: int, runs: int) -> float:
    """Bytes per second of each process, all at once; the median of `runs`."""
    children = []
    try:
        for index in range(count):
            order = msgspec.json.encode(share_of(job, index, count)).decode()
            command = [sys.executable, "-m", "tests.bench.read_only", order]
            children.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            )
        answers: list[float] = []
        for run in range(runs + 1):  # before the first one each says that it is there
            if run:
                for child in children:
                    assert child.stdin is not None
                    child.stdin.write("\n")
            rates = [float(child.stdout.readline()) for child in children if child.stdout is not None]
            if run:
                answers.append(statistics.mean(rates))
        return statistics.median(answers)
    finally:
        for child in children:
            child.communicate()


def main() -> None:
    share = msgspec.json.decode(sys.argv[1], type=Share)
    a_thread = share.slots * share.slot_bytes
    memory = mmap.mmap(-1, share.threads * a_thread + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, 1, len(memory))  # as registered memory, all of it is there
    base = -(-address // HUGE_PAGE) * HUGE_PAGE
    print(0, flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        read_all(share, base, a_thread)
        seconds = time.perf_counter() - begin
        print(sum(extent.nbytes for extent in share.ranges) / seconds, flush=True)


def read_all(share: Share, base: int, a_thread: int) -> None:
    from engram_server._pump import pump  # where there is no C helper nobody asks for this

    step = device_pump.ITEM_BYTES
    items = [
        (extent.path, at, min(step, extent.offset + extent.nbytes - at))
        for extent in share.ranges
        for at in range(extent.offset, extent.offset + extent.nbytes, step)
    ]
    bases: queue.SimpleQueue[int] = queue.SimpleQueue()
    for thread in range(share.threads):
        bases.put(base + thread * a_thread)

    def work(mine: Iterator[tuple[str, int, int]], stop: threading.Event) -> None:
        first = bases.get_nowait()
        slots = tuple((first + k * share.slot_bytes, 0, 0, 0) for k in range(share.slots))
        files: dict[str, int] = {}
        for path, at, nbytes in mine:
            if path not in files:
                files[path] = os.open(path, os.O_RDONLY)
            outcome = pump(files[path], at, nbytes, 0, slots, share.slot_bytes, 0, 0, 0)
            if outcome[0] != "done":
                raise SystemExit(f"{path}: {outcome}")
        for fd in files.values():
            os.close(fd)

    run_threads(work, items, share.threads)


if __name__ == "__main__":
    main()
