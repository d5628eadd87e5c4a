"""The messages between daemon and clients, their codec and limits. No sockets here.

One codec serves both sides and both sockets. A frame is a msgpack map `{"v", "id", "body"}`; the body is a
map whose "type" names the message. Unknown fields, unknown types, wrong types and oversized frames are
refused. `v` is read first, so that two versions tell each other what they are instead of failing to parse.

    control socket (ZeroMQ)         Status -> StatusReply;  Attach -> Progress* -> Attached;
                                    Verify, Evict, Drain -> Done;  SetLogLevel -> LogLevelReply;
                                    Report -> nothing;  any -> Failed
    handover socket (SEQPACKET)     <- Greeting;  Redeem -> Granted* with descriptors, then Beat*;
                                    Export -> Exported;  Authorize -> Authorized;  any -> Failed
    the ranks' own group            Offer or Failed, then Done or Failed, from each to all

The handover connection is opened first and, once its tickets are redeemed, is the client's lease: the kernel
closes it when the client dies.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeVar, get_args

import msgpack
import msgspec

from engram_client.endpoint import DEFAULT_ENDPOINT as DEFAULT_ENDPOINT
from engram_client.endpoint import MAX_SOCKET_PATH as MAX_SOCKET_PATH
from engram_client.endpoint import check_socket_path as check_socket_path
from engram_client.endpoint import endpoint_tag as endpoint_tag
from engram_client.endpoint import handover_path as handover_path
from engram_client.endpoint import ipc_path as ipc_path
from engram_client.errors import (
    EngramError,
    FrameTooLarge,
    MalformedMessage,
    ProtocolMismatch,
    UnknownMessage,
    from_wire,
    to_wire,
)
from engram_client.identity import TableIdentity
from engram_client.vocabulary import Backing as Backing
from engram_client.vocabulary import CheckState as CheckState
from engram_client.vocabulary import CheckStatus as CheckStatus
from engram_client.vocabulary import Count as Count
from engram_client.vocabulary import FabricHandle as FabricHandle
from engram_client.vocabulary import LeaseStatus as LeaseStatus
from engram_client.vocabulary import LoadProgress as LoadProgress
from engram_client.vocabulary import LoadReport as LoadReport
from engram_client.vocabulary import LogLevel as LogLevel
from engram_client.vocabulary import Lookup as Lookup
from engram_client.vocabulary import LookupCounters as LookupCounters
from engram_client.vocabulary import Placement as Placement
from engram_client.vocabulary import Replication as Replication
from engram_client.vocabulary import ResolvedOptions as ResolvedOptions
from engram_client.vocabulary import Secret as Secret
from engram_client.vocabulary import SegmentInfo as SegmentInfo
from engram_client.vocabulary import SegmentStatus as SegmentStatus
from engram_client.vocabulary import ShortText as ShortText
from engram_client.vocabulary import State as State
from engram_client.vocabulary import TableInfo as TableInfo

PROTOCOL_VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 64 << 10
MAX_REPLY_BYTES: Final = 1 << 20
MAX_HANDOVER_BYTES: Final = 64 << 10
MAX_DEPTH: Final = 32
"""Maps and arrays inside each other; the deepest message has 7. Deeper frames would exhaust Python's stack."""
MAX_FDS_PER_MESSAGE: Final = 253
"""SCM_MAX_FD of the Linux kernel: one more is EINVAL."""
TICKET_BYTES: Final = 32
TICKET_LIFETIME_S: Final = 10.0
BEAT_INTERVAL_S: Final = 5.0
"""How often an attached client shows that its process runs."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    pass


# Control socket, client to daemon


class Attach(_Message, frozen=True, tag="attach"):
    """Asks for the tables. While the daemon loads, Progress comes until Attached or Failed does.

    `identity` demands roots by layer. Sending it again is harmless: unused tickets expire.
    """

    rank: int
    world_size: int
    device: ShortText
    name: ShortText
    layers: tuple[int, ...] | None = None
    identity: tuple[TableIdentity, ...] = ()
    roots: dict[Annotated[str, msgspec.Meta(pattern="^[0-9]{1,9}$")], str] = {}
    """Roots demanded without geometry, by layer id in decimal."""
    wait: bool = True
    """False: Failed(NotAllowedNow) at once when the daemon is not ready."""


class Status(_Message, frozen=True, tag="status"):
    """Asks for the daemon's state. Changes nothing."""


class Report(_Message, frozen=True, tag="report"):
    """An attached client's counters, at most once a second; totals, so that a lost one costs nothing.

    The only request without a reply. One of another epoch or of a lease that has ended is passed over.
    """

    epoch: ShortText
    lease: Count
    lookups: LookupCounters
    attach_s: Annotated[float, msgspec.Meta(ge=0)]
    """How long connect() took, the wait for a load included."""


Permit = Annotated[bytes, msgspec.Meta(max_length=64)]
"""From Authorize on the handover socket: the control socket cannot tell who is at its other end."""


class Verify(_Message, frozen=True, tag="verify"):
    """Starts a full check in the background, unless one runs; Status tells how it goes. Answered by Done."""

    permit: Permit


class Evict(_Message, frozen=True, tag="evict"):
    """Ends a lease. Its holder keeps what it has mapped. Answered by Done."""

    permit: Permit
    lease: int


class Drain(_Message, frozen=True, tag="drain"):
    """Ends the daemon as SIGTERM does; with `free`, memory that would be kept for the next one too. Answered by
    Done."""

    permit: Permit
    free: bool = False


class SetLogLevel(_Message, frozen=True, tag="set_log_level"):
    """Asks what the daemon logs, and changes it where `level` is given."""

    permit: Permit
    level: LogLevel | None = None


# Control socket, daemon to client


class Progress(_Message, frozen=True, tag="progress"):
    state: State
    load: LoadProgress | None


class Attached(_Message, frozen=True, tag="attached"):
    """The tables, and the ticket that the handover socket turns into their descriptors."""

    epoch: str
    options: ResolvedOptions
    tables: tuple[TableInfo, ...]
    ticket: bytes


class StatusReply(_Message, frozen=True, tag="status_reply"):
    state: State
    version: str
    epoch: str
    pid: int
    uptime_s: float
    options: ResolvedOptions | None
    backing_reason: str
    load: LoadProgress | None
    report: LoadReport | None
    tables: tuple[TableInfo, ...]
    segments: tuple[SegmentStatus, ...]
    leases: tuple[LeaseStatus, ...]
    """As many as a frame holds."""
    lease_count: int
    failure: str | None
    adopted: bool = False
    """Whether the tables were taken over from an earlier daemon, and nothing was loaded."""
    outlook: str = ""
    """What a restart of the daemon will cost, in words."""
    check: CheckStatus | None = None


class Done(_Message, frozen=True, tag="done"):
    """What was asked for has been done, or has begun."""


class LogLevelReply(_Message, frozen=True, tag="log_level_reply"):
    level: LogLevel
    previous: LogLevel


class Failed(_Message, frozen=True, tag="failed"):
    """A failure as data; `error()` rebuilds the class it was."""

    code: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: EngramError) -> Failed:
        code, fields = to_wire(error)
        return cls(code=code, fields=fields)

    def error(self) -> EngramError:
        return from_wire(self.code, self.fields)


# Handover socket


class Greeting(_Message, frozen=True, tag="greeting"):
    """The daemon's first words to an accepted peer."""

    epoch: str


class Redeem(_Message, frozen=True, tag="redeem"):
    ticket: bytes


class Export(_Message, frozen=True, tag="export"):
    """Asks, on a lease, for the FABRIC handles of the rank's own shards. Failed(FabricUnavailable) where a node has
    none, or where nobody on another node reads its memory."""


class Exported(_Message, frozen=True, tag="exported"):
    handles: tuple[FabricHandle, ...]


class Authorize(_Message, frozen=True, tag="authorize"):
    """Asks for a permit: for the daemon's own user and root, by SO_PEERCRED."""


class Authorized(_Message, frozen=True, tag="authorized"):
    """A permit for one request, short-lived as a ticket is."""

    permit: bytes


class Beat(_Message, frozen=True, tag="beat"):
    """An attached client's sign of life. Not answered."""


class Granted(_Message, frozen=True, tag="granted"):
    """Descriptors, in the order of `segments`; `last` closes the series. From then on this is the lease."""

    segments: tuple[str, ...]
    lease: int
    last: bool


# Between the ranks of a group, through torch.distributed


class Offer(_Message, frozen=True, tag="offer"):
    """What a rank holds for the others: its own shards, with their handles."""

    rank: int
    options: ResolvedOptions
    tables: tuple[TableInfo, ...]
    """With the rank's own segments."""
    handles: tuple[FabricHandle, ...]
    splits_from: int = 0
    """Ids from which on this rank takes a lookup for one whose reads are split; 0 where none are."""


Request = Attach | Status | Report | SetLogLevel | Verify | Evict | Drain
Reply = Progress | Attached | StatusReply | LogLevelReply | Done | Failed
HandoverRequest = Redeem | Beat | Export | Authorize
HandoverReply = Greeting | Granted | Exported | Authorized | Failed
RankMessage = Offer | Done | Failed
AnyMessage = Request | Reply | HandoverRequest | HandoverReply | RankMessage

_KNOWN: Final = frozenset(kind.__struct_config__.tag for kind in get_args(AnyMessage))
_BY_CLIENT: Final = frozenset(get_args(Request | HandoverRequest))
_M = TypeVar("_M")


def encode(message: AnyMessage, request_id: int = 0, *, limit: int = MAX_REPLY_BYTES) -> bytes:
    """One frame. Raises FrameTooLarge when it would exceed `limit` bytes."""
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    envelope = {"v": PROTOCOL_VERSION, "id": request_id, "body": body}
    # A file name that is not UTF-8 reaches us with lone surrogates; an error that names it must still be sent.
    frame: bytes = msgpack.packb(envelope, use_bin_type=True, unicode_errors="backslashreplace")
    if len(frame) > limit:
        raise FrameTooLarge(size=len(frame), limit=limit)
    return frame


def decode(frame: bytes, expected: type[_M] | Any, *, limit: int = MAX_REPLY_BYTES) -> tuple[int, _M]:
    """`(request_id, message)` of a frame that must hold one of `expected` (a message type or a union).

    Raises FrameTooLarge, MalformedMessage, ProtocolMismatch or UnknownMessage.
    """
    envelope = _open(frame, limit)
    theirs = envelope["v"]
    if theirs != PROTOCOL_VERSION:
        by_client = set(get_args(expected) or (expected,)) <= _BY_CLIENT
        client, server = (theirs, PROTOCOL_VERSION) if by_client else (PROTOCOL_VERSION, theirs)
        raise ProtocolMismatch(client=client, server=server)
    _check_envelope(envelope)
    if _depth_exceeds(envelope, MAX_DEPTH):
        raise MalformedMessage(problem=f"nested more than {MAX_DEPTH} deep")
    body = envelope["body"]
    name = body.get("type") if isinstance(body, dict) else None
    if not isinstance(name, str):
        raise MalformedMessage(problem="body is not a map with a type")
    if name not in _KNOWN:
        raise UnknownMessage(name=name[:64])
    try:
        message = msgspec.convert(body, expected, strict=True)
    except msgspec.ValidationError as error:
        raise MalformedMessage(problem=str(error)[:500]) from error
    return envelope["id"], message


def request_id_of(frame: bytes, *, limit: int = MAX_REQUEST_BYTES) -> int:
    """The id to answer a bad frame under: its own where it can be read, else 0. Raises nothing."""
    try:
        envelope = _open(frame, limit)
        _check_envelope(envelope)
        return int(envelope["id"])
    except EngramError:
        return 0


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError("extension types are not used here")


def _open(frame: bytes, limit: int) -> dict[str, Any]:
    if len(frame) > limit:
        raise FrameTooLarge(size=len(frame), limit=limit)
    try:
        envelope = msgpack.unpackb(frame, raw=False, strict_map_key=True, max_ext_len=0, ext_hook=_no_extension)
    except Exception as error:  # msgpack raises half a dozen unrelated classes on bad bytes
        raise MalformedMessage(problem=f"not one msgpack value: {type(error).__name__}") from error
    if not isinstance(envelope, dict) or type(envelope.get("v")) is not int:
        raise MalformedMessage(problem="not a map with a version")
    return envelope


def _check_envelope(envelope: dict[str, Any]) -> None:
    if set(envelope) != {"v", "id", "body"} or type(envelope["id"]) is not int:
        raise MalformedMessage(problem="the envelope is not v, id and body")
    if not 0 <= envelope["id"] < 1 << 63:
        raise MalformedMessage(problem="the id is not in [0, 2**63)")


def _depth_exceeds(value: Any, limit: int) -> bool:
    """Level by level and without recursion, for this is what guards the recursive code after it."""
    level = [value]
    for _ in range(limit):
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True
