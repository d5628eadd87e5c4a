"""A daemon as its metrics and its page see it, made up."""

from __future__ import annotations

from typing import Any

from engram_client.errors import RankInvalid
from engram_client.identity import TableIdentity
from engram_client.layout import RowFormat, TableGeometry, whole
from engram_client.protocol import (
    Backing,
    LeaseStatus,
    LoadProgress,
    LookupCounters,
    SegmentInfo,
    SegmentStatus,
    State,
    StatusReply,
    TableInfo,
)
from engram_server.metrics import Snapshot
from engram_server.tally import Tally

GEOMETRY = TableGeometry(layer_id=1, columns=(5, 7))


def status(state: State = State.READY, name: str = "engine", **changes: Any) -> StatusReply:
    segment = SegmentInfo(
        id="L1",
        layer_id=1,
        shard=whole(GEOMETRY),
        rank=None,
        nbytes=4096,
        backing=Backing.MEMFD,
        row_format=RowFormat.PACKED,
        page_bytes=4096,
    )
    lease = LeaseStatus(
        id=3,
        pid=7,
        uid=8,
        gid=9,
        name=name,
        rank=0,
        world_size=1,
        device="cpu",
        layers=(1,),
        age_s=12.5,
        last_seen_s=1.0,
        lookups=LookupCounters(rows=24),
    )
    facts: dict[str, Any] = {
        "state": state,
        "version": "1",
        "epoch": "e",
        "pid": 1,
        "uptime_s": 3.0,
        "options": None,
        "backing_reason": "",
        "load": LoadProgress(phase="loading", done_bytes=1, total_bytes=4, elapsed_s=0.5),
        "report": None,
        "tables": (TableInfo(geometry=GEOMETRY, identity=TableIdentity.of(GEOMETRY, "ab" * 16), segments=(segment,)),),
        "segments": (SegmentStatus(info=segment, huge_bytes=2048, numa="none"),),
        "leases": (lease,),
        "lease_count": 1,
        "failure": None,
        "adopted": False,
        "outlook": "",
        "check": None,
    }
    return StatusReply(**facts | changes)


def snapshot(state: State = State.READY, name: str = "engine", **changes: Any) -> Snapshot:
    tally = Tally()
    tally.attach_s.observe(0.03)
    for _ in range(2):
        tally.count_refused("attach", RankInvalid(rank=2, world_size=1))
    tally.count_verified(ok=True)
    return Snapshot.of(
        status(state, name, **changes), LookupCounters(rows=48, invalid_ids=5, prefetch_late=1), 4, tally
    )
