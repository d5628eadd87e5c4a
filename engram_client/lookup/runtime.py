"""What GPU lookups need of torch.cuda, in one place: tests without a GPU put other functions here."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch

from engram_client.errors import CudaUnavailable

_cuda: Any = torch.cuda  # parts of it have types in some versions of torch and none in others


def device(ordinal: int) -> torch.device:
    """The torch device of GPU `ordinal`. Raises CudaUnavailable when this torch cannot use it."""
    if not torch.cuda.is_available():
        raise CudaUnavailable(problem="this torch has no CUDA, or finds no GPU", remedy="install a CUDA build of torch")
    return torch.device("cuda", ordinal)


def current_stream(ordinal: int) -> int:
    """The handle of the GPU's current stream, without an object around it: a fifth of the time."""
    stream: int = torch._C._cuda_getCurrentRawStream(ordinal)
    return stream


def is_current(ordinal: int) -> bool:
    return torch._C._cuda_getDevice() == ordinal


def current(ordinal: int) -> AbstractContextManager[None]:
    """The GPU current for a while."""
    return torch.cuda.device(ordinal)


def capturing() -> bool:
    return torch.cuda.is_current_stream_capturing()


@functools.cache
def make_streams(ordinal: int) -> None:
    """Has torch make its streams of GPU `ordinal`, all of them at the first: 4 ms."""
    SideStream(ordinal)


class SideStream:
    """A stream beside the caller's, for prefetches. Everything can be captured in a CUDA graph."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._stream = _cuda.Stream(ordinal)
        self.handle: int = self._stream.cuda_stream
        self._forked = _cuda.Event()

    def follow_current(self) -> None:
        """What comes on the side waits for what the caller has enqueued."""
        self._forked.record(torch.cuda.current_stream(self._ordinal))
        self._stream.wait_event(self._forked)

    def empty(self, nbytes: int) -> torch.Tensor:
        """uint8 memory that belongs to the side stream."""
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self._ordinal))

    def event(self) -> torch.cuda.Event:
        event: torch.cuda.Event = _cuda.Event()
        return event

    def record(self, event: torch.cuda.Event) -> None:
        event.record(self._stream)
