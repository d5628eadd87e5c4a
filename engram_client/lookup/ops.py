"""Lookups as torch custom operators, which torch.compile takes as they are, without looking inside.

A table is named by a number: operators take tensors and plain values. Only compiled code comes through here;
eager code calls the table itself, for an operator costs several times what a launch does.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engram_client.errors import ClientClosed
from engram_client.layout import ROW_SCALES, ROW_VALUES

_numbers = itertools.count()
_tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(table: Any) -> int:
    """A number for `table` (a MappedTable), for as long as it lives."""
    number = next(_numbers)
    _tables[number] = table
    return number


def _table(number: int) -> Any:
    table = _tables.get(number)
    if table is None:
        raise ClientClosed(what="a table in compiled code")
    return table


@torch.library.custom_op("engram::lookup", mutates_args=())
def lookup(ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> Tensor:
    rows: Tensor = _table(table).lookup_now(ids, None, hashed=hashed, tokens=tokens, counts=counts)
    return rows


@lookup.register_fake
def _(ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> Tensor:
    return ids.new_empty((*ids.shape, ROW_VALUES), dtype=torch.bfloat16)


@torch.library.custom_op("engram::lookup_out", mutates_args=("out",))
def lookup_out(ids: Tensor, out: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> None:
    _table(table).lookup_now(ids, out, hashed=hashed, tokens=tokens, counts=counts)


@lookup_out.register_fake
def _(ids: Tensor, out: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> None:
    return None


@torch.library.custom_op("engram::lookup_raw", mutates_args=())
def lookup_raw(
    ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None
) -> tuple[Tensor, Tensor]:
    values, scales = _table(table).lookup_raw_now(ids, None, hashed=hashed, tokens=tokens, counts=counts)
    return values, scales


@lookup_raw.register_fake
def _(ids: Tensor, table: int, hashed: bool, tokens: str, counts: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    values = ids.new_empty((*ids.shape, ROW_VALUES), dtype=torch.uint8)
    return values, ids.new_empty((*ids.shape, ROW_SCALES), dtype=torch.uint8)
