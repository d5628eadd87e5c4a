"""What moves between the ranks of a group, tensor by tensor. Needs torch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from engram_client import group as groups


class Wire:
    """Collectives of `group` (None = WORLD) on tensors of `device`: by way of the host's memory where the group's
    backend cannot reach the device's.

    Raises GroupInvalid when the group does not have world_size ranks, and GroupRankMismatch when this process has
    another place in it than `rank`.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, world_size: int, device: torch.device) -> None:
        groups.check(group, rank, world_size)
        self._group = group
        # gloo's collectives take host memory; its name is that of a backend, NCCL's group may have both.
        self.staged = device.type == "cuda" and "nccl" not in str(dist.get_backend_config(group))
        self.direct = device.type == "cuda" and not self.staged
        """Whether GPUs reach each other without the host."""

    def all_gather(self, output: Tensor, mine: Tensor) -> None:
        """`output`: everybody's `mine`, in rank order. Both contiguous, of one dimension."""
        if not self.staged:
            groups.all_gather(output, mine, group=self._group)
            return
        staged = torch.empty(output.shape, dtype=output.dtype)
        groups.all_gather(staged, mine.cpu(), group=self._group)
        output.copy_(staged)

    def all_reduce(self, rows: Tensor) -> None:
        """Adds everybody's `rows`, in place."""
        if not self.staged:
            dist.all_reduce(rows, group=self._group)
            return
        staged = rows.cpu()
        dist.all_reduce(staged, group=self._group)
        rows.copy_(staged)

    def all_to_all(self, output: Tensor, mine: Tensor, output_sizes: list[int], input_sizes: list[int]) -> None:
        """Sends each rank its part of `mine`, and puts what they send into `output`, in rank order."""
        received = torch.empty(output.shape, dtype=output.dtype) if self.staged else output
        sent = mine.cpu() if self.staged else mine
        dist.all_to_all_single(received, sent, output_sizes, input_sizes, group=self._group)
        if self.staged:
            output.copy_(received)
