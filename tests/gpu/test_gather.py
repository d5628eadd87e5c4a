"""The CUDA lookup kernels against a lookup table built here, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from engram_client.cuda.access import cuda_driver  # noqa: E402
from engram_client.errors import CudaCallFailed, Unsupported  # noqa: E402
from engram_client.layout import RowFormat, Shard, TableGeometry, shard, whole  # noqa: E402
from engram_client.lookup.cpu import SegmentRows  # noqa: E402
from engram_client.lookup.exchange import CountInvalid, Exchanged  # noqa: E402
from engram_client.lookup.kernels import Gather, Kernels  # noqa: E402
from engram_client.lookup.packing import Ids, Out, Part, Source, columns_a_part  # noqa: E402
from engram_client.lookup.shapes import DENSE_IDS, PREFETCH_BLOCKS, SORT_FROM_IDS, Memory  # noqa: E402

pytestmark = pytest.mark.gpu
FORMATS = list(RowFormat)
POISON = 0x5A
SORTING_TOKENS = SORT_FROM_IDS // 24 + 1


def value_table() -> np.ndarray:
    """[scale, code] -> bfloat16 bits: fp32(e4m3) * 2^(scale - 127), rounded once, one zero, one NaN."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    value = np.where(codes & 0x80, -magnitude, magnitude)
    product = value[None, :] * 2.0 ** (np.arange(256.0)[:, None] - 127)  # exact in float64
    with np.errstate(over="ignore"):
        bits = product.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16  # to nearest, ties to even
    rounded[rounded == 0x8000] = 0
    rounded[:, codes & 0x7F == 0x7F] = 0x7FC0
    rounded[255] = 0x7FC0
    return rounded.astype(np.uint16)


TABLE = value_table()


class Rows:
    """Rows of one table on the CPU, and their bytes for the GPU in either format."""

    def __init__(self, count: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.values = random.integers(0, 256, (count, 256), np.uint8)
        self.scales = random.integers(110, 140, (count, 8)).astype(np.uint8)
        odd = random.random((count, 8)) < 0.1  # every scale occurs, ordinary ones most
        self.scales[odd] = random.integers(0, 256, int(odd.sum()))

    def __len__(self) -> int:
        return len(self.values)

    def stored(self, row_format: RowFormat, start: int = 0, stop: int | None = None) -> np.ndarray:
        values, scales = self.values[start:stop], self.scales[start:stop]
        if row_format is RowFormat.PLANAR:
            return np.concatenate([values.ravel(), scales.ravel()])
        return np.concatenate([values, scales], axis=1).ravel()

    def expected(self, ids: np.ndarray, owned: np.ndarray | None = None) -> np.ndarray:
        """bfloat16 bits [*ids.shape, 256]; zeros where `owned` is False or the id names no row."""
        good = (ids >= 0) & (ids < len(self))
        if owned is not None:
            good &= owned
        safe = np.where(good, ids, 0)
        bits = TABLE[np.repeat(self.scales[safe], 32, axis=-1), self.values[safe]]
        return np.where(good[..., None], bits, 0).astype(np.uint16)


def on_gpu(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def pinned(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory()


def bits(out: torch.Tensor) -> np.ndarray:
    return out.view(torch.int16).cpu().numpy().view(np.uint16)


def view(ids: torch.Tensor) -> Ids:
    """`[tokens, columns]` or `[tokens, tables, columns]` ids, whatever their strides."""
    size = ids.element_size()
    strides = [size * stride for stride in ids.stride()]
    table_stride = strides[1] if ids.dim() == 3 else 0
    return Ids(ids.data_ptr(), size, ids.shape[0], ids.shape[-1], strides[0], strides[-1], table_stride)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    raw = torch.full((*shape[:-1], shape[-1] * dtype.itemsize), POISON, dtype=torch.uint8, device="cuda")
    return raw.view(dtype)


class Attached:
    """Tables on this GPU (or in pinned host memory) with a counter each, as a client would hold them."""

    def __init__(self, tables, row_format, memory=Memory.DEVICE, *, parts=None, columns=None, keep=0, **options):
        self.kernels = Kernels.on(torch.cuda.current_device())
        place = pinned if memory is Memory.HOST else on_gpu
        self.invalid = torch.zeros(len(tables), 3, dtype=torch.int64, device="cuda")
        self.kept = []
        sources = []
        for index, rows in enumerate(tables):
            ranges = parts or [(0, len(rows))]
            stored = [place(rows.stored(row_format, *one)) for one in ranges]
            starts = on_gpu(np.array(columns)) if columns else None
            self.kept += [*stored, starts]
            held = tuple(Part(s.data_ptr(), *one) for s, one in zip(stored, ranges, strict=True))
            sources.append(
                Source(
                    parts=held,
                    rows=len(rows),
                    invalid=self.invalid[index].data_ptr(),
                    column_starts=starts.data_ptr() if columns else 0,
                    columns_a_part=columns_a_part(held, columns) if columns else 0,
                )
            )
        self.gather = Gather(self.kernels, sources, row_format, memory, **options)

    def __call__(self, ids: torch.Tensor, outs: list[Out], *, workspace: bool = False) -> None:
        size = self.gather.workspace_bytes(ids.shape[0] * ids.shape[-1]) if workspace else 0
        self.workspace = torch.full((size + 256,), POISON, dtype=torch.uint8, device="cuda")
        address = self.workspace.data_ptr() if size else 0
        self.gather(view(ids), outs, torch.cuda.current_stream().cuda_stream, address)
        torch.cuda.synchronize()
        assert bool((self.workspace[size:] == POISON).all()), "wrote past the workspace"

    def lookup(self, ids: torch.Tensor, *, workspace: bool = False) -> np.ndarray:
        """bfloat16 bits [tokens, columns, 256] (the first table's when there are several)."""
        return self.lookup_all(ids, workspace=workspace)[0]

    def lookup_all(self, ids: torch.Tensor, *, workspace: bool = False) -> list[np.ndarray]:
        outs = [poisoned(ids.shape[0], ids.shape[-1], 256) for _ in range(self.gather.tables)]
        self(ids, [Out(out.data_ptr()) for out in outs], workspace=workspace)
        return [bits(out) for out in outs]


def every_code_and_scale() -> Rows:
    rows = Rows(256)
    rows.values[:] = np.arange(256, dtype=np.uint8)
    rows.scales[:] = np.arange(256, dtype=np.uint8)[:, None]
    return rows


@pytest.mark.parametrize("memory", [Memory.DEVICE, Memory.HOST])
@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_every_code_with_every_scale_is_bit_exact(row_format, memory, tokens):
    rows = every_code_and_scale()
    ids = np.tile(np.arange(256), (tokens, 1))
    got = Attached([rows], row_format, memory).lookup(on_gpu(ids), workspace=True)
    assert np.array_equal(got, rows.expected(ids))


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 128, 1024])
def test_any_count_and_both_id_types_give_the_rows(row_format, dtype, tokens):
    rows = Rows(5000)
    ids = np.random.default_rng(tokens).integers(0, len(rows), (tokens, 24)).astype(dtype)
    assert np.array_equal(Attached([rows], row_format).lookup(on_gpu(ids)), rows.expected(ids))


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 24, 25, 1000])
def test_any_number_of_columns_divides_right(columns):
    rows = Rows(3000)
    ids = np.random.default_rng(columns).integers(0, len(rows), (11, columns))
    assert np.array_equal(Attached([rows], RowFormat.PACKED).lookup(on_gpu(ids)), rows.expected(ids))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_views_of_a_batch_need_no_copy(dtype):
    rows = Rows(4000)
    ids = np.random.default_rng(1).integers(0, len(rows), (37, 3, 24)).astype(dtype)
    device = on_gpu(ids)
    table = Attached([rows], RowFormat.PACKED)
    for layer in range(3):
        assert np.array_equal(table.lookup(device[:, layer]), rows.expected(ids[:, layer]))
    assert np.array_equal(table.lookup(device[:, 1, 6:12]), rows.expected(ids[:, 1, 6:12]))
    assert np.array_equal(table.lookup(device[:, 1].t()), rows.expected(ids[:, 1].T))
    assert np.array_equal(table.lookup(device[::5, 2, ::2]), rows.expected(ids[::5, 2, ::2]))


def test_no_ids_launch_nothing():
    Attached([Rows(10)], RowFormat.PACKED).lookup(torch.zeros(0, 24, dtype=torch.int64, device="cuda"))


@pytest.mark.parametrize(("tokens", "workspace"), [(4, False), (SORTING_TOKENS, True)])
@pytest.mark.parametrize("memory", [Memory.DEVICE, Memory.HOST])
def test_padding_is_silent_and_invalid_ids_are_counted(memory, tokens, workspace):
    rows = Rows(1000)
    table = Attached([rows], RowFormat.PACKED, memory)
    ids = np.random.default_rng(3).integers(0, len(rows), (tokens, 24))
    ids[1, 3], ids[2, 5], ids[3, 0], ids[0, 7], ids[0, 8] = -1, 1000, 1001, 2**62, -(2**62)
    got = table.lookup(on_gpu(ids), workspace=workspace)
    assert np.array_equal(got, rows.expected(ids))
    count, first, position = table.invalid[0].tolist()
    assert count == 3
    assert first in (1000, 1001, 2**62)
    assert ids.ravel()[position] == first
    good = np.zeros((2, 24), np.int64)
    assert np.array_equal(table.lookup(on_gpu(good)), rows.expected(good))
    assert table.invalid[0, 0].item() == 3


@pytest.mark.parametrize("tokens", [6, SORTING_TOKENS])
def test_a_hashed_id_outside_its_column_is_invalid_except_zero(tokens):
    rows = Rows(2400)
    starts = list(range(0, 2401, 100))
    table = Attached([rows], RowFormat.PACKED, Memory.HOST, columns=starts)
    ids = np.random.default_rng(4).integers(0, 100, (tokens, 24)) + np.array(starts[:-1])
    ids[0] = 0  # an idle slot: column 0 owns row 0, the others are not counted
    ids[1, 5], ids[2, 0], ids[3, 23], ids[4, 2] = 499, 100, 2400, -1
    owned = (ids >= np.array(starts[:-1])) & (ids < np.array(starts[1:]))
    got = table.lookup(on_gpu(ids), workspace=True)
    assert np.array_equal(got, rows.expected(ids, owned))
    assert table.invalid[0, 0].item() == 3


@pytest.mark.parametrize("tp", [2, 3, 5, 7])
def test_shards_sum_to_the_whole(tp):
    rows = Rows(1003)
    ids = np.random.default_rng(5).integers(-2, len(rows) + 2, (50, 24))
    total = np.zeros((50, 24, 128), np.int32)
    for rank in range(tp):
        start, stop = len(rows) * rank // tp, len(rows) * (rank + 1) // tp
        got = Attached([rows], RowFormat.PLANAR, parts=[(start, stop)]).lookup(on_gpu(ids))
        assert np.array_equal(got, rows.expected(ids, (ids >= start) & (ids < stop)))
        total += got.view(np.int32)
    assert np.array_equal(total.view(np.uint16), rows.expected(ids))


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("tp", [2, 3, 8, 64])
@pytest.mark.parametrize("tokens", [3, 700])
def test_a_peer_read_finds_each_rows_owner(row_format, tp, tokens):
    rows = Rows(5003)
    parts = [(len(rows) * rank // tp, len(rows) * (rank + 1) // tp) for rank in range(tp)]
    table = Attached([rows], row_format, Memory.PEER, parts=parts)
    ids = np.random.default_rng(6).integers(-3, len(rows) + 3, (tokens, 24))
    borders = np.array([edge for part in parts for edge in (part[0], part[1] - 1)])
    ids.ravel()[: min(len(borders), ids.size)] = borders[: ids.size]
    assert np.array_equal(table.lookup(on_gpu(ids)), rows.expected(ids))


def hashed_ids(starts: np.ndarray, tokens: int) -> np.ndarray:
    """In their columns, first and last rows among them, and in every kind of wrong place."""
    ids = np.random.default_rng(15).integers(starts[:-1], starts[1:], (tokens, 24))
    strange = np.random.default_rng(16).integers(-2, starts[-1] + 2, (tokens, 24))
    ids = np.where(np.random.default_rng(17).random(ids.shape) < 0.1, strange, ids)
    idle = np.zeros(24, np.int64)
    rows = [starts[:-1], starts[1:] - 1, starts[1:], idle, idle - 1, np.maximum(starts[:-1] - 1, 0), idle + 2**62]
    ids[: len(rows)] = rows[:tokens]
    return ids


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7, 40, 700])
@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("tp", [2, 3, 8, 24, 5])
def test_a_peer_read_by_column_or_by_row_gives_what_the_cpu_gives(row_format, tokens, hashed, tp):
    geometry = TableGeometry(layer_id=1, columns=tuple(range(101, 125)))
    rows = Rows(geometry.rows)
    shards = [shard(geometry, rank, tp) for rank in range(tp)]
    starts = list(geometry.column_starts)
    ids = hashed_ids(np.array(starts), tokens)
    cpu = SegmentRows(rows.stored(row_format), geometry, whole(geometry), row_format)
    expected, invalid = cpu.lookup(torch.from_numpy(ids), hashed=hashed)
    stored = cpu.lookup_raw(torch.from_numpy(ids), hashed=hashed).rows
    where = {"parts": [(one.row_start, one.row_stop) for one in shards], "columns": starts if hashed else None}
    table = Attached([rows], row_format, Memory.PEER, **where)
    assert np.array_equal(table.lookup(on_gpu(ids)), bits(expected))
    assert table.invalid[0, 0].item() == invalid.count
    raw = poisoned(tokens, 24, 264, dtype=torch.uint8)
    Attached([rows], row_format, Memory.PEER, raw=True, **where)(
        on_gpu(ids), [Out(raw.data_ptr(), raw.data_ptr() + 256)]
    )
    assert torch.equal(raw.cpu(), stored)


def test_one_peer_launch_finds_the_owners_of_every_layer():
    geometry = TableGeometry(layer_id=1, columns=tuple(range(101, 125)))
    starts = np.array(geometry.column_starts)
    tables = [Rows(geometry.rows, seed=1), Rows(geometry.rows, seed=2), Rows(geometry.rows, seed=3)]
    parts = list(itertools.pairwise(geometry.column_starts[::3]))
    attached = Attached(tables, RowFormat.PLANAR, Memory.PEER, parts=parts, columns=starts.tolist())
    ids = np.stack([np.roll(hashed_ids(starts, 50), turn, axis=0) for turn in range(3)], axis=1)
    got = attached.lookup_all(on_gpu(ids))
    for layer, rows in enumerate(tables):
        owned = (ids[:, layer] >= starts[:-1]) & (ids[:, layer] < starts[1:])
        assert np.array_equal(got[layer], rows.expected(ids[:, layer], owned))


def test_more_shards_than_a_launch_takes_are_refused():
    with pytest.raises(Unsupported):
        Attached([Rows(100)], RowFormat.PLANAR, Memory.PEER, parts=[(k, k + 1) for k in range(65)])


@pytest.mark.parametrize("tokens", [5, SORTING_TOKENS])
@pytest.mark.parametrize("memory", [Memory.DEVICE, Memory.HOST])
@pytest.mark.parametrize("row_format", FORMATS)
def test_one_launch_reads_all_layers(row_format, memory, tokens):
    tables = [Rows(3000, seed=1), Rows(4001, seed=2), Rows(17, seed=3)]
    ids = np.random.default_rng(7).integers(-1, 3100, (tokens, 3, 24))
    attached = Attached(tables, row_format, memory)
    got = attached.lookup_all(on_gpu(ids), workspace=True)
    for layer, rows in enumerate(tables):
        assert np.array_equal(got[layer], rows.expected(ids[:, layer]))
        assert attached.invalid[layer, 0].item() == int((ids[:, layer] >= len(rows)).sum())


def test_one_peer_launch_reads_all_layers():
    tables = [Rows(1000, seed=1), Rows(1000, seed=2)]
    attached = Attached(tables, RowFormat.PLANAR, Memory.PEER, parts=[(0, 300), (300, 1000)])
    ids = np.random.default_rng(8).integers(0, 1000, (40, 2, 24))
    got = attached.lookup_all(on_gpu(ids))
    for layer, rows in enumerate(tables):
        assert np.array_equal(got[layer], rows.expected(ids[:, layer]))


@pytest.mark.parametrize("tokens", [1, 31, SORTING_TOKENS])
@pytest.mark.parametrize("memory", [Memory.DEVICE, Memory.HOST])
@pytest.mark.parametrize("together", [True, False])
def test_raw_rows_are_the_bytes_as_stored(memory, tokens, together):
    rows = Rows(900)
    ids = np.random.default_rng(9).integers(-1, len(rows), (tokens, 24))
    attached = Attached([rows], RowFormat.PACKED, memory, raw=True, out_strides=(264, 264) if together else (256, 8))
    count = ids.size
    raw = poisoned(count, 264, dtype=torch.uint8)
    scales = raw.data_ptr() + (256 if together else 256 * count)
    attached(on_gpu(ids), [Out(raw.data_ptr(), scales)], workspace=True)
    flat = ids.ravel()
    values = np.where(flat[:, None] < 0, 0, rows.values[np.maximum(flat, 0)])
    scale_bytes = np.where(flat[:, None] < 0, 0, rows.scales[np.maximum(flat, 0)])
    got = raw.cpu().numpy()
    if together:
        assert np.array_equal(got, np.concatenate([values, scale_bytes], axis=1))
    else:
        assert np.array_equal(got.ravel(), np.concatenate([values.ravel(), scale_bytes.ravel()]))


@pytest.mark.parametrize("tp", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("tokens", [1, 29, 600])
def test_exchanged_raw_rows_become_the_whole_batch(tp, tokens):
    rows = Rows(2400)
    ids = np.random.default_rng(10).integers(-1, len(rows), (tokens, 24))
    device = on_gpu(ids)
    width = 24 // tp
    attached = Attached([rows], RowFormat.PLANAR, raw=True)
    raw = poisoned(tp, tokens, width, 264, dtype=torch.uint8)
    for rank in range(tp):
        address = raw[rank].data_ptr()
        attached(device[:, rank * width : (rank + 1) * width], [Out(address, address + 256)])
    out = poisoned(tokens, 24, 256)
    stream = torch.cuda.current_stream().cuda_stream
    source = Source((), len(rows), attached.invalid[0].data_ptr())
    exchanged = Exchanged(attached.kernels, source, 24, tp)
    exchanged(view(device), raw.data_ptr(), out.data_ptr(), stream)
    assert np.array_equal(bits(out), rows.expected(ids))
    assert attached.invalid[0].tolist() == [0, 0, 0]
    device[-1, 5], device[-1, 6] = len(rows), 2**62  # the rows stay; the ids alone are judged here
    exchanged(view(device), raw.data_ptr(), out.data_ptr(), stream)
    assert np.array_equal(bits(out), rows.expected(ids))
    assert attached.invalid[0, 0].item() == 2
    assert device.view(-1)[attached.invalid[0, 2]].item() == attached.invalid[0, 1].item()


@pytest.mark.parametrize("tokens", [1, 5000])
def test_ids_are_counted_without_reading_a_row(tokens):
    kernels = Kernels.on(torch.cuda.current_device())
    invalid = torch.zeros(3, dtype=torch.int64, device="cuda")
    ids = torch.zeros(tokens, 24, dtype=torch.int64, device="cuda")
    ids[0, 7], ids[-1, 9], ids[0, 1] = 1000, 2**40, -1
    count = CountInvalid(kernels, Source((), 1000, invalid.data_ptr()), 24)
    stream = torch.cuda.current_stream().cuda_stream
    count(view(ids), stream)
    assert invalid[0].item() == 2
    count(view(ids[:, 7:10]), stream)  # another width
    assert invalid[0].item() == 4


@pytest.mark.parametrize("memory", [Memory.DEVICE, Memory.HOST])
@pytest.mark.parametrize("tokens", [1, 128, 2000])
def test_few_blocks_read_all_rows(memory, tokens):
    rows = Rows(5000)
    ids = np.random.default_rng(14).integers(-1, len(rows) + 1, (tokens, 24))
    for row_format in FORMATS:
        table = Attached([rows], row_format, memory, blocks=PREFETCH_BLOCKS)
        for workspace in (False, True):
            assert np.array_equal(table.lookup(on_gpu(ids), workspace=workspace), rows.expected(ids))


@pytest.mark.parametrize("tokens", [SORTING_TOKENS, DENSE_IDS // 24 + 5])
@pytest.mark.parametrize("kind", ["random", "all the same", "all padding", "one page"])
def test_sorted_reads_give_what_unsorted_ones_give(kind, tokens):
    rows = Rows(200_000)
    ids = np.random.default_rng(11).integers(-1, len(rows), (tokens, 24))
    if kind == "all the same":
        ids[:] = 12345
    elif kind == "all padding":
        ids[:] = -1
    elif kind == "one page":
        ids %= 1000
    table = Attached([rows], RowFormat.PACKED, Memory.HOST)
    assert table.gather.workspace_bytes(ids.size) > 0
    for _ in range(2):
        assert np.array_equal(table.lookup(on_gpu(ids), workspace=True), rows.expected(ids))
    assert np.array_equal(table.lookup(on_gpu(ids)), rows.expected(ids))


@pytest.mark.parametrize(("memory", "tokens", "replays"), [(Memory.DEVICE, 16, 1000), (Memory.HOST, 1100, 20)])
def test_a_captured_lookup_follows_its_ids(memory, tokens, replays):
    rows = Rows(30_000)
    table = Attached([rows], RowFormat.PACKED, memory)
    ids = torch.zeros(tokens, 24, dtype=torch.int64, device="cuda")
    out = poisoned(tokens, 24, 256)
    workspace = torch.empty(max(table.gather.workspace_bytes(ids.numel()), 1), dtype=torch.uint8, device="cuda")
    address = workspace.data_ptr() if table.gather.sorts(ids.numel()) else 0

    def launch():
        table.gather(view(ids), [Out(out.data_ptr())], torch.cuda.current_stream().cuda_stream, address)

    launch()  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    reference = on_gpu(rows.expected(np.arange(len(rows))).view(np.int16)).view(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(replays):
        ids.random_(0, len(rows), generator=generator)
        graph.replay()
        assert torch.equal(out.view(torch.int16), reference[ids].view(torch.int16))


def test_rows_beyond_four_gib_are_found():
    count = 20_000_000  # 4.9 GiB
    stored = torch.empty(count * 264, dtype=torch.uint8, device="cuda")
    chosen = np.array([0, 1, 2**32 // 264 - 1, 2**32 // 264, 2**32 // 264 + 1, 2**32 // 256, count - 2, count - 1])
    rows = Rows(len(chosen))
    kernels = Kernels.on(torch.cuda.current_device())
    invalid = torch.zeros(3, dtype=torch.int64, device="cuda")
    for row_format, dtype in itertools.product(FORMATS, (np.int32, np.int64)):
        for row, values, scales in zip(chosen.tolist(), on_gpu(rows.values), on_gpu(rows.scales), strict=True):
            packed = row_format is RowFormat.PACKED
            value_at = row * 264 if packed else row * 256
            scale_at = row * 264 + 256 if packed else count * 256 + row * 8
            stored[value_at : value_at + 256] = values
            stored[scale_at : scale_at + 8] = scales
        source = Source((Part(stored.data_ptr(), 0, count),), count, invalid.data_ptr())
        out = poisoned(1, len(chosen), 256)
        gather = Gather(kernels, [source], row_format, Memory.DEVICE)
        ids = on_gpu(chosen[None].astype(dtype))
        gather(view(ids), [Out(out.data_ptr())], torch.cuda.current_stream().cuda_stream)
        assert np.array_equal(bits(out)[0], rows.expected(np.arange(len(chosen))))


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("tokens", [7, SORTING_TOKENS])
@pytest.mark.parametrize("hashed", [True, False])
def test_the_gpu_and_the_cpu_lookup_agree(row_format, tokens, hashed):
    geometry = TableGeometry(layer_id=1, columns=tuple(range(101, 125)))
    rows = Rows(geometry.rows)
    shard = Shard(row_start=500, row_stop=2000, columns=None)
    stored = rows.stored(row_format, shard.row_start, shard.row_stop)
    ids = np.random.default_rng(12).integers(-1, len(rows) + 50, (tokens, 24))
    if hashed:
        mostly = np.random.default_rng(13).random(ids.shape) < 0.9
        inside = np.array(geometry.column_starts[:-1]) + ids % np.array(geometry.columns)
        ids = np.where(mostly, inside, ids)
    expected, invalid = SegmentRows(stored, geometry, shard, row_format).lookup(torch.from_numpy(ids), hashed=hashed)
    columns = list(geometry.column_starts) if hashed else None
    parts = [(shard.row_start, shard.row_stop)]
    table = Attached([rows], row_format, Memory.HOST, parts=parts, columns=columns)
    assert np.array_equal(table.lookup(on_gpu(ids), workspace=True), bits(expected))
    assert table.invalid[0, 0].item() == invalid.count


def test_strides_beyond_four_gib_are_refused():
    table = Attached([Rows(10)], RowFormat.PACKED)
    with pytest.raises(Unsupported):
        table.gather(Ids(0, 8, 2, 24, 2**32, 8), [Out(0)], torch.cuda.current_stream().cuda_stream)


def test_a_failed_driver_call_is_named_and_leaves_the_process_working():
    with pytest.raises(CudaCallFailed) as caught:
        cuda_driver().host_register(4096, 4096, read_only=False)
    assert caught.value.call == "cuMemHostRegister"
    assert caught.value.name.startswith("CUDA_ERROR_")
    assert torch.ones(3, device="cuda").sum().item() == 3
