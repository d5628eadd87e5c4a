"""The wire: every message round trips, its bytes are fixed, and anything else is refused by a named class."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client import protocol as p
from engram_client.errors import (
    FrameTooLarge,
    MalformedMessage,
    NotAllowedNow,
    ProtocolMismatch,
    ReadFailed,
    SocketPathInvalid,
    UnknownMessage,
)
from engram_client.identity import TableIdentity

MESSAGES: tuple[Any, ...] = typing.get_args(p.AnyMessage)
REFUSALS = (FrameTooLarge, MalformedMessage, ProtocolMismatch, UnknownMessage)

text = st.text(max_size=20)
integers = st.integers(-(2**63), 2**64 - 1)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, from the type alone, so that a new field is tested without a new line here."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        limits = arguments[1]
        if limits.ge is not None:
            numbers = {int: lambda: st.integers(limits.ge, limits.le), float: lambda: st.floats(limits.ge, limits.le)}
            return numbers[arguments[0]]()
        return st.from_regex(limits.pattern) if limits.pattern else values_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if kind is Any:
        return st.none() | integers | text | st.binary(max_size=4) | st.lists(integers, max_size=2)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if issubclass(kind, msgspec.Struct):
        fields = {field.name: values_of(field.type) for field in msgspec.structs.fields(kind)}
        return st.builds(kind, **fields)
    simple = {int: integers, str: text, bytes: st.binary(max_size=40), bool: st.booleans()}
    return {**simple, float: st.floats(allow_nan=False), type(None): st.none()}[kind]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was_sent(kind: Any) -> None:
    @given(values_of(kind), st.integers(0, 2**63 - 1))
    def round_trip(message: Any, request_id: int) -> None:
        frame = p.encode(message, request_id)
        assert p.decode(frame, p.AnyMessage) == (request_id, message)
        assert p.decode(frame, kind) == (request_id, message)
        assert p.request_id_of(frame) == request_id

    round_trip()


def test_every_message_class_is_in_the_unions() -> None:
    tagged = {kind for kind in vars(p).values() if isinstance(kind, type) and issubclass(kind, p._Message)}
    assert tagged - {p._Message} == set(MESSAGES)


GOLDEN = {
    "status": (p.Status(), 7),
    "attach": (
        p.Attach(
            rank=1,
            world_size=2,
            device="cuda:0",
            name="engine",
            layers=(1,),
            identity=(TableIdentity(layer_id=1, rows=5, columns=(2, 3), root=None),),
            roots={"14": "ab"},
        ),
        1,
    ),
    "redeem": (p.Redeem(ticket=b"\x00\xff"), 0),
    "granted": (p.Granted(segments=("a", "b"), lease=3, last=True), 0),
    "failed": (p.Failed.of(NotAllowedNow(request="attach", state="loading")), 2**40),
    "progress": (
        p.Progress(
            state=p.State.LOADING, load=p.LoadProgress(phase="loading", done_bytes=1, total_bytes=2, elapsed_s=0.5)
        ),
        9,
    ),
}
GOLDEN_BYTES = {
    "status": "83a17601a2696407a4626f647981a474797065a6737461747573",
    "attach": (
        "83a17601a2696401a4626f647989a474797065a6617474616368a472616e6b01aa776f726c645f73697a6502a66465766963"
        "65a6637564613a30a46e616d65a6656e67696e65a66c61796572739101a86964656e746974799184a86c617965725f696401"
        "a4726f777305a7636f6c756d6e73920203a4726f6f74c0a5726f6f747381a23134a26162a477616974c3"
    ),
    "redeem": "83a17601a2696400a4626f647982a474797065a672656465656da67469636b6574c40200ff",
    "granted": (
        "83a17601a2696400a4626f647984a474797065a76772616e746564a87365676d656e747392a161a162a56c6561736503a46c617374c3"
    ),
    "failed": (
        "83a17601a26964cf0000010000000000a4626f647983a474797065a66661696c6564a4636f6465ad4e6f74416c6c6f776564"
        "4e6f77a66669656c647382a772657175657374a6617474616368a57374617465a76c6f6164696e67"
    ),
    "progress": (
        "83a17601a2696409a4626f647983a474797065a870726f6772657373a57374617465a76c6f6164696e67a46c6f616484a570"
        "68617365a76c6f6164696e67aa646f6e655f627974657301ab746f74616c5f627974657302a9656c61707365645f73cb3fe0"
        "000000000000"
    ),
}


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_bytes_on_the_wire_have_not_changed(name: str) -> None:
    """If this fails, the two versions cannot speak: raise PROTOCOL_VERSION, then write the bytes anew."""
    message, request_id = GOLDEN[name]
    assert p.encode(message, request_id).hex() == GOLDEN_BYTES[name]
    assert p.decode(bytes.fromhex(GOLDEN_BYTES[name]), p.AnyMessage) == (request_id, message)


def frame(body: Any, **envelope: Any) -> bytes:
    packed: bytes = msgpack.packb({"v": 1, "id": 5, "body": body, **envelope})
    return packed


ATTACH = {"type": "attach", "rank": 0, "world_size": 1, "device": "cpu", "name": "n"}
deep: Any = 1
for _ in range(40):
    deep = [deep]
MALFORMED = {
    "empty": b"",
    "not a map": msgpack.packb([1, 2]),
    "no version": msgpack.packb({"id": 1, "body": {}}),
    "version of another type": frame(ATTACH, v="1"),
    "boolean version": frame(ATTACH, v=True),
    "no id": msgpack.packb({"v": 1, "body": ATTACH}),
    "no body": msgpack.packb({"v": 1, "id": 1}),
    "one key too many in the envelope": frame(ATTACH, more=1),
    "negative id": frame(ATTACH, id=-1),
    "id of 64 bits": frame(ATTACH, id=2**63),
    "boolean id": frame(ATTACH, id=True),
    "body is a list": frame([ATTACH]),
    "body without a type": frame({"rank": 0}),
    "type is a number": frame({**ATTACH, "type": 1}),
    "unknown field": frame({**ATTACH, "more": 1}),
    "missing field": frame({key: value for key, value in ATTACH.items() if key != "rank"}),
    "wrong type": frame({**ATTACH, "rank": "0"}),
    "float for an integer": frame({**ATTACH, "rank": 0.0}),
    "boolean for an integer": frame({**ATTACH, "rank": True}),
    "bytes for text": frame({**ATTACH, "name": b"n"}),
    "name too long": frame({**ATTACH, "name": "n" * 257}),
    "unknown field in a part": frame({**ATTACH, "identity": [{"layer_id": 1, "more": 1}]}),
    "a message for the other direction": frame({"type": "greeting", "epoch": "e"}),
    "bytes as keys": frame({b"type": "attach"}),
    "integers as keys": frame({1: 2}),
    "nested too deeply": frame({**ATTACH, "layers": deep}),
    "nested beyond the stack": frame(ATTACH)[:-1] + b"\x91" * 5000 + b"\x00",
    "extension type": frame({**ATTACH, "rank": msgpack.ExtType(5, b"")}),
    "timestamp": frame({**ATTACH, "rank": msgpack.Timestamp(1, 0)}),
    "text that is not UTF-8": frame(ATTACH).replace(b"\xa4name\xa1n", b"\xa4name\xa1\xff"),
    "trailing bytes": frame(ATTACH) + b"\x00",
    "truncated": frame(ATTACH)[:-1],
    "a length that lies": b"\xdf\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", sorted(MALFORMED))
def test_a_malformed_frame_is_refused_as_such(name: str) -> None:
    with pytest.raises(MalformedMessage):
        p.decode(MALFORMED[name], p.Request)
    assert p.request_id_of(MALFORMED[name]) in (0, 5)


def test_nothing_but_an_error_from_the_depths_reaches_recursive_code() -> None:
    """A failure carries any fields; their depth is limited like everything else's."""
    with pytest.raises(MalformedMessage):
        p.decode(frame({"type": "failed", "code": "X", "fields": {"a": deep}}), p.Reply)


def test_an_unknown_message_is_named() -> None:
    with pytest.raises(UnknownMessage) as caught:
        p.decode(frame({"type": "x" * 100}), p.Request)
    assert caught.value.name == "x" * 64


def test_a_frame_over_the_limit_is_refused_by_both_sides() -> None:
    big = p.encode(p.Redeem(ticket=bytes(2000)))
    for refuse in (lambda: p.decode(big, p.Redeem, limit=1000), lambda: p.encode(p.Redeem(ticket=big), limit=1000)):
        with pytest.raises(FrameTooLarge) as caught:
            refuse()
        assert caught.value.limit == 1000
        assert caught.value.size > 1000
    assert p.decode(big, p.Redeem, limit=len(big))
    assert p.request_id_of(frame(ATTACH), limit=10) == 0


@pytest.mark.parametrize("version", [0, 2, 2**64 - 1, -1])
def test_another_version_is_named_before_anything_else_is_looked_at(version: int) -> None:
    """A frame of another version may differ in every other way; each side knows which of the two it is."""
    foreign = msgpack.packb({"v": version, "anything": [1]})
    for expected, fields in (
        (p.Request, {"client": version, "server": 1}),
        (p.Redeem, {"client": version, "server": 1}),
        (p.Reply, {"client": 1, "server": version}),
        (p.HandoverReply, {"client": 1, "server": version}),
    ):
        with pytest.raises(ProtocolMismatch) as caught:
            p.decode(foreign, expected)
        assert caught.value.fields == fields


@given(st.binary(max_size=200))
def test_random_bytes_give_a_message_or_a_named_refusal(data: bytes) -> None:
    decode_or_refuse(data)


@given(st.data())
def test_a_damaged_frame_gives_a_message_or_a_named_refusal(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(GOLDEN)))
    damaged = bytearray(p.encode(*GOLDEN[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(damaged)))
        stop = data.draw(st.integers(start, min(len(damaged), start + 3)))
        damaged[start:stop] = data.draw(st.binary(max_size=3))
    decode_or_refuse(bytes(damaged))


anything = st.recursive(
    st.none() | st.booleans() | integers | st.floats() | text | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text | st.binary(max_size=4), inner, max_size=3),
    max_leaves=10,
)


@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_fields_of_any_kind_is_read_or_refused(kind: Any, data: st.DataObject) -> None:
    good = msgspec.to_builtins(data.draw(values_of(kind)), builtin_types=(bytes,))
    key = data.draw(st.sampled_from(sorted(good)))
    decode_or_refuse(frame({**good, key: data.draw(anything)}))


def decode_or_refuse(data: bytes) -> None:
    for expected in (p.Request, p.AnyMessage, p.HandoverReply):
        try:
            _, message = p.decode(data, expected)
        except REFUSALS as error:
            assert p.encode(p.Failed.of(error))  # noqa: PT017 - the refusal itself must be sendable
        else:
            assert p.encode(message)
    assert 0 <= p.request_id_of(data) < 2**63


def test_an_error_about_a_file_whose_name_is_not_utf8_can_be_sent() -> None:
    error = ReadFailed(path="/models/\udcff", offset=0, problem="gone")
    _, message = p.decode(p.encode(p.Failed.of(error)), p.Failed)
    assert isinstance(message.error(), ReadFailed)
    assert message.fields["path"] == "/models/\\udcff"


# Socket paths


def test_the_handover_socket_is_beside_the_control_socket_unless_configured() -> None:
    assert p.ipc_path("ipc:///run/a.sock") == "/run/a.sock"
    assert p.handover_path("ipc:///run/a.sock") == "/run/a.sock.handover"
    assert p.handover_path("ipc:///run/a.sock", "/run/b") == "/run/b"


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5000",
        "ipc:/run/a",
        "ipc",
        "",
        "/run/a",
        "inproc://a",
        "ipc://@abstract",
        "ipc://\0abstract",
        "ipc://run/a",
        "ipc://",
        "ipc://*",
        "ipc:///run/",
        "ipc:///run/\0",
        "ipc:///run/\ud800",
        "ipc:///" + "a" * 107,
        "ipc:///" + "ä" * 54,
    ],
)
def test_an_endpoint_that_cannot_be_bound_or_has_no_permissions_is_refused(endpoint: str) -> None:
    with pytest.raises(SocketPathInvalid) as caught:
        p.ipc_path(endpoint)
    assert caught.value.limit == 107


@pytest.mark.parametrize("path", ["@abstract", "\0abstract", "run/b", "", "ipc:///run/b", "/run/", "/" + "b" * 107])
def test_a_configured_handover_path_keeps_the_same_rules(path: str) -> None:
    with pytest.raises(SocketPathInvalid):
        p.handover_path("ipc:///run/a", path)


def test_the_longest_paths_are_exactly_what_the_kernel_takes() -> None:
    longest = "/" + "a" * 106
    assert p.ipc_path(f"ipc://{longest}") == longest
    assert len(p.handover_path("ipc:///" + "a" * 97)) == 107
    with pytest.raises(SocketPathInvalid):
        p.handover_path("ipc:///" + "a" * 98)


@given(st.text())
def test_any_text_is_an_endpoint_or_a_named_refusal(text: str) -> None:
    for check in (p.ipc_path, p.handover_path, p.endpoint_tag, p.check_socket_path):
        for value in (text, f"ipc:///{text}"):
            try:
                assert check(value)
            except SocketPathInvalid as error:
                assert str(error)  # noqa: PT017


def test_an_endpoint_has_one_short_tag() -> None:
    tags = {p.endpoint_tag("ipc:///run/a"), p.endpoint_tag("ipc:///run/b")}
    assert len(tags) == 2
    assert all(len(tag) == 12 and int(tag, 16) >= 0 for tag in tags)
