"""What a node tells beside its memory: judged from facts and from recorded trees."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from engram_server import surroundings
from engram_server.config import Config, HostConfig
from engram_server.findings import Level
from engram_server.gpus import Gpu, Gpus
from engram_server.machine import NumaNode
from engram_server.plan import make_plan
from engram_server.surroundings import Entry
from tests.support.machines import GIB, SHM, machine, record
from tests.support.released import RELEASED

GPU = Gpu(ordinal=0, uuid="GPU-0", name="One", free=GIB, total=GIB, granularity=2 << 20, host_node=0)
MIB = 1 << 20


def gpus(*devices: Gpu) -> Gpus:
    return Gpus(count=len(devices), devices=devices)


def test_a_folder_counts_with_all_that_is_in_it_and_links_count_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"x" * (5 * MIB))
    root = record(tmp_path / "root", {"dev/shm/b/c/one": "x" * MIB, "dev/shm/b/two": "x" * MIB, "dev/shm/a": "x" * MIB})
    (root / "dev/shm/link").symlink_to(outside)
    sparse = root / "dev/shm/sparse"
    sparse.touch()
    os.truncate(sparse, 100 * MIB)
    entries = surroundings.largest_entries(root)
    assert [entry.name for entry in entries[:2]] == ["b", "a"]
    assert sum(entry.nbytes for entry in entries) < 4 * MIB
    assert surroundings.largest_entries(root, 1) == (Entry("b", entries[0].nbytes),)


def test_entries_of_this_machine_are_named_only_where_dev_shm_is_short() -> None:
    assert list(surroundings.shm_findings(machine(), None)) == []
    assert list(surroundings.shm_findings(machine(shm=None), None)) == []


def test_entries_of_a_short_dev_shm_are_no_warning_without_a_plan_that_needs_it(tmp_path: Path) -> None:
    root = record(tmp_path, {"dev/shm/one": "x" * MIB})
    short = machine(shm=msgspec.structs.replace(SHM, available=1))
    (found,) = surroundings.shm_findings(short, None, root)
    assert (found.id, found.level, found.seen) == ("dev_shm_use", Level.OK, "largest in /dev/shm: 'one' 1.0 MiB")


def test_a_channel_that_may_not_be_opened_is_a_warning(tmp_path: Path) -> None:
    """A link to nothing: the one file that root may not open either."""
    root = record(tmp_path, {f"{surroundings.IMEX}/channel1": ""})
    (root / surroundings.IMEX / "channel0").symlink_to(tmp_path / "nothing")
    (found,) = surroundings.imex_findings(None, root)
    assert (found.level, "may not open channel0" in found.seen, bool(found.remedy)) == (Level.WARN, True, True)


def test_a_channel_does_not_hide_that_fabric_handles_fail(tmp_path: Path) -> None:
    root = record(tmp_path, {f"{surroundings.IMEX}/channel0": ""})
    refused = msgspec.structs.replace(gpus(GPU), fabric_problem="NOT_PERMITTED")
    (found,) = surroundings.imex_findings(refused, root)
    assert "NOT_PERMITTED" in found.seen


def test_gpus_of_two_kinds_are_told_apart() -> None:
    walking = msgspec.structs.replace(GPU, ordinal=1, uuid="GPU-1", name="Two", ats=True)
    ats, _ = surroundings.memory_link_findings(gpus(GPU, walking), None)
    assert ats.seen.startswith("on Two only")


@pytest.mark.parametrize(("numa", "level"), [("none", Level.OK), ("0", Level.OK), ("interleave", Level.WARN)])
def test_interleaving_over_a_gpus_own_memory_is_a_warning(numa: str, level: Level) -> None:
    coherent = msgspec.structs.replace(GPU, numa_node=8)
    settings = Config(host=HostConfig(numa=numa))
    _, found = surroundings.memory_link_findings(gpus(coherent), settings)
    assert (found.level, bool(found.remedy)) == (level, level is Level.WARN)


@pytest.mark.parametrize(
    ("numa", "level", "said"),
    [
        ("none", Level.OK, "node 0: GPU 0; node 1: GPU 1"),
        ("interleave", Level.OK, "node 0: GPU 0; node 1: GPU 1"),
        ("1", Level.OK, "the tables will be on node 1, so those of node 0 read across"),
        ("2", Level.WARN, "the tables will be on node 2, beside none of them"),
    ],
)
def test_where_gpus_are_is_told_and_tables_beside_none_of_them_are_a_warning(
    numa: str, level: Level, said: str
) -> None:
    other = msgspec.structs.replace(GPU, ordinal=1, uuid="GPU-1", host_node=1)
    nodes = tuple(NumaNode(id=node, total=GIB, available=GIB) for node in range(3))
    raw = {"engram_config": {"placement": "cpu"}, "host": {"numa": numa, "backing": "memfd"}}
    plan = make_plan(
        msgspec.convert(raw, Config), RELEASED, machine(nodes=nodes), gpus(GPU, other), check_resources=False
    )
    (found,) = surroundings.place_findings(gpus(GPU, other), plan)
    assert (found.level, said in found.seen, bool(found.remedy)) == (level, True, level is Level.WARN)


def test_without_gpus_nothing_is_said_of_their_memory() -> None:
    assert list(surroundings.place_findings(None, None)) == []
    assert list(surroundings.memory_link_findings(None, None)) == []
    assert list(surroundings.memory_link_findings(Gpus.none("none"), None)) == []
