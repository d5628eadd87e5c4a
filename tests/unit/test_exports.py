"""Which FABRIC handles the daemon has, and to whom it gives them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engram_client.cuda import access
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.cuda.driver import FABRIC_BYTES
from engram_client.errors import FabricUnavailable, NotAllowedNow
from engram_client.layout import ModelGeometry
from engram_client.protocol import Lookup, Placement
from engram_server.config import Config, EngramConfig
from engram_server.exports import Exports
from engram_server.gpus import ask
from engram_server.leases import Grant
from engram_server.plan import Plan, make_plan
from engram_server.segments import Segment, adopt_segment, create_segments
from tests.support.fake_driver import FakeDriver
from tests.support.machines import machine

SMALL = ModelGeometry(engram_layer_ids=(1, 14), engram_max_ngram_size=4, engram_vocab_size=40, engram_n_heads=8)


def grant(*segments: str, rank: int) -> Grant:
    return Grant(segments=segments, layers=(1, 14), rank=rank, world_size=4, device="cuda:0", name="engine")


class Node:
    """The second of two nodes, with ranks 2 and 3, on the fake machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        monkeypatch.setenv(DRIVER_VARIABLE, "tests.support.fake_driver:FakeDriver")
        monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps({"fabric": "yes", **settings}))
        monkeypatch.setattr(access, "_driver", None)
        driver = access.cuda_driver()
        assert isinstance(driver, FakeDriver)
        self.driver = driver

    def plan(self, **changes: Any) -> Plan:
        engram = EngramConfig(placement=Placement.GPU, lookup=changes.pop("lookup", Lookup.PEER_READ))
        rest = {"tp_size": 4, "nnodes": 2, "node_rank": 1, **changes}
        config = Config(model_path="/model", engram_config=engram, **rest)
        return make_plan(config, SMALL, machine(), ask(self.driver, None))

    def closed(self, segments: list[Segment]) -> None:
        for segment in segments:
            segment.close()
        assert self.driver.leaks() == []


def test_a_rank_is_given_the_handles_of_its_own_shards_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch)
    plan = node.plan()
    segments = create_segments(plan, "tag")
    exports = Exports.of(plan, segments)
    everything = [segment.info.id for segment in segments]
    handles = exports.granted(grant(*everything, rank=3))
    assert [handle.segment for handle in handles] == ["L1.r3of4", "L14.r3of4"]
    assert {len(handle.handle) for handle in handles} == {FABRIC_BYTES}
    assert [handle.segment for handle in exports.granted(grant("L14.r3of4", rank=3))] == ["L14.r3of4"]
    assert exports.granted(grant("L1.r2of4", rank=3)) == ()
    assert "fake-fabric" not in f"{exports!r} {handles!r}"
    node.closed(segments)


@pytest.mark.parametrize(
    "changes", [{"lookup": Lookup.COLLECTIVE}, {"nnodes": 1, "node_rank": 0, "tp_size": 2}], ids=["collective", "alone"]
)
def test_where_nobody_elsewhere_reads_the_memory_it_is_not_exported_and_not_given(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    node = Node(monkeypatch)
    plan = node.plan(**changes)
    segments = create_segments(plan, "tag")
    exports = Exports.of(plan, segments)
    assert exports.problem == ""
    with pytest.raises(NotAllowedNow) as refused:
        exports.granted(grant(*(segment.info.id for segment in segments), rank=0))
    assert refused.value.request == "export"
    node.closed(segments)


@pytest.mark.parametrize("again", [True, False])
def test_memory_taken_over_is_exported_if_the_driver_does_it_and_else_a_reload_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    node = Node(monkeypatch, export_again=again)
    plan = node.plan()
    made = create_segments(plan, "tag")
    taken: list[Segment] = []
    for segment in made:
        segment.seal()
        taken.append(adopt_segment(segment.info, "tag", fd=segment.readable_fd))
        segment._readable = None  # the descriptor is the other's now
    exports = Exports.of(plan, taken, [segment.info.id for segment in taken])
    mine = grant(*(segment.info.id for segment in taken), rank=2)
    if again:
        assert len(exports.granted(mine)) == 2
    else:
        with pytest.raises(FabricUnavailable) as refused:
            exports.granted(mine)
        assert refused.value.node_rank == 1
        assert "CUDA_ERROR_INVALID_VALUE" in refused.value.problem
        assert "--free" in refused.value.remedy
    node.closed(made + taken)


def test_a_node_whose_probe_failed_gives_the_probes_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(monkeypatch, fabric="lies")
    plan = node.plan()
    segments = create_segments(plan, "tag")
    exports = Exports.of(plan, segments)
    with pytest.raises(FabricUnavailable) as refused:
        exports.granted(grant("L1.r2of4", rank=2))
    assert refused.value.problem == "cuMemCreate answers CUDA_ERROR_NOT_PERMITTED"
    assert "collective" in refused.value.remedy
    node.closed(segments)
