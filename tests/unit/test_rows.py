"""The byte-level operations on rows, C and numpy alike, against references made another way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_client import _pure, rows
from tests.support.tables import (
    ROW_BYTES,
    dequantised,
    packed_of,
    planar_of,
    random_table,
    reference_bf16,
    reference_gather,
)

try:
    from engram_client import _native
except ImportError:
    _native = None

IMPLEMENTATIONS = [
    pytest.param(_pure, id="pure"),
    pytest.param(_native, id="native", marks=pytest.mark.skipif(_native is None, reason="the extension is not built")),
]


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
class TestDequantise:
    def test_every_code_under_every_scale_byte_equals_the_reference(self, ops: ModuleType) -> None:
        values = np.broadcast_to(np.arange(256, dtype=np.uint8), (256, 256)).copy()
        scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
        out = np.empty((256, 256), np.uint16)
        ops.dequantise(packed_of(values, scales), out)
        assert np.array_equal(out, reference_bf16(values, scales))

    def test_each_group_of_32_values_takes_its_own_scale(self, ops: ModuleType) -> None:
        values, scales = random_table(3000)
        out = np.empty((3000, 256), np.uint16)
        ops.dequantise(packed_of(values, scales), out)
        assert np.array_equal(out, reference_bf16(values, scales))

    def test_special_values_are_what_every_path_agreed_on(self, ops: ModuleType) -> None:
        def of(code: int, scale: int) -> int:
            row = np.full((1, ROW_BYTES), scale, np.uint8)
            row[:, :256] = code
            out = np.empty(256, np.uint16)
            ops.dequantise(row, out)
            assert (out == out[0]).all()
            return int(out[0])

        assert of(0x80, 127) == 0, "-0 becomes +0"
        assert of(0x81, 0) == 0, "what rounds to -0 becomes +0"
        assert of(0x04, 0) == 0, "half of the smallest subnormal rounds to even"
        assert of(0x05, 0) == 1, "a little more rounds up"
        assert of(0x38, 0) == 0x0040, "1.0 * 2^-127 is a bfloat16 subnormal"
        assert of(0xFF, 127) == 0x7FC0, "every NaN is the same"
        assert of(0x00, 255) == 0x7FC0
        assert of(0x7E, 254) == 0x7F80, "overflow is infinity"
        assert of(0xFE, 254) == 0xFF80

    def test_a_host_process_that_flushes_denormals_changes_nothing(self, ops: ModuleType) -> None:
        torch = pytest.importorskip("torch")
        values, scales = random_table(64)
        scales %= 12
        out = np.empty((64, 256), np.uint16)
        torch.set_flush_denormal(True)
        try:
            ops.dequantise(packed_of(values, scales), out)
        finally:
            torch.set_flush_denormal(False)
        assert np.array_equal(out, reference_bf16(values, scales))


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
class TestPack:
    # The C version handles eight rows at once from where the target meets a border of cache lines.
    @pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4000])
    @pytest.mark.parametrize("first_row", [0, 1, 7])
    def test_packing_and_unpacking_move_every_byte_and_no_other(
        self, ops: ModuleType, count: int, first_row: int
    ) -> None:
        values, scales = random_table(count)
        target = np.full((first_row + count + 1, ROW_BYTES), 0xEE, np.uint8)
        ops.pack(values, scales, target[first_row : first_row + count])
        assert np.array_equal(target[first_row : first_row + count], packed_of(values, scales))
        assert (target[:first_row] == 0xEE).all()
        assert (target[first_row + count :] == 0xEE).all()
        values_back, scales_back = np.empty_like(values), np.empty_like(scales)
        ops.unpack(target[first_row : first_row + count], values_back, scales_back)
        assert np.array_equal(values_back, values)
        assert np.array_equal(scales_back, scales)

    def test_targets_of_any_alignment_are_filled(self, ops: ModuleType) -> None:
        values, scales = random_table(1700)
        room = np.zeros(1700 * ROW_BYTES + 8, np.uint8)
        for shift in range(8):
            target = room[shift : shift + 1700 * ROW_BYTES]
            ops.pack(values, scales, target)
            assert np.array_equal(target.reshape(-1, ROW_BYTES), packed_of(values, scales))

    def test_sizes_that_disagree_are_refused(self, ops: ModuleType) -> None:
        room = bytearray
        with pytest.raises(ValueError, match="values"):
            ops.pack(bytes(255), bytes(8), room(264))
        with pytest.raises(ValueError, match="scales"):
            ops.pack(bytes(512), bytes(8), room(528))
        with pytest.raises(ValueError, match="packed"):
            ops.pack(bytes(512), bytes(16), room(264))
        with pytest.raises(ValueError, match="packed"):
            ops.unpack(bytes(263), room(256), room(8))
        with pytest.raises(ValueError, match="scales"):
            ops.unpack(bytes(264), room(256), room(9))
        with pytest.raises(ValueError, match="out"):
            ops.dequantise(bytes(264), room(511))

    def test_targets_that_cannot_be_written_are_refused(self, ops: ModuleType) -> None:
        with pytest.raises(BufferError):
            ops.pack(bytes(256), bytes(8), bytes(264))
        with pytest.raises(BufferError):
            ops.unpack(bytes(264), memoryview(bytes(256)), bytearray(8))
        with pytest.raises(BufferError):
            ops.dequantise(bytes(264), bytes(512))

    def test_buffers_with_gaps_are_refused(self, ops: ModuleType) -> None:
        with pytest.raises((BufferError, ValueError)):
            ops.pack(np.zeros((2, 512), np.uint8)[:, :256], bytes(16), bytearray(528))


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
class TestGather:
    @settings(max_examples=150, deadline=None)
    @given(data=st.data())
    def test_every_shape_shard_and_format_equals_one_id_at_a_time(self, ops: ModuleType, data: st.DataObject) -> None:
        columns = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6), label="columns")
        total = sum(columns)
        values, scales = random_table(total, seed=total)
        low = data.draw(st.integers(0, total), label="row_start")
        high = data.draw(st.integers(low, total), label="row_stop")
        hashed = data.draw(st.booleans(), label="hashed")
        width = len(columns) if hashed else data.draw(st.integers(1, 4), label="width")
        count = data.draw(st.integers(0, 20), label="count")
        some = st.one_of(
            st.integers(-2, total + 2), st.sampled_from([2**31 - 1, -(2**31)]), st.sampled_from([2**62, -(2**63)])
        )
        dtype = data.draw(st.sampled_from([np.int32, np.int64]), label="dtype")
        drawn = data.draw(st.lists(some, min_size=count * width, max_size=count * width), label="ids")
        ids = np.array(drawn, np.int64).astype(dtype).reshape(count, width)
        roomy = np.full((count, width + 3, 2), 1, dtype)
        roomy[:, 1 : 1 + width, 1] = ids
        strided = roomy[:, 1 : 1 + width, 1]
        starts = list(np.cumsum([0, *columns])) if hashed else None
        expected, offence = reference_gather(values, scales, ids, (low, high), starts)
        starts_bytes = None if starts is None else np.array(starts, np.int64)
        is_packed = data.draw(st.booleans(), label="packed")
        segment = (packed_of if is_packed else planar_of)(values[low:high], scales[low:high])
        raw = np.full((count, width, ROW_BYTES), 0xEE, np.uint8)
        args = (segment, is_packed, low, high, total, starts_bytes, strided)
        assert ops.gather(*args, raw, True) == offence
        assert np.array_equal(raw, expected)
        out = np.full((count, width, 256), 0xEEEE, np.uint16)
        assert ops.gather(*args, out, False) == offence
        assert np.array_equal(out, dequantised(expected))
        assert ops.count_invalid(strided, total, starts_bytes) == offence

    def test_a_large_batch_equals_the_reference_wherever_its_output_lies(self, ops: ModuleType) -> None:
        values, scales = random_table(5000)
        ids = np.random.default_rng(2).integers(-1, 5001, (700, 24))
        out = np.empty((700 * 24 + 1, 256), np.uint16)
        for start in (0, 1):  # and one that is not aligned to a cache line
            target = out.ravel()[start : start + 700 * 24 * 256]
            count, first, position = ops.gather(
                packed_of(values, scales), True, 0, 5000, 5000, None, ids, target, False
            )
            known = (ids >= 0) & (ids < 5000)
            expected = reference_bf16(values, scales)[np.where(known, ids, 0)]
            expected[~known] = 0
            assert np.array_equal(target.reshape(700, 24, 256), expected)
            assert (count, first) == (np.count_nonzero(ids == 5000), 5000)
            assert position == np.argmax(ids.ravel() == 5000)

    def test_a_segment_may_be_larger_than_its_shard(self, ops: ModuleType) -> None:
        values, scales = random_table(10)
        segment = np.concatenate([planar_of(values, scales), np.zeros(4096, np.uint8)])
        out = np.empty((1, 1, ROW_BYTES), np.uint8)
        ops.gather(segment, False, 0, 10, 10, None, np.array([[9]]), out, True)
        assert np.array_equal(out[0, 0], np.concatenate([values[9], scales[9]]))

    def test_arguments_that_would_read_or_write_outside_are_refused(self, ops: ModuleType) -> None:
        segment, ids, out = bytes(10 * ROW_BYTES), np.zeros((2, 3), np.int64), bytearray(6 * ROW_BYTES)
        good = (segment, True, 0, 10, 10, None, ids, out, True)
        assert ops.gather(*good) == (0, 0, -1)

        def changed(**new: object) -> tuple[object, ...]:
            names = ("segment", "packed", "start", "stop", "rows", "starts", "ids", "out", "raw")
            return tuple(new.get(name, value) for name, value in zip(names, good, strict=True))

        for bad in (
            changed(segment=bytes(10 * ROW_BYTES - 1)),
            changed(start=-1),
            changed(start=6, stop=5),
            changed(stop=11),
            changed(starts=np.zeros(3, np.int64)),
            changed(out=bytearray(6 * ROW_BYTES - 1)),
            changed(out=bytearray(6 * ROW_BYTES), raw=False),
            changed(ids=ids.astype(np.uint64)),
            changed(ids=ids.astype(np.float64)),
            changed(ids=ids.astype(np.int16)),
            changed(ids=ids.ravel()),
        ):
            with pytest.raises(ValueError, match=r".+"):
                ops.gather(*bad)
        with pytest.raises(BufferError):
            ops.gather(*changed(out=bytes(6 * ROW_BYTES)))

    def test_bfloat16_is_written_at_even_addresses_only(self, ops: ModuleType) -> None:
        odd = np.zeros(1 + 512, np.uint8)[1:]
        with pytest.raises(ValueError, match="aligned"):
            ops.dequantise(bytes(ROW_BYTES), odd)
        with pytest.raises(ValueError, match="aligned"):
            ops.gather(bytes(ROW_BYTES), True, 0, 1, 1, None, np.zeros((1, 1), np.int64), odd, False)


@pytest.mark.skipif(_native is None, reason="the extension is not built")
def test_other_threads_run_while_the_c_code_works() -> None:
    """One gather must not hold up the host's other threads."""
    values, scales = random_table(4000)
    segment, ids = packed_of(values, scales), np.random.default_rng(3).integers(0, 4000, (100_000, 1))
    out = np.empty((100_000, 256), np.uint16)
    done, progress = threading.Event(), []

    def work() -> None:
        for _ in range(20):
            _native.gather(segment, True, 0, 4000, 4000, None, ids, out, False)
        done.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # the GIL changes hands only where it is released
    thread = threading.Thread(target=work)
    try:
        thread.start()
        while not done.wait(0.0005):
            progress.append(None)
    finally:
        sys.setswitchinterval(before)
        thread.join()
    assert progress


@pytest.mark.parametrize(("pure", "native"), [("1", False), ("0", _native is not None)])
def test_the_environment_chooses_the_implementation(pure: str, native: bool) -> None:
    code = "import sys; from engram_client import rows; assert 'torch' not in sys.modules; print(rows.NATIVE)"
    output = subprocess.check_output([sys.executable, "-c", code], env={**os.environ, "ENGRAM_PURE": pure}, text=True)
    assert output.strip() == str(native)


def test_both_implementations_offer_the_same_names() -> None:
    for name in set(rows.__all__) - {"NATIVE"}:
        assert callable(getattr(_pure, name))
        assert _native is None or callable(getattr(_native, name))
