"""The arithmetic behind a kernel launch, on the CPU."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.layout import ROW_VALUES, RowFormat
from engram_client.lookup import nvrtc, packing
from engram_client.lookup.packing import MAX_ITEMS, Part, division_constants
from engram_client.lookup.shapes import (
    KERNELS,
    MAX_BUCKETS_SHIFT,
    PREFETCH_BLOCKS,
    SORT_FROM_IDS,
    SORT_LEAST_IDS,
    Kind,
    Memory,
    bucket_shift,
    shape_for,
    sorts_from,
)
from tests.support import fake_kernels

MULTIPROCESSORS = 132


def divide(number: int, divisor: int) -> int:
    """As the kernels do it, in 32 bits."""
    multiplier, shift = division_constants(divisor)
    assert multiplier < 2**32
    total = (number * multiplier >> 32) + number
    assert total < 2**32
    return total >> shift


@given(st.integers(0, MAX_ITEMS), st.integers(1, MAX_ITEMS))
def test_the_kernels_division_is_exact(number, divisor):
    assert divide(number, divisor) == number // divisor


@given(st.integers(1, MAX_ITEMS), st.integers(0, MAX_ITEMS))
def test_the_kernels_division_is_exact_around_multiples(divisor, factor):
    multiple = divisor * (factor % (MAX_ITEMS // divisor + 1))
    for number in (multiple - 1, multiple, multiple + 1):
        if 0 <= number <= MAX_ITEMS:
            assert divide(number, divisor) == number // divisor


@given(st.integers(1, 2**42))
def test_buckets_stay_below_what_one_block_scans(rows):
    assert rows >> bucket_shift(rows) < 2**MAX_BUCKETS_SHIFT


@given(
    st.sampled_from(list(Memory)),
    st.sampled_from(list(RowFormat)),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2**20),
    st.one_of(st.integers(1, 100), st.integers(1, 2**20)),
)
def test_a_launch_that_is_held_back_uses_no_more_blocks_and_walks_its_grid(
    memory, row_format, tables, raw, peer, tokens, columns
):
    kind = Kind(memory, row_format, tables, raw=raw, peer=peer)
    for ordered in (False, True):
        shape = shape_for(kind, tokens, columns, MULTIPROCESSORS, ordered=ordered, blocks=PREFETCH_BLOCKS)
        assert 0 < shape.grid[0] * shape.grid[1] <= PREFETCH_BLOCKS
        assert not shape.kernel.startswith("gather_few")


@given(
    st.sampled_from(list(Memory)),
    st.sampled_from(list(RowFormat)),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(1, 2**20),
    st.one_of(st.integers(1, 100), st.integers(1, 2**20)),
)
def test_the_grid_covers_every_row(memory, row_format, tables, raw, peer, tokens, columns):
    kind = Kind(memory, row_format, tables, raw=raw, peer=peer)
    shape = shape_for(kind, tokens, columns, MULTIPROCESSORS, ordered=False)
    assert shape.grid[1] <= 65_535
    if shape.kernel.startswith("gather_few"):
        assert shape.kernel in KERNELS
        assert shape.grid[0] == tokens
        warps = shape.threads // 32
        assert (shape.grid[1] - 1) * warps < columns <= shape.grid[1] * warps
    else:
        match = re.fullmatch(r"gather_(?:peer_)?(?:raw|bf16)_w(\d+)_r(\d)", shape.kernel)
        assert match
        rows = shape.threads // (ROW_VALUES // int(match[1])) * int(match[2])
        assert (shape.grid[0] - 1) * rows < tokens * columns <= shape.grid[0] * rows
        assert shape.grid[1] == tables


def test_only_large_batches_of_host_tables_are_sorted():
    for memory in Memory:
        for peer in (False, True):
            kind = Kind(memory, RowFormat.PACKED, 2, raw=False, peer=peer)
            sorted_there = memory is Memory.HOST and not peer
            assert sorts_from(kind) == (SORT_FROM_IDS // 2 if sorted_there else math.inf)


def test_ids_of_few_columns_are_sorted_where_they_lie_as_close_together():
    def least(density: int) -> float:
        return sorts_from(Kind(Memory.HOST, RowFormat.PACKED, 1, raw=True, peer=False, density=density))

    assert [least(density) for density in (1, 2, 4)] == [SORT_FROM_IDS, SORT_FROM_IDS // 2, SORT_FROM_IDS // 4]
    assert least(24) == SORT_LEAST_IDS


@pytest.mark.parametrize(
    ("row_format", "scales"), [(RowFormat.PLANAR, 10 * ROW_VALUES), (RowFormat.PACKED, ROW_VALUES)]
)
def test_a_part_knows_where_its_scales_are(row_format, scales):
    assert Part(4096, 90, 100).planes(row_format) == (4096, 4096 + scales)


def test_the_structs_have_the_sizes_that_the_source_gives_them():
    """Field by field: the kernel's parameters are packed here and read there."""
    source = nvrtc.read_source()
    sizes = {"u16": 2, "u32": 4, "i64": 8, "u64": 8}

    def size(struct: str) -> int:
        body = re.search(rf"struct {struct} {{(.*?)\n}};", source, re.DOTALL)
        assert body
        total = 0
        for line in body[1].splitlines():
            field = re.match(r"\s+(const )?(\w+)(\*?) (.*?);", line)
            if field is None:
                continue
            kind = 8 if field[3] or field[2] not in sizes else sizes[field[2]]
            for name in field[4].split(","):
                count = re.search(r"\[(\d+)\]", name)
                total += kind * (int(count[1]) if count else 1)
        return total

    assert size("Table") == packing.TABLE.size
    assert size("Output") == packing.OUT.size
    assert size("Shard") == packing.SHARD.size
    head = re.search(r"struct ArgsFor {(.*?)Target target", source, re.DOTALL)
    assert head
    source = f"struct Head {{{head[1]}\n}};"
    assert size("Head") == packing.HEAD.size


def test_the_fake_kernels_read_the_fields_in_the_order_of_the_source():
    """Sizes alone would let two fields change places; these tests' kernels would then read what no GPU reads."""
    source = nvrtc.read_source()

    def fields(pattern: str) -> list[str]:
        body = re.search(pattern, source, re.DOTALL)
        assert body
        lines = re.findall(r"^    (?:const )?(?:u8|u16|u32|u64|i64)\*? ([^;/]+);", body[1], re.MULTILINE)
        names = [name.strip() for line in lines for name in line.split(",")]
        return [n for name in names for n in [name.split("[")[0]] * int([*name.split("["), "1]"][1].rstrip("]"))]

    assert fields(r"struct ArgsFor {(.*?)Target target") == list(fake_kernels.HEAD_FIELDS)
    out, table = fields(r"struct Output {(.*?)\n};"), fields(r"struct Table {(.*?)\n};")
    assert [f"out_{name}" for name in out] + table == list(fake_kernels.Target._fields)
    assert re.search(r"struct Target {\s*Output out;\s*Table table;\s*};", source)
    assert fields(r"struct Shard {(.*?)\n};") == ["values", "scales", "start"]
