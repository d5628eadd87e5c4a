"""What a peer may send to either socket: an answer by name, or a closed connection; never the daemon's end."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgpack
import psutil
import pytest
import zmq

from engram_client import connect
from engram_client.handover import HandoverConnection
from engram_client.protocol import (
    MAX_FDS_PER_MESSAGE,
    MAX_HANDOVER_BYTES,
    MAX_REQUEST_BYTES,
    PROTOCOL_VERSION,
    Failed,
    HandoverReply,
    Redeem,
    Reply,
    Status,
    StatusReply,
    decode,
    encode,
)
from tests.support.daemon import Daemon, wait_until

REPLY_LIMIT_MS = 20_000


@pytest.fixture
def dealer(per_node: Daemon) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as opened:
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.RCVTIMEO, REPLY_LIMIT_MS)
        opened.connect(per_node.endpoint)
        yield opened
    context.term()


def envelope(body: object, version: object = PROTOCOL_VERSION, request_id: object = 7) -> bytes:
    packed: bytes = msgpack.packb({"v": version, "id": request_id, "body": body})
    return packed


ATTACH = {"type": "attach", "rank": 0, "world_size": 1, "device": "cpu", "name": "x"}


@pytest.mark.parametrize(
    ("frame", "code", "request_id"),
    [
        (b"", "MalformedMessage", 0),
        (b"\xc1", "MalformedMessage", 0),
        (b"GET / HTTP/1.1\r\n\r\n", "MalformedMessage", 0),
        (envelope({"type": "status"})[:-1], "MalformedMessage", 0),
        (envelope({"type": "status"}) + b"\0", "MalformedMessage", 0),
        (envelope({"type": "shutdown"}), "UnknownMessage", 7),
        (envelope({"type": "redeem", "ticket": b"x"}), "MalformedMessage", 7),
        (envelope({"type": "status", "verbose": True}), "MalformedMessage", 7),
        (envelope({**ATTACH, "rank": "0"}), "MalformedMessage", 7),
        (envelope({**ATTACH, "rank": 2**63}), "RankInvalid", 7),
        (envelope({**ATTACH, "rank": 1}), "RankInvalid", 7),
        (envelope({**ATTACH, "rank": -1}), "RankInvalid", 7),
        (envelope({**ATTACH, "layers": [99]}), "UnknownLayer", 7),
        (envelope({**ATTACH, "roots": {"x": "y"}}), "MalformedMessage", 7),
        (envelope({"type": "status"}, version=2), "ProtocolMismatch", 7),
        (envelope({"type": "status"}, request_id=-1), "MalformedMessage", 0),
        (envelope({"type": "status", "x": "y" * MAX_REQUEST_BYTES}), "FrameTooLarge", 0),
        (b"\x91" * 1000, "MalformedMessage", 0),
    ],
)
def test_a_bad_request_gets_its_error_and_the_daemon_goes_on(
    frame: bytes, code: str, request_id: int, dealer: zmq.Socket[bytes], per_node: Daemon
) -> None:
    dealer.send(frame)
    answered, reply = decode(dealer.recv(), Reply)
    assert isinstance(reply, Failed)
    assert (reply.code, answered) == (code, request_id)
    dealer.send(encode(Status(), 8))
    answered, reply = decode(dealer.recv(), Reply)
    assert isinstance(reply, StatusReply)
    assert answered == 8


def test_several_frames_are_refused(dealer: zmq.Socket[bytes]) -> None:
    dealer.send_multipart([b"", encode(Status(), 1)])
    _, reply = decode(dealer.recv(), Reply)
    assert isinstance(reply, Failed)
    assert reply.code == "MalformedMessage"


def test_a_huge_frame_costs_its_sender_the_connection_only(dealer: zmq.Socket[bytes], per_node: Daemon) -> None:
    dealer.send(b"x" * (64 << 20))
    assert per_node.status().state == "ready"
    assert psutil.Process(per_node.pid).memory_info().rss < 512 << 20


def seqpacket(per_node: Daemon) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(REPLY_LIMIT_MS / 1000)
    peer.connect(str(per_node.handover_path))
    return peer


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"\xc1", "MalformedMessage"),
        (encode(Status()), "MalformedMessage"),
        (encode(Redeem(ticket=b"guess" * 7)), "TicketInvalid"),
        (encode(Redeem(ticket=b"")), "TicketInvalid"),
        (envelope({"type": "open sesame"}), "UnknownMessage"),
        (b"x" * (MAX_HANDOVER_BYTES + 1), "MalformedMessage"),
    ],
)
def test_a_bad_redeem_gets_its_error_and_the_connection_ends(frame: bytes, code: str, per_node: Daemon) -> None:
    with seqpacket(per_node) as peer:
        peer.recv(MAX_HANDOVER_BYTES)
        peer.send(frame)
        reply: HandoverReply = decode(peer.recv(MAX_HANDOVER_BYTES), HandoverReply)[1]
        assert isinstance(reply, Failed)
        assert reply.code == code
        assert peer.recv(1) == b""
    assert per_node.status().leases == ()


def test_descriptors_sent_to_the_daemon_are_closed_there(per_node: Daemon) -> None:
    process = psutil.Process(per_node.pid)
    before = process.num_fds()
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(MAX_FDS_PER_MESSAGE)]
    try:
        with seqpacket(per_node) as peer:
            peer.recv(MAX_HANDOVER_BYTES)
            socket.send_fds(peer, [b"take these"], opened)
            reply: HandoverReply = decode(peer.recv(MAX_HANDOVER_BYTES), HandoverReply)[1]
            assert isinstance(reply, Failed)
    finally:
        for descriptor in opened:
            os.close(descriptor)
    wait_until(lambda: process.num_fds() <= before, "the daemon's descriptors")


def test_a_ticket_is_good_once(per_node: Daemon, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(envelope(ATTACH))
    _, attached = decode(dealer.recv(), Reply)
    with (
        HandoverConnection.open(str(per_node.handover_path), 5) as first,
        HandoverConnection.open(str(per_node.handover_path), 5) as second,
    ):
        granted = first.redeem(attached.ticket, 5)
        assert sorted(granted) == ["L1", "L14"]
        from engram_client.errors import TicketInvalid

        with pytest.raises(TicketInvalid):
            second.redeem(attached.ticket, 5)
        for descriptor in granted.values():
            assert os.get_inheritable(descriptor) is False
            with pytest.raises(OSError, match=r"Bad file descriptor|Invalid argument"):
                os.write(descriptor, b"x")
            os.close(descriptor)


def test_an_idle_crowd_on_the_descriptor_socket_does_not_keep_a_rank_out(per_node: Daemon) -> None:
    crowd = [seqpacket(per_node) for _ in range(200)]
    try:
        with connect(per_node.endpoint, rank=0, world_size=1, timeout=30) as client:
            assert client.server_alive
    finally:
        for peer in crowd:
            peer.close()
