"""The parameters of the lookup kernels: the structs of gather.cu as Python packs them, and what goes into them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from engram_client.layout import ROW_VALUES, RowFormat

MAX_TABLES = 4
MAX_SHARDS = 64
SPREAD_BUCKETS = 2 * 64
MAX_ITEMS = 2**31 - 1
MAX_PART_ROWS = 2**32 - 1
BF16_ROW_BYTES = 2 * ROW_VALUES
OWNER_SHIFT = 31
MAX_OWNED_COLUMNS = 2**15

# The mirrors of struct ArgsFor up to its targets, of Output, Table and Shard.
HEAD = struct.Struct("<Qq8IQ10I")
OUT = struct.Struct("<QQ")
TABLE = struct.Struct("<QQqqqQQHHI")
SHARD = struct.Struct("<QQq")
ADDRESS = struct.Struct("<Q")
IDS_WORD = struct.calcsize("<Qq8I") // 8
OUT_WORD = HEAD.size // 8
UNUSED = (0, 0, 0)
TARGET_BYTES = OUT.size + TABLE.size
ARGS_BYTES = HEAD.size + MAX_TABLES * TARGET_BYTES


class Part(NamedTuple):
    """Rows `[start, stop)` of a table, at `address` as the GPU sees it, 16-byte aligned."""

    address: int
    start: int
    stop: int

    def planes(self, row_format: RowFormat) -> tuple[int, int]:
        """Addresses of the first row's values and scales."""
        values = (self.stop - self.start) * ROW_VALUES if row_format is RowFormat.PLANAR else ROW_VALUES
        return self.address, self.address + values


class Source(NamedTuple):
    """One table as a launch reads it.

    parts: what can be read, in row order; one part, or all shards for a peer read.
    rows: rows of the whole table.
    column_starts: device address of int64 `[columns + 1]`, the first row of each column of the ids and the
    end of the last; 0 where ids are not hashed.
    invalid: device address of three zeroed 64-bit words: count, one invalid id, its position.
    columns_a_part: hash columns of each part as `columns_a_part` counts them, where the columns of the ids are the
    table's; 0 lets the kernel search.
    """

    parts: tuple[Part, ...]
    rows: int
    invalid: int
    column_starts: int = 0
    columns_a_part: int = 0

    @property
    def owner_multiplier(self) -> int:
        """`column * owner_multiplier >> OWNER_SHIFT` is the part of a column's rows. 0 to search: where parts do not
        follow columns, or ids are not hashed, so that they may lie outside their column."""
        if not self.columns_a_part or not self.column_starts:
            return 0
        return -(-(1 << OWNER_SHIFT) // self.columns_a_part)


class Ids(NamedTuple):
    """Row ids in device memory: `[tables, tokens, columns]` with any strides, in bytes (below 2^32 for tokens
    and columns)."""

    address: int
    id_bytes: int
    tokens: int
    columns: int
    token_stride: int
    column_stride: int
    table_stride: int = 0


class Out(NamedTuple):
    """Where one table's rows go: `[tokens * columns]` rows, 16-byte aligned. `scales` for raw rows only."""

    values: int
    scales: int = 0


def columns_a_part(parts: Sequence[Part], column_starts: Sequence[int]) -> int:
    """How many hash columns each part is, where all are equally many whole ones and together the table; else 0.

    column_starts: the first row of each column, and the table's rows last. Tables of more columns than
    MAX_OWNED_COLUMNS, for which the kernels' multiplication need not be exact, give 0.
    """
    columns = len(column_starts) - 1
    if not parts or columns > MAX_OWNED_COLUMNS or columns % len(parts):
        return 0
    each = columns // len(parts)
    follow = all(part[1:] == borders for part, borders in zip(parts, pairwise(column_starts[::each]), strict=True))
    return each if follow else 0


def division_constants(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with which the kernels divide numbers below 2^31 by `divisor`."""
    shift = (divisor - 1).bit_length()
    return (((1 << shift) - divisor) << 32) // divisor + 1, shift


class Parameters:
    """Args (and Shards) in memory of their own, with the array of pointers that a launch takes."""

    def __init__(self, shards: bytes | None) -> None:
        self.args = ctypes.create_string_buffer(ARGS_BYTES)
        self._shards = ctypes.create_string_buffer(shards, len(shards)) if shards else None
        self._set_pointers()

    def copy(self) -> Parameters:
        """Args of its own; the shards, which never change, are shared."""
        twin = Parameters.__new__(Parameters)
        twin.args = ctypes.create_string_buffer(self.args.raw, ARGS_BYTES)
        twin._shards = self._shards
        twin._set_pointers()
        return twin

    def _set_pointers(self) -> None:
        blocks = [self.args] if self._shards is None else [self.args, self._shards]
        self._pointers = (ctypes.c_void_p * len(blocks))(*(ctypes.addressof(block) for block in blocks))
        self.address = ctypes.addressof(self._pointers)
