"""How a rank maps memory for a GPU, on the fake driver: right bytes, read-only, all or nothing, nothing left."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_client.cuda import access
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.cuda.driver import HandleTypes, Location, Space
from engram_client.errors import (
    AddressesScattered,
    CudaCallFailed,
    DeviceUnsupported,
    EngramError,
    GpuNotFound,
    MalformedMessage,
    MapFailed,
    PeerAccessMissing,
    RegistrationFailed,
)
from engram_client.layout import ROW_BYTES, RowFormat, Shard
from engram_client.mapping.hostmem import HostMapping
from engram_client.mapping.registered import RegisteredMapping
from engram_client.mapping.segments import gpu_ordinal, map_for_cpu, map_for_gpu
from engram_client.mapping.vmm import VmmMapping
from engram_client.protocol import Backing, SegmentInfo
from tests.support.fake_driver import FakeDriver

PAGE = 2 << 20
RANGE = 2 * PAGE
SIZE = 10 * PAGE
"""Five ranges."""
CONTENT = np.random.default_rng(5).integers(0, 256, SIZE, np.uint8).tobytes()

Make = Callable[..., FakeDriver]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the process's driver; at the end nothing may have leaked from it."""
    made = []

    def factory(fail: str = "", **settings: Any) -> FakeDriver:
        monkeypatch.setenv(DRIVER_VARIABLE, "tests.support.fake_driver:FakeDriver")
        monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps(settings))
        monkeypatch.setenv("ENGRAM_FAKE_FAIL", fail)
        monkeypatch.setattr(access, "_driver", None)
        driver = access.cuda_driver()
        assert isinstance(driver, FakeDriver)
        made.append(driver)
        return driver

    yield factory
    monkeypatch.setattr(access, "_driver", None)
    for driver in made:
        assert driver.leaks() == []


@pytest.fixture
def memfd() -> Iterator[int]:
    """Host memory with CONTENT, as a descriptor for reading."""
    writable = os.memfd_create("table", os.MFD_CLOEXEC)
    os.write(writable, CONTENT)
    fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(writable)
    yield fd
    os.close(fd)


def exported(driver: FakeDriver, location: Location, fabric: bool = False) -> tuple[int, Callable[[], None], bytes]:
    """(descriptor, what gives all back, FABRIC blob) of an allocation with CONTENT."""
    types = HandleTypes.POSIX_FD | (HandleTypes.FABRIC if fabric else HandleTypes.NONE)
    handle = driver.mem_create(SIZE, location, types)
    address = driver.address_reserve(SIZE, 0)
    driver.mem_map(address, SIZE, handle)
    driver.set_access(address, SIZE, (location,), True)
    ctypes.memmove(address, CONTENT, SIZE)
    driver.mem_unmap(address, SIZE)
    driver.address_free(address, SIZE)
    fd = driver.export_fd(handle)

    def give_back() -> None:
        os.close(fd)
        driver.mem_release(handle)

    return fd, give_back, driver.export_fabric(handle) if fabric else b""


def info(backing: Backing, device: str | None = None, name: str = "L1") -> SegmentInfo:
    return SegmentInfo(
        id=name,
        layer_id=1,
        shard=Shard(row_start=0, row_stop=SIZE // ROW_BYTES, columns=None),
        rank=None,
        nbytes=SIZE,
        backing=backing,
        row_format=RowFormat.PACKED,
        page_bytes=PAGE,
        device=device,
    )


# Registered host memory


def test_rows_that_straddle_registered_ranges_are_right(make: Make, memfd: int) -> None:
    driver = make()
    mapping = RegisteredMapping(memfd, SIZE, driver, 1, range_bytes=RANGE)
    for border in range(RANGE, SIZE, RANGE):
        first = border // ROW_BYTES * ROW_BYTES
        assert first < border < first + ROW_BYTES
        assert driver.gpu_read(mapping.device_address + first, ROW_BYTES, 1) == CONTENT[first : first + ROW_BYTES]
    assert driver.gpu_read(mapping.device_address, SIZE, 1) == CONTENT
    assert bytes(mapping.view) == CONTENT
    assert not driver.gpu_may(mapping.device_address, 1, 1, write=True)
    mapping.close()
    mapping.close()
    assert driver.leaks() == []


@pytest.mark.parametrize("nth", [1, 2, 3, 4, 5])
def test_a_failed_range_undoes_all_and_leaves_cuda_usable(make: Make, memfd: int, nth: int) -> None:
    driver = make(fail=f"cuMemHostRegister:{nth}:CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RegistrationFailed) as failed:
        RegisteredMapping(memfd, SIZE, driver, 0, range_bytes=RANGE, name="L1")
    assert failed.value.fields | {"remedy": ""} == {
        "segment": "L1",
        "device": 0,
        "start": (nth - 1) * RANGE,
        "stop": nth * RANGE,
        "name": "CUDA_ERROR_OUT_OF_MEMORY",
        "remedy": "",
    }
    assert driver.leaks() == []
    with RegisteredOnce(driver, memfd) as mapping:  # the next call, and an unrelated one, work
        assert driver.gpu_read(mapping.device_address, 16, 0) == CONTENT[:16]


class RegisteredOnce:
    def __init__(self, driver: FakeDriver, fd: int) -> None:
        self.mapping = RegisteredMapping(fd, SIZE, driver, 0, range_bytes=RANGE)

    def __enter__(self) -> RegisteredMapping:
        return self.mapping

    def __exit__(self, *_: object) -> None:
        self.mapping.close()


def test_ranges_keep_below_what_the_driver_takes_in_one_call(make: Make, memfd: int) -> None:
    driver = make(register_limit=RANGE)
    with pytest.raises(RegistrationFailed):
        RegisteredMapping(memfd, SIZE, driver, 0)
    RegisteredMapping(memfd, SIZE, driver, 0, range_bytes=RANGE).close()


def test_addresses_out_of_line_are_refused(make: Make, memfd: int) -> None:
    driver = make(scattered=True)
    with pytest.raises(AddressesScattered) as refused:
        RegisteredMapping(memfd, SIZE, driver, 0, range_bytes=RANGE)
    assert refused.value.offset == RANGE
    RegisteredMapping(memfd, SIZE, driver, 0).close()  # one range has no neighbour


def test_gpus_that_walk_the_cpus_page_tables_need_no_registration(make: Make, memfd: int) -> None:
    driver = make(ats=True, fail="cuMemHostRegister:*:CUDA_ERROR_UNKNOWN")
    mapping = RegisteredMapping(memfd, SIZE, driver, 0)
    assert driver.gpu_read(mapping.device_address, SIZE, 0) == CONTENT
    mapping.close()


def test_a_mapping_in_use_stays(make: Make, memfd: int) -> None:
    driver = make()
    fd, give_back, _ = exported(driver, Location.host(0))
    for mapping in (
        RegisteredMapping(memfd, SIZE, driver, 0),
        VmmMapping(fd, SIZE, driver, 0, host_access=True),
    ):
        for used in (mapping.view[4:8], np.frombuffer(mapping.view, np.uint8)):
            with pytest.raises(BufferError):
                mapping.close()
            assert driver.gpu_read(mapping.device_address, 4, 0) == CONTENT[:4]
            del used
        mapping.close()
    give_back()


@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_ranks_that_attach_at_once_all_succeed(tmp_path: Path, memfd: int, ranks: int) -> None:
    """The fake fails a registration while another process is in one; the lock keeps them apart."""
    os.mkdir(tmp_path / "sockets")
    script = f"""
import sys
import traceback
from engram_client.cuda.access import cuda_driver
from engram_client.mapping.hostmem import HostMapping
from engram_client.mapping.registered import RegisteredMapping
d = cuda_driver()
m = RegisteredMapping({memfd}, {SIZE}, d, 0, range_bytes={RANGE}, lock_path={str(tmp_path / "sockets")!r})
sys.stdout.buffer.write(d.gpu_read(m.device_address, {SIZE}, 0)); m.close(); sys.exit(len(d.leaks()))"""
    environ = os.environ | {
        DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver",
        "ENGRAM_FAKE_CUDA": json.dumps({"exclusive": str(tmp_path / "exclusive")}),
    }
    started = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, pass_fds=(memfd,), env=environ)
        for _ in range(ranks)
    ]
    for process in started:
        out, _ = process.communicate()
        assert process.returncode == 0
        assert out == CONTENT


# Memory of the CUDA driver


@pytest.mark.parametrize("location", [Location.host(0), Location.device(0), Location.device(1)])
def test_exported_memory_is_read_on_any_gpu_and_written_on_none(make: Make, location: Location) -> None:
    driver = make()
    fd, give_back, _ = exported(driver, location)
    for ordinal in (0, 1):
        mapping = VmmMapping(fd, SIZE, driver, ordinal, page_bytes=PAGE)
        assert mapping.device_address % PAGE == 0
        assert driver.gpu_read(mapping.device_address, SIZE, ordinal) == CONTENT
        assert not driver.gpu_may(mapping.device_address, 1, ordinal, write=True)
        assert mapping.on_host == (location.space is Space.HOST_NUMA)
        with pytest.raises(ValueError, match="not mapped for the CPU"):
            _ = mapping.view
        mapping.close()
        mapping.close()
    give_back()


def test_a_cpu_rank_reads_cuda_host_memory_without_a_context_and_may_not_write(make: Make) -> None:
    driver = make(fail="cuDevicePrimaryCtxRetain:*:CUDA_ERROR_UNKNOWN")
    fd, give_back, _ = exported(driver, Location.host(0))
    mapping = VmmMapping(fd, SIZE, driver, None, host_access=True)
    assert bytes(mapping.view) == CONTENT
    assert mapping.view.readonly
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(mapping.address, 1, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
    mapping.close()
    give_back()


VMM_CALLS = [
    "cuDevicePrimaryCtxRetain:1",
    "cuDevicePrimaryCtxRetain:2",
    "cuMemImportFromShareableHandle:1",
    "cuMemGetAllocationPropertiesFromHandle:1",
    "cuMemAddressReserve:2",
    "cuMemMap:2",
    "cuMemSetAccess:2",
]
HOST_CALLS = [
    "cuDevicePrimaryCtxRetain:1",
    "cuDevicePrimaryCtxRetain:2",
    "cuMemHostRegister:1",
    "cuMemHostRegister:2",
    "cuMemHostGetDevicePointer:1",
    "cuMemHostGetDevicePointer:2",
]


@pytest.mark.parametrize("call", VMM_CALLS)
def test_whichever_call_fails_nothing_of_an_import_stays(make: Make, call: str) -> None:
    driver = make(fail=f"{call}:CUDA_ERROR_UNKNOWN")
    fd, give_back, _ = exported(driver, Location.device(0))
    with pytest.raises(CudaCallFailed) as failed:
        VmmMapping(fd, SIZE, driver, 0)
    assert failed.value.call == call.partition(":")[0]
    give_back()
    assert driver.leaks() == []


@pytest.mark.parametrize("call", HOST_CALLS)
def test_whichever_call_fails_nothing_of_a_registration_stays(make: Make, memfd: int, call: str) -> None:
    driver = make(fail=f"{call}:CUDA_ERROR_UNKNOWN")
    with pytest.raises((CudaCallFailed, RegistrationFailed)):
        RegisteredMapping(memfd, SIZE, driver, 0, range_bytes=RANGE)
    assert driver.leaks() == []


def test_an_import_error_names_its_call_and_what_to_do(make: Make) -> None:
    driver = make(fail="cuMemSetAccess:2:CUDA_ERROR_OUT_OF_MEMORY")
    fd, give_back, _ = exported(driver, Location.device(0))
    with pytest.raises(CudaCallFailed) as failed:
        VmmMapping(fd, SIZE, driver, 0)
    assert (failed.value.call, failed.value.name) == ("cuMemSetAccess", "CUDA_ERROR_OUT_OF_MEMORY")
    assert failed.value.remedy
    give_back()


# All segments of a client


def test_a_client_maps_each_segment_by_its_kind(make: Make, memfd: int) -> None:
    driver = make()
    host_fd, host_back, _ = exported(driver, Location.host(0))
    peer_fd, peer_back, _ = exported(driver, Location.device(1))
    segments = [
        info(Backing.MEMFD, name="a"),
        info(Backing.CUDA_HOST, name="b"),
        info(Backing.CUDA_DEVICE, driver.device_uuid(1), name="c"),
    ]
    descriptors = {"a": memfd, "b": host_fd, "c": peer_fd}
    mapped = map_for_gpu(segments, descriptors, 0)
    for mapping in mapped.values():
        assert driver.gpu_read(mapping.device_address, SIZE, 0) == CONTENT
        mapping.close()
    on_cpu = map_for_cpu(segments[:2], descriptors)
    for view in on_cpu.values():
        assert bytes(view.view) == CONTENT
        view.close()
    with pytest.raises(MapFailed):
        map_for_cpu(segments, descriptors)
    host_back(), peer_back()


def test_one_segment_that_fails_undoes_those_before_it(make: Make, memfd: int) -> None:
    driver = make(fail="cuMemHostRegister:2:CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RegistrationFailed):
        map_for_gpu([info(Backing.MEMFD, name="a"), info(Backing.MEMFD, name="b")], {"a": memfd, "b": memfd}, 0)
    assert driver.leaks() == []
    with pytest.raises(MalformedMessage):
        map_for_gpu([info(Backing.MEMFD, name="a"), info(Backing.MEMFD, name="b")], {"a": memfd}, 0)
    assert driver.leaks() == []


def test_a_fabric_handle_needs_no_descriptor(make: Make) -> None:
    driver = make(fabric="yes")
    _, give_back, blob = exported(driver, Location.device(1), fabric=True)
    mapped = map_for_gpu([info(Backing.CUDA_DEVICE, "GPU-of-another-node")], {"L1": blob}, 0)
    assert driver.gpu_read(mapped["L1"].device_address, SIZE, 0) == CONTENT
    mapped["L1"].close()
    give_back()


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({"peers": False}, 1, PeerAccessMissing),
        ({"gpus": 1}, 1, PeerAccessMissing),  # a GPU that this process does not see
        ({"gpus": 1}, None, GpuNotFound),
    ],
)
def test_what_a_gpu_cannot_reach_is_said_at_attach(
    make: Make, settings: dict[str, Any], device: int | None, expected: type[EngramError]
) -> None:
    uuid = make(gpus=2).device_uuid(1)
    make(**settings)
    segment = info(Backing.CUDA_DEVICE, uuid)
    with pytest.raises(expected) as refused:
        map_for_gpu([segment], {"L1": 0}, 0 if device else 1)
    assert uuid in (refused.value.fields.get("peer"), *([uuid] if expected is GpuNotFound else []))


def test_devices_are_read_as_torch_writes_them() -> None:
    assert [gpu_ordinal(device) for device in ("cpu", "cuda", "cuda:3")] == [None, 0, 3]
    for device in ("", "cuda:", "cuda:-1", "cuda:1x", "gpu", "CUDA"):
        with pytest.raises(DeviceUnsupported):
            gpu_ordinal(device)


def test_a_mapping_that_failed_can_be_shown_by_what_reports_the_error(make: Make) -> None:
    """Tools that print the variables of a failure's frames meet objects that are half made."""
    driver = make()
    fd = os.open("/", os.O_RDONLY)
    for what in (
        lambda: HostMapping(fd, PAGE),
        lambda: RegisteredMapping(fd, PAGE, driver, 0),
        lambda: VmmMapping(fd, PAGE, driver, 0),
    ):
        with pytest.raises(EngramError) as failed:
            what()
        told = "".join(traceback.TracebackException.from_exception(failed.value, capture_locals=True).format())
        assert "closed" in told
    os.close(fd)
