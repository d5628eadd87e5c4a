"""Tensors as launches see them: ids cut and flattened without a copy where strides allow it, and places for rows."""

from __future__ import annotations

import torch
from torch import Tensor

from engram_client.errors import OutInvalid
from engram_client.layout import ROW_VALUES
from engram_client.lookup.packing import Ids, Out
from engram_client.lookup.shapes import FEW_THREADS

ALIGNMENT = 16
"""Of the rows that a launch writes, in bytes."""
_WARPS = FEW_THREADS // 32
"""Columns that a block of the kernel for few tokens takes: with fewer in a row, part of it would idle."""


def cut(ids: Tensor, columns: tuple[int, int] | None) -> Tensor:
    """Some columns of the ids, or all of them."""
    return ids if columns is None else ids[..., columns[0] : columns[1]]


def flat(ids: Tensor, hashed: bool) -> Tensor:
    """At most two dimensions, the columns last if hashed; a copy only where one stride cannot walk the others."""
    dimensions = ids.dim()
    if dimensions <= 2 and (hashed or dimensions < 2 or ids.shape[-1] >= _WARPS):
        return ids
    if not hashed and ids.is_contiguous():
        return ids.view(-1)
    if dimensions <= 2:
        return ids
    return ids.reshape(-1, ids.shape[-1]) if ids.numel() else ids.new_empty(0)


def of(ids: Tensor) -> Ids:
    """Where ids of at most three dimensions (tokens, tables, columns) lie."""
    size = 8 if ids.dtype is torch.int64 else 4
    dimensions = ids.dim()
    if dimensions == 2:
        tokens, columns = ids.shape
        token_stride, column_stride = ids.stride()
        return Ids(ids.data_ptr(), size, tokens, columns, token_stride * size, column_stride * size)
    if dimensions == 1:
        return Ids(ids.data_ptr(), size, 1, ids.shape[0], 0, ids.stride(0) * size)
    if dimensions == 3:
        tokens, _, columns = ids.shape
        token_stride, table_stride, column_stride = (stride * size for stride in ids.stride())
        return Ids(ids.data_ptr(), size, tokens, columns, token_stride, column_stride, table_stride)
    return Ids(ids.data_ptr(), size, min(1, ids.numel()), 1, 0, 0)


def address(out: Tensor) -> int:
    """Raises OutInvalid for one that launches cannot write to."""
    address = out.data_ptr()
    if address % ALIGNMENT:
        raise OutInvalid(
            found=f"at an address that is {address % ALIGNMENT} past a multiple", expected="16-byte aligned"
        )
    return address


def packed_out(rows: Tensor) -> Out:
    """Values and scales of each row side by side."""
    return Out(rows.data_ptr(), rows.data_ptr() + ROW_VALUES)
