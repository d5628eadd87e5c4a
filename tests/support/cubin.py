"""What a cubin says of its kernels' resources, read from the file itself.

The compiler's log says the same in words that differ from version to version, and some versions of cuda.core keep it
to themselves. A cubin is an ELF file; its section `.nv.info` is a list of attributes, each a format byte, a number, and
a size or value of 16 bits. Those read here have format 4 (a block of `size` bytes) and hold a symbol's index and a
number. Equal in NVRTC 12.9, 13.0 and 13.5, for which the section headers' own fields are not.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

_FRAME_SIZE: Final = 0x11
_MIN_STACK_SIZE: Final = 0x12
_REGISTERS: Final = 0x2F
_BLOCK: Final = 4
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL_BYTES: Final = 24


class Resources(NamedTuple):
    registers: int
    """A thread's."""
    frame_bytes: int
    """Memory of a thread's own, which spilled registers and arrays indexed at run time lie in."""
    stack_bytes: int
    """The frames of all functions that it may be in at once."""
    shared_bytes: int
    """A block's, as far as it is known when the kernel is compiled."""


class _Section(NamedTuple):
    data: bytes
    link: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """The kernels by name. Raises ValueError when `cubin` is no ELF file of 64 bits."""
    sections = _sections(cubin)
    names = _symbols(sections)
    found: dict[str, dict[int, int]] = {}
    for attribute, block in _attributes(sections[".nv.info"].data):
        if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE, _REGISTERS):
            symbol, value = struct.unpack("<II", block)
            found.setdefault(names[symbol], {})[attribute] = value
    kernels = [name.removeprefix(".nv.info.") for name in sections if name.startswith(".nv.info.")]
    return {
        name: Resources(
            found[name][_REGISTERS],
            found[name][_FRAME_SIZE],
            found[name][_MIN_STACK_SIZE],
            _size(cubin, f".nv.shared.{name}"),
        )
        for name in kernels
    }


def _headers(cubin: bytes) -> dict[str, tuple[int, ...]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("no ELF file of 64 bits")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, start + index * size) for index in range(count)]
    return {_text(cubin, headers[names][4] + header[0]): header for header in headers}


def _sections(cubin: bytes) -> dict[str, _Section]:
    """In the file's order."""
    return {
        name: _Section(cubin[header[4] : header[4] + header[5]], header[6]) for name, header in _headers(cubin).items()
    }


def _size(cubin: bytes, name: str) -> int:
    """Of a section, which need not lie in the file."""
    header = _headers(cubin).get(name)
    return header[5] if header else 0


def _symbols(sections: dict[str, _Section]) -> list[str]:
    """Names by index."""
    table = sections[".symtab"]
    texts = list(sections.values())[table.link].data
    starts = (struct.unpack_from("<I", table.data, at)[0] for at in range(0, len(table.data), _SYMBOL_BYTES))
    return [_text(texts, start) for start in starts]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(0, start)].decode()


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Those that have a block."""
    at = 0
    while at < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _BLOCK:
            yield attribute, data[at : at + size]
            at += size
