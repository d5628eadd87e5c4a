"""The lookup kernels as numpy, for the fake driver: reads a launch's parameters as gather.cu would and does the
same to host memory, which is what the fake's device memory is. Slow, and independent of the code that packs them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tests.support.tables import reference_bf16

HEAD = struct.Struct("<QqIIIIIIIIQIIIIIIIIII")
HEAD_FIELDS = (
    *("workspace", "table_stride", "tables", "out_scale_stride", "bucket_shift", "buckets", "slot_mask"),
    *("unused", "unused", "unused"),
    *("ids", "token_stride", "column_stride", "items", "columns", "division_multiplier", "division_shift"),
    *("value_stride", "scale_stride", "out_value_stride", "id_bytes"),
)
"""In the order of gather.cu, as a test compares."""
TARGET = struct.Struct("<QQQQqqqQQHHI")
SHARD = struct.Struct("<QQq")
MAX_TABLES = 4


class Launch(NamedTuple):
    table_stride: int
    tables: int
    out_scale_stride: int
    ids: int
    token_stride: int
    column_stride: int
    items: int
    columns: int
    value_stride: int
    scale_stride: int
    out_value_stride: int
    id_bytes: int


class Target(NamedTuple):
    out_values: int
    out_scales: int
    values: int
    scales: int
    start: int
    count: int
    rows: int
    column_starts: int
    invalid: int
    shard_first: int
    shard_count: int
    owner_multiplier: int


def array(address: int, kind: Any, *shape: int) -> np.ndarray:
    """Memory at an address as a writable array."""
    count = int(np.prod(shape))
    nbytes = count * np.dtype(kind).itemsize
    if not nbytes:
        return np.empty(shape, kind)
    return np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), kind).reshape(shape)


def run(name: str, parameters: int, readable: Callable[[int, int], bool]) -> None:
    """Does what kernel `name` does. `readable`: whether the GPU may read so many bytes at an address."""
    first = int(array(parameters, np.uint64, 1)[0])
    head = dict(zip(HEAD_FIELDS, HEAD.unpack(bytes(array(first, np.uint8, HEAD.size))), strict=True))
    launch = Launch(*(head[field] for field in Launch._fields))
    targets = [
        Target(*TARGET.unpack(bytes(array(first + HEAD.size + k * TARGET.size, np.uint8, TARGET.size))))
        for k in range(launch.tables)
    ]
    if name.startswith("gather_few_"):
        launch, targets = compiled_in(name, launch, targets)
    if name.startswith(("order_", "fill_")):
        return  # what is ordered gives the same rows
    if name in ("dequantise_exchanged", "count_invalid"):
        if name == "dequantise_exchanged":
            exchanged(launch, targets[0])
        judge(launch, targets[0], ids_of(launch, 0))
        return
    for index, target in enumerate(targets):
        ids = ids_of(launch, index)
        pieces = [(target.values, target.scales, 0)]
        if "_peer_" not in name:
            target = target._replace(owner_multiplier=0)  # for kernels that look for an owner
        else:
            second = int(array(parameters, np.uint64, 2)[1])
            pieces = [
                SHARD.unpack(bytes(array(second + (target.shard_first + k) * SHARD.size, np.uint8, SHARD.size)))
                for k in range(target.shard_count)
            ]
        gather(launch, target, ids, pieces, "raw" in name, readable)
        judge(launch, target, ids)


def compiled_in(name: str, launch: Launch, targets: list[Target]) -> tuple[Launch, list[Target]]:
    """What a kernel for few tokens takes from its name instead of its parameters: one table, where rows lie, the type
    of the ids, and whether they are hashed."""
    _, _, row_format, *hashed, ids = name.split("_")
    value_stride, scale_stride = {"planar": (256, 8), "packed": (264, 264)}[row_format]
    launch = launch._replace(
        table_stride=0,
        value_stride=value_stride,
        scale_stride=scale_stride,
        out_value_stride=512,
        id_bytes={"i32": 4, "i64": 8}[ids],
    )
    (target,) = targets
    assert target.column_starts or not hashed, "a kernel would fault"
    return launch, [target if hashed else target._replace(column_starts=0)]


def ids_of(launch: Launch, table: int) -> np.ndarray:
    tokens = launch.items // launch.columns
    nbytes = launch.id_bytes
    offsets = np.arange(tokens)[:, None] * launch.token_stride + np.arange(launch.columns) * launch.column_stride
    span = int(offsets.max()) + nbytes
    memory = array(launch.ids + table * launch.table_stride, np.uint8, span)
    picked = memory[offsets.reshape(-1, 1) + np.arange(nbytes)]
    return np.ascontiguousarray(picked).view(np.int64 if nbytes == 8 else np.int32).ravel().astype(np.int64)


def in_column(launch: Launch, target: Target, ids: np.ndarray) -> np.ndarray:
    starts = array(target.column_starts, np.int64, launch.columns + 1)
    column = np.arange(len(ids)) % launch.columns
    return (ids >= starts[column]) & (ids < starts[column + 1])


def judge(launch: Launch, target: Target, ids: np.ndarray) -> None:
    hashed = target.column_starts != 0
    good = (ids <= 0) | in_column(launch, target, ids) if hashed else ids < target.rows
    bad = np.flatnonzero(~good)
    if len(bad):
        counter = array(target.invalid, np.int64, 3)
        if counter[0] == 0:
            counter[1:] = ids[bad[0]], bad[0]
        counter[0] += len(bad)


def gather(
    launch: Launch,
    target: Target,
    ids: np.ndarray,
    pieces: list[tuple[int, int, int]],
    raw: bool,
    readable: Callable[[int, int], bool],
) -> None:
    values, scales = np.zeros((len(ids), 256), np.uint8), np.zeros((len(ids), 8), np.uint8)
    wanted = np.ones(len(ids), bool) if not target.column_starts else in_column(launch, target, ids)
    for k in np.flatnonzero(wanted & (ids >= target.start) & (ids < target.start + target.count)):
        row = int(ids[k]) - target.start
        value_at, scale_at, start = pieces[owner(target, int(k) % launch.columns, row, pieces)]
        assert row >= start, "a kernel would read before the shard"
        value = value_at + (row - start) * launch.value_stride
        scale = scale_at + (row - start) * launch.scale_stride
        assert readable(value, 256), "a kernel would fault"
        assert readable(scale, 8), "a kernel would fault"
        values[k], scales[k] = array(value, np.uint8, 256), array(scale, np.uint8, 8)
    store(launch, target, values, scales, raw)


def owner(target: Target, column: int, row: int, pieces: list[tuple[int, int, int]]) -> int:
    """The number of the shard that a kernel reads a row from: by the column alone where it is told how."""
    if target.owner_multiplier:
        return column * target.owner_multiplier >> 31
    return max(k for k, piece in enumerate(pieces) if piece[2] <= row)


def store(launch: Launch, target: Target, values: np.ndarray, scales: np.ndarray, raw: bool) -> None:
    rows = values if raw else reference_bf16(values, scales).view(np.uint8)
    assert target.out_values % 16 == 0
    for k in range(len(values)):
        array(target.out_values + k * launch.out_value_stride, np.uint8, rows.shape[1])[:] = rows[k]
        if raw:
            array(target.out_scales + k * launch.out_scale_stride, np.uint8, 8)[:] = scales[k]


def digest(parameters: int, pieces: int, accessible: Callable[[int, int, bool], bool]) -> None:
    """What digest.cu does. `accessible`: whether the GPU may read, or also write, so many bytes at an address."""
    given, found = (int(array(int(pointer), np.uint64, 1)[0]) for pointer in array(parameters, np.uint64, 2))
    assert accessible(given, 24 * pieces, False), "a kernel would fault"
    assert accessible(found, 16 * pieces, True), "a kernel would fault"
    for index, (values, scales, rows) in enumerate(array(given, np.uint64, pieces, 3).tolist()):
        assert rows > 0
        assert values % 16 == 0
        assert scales % 8 == 0
        running = xxhash.xxh3_128()
        for address, nbytes in ((values, rows * 256), (scales, rows * 8)):
            assert accessible(address, nbytes, False), "a kernel would fault"
            running.update(array(address, np.uint8, nbytes))
        array(found + 16 * index, np.uint8, 16)[:] = np.frombuffer(running.digest()[::-1], np.uint8)


def exchanged(launch: Launch, target: Target) -> None:
    """[shards, tokens, columns / shards, 264] to [tokens, columns, 256]."""
    shards = target.shard_count
    tokens, width = launch.items // launch.columns, launch.columns // shards
    packed = array(target.values, np.uint8, shards, tokens, width, 264).transpose(1, 0, 2, 3).reshape(-1, 264)
    store(launch, target, np.ascontiguousarray(packed[:, :256]), np.ascontiguousarray(packed[:, 256:]), raw=False)
