"""What every lookup demands of its arguments, and what it reports about ids, whatever device it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engram_client.errors import CountsInvalid, IdsDeviceInvalid, IdsDtypeInvalid, IdsShapeInvalid, OutInvalid
from engram_client.layout import ROW_BYTES, ROW_VALUES


@dataclass(frozen=True, slots=True)
class Invalid:
    """Ids that name no row: how many, the first of them, and its position in the flattened ids (-1: none)."""

    count: int = 0
    first: int = 0
    position: int = -1

    def then(self, later: Invalid, offset: int) -> Invalid:
        """Of ids that come in two parts: `self` of the first, `later` of those from flat position `offset` on."""
        if self.count or not later.count:
            return Invalid(self.count + later.count, self.first, self.position)
        return Invalid(later.count, later.first, later.position + offset)


class Found(NamedTuple):
    """The result of a lookup."""

    rows: Tensor
    invalid: Invalid


def check_ids(ids: Tensor, device: torch.device, hashed: bool, columns: int) -> None:
    """Demands int32 or int64 ids on `device`, `[..., columns]` where they are hashed.

    Raises IdsDtypeInvalid, IdsDeviceInvalid or IdsShapeInvalid.
    """
    if not isinstance(ids, Tensor):
        raise IdsDtypeInvalid(found=type(ids).__name__)
    if ids.dtype not in (torch.int32, torch.int64) or ids.layout != torch.strided:
        found = str(ids.dtype) if ids.layout == torch.strided else f"{ids.dtype}, {ids.layout}"
        raise IdsDtypeInvalid(found=found)
    if ids.device != device:
        raise IdsDeviceInvalid(found=str(ids.device), expected=str(device))
    if hashed and (ids.dim() == 0 or ids.shape[-1] != columns):
        raise IdsShapeInvalid(found=str(list(ids.shape)), expected=f"[..., {columns}] (hashed=True)")


def check_counts(ids: Tensor, counts: Sequence[int] | None, rank: int, world_size: int, *, same: bool) -> None:
    """Raises CountsInvalid unless `counts` has a number for each rank, and that of `ids` for this one (for all of
    them with `same`). None is not looked at."""
    if counts is None:
        return
    tokens = ids.shape[0] if ids.dim() else 1
    good = len(counts) == world_size and all(count >= 0 for count in counts)
    if good and (all(count == tokens for count in counts) if same else counts[rank] == tokens):
        return
    where = "everywhere" if same else f"at {rank}"
    raise CountsInvalid(found=str(list(counts)), expected=f"{world_size} counts, {tokens} {where}")


def bf16_out(out: Tensor | None, ids_shape: Sequence[int], device: torch.device) -> Tensor:
    """`out`, or a new tensor: contiguous bfloat16 `[*ids_shape, 256]` on `device`. Raises OutInvalid."""
    return _out(out, (*ids_shape, ROW_VALUES), torch.bfloat16, device)


def raw_out(out: Tensor | None, ids_shape: Sequence[int], device: torch.device) -> Tensor:
    """`out`, or a new tensor: contiguous uint8 `[*ids_shape, 264]` on `device`. Raises OutInvalid."""
    return _out(out, (*ids_shape, ROW_BYTES), torch.uint8, device)


def stored_out(out: Tensor | None, ids_shape: Sequence[int], width: int, device: torch.device) -> Tensor:
    """`out`, or a new tensor: contiguous uint8 `[*ids_shape, width]` on `device`. Raises OutInvalid."""
    return _out(out, (*ids_shape, width), torch.uint8, device)


def unpack(packed: Tensor, values: Tensor, scales: Tensor) -> None:
    """Packed rows, uint8 `[..., 264]`, into what `stored_out` gave for their values and scales."""
    values.copy_(packed[..., :ROW_VALUES])
    scales.copy_(packed[..., ROW_VALUES:])


def _out(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    good = isinstance(out, Tensor) and out.dtype == dtype and out.shape == shape and out.device == device
    if not good or out.layout != torch.strided or not out.is_contiguous():
        raise OutInvalid(found=_described(out), expected=f"contiguous {dtype} {list(shape)} on {device}")
    return out


def _described(out: Tensor) -> str:
    if not isinstance(out, Tensor):
        return type(out).__name__
    strides = "" if out.layout != torch.strided or out.is_contiguous() else f", strides {list(out.stride())}"
    return f"{out.dtype} {list(out.shape)} on {out.device}{strides}"
