"""The daemon's end of the control socket: replies that are too large, faults of handlers, peers that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from engram_client.protocol import (
    MAX_REPLY_BYTES,
    Done,
    Failed,
    LeaseStatus,
    Reply,
    Request,
    State,
    Status,
    StatusReply,
    decode,
    encode,
)
from engram_server.config import ControlConfig
from engram_server.control import Asker, Control

LEASES = 4096
LIMIT_S = 30


def crowded(backing_reason: str = "") -> StatusReply:
    """A status of as many clients as there may be, each with the longest things to say about itself."""
    lease = LeaseStatus(
        id=1 << 40,
        pid=1 << 22,
        uid=1 << 31,
        gid=1 << 31,
        name="𝄞" * 64,
        rank=1 << 20,
        world_size=1 << 20,
        device="𝄞" * 64,
        layers=tuple(range(1000, 1061)),
        age_s=1e6,
        last_seen_s=1e6,
    )
    return StatusReply(
        state=State.READY,
        version="0",
        epoch="e",
        pid=1,
        uptime_s=0.0,
        options=None,
        backing_reason=backing_reason,
        load=None,
        report=None,
        tables=(),
        segments=(),
        leases=(lease,) * LEASES,
        lease_count=LEASES,
        failure=None,
        adopted=False,
        outlook="",
        check=None,
    )


def ask(folder: Path, reply: StatusReply) -> Reply:
    return ask_often(folder, lambda asker, request: reply, 1)[0]


def ask_often(folder: Path, handle: Callable[[Asker, Request], Reply | None], times: int) -> list[Reply]:
    """The answers to so many requests, one after another."""

    async def conversation() -> list[Reply]:
        control = Control(str(folder / "c.sock"), ControlConfig(), handle)
        context = zmq.asyncio.Context()
        try:
            with context.socket(zmq.DEALER) as asking:
                asking.setsockopt(zmq.LINGER, 0)
                asking.connect(f"ipc://{folder / 'c.sock'}")
                answers = []
                for number in range(1, times + 1):
                    await asking.send(encode(Status(), number))
                    answered, reply = decode(await asyncio.wait_for(asking.recv(), LIMIT_S), Reply)
                    assert answered == number
                    answers.append(reply)
                return answers
        finally:
            context.term()
            await control.close()

    return asyncio.run(conversation())


def test_a_status_of_thousands_of_clients_lists_as_many_as_fit_and_counts_them_all(folder: Path) -> None:
    reply = ask(folder, crowded())
    assert isinstance(reply, StatusReply)
    assert reply.lease_count == LEASES
    assert MAX_REPLY_BYTES // 4 < len(encode(reply)) <= MAX_REPLY_BYTES


def test_a_reply_that_cannot_be_made_shorter_is_an_error_and_not_silence(folder: Path) -> None:
    reply = ask(folder, crowded("x" * MAX_REPLY_BYTES))
    assert isinstance(reply, Failed)
    assert reply.code == "FrameTooLarge"


@pytest.mark.parametrize(
    "fault", [KeyError("x"), RecursionError(), MemoryError(), OSError(24, "no descriptors")], ids=repr
)
def test_a_fault_in_a_handler_costs_one_request_and_not_the_daemon(fault: Exception, folder: Path) -> None:
    def handle(asker: Asker, request: Request) -> Reply:
        if asker.request_id == 2:
            raise fault
        return Done()

    before, failed, after = ask_often(folder, handle, 3)
    assert isinstance(failed, Failed)
    assert failed.code == "InternalError"
    assert before == after == Done()


def test_sending_tells_whether_the_asker_is_gone_and_never_waits_for_it(folder: Path) -> None:
    path = str(folder / "c.sock")
    heard: list[Asker] = []

    def handle(asker: Asker, request: Request) -> None:
        heard.append(asker)

    async def conversation() -> None:
        control = Control(path, ControlConfig(), handle)
        context = zmq.asyncio.Context()
        try:
            asking = context.socket(zmq.DEALER)
            asking.setsockopt(zmq.LINGER, 0)
            asking.setsockopt(zmq.RCVHWM, 1)
            asking.connect(f"ipc://{path}")
            await asking.send(encode(Status(), 1))
            async with asyncio.timeout(LIMIT_S):
                while not heard:
                    await asyncio.sleep(0.01)
                for _ in range(20_000):  # more than any queue on the way holds
                    assert await control.send(heard[0], Failed(code="x", fields={}))
                asking.close()
                while await control.send(heard[0], Failed(code="x", fields={})):
                    await asyncio.sleep(0.01)
        finally:
            context.term()
            await control.close()

    asyncio.run(conversation())
    assert heard[0].request_id == 1
