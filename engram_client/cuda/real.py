"""The driver interface over `cuda.bindings` (12.x and 13.x). Importing this module needs neither bindings nor
a driver; making a `RealDriver` needs both."""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterator
from typing import Any

from engram_client.cuda.driver import CopyCalls, HandleTypes, Location, Space, call_failed
from engram_client.errors import CudaCallFailed, CudaUnavailable, NoDriver


class _Combination(int):
    """Bits of an enum of the bindings: 12.x reads `.value` of what it is given, 13.x the number itself."""

    @property
    def value(self) -> int:
        return int(self)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class RealDriver:
    """The process's CUDA driver. Raises NoDriver, CudaUnavailable or CudaCallFailed when it cannot be had."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise CudaUnavailable(
                problem=f"cuda.bindings cannot be imported ({error})", remedy="install engram-table-server[cuda]"
            ) from error
        self._cu: Any = driver
        try:
            (code,) = driver.cuInit(0)
        except Exception as error:  # without libcuda the bindings raise classes that differ by version
            raise NoDriver(problem=str(error)) from error
        if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
            raise NoDriver(problem="the driver is there and finds no GPU")
        self._check("cuInit", code)
        types = driver.CUmemAllocationHandleType
        self._types = {
            HandleTypes.POSIX_FD: types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            HandleTypes.FABRIC: types.CU_MEM_HANDLE_TYPE_FABRIC,
        }
        spaces = driver.CUmemLocationType
        self._spaces = {
            Space.DEVICE: spaces.CU_MEM_LOCATION_TYPE_DEVICE,
            Space.HOST_NUMA: spaces.CU_MEM_LOCATION_TYPE_HOST_NUMA,
        }
        self._launch = driver.cuLaunchKernel
        self._is_capturing = driver.cuStreamIsCapturing
        self._wait_event = driver.cuStreamWaitEvent
        self._query = driver.cuEventQuery
        self._no_context = driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
        self._not_ready = driver.CUresult.CUDA_ERROR_NOT_READY
        self._exchange_mode = driver.cuThreadExchangeStreamCaptureMode
        self._relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED

    def __repr__(self) -> str:
        return f"<RealDriver {self.version()}, {self.device_count()} devices>"

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *results = getattr(self._cu, name)(*arguments)
        self._check(name, code)
        return results[0] if results else None

    def _check(self, name: str, code: Any) -> None:
        if int(code) != 0:
            raise self._failed(name, code)

    def _failed(self, name: str, code: Any) -> CudaCallFailed:
        try:
            result = self._cu.CUresult(int(code))
        except ValueError:  # of a driver newer than the bindings
            return call_failed(name, f"CUDA_ERROR_{int(code)}", "an error that these bindings do not know")
        _, text = self._cu.cuGetErrorString(result)
        return call_failed(name, result.name, text.decode() if text else "no description")

    def version(self) -> int:
        return int(self._call("cuDriverGetVersion"))

    # Devices

    def device_count(self) -> int:
        try:
            return int(self._call("cuDeviceGetCount"))
        except CudaCallFailed as error:
            if error.name == "CUDA_ERROR_NO_DEVICE":
                return 0
            raise

    def device_uuid(self, ordinal: int) -> str:
        return f"GPU-{uuid.UUID(bytes=bytes(self._call('cuDeviceGetUuid', self._device(ordinal)).bytes))}"

    def device_name(self, ordinal: int) -> str:
        name: bytes = self._call("cuDeviceGetName", 256, self._device(ordinal))
        return name.rstrip(b"\0").decode(errors="replace")

    def device_pci_bus_id(self, ordinal: int) -> str:
        bus: bytes = self._call("cuDeviceGetPCIBusId", 32, self._device(ordinal))
        return bus.rstrip(b"\0").decode()

    def attribute(self, ordinal: int, name: str) -> int:
        kind = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        if kind is None:
            return 0
        try:
            return int(self._call("cuDeviceGetAttribute", kind, self._device(ordinal)))
        except CudaCallFailed as error:
            if error.name == "CUDA_ERROR_INVALID_VALUE":
                return 0
            raise

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        # cuMemGetInfo would need a context, which costs more memory than it tells of.
        try:
            import pynvml
        except ImportError as error:
            raise CudaUnavailable(
                problem=f"free GPU memory cannot be asked for ({error})", remedy="install engram-table-server[server]"
            ) from error
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByPciBusId(self.device_pci_bus_id(ordinal).encode())
            info = pynvml.nvmlDeviceGetMemoryInfo(handle)
            return int(info.free), int(info.total)
        except pynvml.NVMLError as error:
            raise call_failed("nvmlDeviceGetMemoryInfo", type(error).__name__, str(error)) from error

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return bool(self._call("cuDeviceCanAccessPeer", self._device(ordinal), self._device(peer)))

    def _device(self, ordinal: int) -> Any:
        return self._call("cuDeviceGet", ordinal)

    # Contexts

    @contextlib.contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        device = self._device(ordinal)
        self._call("cuCtxPushCurrent", self._call("cuDevicePrimaryCtxRetain", device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")
            self._call("cuDevicePrimaryCtxRelease", device)

    def retain_context(self, ordinal: int) -> None:
        self._call("cuDevicePrimaryCtxRetain", self._device(ordinal))

    def release_context(self, ordinal: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._device(ordinal))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    # Virtual memory management

    def granularity(self, location: Location, types: HandleTypes) -> int:
        option = self._cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties(location, types), option))

    def mem_create(self, nbytes: int, location: Location, types: HandleTypes) -> int:
        return int(self._call("cuMemCreate", nbytes, self._properties(location, types), 0))

    def mem_release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def mem_location(self, handle: int) -> Location:
        found = self._call("cuMemGetAllocationPropertiesFromHandle", handle).location
        for space, kind in self._spaces.items():
            if int(found.type) == int(kind):
                return Location(space, int(found.id))
        raise call_failed("cuMemGetAllocationPropertiesFromHandle", found.type.name, "memory of a kind not used here")

    def export_fd(self, handle: int) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._types[HandleTypes.POSIX_FD], 0))

    def export_fabric(self, handle: int) -> bytes:
        exported = self._call("cuMemExportToShareableHandle", handle, self._types[HandleTypes.FABRIC], 0)
        return bytes(getattr(exported, "data", exported))

    def import_fd(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._types[HandleTypes.POSIX_FD]))

    def import_fabric(self, blob: bytes) -> int:
        handle = self._cu.CUmemFabricHandle()
        handle.data = blob
        return int(self._call("cuMemImportFromShareableHandle", int(handle.getPtr()), self._types[HandleTypes.FABRIC]))

    def address_reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def address_free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def mem_unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, locations: tuple[Location, ...], writable: bool) -> None:
        flags = self._cu.CUmemAccess_flags
        wanted = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        descriptions = []
        for location in locations:
            description = self._cu.CUmemAccessDesc()
            description.location.type = self._spaces[location.space]
            description.location.id = location.id
            description.flags = wanted
            descriptions.append(description)
        self._call("cuMemSetAccess", address, nbytes, descriptions, len(descriptions))

    def _properties(self, location: Location, types: HandleTypes) -> Any:
        properties = self._cu.CUmemAllocationProp()
        properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._spaces[location.space]
        properties.location.id = location.id
        bits = sum(int(kind) for one, kind in self._types.items() if one in types)
        properties.requestedHandleTypes = self._handle_types(bits)
        return properties

    def _handle_types(self, bits: int) -> Any:
        """The enum member for a combination of types; the enum has none, and the field takes any number."""
        try:
            return self._cu.CUmemAllocationHandleType(bits)
        except ValueError:
            return _Combination(bits)

    # Registered host memory

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        flags = self._cu.CU_MEMHOSTREGISTER_PORTABLE | self._cu.CU_MEMHOSTREGISTER_DEVICEMAP
        if read_only:
            flags |= self._cu.CU_MEMHOSTREGISTER_READ_ONLY
        self._call("cuMemHostRegister", address, nbytes, flags)

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    def host_device_pointer(self, address: int) -> int:
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    # Streams and copies

    def stream_create(self) -> int:
        return int(self._call("cuStreamCreate", self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def stream_destroy(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def stream_synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def stream_captured(self, stream: int) -> bool:
        code, status = self._is_capturing(stream)
        if code == self._no_context:
            raise self._failed("cuStreamIsCapturing", code)
        return bool(code or status)  # 0 is: no error, not captured

    def stream_wait(self, stream: int, event: int) -> None:
        (code,) = self._wait_event(stream, event, 0)
        if code:
            self._check("cuStreamWaitEvent", code)

    def event_done(self, event: int) -> bool | None:
        # While any thread captures in the mode that is torch's default, this question would end its capture, unless
        # the thread that asks is in the relaxed mode.
        code, mode = self._exchange_mode(self._relaxed)
        if code:
            return None
        (code,) = self._query(event)
        self._exchange_mode(mode)
        if not code:
            return True
        return False if code == self._not_ready else None

    def copy_to_device_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", target, source, nbytes, stream)

    def copy_calls(self) -> CopyCalls:
        try:
            library = ctypes.CDLL("libcuda.so.1")  # the one that the bindings have loaded
            copy, mark = _address(library.cuMemcpyHtoDAsync_v2), _address(library.cuStreamWriteValue32_v2)
            query = _address(library.cuStreamQuery)
        except (OSError, AttributeError) as error:
            raise CudaUnavailable(
                problem=f"the driver's library lacks a call ({error})",
                remedy="let the loader find libcuda.so.1 of a driver for CUDA 12 or newer",
            ) from error
        return CopyCalls(copy, mark, query, self._failed)

    def copy_from_device(self, target: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoH", target, source, nbytes)

    # Kernels

    def library_load(self, code: bytes) -> int:
        return int(self._call("cuLibraryLoadData", code, [], [], 0, [], [], 0))

    def library_kernel(self, library: int, name: str) -> Any:
        return self._call("cuKernelGetFunction", self._call("cuLibraryGetKernel", library, name.encode()))

    def launch(self, kernel: Any, grid: tuple[int, int], threads: int, stream: int, parameters: int) -> None:
        (code,) = self._launch(kernel, grid[0], grid[1], 1, threads, 1, 1, 0, stream, parameters, 0)
        if code:
            self._check("cuLaunchKernel", code)

    def memset_words_async(self, address: int, word: int, count: int, stream: int) -> None:
        self._call("cuMemsetD32Async", address, word, count, stream)
