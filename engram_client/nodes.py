"""How ranks attach together, where each reads the shards of all nodes in place, or parts of a table for the others.

    offers      each rank's own shards with their FABRIC handles, or why it has none     from each to all
    agreement   whether each could map all of them                                       from each to all

Both are collectives of the caller's group, and every rank comes to them, also one that has failed: so that all
raise and nobody waits for a rank that has given up. Without torch until ranks meet.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from engram_client.control import query_status
from engram_client.errors import (
    EngramError,
    ExchangeFailed,
    FabricUnavailable,
    GroupNeeded,
    InternalError,
    NodesDiffer,
    OtherRankFailed,
    RowsNotCovered,
    SplitReadsRefused,
)
from engram_client.layout import TableGeometry
from engram_client.protocol import (
    MAX_REPLY_BYTES,
    Attached,
    Done,
    FabricHandle,
    Failed,
    Offer,
    Progress,
    RankMessage,
    ResolvedOptions,
    Secret,
    SegmentInfo,
    State,
    TableInfo,
    decode,
    encode,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


class _Next(enum.Enum):
    """Which collective this rank owes the others."""

    UNKNOWN = enum.auto()
    OFFERS = enum.auto()
    AGREEMENT = enum.auto()
    NOTHING = enum.auto()


class Nodes:
    """One rank's part in attaching together: `expect`, then `exchange` and `agree`; `give_up` from anywhere."""

    def __init__(
        self,
        endpoint: str,
        handover: str | None,
        rank: int,
        world_size: int,
        group: ProcessGroup | None,
        split_reads: bool = False,
    ) -> None:
        self._endpoint = endpoint
        self._handover = handover
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self.split_reads = split_reads and world_size > 1
        """Whether the ranks share out the reads of tables that each of them has whole."""
        self.ordinal: int | None = None
        """This rank's GPU."""
        self._options: ResolvedOptions | None = None
        self._asked_at = State.STARTING
        self._next = _Next.UNKNOWN

    def __repr__(self) -> str:
        return f"<Nodes, rank {self._rank} of {self._world_size}: {self._next.name.lower()} next>"

    def hear(self, progress: Progress) -> None:
        """Of a daemon that loads. Should that fail, the daemon ends and cannot be asked any more what it was for, so it
        is asked now: once in each state, as it does not know before it loads."""
        if self._next is _Next.UNKNOWN and progress.state is not self._asked_at:
            self._asked_at = progress.state
            try:
                self._expected()
            except Exception as error:  # of any kind: this rank has not failed
                log.debug("while the daemon loads: %r", error)

    def expect(self, options: ResolvedOptions) -> bool:
        """Whether ranks meet, now that the options are known. From then on the others wait for this one.

        Raises GroupNeeded, GroupInvalid, GroupRankMismatch or SplitReadsRefused.
        """
        self._next = _Next.NOTHING
        if not self.split_reads and not options.reads_across_nodes:
            return False
        from engram_client import group as groups  # brings torch, which a rank has

        if options.reads_across_nodes and not groups.is_there():
            raise GroupNeeded(nnodes=options.nnodes)
        if self._is_for(options):  # also when this rank is not the one it says: the others need not know
            self._next = _Next.OFFERS
        if self.split_reads and not options.whole_in_host_memory:  # maybe here alone, while others' daemons serve both
            raise SplitReadsRefused(placement=options.placement, replication=options.replication)
        groups.check(self._group, self._rank, self._world_size)
        return True

    def _is_for(self, options: ResolvedOptions) -> bool:
        """Whether the group is one whose ranks meet: who is in another cannot come to the collectives of this."""
        from engram_client import group as groups

        if self.split_reads:  # the ranks' own wish, whatever their daemons say
            return groups.size(self._group) == self._world_size
        return options.reads_across_nodes and groups.size(self._group) == options.tp_size

    def compare(self, attached: Attached) -> None:
        """Whether all ranks have the same tables, of which each is about to read parts for the others. Raises, on all
        ranks, NodesDiffer, OtherRankFailed or ExchangeFailed."""
        import torch

        from engram_client.lookup.split import splits_from
        from engram_client.lookup.wire import Wire

        device = torch.device("cpu" if self.ordinal is None else "cuda")
        mine = Offer(
            rank=self._rank,
            options=attached.options,
            tables=_own(attached, self._rank),
            handles=(),
            splits_from=splits_from(Wire(self._group, self._rank, self._world_size, device)),
        )
        check_equal([cast("Offer", message) for message in self._meet(mine)])
        self._next = _Next.AGREEMENT

    def exchange(
        self, attached: Attached, handles: Sequence[FabricHandle]
    ) -> tuple[tuple[TableInfo, ...], dict[str, bytes]]:
        """The tables with the segments of all ranks, and the handles of those on other nodes by segment id.

        handles: of this rank's own shards. Raises, on all ranks, FabricUnavailable, NodesDiffer, RowsNotCovered,
        OtherRankFailed or ExchangeFailed.
        """
        options = attached.options
        mine = Offer(rank=self._rank, options=options, tables=_own(attached, self._rank), handles=tuple(handles))
        offers = [cast("Offer", message) for message in self._meet(mine)]
        check_offers(offers)
        self._next = _Next.AGREEMENT
        return merged(attached, offers), {
            each.segment: Secret(each.handle)
            for offer in offers
            if offer.options.node_rank != options.node_rank
            for each in offer.handles
        }

    def agree(self) -> None:
        """This rank has mapped everything. Raises OtherRankFailed or ExchangeFailed when not all ranks have."""
        if self._next is _Next.AGREEMENT:
            self._meet(Done())

    def give_up(self, error: Exception) -> None:
        """Tells the others, where they wait for this rank, that it failed with `error`, which its caller then raises.
        Raises nothing."""
        if not isinstance(error, EngramError):
            error = InternalError(doing="attaching", problem=repr(error)[:500])
        try:
            if self._next is not _Next.NOTHING and (self._next is not _Next.UNKNOWN or self._expected()):
                self._meet(_as_message(error))
        except Exception as other:  # of any kind: what is raised must be what this rank failed with
            log.debug("after %s: %r", error.code, other)

    def _expected(self) -> bool:
        """Whether the others will come to exchange offers; asked by a rank that failed before it could know."""
        if "torch.distributed" not in sys.modules:
            return False
        from engram_client import group as groups

        size = groups.size(self._group)
        if size < 2 or self.split_reads:
            return size > 1 and size == self._world_size
        with contextlib.suppress(EngramError):  # what it said before counts when it is gone
            self._options = query_status(self._endpoint, timeout=0, handover=self._handover).options or self._options
        return self._options is not None and self._is_for(self._options)

    def _meet(self, mine: RankMessage) -> list[RankMessage]:
        """What all ranks say, if none has failed. Raises what `_failure_of` finds, and ExchangeFailed."""
        from engram_client import group as groups

        frame = Secret(encode(mine))
        self._next = _Next.NOTHING  # whatever comes of it, it has been one
        heard: list[RankMessage] = [
            decode(Secret(each), RankMessage)[1]
            for each in groups.gather_bytes(frame, self._group, self.ordinal, MAX_REPLY_BYTES)
        ]
        for rank, message in enumerate(heard):
            if isinstance(message, Failed):
                raise _failure(rank, message)
            if type(message) is not type(mine) and not isinstance(mine, Failed):
                raise ExchangeFailed(problem=f"rank {rank} sends a {type(message).__name__}")
        return heard


def _as_message(error: EngramError) -> Failed:
    """One that can be sent, or the others would wait for it."""
    failed = Failed.of(error)
    try:
        encode(failed)
    except Exception as wrong:  # too long, or with a number that msgpack has no room for
        return Failed.of(InternalError(doing="attaching", problem=f"{error.code}, which cannot be sent ({wrong!r})"))
    return failed


def _failure(rank: int, message: Failed) -> EngramError:
    error = message.error()
    if isinstance(error, FabricUnavailable):  # about the domain, and not about that rank
        return error
    return OtherRankFailed(rank=rank, cause_code=error.code, cause=str(error)[:1000])


def _own(attached: Attached, rank: int) -> tuple[TableInfo, ...]:
    return tuple(
        msgspec.structs.replace(table, segments=tuple(one for one in table.segments if one.rank == rank))
        for table in attached.tables
    )


def check_offers(offers: Sequence[Offer]) -> None:
    """Whether the shards offered make up the same tables for all. Equal on all ranks, in rank order.

    Raises NodesDiffer or RowsNotCovered.
    """
    check_equal(offers)
    for table in offers[0].tables:
        layer = table.geometry.layer_id
        check_cover(table.geometry, [one for offer in offers for one in _of_layer(offer, layer).segments])


def check_equal(offers: Sequence[Offer]) -> None:
    """Whether all ranks have the same tables. Raises NodesDiffer."""
    first = offers[0]
    for offer in offers[1:]:
        found, other = _compared(first), _compared(offer)
        differing = [
            name
            for name in dict.fromkeys((*found, *other))
            if found.get(name) != other.get(name) and not (_proof(name) and None in (found.get(name), other.get(name)))
        ]
        if differing:
            raise NodesDiffer(
                rank=first.rank,
                node=first.options.node_rank,
                other_rank=offer.rank,
                other_node=offer.options.node_rank,
                differing=differing,
                found={name: found.get(name) for name in differing},
                other_found={name: other.get(name) for name in differing},
            )


def check_cover(geometry: TableGeometry, segments: Sequence[SegmentInfo]) -> None:
    """Raises RowsNotCovered unless each row of the table is in exactly one of the segments."""
    row = 0
    for segment in sorted(segments, key=lambda one: (one.shard.row_start, one.shard.row_stop)):
        if not segment.shard.rows:
            continue
        if segment.shard.row_start != row:
            held = "by nobody" if segment.shard.row_start > row else "twice"
            low, high = sorted((row, segment.shard.row_start))
            raise RowsNotCovered(layer_id=geometry.layer_id, problem=f"rows {low} to {high} are held {held}")
        row = segment.shard.row_stop
    if row != geometry.rows:
        raise RowsNotCovered(layer_id=geometry.layer_id, problem=f"rows {row} to {geometry.rows} are held by nobody")
    if twice := [name for name, count in Counter(one.id for one in segments).items() if count > 1]:
        raise RowsNotCovered(layer_id=geometry.layer_id, problem=f"two ranks offer segment {twice[0]}")


def merged(attached: Attached, offers: Sequence[Offer]) -> tuple[TableInfo, ...]:
    """The tables with this node's segments, as its daemon handed them out, and those of the other nodes."""
    node = attached.options.node_rank
    return tuple(
        msgspec.structs.replace(
            table,
            segments=table.segments
            + tuple(
                segment
                for offer in offers
                if offer.options.node_rank != node
                for segment in _of_layer(offer, table.geometry.layer_id).segments
            ),
        )
        for table in attached.tables
    )


def _of_layer(offer: Offer, layer: int) -> TableInfo:
    return next(table for table in offer.tables if table.geometry.layer_id == layer)


def _compared(offer: Offer) -> dict[str, Any]:
    """What must be equal on all ranks, by a name that a person can follow."""
    options: ResolvedOptions = msgspec.structs.replace(offer.options, node_rank=0)
    compared: dict[str, Any] = msgspec.to_builtins(options)
    compared["splits_from"] = offer.splits_from
    compared["layers"] = [table.geometry.layer_id for table in offer.tables]
    for table in offer.tables:
        name = f"layer {table.geometry.layer_id}"
        compared[f"{name} rows"] = table.geometry.rows
        compared[f"{name} columns"] = list(table.geometry.columns)
        compared[f"{name} row format"] = next((str(one.row_format) for one in table.segments), None)
        compared[f"{name} root"] = table.identity.root
        compared[f"{name} sample"] = table.sample
    return compared


def _proof(name: str) -> bool:
    """Whether a node may have none of it: one that holds part of a table knows no root, one without a shard no
    format."""
    return name.endswith((" root", " sample", " row format"))
