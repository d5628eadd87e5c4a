"""The fake driver's devices, contexts and virtual memory: see fake_driver.py."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import mmap
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from engram_client.cuda.driver import FABRIC_BYTES, HandleTypes, Location, Space, call_failed
from engram_client.errors import NoDriver
from tests.support.fake_machinery import (
    MAP_FIXED,
    MAP_NORESERVE,
    Settings,
    driver_call,
    fail,
    mmap_at,
    munmap,
)

PAGE = mmap.PAGESIZE
_NAME = re.compile(r"/memfd:fake-cuda:(device|host_numa):(\S*):(\d+) ")
_MARK = os.O_NONBLOCK
"""Status flags belong to the open file, travel with SCM_RIGHTS and exec, and are not there on a descriptor
re-opened through /proc, which the real driver refuses too."""
_FABRIC_PREFIX = b"fake-fabric:"


class Allocation:
    def __init__(self, fd: int, nbytes: int, location: Location, types: HandleTypes, imported: bool) -> None:
        self.fd, self.nbytes, self.location, self.types, self.imported = fd, nbytes, location, types, imported
        self.references = 1


class FakeVmm:
    """One process's view of the fake machine, without what needs host memory to be registered."""

    def __init__(self) -> None:
        self.settings = msgspec.json.decode(os.environ.get("ENGRAM_FAKE_CUDA") or "{}", type=Settings)
        if not self.settings.driver:
            raise NoDriver(problem="the fake machine has none")
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._failures = [entry.split(":") for entry in os.environ.get("ENGRAM_FAKE_FAIL", "").split(",") if entry]
        self._log_path = os.environ.get("ENGRAM_FAKE_LOG")
        self._next = 1000
        self._handles: dict[int, Allocation] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, tuple[int, Allocation]] = {}
        self._access: dict[int, dict[Location, bool]] = {}
        self._registered: dict[int, tuple[int, bool]] = {}
        self._contexts: Counter[int] = Counter()
        self._streams: set[int] = set()
        self._work: dict[int, list[Callable[[], None]]] = {}
        """By stream, what was started and not waited for yet."""
        self._working = threading.Lock()
        self._current = threading.local()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = range(self.settings.gpus) if visible is None else [int(i) for i in visible.split(",") if i]
        self._devices = [index for index in chosen if index < self.settings.gpus]
        if not self._devices:
            raise NoDriver(problem="the fake driver finds no GPU")
        atexit.register(self._at_exit)
        self.log(call="cuInit")

    def __repr__(self) -> str:
        return f"<FakeDriver, GPUs {self._devices}, leaks {self.leaks()}>"

    # Machinery

    def enter(self, name: str, context: bool) -> None:
        if os.getpid() != self._pid:
            raise fail(name, "NOT_INITIALIZED", "forked after cuInit")
        self._counts[name] += 1
        for call, nth, code in self._failures:
            if call == name and nth in ("*", str(self._counts[name])):
                raise call_failed(name, code, "made to fail")
        if context and not self._stack:
            raise fail(name, "INVALID_CONTEXT")

    def log(self, **event: Any) -> None:
        if self._log_path:
            line = json.dumps({"pid": os.getpid(), **event}) + "\n"
            with open(self._log_path, "a") as file:  # one write: lines of several processes do not mix
                file.write(line)

    def _at_exit(self) -> None:
        if os.getpid() == self._pid:
            self.log(call="exit", leaks=self.leaks())

    def leaks(self) -> list[str]:
        """What this process has taken and not given back."""
        found = [f"handle of {one.nbytes} bytes" for one in self._handles.values()]
        found += [f"mapping of {nbytes} bytes" for nbytes, _ in self._mapped.values()]
        found += [f"reservation of {nbytes} bytes" for nbytes in self._reserved.values()]
        found += [f"registration of {nbytes} bytes" for nbytes, _ in self._registered.values()]
        found += [f"{count} of context {ordinal}" for ordinal, count in self._contexts.items() if count]
        return found + [f"stream {stream}" for stream in self._streams]

    def _number(self) -> int:
        self._next += 1
        return self._next

    @property
    def _stack(self) -> list[int]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        stack: list[int] = self._current.stack
        return stack

    def _device(self, call: str, ordinal: int) -> int:
        if not 0 <= ordinal < len(self._devices):
            raise fail(call, "INVALID_DEVICE")
        return self._devices[ordinal]

    def _uuid(self, index: int) -> str:
        return f"GPU-{index:08x}-{self.settings.node:04x}-4000-8000-000000000000"

    # Devices

    @driver_call("cuDriverGetVersion")
    def version(self) -> int:
        return 13000

    @driver_call("cuDeviceGetCount")
    def device_count(self) -> int:
        return len(self._devices)

    @driver_call("cuDeviceGetUuid")
    def device_uuid(self, ordinal: int) -> str:
        return self._uuid(self._device("cuDeviceGetUuid", ordinal))

    @driver_call("cuDeviceGetName")
    def device_name(self, ordinal: int) -> str:
        return f"Fake GPU {self._device('cuDeviceGetName', ordinal)}"

    @driver_call("cuDeviceGetPCIBusId")
    def device_pci_bus_id(self, ordinal: int) -> str:
        return f"0000:{self._device('cuDeviceGetPCIBusId', ordinal):02x}:00.0"

    @driver_call("cuDeviceGetAttribute")
    def attribute(self, ordinal: int, name: str) -> int:
        self._device("cuDeviceGetAttribute", ordinal)
        return {
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": 1,
            "HANDLE_TYPE_FABRIC_SUPPORTED": int(self.settings.fabric != "no"),
            "HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": int(self.settings.host_numa),
            "HOST_NUMA_ID": 0,
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "COMPUTE_CAPABILITY_MINOR": 0,
            "MULTIPROCESSOR_COUNT": 132,
            "READ_ONLY_HOST_REGISTER_SUPPORTED": 1,
            "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": int(self.settings.ats),
            "INTEGRATED": int(self.settings.integrated),
            "NUMA_CONFIG": int(self.settings.coherent),
            "NUMA_ID": 8 + ordinal,
        }.get(name, 0)

    @driver_call("nvmlDeviceGetMemoryInfo")
    def memory_info(self, ordinal: int) -> tuple[int, int]:
        self._device("nvmlDeviceGetMemoryInfo", ordinal)
        return self.settings.gpu_bytes - self._used(ordinal), self.settings.gpu_bytes

    def _used(self, ordinal: int) -> int:
        mine = {id(one): one for one in self._handles.values() if not one.imported}
        mine.update({id(one): one for _, one in self._mapped.values() if not one.imported})
        return sum(one.nbytes for one in mine.values() if one.location == Location.device(ordinal))

    @driver_call("cuDeviceCanAccessPeer")
    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return self._device("cuDeviceCanAccessPeer", ordinal) != self._device("cuDeviceCanAccessPeer", peer) and (
            self.settings.peers
        )

    # Contexts

    @contextlib.contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        self.retain_context(ordinal)
        self._stack.append(ordinal)
        try:
            yield
        finally:
            self._stack.pop()
            self.release_context(ordinal)

    @driver_call("cuDevicePrimaryCtxRetain")
    def retain_context(self, ordinal: int) -> None:
        self._device("cuDevicePrimaryCtxRetain", ordinal)
        self._contexts[ordinal] += 1

    @driver_call("cuDevicePrimaryCtxRelease")
    def release_context(self, ordinal: int) -> None:
        if not self._contexts[ordinal]:
            raise fail("cuDevicePrimaryCtxRelease", "INVALID_CONTEXT", "released more often than retained")
        self._contexts[ordinal] -= 1

    # Virtual memory management

    @driver_call("cuMemGetAllocationGranularity")
    def granularity(self, location: Location, types: HandleTypes) -> int:
        self._check_place("cuMemGetAllocationGranularity", location, types)
        return self.settings.granularity

    def _check_place(self, call: str, location: Location, types: HandleTypes) -> None:
        if location.space is Space.DEVICE:
            self._device(call, location.id)
        elif not self.settings.host_numa or location.id != 0:
            raise fail(call, "INVALID_VALUE" if self.settings.host_numa else "NOT_SUPPORTED")
        if HandleTypes.FABRIC in types and self.settings.fabric == "no":
            raise fail(call, "NOT_SUPPORTED")

    @driver_call("cuMemCreate")
    def mem_create(self, nbytes: int, location: Location, types: HandleTypes) -> int:
        self._check_place("cuMemCreate", location, types)
        if HandleTypes.FABRIC in types and self.settings.fabric == "lies":
            raise fail("cuMemCreate", "NOT_PERMITTED", "operation not permitted")
        if nbytes <= 0 or nbytes % self.settings.granularity:
            raise fail("cuMemCreate", "INVALID_VALUE")
        device = location.space is Space.DEVICE
        if device and nbytes > self.settings.gpu_bytes - self._used(location.id):
            raise fail("cuMemCreate", "OUT_OF_MEMORY", "out of memory")
        whose = self._uuid(self._devices[location.id]) if device else str(location.id)
        fd = os.memfd_create(f"fake-cuda:{location.space.value}:{whose}:{types.value}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | _MARK)
        return self._adopt(Allocation(fd, nbytes, location, types, imported=False))

    def _adopt(self, allocation: Allocation) -> int:
        handle = self._number()
        self._handles[handle] = allocation
        return handle

    def _allocation(self, call: str, handle: int) -> Allocation:
        if handle not in self._handles:
            raise fail(call, "INVALID_VALUE", "no such handle, or released already")
        return self._handles[handle]

    @driver_call("cuMemRelease")
    def mem_release(self, handle: int) -> None:
        self._unreference(self._allocation("cuMemRelease", handle))
        del self._handles[handle]

    def _unreference(self, allocation: Allocation) -> None:
        allocation.references -= 1
        if not allocation.references:
            os.close(allocation.fd)

    @driver_call("cuMemGetAllocationPropertiesFromHandle")
    def mem_location(self, handle: int) -> Location:
        return self._allocation("cuMemGetAllocationPropertiesFromHandle", handle).location

    @driver_call("cuMemExportToShareableHandle")
    def export_fd(self, handle: int) -> int:
        allocation = self._allocation("cuMemExportToShareableHandle", handle)
        if HandleTypes.POSIX_FD not in allocation.types:
            raise fail("cuMemExportToShareableHandle", "INVALID_VALUE")
        self._check_export(allocation)
        return fcntl.fcntl(allocation.fd, fcntl.F_DUPFD_CLOEXEC, 0)

    @driver_call("cuMemExportToShareableHandle")
    def export_fabric(self, handle: int) -> bytes:
        allocation = self._allocation("cuMemExportToShareableHandle", handle)
        if HandleTypes.FABRIC not in allocation.types:
            raise fail("cuMemExportToShareableHandle", "INVALID_VALUE")
        self._check_export(allocation)
        return (_FABRIC_PREFIX + f"{os.getpid()}:{allocation.fd}".encode()).ljust(FABRIC_BYTES, b"\0")

    def _check_export(self, allocation: Allocation) -> None:
        if allocation.imported and not self.settings.export_again:
            raise fail("cuMemExportToShareableHandle", "INVALID_VALUE", "it was imported")

    @driver_call("cuMemImportFromShareableHandle")
    def import_fd(self, fd: int) -> int:
        call = "cuMemImportFromShareableHandle"
        try:
            if not fcntl.fcntl(fd, fcntl.F_GETFL) & _MARK:
                raise fail(call, "UNKNOWN", "a descriptor re-opened through /proc, or no export")
            return self._import(call, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0))
        except OSError as error:
            raise fail(call, "INVALID_VALUE", str(error)) from error

    @driver_call("cuMemImportFromShareableHandle")
    def import_fabric(self, blob: bytes) -> int:
        call = "cuMemImportFromShareableHandle"
        if len(blob) != FABRIC_BYTES or not blob.startswith(_FABRIC_PREFIX) or self.settings.fabric != "yes":
            raise fail(call, "INVALID_HANDLE")
        pid, _, fd = blob[len(_FABRIC_PREFIX) :].rstrip(b"\0").decode().partition(":")
        try:
            return self._import(call, os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise fail(call, "INVALID_HANDLE", "its owner is gone") from error

    def _import(self, call: str, fd: int) -> int:
        """Takes `fd` over."""
        found = _NAME.match(os.readlink(f"/proc/self/fd/{fd}"))
        if found is None:
            os.close(fd)
            raise fail(call, "INVALID_VALUE", "no exported allocation")
        location = Location.host(int(found[2])) if found[1] == "host_numa" else self._foreign(found[2])
        types = HandleTypes(int(found[3]))
        return self._adopt(Allocation(fd, os.fstat(fd).st_size, location, types, imported=True))

    def _foreign(self, uuid: str) -> Location:
        """A GPU that this process does not see has no ordinal here: -1."""
        names = [self._uuid(index) for index in self._devices]
        return Location.device(names.index(uuid) if uuid in names else -1)

    @driver_call("cuMemAddressReserve")
    def address_reserve(self, nbytes: int, alignment: int) -> int:
        if nbytes <= 0 or nbytes % PAGE:
            raise fail("cuMemAddressReserve", "INVALID_VALUE")
        # Aligned by reserving more and giving the rest back.
        align = max(alignment, PAGE)
        base = mmap_at(None, nbytes + align, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE, -1)
        address = -(-base // align) * align
        munmap(base, address - base)
        munmap(address + nbytes, base + align - address)
        self._reserved[address] = nbytes
        return address

    @driver_call("cuMemAddressFree")
    def address_free(self, address: int, nbytes: int) -> None:
        if self._reserved.get(address) != nbytes or address in self._mapped:
            raise fail("cuMemAddressFree", "INVALID_VALUE", "not a reservation, or still mapped")
        del self._reserved[address]
        munmap(address, nbytes)

    @driver_call("cuMemMap")
    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        allocation = self._allocation("cuMemMap", handle)
        if self._reserved.get(address) != nbytes or address in self._mapped or nbytes != allocation.nbytes:
            raise fail("cuMemMap", "INVALID_VALUE", "not a free reservation of that size")
        allocation.references += 1
        self._mapped[address] = (nbytes, allocation)
        self._access[address] = {}

    @driver_call("cuMemUnmap")
    def mem_unmap(self, address: int, nbytes: int) -> None:
        if address not in self._mapped or self._mapped[address][0] != nbytes:
            raise fail("cuMemUnmap", "INVALID_VALUE", "nothing is mapped there")
        _, allocation = self._mapped.pop(address)
        del self._access[address]
        mmap_at(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1)
        self._unreference(allocation)

    @driver_call("cuMemSetAccess")
    def set_access(self, address: int, nbytes: int, locations: tuple[Location, ...], writable: bool) -> None:
        call = "cuMemSetAccess"
        if address not in self._mapped or self._mapped[address][0] != nbytes or not locations:
            raise fail(call, "INVALID_VALUE", "not mapped")
        allocation = self._mapped[address][1]
        for location in locations:
            if location.space is Space.HOST_NUMA and allocation.location.space is Space.DEVICE:
                raise fail(call, "INVALID_VALUE", "device memory has no host access")
            if location.space is Space.DEVICE:
                self._device(call, location.id)
                peer = allocation.location.space is Space.DEVICE and allocation.location != location
                if peer and not self.settings.peers:
                    raise fail(call, "INVALID_DEVICE", "no peer access")
            self._access[address][location] = writable
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if any(self._access[address].values()) else 0)
        mmap_at(address, nbytes, rights, mmap.MAP_SHARED | MAP_FIXED, allocation.fd)
