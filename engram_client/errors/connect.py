"""Between a client and the daemon, or between the clients of a group, until tables are mapped."""

from __future__ import annotations

from typing import Any

from engram_client.errors.base import EngramError


class ConnectError(EngramError):
    """Base of what can go wrong between a client and the daemon."""


class NoServer(ConnectError):
    template = "nothing is at {path}: no daemon was started there, or the socket folder is not mounted here"
    path: str


class ServerRefused(ConnectError):
    template = "{path} is there but nobody listens: the daemon died or is not up yet; start engram-server"
    path: str


class AccessDenied(ConnectError):
    template = (
        "uid {uid} may not use {path}: {problem}; run as the daemon's user, or add the uid to control.uids "
        "(or the gid to control.gids) and widen control.mode"
    )
    path: str
    uid: int
    problem: str


class ProtocolMismatch(ConnectError):
    template = "the client speaks protocol {client} and the daemon {server}; update the older of the two"
    client: int
    server: int


class ConnectTimeout(ConnectError):
    template = "no answer within {timeout_s} s while {doing}; last cause: {cause}"
    timeout_s: float
    doing: str
    cause: str


class TransferCut(ConnectError):
    template = "the connection ended while {doing}; the daemon stopped or crashed: see its log, then attach again"
    doing: str


class Evicted(ConnectError):
    template = (
        "lease {lease} was ended by engram-ctl evict; the mapped tables stay readable, attach again for a new lease"
    )
    lease: int


class ServerDraining(ConnectError):
    template = "the daemon is shutting down and takes no new clients; wait for the next one"


class LoadFailed(ConnectError):
    """The daemon could not load its tables; `cause` is its own error as a sentence."""

    template = "the daemon could not load its tables: {cause_code}: {cause}"
    cause_code: str
    cause: str


class IdentityMismatch(ConnectError):
    template = "layer {layer_id} is not the table demanded: {differing} differ (demanded {demanded}, served {served})"
    layer_id: int
    differing: list[str]
    demanded: dict[str, Any]
    served: dict[str, Any]


class TpSizeMismatch(ConnectError):
    template = (
        "the client's world_size is {client} and the daemon splits its tables over tp_size {server}; "
        'start them with equal sizes, or use "replication": "per_node", which any world_size may attach'
    )
    client: int
    server: int


class RankInvalid(ConnectError):
    template = "rank {rank} is not in [0, {world_size})"
    rank: int
    world_size: int


class RankOnOtherNode(ConnectError):
    template = (
        "rank {rank} is not of this node: the daemon is node_rank {node_rank} and holds the shards of ranks {held}; "
        "connect to the daemon of the rank's own node, or correct its node_rank"
    )
    rank: int
    node_rank: int
    held: list[int]


class UnknownLayer(ConnectError):
    template = "layer {layer_id} has no table here; the daemon serves layers {served}"
    layer_id: int
    served: list[int]


class TicketInvalid(ConnectError):
    template = "the ticket is unknown, used or expired; attach again"


class TooManyClients(ConnectError):
    template = "the daemon already has {limit} {what}; detach some clients"
    what: str
    limit: int


class TableDamaged(ConnectError):
    """A check found rows that are not those that were loaded. Ranks that are attached are not told: see status."""

    template = (
        "the table of layer {layer_id} is damaged in memory (segment {segment}); restart the daemon: it loads that "
        "table again"
    )
    layer_id: int
    segment: str


class NotPermitted(ConnectError):
    template = "{request} is for the daemon's own user (uid {owner}) or root: {problem}"
    request: str
    owner: int
    problem: str


class UnknownLease(ConnectError):
    template = "there is no lease {lease}; the leases held are {held}"
    lease: int
    held: list[int]


class FabricUnavailable(ConnectError):
    """A node cannot hand its shards to ranks of other nodes. Raised on all ranks of the group, wherever it is."""

    template = "peer_read across nodes needs FABRIC handles, and node {node_rank} has none: {problem}; {remedy}"
    node_rank: int
    problem: str
    remedy: str


class NodesDiffer(ConnectError):
    """Two ranks of a group that read together are attached to daemons with different tables. Raised on all ranks."""

    template = (
        "the daemons of ranks {rank} and {other_rank} (nodes {node} and {other_node}) do not serve the same "
        "tables: {differing} differ: {found} and {other_found}; start all nodes with the same engram.json but for "
        "node_rank, and the same checkpoint, and ask for the same layers on all ranks"
    )
    rank: int
    node: int
    other_rank: int
    other_node: int
    differing: list[str]
    found: dict[str, Any]
    other_found: dict[str, Any]


class RowsNotCovered(ConnectError):
    template = (
        "the shards that the ranks hold do not make up the table of layer {layer_id}: {problem}; start all nodes with "
        "the same tp_size and nnodes, and each with its own node_rank"
    )
    layer_id: int
    problem: str


class OtherRankFailed(ConnectError):
    """Ranks of several nodes attach together or not at all."""

    template = "rank {rank} could not attach, so no rank does: {cause_code}: {cause}"
    rank: int
    cause_code: str
    cause: str


class ExchangeFailed(ConnectError):
    template = (
        "the ranks of the group could not tell each other what they hold: {problem}; a rank has died, could not reach "
        "its daemon, or did not come within the group's timeout: see the other ranks' logs"
    )
    problem: str


class DeviceUnsupported(ConnectError):
    template = 'lookups on device {device!r} are not supported; use device "cpu" or "cuda:N"'
    device: str


class MapFailed(ConnectError):
    template = "mapping segment {segment} ({nbytes} bytes) failed: {problem}"
    segment: str
    nbytes: int
    problem: str
