"""What the daemon tells its loader child, and what it hears from it. No numpy, no sockets here."""

from __future__ import annotations

from typing import Any

import msgspec

from engram_client.layout import TableGeometry
from engram_client.protocol import Failed, LoadProgress, LoadReport, SegmentInfo
from engram_server.checkpoint import Extent, TableSource
from engram_server.config import Config
from engram_server.plan import HugePages, NumaPolicy, Plan

MAX_THREADS = 16
"""By default, for host memory; and for each GPU, whose link is another one."""
CHUNK_BYTES = 2 << 20
"""Values read at a time. They are digested and packed while they are in a cache; with less, threads
spend their time passing the interpreter lock round."""
DEVICE_CHUNK_BYTES = 8 << 20
"""Bytes read and copied at a time for GPU memory: at 50 GB/s a process does 6,000 of these a second, and each
must cost it little beside the copy."""
DEVICE_SLOT_BYTES = 1 << 20
"""The same for GPU memory out of the page cache, in C: all threads' slots fit the processor's caches, so that neither
the reads nor the GPU's wait for memory."""
DEVICE_SLOTS = 2
"""Slots a thread: it reads into one while the GPU fetches the others."""
DIRECT_CHUNK_BYTES = 4 << 20
"""The same where reads go to the device: it wants few and large ones."""


class LoadJob(msgspec.Struct, frozen=True, kw_only=True):
    """Which tables to load, from where, and how; which segments they go to is said beside it."""

    source: str
    """Where the rows come from, for the report."""
    tables: tuple[TableGeometry, ...]
    values: tuple[Extent, ...] = ()
    """The bytes of each table's values in a file, and its scales; both empty: dummy tables."""
    scales: tuple[Extent, ...] = ()
    seed: int = 0
    every_code: bool = False
    threads: int = 1
    direct_io: str = "auto"
    verify: str = "sample"
    huge_pages: HugePages = HugePages.THP
    huge_pages_required: bool = False
    numa: NumaPolicy = NumaPolicy("none")
    digests: bool = True
    """False only to measure what they cost: then there are no roots and nothing can be verified."""
    drop_cache: bool = True
    """False only to measure repeatedly out of the page cache."""
    chunk_bytes: int = CHUNK_BYTES
    direct_chunk_bytes: int = DIRECT_CHUNK_BYTES
    device_chunk_bytes: int = DEVICE_CHUNK_BYTES
    device_slot_bytes: int = DEVICE_SLOT_BYTES
    device_slots: int = DEVICE_SLOTS


def make_job(plan: Plan, config: Config, sources: tuple[TableSource, ...] | None, cpus: int) -> LoadJob:
    """The job of a plan. `sources`: the tables of the checkpoint, in the plan's order; None: dummy tables.
    `cpus`: of the machine, for load.threads 0."""
    gpus = {segment.device for segment in plan.segments if segment.device is not None}
    return LoadJob(
        source=config.model_path or "" if sources else f"dummy tables, seed {config.seed}",
        tables=plan.tables,
        values=tuple(source.values for source in sources or ()),
        scales=tuple(source.scales for source in sources or ()),
        seed=config.seed,
        threads=config.load.threads or max(1, min(cpus, MAX_THREADS * max(1, len(gpus)))),
        direct_io=config.load.direct_io,
        verify=config.load.verify,
        huge_pages=plan.huge_pages,
        huge_pages_required=plan.huge_pages_required,
        numa=plan.numa,
    )


class CutBlock(msgspec.Struct, frozen=True):
    """A canonical block that borders of segments cut, and that this node has whole; `table` counts in the job."""

    table: int
    block: int


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="order"):
    """Parent to child: the job, the segments to fill, and their descriptors as the child inherits them."""

    job: LoadJob
    segments: tuple[SegmentInfo, ...]
    fds: tuple[int, ...]
    cut_blocks: tuple[CutBlock, ...] = ()
    """Blocks of GPU memory that this child is to digest from their source, as nobody else has them whole."""


class ProgressUpdate(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="progress_update"):
    progress: LoadProgress


class PieceDigest(msgspec.Struct, frozen=True):
    """Digest of the rows `[row_start, row_stop)` of a table, as the checkpoint holds them (values, then
    scales): what one segment has of one canonical block."""

    row_start: int
    row_stop: int
    digest: bytes


class BlockDigest(msgspec.Struct, frozen=True):
    """Digest of one canonical block of a layer's table."""

    layer_id: int
    block: int
    digest: bytes


class PartResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="part_result"):
    """What one child found out; load_parts.py makes a LoadResult of all of them."""

    report: LoadReport
    phase_seconds: dict[str, float]
    blocks: tuple[BlockDigest, ...]
    """Of the blocks that this child knows whole."""
    pieces: dict[str, tuple[PieceDigest, ...]]
    huge_bytes: dict[str, int]
    remarks: tuple[str, ...]


class LoadResult(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="load_result"):
    report: LoadReport
    roots: dict[int, str | None]
    """Root of each layer's table; None where this node has not read every block."""
    block_digests: dict[int, tuple[bytes, ...]]
    """Digests of all canonical blocks of a layer; empty where its root is None."""
    pieces: dict[str, tuple[PieceDigest, ...]]
    """By segment id, what `verify` compares its memory with."""
    huge_bytes: dict[str, int]
    """By segment id, bytes in pages of 2 MiB or more."""
    remarks: tuple[str, ...]
    phase_seconds: dict[str, float] = {}
    """By phase of the load, of the child that took longest."""


class CheckOrder(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="check_order"):
    """Parent to child: pieces of segments to digest again."""

    segments: tuple[SegmentInfo, ...]
    fds: tuple[int, ...]
    pieces: dict[str, tuple[PieceDigest, ...]]
    """By segment id."""
    threads: int
    gentle: bool
    """Whether everything else on the machine goes first."""


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="checked"):
    """How a check ended."""

    nbytes: int
    seconds: float
    damage: tuple[Failed, ...]
    """A DigestMismatch for each piece that is not what was loaded."""


CheckMessage = ProgressUpdate | Checked | Failed
ChildMessage = ProgressUpdate | PartResult | Failed

_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """A message as it goes over the stream between parent and child: its length, then its msgpack bytes."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


async def read_message(reader: Any, kind: Any) -> Any:
    """The next message of an asyncio stream as `kind`. Raises IncompleteReadError at its end."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(await reader.readexactly(length), type=kind)


def receive_message(stream: Any, kind: Any) -> Any:
    """The next message of a blocking file object as `kind`. Raises EOFError at its end."""
    head = stream.read(_LENGTH_BYTES)
    body = stream.read(int.from_bytes(head, "big")) if len(head) == _LENGTH_BYTES else b""
    if not body:
        raise EOFError("the parent closed the connection")
    return msgspec.msgpack.decode(body, type=kind)
