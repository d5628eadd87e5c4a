"""How the work of a load is cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from threading import Event

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.layout import BLOCK_ROWS, ModelGeometry
from engram_client.mapping.hostmem import HostMapping
from engram_client.protocol import Placement
from engram_server.config import Config, EngramConfig
from engram_server.fill import HostTarget, make_items, run_threads
from engram_server.gpus import Gpus
from engram_server.plan import make_plan
from tests.support.machines import machine


@given(
    vocab=st.sampled_from([2, 500, 10923, 40000, 100000]),
    tp=st.sampled_from([1, 2, 3, 5, 7, 24, 32]),
    nodes=st.sampled_from([1, 2]),
)
def test_every_row_of_a_node_is_in_one_item_and_blocks_are_whole_where_all_their_rows_are(
    vocab: int, tp: int, nodes: int
) -> None:
    model = ModelGeometry(engram_layer_ids=(1, 2), engram_max_ngram_size=4, engram_vocab_size=vocab, engram_n_heads=8)
    config = Config(
        model_path="/m",
        engram_config=EngramConfig(placement=Placement.CPU),
        tp_size=tp * nodes,
        nnodes=nodes,
        node_rank=nodes - 1,
    )
    plan = make_plan(config, model, machine(), Gpus.none("a test"))
    mapping = HostMapping.__new__(HostMapping)  # never touched: nothing is stored here
    items = make_items(plan.tables, [HostTarget(info, mapping, -1) for info in reversed(plan.segments)])
    for index, table in enumerate(plan.tables):
        mine = [item for item in items if item.table == index]
        pieces = [piece for item in mine for piece in item.pieces]
        shards = [info.shard for info in plan.segments if info.layer_id == table.layer_id]
        assert pieces[0].row_start == shards[0].row_start
        assert pieces[-1].row_stop == shards[-1].row_stop
        assert all(left.row_stop == right.row_start for left, right in pairwise(pieces))
        for piece in pieces:
            shard = piece.target.info.shard
            assert shard.row_start <= piece.row_start < piece.row_stop <= shard.row_stop
        for item in mine:
            start, stop = item.pieces[0].row_start, item.pieces[-1].row_stop
            assert start // BLOCK_ROWS == (stop - 1) // BLOCK_ROWS == item.block
            full = range(item.block * BLOCK_ROWS, min((item.block + 1) * BLOCK_ROWS, table.rows))
            assert item.whole == (range(start, stop) == full)


def test_the_first_failure_of_a_thread_stops_the_others_and_is_raised() -> None:
    taken: list[int] = []

    def work(items: Iterator[int], stop: Event) -> None:
        for item in items:
            taken.append(item)
            if item == 3:
                raise OSError(5, os.strerror(5))

    with pytest.raises(OSError, match="Input/output"):
        run_threads(work, range(1_000_000), 4)
    assert 3 in taken
    assert len(taken) < 1_000_000


def test_every_item_is_taken_once() -> None:
    taken: list[int] = []

    def work(items: Iterator[int], stop: Event) -> None:
        taken.extend(items)

    run_threads(work, range(1000), 8)
    assert sorted(taken) == list(range(1000))
