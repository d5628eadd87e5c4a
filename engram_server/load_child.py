"""The loader child: maps the segments, gives them their pages, fills and verifies them, reports, and exits.

Started by exec as `python -m engram_server.load_child FD`; FD is its end of a socket pair. It alone ever maps
a segment for writing. It ends itself when its parent does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress

from engram_client.cuda.access import cuda_driver
from engram_client.errors import (
    AllocationFailed,
    BackingUnavailable,
    EngramError,
    InternalError,
    NotEnoughHugePages,
    NotEnoughSpace,
)
from engram_client.layout import ROW_BYTES
from engram_client.mapping.hostmem import HostMapping
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import Backing, Failed, SegmentInfo
from engram_server.fill import CpuTarget, DummySource, FileSource, HostTarget, Source, fill
from engram_server.load_job import LoadJob, Order, PartResult, receive_message
from engram_server.machine import is_hugetlb
from engram_server.plan import HugePages
from engram_server.reader import is_cached
from engram_server.reporter import Reporter
from engram_server.segments.pages import bind, coverage_remark, huge_bytes, populate
from engram_server.verify import sample, verify

PAGEABLE = (Backing.MEMFD, Backing.POSIX_SHM, Backing.FILE)
"""Memory that gets its pages here, when it is first touched."""
_PR_SET_PDEATHSIG = 1
_ORPHANED = 3


def load(order: Order, reporter: Reporter) -> PartResult:
    """The whole load. Raises one of the project's errors."""
    if all(info.backing is Backing.CUDA_DEVICE for info in order.segments):
        from engram_server.device_load import load_devices  # CUDA's kernels, which host memory does without

        return load_devices(order, reporter)
    job = order.job
    # Never unmapped: the mappings end with this process, and it ends with the load.
    targets = [open_target(info, fd) for info, fd in zip(order.segments, order.fds, strict=True)]
    with reporter.phase("allocating", sum(info.nbytes for info in order.segments)):
        pageable = [target for target in targets if isinstance(target, HostTarget)]
        remarks = _allocate(job, pageable, reporter)
        # The driver's allocations are whole and made of its granularity's pages from the start.
        coverage = {target.info.id: target.info.nbytes for target in targets}
        coverage |= {target.info.id: huge_bytes(target.mapping) for target in pageable}
        remarks += _judge_coverage(job, pageable, coverage)
    stored = sum(info.shard.rows * ROW_BYTES for info in order.segments)
    direct = bool(job.values) and _read_direct(job)
    sources: list[Source] = []

    def make_source() -> Source:
        source = FileSource(job, direct) if job.values else DummySource(job)
        sources.append(source)
        return source

    with reporter.phase("loading", stored):
        digests = fill(job, targets, make_source, reporter.add)
        for target in targets:
            target.flush()
            target.check_size()
    work = [(target, piece) for target in targets for piece in sample(digests.pieces_of(target.info.id), job.verify)]
    with reporter.phase("verifying", sum((p.row_stop - p.row_start) * ROW_BYTES for _, p in work)):
        verify(work, job.threads, reporter.add)
    return PartResult(
        report=reporter.report(job, stored, direct and all(source.direct for source in sources)),
        phase_seconds=reporter.seconds,
        blocks=digests.block_digests(job.tables),
        pieces={target.info.id: digests.pieces_of(target.info.id) for target in targets},
        huge_bytes=coverage,
        remarks=tuple(remarks),
    )


def open_target(info: SegmentInfo, fd: int, writable: bool = True) -> CpuTarget:
    """The segment, in host memory, mapped for writing or only for Target.read. Raises MapFailed or a CudaError."""
    if info.backing in PAGEABLE:
        return HostTarget(info, HostMapping(fd, info.nbytes, writable, info.page_bytes, info.id), fd)
    # For the CPU alone, so that no context is made: neither fill nor check touches a GPU.
    mapping = VmmMapping(
        fd, info.nbytes, cuda_driver(), None, host_access=True, writable=writable, page_bytes=info.page_bytes
    )
    return CpuTarget(info, mapping)


def _read_direct(job: LoadJob) -> bool:
    return job.direct_io == "on" or (job.direct_io == "auto" and not is_cached(job.values))


def _allocate(job: LoadJob, targets: list[HostTarget], reporter: Reporter) -> list[str]:
    remarks = []
    for target in targets:
        info = target.info
        pages = job.huge_pages
        if pages is HugePages.HUGETLB and not is_hugetlb(target.fd):
            pages = HugePages.THP
            remarks.append(f"segment {info.id}: the huge page pool shrank meanwhile, transparent huge pages are used")
        try:
            bind(target.mapping, job.numa)
        except OSError as error:
            raise BackingUnavailable(
                backing=f"NUMA policy {job.numa}",
                problem=error.strerror or str(error),
                remedy='set host.numa to "none"',
            ) from error
        try:
            populate(target.mapping, target.fd, pages, job.threads, reporter.add)
        except OSError as error:
            raise _allocation_error(target, error) from error
    return remarks


def _allocation_error(target: HostTarget, error: OSError) -> EngramError:
    info = target.info
    if info.backing in (Backing.POSIX_SHM, Backing.FILE) and error.errno in (errno.EFAULT, errno.ENOSPC):
        stat = os.fstatvfs(target.fd)
        missing = info.nbytes - os.fstat(target.fd).st_blocks * 512
        path = os.path.dirname(os.readlink(f"/proc/self/fd/{target.fd}"))
        return NotEnoughSpace(path=path, needed=missing, available=stat.f_bavail * stat.f_frsize)
    return AllocationFailed(backing=info.backing, needed=info.nbytes, problem=error.strerror or str(error))


def _judge_coverage(job: LoadJob, targets: list[HostTarget], coverage: dict[str, int]) -> list[str]:
    needed = sum(target.info.nbytes for target in targets)
    huge = sum(coverage[target.info.id] for target in targets)
    if job.huge_pages_required and huge == 0:
        raise NotEnoughHugePages(needed=needed, available=huge)
    found = (
        coverage_remark(target.info.id, coverage[target.info.id], target.info.nbytes, job.huge_pages)
        for target in targets
    )
    return [remark for remark in found if remark]


def die_with_parent(connection: socket.socket) -> None:
    """SIGKILL when the parent's thread ends; and, should that have been before this call, an end at EOF."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        with suppress(OSError):
            connection.recv(1)  # the parent says nothing after its order
        os._exit(_ORPHANED)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def be_killed_first() -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def main() -> int:
    """Exit status 0 when the parent has been told the outcome, good or bad."""
    # A service manager asks every process of the unit to end. Were this one first, the daemon would take its
    # orderly stop for a failed load; it ends this process itself.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.setblocking(True)
    be_killed_first()
    with connection.makefile("rb") as stream:
        order: Order = receive_message(stream, Order)
    die_with_parent(connection)
    reporter = Reporter(connection)
    outcome: PartResult | Failed
    try:
        with reporter:
            outcome = load(order, reporter)
    except EngramError as error:
        outcome = Failed.of(error)
    except MemoryError:
        outcome = Failed.of(AllocationFailed(backing="buffer", needed=0, problem="out of memory"))
    except Exception as error:
        traceback.print_exc()  # the daemon's log is this process's stderr
        outcome = Failed.of(InternalError(doing="loading", problem=f"{type(error).__name__}: {error}"))
    reporter.send(outcome)
    connection.detach()  # open until the very end: the parent reads its closing as this process's end
    return 0


if __name__ == "__main__":
    sys.exit(main())
