"""Writes a folder that looks like a DeepSeek-V4.1 checkpoint, with tables of any size and known content.

For trials and tests without a download of hundreds of GiB. The layout is the real one: config.json, an index,
each table alone in a shard file, and a shard with some of the engine's own tensors. The rows come from
engram_server.generate, so a reader can be checked against (seed, layer, row) alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from engram_client.errors import ConfigInvalid, FolderNotEmpty, WriteFailed
from engram_client.layout import ROW_SCALES, ROW_VALUES, ModelGeometry, TableGeometry, parse_model_geometry
from engram_server.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    SCALES_DTYPE,
    VALUES_DTYPE,
    scales_name,
    values_name,
)
from engram_server.generate import rows

Progress = Callable[[int, int], None]
"""Called with bytes written and bytes in all, tables only."""

_CHUNK_ROWS = 1 << 16  # 16.5 MiB
_HIDDEN = 64  # width of the engine's tensors: there to be passed over, so small
_BF16_ONE = b"\x80\x3f"
_WHERE = "make_checkpoint"
_TEMPORARY = ".{}.part"


@dataclass
class _File:
    """One safetensors file to be written: its tensors in file order, as name, dtype, shape and bytes."""

    name: str
    tensors: list[tuple[str, str, list[int], int]] = field(default_factory=list)

    def header(self) -> bytes:
        """The length and the JSON, padded with spaces so that the tensors start at a multiple of 8."""
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape, nbytes in self.tensors:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        return sum(nbytes for *_, nbytes in self.tensors)


def make_checkpoint(
    folder: str | os.PathLike[str],
    *,
    engram_vocab_size: int,
    seed: int,
    layer_ids: Sequence[int] = (1, 14),
    every_code: bool = False,
    on_progress: Progress | None = None,
) -> list[Path]:
    """Writes the checkpoint into a new or an empty folder and returns the paths of its files.

    A table has about 24 * engram_vocab_size rows of 264 bytes. `every_code` takes rows with all 256 value codes
    and all 256 scale codes, NaN included, in place of rows that are harmless to a model. config.json appears
    last: a folder that has it is complete. On a failure everything written is removed.

    Raises ConfigInvalid when these numbers make no table, FolderNotEmpty, or WriteFailed.
    """
    if not layer_ids:
        raise ConfigInvalid(where=_WHERE, path="engram_layer_ids", problem="is empty", allowed="one layer or more")
    keys = _engram_keys(engram_vocab_size, layer_ids)
    model = parse_model_geometry(keys, _WHERE)
    tables = model.tables()
    files = _files(tables)
    path = Path(folder)
    made_folder = _prepare(path, sum(file.nbytes for file in files))
    writer = _Writer(path, on_progress, sum(table.nbytes for table in tables))
    try:
        writer.write_small(files[0])
        for table, file in zip(tables, files[1:], strict=True):
            writer.write_table(table, file, seed, every_code)
        writer.write_json(INDEX_NAME, _index(files))
        writer.write_json(CONFIG_NAME, _config(model, keys))
        return writer.publish()
    except BaseException as error:  # an interrupt too must leave nothing half-done
        writer.remove_all()
        if made_folder:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError):
            raise WriteFailed(path=str(error.filename or path), problem=error.strerror or str(error)) from error
        raise


def _engram_keys(vocab_size: int, layer_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "engram_layer_ids": list(layer_ids),
        "engram_max_ngram_size": 4,
        "engram_vocab_size": vocab_size,
        "engram_n_heads": 8,
        "engram_head_dim": ROW_VALUES,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
    }


def _config(model: ModelGeometry, keys: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": {**keys, "engram_num_embeddings": [table.rows for table in model.tables()]},
    }


def _files(tables: Sequence[TableGeometry]) -> list[_File]:
    """The engine's shard first, then one a table."""
    count = len(tables) + 1
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    small = _File(names[0], [_bf16("embed.weight", 16, _HIDDEN), _bf16("norm.weight", _HIDDEN)])
    files = [small]
    for table, name in zip(tables, names[1:], strict=True):
        prefix = f"layers.{table.layer_id}.engram"
        small.tensors.append(_bf16(f"{prefix}.wkv.weight", 2 * _HIDDEN, ROW_VALUES))
        small.tensors.append(_bf16(f"{prefix}.q_weight", _HIDDEN))
        small.tensors.append(_bf16(f"{prefix}.k_weight", _HIDDEN))
        values = values_name(table.layer_id), VALUES_DTYPE, [table.rows, ROW_VALUES], table.rows * ROW_VALUES
        scales = scales_name(table.layer_id), SCALES_DTYPE, [table.rows, ROW_SCALES], table.rows * ROW_SCALES
        files.append(_File(name, [values, scales]))
    return files


def _bf16(name: str, *shape: int) -> tuple[str, str, list[int], int]:
    elements = 1
    for size in shape:
        elements *= size
    return name, "BF16", list(shape), 2 * elements


def _index(files: Sequence[_File]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(file.nbytes for file in files)},
        "weight_map": {name: file.name for file in files for name, *_ in file.tensors},
    }


def _prepare(path: Path, needed: int) -> bool:
    """Makes the folder, unless it is there and empty, and returns whether it did."""
    made = False
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                example = next((entry.name for entry in entries), None)
            if example is not None:
                raise FolderNotEmpty(path=str(path), example=example)
        else:
            path.mkdir(parents=True)
            made = True
        # before the first byte: a full disk would otherwise show after minutes of writing
        free = shutil.disk_usage(path).free
    except OSError as error:
        raise WriteFailed(path=str(path), problem=error.strerror or str(error)) from error
    if free < needed:
        if made:
            path.rmdir()
        raise WriteFailed(path=str(path), problem=f"{needed} bytes are needed and {free} are free")
    return made


class _Writer:
    """Writes files under temporary names; `publish` gives them their own, `remove_all` undoes everything."""

    def __init__(self, folder: Path, on_progress: Progress | None, total: int) -> None:
        self._folder = folder
        self._names: list[str] = []
        self._on_progress = on_progress
        self._done, self._total = 0, total

    def write_small(self, file: _File) -> None:
        self._write(file.name, file.header() + _BF16_ONE * (file.nbytes // 2))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        self._write(name, (json.dumps(value, indent=2) + "\n").encode())

    def write_table(self, table: TableGeometry, file: _File, seed: int, every_code: bool) -> None:
        """Both tensors at once, each at its place, so that every row is made once."""
        header = file.header()
        values_at, scales_at = len(header), len(header) + table.rows * ROW_VALUES
        with self._new(file.name) as out:
            _write_at(out.fileno(), header, 0)
            for start in range(0, table.rows, _CHUNK_ROWS):
                count = min(_CHUNK_ROWS, table.rows - start)
                values, scales = rows(table.layer_id, seed, start, count, every_code)
                _write_at(out.fileno(), values.data.cast("B"), values_at + start * ROW_VALUES)
                _write_at(out.fileno(), scales.data.cast("B"), scales_at + start * ROW_SCALES)
                self._done += values.nbytes + scales.nbytes
                if self._on_progress is not None:
                    self._on_progress(self._done, self._total)
            os.fsync(out.fileno())

    def publish(self) -> list[Path]:
        """Renames every file in the order of writing, config.json last."""
        for name in self._names:
            os.rename(self._folder / _TEMPORARY.format(name), self._folder / name)
        return [self._folder / name for name in self._names]

    def remove_all(self) -> None:
        for name in self._names:
            for path in (self._folder / name, self._folder / _TEMPORARY.format(name)):
                with suppress(OSError):  # the first failure is the one to report
                    path.unlink()

    def _new(self, name: str) -> FileIO:
        out = (self._folder / _TEMPORARY.format(name)).open("xb", buffering=0)
        self._names.append(name)  # only now: a file of another writer is not ours to remove
        return out

    def _write(self, name: str, content: bytes) -> None:
        with self._new(name) as out:
            _write_at(out.fileno(), content, 0)
            os.fsync(out.fileno())


def _write_at(file: int, content: bytes | memoryview, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
