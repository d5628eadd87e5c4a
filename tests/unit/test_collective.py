"""Lookups over the shards of a group: real processes with gloo, bit for bit what the whole table gives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.distributed as dist

from engram_client.errors import CountsInvalid, GroupInvalid, GroupRankMismatch, IdsDtypeInvalid, IdsShapeInvalid
from engram_client.layout import RowFormat, shard, whole
from engram_client.lookup.checks import Invalid
from engram_client.lookup.collective import ShardedLookup
from engram_client.lookup.cpu import SegmentRows
from tests.support.batches import GEOMETRY, ROWS, batch, odd_shapes, stored_rows
from tests.support.ranks import RankFailed, run_ranks
from tests.support.tables import dequantised, packed_of, planar_of, random_table

PACKED, PLANAR = RowFormat.PACKED, RowFormat.PLANAR


def segment(rank: int, tp_size: int, row_format: RowFormat) -> SegmentRows:
    values, scales = random_table(ROWS)
    part = shard(GEOMETRY, rank, tp_size)
    rows = slice(part.row_start, part.row_stop)
    layout = packed_of if row_format is PACKED else planar_of
    return SegmentRows(layout(values[rows], scales[rows]), GEOMETRY, part, row_format)


def opened(rank: int, world_size: int) -> ShardedLookup:
    return ShardedLookup(None, rank, world_size, GEOMETRY, segment(rank, world_size, (PACKED, PLANAR)[rank % 2]))


def expected(ids: torch.Tensor, hashed: bool) -> tuple[np.ndarray, Invalid]:
    packed, invalid = stored_rows(ids, hashed)
    return dequantised(packed), invalid


def check(table: ShardedLookup, ids: torch.Tensor, hashed: bool, **how: object) -> None:
    rows, invalid = expected(ids, hashed)
    found = table.lookup(ids, hashed=hashed, **how)  # type: ignore[arg-type]
    assert np.array_equal(found.rows.view(torch.int16).numpy().view(np.uint16), rows), (hashed, how)
    assert found.invalid == invalid, (hashed, how)
    out = torch.full((*ids.shape, 256), 5.0, dtype=torch.bfloat16)
    again = table.lookup(ids, out, hashed=hashed, **how)  # type: ignore[arg-type]
    assert again.rows is out
    assert np.array_equal(out.view(torch.int16).numpy().view(np.uint16), rows), (hashed, how)


def counts_of(world_size: int, round_: int) -> list[int]:
    """Unequal counts; some ranks without tokens, the first and the last among them in some rounds."""
    return [(7 * rank + 3 * round_) % 5 if rank % 3 != round_ % 3 else 0 for rank in range(world_size)]


def every_way(rank: int, world_size: int, rounds: int) -> None:
    table = opened(rank, world_size)
    for round_ in range(rounds):
        counts = counts_of(world_size, round_)
        own, same = batch(counts[rank], seed=100 * round_ + rank), batch(3 + round_, seed=round_)
        for hashed in (True, False):
            check(table, same, hashed)
            check(table, own, hashed, tokens="own", counts=counts)
            check(table, own, hashed, tokens="own")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
def test_every_rank_gets_the_whole_tables_rows(world_size: int) -> None:
    """Hashed or not, same tokens or own, counts given or not, ranks without tokens among them."""
    run_ranks(world_size, every_way, 3)


def test_32_ranks_get_the_whole_tables_rows() -> None:
    run_ranks(32, every_way, 1, timeout_s=100)


def odd_batches(rank: int, world_size: int) -> None:
    table = opened(rank, world_size)
    ids = batch(12, seed=5)
    for shaped, hashed in odd_shapes():
        check(table, shaped, hashed)
    check(table, ids.view(6, 2, 24)[:rank], True, tokens="own", counts=range(world_size))
    check(table, ids[: 2 * rank, 0], False, tokens="own")
    check(table, ids[:rank].to(torch.int32 if rank % 2 else torch.int64).clamp(-1), True, tokens="own")


@pytest.mark.parametrize("world_size", [3, 5])
def test_any_shape_dtype_and_stride_works_over_a_group(world_size: int) -> None:
    run_ranks(world_size, odd_batches)


def no_tokens_anywhere(rank: int, world_size: int) -> None:
    table = opened(rank, world_size)
    for hashed in (True, False):
        for how in ({}, {"tokens": "own"}, {"tokens": "own", "counts": [0] * world_size}):
            check(table, batch(0, seed=1), hashed, **how)
    check(table, batch(2, seed=1), True)  # nobody was left waiting


@pytest.mark.parametrize("world_size", [2, 5])
def test_no_tokens_on_any_rank_give_empty_rows(world_size: int) -> None:
    run_ranks(world_size, no_tokens_anywhere)


def shapeless_without_tokens(rank: int, world_size: int) -> None:
    """A rank without tokens may not know how many ids a token has."""
    table = opened(rank, world_size)
    ids = batch(2, seed=1) if rank else torch.empty(0, dtype=torch.int64)
    check(table, ids, False, tokens="own")


def test_a_rank_without_tokens_need_not_know_the_ids_of_a_token() -> None:
    run_ranks(3, shapeless_without_tokens)


def refusals(rank: int, world_size: int) -> None:
    table, ids = opened(rank, world_size), batch(2, seed=1)
    bad_counts: list[Sequence[int]] = [[2], [2, 2, 2], [-1, -1], [3, 3]]
    for counts in bad_counts:
        with pytest.raises(CountsInvalid):
            table.lookup(ids, hashed=True, tokens="own", counts=counts)
    with pytest.raises(CountsInvalid):
        table.lookup(ids, hashed=True, counts=[2, 3])
    with pytest.raises(IdsDtypeInvalid):
        table.lookup(ids.float())
    with pytest.raises(IdsShapeInvalid):
        table.lookup(ids[0, 0], tokens="own")
    with pytest.raises(IdsShapeInvalid):  # on all ranks, none hangs
        table.lookup(ids[:, : 3 + rank], tokens="own")
    check(table, ids, True)


def test_wrong_arguments_are_refused_and_the_group_goes_on() -> None:
    run_ranks(2, refusals)


def groups(rank: int, world_size: int) -> None:
    with pytest.raises(GroupInvalid) as caught:
        ShardedLookup(None, 0, 2, GEOMETRY, segment(0, 2, PACKED))
    assert caught.value.fields == {"found": 3, "rank": 0, "world_size": 2}
    with pytest.raises(GroupRankMismatch):
        ShardedLookup(None, (rank + 1) % 3, 3, GEOMETRY, segment(rank, 3, PACKED))
    pair = dist.new_group([1, 2])
    if rank == 0:
        with pytest.raises(GroupInvalid):
            ShardedLookup(pair, 0, 2, GEOMETRY, segment(0, 2, PACKED))
        return
    table = ShardedLookup(pair, rank - 1, 2, GEOMETRY, segment(rank - 1, 2, PACKED))
    check(table, batch(rank, seed=rank), True, tokens="own")


def test_the_group_must_have_the_clients_ranks_in_their_order() -> None:
    run_ranks(3, groups)


def test_without_a_group_only_one_rank_can_look_up() -> None:
    with pytest.raises(GroupInvalid):
        ShardedLookup(None, 0, 2, GEOMETRY, segment(0, 2, PACKED))
    alone = ShardedLookup(None, 0, 1, GEOMETRY, segment(0, 1, PLANAR))
    assert shard(GEOMETRY, 0, 1) == whole(GEOMETRY)
    check(alone, batch(4, seed=4), True, tokens="own", counts=[4])
    with pytest.raises(CountsInvalid):
        alone.lookup(batch(4, seed=4), tokens="own", counts=[5])


def fail_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("mine")
    dist.barrier()


class TestRunRanks:
    def test_results_come_in_rank_order(self) -> None:
        assert run_ranks(3, tuple_of) == [(0, 3), (1, 3), (2, 3)]

    def test_a_rank_that_raises_ends_all_with_its_traceback(self) -> None:
        with pytest.raises(RankFailed, match="fail_on_one") as caught:
            run_ranks(3, fail_on_one)
        assert caught.value.rank == 1
        assert isinstance(caught.value.error, KeyError)

    def test_ranks_that_wait_for_ever_are_ended_at_the_deadline(self) -> None:
        with pytest.raises(TimeoutError):
            run_ranks(2, wait_for_ever, timeout_s=2)


def tuple_of(rank: int, world_size: int) -> tuple[int, int]:
    return rank, world_size


def wait_for_ever(rank: int, world_size: int) -> None:
    import threading

    threading.Event().wait()
