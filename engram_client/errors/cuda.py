"""Between a rank and CUDA."""

from __future__ import annotations

from engram_client.errors.base import EngramError


class CudaError(EngramError):
    """Base of what goes wrong between a rank and CUDA."""


class CudaUnavailable(CudaError):
    """CUDA is not there at all, or not a version that can be used."""

    template = "CUDA cannot be used here: {problem}; {remedy}"
    problem: str
    remedy: str


class CudaCallFailed(CudaError):
    """A driver call failed; `name` is the driver's own name of the code."""

    template = "{call} failed with {name} ({meaning}); {remedy}"
    call: str
    name: str
    meaning: str
    remedy: str


class KernelCompileFailed(CudaError):
    template = "NVRTC {nvrtc} cannot compile the kernels for {arch}: {log}; {remedy}"
    nvrtc: str
    arch: str
    log: str
    remedy: str


class NoDriver(CudaError):
    """No driver, or one that finds no GPU."""

    template = (
        "there is no usable CUDA driver here: {problem}; install the NVIDIA driver, or run the container with GPUs"
    )
    problem: str


class RegistrationFailed(CudaError):
    """Host memory could not be made readable for the GPU. Nothing of the segment stayed registered."""

    template = (
        "registering bytes {start} to {stop} of segment {segment} for GPU {device} failed with {name}; all of it was "
        "undone: {remedy}"
    )
    segment: str
    device: int
    start: int
    stop: int
    name: str
    remedy: str


class AddressesScattered(CudaError):
    """The driver gave registered ranges addresses that are not contiguous: rows across a border would be wrong."""

    template = (
        "segment {segment} is at {expected:#x} for GPU {device} and its byte {offset} at {found:#x}, out of line; "
        'update the driver, or set host.backing to "cuda_host"'
    )
    segment: str
    device: int
    offset: int
    expected: int
    found: int
