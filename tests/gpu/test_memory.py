"""The memory side on a real driver. `python -m pytest -m gpu tests/gpu/test_memory.py` runs all of it and prints
a table of what was measured; ENGRAM_TEST_GIB sets the size of the allocations (1 by default)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_client.cuda.driver import HandleTypes, Location
from engram_client.errors import EngramError
from engram_client.mapping.hostmem import HostMapping
from engram_server import gpus
from tests.gpu.memory_child import PIECE, expected_checksum, pattern
from tests.gpu.real import real_driver

DRIVER = real_driver()

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NBYTES = int(float(os.environ.get("ENGRAM_TEST_GIB", "1")) * (1 << 30)) // PIECE * PIECE
ROWS_BYTES = NBYTES // 264 * 264 // 8 * 8
OWNER_LIMIT = 16 << 20
GIB = 1 << 30
TABLE: list[tuple[str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Prints what was measured at the end, past pytest's capture."""
    yield
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print("", *(f"{name:<58} {value}" for name, value in TABLE), sep="\n", flush=True)


def measured(name: str, value: object) -> None:
    TABLE.append((name, f"{value:.4f}" if isinstance(value, float) else str(value)))


class Child:
    """A process of memory_child, running."""

    def __init__(self, command: str, *fds: int, **arguments: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.memory_child", command, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=fds,
        )

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        report: dict[str, Any] = json.loads(self.process.stdout.readline())
        return report

    def result(self) -> dict[str, Any]:
        out, _ = self.process.communicate(timeout=280)
        assert self.process.returncode == 0
        report: dict[str, Any] = json.loads(out.splitlines()[0])
        return report


@contextmanager
def owned(spec: tuple[str, int]) -> Iterator[tuple[int, dict[str, Any], Child]]:
    """An allocation that another process made: (descriptor, its report, the process)."""
    ours, theirs = socket.socketpair()
    child = Child("owner", theirs.fileno(), spec=spec, nbytes=NBYTES, channel=theirs.fileno())
    theirs.close()
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close()
    try:
        yield fds[0], child.line(), child
    finally:
        os.close(fds[0])
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


SPECS = [("host", 0), *(("device", ordinal) for ordinal in range(DRIVER.device_count()))]


def test_what_this_machine_is() -> None:
    found = gpus.ask(DRIVER, None)
    measured("driver", DRIVER.version())
    for gpu in found.devices:
        measured(f"GPU {gpu.ordinal}", f"{gpu.name} {gpu.uuid} free {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB")
        measured(f"GPU {gpu.ordinal} granularity, host node, peers", (gpu.granularity, gpu.host_node, len(gpu.peers)))
    measured("host memory of the driver", found.host_problem or f"works, granularity {found.host_granularity}")
    measured("FABRIC", found.fabric_problem or "works")
    assert found.devices
    assert [gpu.uuid for gpu in gpus.ask(DRIVER, [gpu.uuid for gpu in found.devices[::-1]]).devices] == [
        gpu.uuid for gpu in found.devices[::-1]
    ]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_allocation_is_made_without_a_context_filled_read_and_protected(spec: tuple[str, int]) -> None:
    name, host = f"{spec[0]} {spec[1]}", spec[0] == "host"
    with owned(spec) as (fd, report, _):
        measured(f"{name}: cuInit, create {NBYTES / GIB:.1f} GiB (s)", (report["init_s"], report["create_s"]))
        beside = [taken - (0 if host or index != spec[1] else NBYTES) for index, taken in enumerate(report["taken"])]
        measured(f"{name}: GPU memory beside the table (MiB)", [round(taken / (1 << 20), 1) for taken in beside])
        assert max(beside) < OWNER_LIMIT
        if host:
            filled = Child("fill_host", fd, fd=fd, nbytes=NBYTES).result()
            measured(f"{name}: context-free CPU map (s)", filled["map_s"])
        else:
            filled = Child("fill_device", fd, fd=fd, nbytes=NBYTES, uuid=DRIVER.device_uuid(spec[1])).result()
            measured(f"{name}: one thread's fill (GB/s)", filled["rows_bytes"] / filled["fill_s"] / 1e9)
            assert filled["read_back"]
        count = NBYTES if host else ROWS_BYTES
        expected = expected_checksum(count)
        for reader in range(DRIVER.device_count()):
            if host or reader == spec[1] or DRIVER.can_access_peer(reader, spec[1]):
                arguments = {"kind": "vmm", "fd": fd, "nbytes": NBYTES, "ordinal": reader}
                found = Child("rank", fd, count=count, **arguments).result()
                measured(f"{name}: attach by GPU {reader} (s)", found["attach_s"])
                assert found["checksum"] == expected
                outcome = Child("poke", fd, **arguments).result()["outcome"]
                measured(f"{name}: write by GPU {reader}", outcome)
                assert outcome != "written"
                assert Child("rank", fd, count=count, **arguments).result()["checksum"] == expected
        if host:
            writer = Child("poke_cpu", fd, fd=fd, nbytes=NBYTES)
            writer.process.communicate()
            assert writer.process.returncode == -signal.SIGSEGV
        outcome = Child("reopened", fd, fd=fd).result()["outcome"]
        measured(f"{name}: descriptor re-opened through /proc", outcome[:90])
        assert outcome != "imported"


@pytest.mark.parametrize("spec", SPECS[:2], ids=str)
def test_the_memory_outlives_its_owner(spec: tuple[str, int]) -> None:
    with owned(spec) as (fd, _, child):
        fill = {"uuid": DRIVER.device_uuid(spec[1])} if spec[0] == "device" else {}
        Child(f"fill_{spec[0]}", fd, fd=fd, nbytes=NBYTES, **fill).result()
        child.process.kill()
        child.process.wait()
        found = Child("rank", fd, kind="vmm", fd=fd, nbytes=NBYTES, ordinal=0, count=ROWS_BYTES).result()
        assert found["checksum"] == expected_checksum(ROWS_BYTES)


@contextmanager
def sealed_memfd() -> Iterator[int]:
    """As the daemon hands it out: write-protected, opened for reading."""
    import fcntl

    writable = os.memfd_create("table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(writable, NBYTES)
    with HostMapping(writable, NBYTES, writable=True) as mapping:
        for start in range(0, NBYTES, PIECE):
            ours = np.frombuffer(mapping.view, np.uint8, PIECE, start)
            ours[:] = pattern(start, PIECE)
            del ours
    fcntl.fcntl(writable, 1033, 0x1 | 0x2 | 0x4 | 0x10)
    fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(writable)
    yield fd
    os.close(fd)


def test_registered_host_memory_is_read_across_ranges_and_protected() -> None:
    expected = expected_checksum(NBYTES)
    with sealed_memfd() as fd:
        for range_bytes in (64 << 30, NBYTES // 4):
            arguments = {"kind": "registered", "fd": fd, "nbytes": NBYTES, "ordinal": 0}
            found = Child("rank", fd, count=NBYTES, range_bytes=range_bytes, **arguments).result()
            measured(
                f"memfd: register {NBYTES / GIB:.1f} GiB in ranges of {range_bytes >> 20} MiB (s)", found["attach_s"]
            )
            assert found["checksum"] == expected
        outcome = Child("poke", fd, **arguments).result()["outcome"]
        measured("memfd: write by GPU 0", outcome)
        assert outcome != "written"
        failed = Child("failed_registration", fd, fd=fd, nbytes=NBYTES, ordinal=0, count=NBYTES).result()
        measured("memfd: a range that cannot be registered", failed["outcome"])
        assert failed["outcome"].startswith("RegistrationFailed")
        assert failed["checksum"] == expected
        assert failed["again"]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_ranks_that_attach_at_once_all_read(ranks: int) -> None:
    expected = expected_checksum(PIECE)
    devices = DRIVER.device_count()

    def attach(kind: str, fd: int) -> None:
        started = [
            Child("rank", fd, kind=kind, fd=fd, nbytes=NBYTES, ordinal=index % devices, count=PIECE)
            for index in range(ranks)
        ]
        found = [child.result() for child in started]
        measured(f"{kind}: {ranks} ranks at once, slowest attach (s)", max(one["attach_s"] for one in found))
        assert all(one["checksum"] == expected for one in found)

    with sealed_memfd() as fd:
        attach("registered", fd)
    with owned(("host", 0)) as (fd, _, _):
        Child("fill_host", fd, fd=fd, nbytes=NBYTES).result()
        attach("vmm", fd)


@pytest.mark.parametrize("placement", ["gpu", "cpu"])
def test_a_daemon_loads_serves_and_leaves_no_context(placement: str) -> None:
    """Rows against the checkpoint's files; GPU memory beside the tables while the daemon serves."""
    import shutil
    import tempfile

    from engram_client.control import ControlConnection
    from engram_client.handover import HandoverConnection
    from engram_client.mapping.segments import map_for_gpu
    from engram_client.protocol import Attach, Attached
    from engram_server.make_checkpoint import make_checkpoint
    from tests.support.daemon import running
    from tests.support.reference import CheckpointReference

    folder = Path(tempfile.mkdtemp(prefix="eg-", dir="/dev/shm"))
    try:
        make_checkpoint(folder / "model", engram_vocab_size=20_000, seed=3, every_code=True)
        reference = CheckpointReference(folder / "model")
        ordinals = range(DRIVER.device_count())
        before = [DRIVER.memory_info(ordinal)[0] for ordinal in ordinals]
        config = {"model_path": str(folder / "model"), "engram_config": {"placement": placement}}
        with running(folder / "d", config | {"load": {"verify": "full"}}) as daemon:
            status = daemon.status()
            assert status.report is not None
            measured(f"daemon, {placement}: backing", status.segments[0].info.backing)
            measured(f"daemon, {placement}: fill (GB/s)", status.report.bytes_per_second / 1e9)
            time_limit = time.monotonic() + 10  # the driver may take a moment to give a dead context's memory back
            while True:
                tables = [
                    sum(s.info.nbytes for s in status.segments if s.info.device == DRIVER.device_uuid(ordinal))
                    for ordinal in ordinals
                ]
                free = [DRIVER.memory_info(ordinal)[0] for ordinal in ordinals]
                beside = [was - now - held for was, now, held in zip(before, free, tables, strict=True)]
                if max(beside) < OWNER_LIMIT or time.monotonic() > time_limit:
                    break
                time.sleep(0.05)
            measured(f"daemon, {placement}: GPU memory beside the tables (MiB)", [b / (1 << 20) for b in beside])
            assert max(beside) < OWNER_LIMIT
            for rank in ordinals:
                with HandoverConnection.open(str(daemon.handover_path), 30) as lease:
                    with ControlConnection(daemon.endpoint, lease) as control:
                        request = Attach(rank=rank, world_size=len(ordinals), device=f"cuda:{rank}", name="test")
                        replies = control.request(request, 30, "attaching")
                        attached = next(reply for reply in replies if isinstance(reply, Attached))
                    descriptors = lease.redeem(attached.ticket, 30)
                    segments = [segment for served in attached.tables for segment in served.segments]
                    started = time.perf_counter()
                    mappings = map_for_gpu(segments, descriptors, rank, lock_path=str(daemon.folder))
                    measured(f"daemon, {placement}: rank {rank} maps (s)", time.perf_counter() - started)
                    for descriptor in descriptors.values():
                        os.close(descriptor)
                    for segment in segments:
                        rows, first = segment.shard.rows, segment.shard.row_start
                        raw = np.empty(rows * 264, np.uint8)
                        with DRIVER.context(rank):
                            DRIVER.copy_from_device(raw.ctypes.data, mappings[segment.id].device_address, raw.nbytes)
                        if segment.row_format == "planar":
                            parts = raw[: rows * 256].reshape(rows, 256), raw[rows * 256 :].reshape(rows, 8)
                        else:
                            parts = tuple(np.split(raw.reshape(rows, 264), [256], axis=1))
                        expected = reference.raw(segment.layer_id, np.arange(first, first + rows))
                        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(parts, expected, strict=True))
                        mappings[segment.id].close()
            assert daemon.stop() == 0, daemon.log
    finally:
        shutil.rmtree(folder)


def test_a_handle_that_is_not_exportable_is_refused_with_its_call() -> None:
    handle = DRIVER.mem_create(2 << 20, Location.device(0), HandleTypes.NONE)
    with pytest.raises(EngramError) as refused:
        DRIVER.export_fd(handle)
    assert refused.value.fields["call"] == "cuMemExportToShareableHandle"
    measured("export of a handle without a type", refused.value.fields["name"])
    DRIVER.mem_release(handle)
