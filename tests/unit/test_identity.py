"""The root is what its definition says, and notices any change."""

from __future__ import annotations

import itertools
import random
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_client.identity import TableIdentity, block_digest, new_digest, table_root
from engram_client.layout import BLOCK_ROWS, TableGeometry, digest_pieces

GEOMETRY = TableGeometry(layer_id=14, columns=(BLOCK_ROWS - 7, 3, 11))
"""Two blocks: one whole, one of 7 rows."""
DIGESTS = [bytes(range(16)), bytes(range(16, 32))]


def root_by_definition(layer: int, columns: tuple[int, ...], digests: list[bytes]) -> str:
    """Little-endian 64-bit words after the domain: layer, values a row, values a scale, rows a block, columns."""
    data = b"engram-table-1\x00"
    for word in (layer, 256, 32, 262144, len(columns), *columns):
        data += struct.pack("<Q", word)
    return str(xxhash.xxh3_128_hexdigest(data + b"".join(digests)))


@given(st.integers(0, 1 << 20), st.lists(st.integers(1, 3 * BLOCK_ROWS), min_size=1, max_size=5), st.randoms())
def test_the_root_is_the_hash_of_its_written_definition(layer: int, columns: list[int], source: random.Random) -> None:
    blocks = -(-sum(columns) // BLOCK_ROWS)
    digests = [source.randbytes(16) for _ in range(blocks)]
    geometry = TableGeometry(layer_id=layer, columns=tuple(columns))
    assert table_root(geometry, digests) == root_by_definition(layer, tuple(columns), digests)


def test_the_root_is_fixed_for_all_versions_of_this_definition() -> None:
    assert table_root(GEOMETRY, DIGESTS) == "75b709a487483f2a19a246a4a785c981"


@given(st.integers(0, 31), st.integers(1, 255))
def test_any_byte_of_any_block_digest_changes_the_root(position: int, flip: int) -> None:
    changed = [bytearray(digest) for digest in DIGESTS]
    changed[position // 16][position % 16] ^= flip
    assert table_root(GEOMETRY, map(bytes, changed)) != table_root(GEOMETRY, DIGESTS)


def test_layer_columns_and_their_order_change_the_root() -> None:
    shapes = [(1, GEOMETRY.columns), (14, (BLOCK_ROWS - 7, 14)), *((14, c) for c in itertools.permutations((9, 5)))]
    roots = {table_root(GEOMETRY, DIGESTS)}
    for layer, columns in shapes:
        geometry = TableGeometry(layer_id=layer, columns=columns)
        roots.add(table_root(geometry, DIGESTS[: -(-geometry.rows // BLOCK_ROWS)]))
    assert len(roots) == 1 + len(shapes)
    assert table_root(GEOMETRY, DIGESTS[::-1]) not in roots


@pytest.mark.parametrize("digests", [[], DIGESTS[:1], DIGESTS * 2, [DIGESTS[0], b"short"]])
def test_digests_that_do_not_fit_the_geometry_are_refused(digests: list[bytes]) -> None:
    with pytest.raises(ValueError, match="digests of 16 bytes"):
        table_root(GEOMETRY, digests)


@given(st.binary(max_size=4096), st.lists(st.integers(0, 8), max_size=4))
def test_a_block_digest_covers_values_then_scales(values: bytes, scales: list[int]) -> None:
    assert block_digest(values, bytes(scales)) == xxhash.xxh3_128_digest(values + bytes(scales))


@settings(max_examples=20)
@given(st.lists(st.integers(0, BLOCK_ROWS + 10), max_size=6))
def test_the_root_does_not_depend_on_how_the_rows_were_split(cuts: list[int]) -> None:
    """A block that two segments share is digested piece by piece: all its values, then all its scales."""
    rows = BLOCK_ROWS + 10
    source = random.Random(5)
    values, scales = source.randbytes(rows * 2), source.randbytes(rows)  # 2 + 1 bytes a row stand for 256 + 8
    edges = sorted({0, rows, *cuts})
    pieces = [piece for start, stop in itertools.pairwise(edges) for piece in digest_pieces(start, stop)]
    digests = []
    for _, group in itertools.groupby(pieces, key=lambda piece: piece.block):
        block = list(group)
        running = new_digest()
        for piece in block:
            running.update(values[piece.row_start * 2 : piece.row_stop * 2])
        for piece in block:
            running.update(scales[piece.row_start : piece.row_stop])
        digests.append(running.digest())
    starts = range(0, rows, BLOCK_ROWS)
    assert digests == [
        block_digest(values[start * 2 : (start + BLOCK_ROWS) * 2], scales[start : start + BLOCK_ROWS])
        for start in starts
    ]


def test_differences_name_exactly_the_fields_that_differ() -> None:
    one = TableIdentity.of(GEOMETRY, "ab")
    assert one.differences(one) == ()
    assert one.differences(TableIdentity.of(GEOMETRY, None)) == ("root",)
    other = TableIdentity.of(TableGeometry(layer_id=14, columns=(BLOCK_ROWS + 6,)), "ab")
    assert one.differences(other) == other.differences(one) == ("rows", "columns")
    assert one.differences(TableIdentity(layer_id=2, rows=1, columns=(1,), root="x")) == (
        "layer_id",
        "rows",
        "columns",
        "root",
    )
