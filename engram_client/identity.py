"""Proof of content: which table is this, byte for byte?

A block digest is xxh3-128 over one canonical block as the checkpoint holds it: its values, then its scales.
The root is xxh3-128 over the geometry and all block digests in order. Neither depends on row format, on the
split into shards or on the backing, so two daemons that serve the same checkpoint agree. xxh3 finds damage
and mix-ups; it is no defence against someone who builds a collision on purpose.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import xxhash

from engram_client.layout import BLOCK_ROWS, ROW_VALUES, VALUES_PER_SCALE, TableGeometry

_DOMAIN = b"engram-table-1\0"
DIGEST_BYTES = 16


def new_digest() -> Any:
    """An empty running digest with `update(buffer)` and `digest() -> bytes` (16 bytes, big-endian)."""
    return xxhash.xxh3_128()


def block_digest(values: Any, scales: Any) -> bytes:
    """Digest of one block (or piece of one): buffers of `rows * 256` value and `rows * 8` scale bytes."""
    running = new_digest()
    running.update(values)
    running.update(scales)
    return bytes(running.digest())


def table_root(geometry: TableGeometry, block_digests: Iterable[bytes]) -> str:
    """The table's root as 32 hex digits, from the digests of all its blocks in order.

    Raises ValueError when the number or the length of the digests does not fit the geometry.
    """
    digests = list(block_digests)
    expected = -(-geometry.rows // BLOCK_ROWS)
    if len(digests) != expected or any(len(digest) != DIGEST_BYTES for digest in digests):
        raise ValueError(f"a table of {geometry.rows} rows has {expected} digests of {DIGEST_BYTES} bytes")
    running = new_digest()
    running.update(_DOMAIN)
    shape = (geometry.layer_id, ROW_VALUES, VALUES_PER_SCALE, BLOCK_ROWS, len(geometry.columns))
    running.update(struct.pack(f"<{len(shape)}Q{len(geometry.columns)}Q", *shape, *geometry.columns))
    for digest in digests:
        running.update(digest)
    return str(running.hexdigest())


class TableIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may demand and a daemon proves: the geometry, and the root over content and geometry.

    `root` is None where a daemon has not read every block (one node of several reads only its shards).
    """

    layer_id: int
    rows: int
    columns: tuple[int, ...]
    root: str | None

    @classmethod
    def of(cls, geometry: TableGeometry, root: str | None) -> TableIdentity:
        return cls(layer_id=geometry.layer_id, rows=geometry.rows, columns=geometry.columns, root=root)

    def differences(self, other: TableIdentity) -> tuple[str, ...]:
        """Names of the fields in which the two differ."""
        return tuple(name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name))
