"""Whatever arrives, decoding ends with a message or an error that has a name, and a daemon serves on.

20,000 frames here; `make fuzz` sends a million with the same generator, and lets coverage guide another search.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import EngramError
from engram_client.protocol import (
    MAX_HANDOVER_BYTES,
    MAX_REQUEST_BYTES,
    AnyMessage,
    Failed,
    HandoverReply,
    HandoverRequest,
    Reply,
    Request,
    Status,
    StatusReply,
    decode,
    encode,
    request_id_of,
)
from engram_server import manifest
from tests.fuzz.frames import REAL, REPLIES, frames
from tests.support.daemon import Daemon, running, wait_until
from tests.support.kept import MANIFEST
from tests.support.soak import SEED, pick

FRAMES = pick(20_000, 1_000_000)
LIVE_SHARE = 4
"""Every so many frames of a live test one is answered before the next is sent, so that none are lost unseen."""
MEMORY_LIMIT_BYTES = 192 << 20
"""Of the daemon, resident: it starts with about 60 MiB."""
DECODE_LIMIT_BYTES = 32 << 20
"""Of one decoded frame of at most 64 KiB."""
REPLY_LIMIT_MS = 30_000
SETTINGS = {"timeout": pick(240, 7200)}


def outcome(frame: bytes, expected: Any, limit: int) -> str:
    try:
        request_id, message = decode(frame, expected, limit=limit)
    except EngramError as error:
        return error.code
    assert isinstance(message, get_args(expected))
    assert 0 <= request_id < 1 << 63
    if isinstance(message, Failed):
        assert str(message.error())
    return type(message).__name__


def test_the_frames_that_chance_begins_with_are_of_every_kind() -> None:
    for begun, unions in ((REAL, (Request, HandoverRequest)), (REPLIES, (Reply, HandoverReply))):
        kinds = {kind.__name__ for union in unions for kind in get_args(union)}
        assert {type(decode(frame, AnyMessage)[1]).__name__ for frame in begun} == kinds


@pytest.mark.timeout(SETTINGS["timeout"])
def test_every_frame_is_a_message_or_an_error_with_a_name() -> None:
    seen: dict[str, int] = {}
    for frame in frames(SEED, FRAMES):
        for expected in (Request, HandoverRequest):
            code = outcome(frame, expected, MAX_REQUEST_BYTES)
            seen[code] = seen.get(code, 0) + 1
        assert 0 <= request_id_of(frame) < 1 << 63
    assert {"MalformedMessage", "UnknownMessage", "ProtocolMismatch", "Status", "Attach", "Redeem"} <= set(seen)


@pytest.mark.timeout(SETTINGS["timeout"])
def test_a_client_survives_whatever_a_daemon_sends() -> None:
    seen: set[str] = set()
    for frame in frames(SEED + 1, FRAMES // 4, REPLIES):
        for expected in (Reply, HandoverReply):
            seen.add(outcome(frame, expected, MAX_HANDOVER_BYTES))
    assert {"MalformedMessage", "UnknownMessage", "ProtocolMismatch", "StatusReply", "Attached", "Granted"} <= seen


@pytest.mark.timeout(SETTINGS["timeout"])
def test_every_manifest_is_one_or_an_error_with_a_name() -> None:
    seen: set[str] = set()
    for text in frames(SEED + 5, FRAMES // 4, (MANIFEST,)):
        try:
            seen.add(type(manifest.decode(text, "fuzz")).__name__)
        except EngramError as error:
            seen.add(error.code)
    assert seen == {"Manifest", "ManifestInvalid", "ManifestVersionUnknown"}


def test_decoding_takes_memory_in_proportion_to_the_frame() -> None:
    tracemalloc.start()
    try:
        for frame in frames(SEED + 2, 1000):
            tracemalloc.reset_peak()
            outcome(frame, AnyMessage, MAX_REQUEST_BYTES)
            assert tracemalloc.get_traced_memory()[1] < DECODE_LIMIT_BYTES
        for fill in (b"\x91", b"\x80", b"\xa0", b"\xc0"):  # the most objects that fit a frame
            tracemalloc.reset_peak()
            outcome(b"\xdc\xff\xff" + fill * (MAX_REQUEST_BYTES - 3), AnyMessage, MAX_REQUEST_BYTES)
            assert tracemalloc.get_traced_memory()[1] < DECODE_LIMIT_BYTES
    finally:
        tracemalloc.stop()


@given(st.binary(max_size=200) | st.builds(bytes.__add__, st.just(b"\x83\xa1v\x01\xa2id\x05\xa4body"), st.binary()))
def test_any_bytes_at_all_are_refused_by_name(frame: bytes) -> None:
    for expected in (Request, Reply, HandoverRequest, HandoverReply):
        outcome(frame, expected, MAX_REQUEST_BYTES)


@pytest.fixture
def fuzzed(folder: Path, checkpoint: Path) -> Any:
    """A daemon that logs errors only: a million refusals are a large log."""
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config, arguments=("--log-level", "error")) as daemon:
        yield daemon


@pytest.mark.timeout(SETTINGS["timeout"])
def test_a_live_control_socket_answers_and_holds_its_memory(fuzzed: Daemon) -> None:
    process = psutil.Process(fuzzed.pid)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, REPLY_LIMIT_MS)
        dealer.setsockopt(zmq.SNDTIMEO, REPLY_LIMIT_MS)
        dealer.connect(fuzzed.endpoint)
        for number, frame in enumerate(frames(SEED + 3, FRAMES)):
            dealer.send(frame)
            if number % LIVE_SHARE == 0:
                ask(dealer, number + 1)
            if number % 1000 == 0:
                assert process.memory_info().rss < MEMORY_LIMIT_BYTES
        ask(dealer, FRAMES + 1)
    context.term()
    assert process.memory_info().rss < MEMORY_LIMIT_BYTES
    assert fuzzed.status().state == "ready"
    assert "Traceback" not in fuzzed.log


def ask(dealer: zmq.Socket[bytes], number: int) -> None:
    """A status among the fuzz, and its answer; the answers to the fuzz before it are passed over."""
    request_id = (1 << 62) + number
    dealer.send(encode(Status(), request_id))
    while True:
        found, reply = decode(dealer.recv(), Reply)
        if found == request_id:
            assert isinstance(reply, StatusReply)
            return


@pytest.mark.timeout(SETTINGS["timeout"])
def test_a_live_descriptor_socket_answers_or_hangs_up_and_holds_its_memory(fuzzed: Daemon) -> None:
    process = psutil.Process(fuzzed.pid)
    descriptors = process.num_fds()
    dice = random.Random(SEED)
    for number, frame in enumerate(frames(SEED + 4, FRAMES // 4)):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(REPLY_LIMIT_MS / 1000)
            peer.connect(str(fuzzed.handover_path))
            if dice.random() < 0.9:
                peer.recv(MAX_HANDOVER_BYTES)
            with contextlib.suppress(OSError):  # nothing at all is an end of the connection too
                peer.send(frame)
            if dice.random() < 0.5:
                with contextlib.suppress(OSError):
                    while peer.recv(MAX_HANDOVER_BYTES):
                        if outcome_is_message(frame):
                            break
        if number % 1000 == 0:
            assert process.memory_info().rss < MEMORY_LIMIT_BYTES
    assert fuzzed.status().state == "ready"
    wait_until(lambda: process.num_fds() <= descriptors + 1, "as many descriptors as before")
    assert process.memory_info().rss < MEMORY_LIMIT_BYTES
    assert "Traceback" not in fuzzed.log


def outcome_is_message(frame: bytes) -> bool:
    """A frame that is understood may leave the connection open, or unanswered (a sign of life)."""
    with contextlib.suppress(EngramError):
        decode(frame, HandoverRequest, limit=MAX_HANDOVER_BYTES)
        return True
    return not frame


def test_an_unfinished_message_of_a_permitted_peer_is_named_in_the_guarantees(fuzzed: Daemon) -> None:
    """What the daemon cannot prevent it says: ZeroMQ buffers parts that never end (README). It serves others on."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.SNDTIMEO, 5000)
        dealer.connect(fuzzed.endpoint)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with contextlib.suppress(zmq.Again):
                dealer.send(b"x" * 1024, zmq.SNDMORE)
        assert fuzzed.status().state == "ready"
    context.term()
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert "message that it never finishes" in " ".join(readme.split())
