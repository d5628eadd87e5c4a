"""The CPU lookup, from outside: rows of any ids in any shard and format, against one id at a time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_client.errors import IdsDeviceInvalid, IdsDtypeInvalid, IdsShapeInvalid, OutInvalid
from engram_client.layout import RowFormat, Shard, TableGeometry, shard, whole
from engram_client.lookup import cpu
from engram_client.lookup.checks import Invalid
from engram_client.lookup.cpu import SegmentRows, count_invalid
from tests.support.tables import dequantised, packed_of, planar_of, random_table, reference_gather

GEOMETRY = TableGeometry(layer_id=1, columns=(101, 103, 107, 109, 113, 127))
COLUMNS = len(GEOMETRY.columns)
ROWS = GEOMETRY.rows
VALUES, SCALES = random_table(ROWS)
FORMATS = list(RowFormat)


def opened(part: Shard, row_format: RowFormat) -> SegmentRows:
    layout = packed_of if row_format is RowFormat.PACKED else planar_of
    rows = slice(part.row_start, part.row_stop)
    return SegmentRows(layout(VALUES[rows], SCALES[rows]), GEOMETRY, part, row_format)


def expected(ids: torch.Tensor, part: Shard | None = None, hashed: bool = False) -> tuple[np.ndarray, Invalid]:
    part = part or whole(GEOMETRY)
    starts = list(GEOMETRY.column_starts) if hashed else None
    packed, offence = reference_gather(VALUES, SCALES, ids.numpy(), (part.row_start, part.row_stop), starts)
    return packed, Invalid(*offence)


def bits(rows: torch.Tensor) -> np.ndarray:
    return rows.view(torch.int16).numpy().view(np.uint16)


def hashed_ids(tokens: int, seed: int = 7, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    ids = [generator.integers(start, stop, tokens) for start, stop in pairwise(GEOMETRY.column_starts)]
    return torch.from_numpy(np.stack(ids, axis=1)).to(dtype)


def check(table: SegmentRows, ids: torch.Tensor, hashed: bool = False) -> None:
    packed, invalid = expected(ids, table.shard, hashed)
    found = table.lookup(ids, hashed=hashed)
    assert found.rows.dtype == torch.bfloat16
    assert np.array_equal(bits(found.rows), dequantised(packed))
    assert found.invalid == invalid
    raw = table.lookup_raw(ids, hashed=hashed)
    assert np.array_equal(raw.rows.numpy(), packed)
    assert raw.invalid == invalid
    assert table.count_invalid(ids, hashed=hashed) == invalid


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
class TestIds:
    @pytest.mark.parametrize(
        "shape", [(), (1,), (17,), (5, 3), (2, 3, 4), (2, 1, 3, 2), (0,), (0, 6), (3, 0), (0, 2, 6)]
    )
    def test_any_shape_gives_its_rows(self, row_format: RowFormat, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        ids = torch.randint(-2, ROWS + 2, shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
        check(opened(whole(GEOMETRY), row_format), ids)

    def test_any_strides_give_the_rows_of_the_ids_seen(self, row_format: RowFormat, dtype: torch.dtype) -> None:
        table = opened(whole(GEOMETRY), row_format)
        wide = torch.arange(24 * 12, dtype=dtype).view(24, 12)
        views = [wide[:, 3:9], wide[::3, ::2], wide.T, wide[5], wide[:, 5], wide[2:4].expand(2, 12)]
        views += [wide[:1].expand(9, 12), wide.view(4, 6, 12)[:, ::2, 1:5], wide.view(4, 6, 12).permute(2, 0, 1)]
        for ids in views:
            check(table, ids)

    def test_hashed_ids_of_any_strides_give_their_rows(self, row_format: RowFormat, dtype: torch.dtype) -> None:
        table = opened(whole(GEOMETRY), row_format)
        ids = hashed_ids(12, dtype=dtype)
        roomy = torch.full((12, 20), -5, dtype=dtype)
        roomy[:, 4:10] = ids
        views = [ids, roomy[:, 4:10], ids[0], ids.view(3, 4, 6), ids.view(3, 4, 6)[:, ::2], ids.T.contiguous().T]
        for view in [*views, ids[:0], ids[:0].view(2, 0, 6)]:
            check(table, view, hashed=True)

    def test_ids_that_name_no_row_give_zero_rows_and_are_counted(
        self, row_format: RowFormat, dtype: torch.dtype
    ) -> None:
        table = opened(whole(GEOMETRY), row_format)
        far = 2**62 if dtype == torch.int64 else 2**31 - 1
        ids = torch.tensor([[0, -1, ROWS - 1], [ROWS, ROWS + 1, far]], dtype=dtype)
        found = table.lookup(ids, hashed=False)
        assert found.invalid == Invalid(count=3, first=ROWS, position=3)
        assert not bits(found.rows)[0, 1].any()
        assert not bits(found.rows)[1].any()
        check(table, ids)
        check(table, torch.tensor([[0, 1, 2]], dtype=dtype))  # later lookups work

    def test_a_hashed_id_outside_its_column_is_invalid(self, row_format: RowFormat, dtype: torch.dtype) -> None:
        table = opened(whole(GEOMETRY), row_format)
        starts = GEOMETRY.column_starts
        ids = torch.tensor(
            [
                [0, 0, 0, 0, 0, 0],  # an idle batch: nothing counted, row 0 in column 0 only
                [-1, -7, -1, -1, -1, -1],
                [starts[1] - 1, starts[1], starts[3] - 1, starts[3], starts[5] - 1, ROWS - 1],
                [starts[1], starts[1] - 1, starts[3], starts[3] - 1, 1, ROWS],
            ],
            dtype=dtype,
        )
        found = table.lookup(ids, hashed=True)
        assert found.invalid == Invalid(count=6, first=starts[1], position=18)
        assert np.array_equal(bits(found.rows)[0, 0], bits(table.lookup(ids[0, 0], hashed=False).rows))
        assert not bits(found.rows)[0, 1:].any()
        check(table, ids, hashed=True)


@pytest.mark.parametrize("row_format", FORMATS)
class TestShards:
    @pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 5, 7, 32])
    def test_the_shards_together_hold_every_row_once(self, row_format: RowFormat, tp_size: int) -> None:
        ids = torch.cat([torch.arange(-1, ROWS + 1), torch.tensor([2**62])])
        total = np.zeros((len(ids), 264), np.uint32)
        for rank in range(tp_size):
            table = opened(shard(GEOMETRY, rank, tp_size), row_format)
            check(table, ids)
            total += table.lookup_raw(ids, hashed=False).rows.numpy()
        assert np.array_equal(total, expected(ids)[0])

    def test_a_shard_without_rows_gives_zero_rows_and_still_counts(self, row_format: RowFormat) -> None:
        table = SegmentRows(b"", GEOMETRY, Shard(row_start=9, row_stop=9, columns=None), row_format)
        ids = torch.tensor([8, 9, 10, ROWS])
        found = table.lookup(ids, hashed=False)
        assert not bits(found.rows).any()
        assert found.invalid == Invalid(count=1, first=ROWS, position=3)

    @pytest.mark.parametrize(("first", "last"), [(0, 6), (0, 2), (2, 3), (4, 6), (3, 3)])
    def test_chosen_columns_are_looked_up_alone(self, row_format: RowFormat, first: int, last: int) -> None:
        starts = GEOMETRY.column_starts
        table = opened(Shard(row_start=starts[first], row_stop=starts[last], columns=(first, last)), row_format)
        ids = hashed_ids(11)
        ids[4, :] = ROWS + 4
        packed, _ = expected(ids, hashed=True)
        found = table.lookup(ids, hashed=True, columns=(first, last))
        assert np.array_equal(bits(found.rows), dequantised(packed[:, first:last]))
        none = Invalid(0, 0, -1)
        assert found.invalid == (Invalid(last - first, ROWS + 4, 4 * COLUMNS + first) if last > first else none)
        raw = table.lookup_raw(ids, hashed=True, columns=(first, last))
        assert np.array_equal(raw.rows.numpy(), packed[:, first:last])

    def test_the_buffer_comes_back_on_close(self, row_format: RowFormat) -> None:
        segment = bytearray(packed_of(VALUES, SCALES).tobytes())
        table = SegmentRows(segment, GEOMETRY, whole(GEOMETRY), row_format)
        table.lookup(torch.arange(3), hashed=False)
        with pytest.raises(BufferError):
            segment.append(0)  # a buffer in use cannot move
        table.close()
        segment.append(0)

    def test_a_segment_smaller_than_its_shard_is_refused(self, row_format: RowFormat) -> None:
        with pytest.raises(ValueError, match=str(ROWS * 264)):
            SegmentRows(bytes(ROWS * 264 - 1), GEOMETRY, whole(GEOMETRY), row_format)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 9), hashed=st.booleans(), row_format=st.sampled_from(FORMATS)
)
def test_random_batches_equal_the_reference(seed: int, tokens: int, hashed: bool, row_format: RowFormat) -> None:
    generator = np.random.default_rng(seed)
    tp_size = int(generator.integers(1, 9))
    ids = hashed_ids(tokens, seed=seed)
    odd = torch.from_numpy(generator.choice([0, -1, -(2**63), ROWS, 2**62, 5, ROWS - 1], ids.shape))
    ids = torch.where(torch.from_numpy(generator.random(ids.shape) < 0.2), odd, ids)
    check(opened(shard(GEOMETRY, int(generator.integers(tp_size)), tp_size), row_format), ids, hashed)


def test_threads_share_a_batch_and_agree_with_one(threads: int) -> None:
    table = opened(whole(GEOMETRY), RowFormat.PACKED)
    ids = hashed_ids(4 * cpu.INLINE_IDS // COLUMNS)
    ids[-1, 2] = ROWS + 9  # in the last thread's part
    ids[-2, 1] = 1
    for view, hashed in ((ids, True), (ids, False), (ids[:, ::2], False)):
        check(table, view, hashed)


def test_lookups_from_several_threads_at_once_do_not_mix() -> None:
    from concurrent.futures import ThreadPoolExecutor

    table = opened(whole(GEOMETRY), RowFormat.PLANAR)
    batches = [hashed_ids(700, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda ids: table.lookup(ids, hashed=True).rows, batches * 3))
    for ids, rows in zip(batches * 3, results, strict=True):
        assert np.array_equal(bits(rows), dequantised(expected(ids, hashed=True)[0]))


class TestOut:
    def test_rows_are_written_where_the_caller_says(self) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        ids, room = hashed_ids(5), torch.full((7, COLUMNS, 256), 3.0, dtype=torch.bfloat16)
        found = table.lookup(ids, room[1:6], hashed=True)
        assert found.rows.data_ptr() == room[1:6].data_ptr()
        assert np.array_equal(bits(room[1:6]), dequantised(expected(ids, hashed=True)[0]))
        assert (room[0] == 3).all()
        assert (room[6] == 3).all()

    @pytest.mark.parametrize(
        "out",
        [
            torch.empty(5, COLUMNS, 256),
            torch.empty(5, COLUMNS, 255, dtype=torch.bfloat16),
            torch.empty(5 * COLUMNS, 256, dtype=torch.bfloat16),
            torch.empty(5, COLUMNS, 512, dtype=torch.bfloat16)[:, :, ::2],
            torch.empty(5, COLUMNS, 256, dtype=torch.bfloat16, device="meta"),
            "a buffer",
        ],
    )
    def test_an_out_of_another_kind_is_refused(self, out: object) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        with pytest.raises(OutInvalid):
            table.lookup(hashed_ids(5), out, hashed=True)  # type: ignore[arg-type]

    def test_raw_rows_need_bytes(self) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        with pytest.raises(OutInvalid):
            table.lookup_raw(hashed_ids(5), torch.empty(5, COLUMNS, 264, dtype=torch.int8), hashed=True)


class TestRefusedIds:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool, torch.bfloat16])
    def test_other_dtypes_are_refused(self, dtype: torch.dtype) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        with pytest.raises(IdsDtypeInvalid) as caught:
            table.lookup(torch.zeros(2, COLUMNS, dtype=dtype), hashed=True)
        assert caught.value.found == str(dtype)
        with pytest.raises(IdsDtypeInvalid):
            count_invalid(torch.zeros(2, dtype=dtype), GEOMETRY, False)

    def test_what_is_no_dense_tensor_is_refused(self) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        for ids in ([1, 2], torch.eye(6, dtype=torch.int64).to_sparse()):
            with pytest.raises(IdsDtypeInvalid):
                table.lookup(ids, hashed=False)  # type: ignore[arg-type]

    def test_ids_on_another_device_are_refused(self) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        with pytest.raises(IdsDeviceInvalid) as caught:
            table.lookup(torch.zeros(2, dtype=torch.int64, device="meta"), hashed=False)
        assert (caught.value.found, caught.value.expected) == ("meta", "cpu")

    @pytest.mark.parametrize("shape", [(), (0,), (COLUMNS - 1,), (4, COLUMNS + 1), (COLUMNS, 4)])
    def test_hashed_ids_need_one_id_a_column(self, shape: tuple[int, ...]) -> None:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        with pytest.raises(IdsShapeInvalid):
            table.lookup(torch.zeros(shape, dtype=torch.int64), hashed=True)
        with pytest.raises(IdsShapeInvalid):
            table.count_invalid(torch.zeros(shape, dtype=torch.int64), hashed=True)


def test_tensors_of_inference_mode_are_served() -> None:
    table = opened(whole(GEOMETRY), RowFormat.PACKED)
    with torch.inference_mode():
        check(table, hashed_ids(3), hashed=True)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_an_exchange_left_is_put_in_the_tokens_order(ranks: int) -> None:
    ids = hashed_ids(4)
    received = [opened(shard(GEOMETRY, r, ranks), RowFormat.PLANAR) for r in range(ranks)]
    packed = [one.lookup_raw(ids, hashed=True, columns=one.shard.columns).rows.reshape(-1) for one in received]
    out = torch.empty(4, COLUMNS, 256, dtype=torch.bfloat16)
    invalid = received[0].assemble(torch.cat(packed), ids, out, pieces=len(packed), hashed=True)
    whole_table = opened(whole(GEOMETRY), RowFormat.PACKED)
    assert np.array_equal(bits(out), bits(whole_table.lookup(ids, hashed=True).rows))
    assert invalid == whole_table.count_invalid(ids, hashed=True)


def _lookup_in_child(results: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    results.put(bits(opened(whole(GEOMETRY), RowFormat.PACKED).lookup(hashed_ids(2000), hashed=True).rows))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        table = opened(whole(GEOMETRY), RowFormat.PACKED)
        ours = bits(table.lookup(hashed_ids(2000), hashed=True).rows)  # starts the threads
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        child = context.Process(target=_lookup_in_child, args=(results,), daemon=True)
        child.start()
        theirs = results.get(timeout=30)
        child.join(30)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(ours, theirs)
