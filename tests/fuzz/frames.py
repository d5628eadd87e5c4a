"""Frames for fuzzing: real messages of every kind, and what chance makes of them. Deterministic by seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack

from engram_client.errors import NotAllowedNow
from engram_client.protocol import (
    MAX_REQUEST_BYTES,
    Attach,
    Attached,
    Authorize,
    Authorized,
    Beat,
    Done,
    Drain,
    Evict,
    Export,
    Exported,
    FabricHandle,
    Failed,
    Granted,
    Greeting,
    LoadProgress,
    LogLevel,
    LogLevelReply,
    LookupCounters,
    Placement,
    Progress,
    Redeem,
    Replication,
    Report,
    ResolvedOptions,
    SetLogLevel,
    State,
    Status,
    Verify,
    encode,
)
from engram_client.protocol import Lookup as LookupWay
from tests.support.observed import status

SEEDS = Path(__file__).parent / "seeds"
"""One file a frame that once found a fault, or shows a kind of damage worth keeping."""

REAL = (
    encode(Status(), 1),
    encode(Attach(rank=0, world_size=1, device="cpu", name="n"), 2),
    encode(Attach(rank=3, world_size=8, device="cpu", name="n", layers=(1, 14), roots={"1": "ab"}, wait=False), 3),
    encode(Verify(permit=b"p" * 32), 4),
    encode(Evict(permit=b"p" * 32, lease=1), 5),
    encode(Drain(permit=b"p" * 32, free=True), 6),
    encode(SetLogLevel(permit=b"p" * 32, level=LogLevel.DEBUG), 7),
    encode(Report(epoch="e", lease=1, lookups=LookupCounters(rows=24), attach_s=0.5), 8),
    encode(Redeem(ticket=b"t" * 32), 0),
    encode(Authorize(), 0),
    encode(Export(), 0),
    encode(Beat(), 0),
)
"""What a client sends, on either socket."""
_OPTIONS = ResolvedOptions(
    placement=Placement.CPU,
    replication=Replication.PER_NODE,
    lookup=LookupWay.COLLECTIVE,
    tp_size=1,
    nnodes=1,
    node_rank=0,
)
REPLIES = (
    encode(Progress(state=State.LOADING, load=LoadProgress(phase="x", done_bytes=1, total_bytes=2, elapsed_s=0.5)), 1),
    encode(Attached(epoch="e", options=_OPTIONS, tables=status().tables, ticket=b"t" * 32), 2),
    encode(status(options=_OPTIONS), 3),
    encode(Done(), 4),
    encode(LogLevelReply(level=LogLevel.DEBUG, previous=LogLevel.INFO), 5),
    encode(Failed.of(NotAllowedNow(request="attach", state="loading")), 6),
    encode(Greeting(epoch="e"), 0),
    encode(Granted(segments=("L1", "L14"), lease=3, last=True), 0),
    encode(Authorized(permit=b"p" * 32), 0),
    encode(Exported(handles=(FabricHandle(segment="L1", handle=b"h" * 64),)), 0),
)
"""What a daemon sends."""
_SCALARS: tuple[Any, ...] = (
    None, True, 0, -1, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, float("nan"), "", "x", "\0", b"",
    b"x" * 65, "status", "attach", "drain", "é" * 300, [], {}, [[]], {"": {}},
    msgpack.ExtType(1, b"x"), msgpack.Timestamp(0, 0),
)  # fmt: skip


def frames(seed: int, count: int, real: Sequence[bytes] = REAL) -> Iterator[bytes]:
    """`real` and the seeds as they are, then what chance makes of them."""
    dice = random.Random(seed)
    corpus = [*real, *(path.read_bytes() for path in sorted(SEEDS.glob("*")))]
    for number in range(count):
        if number < len(corpus):
            yield corpus[number]
            continue
        frame = dice.choice(corpus if dice.random() < 0.5 else real)  # what is broken all over says little
        make = dice.choice((_bytes, _bytes, _structure, _structure, _noise, _splice))
        made = make(dice, frame, corpus)
        if len(made) <= MAX_REQUEST_BYTES and dice.random() < 0.02:
            corpus.append(made)  # so that damage adds up
            if len(corpus) > 500:
                del corpus[dice.randrange(len(real), len(corpus))]
        yield made


def change(dice: random.Random, frame: bytes) -> bytes:
    """`frame` with one part of its structure changed, where it has one."""
    return _structure(dice, frame, [])


def _bytes(dice: random.Random, frame: bytes, corpus: list[bytes]) -> bytes:
    data = bytearray(frame)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(4)
        if kind == 0 and at < len(data):
            data[at] = dice.randrange(256)
        elif kind == 1:
            data[at:at] = dice.randbytes(dice.randint(1, 8))
        elif kind == 2:
            del data[at : at + dice.randint(1, 8)]
        else:
            del data[at:]
    return bytes(data)


def _noise(dice: random.Random, frame: bytes, corpus: list[bytes]) -> bytes:
    length = dice.choice((0, 1, 2, 10, 100, 5000))
    if dice.random() < 0.5:
        return dice.choice((b"\x91", b"\x81\xa0", b"\xdd\xff\xff\xff\xff", b"\xdf\x00\x01", b"\xc6\x7f\xff")) * length
    return dice.randbytes(length)


def _splice(dice: random.Random, frame: bytes, corpus: list[bytes]) -> bytes:
    other = dice.choice(corpus)
    return frame[: dice.randrange(len(frame) + 1)] + other[dice.randrange(len(other) + 1) :]


def _structure(dice: random.Random, frame: bytes, corpus: list[bytes]) -> bytes:
    """A frame that is still msgpack, or JSON where it was, with a value, a key or a level changed."""
    unpack, pack = (json.loads, _as_json) if frame[:1] == b"{" else (msgpack.unpackb, msgpack.packb)
    try:
        envelope = unpack(frame)
    except Exception:
        return frame + b"\xc0"
    if not isinstance(envelope, dict):
        return frame
    return _repacked(dice, envelope, pack, frame)


def _repacked(dice: random.Random, envelope: dict[Any, Any], pack: Callable[[Any], bytes], frame: bytes) -> bytes:
    where: Any = envelope
    while isinstance(where, dict) and where and dice.random() < 0.6:
        inner = dice.choice(list(where.values()))
        if isinstance(inner, list) and inner:
            inner = dice.choice(inner)
        if not isinstance(inner, dict) or not inner:
            break
        where = inner
    key = dice.choice([*where, "more"])
    if dice.random() < 0.15:
        where.pop(key, None)
    else:
        where[key] = dice.choice(_SCALARS) if dice.random() < 0.8 else [dice.choice(_SCALARS)] * dice.randint(0, 40)
    try:
        return pack(envelope)
    except (ValueError, TypeError, OverflowError, RecursionError):
        return frame


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
