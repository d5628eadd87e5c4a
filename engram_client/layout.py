"""Where every byte of a table is: geometry, hash columns, shards and row formats.

A table has `rows` rows of 256 FP8 (E4M3) values and 8 E8M0 scales. Its rows fall into hash columns:
column c owns as many consecutive rows as its prime. Nothing here touches memory; the loader, the
mapping and the lookups all take their offsets from this file.

Source: DeepSeek-V4.1's `config.json` keys and the prime rule of its published model code.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from itertools import accumulate, count, islice, pairwise
from typing import Any

import msgspec

from engram_client.errors import ConfigInvalid, RowCountMismatch
from engram_client.strict import convert

ROW_VALUES = 256
"""FP8 values in a row, one byte each."""
ROW_SCALES = 8
"""E8M0 scale bytes in a row; scale k belongs to values 32*k to 32*k+31."""
VALUES_PER_SCALE = ROW_VALUES // ROW_SCALES
ROW_BYTES = ROW_VALUES + ROW_SCALES
BLOCK_ROWS = 1 << 18
"""Rows of a canonical digest block (66 MiB): the unit of identity and of verification."""


class RowFormat(enum.StrEnum):
    """How a segment stores its rows."""

    PLANAR = "planar"
    """All values, then all scales, as in the checkpoint: best in GPU memory."""
    PACKED = "packed"
    """Each row's 256 values and 8 scales side by side: one page walk a row, best in host memory."""


class TableGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table: the backbone layer that reads it, and the rows of each hash column, in column order."""

    layer_id: int
    columns: tuple[int, ...]

    @property
    def rows(self) -> int:
        return sum(self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole table in either row format."""
        return self.rows * ROW_BYTES

    @property
    def column_starts(self) -> tuple[int, ...]:
        """First row of each column, and the table's row count last: `len(columns) + 1` numbers."""
        return (0, *accumulate(self.columns))


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows `[row_start, row_stop)` that one rank owns; `columns` is the hash columns `[first, last)`
    they make up, or None where the split does not follow columns."""

    row_start: int
    row_stop: int
    columns: tuple[int, int] | None

    @property
    def rows(self) -> int:
        return self.row_stop - self.row_start


def shard(geometry: TableGeometry, rank: int, tp_size: int) -> Shard:
    """The shard of `rank` among `tp_size` ranks.

    SGLang's rule, so that memory and speed compare: whole hash columns where tp_size divides their number,
    else equal row ranges. Every row has one owner; with more ranks than rows some shards are empty.

    Raises ValueError when rank is not in [0, tp_size).
    """
    if not 0 <= rank < tp_size:
        raise ValueError(f"rank {rank} is not in [0, {tp_size})")
    columns = len(geometry.columns)
    if columns % tp_size == 0:
        first, last = columns * rank // tp_size, columns * (rank + 1) // tp_size
        starts = geometry.column_starts
        return Shard(row_start=starts[first], row_stop=starts[last], columns=(first, last))
    rows = geometry.rows
    return Shard(row_start=rows * rank // tp_size, row_stop=rows * (rank + 1) // tp_size, columns=None)


def whole(geometry: TableGeometry) -> Shard:
    """The shard that is the whole table (`replication: per_node`)."""
    return shard(geometry, 0, 1)


class ModelGeometry(msgspec.Struct, frozen=True):
    """The `engram_*` keys of a model's `config.json` that fix the tables' shape."""

    engram_layer_ids: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int = ROW_VALUES
    engram_num_embeddings: tuple[int, ...] | None = None
    engram_pad_token_id: int = 2
    engram_compressed_vocab_size: int = 99092

    @property
    def column_count(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    def tables(self) -> tuple[TableGeometry, ...]:
        """The tables, in the order of `engram_layer_ids`.

        Raises RowCountMismatch when `engram_num_embeddings` disagrees with the prime layout.
        """
        primes = column_primes(
            len(self.engram_layer_ids),
            self.engram_max_ngram_size - 1,
            self.engram_n_heads,
            self.engram_vocab_size,
        )
        tables = tuple(
            TableGeometry(layer_id=layer, columns=columns)
            for layer, columns in zip(self.engram_layer_ids, primes, strict=True)
        )
        for table, stated in zip(tables, self.engram_num_embeddings or (), strict=False):
            if table.rows != stated:
                raise RowCountMismatch(
                    where=f"engram_num_embeddings of layer {table.layer_id}",
                    expected=table.rows,
                    found=stated,
                )
        return tables


def parse_model_geometry(keys: Mapping[str, Any], where: str) -> ModelGeometry:
    """The geometry in a `text_config` (or an older, flat `config.json`, or engram.json's "geometry").

    Keys that do not start with `engram_` are the model's own and are passed over.
    Raises ConfigInvalid, with `where` in front of the key's path, when a value is missing or makes no table.
    """
    ours = {key: value for key, value in keys.items() if key.startswith("engram_")}
    geometry = convert(ours, ModelGeometry, where)
    _check(
        where,
        "engram_layer_ids",
        0 < len(geometry.engram_layer_ids) <= 64,
        f"names {len(geometry.engram_layer_ids)} layers",
        "1 to 64 layer ids",
    )
    _check(
        where,
        "engram_layer_ids",
        len(set(geometry.engram_layer_ids)) == len(geometry.engram_layer_ids),
        "names a layer twice",
        "distinct layer ids",
    )
    _check(
        where,
        "engram_layer_ids",
        all(0 <= layer < 1 << 20 for layer in geometry.engram_layer_ids),
        "names a layer out of range",
        "0 to 1048575",
    )
    _check(
        where,
        "engram_head_dim",
        geometry.engram_head_dim == ROW_VALUES,
        f"is {geometry.engram_head_dim}",
        str(ROW_VALUES),
    )
    for key, value, low, high in (
        ("engram_max_ngram_size", geometry.engram_max_ngram_size, 2, 16),
        ("engram_n_heads", geometry.engram_n_heads, 1, 64),
        ("engram_vocab_size", geometry.engram_vocab_size, 2, 1 << 40),
        ("engram_pad_token_id", geometry.engram_pad_token_id, 0, 1 << 31),
        ("engram_compressed_vocab_size", geometry.engram_compressed_vocab_size, 1, 1 << 31),
    ):
        _check(where, key, low <= value <= high, f"is {value}", f"{low} to {high}")
    stated = geometry.engram_num_embeddings
    _check(
        where,
        "engram_num_embeddings",
        stated is None or len(stated) == len(geometry.engram_layer_ids),
        "has another length than engram_layer_ids",
        "one row count a layer",
    )
    return geometry


def _check(where: str, path: str, holds: bool, problem: str, allowed: str) -> None:
    if not holds:
        raise ConfigInvalid(where=where, path=path, problem=problem, allowed=allowed)


def column_primes(layers: int, ngram_sizes: int, heads: int, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The rows of every hash column: for each layer `ngram_sizes * heads` primes, n-gram size by n-gram size.

    The model's own rule is that each n-gram size starts its search again just above `vocab_size - 1` and passes
    over the primes used before, by any layer. As every search starts there, the primes used are always the
    first ones, so the rule hands out the primes from `vocab_size` on in order. No two columns hash alike.
    """
    primes = (number for number in count(vocab_size) if _is_prime(number))
    per_layer = ngram_sizes * heads
    return tuple(tuple(islice(primes, per_layer)) for _ in range(layers))


_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def _is_prime(number: int) -> bool:
    """Miller-Rabin; these witnesses decide every number below 3.3e24 (Sorenson and Webster, 2015)."""
    if number < 2:
        return False
    for witness in _WITNESSES:
        if number % witness == 0:
            return number == witness
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


class DigestPiece(msgspec.Struct, frozen=True):
    """Rows `[row_start, row_stop)` of a table that lie in one canonical block and in one segment."""

    block: int
    row_start: int
    row_stop: int

    @property
    def is_block_start(self) -> bool:
        return self.row_start % BLOCK_ROWS == 0


def digest_pieces(row_start: int, row_stop: int) -> list[DigestPiece]:
    """Cuts `[row_start, row_stop)` at the borders of the canonical blocks."""
    if row_start >= row_stop:
        return []
    inner = range((row_start // BLOCK_ROWS + 1) * BLOCK_ROWS, row_stop, BLOCK_ROWS)
    return [
        DigestPiece(block=start // BLOCK_ROWS, row_start=start, row_stop=stop)
        for start, stop in pairwise((row_start, *inner, row_stop))
    ]


def owner_of(starts: Sequence[int], row: int) -> int:
    """Index of the range that holds `row`, for `len(starts) - 1` ranges that start at `starts`; the naive
    search that faster ones are tested against. Raises ValueError when no range holds it."""
    for index, (start, stop) in enumerate(pairwise(starts)):
        if start <= row < stop:
            return index
    raise ValueError(f"row {row} is in none of the ranges {list(starts)}")
