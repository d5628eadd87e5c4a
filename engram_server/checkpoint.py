"""Where a DeepSeek-V4.1 checkpoint keeps its Engram tables: configuration, index, headers, byte ranges.

No tensor is read and no numpy or torch imported: the daemon itself runs this before it plans any memory, so
that a wrong, incomplete or damaged checkpoint ends it in moments. The loader then reads the byte ranges.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engram_client.errors import (
    AmbiguousTensor,
    CheckpointConfigInvalid,
    CheckpointError,
    CheckpointNotFound,
    ConfigInvalid,
    HeaderInvalid,
    IndexInvalid,
    MissingFile,
    MissingTensor,
    NoEngramLayers,
    ReadFailed,
    RowCountMismatch,
    WrongDtype,
    WrongShape,
)
from engram_client.layout import ROW_SCALES, ROW_VALUES, ModelGeometry, TableGeometry, parse_model_geometry
from engram_server.tensor_file import Extent, Tensor, dangling, plain, read_header, read_json, shown

__all__ = ["Checkpoint", "Extent", "TableSource", "open_checkpoint", "read_model_geometry"]

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
VALUES_DTYPE = "F8_E4M3"
SCALES_DTYPE = "F8_E8M0"
_PREFIXES = ("", "model.")
_MAX_LAYERS = 1024
"""More than any model has; it bounds the search for primes."""


@dataclass(frozen=True)
class TableSource:
    """One table: `values` are its rows x 256 bytes and `scales` its rows x 8 bytes, both in row order."""

    geometry: TableGeometry
    values: Extent
    scales: Extent


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose tables are all there; `sources` follow the order of `engram_layer_ids`."""

    path: str
    model: ModelGeometry
    sources: tuple[TableSource, ...]


def values_name(layer_id: int) -> str:
    """The tensor with a layer's FP8 values, as the released checkpoint names it."""
    return f"layers.{layer_id}.engram.embed.weight"


def scales_name(layer_id: int) -> str:
    """The tensor with a layer's E8M0 scales, as the released checkpoint names it."""
    return f"layers.{layer_id}.engram.embed.scale"


def read_model_geometry(folder: str | os.PathLike[str]) -> ModelGeometry:
    """The `engram_*` keys of the folder's config.json, from its `text_config` or (older exports) its top level.

    Raises NoEngramLayers for another model, CheckpointConfigInvalid for values that make no table,
    RowCountMismatch when the stated row counts are not those of the primes, CheckpointNotFound, ReadFailed or
    DanglingSymlink when there is nothing to read.
    """
    path = os.path.join(_folder(folder), CONFIG_NAME)
    missing = CheckpointNotFound(path=os.path.dirname(path), problem=f"has no {CONFIG_NAME}")
    try:
        config = read_json(path, missing)
    except ValueError as error:
        raise CheckpointConfigInvalid(path=path, problem=str(error)) from error
    if not isinstance(config, dict):
        raise CheckpointConfigInvalid(path=path, problem="is not a JSON object")
    keys = _engram_keys(config)
    layers = keys.get("engram_layer_ids")
    if layers is None or layers == []:
        model_type = config.get("model_type") or keys.get("model_type")
        raise NoEngramLayers(path=path, model_type=model_type if isinstance(model_type, str) else "unknown")
    if isinstance(layers, list) and len(layers) > _MAX_LAYERS:
        raise CheckpointConfigInvalid(path=path, problem=f"engram_layer_ids names {len(layers)} layers")
    try:
        model = parse_model_geometry(keys, path)
    except ConfigInvalid as error:
        problem = f"{error.path}: {error.problem}" + (f" (allowed: {error.allowed})" if error.allowed else "")
        raise CheckpointConfigInvalid(path=path, problem=problem) from error
    model.tables()
    return model


def open_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """Finds every table of the checkpoint and proves that each promised byte exists; reads no tensor.

    Raises a CheckpointError: those of `read_model_geometry`, and IndexInvalid, MissingFile, MissingTensor,
    AmbiguousTensor, HeaderInvalid, TruncatedFile, OverlappingTensors, WrongDtype or WrongShape.
    """
    path = _folder(folder)
    model = read_model_geometry(path)
    tensors = _Tensors(path)
    return Checkpoint(path, model, tuple(_table_source(table, tensors) for table in model.tables()))


def _folder(folder: str | os.PathLike[str]) -> str:
    """The folder's absolute path; its symlinks stay, so that messages name what the user named."""
    path = os.path.abspath(folder)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: a NUL in the path
        raise dangling(path) or CheckpointNotFound(path=path, problem="does not exist") from error
    except OSError as error:
        raise ReadFailed(path=path, offset=0, problem=error.strerror or str(error)) from error
    if not stat.S_ISDIR(mode):
        raise CheckpointNotFound(path=path, problem="is not a folder")
    return path


def _engram_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text_config = config.get("text_config")
    if isinstance(text_config, dict) and ("engram_layer_ids" in text_config or "engram_layer_ids" not in config):
        return text_config
    return config


def _table_source(table: TableGeometry, tensors: _Tensors) -> TableSource:
    values = tensors.find(values_name(table.layer_id))
    scales = tensors.find(scales_name(table.layer_id))
    _check_tensor(values, VALUES_DTYPE, table.rows, ROW_VALUES)
    _check_tensor(scales, SCALES_DTYPE, table.rows, ROW_SCALES)
    return TableSource(table, values.extent, scales.extent)


def _check_tensor(tensor: Tensor, dtype: str, rows: int, width: int) -> None:
    """Both dtypes have one byte an element, so a tensor of [rows, width] has rows * width bytes."""
    path = tensor.extent.path
    if tensor.dtype != dtype:
        raise WrongDtype(tensor=tensor.name, path=path, expected=dtype, found=plain(tensor.dtype))
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        found = shown(list(tensor.shape))
        raise WrongShape(tensor=tensor.name, path=path, expected=str([rows, width]), found=found)
    if tensor.shape[0] != rows:
        raise RowCountMismatch(where=f"rows of {tensor.name} in {path}", expected=rows, found=tensor.shape[0])
    if tensor.extent.nbytes != rows * width:
        problem = f"{tensor.name} has {tensor.extent.nbytes} bytes and its shape makes {rows * width}"
        raise HeaderInvalid(path=path, problem=problem)


class _Tensors:
    """Which file of a folder holds which tensor; each header is read once."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._headers: dict[str, dict[str, Tensor]] = {}
        index = os.path.join(folder, INDEX_NAME)
        if os.path.lexists(index):  # a dangling link is an index that cannot be read, not the lack of one
            self._listed_in = index
            self._files = _read_index(index)
        else:
            self._listed_in = _only_file(folder)
            name = os.path.basename(self._listed_in)
            missing = CheckpointNotFound(path=self._listed_in, problem="does not exist")
            self._files = dict.fromkeys(self._header(self._listed_in, missing), name)

    def find(self, name: str) -> Tensor:
        """The tensor `name`, with or without the prefix that some exports put in front of it."""
        found = [prefix + name for prefix in _PREFIXES if prefix + name in self._files]
        if not found:
            raise MissingTensor(tensor=name, path=self._listed_in)
        if len(found) > 1:
            raise AmbiguousTensor(path=self._listed_in, first=found[0], second=found[1])
        path = os.path.join(self._folder, self._files[found[0]])
        header = self._header(path, MissingFile(path=path, tensor=found[0]))
        if found[0] not in header:
            raise MissingTensor(tensor=found[0], path=path)
        return header[found[0]]

    def _header(self, path: str, missing: CheckpointError) -> dict[str, Tensor]:
        if path not in self._headers:
            self._headers[path] = read_header(path, missing)
        return self._headers[path]


def _read_index(path: str) -> dict[str, str]:
    """The index's map from tensor names to file names, each inside the folder."""
    try:
        index = read_json(path, CheckpointNotFound(path=path, problem="does not exist"))
    except ValueError as error:
        raise IndexInvalid(path=path, problem=str(error)) from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict):
        raise IndexInvalid(path=path, problem="has no weight_map")
    for tensor, name in files.items():
        if not isinstance(name, str) or not _is_inside(name):
            problem = f"puts {shown(tensor)} into {shown(name)}, which is no file of this folder"
            raise IndexInvalid(path=path, problem=problem)
    return files


def _is_inside(name: str) -> bool:
    """Whether a name from an index stays in the folder. Symlinks may leave it: snapshots are made of them."""
    # isprintable(): no NUL, no lone surrogate, no line end that would forge a line in a log
    if not name or not name.isprintable() or os.path.isabs(name) or ".." in name.split("/"):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a file system encoding other than UTF-8
        return False
    return True


def _only_file(folder: str) -> str:
    """The safetensors file of a folder that has no index."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    except OSError as error:
        raise ReadFailed(path=folder, offset=0, problem=error.strerror or str(error)) from error
    if SINGLE_NAME in names:
        return os.path.join(folder, SINGLE_NAME)
    if not names:
        raise CheckpointNotFound(path=folder, problem=f"has neither {INDEX_NAME} nor a safetensors file")
    if len(names) > 1:
        raise CheckpointNotFound(path=folder, problem=f"has {len(names)} safetensors files and no {INDEX_NAME}")
    return os.path.join(folder, names[0])
