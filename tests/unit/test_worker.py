"""Freeing memory takes seconds: the event loop turns meanwhile, and nothing that must come after it comes before."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engram_client.layout import RowFormat, Shard
from engram_client.protocol import Backing, SegmentInfo, endpoint_tag
from engram_server.config import Config
from engram_server.exports import Exports
from engram_server.fdstore import ServiceManager
from engram_server.holding import Holding
from engram_server.keep import Keeper
from engram_server.segments import Segment
from engram_server.worker import in_thread, to_the_end

LIMIT_S = 30.0


class HeldSegment(Segment):
    """Its memory is freed when the test says so."""

    def __init__(self) -> None:
        shard = Shard(row_start=0, row_stop=1, columns=None)
        info = SegmentInfo(
            id="L1",
            layer_id=1,
            shard=shard,
            rank=None,
            nbytes=4096,
            backing=Backing.POSIX_SHM,
            row_format=RowFormat.PACKED,
            page_bytes=4096,
        )
        super().__init__(info, None)
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.discarded = False

    def discard(self) -> None:
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)
        self.discarded = True


def test_a_result_and_an_error_come_through() -> None:
    def fail() -> None:
        raise KeyError("x")

    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(KeyError):
        asyncio.run(in_thread(fail))


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_is_cancelled_is_waited_for_and_then_the_cancelling_shows(fails: bool) -> None:
    async def run() -> None:
        begun, may_end = asyncio.Event(), asyncio.Event()
        ended = False

        async def work() -> None:
            nonlocal ended
            begun.set()
            await may_end.wait()
            ended = True
            if fails:
                raise KeyError("lost: whoever cancels does not want it")

        task = asyncio.ensure_future(to_the_end(work()))
        await begun.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_the_loop_turns_while_segments_are_freed_and_giving_up_ends_after_them() -> None:
    async def run() -> None:
        config = Config(model_path="/m")
        tag = endpoint_tag(config.control.endpoint)
        holding = Holding(config, tag, "epoch", Keeper(config, tag, ServiceManager()))
        segment = HeldSegment()
        holding.segments = {segment.info.id: segment}
        giving = asyncio.ensure_future(holding.give_up())
        assert await asyncio.to_thread(segment.begun.wait, LIMIT_S)  # this coroutine runs on: the loop turns
        giving.cancel()
        await asyncio.sleep(0)
        assert not giving.done()
        assert not segment.discarded
        segment.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await giving
        assert segment.discarded

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))


def test_segments_are_not_given_up_while_the_driver_still_exports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def exporting(*asked: object) -> Exports:
        begun.set()
        may_end.wait(LIMIT_S)
        return Exports()

    async def nothing(*asked: object) -> None:
        return None

    monkeypatch.setattr(Exports, "of", exporting)
    monkeypatch.setattr(Holding, "_adopt", nothing)
    monkeypatch.setattr(Holding, "_load", nothing)
    monkeypatch.setattr(Holding, "planned", None)
    monkeypatch.setattr(Keeper, "keep", lambda *kept: None)

    async def run() -> None:
        config = Config(model_path="/m")
        tag = endpoint_tag(config.control.endpoint)
        holding = Holding(config, tag, "epoch", Keeper(config, tag, ServiceManager()))
        obtaining = asyncio.ensure_future(holding.obtain(lambda state: None, lambda progress: None))
        assert await asyncio.to_thread(begun.wait, LIMIT_S)
        obtaining.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        try:
            assert not obtaining.done()
        finally:
            may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await obtaining

    asyncio.run(asyncio.wait_for(run(), LIMIT_S))
