"""In what order segments are created and filled, with both made to wait for each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engram_client.errors import AllocationFailed, EngramError, LoaderDied
from engram_client.layout import ModelGeometry
from engram_client.protocol import LoadProgress, LoadReport, SegmentInfo
from engram_server import bring_up
from engram_server.config import Config, EngramConfig, HostConfig
from engram_server.load_job import LoadJob, LoadResult, make_job
from engram_server.plan import Placement, Plan, make_plan
from engram_server.segments import Segment
from tests.support.machines import machine
from tests.unit.test_plan_gpu import gpus

MODEL = ModelGeometry(engram_layer_ids=(3, 5, 9), engram_max_ngram_size=4, engram_vocab_size=40, engram_n_heads=8)
LIMIT_S = 30.0


class FakeSegment(Segment):
    def __init__(self, info: SegmentInfo) -> None:
        super().__init__(info, None)
        self.discarded = False

    def discard(self) -> None:
        self.discarded = True


class Stage:
    """Stands in for the segments' creation and the loader; both log what they do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backing: str) -> None:
        self.log: list[str] = []
        self.made: list[FakeSegment] = []
        self.created = {layer: threading.Event() for layer in (3, 5, 9)}
        self.before_create: Callable[[int], None] = lambda layer: None
        self.during_load: Callable[[int], Any] = lambda layer: asyncio.sleep(0)
        config = Config(
            model_path="/m", engram_config=EngramConfig(placement=Placement.CPU), host=HostConfig(backing=backing)
        )
        self.plan: Plan = make_plan(config, MODEL, machine(), gpus(2))
        self.job = make_job(self.plan, config, None, 2)
        self.segments: dict[str, Segment] = {}
        self.progress: list[LoadProgress] = []
        monkeypatch.setattr(bring_up, "create_segments", self._create)
        monkeypatch.setattr(bring_up, "load", self._load)

    def _create(self, plan: Plan, tag: str, infos: Sequence[SegmentInfo]) -> list[Segment]:
        layer = infos[0].layer_id
        self.before_create(layer)
        made = [FakeSegment(info) for info in infos]
        self.made += made
        self.log.append(f"created {sorted({info.layer_id for info in infos})}")
        self.created[layer].set()
        return list(made)

    async def _load(self, job: LoadJob, segments: Sequence[Segment], on_progress: Any) -> LoadResult:
        layers = [table.layer_id for table in job.tables]
        assert {segment.info.layer_id for segment in segments} == set(layers)
        await self.during_load(layers[0])
        self.log.append(f"loaded {layers}")
        on_progress(LoadProgress(phase="loading", done_bytes=5, total_bytes=5, elapsed_s=0))
        report = LoadReport(
            source="s",
            bytes_read=5,
            seconds=1,
            allocate_seconds=0,
            fill_seconds=1,
            verify_seconds=1,
            direct_io=False,
            threads=1,
            peak_rss_bytes=len(layers),
        )
        names = [segment.info.id for segment in segments]
        return LoadResult(
            report=report,
            roots={layer: f"root {layer}" for layer in layers},
            block_digests=dict.fromkeys(layers, ()),
            pieces=dict.fromkeys(names, ()),
            huge_bytes=dict.fromkeys(names, 1),
            remarks=(f"remark {layers}",),
        )

    def run(self) -> LoadResult:
        work = bring_up.allocate_and_load(self.plan, "tag", self.job, self.segments, self.progress.append)
        return asyncio.run(asyncio.wait_for(work, LIMIT_S))


def join_creation() -> None:
    for thread in threading.enumerate():
        if thread.name == "allocate":
            thread.join(LIMIT_S)


def test_the_next_table_is_created_while_one_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each load waits for the next creation: one after the other would never end."""
    stage = Stage(monkeypatch, "cuda_host")
    following = {3: 5, 5: 9}

    async def wait_for_next(layer: int) -> None:
        if layer in following:
            assert await asyncio.to_thread(stage.created[following[layer]].wait, LIMIT_S)

    stage.during_load = wait_for_next
    result = stage.run()
    assert [entry for entry in stage.log if "loaded" in entry] == ["loaded [3]", "loaded [5]", "loaded [9]"]
    assert list(stage.segments) == [segment.id for segment in stage.plan.segments]
    assert result.roots == {3: "root 3", 5: "root 5", 9: "root 9"}
    assert result.report.bytes_read == 15
    assert set(result.huge_bytes) == set(stage.segments)
    assert [p.done_bytes for p in stage.progress if p.phase == "loading"] == [5, 10, 15]
    assert not any(segment.discarded for segment in stage.made)


def test_other_memory_is_created_and_loaded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "memfd")
    stage.run()
    assert stage.log == ["created [3, 5, 9]", "loaded [3, 5, 9]"]


@pytest.mark.parametrize("layer", [3, 5, 9])
def test_a_creation_that_fails_fails_the_load(monkeypatch: pytest.MonkeyPatch, layer: int) -> None:
    stage = Stage(monkeypatch, "cuda_host")

    def fail(at: int) -> None:
        if at == layer:
            raise AllocationFailed(backing="cuda_host", needed=1, problem="short")

    stage.before_create = fail
    with pytest.raises(AllocationFailed):
        stage.run()
    kept = set(stage.segments.values())
    assert all(segment.discarded != (segment in kept) for segment in stage.made)


def test_a_load_that_fails_discards_what_was_created_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, "cuda_host")

    async def die(layer: int) -> None:
        assert await asyncio.to_thread(stage.created[5].wait, LIMIT_S)
        raise LoaderDied(how="SIGKILL", doing="loading")

    stage.during_load = die
    with pytest.raises(EngramError):
        stage.run()
    join_creation()
    for segment in stage.made:
        assert segment.discarded == (segment.info.layer_id == 5)


def test_a_daemon_that_stops_does_not_wait_for_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The creation goes on in its thread; what it makes is discarded, also when nobody is left to hear of it."""
    stage = Stage(monkeypatch, "cuda_host")
    release = threading.Event()

    def held(layer: int) -> None:
        release.wait(LIMIT_S)

    stage.before_create = held

    async def stop() -> None:
        work = bring_up.allocate_and_load(stage.plan, "tag", stage.job, stage.segments, stage.progress.append)
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop())
    release.set()
    join_creation()
    assert stage.made
    assert all(segment.discarded for segment in stage.made)
    assert not stage.segments
