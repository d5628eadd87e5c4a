"""The fake driver is as strict as the real one; and a machine without a driver says so."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engram_client.cuda import access
from engram_client.cuda.access import DRIVER_VARIABLE, cuda_driver
from engram_client.cuda.driver import Driver, HandleTypes, Location
from engram_client.errors import CudaCallFailed, CudaUnavailable, NoDriver
from tests.support.fake_driver import FakeDriver

SIZE = 4 << 20
FD = HandleTypes.POSIX_FD
GPU0, GPU1, HOST = Location.device(0), Location.device(1), Location.host(0)


def make(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> FakeDriver:
    monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps(settings))
    return FakeDriver()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return make(monkeypatch)


def map_all(driver: Driver, handle: int, where: tuple[Location, ...], writable: bool) -> int:
    address = driver.address_reserve(SIZE, 2 << 20)
    driver.mem_map(address, SIZE, handle)
    driver.set_access(address, SIZE, where, writable)
    return address


def unmap_all(driver: Driver, address: int) -> None:
    driver.mem_unmap(address, SIZE)
    driver.address_free(address, SIZE)


def in_child(body: str, fds: tuple[int, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a new process with its own fake driver in `d`."""
    prelude = "import ctypes, os\nfrom engram_client.cuda.access import cuda_driver\n"
    prelude += "from engram_client.cuda.driver import HandleTypes, Location\nd = cuda_driver()\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + body],
        capture_output=True,
        text=True,
        pass_fds=fds,
        env={**os.environ, DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver", **environ},
    )


def test_memory_is_shared_with_a_process_that_imports_the_descriptor(fake: FakeDriver) -> None:
    for location in (GPU1, HOST):
        handle = fake.mem_create(SIZE, location, FD)
        address = map_all(fake, handle, (location,), True)
        ctypes.memmove(address + SIZE - 5, b"hello", 5)
        fd = fake.export_fd(handle)
        body = f"""
h = d.import_fd({fd}); a = d.address_reserve({SIZE}, 0); d.mem_map(a, {SIZE}, h)
d.set_access(a, {SIZE}, (Location.device(0),), False)
print(d.mem_location(h), d.gpu_read(a + {SIZE} - 5, 5, 0))"""
        child = in_child(body, (fd,))
        assert str(location) in child.stdout, child.stderr
        assert "b'hello'" in child.stdout
        os.close(fd)
        unmap_all(fake, address)
        fake.mem_release(handle)
    assert fake.leaks() == []


def test_an_exported_descriptor_keeps_the_memory_when_its_exporter_is_killed() -> None:
    ours, theirs = socket.socketpair()
    body = f"""
import socket
h = d.mem_create({SIZE}, Location.device(0), HandleTypes.POSIX_FD)
a = d.address_reserve({SIZE}, 0); d.mem_map(a, {SIZE}, h)
d.set_access(a, {SIZE}, (Location.device(0),), True); ctypes.memmove(a, b"kept", 4)
socket.send_fds(socket.socket(fileno={theirs.fileno()}), [b"x"], [d.export_fd(h)])
os.kill(os.getpid(), 9)"""
    child = in_child(body, (theirs.fileno(),))
    assert child.returncode == -signal.SIGKILL, child.stderr
    _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    ours.close(), theirs.close()
    fake = FakeDriver()
    handle = fake.import_fd(fds[0])
    address = map_all(fake, handle, (GPU0,), False)
    assert fake.gpu_read(address, 4, 0) == b"kept"
    unmap_all(fake, address)
    fake.mem_release(handle)
    os.close(fds[0])


def test_a_descriptor_reopened_through_proc_is_refused(fake: FakeDriver) -> None:
    handle = fake.mem_create(SIZE, GPU0, FD)
    fd = fake.export_fd(handle)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(CudaCallFailed) as refused:
        fake.import_fd(again)
    assert (refused.value.call, refused.value.name) == ("cuMemImportFromShareableHandle", "CUDA_ERROR_UNKNOWN")
    os.close(fd), os.close(again)
    fake.mem_release(handle)


def test_a_write_through_a_read_only_map_is_a_fault(fake: FakeDriver) -> None:
    handle = fake.mem_create(SIZE, GPU0, FD)
    fd = fake.export_fd(handle)
    child = in_child(
        f"""
h = d.import_fd({fd}); a = d.address_reserve({SIZE}, 0); d.mem_map(a, {SIZE}, h)
d.set_access(a, {SIZE}, (Location.device(0),), False); ctypes.memset(a, 1, 1)""",
        (fd,),
    )
    assert child.returncode == -signal.SIGSEGV
    os.close(fd)
    fake.mem_release(handle)


def test_what_is_not_owned_cannot_be_given_back(fake: FakeDriver) -> None:
    handle = fake.mem_create(SIZE, GPU0, FD)
    address = map_all(fake, handle, (GPU0,), True)
    fake.mem_release(handle)
    with pytest.raises(CudaCallFailed):
        fake.mem_release(handle)
    with pytest.raises(CudaCallFailed):
        fake.address_free(address, SIZE)  # still mapped
    with pytest.raises(CudaCallFailed):
        fake.mem_unmap(address + 4096, SIZE)
    unmap_all(fake, address)
    with pytest.raises(CudaCallFailed):
        fake.mem_unmap(address, SIZE)
    assert fake.leaks() == []


def test_leaks_are_listed_and_logged_at_exit(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = in_child(f"d.mem_create({SIZE}, Location.device(0), HandleTypes.NONE)", ENGRAM_FAKE_LOG=str(log))
    assert child.returncode == 0, child.stderr
    last = json.loads(log.read_text().splitlines()[-1])
    assert last["call"] == "exit"
    assert last["leaks"] == [f"handle of {SIZE} bytes"]


def test_a_call_fails_at_the_count_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_FAKE_FAIL", "cuMemCreate:2:CUDA_ERROR_OUT_OF_MEMORY,cuMemMap:*:CUDA_ERROR_UNKNOWN")
    fake = FakeDriver()
    handles = [fake.mem_create(SIZE, GPU0, FD)]
    with pytest.raises(CudaCallFailed) as failed:
        fake.mem_create(SIZE, GPU0, FD)
    assert failed.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    handles.append(fake.mem_create(SIZE, GPU0, FD))
    address = fake.address_reserve(SIZE, 0)
    for _ in range(2):
        with pytest.raises(CudaCallFailed):
            fake.mem_map(address, SIZE, handles[0])
    fake.address_free(address, SIZE)
    for handle in handles:
        fake.mem_release(handle)


def test_memory_of_a_gpu_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make(monkeypatch, gpu_bytes=SIZE)
    handle = fake.mem_create(SIZE, GPU0, FD)
    assert fake.memory_info(0) == (0, SIZE)
    with pytest.raises(CudaCallFailed) as failed:
        fake.mem_create(SIZE, GPU0, FD)
    assert failed.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
    fake.mem_release(handle)
    assert fake.memory_info(0) == (SIZE, SIZE)


def test_fabric_travels_as_bytes_where_it_works_and_lies_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = make(monkeypatch, fabric="yes")
    handle = fake.mem_create(SIZE, GPU0, FD | HandleTypes.FABRIC)
    blob = fake.export_fabric(handle)
    child = in_child(f"print(d.mem_location(d.import_fabric({blob!r})))")
    assert str(GPU0) in child.stdout, child.stderr
    fake.mem_release(handle)
    liar = make(monkeypatch, fabric="lies")
    assert liar.attribute(0, "HANDLE_TYPE_FABRIC_SUPPORTED") == 1
    with pytest.raises(CudaCallFailed) as failed:
        liar.mem_create(SIZE, GPU0, FD | HandleTypes.FABRIC)
    assert failed.value.name == "CUDA_ERROR_NOT_PERMITTED"


def test_processes_may_see_the_same_gpu_under_different_ordinals(fake: FakeDriver) -> None:
    child = in_child("print(d.device_count(), d.device_uuid(0))", CUDA_VISIBLE_DEVICES="1")
    assert child.stdout.split() == ["1", fake.device_uuid(1)]


def test_a_forked_child_has_no_cuda(fake: FakeDriver) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            fake.device_count()
            os._exit(1)
        except CudaCallFailed as error:
            os._exit(0 if error.name == "CUDA_ERROR_NOT_INITIALIZED" else 2)
    assert os.waitpid(pid, 0)[1] == 0


def test_without_a_driver_the_error_says_so() -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from engram_client.cuda.access import cuda_driver; cuda_driver()"],
        capture_output=True,
        text=True,
        env={key: value for key, value in os.environ.items() if key != DRIVER_VARIABLE} | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert NoDriver.__name__ in child.stderr


def test_a_variable_that_names_no_driver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_driver", None)  # whatever another test has made
    for named in ("nowhere:Driver", "json:Driver", "nothing", ":"):
        monkeypatch.setenv(DRIVER_VARIABLE, named)
        with pytest.raises(CudaUnavailable):
            cuda_driver()


def test_importing_the_interface_imports_no_bindings() -> None:
    script = "import sys, engram_client.cuda.access, engram_client.cuda.real; print('cuda.bindings' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "False"


def test_the_real_driver_has_every_call_of_the_interface() -> None:
    from engram_client.cuda.real import RealDriver

    wanted = {name for name in vars(Driver) if not name.startswith("_")}
    for kind in (RealDriver, FakeDriver):
        assert wanted <= set(dir(kind)), kind


def test_an_error_of_a_driver_newer_than_the_bindings_keeps_its_number() -> None:
    """Loops in C hand the driver's codes on as they are."""
    bindings = pytest.importorskip("cuda.bindings.driver")
    from engram_client.cuda.real import RealDriver

    driver = object.__new__(RealDriver)  # no driver is needed to name its errors
    driver._cu = bindings
    error = driver._failed("cuMemcpyHtoDAsync", 987_654)
    assert (error.call, error.name) == ("cuMemcpyHtoDAsync", "CUDA_ERROR_987654")
