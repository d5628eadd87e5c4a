"""What this project asks of a torch.distributed group beside lookups: is it ours, and bytes from each to all.

Needs torch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from engram_client.errors import ExchangeFailed, GroupInvalid, GroupRankMismatch

# One function; torch 2.13 renamed it and warns about the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def is_there() -> bool:
    """Whether this process is in any group."""
    return dist.is_available() and dist.is_initialized()


def size(group: dist.ProcessGroup | None) -> int:
    """Ranks of the group; 1 without any, -1 when this process is in no place of it."""
    return dist.get_world_size(group) if is_there() else 1


def check(group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
    """Raises GroupInvalid when the group does not have world_size ranks, GroupRankMismatch when this process has
    another place in it than `rank`."""
    found = size(group)
    if found != world_size:
        raise GroupInvalid(found=found, rank=rank, world_size=world_size)
    group_rank = dist.get_rank(group)
    if group_rank != rank:
        raise GroupRankMismatch(group_rank=group_rank, rank=rank)


def gather_bytes(mine: bytes, group: dist.ProcessGroup | None, ordinal: int | None, limit: int) -> list[bytes]:
    """Everybody's bytes, in the group's order. A collective: it waits for all ranks, as long as the group's timeout.

    ordinal: the GPU whose memory the bytes pass through where the group has no backend for the host's; None for the
    current one. Two ranks on one GPU would end NCCL's exchange.
    Raises ExchangeFailed.
    """
    try:
        device = _device_of(group, ordinal)
        size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
        ranks = dist.get_world_size(group)
        gathered = size.new_empty(ranks)
        all_gather(gathered, size, group=group)
        sizes = [int(each) for each in gathered.tolist()]
        longest = max(sizes)
        if longest > limit or min(sizes) < 0:
            raise ExchangeFailed(problem=f"a rank announces {longest} bytes, and {limit} are allowed")
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        everything = torch.empty(ranks * longest, dtype=torch.uint8, device=device)
        all_gather(everything, padded.to(device), group=group)
        rows = everything.view(ranks, longest).cpu().numpy()
    except (RuntimeError, ValueError) as error:  # what torch.distributed raises, by backend
        raise ExchangeFailed(problem=str(error)[:500] or type(error).__name__) from error
    return [rows[rank, :count].tobytes() for rank, count in enumerate(sizes)]


def _device_of(group: dist.ProcessGroup | None, ordinal: int | None) -> torch.device:
    """A group's name is that of a backend; one with NCCL may have gloo beside it."""
    backends = str(dist.get_backend_config(group))
    if "nccl" not in backends or "gloo" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device() if ordinal is None else ordinal)
