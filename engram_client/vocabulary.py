"""What messages are about: the choices of a configuration, segments and tables, options, progress, leases, reports.

Parts of messages, which engram_client/protocol.py puts on the wire; it has all these names too.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec

from engram_client.identity import TableIdentity
from engram_client.layout import RowFormat, Shard, TableGeometry


class Placement(enum.StrEnum):
    GPU = "gpu"
    CPU = "cpu"


class Replication(enum.StrEnum):
    NONE = "none"
    PER_NODE = "per_node"


class Lookup(enum.StrEnum):
    COLLECTIVE = "collective"
    PEER_READ = "peer_read"


class Backing(enum.StrEnum):
    MEMFD = "memfd"
    POSIX_SHM = "posix_shm"
    FILE = "file"
    CUDA_HOST = "cuda_host"
    CUDA_DEVICE = "cuda_device"


class State(enum.StrEnum):
    """What the daemon is doing; the transitions are in `engram_server/state.py`."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DEGRADED = "degraded"
    """Serves, but a check has found damage; the damaged tables are not handed out any more."""
    DRAINING = "draining"
    FAILED = "failed"


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ShortText = Annotated[str, msgspec.Meta(max_length=256)]
"""What a client says about itself: room for any file name, and a status reply of many leases still fits its limit."""


class SegmentInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One segment: which rows it holds, how, and in what memory. `id` is unique within a daemon's life."""

    id: str
    layer_id: int
    shard: Shard
    rank: int | None
    """The rank whose shard it is; None where it is the whole table."""
    nbytes: int
    """Bytes of memory, a multiple of `page_bytes`; the rows take the first `shard.rows * 264`."""
    backing: Backing
    row_format: RowFormat
    page_bytes: int
    """Page size the mapping should be aligned to."""
    device: str | None = None
    """UUID of the GPU whose memory it is ("GPU-..."); None for host memory. Never an ordinal: processes see
    different ones."""


class Secret(bytes):
    """Bytes that do not show themselves: what reports an error may send the variables of its frames along."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<secret>"

    __str__ = __repr__


class FabricHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A segment in GPU memory for ranks of other nodes in the NVLink domain.

    A secret: whoever has the bytes, and an IMEX channel of the domain, can map the memory, for writing too. It
    travels from a daemon to an attached rank and between the ranks of a group, and is shown nowhere.
    """

    segment: str
    handle: Annotated[bytes, msgspec.Meta(max_length=64)]

    def __repr__(self) -> str:
        return f"FabricHandle(segment={self.segment!r}, handle=<secret>)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("segment", self.segment)]


class TableInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table as a client sees it: its geometry, the proof of its content, and the segments handed out."""

    geometry: TableGeometry
    identity: TableIdentity
    segments: tuple[SegmentInfo, ...]
    sample: str | None = None
    """Digest of rows from all over the table, as the checkpoint holds them: where the ranks of several nodes hold
    a table no node has read all of it, and identity has no root. None on one node."""


class ResolvedOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the daemon made of `engram_config`."""

    placement: Placement
    replication: Replication
    lookup: Lookup
    tp_size: int
    nnodes: int
    node_rank: int

    @property
    def ranks_of_node(self) -> range:
        """The ranks whose shards this node holds, where replication is none."""
        count = self.tp_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def reads_across_nodes(self) -> bool:
        """Whether each rank maps the shards of all nodes, so that ranks exchange FABRIC handles when they attach."""
        split = self.placement is Placement.GPU and self.replication is Replication.NONE
        return split and self.lookup is Lookup.PEER_READ and self.nnodes > 1

    @property
    def whole_in_host_memory(self) -> bool:
        """Whether every rank maps whole tables in its node's host memory, so that reads can be split."""
        return self.placement is Placement.CPU and self.replication is Replication.PER_NODE


class LoadProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    phase: str
    """starting, allocating, loading, digesting (GPU memory), verifying or sealing"""
    done_bytes: int
    total_bytes: int
    elapsed_s: float


class SegmentStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    info: SegmentInfo
    huge_bytes: int
    """Bytes mapped by pages of 2 MiB or more, as read after the fill."""
    numa: str


class LookupCounters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rank has looked up since it attached. Replays of a CUDA graph are not seen, its capture is."""

    rows: Count = 0
    """Ids looked up, padding included."""
    invalid_ids: Count = 0
    prefetch_hits: Count = 0
    """Prefetches whose rows were there when they were waited for."""
    prefetch_late: Count = 0
    """Prefetches that had to be waited for."""


class LeaseStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attached client. `pid` is as the daemon's PID namespace sees it, 0 if it cannot."""

    id: int
    pid: int
    uid: int
    gid: int
    name: str
    rank: int
    world_size: int
    device: str
    layers: tuple[int, ...]
    age_s: float
    last_seen_s: float = 0.0
    """Seconds since its process last gave a sign of life: many times BEAT_INTERVAL_S mean that it hangs."""
    lookups: LookupCounters = LookupCounters()
    """As the client last reported them."""


class LoadReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the tables came into memory."""

    source: str
    bytes_read: int
    seconds: float
    """Wall time from the start of the loader to its end."""
    allocate_seconds: float
    fill_seconds: float
    verify_seconds: float
    direct_io: bool
    threads: int
    peak_rss_bytes: int
    """Peak resident memory of the loader, without the segments' own pages."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_read / self.fill_seconds if self.fill_seconds > 0 else 0.0


class CheckState(enum.StrEnum):
    RUNNING = "running"
    PASSED = "passed"
    DAMAGED = "damaged"
    FAILED = "failed"
    """It could not be carried out, and says nothing about the rows."""


class CheckStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The latest check of the memory against the digests of the load."""

    state: CheckState
    done_bytes: int
    total_bytes: int
    elapsed_s: float
    damage: tuple[str, ...]
    """Each damaged piece in words: segment, rows, digests."""
    problem: str | None
    """Why it could not be carried out."""
