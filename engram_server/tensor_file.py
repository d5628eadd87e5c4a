"""Safetensors headers and strict JSON, read as if someone had tampered with them.

A safetensors file is: header length N (8 bytes, little-endian), N bytes of JSON, then the tensors' bytes.
The JSON maps a name to {"dtype", "shape", "data_offsets": [begin, end)}, offsets counted from the end of the
header. Only the header is ever read here. Bytes that no tensor claims are let be: they change no row.

Source: the format description of the safetensors library (its limit of 100 MB a header included).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from engram_client.errors import (
    CheckpointError,
    DanglingSymlink,
    HeaderInvalid,
    OverlappingTensors,
    ReadFailed,
    TruncatedFile,
)

LENGTH_BYTES = 8
HEADER_LIMIT = 100_000_000
"""Bytes of JSON, in a header or beside it, that are read at all."""
_METADATA = "__metadata__"
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class Extent:
    """Bytes `[offset, offset + nbytes)` of the file at `path`, counted from the file's first byte."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """What a header says of one tensor. `extent` is inside the file and overlaps no other tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    extent: Extent


def read_header(path: str, missing: CheckpointError) -> dict[str, Tensor]:
    """All tensors of the safetensors file at `path`, by name.

    Raises `missing` when there is no such file, and HeaderInvalid, TruncatedFile, OverlappingTensors,
    DanglingSymlink or ReadFailed.
    """
    with _opened(path, missing) as (file, size):
        start = _read(file, path, 0, min(size, len(_LFS_POINTER)))
        if start == _LFS_POINTER:
            raise HeaderInvalid(path=path, problem="it is a Git LFS pointer, its content was not fetched")
        if size < LENGTH_BYTES:
            raise TruncatedFile(path=path, size=size, expected=LENGTH_BYTES)
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        if length > HEADER_LIMIT:
            raise HeaderInvalid(path=path, problem=f"its length is {length} bytes, at most {HEADER_LIMIT} are allowed")
        data_start = LENGTH_BYTES + length
        if data_start > size:
            raise TruncatedFile(path=path, size=size, expected=data_start)
        text = _read(file, path, LENGTH_BYTES, length)
    try:
        tensors = _tensors(parse_json(text), path, data_start)
    except ValueError as error:
        raise HeaderInvalid(path=path, problem=str(error)) from error
    _check_extents(path, size, tensors)
    return {tensor.name: tensor for tensor in tensors}


def read_json(path: str, missing: CheckpointError) -> Any:
    """The JSON value in the file at `path`.

    Raises `missing` when there is no such file, ValueError with a one-line reason when it is no strict JSON
    of at most HEADER_LIMIT bytes, and DanglingSymlink or ReadFailed.
    """
    with _opened(path, missing) as (file, size):
        if size > HEADER_LIMIT:
            raise ValueError(f"has {size} bytes, at most {HEADER_LIMIT} are read")
        text = _read(file, path, 0, size)
    return parse_json(text)


def parse_json(text: bytes) -> Any:
    """Strict JSON in UTF-8: no duplicate keys, no NaN, no integer beyond 64 bits, no name that is no Unicode.

    Raises ValueError with a one-line reason.
    """
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_unique, parse_int=_small_int, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def shown(value: Any) -> str:
    """A value from a file as short printable ASCII, safe in a message and on the wire."""
    text = ascii(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def plain(name: str) -> str:
    """A name from a file, as it is where that is harmless in a message, else as `shown`."""
    return name if name.isprintable() and len(name) <= 120 else shown(name)


def dangling(path: str) -> DanglingSymlink | None:
    """The error that says which symlink on the way to `path` leads nowhere, and where it leads."""
    while path != os.path.dirname(path):
        if os.path.islink(path) and not os.path.exists(path):
            # the end of a chain of links, absolute: the file that has to be fetched
            target = os.fsencode(os.path.realpath(path)).decode("utf-8", "replace")
            return DanglingSymlink(path=path, target=target)
        path = os.path.dirname(path)
    return None


@contextmanager
def _opened(path: str, missing: CheckpointError) -> Iterator[tuple[int, int]]:
    """A descriptor of the regular file at `path`, and its size in bytes."""
    try:
        # O_NONBLOCK: a FIFO in place of a file must be refused, not waited for
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise dangling(path) or missing from error
    except OSError as error:
        raise ReadFailed(path=path, offset=0, problem=error.strerror or str(error)) from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ReadFailed(path=path, offset=0, problem="it is not a regular file")
        yield file, status.st_size
    finally:
        os.close(file)


def _read(file: int, path: str, offset: int, nbytes: int) -> bytes:
    pieces = []
    while nbytes:
        try:
            piece = os.pread(file, nbytes, offset)
        except OSError as error:
            raise ReadFailed(path=path, offset=offset, problem=error.strerror or str(error)) from error
        if not piece:  # shortened since it was opened
            raise TruncatedFile(path=path, size=offset, expected=offset + nbytes)
        pieces.append(piece)
        offset, nbytes = offset + len(piece), nbytes - len(piece)
    return b"".join(pieces)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)} is given twice")
    for key in result:
        if any("\ud800" <= letter <= "\udfff" for letter in key):
            raise ValueError(f"key {shown(key)} is not Unicode text")
    return result


def _small_int(text: str) -> int:
    # 20 digits hold every 64-bit integer with its sign; longer ones would cost time before they are refused
    if len(text) > 20 or not -(1 << 63) <= (number := int(text)) < 1 << 64:
        raise ValueError(f"integer {shown(text)} does not fit 64 bits")
    return number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _tensors(header: Any, path: str, data_start: int) -> list[Tensor]:
    """The header's entries. Raises ValueError with a one-line reason."""
    if not isinstance(header, dict):
        raise ValueError("is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{_METADATA} is not an object of strings")
    return [_tensor(name, entry, path, data_start) for name, entry in header.items()]


def _tensor(name: str, entry: Any, path: str, data_start: int) -> Tensor:
    if not isinstance(entry, dict):
        raise ValueError(f"{shown(name)} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise ValueError(f"the dtype of {shown(name)} is {shown(dtype)}")
    if not _are_sizes(shape):
        raise ValueError(f"the shape of {shown(name)} is {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"the data_offsets of {shown(name)} are {shown(offsets)}")
    begin, end = offsets
    return Tensor(name, dtype, tuple(shape), Extent(path, data_start + begin, end - begin))


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    # type() and not isinstance(): true is an int to Python and none to safetensors
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 62 for item in value)


def _check_extents(path: str, size: int, tensors: list[Tensor]) -> None:
    claims = sorted((t for t in tensors if t.extent.nbytes), key=lambda t: t.extent.offset)
    for first, second in pairwise(claims):
        if first.extent.offset + first.extent.nbytes > second.extent.offset:
            raise OverlappingTensors(path=path, first=plain(first.name), second=plain(second.name))
    promised = max((t.extent.offset + t.extent.nbytes for t in tensors), default=0)
    if promised > size:
        raise TruncatedFile(path=path, size=size, expected=promised)
