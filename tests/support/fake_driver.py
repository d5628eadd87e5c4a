"""A CUDA driver without a GPU, for tests: stateful, shared between processes, strict about ownership.

"Device" and HOST_NUMA memory are memfds, an export gives a real descriptor, a map is an mmap with exactly the
access asked for: a write through a read-only map is SIGSEGV here as on a CPU, and an error on a GPU. Put in
place of the real driver by ENGRAM_CUDA_DRIVER=tests.support.fake_driver:FakeDriver, in every process.

    ENGRAM_FAKE_CUDA   JSON object of `Settings`
    ENGRAM_FAKE_FAIL   "cuMemHostRegister:3:CUDA_ERROR_OUT_OF_MEMORY,...": the third such call of a process
                       fails; "*" in place of the number fails all
    ENGRAM_FAKE_LOG    a file that gets one JSON line a call, from all processes; at exit one with what leaked
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from engram_client.cuda.driver import CopyCalls, Location
from engram_client.errors import CudaCallFailed
from tests.support.fake_machinery import driver_call, fail, is_mapped
from tests.support.fake_vmm import PAGE, FakeVmm

COPY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
MARK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t)
NOT_READY = 600
FIRST_CODE = 1000
"""Of the errors that C functions answer by number."""


def _copy(target: int, source: int, nbytes: int, bad: bool) -> None:
    ctypes.memmove(target, source, nbytes)
    if bad:
        ctypes.c_ubyte.from_address(target + nbytes // 2).value ^= 4


class FakeDriver(FakeVmm):
    """The whole interface, and what a kernel may do."""

    def __init__(self) -> None:
        super().__init__()
        self._errors: list[BaseException] = []
        self._callbacks = (
            COPY(self._coded(self.copy_to_device_async)),
            MARK(self._coded(self.stream_write_value)),
            QUERY(self._coded(self.stream_query)),
        )

    # Registered host memory

    @driver_call("cuMemHostRegister", context=True)
    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        call = "cuMemHostRegister"
        if nbytes <= 0 or nbytes > self.settings.register_limit:
            raise fail(call, "INVALID_VALUE")
        if any(start < address + nbytes and address < start + size for start, (size, _) in self._registered.items()):
            raise fail(call, "HOST_MEMORY_ALREADY_REGISTERED")
        if not is_mapped(address, nbytes, writable=not read_only):
            raise fail(call, "INVALID_VALUE", "not mapped so")
        with self._alone(call):
            for page in range(address, address + nbytes, PAGE):
                ctypes.string_at(page, 1)  # registering pins, and so touches, every page
        self._registered[address] = (nbytes, read_only)

    @contextlib.contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        if self.settings.exclusive is None:
            yield
            return
        with open(self.settings.exclusive, "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise fail(call, "UNKNOWN", "another process registers") from None
            yield

    @driver_call("cuMemHostUnregister", context=True)
    def host_unregister(self, address: int) -> None:
        if address not in self._registered:
            raise fail("cuMemHostUnregister", "HOST_MEMORY_NOT_REGISTERED")
        del self._registered[address]

    @driver_call("cuMemHostGetDevicePointer", context=True)
    def host_device_pointer(self, address: int) -> int:
        if address not in self._registered:
            raise fail("cuMemHostGetDevicePointer", "INVALID_VALUE")
        return address + self._shift(list(self._registered).index(address))

    def _shift(self, number: int) -> int:
        """How far from the CPU's address a GPU has the registered memory of that number."""
        return (number + 1) << 40 if self.settings.scattered else 0

    # Streams and copies

    @driver_call("cuStreamCreate", context=True)
    def stream_create(self) -> int:
        stream = self._number()
        self._streams.add(stream)
        return stream

    @driver_call("cuStreamDestroy", context=True)
    def stream_destroy(self, stream: int) -> None:
        if stream not in self._streams:
            raise fail("cuStreamDestroy", "INVALID_HANDLE")
        self._streams.remove(stream)

    @driver_call("cuStreamSynchronize", context=True)
    def stream_synchronize(self, stream: int) -> None:
        if stream not in self._streams:
            raise fail("cuStreamSynchronize", "INVALID_HANDLE")
        self._finish(stream)

    waits = 0
    """How often a stream was made to wait."""
    captured: ClassVar[set[int]] = set()
    """Streams from which a graph is being captured: a test's to set."""
    late: ClassVar[set[int]] = set()
    """Events whose work has not ended; -1 for all of them."""

    @driver_call("cuStreamIsCapturing", context=True)
    def stream_captured(self, stream: int) -> bool:
        return stream in self.captured

    @driver_call("cuStreamWaitEvent", context=True)
    def stream_wait(self, stream: int, event: int) -> None:
        self.waits += 1

    @driver_call("cuEventQuery")
    def event_done(self, event: int) -> bool | None:
        if self.captured:
            raise fail("cuEventQuery", "STREAM_CAPTURE_INVALIDATED", "the capture is lost")
        return event not in self.late and -1 not in self.late

    @driver_call("cuMemcpyHtoDAsync", context=True)
    def copy_to_device_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        call = "cuMemcpyHtoDAsync"
        if stream not in self._streams:
            raise fail(call, "INVALID_HANDLE")
        if not any(
            start <= source and source + nbytes <= start + size for start, (size, _) in self._registered.items()
        ):
            raise fail(call, "INVALID_VALUE", "the source is not registered: the copy would not be asynchronous")
        if not self.gpu_may(target, nbytes, self._stack[-1], write=True):
            raise fail(call, "INVALID_VALUE", "the target is not writable")
        # As late as a real one may come: a source that is freed or reused before then is found out.
        bad = self._counts[call] == self.settings.bad_copy
        self._enqueue(stream, functools.partial(_copy, target, source, nbytes, bad))

    def _enqueue(self, stream: int, work: Callable[[], None]) -> None:
        with self._working:
            self._work.setdefault(stream, []).append(work)

    def copy_calls(self) -> CopyCalls:
        """C functions that take the interpreter lock by themselves, and whose codes count what has failed."""
        addresses = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks)
        return CopyCalls(*addresses, self._error_of)

    def _coded(self, method: Callable[..., int | None]) -> Callable[..., int]:
        def call(*args: Any) -> int:
            try:
                return method(*args) or 0
            except BaseException as error:  # ctypes would print it, and answer success
                with self.lock:
                    self._errors.append(error)
                    return FIRST_CODE + len(self._errors) - 1

        return call

    @driver_call("cuStreamWriteValue32", context=True)
    def stream_write_value(self, stream: int, address: int, value: int, flags: int) -> None:
        call = "cuStreamWriteValue32"
        if stream not in self._streams:
            raise fail(call, "INVALID_HANDLE")
        if flags or address % 4:
            raise fail(call, "INVALID_VALUE")
        for number, (start, (size, read_only)) in enumerate(self._registered.items()):
            host = address - self._shift(number)
            if start <= host and host + 4 <= start + size and not read_only:
                word = ctypes.c_uint32.from_address(host)
                self._enqueue(stream, functools.partial(setattr, word, "value", value))
                return
        raise fail(call, "INVALID_VALUE", "not an address of registered memory, as the GPU knows it")

    @driver_call("cuStreamQuery", context=True)
    def stream_query(self, stream: int) -> int:
        """As late as can be: what is still to be done when it is asked for is done then, and was not ready."""
        if stream not in self._streams:
            raise fail("cuStreamQuery", "INVALID_HANDLE")
        if stream not in self._work:
            return 0
        self._finish(stream)
        return NOT_READY

    def _error_of(self, call: str, code: int) -> CudaCallFailed:
        error = self._errors[code - FIRST_CODE]
        if not isinstance(error, CudaCallFailed):
            raise error
        assert error.call == call
        return error

    @driver_call("cuCtxSynchronize", context=True)
    def synchronize(self) -> None:
        for stream in list(self._work):
            self._finish(stream)

    def _finish(self, stream: int) -> None:
        with self._working:  # until it is done for every thread that waits for it
            for work in self._work.pop(stream, []):
                work()

    @driver_call("cuMemcpyDtoH", context=True)
    def copy_from_device(self, target: int, source: int, nbytes: int) -> None:
        if not self.gpu_may(source, nbytes, self._stack[-1]):
            raise fail("cuMemcpyDtoH", "INVALID_VALUE", "the source is not readable")
        ctypes.memmove(target, source, nbytes)

    # Kernels

    @driver_call("cuLibraryLoadData", context=True)
    def library_load(self, code: bytes) -> int:
        if code[:4] != b"\x7fELF":
            raise fail("cuLibraryLoadData", "INVALID_IMAGE")
        return self._number()

    @driver_call("cuLibraryGetKernel", context=True)
    def library_kernel(self, library: int, name: str) -> tuple[str, int]:
        return name, self._stack[-1]

    @driver_call("cuLaunchKernel")
    def launch(
        self, kernel: tuple[str, int], grid: tuple[int, int], threads: int, stream: int, parameters: int
    ) -> None:
        """Done when it returns: nothing here is asynchronous."""
        from tests.support import fake_kernels  # brings numpy, which the daemon does without

        name, ordinal = kernel
        if min(grid) < 1 or grid[1] > 65_535 or not 0 < threads <= 1024:
            raise fail("cuLaunchKernel", "INVALID_VALUE")
        if name == "digest_pieces":
            if threads != 32 or grid[1] != 1:
                raise fail("cuLaunchKernel", "INVALID_VALUE", "a warp a piece")
            fake_kernels.digest(
                parameters, grid[0], lambda address, nbytes, write: self.gpu_may(address, nbytes, ordinal, write)
            )
            return
        fake_kernels.run(name, parameters, lambda address, nbytes: self.gpu_may(address, nbytes, ordinal))

    @driver_call("cuMemsetD32Async")
    def memset_words_async(self, address: int, word: int, count: int, stream: int) -> None:
        ctypes.memmove(address, word.to_bytes(4, "little") * count, 4 * count)

    # What a kernel does

    def gpu_may(self, address: int, nbytes: int, ordinal: int, write: bool = False) -> bool:
        """Whether a kernel on the GPU may read (or write) the range: all of it mapped for it, or registered."""
        spans = [
            (start, start + nbytes)
            for start, (nbytes, _) in self._mapped.items()
            if (rights := self._access[start].get(Location.device(ordinal))) is not None and (rights or not write)
        ]
        spans += [(start, start + nbytes) for start, (nbytes, ro) in self._registered.items() if not (write and ro)]
        at = address
        for start, stop in sorted(spans):
            if start <= at < stop:
                at = stop
        return (self.settings.ats and not write) or at >= address + nbytes

    def gpu_read(self, address: int, nbytes: int, ordinal: int) -> bytes:
        """The bytes as a kernel on the GPU reads them. Raises CudaCallFailed where it would fault."""
        if not self.gpu_may(address, nbytes, ordinal):
            raise fail("cuLaunchKernel", "ILLEGAL_ADDRESS")
        return ctypes.string_at(address, nbytes)
