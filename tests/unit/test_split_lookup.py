"""Ranks that share out the reads of a table which each has whole: real processes with gloo, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_client.errors import CountsInvalid, GroupInvalid, GroupRankMismatch, IdsShapeInvalid, OutInvalid
from engram_client.layout import RowFormat, whole
from engram_client.lookup.checks import Found
from engram_client.lookup.cpu import SegmentRows
from engram_client.lookup.split import SplitLookup
from tests.support.batches import GEOMETRY, ROWS, batch, odd_shapes, stored_rows
from tests.support.ranks import run_ranks
from tests.support.tables import dequantised, packed_of, random_table


class Watched(SegmentRows):
    """Keeps the ids of every row that is read from the table."""

    def __init__(self) -> None:
        values, scales = random_table(ROWS)
        super().__init__(packed_of(values, scales), GEOMETRY, whole(GEOMETRY), RowFormat.PACKED)
        self.read: list[torch.Tensor] = []

    def _look(self, ids: torch.Tensor, out: Any, make_out: Any, hashed: bool, columns: Any) -> Found:
        self.read.append((ids[..., slice(*columns)] if columns else ids).reshape(-1).clone())
        return super()._look(ids, out, make_out, hashed, columns)


def opened(rank: int, world_size: int) -> tuple[SplitLookup, Watched]:
    local = Watched()
    return SplitLookup(None, rank, world_size, GEOMETRY, local), local


def check(table: SplitLookup, ids: torch.Tensor, hashed: bool, **how: Any) -> None:
    packed, invalid = stored_rows(ids, hashed)
    rows = dequantised(packed)
    out = torch.full((*ids.shape, 256), 5.0, dtype=torch.bfloat16)
    values = torch.full((*ids.shape, 256), 7, dtype=torch.uint8)
    scales = torch.full((*ids.shape, 8), 7, dtype=torch.uint8)
    for found in (
        table.lookup(ids, hashed=hashed, **how),
        table.lookup(ids, out, hashed=hashed, **how),
        table.prefetch(ids, hashed=hashed, **how)(),
    ):
        assert np.array_equal(found.rows.view(torch.int16).numpy().view(np.uint16), rows), (hashed, how)
        assert found.invalid == invalid, (hashed, how)
    assert table.lookup_stored(ids, values, scales, hashed=hashed, **how) == invalid
    assert np.array_equal(torch.cat([values, scales], dim=-1).numpy(), packed), (hashed, how)


def every_way(rank: int, world_size: int) -> None:
    table, _ = opened(rank, world_size)
    for tokens in (1, 2, world_size, 13, 64):
        ids = batch(tokens, seed=tokens)
        for hashed in (True, False):
            check(table, ids, hashed)
            check(table, ids, hashed, counts=[tokens] * world_size)
            check(table, batch(rank, seed=rank), hashed, tokens="own")
    for shaped, hashed in odd_shapes():
        check(table, shaped, hashed)
    check(table, batch(0, seed=1), True)


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_every_rank_gets_the_whole_tables_rows(world_size: int) -> None:
    """By columns where they divide among the ranks and ids are hashed, by tokens where not."""
    run_ranks(world_size, every_way, timeout_s=100)


def share(rank: int, world_size: int, hashed: bool, how: dict[str, Any]) -> list[int]:
    table, local = opened(rank, world_size)
    table.lookup(batch(10, seed=3), hashed=hashed, **how)
    return torch.cat(local.read).tolist()


@pytest.mark.parametrize(("world_size", "hashed"), [(2, True), (3, True), (3, False), (5, True), (5, False)])
def test_each_row_is_read_by_one_rank_and_ranks_read_equal_parts(world_size: int, hashed: bool) -> None:
    parts = run_ranks(world_size, share, hashed, {})
    assert sorted(id for part in parts for id in part) == sorted(batch(10, seed=3).flatten().tolist())
    step = 1 if not hashed or world_size in (2, 3) else 24
    assert max(map(len, parts)) <= -(-240 // step // world_size) * step


def test_ranks_with_tokens_of_their_own_read_all_of_them_and_wait_for_nobody() -> None:
    parts = run_ranks(2, share, True, {"tokens": "own"})
    assert [sorted(part) for part in parts] == [sorted(batch(10, seed=3).flatten().tolist())] * 2


def few(rank: int, world_size: int) -> None:
    table, local = opened(rank, world_size)
    table.from_ids = 25
    check(table, batch(1, seed=1), True)
    assert {len(read) for read in local.read} == {24}
    local.read.clear()
    check(table, batch(2, seed=1), True)
    assert {len(read) for read in local.read} == {24}, "half of 48"
    local.read.clear()
    if rank:  # no collective: a rank may look up alone
        check(table, batch(1, seed=1), True)


def test_batches_too_small_to_gain_are_read_by_each_rank_alone() -> None:
    run_ranks(2, few)


def refusals(rank: int, world_size: int) -> None:
    table, _ = opened(rank, world_size)
    ids = batch(2, seed=1)
    for counts in ([2], [2, 1], [3, 3]):
        with pytest.raises(CountsInvalid):
            table.lookup(ids, hashed=True, counts=counts)
    with pytest.raises(IdsShapeInvalid):
        table.lookup(ids[:, :3], hashed=True)
    with pytest.raises(OutInvalid):
        table.lookup(ids, torch.empty(2, 24, 255, dtype=torch.bfloat16), hashed=True)
    with pytest.raises(GroupInvalid):
        SplitLookup(None, rank, 3, GEOMETRY, Watched())
    with pytest.raises(GroupRankMismatch):
        SplitLookup(None, 1 - rank, world_size, GEOMETRY, Watched())
    check(table, ids, True)  # nobody was left waiting


def test_wrong_arguments_are_refused_and_the_group_goes_on() -> None:
    run_ranks(2, refusals)


@settings(deadline=None)
@given(tokens=st.integers(1, 9), pieces=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), seed=st.integers(0, 99))
def test_pieces_are_put_together_in_the_order_of_the_ids(tokens: int, pieces: int, seed: int) -> None:
    local, ids = Watched(), batch(tokens, seed)
    packed, invalid = stored_rows(ids, True)
    received = np.concatenate(np.split(packed, pieces, axis=1), axis=None)
    out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16)
    assert local.assemble(torch.from_numpy(received), ids, out, pieces=pieces, hashed=True) == invalid
    assert np.array_equal(out.view(torch.int16).numpy().view(np.uint16), dequantised(packed))
