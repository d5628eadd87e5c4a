"""Geometry, hash columns, shards and digest pieces, each against its rule written down a second time."""

from __future__ import annotations

import contextlib
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client import layout
from engram_client.errors import ConfigInvalid, RowCountMismatch
from engram_client.layout import BLOCK_ROWS, TableGeometry, digest_pieces, owner_of, parse_model_geometry, shard, whole
from tests.support.released import CONFIG as REAL

SMALL = {"engram_layer_ids": [1, 3], "engram_max_ngram_size": 3, "engram_vocab_size": 50, "engram_n_heads": 2}

geometries = st.builds(
    TableGeometry, layer_id=st.just(1), columns=st.lists(st.integers(1, 400), min_size=1, max_size=40).map(tuple)
)


def test_the_real_configuration_gives_the_row_counts_and_bytes_of_the_published_tables() -> None:
    first, second = parse_model_geometry(REAL, "config.json").tables()
    assert (first.layer_id, first.rows) == (1, 384006168)
    assert (second.layer_id, second.rows) == (14, 384016682)
    assert first.nbytes + second.nbytes == 202_758_032_400
    assert len(first.columns) == len(second.columns) == 24


def test_no_two_columns_of_the_real_model_have_the_same_prime() -> None:
    tables = parse_model_geometry(REAL, "config.json").tables()
    primes = [prime for table in tables for prime in table.columns]
    assert len(set(primes)) == 48
    for prime in primes:
        assert all(prime % divisor for divisor in range(2, math.isqrt(prime) + 1))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(2, 3000))
def test_columns_follow_the_models_rule_word_for_word(layers: int, sizes: int, heads: int, vocab: int) -> None:
    """The published rule starts each n-gram size again at vocab_size - 1 and passes over used primes."""
    used: set[int] = set()
    expected = []
    for _ in range(layers):
        columns = []
        for _ in range(sizes):
            candidate = vocab - 1
            for _ in range(heads):
                candidate += 1
                while candidate in used or any(candidate % d == 0 for d in range(2, math.isqrt(candidate) + 1)):
                    candidate += 1
                used.add(candidate)
                columns.append(candidate)
        expected.append(tuple(columns))
    assert layout.column_primes(layers, sizes, heads, vocab) == tuple(expected)


def test_primality_agrees_with_a_sieve() -> None:
    limit = 200_000
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for number in range(2, math.isqrt(limit) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    assert [layout._is_prime(number) for number in range(limit)] == [bool(flag) for flag in sieve]


@pytest.mark.parametrize("composite", [3_215_031_751, 3_474_749_660_383, 341_550_071_728_321, (2**31 - 1) ** 2])
def test_strong_pseudoprimes_of_the_small_bases_are_not_taken_for_primes(composite: int) -> None:
    assert not layout._is_prime(composite)
    assert layout._is_prime(2**61 - 1)


@given(geometries, st.integers(1, 72))
def test_every_row_has_one_owner_and_shards_follow_each_other(geometry: TableGeometry, tp: int) -> None:
    shards = [shard(geometry, rank, tp) for rank in range(tp)]
    assert shards[0].row_start == 0
    assert shards[-1].row_stop == geometry.rows
    assert all(left.row_stop == right.row_start for left, right in itertools.pairwise(shards))
    assert all(one.rows >= 0 for one in shards)
    assert sum(one.rows for one in shards) == geometry.rows


@given(geometries, st.integers(1, 72))
def test_shards_are_whole_columns_exactly_when_the_ranks_divide_the_columns(geometry: TableGeometry, tp: int) -> None:
    """SGLang's formula, so that two systems hold the same rows on the same rank."""
    count, rows = len(geometry.columns), geometry.rows
    bounds = [sum(geometry.columns[:column]) for column in range(count + 1)]
    for rank in range(tp):
        one = shard(geometry, rank, tp)
        if count % tp == 0:
            per_rank = count // tp
            assert one.columns == (rank * per_rank, (rank + 1) * per_rank)
            assert (one.row_start, one.row_stop) == (bounds[rank * per_rank], bounds[(rank + 1) * per_rank])
        else:
            assert one.columns is None
            assert (one.row_start, one.row_stop) == (rows * rank // tp, rows * (rank + 1) // tp)


def test_with_more_ranks_than_rows_some_shards_are_empty_and_the_rows_are_still_all_owned() -> None:
    geometry = TableGeometry(layer_id=1, columns=(2, 3))
    sizes = [shard(geometry, rank, 72).rows for rank in range(72)]
    assert sum(sizes) == 5
    assert max(sizes) == 1
    assert sizes.count(0) == 67


@given(geometries)
def test_the_whole_table_is_one_shard_of_all_columns(geometry: TableGeometry) -> None:
    one = whole(geometry)
    assert (one.row_start, one.row_stop, one.columns) == (0, geometry.rows, (0, len(geometry.columns)))


@pytest.mark.parametrize(("rank", "tp"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_group_has_no_shard(rank: int, tp: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        shard(TableGeometry(layer_id=1, columns=(5,)), rank, tp)


@given(st.integers(0, 5 * BLOCK_ROWS), st.integers(0, 5 * BLOCK_ROWS))
def test_digest_pieces_cover_the_rows_in_order_and_never_cross_a_block(start: int, stop: int) -> None:
    pieces = digest_pieces(start, stop)
    edge = start
    for piece in pieces:
        assert piece.row_start == edge
        assert piece.row_start < piece.row_stop
        assert piece.row_start // BLOCK_ROWS == (piece.row_stop - 1) // BLOCK_ROWS == piece.block
        assert piece.is_block_start == (piece.row_start == piece.block * BLOCK_ROWS)
        edge = piece.row_stop
    assert edge == max(start, stop) if pieces else start >= stop


@given(geometries, st.data())
def test_the_naive_owner_is_the_column_that_holds_the_row(geometry: TableGeometry, data: st.DataObject) -> None:
    row = data.draw(st.integers(0, geometry.rows - 1))
    column = owner_of(geometry.column_starts, row)
    assert sum(geometry.columns[:column]) <= row < sum(geometry.columns[: column + 1])
    with pytest.raises(ValueError, match="none of the ranges"):
        owner_of(geometry.column_starts, geometry.rows)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"engram_layer_ids": [1, 1]}, "engram_layer_ids"),
        ({"engram_layer_ids": []}, "engram_layer_ids"),
        ({"engram_layer_ids": list(range(65))}, "engram_layer_ids"),
        ({"engram_layer_ids": [-1]}, "engram_layer_ids"),
        ({"engram_layer_ids": [1 << 20]}, "engram_layer_ids"),
        ({"engram_layer_ids": [1, "3"]}, "engram_layer_ids[1]"),
        ({"engram_layer_ids": 1}, "engram_layer_ids"),
        ({"engram_head_dim": 128}, "engram_head_dim"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size"),
        ({"engram_n_heads": 0}, "engram_n_heads"),
        ({"engram_n_heads": 8.0}, "engram_n_heads"),
        ({"engram_n_heads": True}, "engram_n_heads"),
        ({"engram_vocab_size": 1 << 41}, "engram_vocab_size"),
        ({"engram_pad_token_id": -1}, "engram_pad_token_id"),
        ({"engram_compressed_vocab_size": 0}, "engram_compressed_vocab_size"),
        ({"engram_num_embeddings": [5]}, "engram_num_embeddings"),
    ],
)
def test_a_bad_geometry_is_refused_with_the_path_of_its_key(change: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse_model_geometry({**SMALL, **change}, "config.json")
    assert (caught.value.where, caught.value.path) == ("config.json", path)
    assert caught.value.problem
    assert caught.value.allowed


@pytest.mark.parametrize("key", sorted(SMALL))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse_model_geometry({name: value for name, value in SMALL.items() if name != key}, "config.json")
    assert (caught.value.path, caught.value.problem) == (key, "is missing")


def test_keys_of_the_model_itself_are_passed_over() -> None:
    assert parse_model_geometry({**SMALL, "hidden_size": "?"}, "x") == parse_model_geometry(SMALL, "x")


def test_row_counts_that_disagree_with_the_primes_are_refused() -> None:
    geometry = parse_model_geometry({**SMALL, "engram_num_embeddings": [53 + 59 + 61 + 67, 1]}, "config.json")
    with pytest.raises(RowCountMismatch) as caught:
        geometry.tables()
    assert (caught.value.expected, caught.value.found) == (71 + 73 + 79 + 83, 1)


@given(st.dictionaries(st.sampled_from(sorted(REAL)), st.none() | st.integers() | st.lists(st.integers()) | st.text()))
def test_any_json_gives_a_geometry_or_a_named_refusal(change: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigInvalid):
        parse_model_geometry({**SMALL, **change}, "config.json")
