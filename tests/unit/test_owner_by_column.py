"""A peer read takes a row's owner from its column where shards are whole columns, and searches everywhere else."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.layout import RowFormat, TableGeometry, owner_of, shard
from engram_client.lookup import nvrtc
from engram_client.lookup.kernels import Gather, Kernels
from engram_client.lookup.packing import (
    MAX_OWNED_COLUMNS,
    OWNER_SHIFT,
    Ids,
    Out,
    Part,
    Source,
    columns_a_part,
)
from engram_client.lookup.shapes import KERNELS, Memory
from tests.support import fake_kernels
from tests.support.tables import dequantised, planar_of, random_table, reference_gather

GEOMETRY = TableGeometry(layer_id=1, columns=tuple(range(11, 35)))
ALIGNED = [2, 3, 4, 6, 8, 12, 24]


def parts_of(tp_size: int, geometry: TableGeometry = GEOMETRY) -> tuple[Part, ...]:
    shards = [shard(geometry, rank, tp_size) for rank in range(tp_size)]
    return tuple(Part(4096 * (rank + 1), each.row_start, each.row_stop) for rank, each in enumerate(shards))


def source(parts: tuple[Part, ...], starts: tuple[int, ...] = GEOMETRY.column_starts, *, hashed: bool = True) -> Source:
    return Source(parts, starts[-1], 0, 8 if hashed else 0, columns_a_part(parts, starts))


@pytest.mark.parametrize("tp_size", ALIGNED)
def test_a_column_names_the_part_that_holds_its_rows(tp_size: int) -> None:
    parts = parts_of(tp_size)
    multiplier = source(parts).owner_multiplier
    assert columns_a_part(parts, GEOMETRY.column_starts) == 24 // tp_size
    assert 0 < multiplier < 2**32
    borders = [part.start for part in parts] + [GEOMETRY.rows]
    for column, (first, stop) in enumerate(pairwise(GEOMETRY.column_starts)):
        owner = column * multiplier >> OWNER_SHIFT
        assert owner == owner_of(borders, first) == owner_of(borders, stop - 1)


@pytest.mark.parametrize("tp_size", [5, 7, 16, 48])
def test_shards_that_cut_columns_are_searched(tp_size: int) -> None:
    assert source(parts_of(tp_size)).owner_multiplier == 0


@pytest.mark.parametrize("tp_size", ALIGNED)
def test_ids_that_are_not_hashed_are_searched_for(tp_size: int) -> None:
    assert source(parts_of(tp_size), hashed=False).owner_multiplier == 0


@pytest.mark.parametrize("tp_size", [3, 7, 11])
def test_an_empty_shard_among_aligned_ones_brings_the_search_back(tp_size: int) -> None:
    """With one more part their number divides the columns again, and the borders still say no."""
    parts = list(parts_of(tp_size))
    for at in range(tp_size + 1):
        border = parts[at].start if at < tp_size else GEOMETRY.rows
        assert source((*parts[:at], Part(4096, border, border), *parts[at:])).owner_multiplier == 0
    assert source(()).owner_multiplier == 0


@given(st.sampled_from(ALIGNED), st.data())
def test_one_border_beside_its_column_brings_the_search_back(tp_size: int, data: st.DataObject) -> None:
    parts = list(parts_of(tp_size))
    at, field = data.draw(st.integers(0, tp_size - 1)), data.draw(st.sampled_from(["start", "stop"]))
    moved = getattr(parts[at], field) + data.draw(st.integers(-10, 10).filter(bool))
    parts[at] = parts[at]._replace(**{field: moved})
    assert source(tuple(parts)).owner_multiplier == 0


@given(
    st.integers(1, MAX_OWNED_COLUMNS).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, MAX_OWNED_COLUMNS - 1)))
)
def test_the_multiplication_is_a_division(case: tuple[int, int]) -> None:
    columns, column = case
    multiplier = Source((), 0, 0, 8, columns).owner_multiplier
    assert multiplier < 2**32
    for each in (column, column // columns * columns, max(column // columns * columns - 1, 0)):
        assert each * multiplier >> OWNER_SHIFT == each // columns


def test_tables_of_more_columns_than_it_is_exact_for_are_searched() -> None:
    for columns, each in ((MAX_OWNED_COLUMNS, MAX_OWNED_COLUMNS // 2), (2 * MAX_OWNED_COLUMNS, 0)):
        halves = (Part(0, 0, columns // 2), Part(0, columns // 2, columns))
        assert columns_a_part(halves, range(columns + 1)) == each


def test_kernel_and_packing_shift_alike() -> None:
    assert f"constexpr u32 OWNER_SHIFT = {OWNER_SHIFT};" in nvrtc.read_source()


class FakeGpu:
    """Runs launches on this process's memory, as numpy does them, and lets them read the tables alone."""

    multiprocessors = 132
    functions = {name: name for name in KERNELS}  # noqa: RUF012

    def __init__(self) -> None:
        self.readable: list[np.ndarray[Any, Any]] = []

    def place(self, values: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> int:
        self.readable.append(planar_of(values, scales))
        return self.readable[-1].ctypes.data

    def launch(self, function: str, grid: tuple[int, int], threads: int, stream: int, parameters: int) -> None:
        assert "_peer_" in function
        fake_kernels.run(function, parameters, self._may_read)

    def _may_read(self, address: int, nbytes: int) -> bool:
        spans = [(each.ctypes.data, each.ctypes.data + each.nbytes) for each in self.readable]
        return any(first <= address and address + nbytes <= stop for first, stop in spans)


def hashed_ids(geometry: TableGeometry, tokens: int) -> np.ndarray[Any, Any]:
    """In their columns, first and last rows among them, but for an idle slot, padding, neighbours' rows and worse."""
    starts = np.array(geometry.column_starts)
    ids = np.random.default_rng(geometry.layer_id).integers(starts[:-1], starts[1:], (tokens, 24))
    ids[0], ids[1], ids[2] = starts[:-1], starts[1:] - 1, 0
    ids[3, ::2], ids[3, 1::2], ids[4], ids[5, 1:] = -1, -(2**62), starts[1:], starts[1:-1] - 1
    ids[6, :3] = geometry.rows - 1, geometry.rows, 2**62
    return ids


def peer_source(gpu: FakeGpu, tp_size: int, geometry: TableGeometry, starts: int, invalid: int) -> tuple[Any, Source]:
    """values and scales of a table, and its shards as a launch reads them."""
    values, scales = random_table(geometry.rows, seed=tp_size)
    parts = tuple(
        part._replace(address=gpu.place(values[part.start : part.stop], scales[part.start : part.stop]))
        for part in parts_of(tp_size, geometry)
    )
    return (values, scales), Source(
        parts, geometry.rows, invalid, starts, columns_a_part(parts, geometry.column_starts)
    )


@pytest.mark.parametrize("raw", [False, True], ids=["bf16", "raw"])
@pytest.mark.parametrize("hashed", [True, False], ids=["hashed", "plain"])
@pytest.mark.parametrize("sizes", [(2, 8), (24, 3), (5, 4), (6, 7), (1, 12)], ids=str)
def test_tables_of_one_launch_each_have_their_own_way_to_the_owner(
    sizes: tuple[int, int], hashed: bool, raw: bool
) -> None:
    gpu = FakeGpu()
    geometries = [TableGeometry(layer_id=k, columns=tuple(range(3 + k, 27 + k))) for k in range(2)]
    starts = [np.array(geometry.column_starts) for geometry in geometries]
    invalid = np.zeros((2, 3), np.int64)
    made = [
        peer_source(gpu, tp_size, geometry, start.ctypes.data if hashed else 0, counter.ctypes.data)
        for tp_size, geometry, start, counter in zip(sizes, geometries, starts, invalid, strict=True)
    ]
    ids = np.stack([hashed_ids(geometry, 9) for geometry in geometries], axis=1)
    token, table, column = ids.strides
    kind, width = (np.uint8, 264) if raw else (np.uint16, 256)
    rows = np.full((2, 9, 24, width), 7, kind)
    gather = Gather(cast("Kernels", gpu), [source for _, source in made], RowFormat.PLANAR, Memory.PEER, raw=raw)
    outs = [Out(each.ctypes.data, each.ctypes.data + 256 if raw else 0) for each in rows]
    gather(Ids(ids.ctypes.data, 8, 9, 24, token, column, table), outs, 0)
    for index, ((values, scales), source) in enumerate(made):
        borders = starts[index].tolist() if hashed else None
        packed, told = reference_gather(values, scales, ids[:, index], (0, source.rows), borders)
        assert np.array_equal(rows[index], packed if raw else dequantised(packed))
        assert tuple(invalid[index]) == told
        assert told[0] > 1


def test_a_wrong_owner_would_be_noticed() -> None:
    """The numpy kernels take the column's word for it, as the GPU does."""
    target = SimpleNamespace(owner_multiplier=source(parts_of(2)).owner_multiplier)
    pieces = [(0, 0, part.start) for part in parts_of(3)]
    found = [fake_kernels.owner(cast("Any", target), column, 0, pieces) for column in range(24)]
    assert found == [column // 12 for column in range(24)]
