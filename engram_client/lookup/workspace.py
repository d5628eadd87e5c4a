"""Device memory that large lookups sort their ids in, and that prefetches leave their rows in."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_client.lookup import runtime
from engram_client.lookup.kernels import Gather


class Workspaces:
    """What the lookups of one table need beside its rows. Grows outside of capture only, and outside of capture
    has one workspace a stream: two streams would overwrite each other's counts.

    A captured lookup gets one that stays where it is; graphs of one table that are replayed at the same time
    must not share it, as they must not share torch's memory pools.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._eager: dict[int, Tensor] = {}
        self._captured: dict[bool, Tensor] = {}
        self._in_graphs: list[Tensor] = []

    def address(self, gather: Gather, items: int, stream: int, side: runtime.SideStream | None) -> int:
        """A workspace for `items` ids a table on `stream`; 0 where none is needed, or none can be had in a capture."""
        if items < gather.sorts_from:
            return 0
        needed = gather.workspace_bytes(items)
        beside = side is not None
        if runtime.capturing():
            found = self._captured.get(beside)
            if found is None or found.numel() < needed:
                return 0
            if not any(found is kept for kept in self._in_graphs):
                self._in_graphs.append(found)
            return found.data_ptr()
        for kind in (False, True):
            if kind not in self._captured or self._captured[kind].numel() < needed:
                self._captured[kind] = torch.empty(needed, dtype=torch.uint8, device=self._device)
        found = self._eager.get(stream)
        if found is None or found.numel() < needed:
            empty = torch.empty(needed, dtype=torch.uint8, device=self._device) if side is None else side.empty(needed)
            found = self._eager[stream] = empty
        return found.data_ptr()


class PrefetchBuffer:
    """One table's prefetched rows. Its address changes only when it must grow; what it has been stays allocated,
    for graphs and kernels under way may still use it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: Tensor | None = None
        self._kept: list[Tensor] = []

    def take(self, nbytes: int) -> Tensor:
        """uint8 `[nbytes]`, the same memory as before if it is large enough."""
        if self._buffer is None or self._buffer.numel() < nbytes:
            size = nbytes if self._buffer is None else max(nbytes, 2 * self._buffer.numel())
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._kept.append(self._buffer)
        return self._buffer[:nbytes]
