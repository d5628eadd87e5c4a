"""Lookups as torch custom operators, which torch.compile takes as they are, without looking inside.

A table or client is named by its number (`numbers.py`). Only compiled code comes through here;
eager code calls the table itself, for an operator costs several times what a launch does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engram_client.layout import ROW_SCALES, ROW_VALUES
from engram_client.lookup.numbers import registered


@torch.library.custom_op("engram::lookup", mutates_args=())
def lookup(ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> Tensor:
    rows: Tensor = registered(table).lookup_now(ids, None, hashed=hashed, tokens=tokens, counts=counts)
    return rows


@lookup.register_fake
def _(ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> Tensor:
    return ids.new_empty((*ids.shape, ROW_VALUES), dtype=torch.bfloat16)


@torch.library.custom_op("engram::lookup_out", mutates_args=("out",))
def lookup_out(ids: Tensor, out: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> None:
    registered(table).lookup_now(ids, out, hashed=hashed, tokens=tokens, counts=counts)


@lookup_out.register_fake
def _(ids: Tensor, out: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> None:
    return None


@torch.library.custom_op("engram::lookup_raw", mutates_args=())
def lookup_raw(
    ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    values, scales = registered(table).lookup_raw_now(ids, None, hashed=hashed, tokens=tokens, counts=counts)
    return values, scales


@lookup_raw.register_fake
def _(ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    values = ids.new_empty((*ids.shape, ROW_VALUES), dtype=torch.uint8)
    return values, ids.new_empty((*ids.shape, ROW_SCALES), dtype=torch.uint8)


@torch.library.custom_op("engram::lookup_all", mutates_args=())
def lookup_all(ids: Tensor, client: int, hashed: bool) -> Tensor:
    """bfloat16 `[layers, tokens, columns, 256]`: operators return what is contiguous."""
    rows: Tensor = registered(client).lookup_all_now(ids, hashed)
    return rows


@lookup_all.register_fake
def _(ids: Tensor, client: int, hashed: bool) -> Tensor:
    tokens, layers, columns = ids.shape
    return ids.new_empty((layers, tokens, columns, ROW_VALUES), dtype=torch.bfloat16)
