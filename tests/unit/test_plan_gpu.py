"""Which GPU holds which rows, which memory a host table gets, and what is refused before anything is allocated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import (
    BackingUnavailable,
    NoGpu,
    NotEnoughGpuMemory,
    NotEnoughMemory,
    PeerAccessMissing,
    TooFewGpus,
)
from engram_client.layout import ModelGeometry, RowFormat, shard
from engram_client.protocol import Backing, Lookup, Placement, Replication
from engram_server.config import Config, EngramConfig, HostConfig
from engram_server.gpus import Gpu, Gpus
from engram_server.machine import Machine, NumaNode
from engram_server.plan import HugePages, NumaPolicy, Plan, make_plan
from engram_server.plan_gpu import LOADER_CONTEXT_BYTES
from tests.support.machines import GIB, machine

FLASH = ModelGeometry(engram_layer_ids=(1, 14), engram_max_ngram_size=4, engram_vocab_size=16_000_000, engram_n_heads=8)
SMALL = ModelGeometry(engram_layer_ids=(3,), engram_max_ngram_size=4, engram_vocab_size=40, engram_n_heads=8)
UNIT = 2 << 20


def gpus(count: int, peers: bool = True, **changes: Any) -> Gpus:
    names = [f"GPU-{index}" for index in range(count)]
    devices = tuple(
        Gpu(
            ordinal=index,
            uuid=name,
            name="H200",
            free=changes.get("free", 139 * GIB),
            total=140 * GIB,
            granularity=UNIT,
            host_node=changes.get("host_node", 0),
            peers=tuple(other for other in names if other != name) if peers else (),
        )
        for index, name in enumerate(names)
    )
    facts = {name: changes[name] for name in ("host_problem", "fabric_problem", "problem") if name in changes}
    return Gpus(count=count, devices=devices, **facts)


def plan(
    found: Gpus,
    placement: str = "gpu",
    replication: str = "none",
    lookup: str | None = None,
    model: ModelGeometry = FLASH,
    on: Machine | None = None,
    host: dict[str, Any] | None = None,
    **rest: Any,
) -> Plan:
    engram = EngramConfig(
        placement=Placement(placement),
        replication=Replication(replication),
        lookup=Lookup(lookup) if lookup else None,
    )
    config = Config(model_path="/model", engram_config=engram, host=HostConfig(**(host or {})), **rest)
    return make_plan(config, model, on or machine(), found)


@given(st.integers(1, 16), st.sampled_from([1, 2, 4]))
def test_ranks_have_their_shards_on_gpus_in_rank_order(ranks: int, nodes: int) -> None:
    size = ranks * nodes
    table = SMALL.tables()[0]
    for node in range(nodes):
        made = plan(gpus(16), model=SMALL, tp_size=size, nnodes=nodes, node_rank=node)
        assert [segment.device for segment in made.segments] == [f"GPU-{index}" for index in range(ranks)]
        for segment in made.segments:
            assert segment.rank is not None
            assert segment.shard == shard(table, segment.rank, size)
            assert segment.nbytes >= max(1, segment.shard.rows * 264)
            assert segment.nbytes % UNIT == 0
            assert (segment.backing, segment.row_format) == (Backing.CUDA_DEVICE, RowFormat.PLANAR)
    assert made.huge_pages is HugePages.DRIVER


@given(st.integers(1, 64))
def test_a_whole_copy_is_spread_in_row_order_without_gap_or_overlap(count: int) -> None:
    made = plan(gpus(count), replication="per_node", model=SMALL)
    rows = SMALL.tables()[0].rows
    assert [segment.device for segment in made.segments] == [f"GPU-{index}" for index in range(count)]
    assert all(segment.rank is None for segment in made.segments)
    spans = [(segment.shard.row_start, segment.shard.row_stop) for segment in made.segments]
    assert spans[0][0] == 0
    assert spans[-1][1] == rows
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    sizes = [stop - start for start, stop in spans]
    assert max(sizes) - min(sizes) <= 1


def test_without_gpus_the_way_out_is_named() -> None:
    with pytest.raises(NoGpu) as refused:
        plan(Gpus.none("no driver"))
    assert refused.value.problem == "no driver"
    assert '{"placement": "cpu"}' in str(refused.value)


def test_more_ranks_than_gpus_are_refused_and_a_whole_copy_serves_any_number() -> None:
    with pytest.raises(TooFewGpus) as refused:
        plan(gpus(4), tp_size=8)
    assert refused.value.fields == {"ranks": 8, "gpus": 4}
    assert len(plan(gpus(4), tp_size=8, nnodes=2).segments) == 8
    assert len(plan(gpus(4), tp_size=8, replication="per_node").segments) == 8


def test_ranks_may_share_a_gpu_and_a_copy_is_spread_over_each_once() -> None:
    one = gpus(1, peers=False)
    shared = msgspec.structs.replace(one, count=4, devices=one.devices * 4)
    made = plan(shared, lookup="peer_read", model=SMALL, tp_size=4)
    assert [(segment.rank, segment.device) for segment in made.segments] == [(rank, "GPU-0") for rank in range(4)]
    (copy,) = plan(shared, replication="per_node", model=SMALL).segments
    assert copy.shard.rows == SMALL.tables()[0].rows
    full = msgspec.structs.replace(one.devices[0], free=GIB)
    with pytest.raises(NotEnoughGpuMemory) as caught:
        plan(msgspec.structs.replace(shared, devices=(full,) * 4), tp_size=4)
    assert caught.value.gpus == ["GPU-0"]


def test_gpus_that_cannot_read_each_other_serve_collectives_only() -> None:
    apart = gpus(2, peers=False)
    assert plan(apart, lookup="collective").backing is Backing.CUDA_DEVICE
    for arguments in ({"lookup": "peer_read"}, {"replication": "per_node"}):
        with pytest.raises(PeerAccessMissing) as refused:
            plan(apart, **arguments)
        assert (refused.value.device, refused.value.peer) == ("GPU-0", "GPU-1")
    plan(gpus(2, peers=False), lookup="peer_read", tp_size=1, model=SMALL)


def test_too_little_gpu_memory_names_needed_and_free_of_each_gpu() -> None:
    with pytest.raises(NotEnoughGpuMemory) as refused:
        plan(gpus(2, free=90 * GIB))
    shard_bytes = sum(segment.nbytes for segment in plan(gpus(2)).segments if segment.rank == 0)
    assert refused.value.gpus == ["GPU-0", "GPU-1"]
    assert refused.value.needed[0] == shard_bytes + LOADER_CONTEXT_BYTES
    assert refused.value.free == [90 * GIB, 90 * GIB]


def test_peer_reads_across_nodes_need_fabric_and_a_node_without_says_so_before_its_ranks_are_refused() -> None:
    without = plan(gpus(2, fabric_problem="no IMEX channel"), lookup="peer_read", nnodes=2, tp_size=4)
    assert not without.fabric
    assert [remark for remark in without.remarks if "no IMEX channel" in remark]
    made = plan(gpus(2), lookup="peer_read", nnodes=2, tp_size=4)
    assert made.fabric
    assert not made.remarks
    alone = plan(gpus(2, fabric_problem="no IMEX channel"), lookup="peer_read")
    assert not alone.fabric
    assert not alone.remarks


# Host memory


def test_auto_is_the_drivers_host_memory_where_it_works_and_says_why() -> None:
    made = plan(gpus(2), "cpu")
    assert made.backing is Backing.CUDA_HOST
    assert made.backing_reason.startswith("auto: ")
    assert made.numa == NumaPolicy("bind", (0,))
    assert {segment.page_bytes for segment in made.segments} == {UNIT}
    assert all(segment.device is None for segment in made.segments)


@pytest.mark.parametrize(
    ("found", "host", "why"),
    [
        ({"host_problem": "too old"}, {}, "too old"),
        ({}, {"numa": "interleave"}, "interleave"),
        ({}, {"numa": "0-1"}, "0-1"),
        ({}, {"huge_pages": "thp"}, "thp"),
        ({"host_node": 1}, {}, "NUMA node 1"),
    ],
)
def test_auto_says_why_it_is_not_the_drivers_host_memory(found: dict[str, Any], host: dict[str, Any], why: str) -> None:
    two = machine(
        nodes=(
            NumaNode(id=0, total=512 * GIB, available=500 * GIB),
            NumaNode(id=1, total=512 * GIB, available=100 * GIB),
        )
    )
    made = plan(gpus(2, **found), "cpu", on=two, host=host)
    assert made.backing is Backing.MEMFD
    assert why in made.backing_reason.partition("not cuda_host: ")[2]
    if not found.get("host_node"):
        with pytest.raises(BackingUnavailable):
            plan(gpus(2, **found), "cpu", on=two, host=host | {"backing": "cuda_host"})


def test_the_drivers_host_memory_lies_beside_the_first_gpu_or_where_it_is_bound() -> None:
    two = machine(nodes=tuple(NumaNode(id=node, total=512 * GIB, available=500 * GIB) for node in (0, 1)))
    assert plan(gpus(2, host_node=1), "cpu", on=two).numa == NumaPolicy("bind", (1,))
    assert plan(gpus(2, host_node=1), "cpu", on=two, host={"numa": "0"}).numa == NumaPolicy("bind", (0,))


def test_the_drivers_host_memory_counts_against_its_node() -> None:
    short = machine(nodes=(NumaNode(id=0, total=512 * GIB, available=100 * GIB),))
    with pytest.raises(NotEnoughMemory) as refused:
        plan(gpus(2), "cpu", on=short, host={"backing": "cuda_host"})
    assert refused.value.available == 100 * GIB
