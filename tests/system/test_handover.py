"""The daemon's end of the descriptor socket, when something fails in its own hands."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from engram_client.errors import InternalError, ServerDraining, TransferCut
from engram_client.handover import HandoverConnection
from engram_client.protocol import MAX_HANDOVER_BYTES, Failed, Greeting, HandoverReply, decode
from engram_server.config import ControlConfig
from engram_server.exports import Exports
from engram_server.handover import Handover
from engram_server.leases import Grant, Leases
from engram_server.sockets import listen_for_handover

GRANT = Grant(segments=("L1",), layers=(1,), rank=0, world_size=1, device="cpu", name="x")


@contextlib.contextmanager
def serving(path: str, leases: Leases, descriptor_of: Callable[[str], int]) -> Iterator[Handover]:
    control = ControlConfig()
    handover = Handover(listen_for_handover(path, control), control, "epoch", leases, descriptor_of, Exports().granted)
    try:
        yield handover
    finally:
        handover.close()


def test_a_descriptor_that_is_not_there_costs_one_peer_its_connection_and_leaves_no_lease(folder: Path) -> None:
    """An exception in a callback of the loop would otherwise be logged, and the peer left to wait for nothing."""
    path = str(folder / "handover")
    leases = Leases(time.monotonic)

    def missing(segment: str) -> int:
        raise KeyError(segment)

    def ask() -> None:
        with HandoverConnection.open(path, 10) as connection, pytest.raises(InternalError, match="L1"):
            connection.redeem(leases.issue(GRANT), 10)

    async def serve() -> None:
        with serving(path, leases, missing):
            for _ in range(2):
                await asyncio.to_thread(ask)
            assert (leases.held, leases.open_tickets) == (0, 0)

    uvloop.run(serve())


def test_only_a_peer_that_is_there_and_holds_no_lease_may_redeem(folder: Path) -> None:
    """A daemon that drains waits for no ticket of ranks that have given up."""
    path = str(folder / "handover")
    leases = Leases(time.monotonic)

    async def serve() -> None:
        source = os.open("/dev/null", os.O_RDONLY)
        with serving(path, leases, lambda name: source) as handover:
            found = [handover.may_redeem]
            for redeems in (False, True):
                connection = await asyncio.to_thread(HandoverConnection.open, path, 10)
                found.append(handover.may_redeem)
                if redeems:
                    for fd in (await asyncio.to_thread(connection.redeem, leases.issue(GRANT), 10)).values():
                        os.close(fd)
                    found.append(handover.may_redeem)
                connection.close()
                while handover.may_redeem or leases.held:
                    await asyncio.sleep(0.001)
        os.close(source)
        assert found == [False, True, True, False]

    uvloop.run(serve())


def test_a_redeem_after_the_daemons_end_is_a_cut_transfer(folder: Path) -> None:
    path = str(folder / "handover")

    async def serve() -> None:
        with serving(path, Leases(time.monotonic), lambda name: 0):
            connection = await asyncio.to_thread(HandoverConnection.open, path, 10)
        with connection, pytest.raises(TransferCut):
            await asyncio.to_thread(connection.redeem, b"x" * 32, 10)

    uvloop.run(serve())


def test_who_knocks_while_the_daemon_ends_hears_why_and_who_holds_a_lease_just_sees_the_end(folder: Path) -> None:
    path = str(folder / "handover")
    leases = Leases(time.monotonic)

    async def serve() -> None:
        with open("/dev/null") as null, serving(path, leases, lambda name: null.fileno()) as handover:
            greeted = await asyncio.to_thread(HandoverConnection.open, path, 10)
            leased = await asyncio.to_thread(HandoverConnection.open, path, 10)
            for fd in (await asyncio.to_thread(leased.redeem, leases.issue(GRANT), 10)).values():
                os.close(fd)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as early, greeted, leased:
                early.connect(path)  # accepted by the kernel; the loop does not turn before the end
                handover.close(ServerDraining())
                frame = early.recv(MAX_HANDOVER_BYTES)
                said = [type(decode(frame, HandoverReply)[1])]
                while frame := early.recv(MAX_HANDOVER_BYTES):
                    said.append(type(decode(frame, HandoverReply)[1]))
                assert said == [Greeting, Failed]
                assert isinstance(greeted.last_error(), ServerDraining)
                assert leased.last_error() is None
                assert not leased.alive

    uvloop.run(serve())
