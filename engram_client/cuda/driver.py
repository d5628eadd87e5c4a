"""Every CUDA driver call of this project as one interface on plain numbers.

Handles, addresses and streams are ints (only a kernel is an object of the bindings: making it from an int costs
more than the rest of a launch), so that nothing here needs the bindings and a test's driver can be written
without them. Methods are named after the call they make; each raises CudaCallFailed with that call,
the driver's own name of the code, and a remedy.

What needs a context is said with each method. The owner of the tables never makes one: a primary context
costs about 0.5 GiB of every GPU.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

from engram_client.errors import CudaCallFailed

FABRIC_BYTES: Final = 64
"""Size of a FABRIC handle, which is plain data and may travel as such."""


class Space(enum.Enum):
    """Whose memory an allocation is, or who may access it."""

    DEVICE = "device"
    HOST_NUMA = "host_numa"


class Location(NamedTuple):
    """A GPU by its ordinal in this process, or a NUMA node of the host."""

    space: Space
    id: int

    @classmethod
    def device(cls, ordinal: int) -> Location:
        return cls(Space.DEVICE, ordinal)

    @classmethod
    def host(cls, node: int) -> Location:
        return cls(Space.HOST_NUMA, node)


class HandleTypes(enum.Flag):
    """How an allocation can be handed to another process. NONE: not at all."""

    NONE = 0
    POSIX_FD = enum.auto()
    FABRIC = enum.auto()


class CopyCalls(NamedTuple):
    """Calls as C functions, for loops in C; each returns the driver's code, 0 for success."""

    copy: int
    """Address of cuMemcpyHtoDAsync_v2: (CUdeviceptr target, const void *source, size_t nbytes, CUstream)."""
    mark: int
    """Address of cuStreamWriteValue32_v2: (CUstream, CUdeviceptr, uint32_t value, unsigned flags). The GPU writes the
    value when what came before on the stream is done."""
    query: int
    """Address of cuStreamQuery: (CUstream); 600 while work is left."""
    failed: Callable[[str, int], CudaCallFailed]
    """The error for a call, by its name without "_v2", and its code."""


class Driver(Protocol):
    """The driver of this process, initialised. Devices are ordinals as this process sees them."""

    def version(self) -> int:
        """As the driver counts: 13000 is CUDA 13.0. No context."""
        ...

    # Devices; no context

    def device_count(self) -> int: ...

    def device_uuid(self, ordinal: int) -> str:
        """As nvidia-smi prints it: "GPU-" and the UUID. The only name that all processes agree on."""
        ...

    def device_name(self, ordinal: int) -> str: ...

    def device_pci_bus_id(self, ordinal: int) -> str: ...

    def attribute(self, ordinal: int, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_<name>; 0 when the bindings or the driver are too old to know it."""
        ...

    def memory_info(self, ordinal: int) -> tuple[int, int]:
        """(free, total) bytes of the device's memory, asked without a context."""
        ...

    def can_access_peer(self, ordinal: int, peer: int) -> bool: ...

    # Contexts

    def context(self, ordinal: int) -> AbstractContextManager[None]:
        """Makes the device's primary context (the one torch uses) current inside the `with`, and gives this
        process's share of it back at the end."""
        ...

    def retain_context(self, ordinal: int) -> None:
        """Keeps the primary context alive until `release_context`: mappings and registrations live in it."""
        ...

    def release_context(self, ordinal: int) -> None: ...

    def synchronize(self) -> None:
        """Waits for the current context's work, and reports what failed in it."""
        ...

    # Virtual memory management; no context

    def granularity(self, location: Location, types: HandleTypes) -> int:
        """Sizes must be a multiple of this many bytes."""
        ...

    def mem_create(self, nbytes: int, location: Location, types: HandleTypes) -> int:
        """A handle of `nbytes` of zeroed memory; it and every mapping keep the memory alive."""
        ...

    def mem_release(self, handle: int) -> None: ...

    def mem_location(self, handle: int) -> Location:
        """Where the memory of a handle, also of an imported one, is."""
        ...

    def export_fd(self, handle: int) -> int:
        """A new descriptor, the caller's; it keeps the memory alive, in any process."""
        ...

    def export_fabric(self, handle: int) -> bytes: ...

    def import_fd(self, fd: int) -> int:
        """A handle; `fd` stays the caller's. A descriptor re-opened through /proc is refused."""
        ...

    def import_fabric(self, blob: bytes) -> int: ...

    def address_reserve(self, nbytes: int, alignment: int) -> int: ...

    def address_free(self, address: int, nbytes: int) -> None: ...

    def mem_map(self, address: int, nbytes: int, handle: int) -> None:
        """Nobody may access the range until `set_access`."""
        ...

    def mem_unmap(self, address: int, nbytes: int) -> None: ...

    def set_access(self, address: int, nbytes: int, locations: tuple[Location, ...], writable: bool) -> None: ...

    # Registered host memory; in the current context, visible to all (PORTABLE)

    def host_register(self, address: int, nbytes: int, read_only: bool) -> None:
        """read_only is needed where the mapping is: without it the driver answers INVALID_VALUE."""
        ...

    def host_unregister(self, address: int) -> None: ...

    def host_device_pointer(self, address: int) -> int:
        """The address that the current context's GPU uses for a registered one."""
        ...

    # Streams and copies; in the current context

    def stream_create(self) -> int: ...

    def stream_destroy(self, stream: int) -> None: ...

    def stream_synchronize(self, stream: int) -> None: ...

    def stream_captured(self, stream: int) -> bool:
        """Whether a graph is being captured from it; True, too, where the driver does not tell. A thread without a
        context gets CUDA_ERROR_INVALID_CONTEXT."""
        ...

    def stream_wait(self, stream: int, event: int) -> None:
        """What comes on the stream waits for the work before the event; this call does not."""
        ...

    def event_done(self, event: int) -> bool | None:
        """Whether the work before the event has ended; None where the driver does not tell. Never of an event recorded
        in a capture that goes on: asking would end the capture. Those of other streams and threads are left alone."""
        ...

    def copy_to_device_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """From registered host memory; `source` may be reused when the stream has come so far."""
        ...

    def copy_calls(self) -> CopyCalls:
        """What C needs to copy to the device and to know when it is done; good as long as this driver is."""
        ...

    def copy_from_device(self, target: int, source: int, nbytes: int) -> None:
        """To host memory; done when it returns."""
        ...

    # Kernels; in the current context

    def library_load(self, code: bytes) -> int:
        """The kernels of a cubin; they stay loaded for the life of the process."""
        ...

    def library_kernel(self, library: int, name: str) -> Any:
        """Kernel `name`, loaded for the current context's GPU, as `launch` takes it."""
        ...

    def launch(self, kernel: Any, grid: tuple[int, int], threads: int, stream: int, parameters: int) -> None:
        """`parameters`: address of the array of pointers to the kernel's parameters, read before it returns.
        The way of every lookup: implementations do nothing but the call."""
        ...

    def memset_words_async(self, address: int, word: int, count: int, stream: int) -> None:
        """`count` 32-bit words from `address` on."""
        ...


# What failures mean

_RESTART = "restart this process: a kernel of it failed earlier and its context is lost"
REMEDIES: Final = {
    "CUDA_ERROR_NO_DEVICE": "make a GPU visible to this process (CUDA_VISIBLE_DEVICES, the container's GPUs)",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA does not survive a fork: start the process with spawn or exec",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the container's CUDA libraries and the driver differ: update the older",
    "CUDA_ERROR_INVALID_DEVICE": "name a GPU that this process sees (CUDA_VISIBLE_DEVICES)",
    "CUDA_ERROR_OUT_OF_MEMORY": "free memory on the GPU or the host, or serve smaller shards",
    "CUDA_ERROR_NOT_PERMITTED": "the driver or the container forbids it; for FABRIC an IMEX channel is needed",
    "CUDA_ERROR_NOT_SUPPORTED": "this driver or GPU cannot do it: update the driver, or choose another backing",
    "CUDA_ERROR_INVALID_HANDLE": "use a stream of the GPU that the table is mapped on",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "remove the kernel cache, and update nvidia-cuda-nvrtc to a version for this GPU",
    "CUDA_ERROR_INVALID_CONTEXT": "make the GPU's context current (torch.cuda.set_device) before the call",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "something else of this process registered the same memory: undo it",
    "CUDA_ERROR_ILLEGAL_ADDRESS": _RESTART,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _RESTART,
    "CUDA_ERROR_LAUNCH_FAILED": _RESTART,
    "CUDA_ERROR_ASSERT": _RESTART,
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is faulty: see nvidia-smi -q -d ECC",
}
NO_REMEDY: Final = "see the driver's log (dmesg, Xid) and report it with this message"


def call_failed(call: str, name: str, meaning: str) -> CudaCallFailed:
    """The error for `call` having answered `name`, e.g. "CUDA_ERROR_OUT_OF_MEMORY"."""
    return CudaCallFailed(call=call, name=name, meaning=meaning, remedy=REMEDIES.get(name, NO_REMEDY))
