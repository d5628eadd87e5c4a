"""What is planned, and what is refused before anything is read or allocated."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import (
    BackingUnavailable,
    NoGpu,
    NotEnoughHugePages,
    NotEnoughMemory,
    NotEnoughSpace,
)
from engram_client.layout import ModelGeometry, RowFormat
from engram_client.protocol import Backing, Placement, Replication
from engram_server.config import Config, EngramConfig, HostConfig
from engram_server.gpus import Gpus
from engram_server.machine import FileSystem, HugePool, Machine, MemoryLimit, NumaNode
from engram_server.plan import LOADER_BYTES, HugePages, NumaPolicy, Plan, make_plan
from tests.support.machines import GIB, SHM, machine

FLASH = ModelGeometry(
    engram_layer_ids=(1, 14),
    engram_max_ngram_size=4,
    engram_vocab_size=16_000_000,
    engram_n_heads=8,
    engram_num_embeddings=(384006168, 384016682),
)
SMALL = ModelGeometry(engram_layer_ids=(3,), engram_max_ngram_size=4, engram_vocab_size=40, engram_n_heads=8)
MIB2 = 2 << 20
TABLES = 202_758_032_400


def plan(
    found: Machine | None = None,
    model: ModelGeometry = FLASH,
    gpus: int = 4,
    host: dict[str, Any] | None = None,
    replication: str = "per_node",
    placement: str = "cpu",
    **rest: Any,
) -> Plan:
    config = Config(
        model_path="/model",
        engram_config=EngramConfig(placement=Placement(placement), replication=Replication(replication)),
        host=HostConfig(**(host or {})),
        **rest,
    )
    return make_plan(config, model, found or machine(), Gpus(count=gpus, host_problem="not asked for"))


def test_per_node_gives_one_segment_a_table() -> None:
    made = plan()
    assert [segment.id for segment in made.segments] == ["L1", "L14"]
    assert [segment.shard.rows for segment in made.segments] == [384006168, 384016682]
    assert all(segment.rank is None and segment.row_format is RowFormat.PACKED for segment in made.segments)
    assert TABLES <= made.needed_bytes < TABLES + 2 * MIB2
    assert made.backing is Backing.MEMFD
    assert made.backing_reason.startswith("auto")


@given(
    tp=st.sampled_from([1, 2, 3, 5, 24, 32, 64]),
    nodes=st.sampled_from([1, 2, 4]),
    off=st.booleans(),
)
def test_without_replication_every_row_has_one_segment_on_one_node(tp: int, nodes: int, off: bool) -> None:
    if tp % nodes:
        tp *= nodes
    host = {"huge_pages": "off"} if off else {}
    spans = []
    for node in range(nodes):
        made = plan(model=SMALL, replication="none", tp_size=tp, nnodes=nodes, node_rank=node, host=host)
        assert len(made.segments) == tp // nodes
        for segment in made.segments:
            assert segment.id == f"L3.r{segment.rank}of{tp}"
            assert segment.nbytes >= max(1, segment.shard.rows * 264)
            assert segment.nbytes % segment.page_bytes == 0
            spans.append((segment.shard.row_start, segment.shard.row_stop))
        assert made.needed_bytes == sum(segment.nbytes for segment in made.segments)
    assert spans[0][0] == 0
    assert spans[-1][1] == SMALL.tables()[0].rows
    assert all(left[1] == right[0] for left, right in pairwise(spans))


def test_more_ranks_than_rows_gives_empty_shards_a_page_of_their_own() -> None:
    tiny = ModelGeometry(engram_layer_ids=(0,), engram_max_ngram_size=2, engram_vocab_size=2, engram_n_heads=1)
    made = plan(model=tiny, replication="none", tp_size=32)
    assert sum(segment.shard.rows == 0 for segment in made.segments) == 30
    assert all(segment.nbytes == MIB2 for segment in made.segments)


def test_tp_size_null_is_the_gpus_of_all_nodes_and_one_without_any() -> None:
    assert plan(gpus=8).options.tp_size == 8
    assert plan(gpus=0).options.tp_size == 1
    assert plan(gpus=8, nnodes=2, node_rank=1).options.tp_size == 16
    assert plan(gpus=8, tp_size=3).options.tp_size == 3


def test_gpu_placement_without_a_gpu_names_the_way_out() -> None:
    with pytest.raises(NoGpu) as refused:
        plan(gpus=0, placement="gpu")
    assert '{"placement": "cpu"}' in str(refused.value)


def test_memory_of_the_cuda_driver_without_a_driver_is_unavailable() -> None:
    with pytest.raises(BackingUnavailable) as refused:
        plan(host={"backing": "cuda_host"})
    assert refused.value.problem == "not asked for"


def test_a_table_larger_than_the_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(NotEnoughMemory) as refused:
        plan(machine(mem_available=100 * GIB))
    assert refused.value.available == 100 * GIB
    assert TABLES + LOADER_BYTES <= refused.value.needed < TABLES + LOADER_BYTES + 2 * MIB2


def test_a_cgroup_limit_counts_and_is_named() -> None:
    limit = MemoryLimit(path="/sys/fs/cgroup/pod/memory.max", limit=190 * GIB, used=5 * GIB, reclaimable=3 * GIB)
    with pytest.raises(NotEnoughMemory) as refused:
        plan(machine(limits=(limit,)))
    assert (refused.value.available, refused.value.source) == (188 * GIB, f"cgroup limit {limit.path}")


def test_memory_check_warn_goes_on_and_says_so_and_off_is_silent() -> None:
    short = machine(mem_available=GIB)
    warned = plan(short, host={"memory_check": "warn"})
    assert any("memory_check" in remark for remark in warned.remarks)
    assert plan(short, host={"memory_check": "off"}).remarks == ()


def test_tables_that_are_in_memory_already_are_not_checked_against_it_again() -> None:
    config = Config(model_path="/m", engram_config=EngramConfig(placement=Placement.CPU))
    made = make_plan(config, FLASH, machine(mem_available=GIB), Gpus(count=4, host_problem="-"), check_resources=False)
    assert len(made.segments) == 8


def test_a_small_dev_shm_is_refused_before_a_byte_is_written() -> None:
    shm = FileSystem(path="/dev/shm", kind="tmpfs", total=64 << 20, available=60 << 20, page_bytes=4096)
    with pytest.raises(NotEnoughSpace) as refused:
        plan(machine(shm=shm), host={"backing": "posix_shm"})
    assert (refused.value.path, refused.value.available) == ("/dev/shm", 60 << 20)
    assert refused.value.needed > TABLES
    assert plan(machine(shm=shm)).backing is Backing.MEMFD, "auto needs no /dev/shm"


@pytest.mark.parametrize(
    "shm", [None, FileSystem(path="/dev/shm", kind="0xef53", total=GIB, available=GIB, page_bytes=4096)]
)
def test_without_a_dev_shm_in_memory_posix_shm_is_unavailable(shm: FileSystem | None) -> None:
    with pytest.raises(BackingUnavailable):
        plan(machine(shm=shm), host={"backing": "posix_shm"})
    assert plan(machine(shm=shm)).backing is Backing.MEMFD


def test_a_folder_must_be_in_memory_and_large_enough() -> None:
    host = {"backing": "file", "path": "/mnt/x"}
    folder = FileSystem(path="/mnt/x", kind="0xef53", total=999 * GIB, available=999 * GIB, page_bytes=4096)
    for found in (None, folder):
        with pytest.raises(BackingUnavailable):
            plan(machine(folder=found), host=host)
    small = FileSystem(path="/mnt/x", kind="tmpfs", total=999 * GIB, available=GIB, page_bytes=4096)
    with pytest.raises(NotEnoughSpace):
        plan(machine(folder=small), host=host)


def test_a_hugetlbfs_folder_gives_its_page_size_and_needs_no_available_memory() -> None:
    folder = FileSystem(path="/mnt/h", kind="hugetlbfs", total=400 * GIB, available=300 * GIB, page_bytes=GIB)
    host = {"backing": "file", "path": "/mnt/h"}
    made = plan(machine(folder=folder, mem_available=GIB), host=host)
    assert made.huge_pages is HugePages.HUGETLB
    assert {segment.page_bytes for segment in made.segments} == {GIB}
    assert made.needed_bytes == 2 * 95 * GIB
    with pytest.raises(BackingUnavailable):
        plan(machine(folder=folder), host=host | {"huge_pages": "thp"})


def test_hugetlb_pages_are_used_when_the_pool_has_them_all() -> None:
    enough = HugePool(total=100_000, free=100_000, reserved=0)
    assert plan(machine(huge_pool=enough, mem_available=GIB)).huge_pages is HugePages.HUGETLB
    promised = HugePool(total=100_000, free=100_000, reserved=50_000)
    assert plan(machine(huge_pool=promised)).huge_pages is HugePages.THP
    assert plan(machine(huge_pool=enough), host={"huge_pages": "off"}).huge_pages is HugePages.BASE
    with pytest.raises(NotEnoughHugePages) as refused:
        plan(machine(huge_pool=promised), host={"huge_pages": "hugetlb"})
    assert refused.value.available == 50_000 * MIB2
    with pytest.raises(BackingUnavailable):
        plan(machine(huge_pool=enough), host={"huge_pages": "hugetlb", "backing": "posix_shm"})


@pytest.mark.parametrize(
    ("facts", "gets"),
    [
        ({"thp_shmem": "never", "kernel": (6, 1)}, HugePages.THP),
        ({"thp_shmem": "never", "kernel": (5, 15)}, HugePages.BASE),
        ({"thp_shmem": "advise", "kernel": (5, 15)}, HugePages.THP),
        ({"thp_enabled": None, "thp_shmem": None}, HugePages.BASE),
    ],
)
def test_thp_are_planned_where_this_kernel_can_make_them(facts: dict[str, Any], gets: HugePages) -> None:
    made = plan(machine(**facts))
    assert made.huge_pages is gets
    if gets is HugePages.BASE:
        assert any("/sys/kernel/mm/transparent_hugepage/shmem_enabled" in remark for remark in made.remarks)
        with pytest.raises(BackingUnavailable):
            plan(machine(**facts), host={"huge_pages": "thp"})


def test_numa_is_bound_to_nodes_that_exist_or_refused_and_none_is_stated_on_several() -> None:
    two = tuple(NumaNode(id=node, total=300 * GIB, available=250 * GIB) for node in (0, 1))
    assert plan(machine(nodes=two), host={"numa": "interleave"}).numa == NumaPolicy("interleave", (0, 1))
    assert plan(machine(nodes=two), host={"numa": "0-1"}).numa == NumaPolicy("bind", (0, 1))
    assert any("host.numa" in remark for remark in plan(machine(nodes=two)).remarks)
    for unknown in ("2", "0-4", "1-0", "0-99999999999999"):
        with pytest.raises(BackingUnavailable):
            plan(machine(nodes=two), host={"numa": unknown})
    with pytest.raises(BackingUnavailable):
        plan(machine(nodes=()), host={"numa": "interleave"})


def test_memory_bound_to_a_node_must_fit_that_node() -> None:
    two = tuple(NumaNode(id=node, total=300 * GIB, available=100 * GIB) for node in (0, 1))
    with pytest.raises(NotEnoughMemory) as refused:
        plan(machine(nodes=two), host={"numa": "1"})
    assert (refused.value.available, refused.value.source) == (100 * GIB, "NUMA nodes 1")


def test_the_log_line_states_the_resolved_options_and_sizes() -> None:
    line = plan(gpus=4).log_line
    assert line.startswith("DeepSeek-V4.1 Engram tables: placement=cpu replication=per_node ")
    assert "tp_size=4" in line
    assert "384006168 rows 94.42 GiB" in line
    assert plan(machine(shm=SHM), host={"backing": "posix_shm"}).backing_reason == "as configured"
