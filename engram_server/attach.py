"""Which segments an Attach is given, or why it is refused. Pure: no sockets, no state of its own."""

from __future__ import annotations

import msgspec

from engram_client.errors import (
    IdentityMismatch,
    NotAllowedNow,
    RankInvalid,
    RankOnOtherNode,
    TableDamaged,
    TooManyClients,
    TpSizeMismatch,
    UnknownLayer,
)
from engram_client.identity import TableIdentity
from engram_client.protocol import Attach, Attached, Lookup, Placement, Replication, ResolvedOptions, State, TableInfo
from engram_server import state
from engram_server.leases import Grant, Leases


def check_wait(waiting: int, limit: int) -> None:
    if waiting >= limit:
        raise TooManyClients(what="waiting clients", limit=limit)


def answer(
    request: Attach,
    current: State,
    epoch: str,
    options: ResolvedOptions | None,
    tables: tuple[TableInfo, ...],
    leases: Leases,
    damaged: frozenset[str] = frozenset(),
) -> Attached:
    """The tables `request` asks for, with a ticket for their descriptors.

    `damaged`: segments that are not handed out any more, by id.
    Raises NotAllowedNow, RankInvalid, TpSizeMismatch, RankOnOtherNode, UnknownLayer, IdentityMismatch, TableDamaged or
    TooManyClients.
    """
    if current not in state.RULES[Attach].answered or options is None:
        raise NotAllowedNow(request="attach", state=current.value)
    if not 0 <= request.rank < request.world_size:
        raise RankInvalid(rank=request.rank, world_size=request.world_size)
    if options.replication is Replication.NONE and request.world_size != options.tp_size:
        raise TpSizeMismatch(client=request.world_size, server=options.tp_size)
    if options.replication is Replication.NONE and request.rank not in options.ranks_of_node:
        raise RankOnOtherNode(rank=request.rank, node_rank=options.node_rank, held=list(options.ranks_of_node))
    chosen = _choose(request, tables)
    _demand(request, tables)
    # A peer read maps the shards of all ranks of this node; otherwise a rank gets its own.
    every = options.placement is Placement.GPU and options.lookup is Lookup.PEER_READ
    handed = tuple(
        msgspec.structs.replace(
            table, segments=tuple(s for s in table.segments if every or s.rank is None or s.rank == request.rank)
        )
        for table in chosen
    )
    for segment in (segment for table in handed for segment in table.segments):
        if segment.id in damaged:
            raise TableDamaged(layer_id=segment.layer_id, segment=segment.id)
    ticket = leases.issue(
        Grant(
            segments=tuple(segment.id for table in handed for segment in table.segments),
            layers=tuple(table.geometry.layer_id for table in handed),
            rank=request.rank,
            world_size=request.world_size,
            device=_printable(request.device),
            name=_printable(request.name),
        )
    )
    return Attached(epoch=epoch, options=options, tables=handed, ticket=ticket)


def _printable(text: str) -> str:
    """What a client says about itself, for one line of a log and for a terminal that obeys control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:64])


def _choose(request: Attach, tables: tuple[TableInfo, ...]) -> tuple[TableInfo, ...]:
    by_layer = {table.geometry.layer_id: table for table in tables}
    asked = tuple(by_layer) if request.layers is None else tuple(dict.fromkeys(request.layers))
    for layer in (*asked, *(demand.layer_id for demand in request.identity), *map(int, request.roots)):
        if layer not in by_layer:
            raise UnknownLayer(layer_id=layer, served=list(by_layer))
    return tuple(by_layer[layer] for layer in asked)


def _demand(request: Attach, tables: tuple[TableInfo, ...]) -> None:
    """Also of tables that are not asked for: a demand that nobody looks at would seem to hold."""
    demanded = {demand.layer_id: demand for demand in request.identity}
    roots = {int(layer): root for layer, root in request.roots.items()}
    for table in tables:
        layer, served = table.geometry.layer_id, table.identity
        wanted = demanded.get(layer, served)
        if layer in roots:
            wanted = msgspec.structs.replace(wanted, root=roots[layer])
        if differing := wanted.differences(served):
            raise IdentityMismatch(
                layer_id=layer, differing=list(differing), demanded=_plain(wanted), served=_plain(served)
            )


def _plain(identity: TableIdentity) -> dict[str, object]:
    plain: dict[str, object] = msgspec.to_builtins(identity)
    return plain
