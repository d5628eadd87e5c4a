"""A segment: one contiguous piece of memory that the daemon owns, from its creation to its last reader.

    created ──(loader fills it through writable_fd, exits)──> sealed ──> closed, or discarded

The daemon itself never maps a segment.
"""

from __future__ import annotations

import os
from typing import Any

from engram_client.errors import AllocationFailed
from engram_client.protocol import SegmentInfo


class Segment:
    """The common part; one subclass a backing. Close it, or discard it when its content is worth nothing."""

    def __init__(self, info: SegmentInfo, writable_fd: int | None, readable_fd: int | None = None) -> None:
        self.info = info
        self._writable = writable_fd
        self._readable = readable_fd

    @property
    def sealed(self) -> bool:
        return self._readable is not None

    @property
    def writable_fd(self) -> int:
        """For the loader, until `seal()`. Raises ValueError afterwards."""
        if self._writable is None:
            raise ValueError(f"{self!r} has no writable descriptor")
        return self._writable

    @property
    def readable_fd(self) -> int:
        """O_RDONLY, to hand out, after `seal()`. Stays the segment's. Raises ValueError before."""
        if self._readable is None:
            raise ValueError(f"{self!r} has no readable descriptor")
        return self._readable

    def seal(self) -> None:
        """Ends writing: call it when the loader has exited. Sealing twice is harmless.

        Raises AllocationFailed when the memory was truncated meanwhile.
        """
        if self.sealed:
            return
        size = os.fstat(self.writable_fd).st_size
        if size < self.info.nbytes:
            raise AllocationFailed(
                backing=self.info.backing,
                needed=self.info.nbytes,
                problem=f"segment {self.info.id} was truncated to {size} bytes during the load",
            )
        self._readable = self._seal(self.writable_fd)
        os.close(self.writable_fd)
        self._writable = None

    def close(self) -> None:
        """Gives up the descriptors. Memory with a name, or with readers, lives on. Harmless twice."""
        for fd in (self._writable, self._readable):
            if fd is not None:
                os.close(fd)
        self._writable = self._readable = None

    def discard(self) -> None:
        """Removes the name, where there is one, and gives up the descriptors. Readers keep what they mapped."""
        self.close()

    def _seal(self, fd: int) -> int:
        """Protects the memory behind `fd` and returns an O_RDONLY descriptor of it."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        return {}

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "writable" if self._writable is not None else "closed"
        facts = "".join(f", {name}={value}" for name, value in self._facts().items())
        return f"{type(self).__name__}({self.info.id}, {self.info.nbytes} bytes, {state}{facts})"
