"""Tables in the CUDA driver's memory, end to end on the fake driver: real daemon, loader and rank processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_client import connect
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.layout import shard
from engram_client.protocol import State
from engram_server.checkpoint import open_checkpoint
from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon, running
from tests.support.fake_machinery import calls_in
from tests.support.reference import CheckpointReference

PAGE = 2 << 20
FAKE = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver"}


class Scene:
    """A daemon's configuration and the fake machine it and its ranks run on."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.log = folder / "calls.log"

    def environ(self, machine: dict[str, Any], fail: str = "") -> dict[str, str]:
        log = {"ENGRAM_FAKE_LOG": str(self.log), "ENGRAM_FAKE_FAIL": fail}
        return FAKE | log | {"ENGRAM_FAKE_CUDA": json.dumps(machine)}

    def config(self, engram: dict[str, str], **rest: Any) -> dict[str, Any]:
        return {"model_path": str(self.checkpoint), "engram_config": engram, "load": {"verify": "full"}, **rest}

    @contextmanager
    def daemon(self, engram: dict[str, str], machine: dict[str, Any] | None = None, **rest: Any) -> Iterator[Daemon]:
        with running(self.folder, self.config(engram, **rest), environ=self.environ(machine or {})) as daemon:
            yield daemon

    def fails(self, engram: dict[str, str], machine: dict[str, Any] | None = None, **rest: Any) -> tuple[int, str]:
        """Exit code and log of a daemon that must not come up."""
        daemon = Daemon(self.folder, self.config(engram, **rest), environ=self.environ(machine or {}))
        try:
            return daemon.wait_for_exit(60), daemon.log
        finally:
            daemon.kill()

    def rank(
        self, daemon: Daemon, rank: int, world_size: int, device: str, machine: dict[str, Any], **options: Any
    ) -> subprocess.Popen[str]:
        arguments = [daemon.endpoint, str(self.checkpoint), str(rank), str(world_size), device]
        arguments += [str(options["range_bytes"])] if "range_bytes" in options else []
        environ = os.environ | self.environ(machine, options.get("fail", ""))
        if "visible" in options:
            environ["CUDA_VISIBLE_DEVICES"] = options["visible"]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.cuda_rank", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )

    def calls(self, pid: int) -> list[dict[str, Any]]:
        return [event for event in calls_in(self.log) if event["pid"] == pid]


@pytest.fixture
def scene(folder: Path, checkpoint: Path) -> Scene:
    return Scene(folder, checkpoint)


def reports(ranks: Sequence[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    found = []
    for process in ranks:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0, out
        found.append(json.loads(out))
    return found


def table_rows(reference: CheckpointReference) -> int:
    return sum(len(reference.tensor(f"layers.{layer}.engram.embed.weight")) for layer in (1, 14))


def check_owner(scene: Scene, daemon: Daemon) -> None:
    """The daemon drains, made no context, mapped nothing and gave all back."""
    assert daemon.stop() == 0, daemon.log
    calls = scene.calls(daemon.pid)
    assert not {"cuDevicePrimaryCtxRetain", "cuMemMap", "cuMemSetAccess"} & {event["call"] for event in calls}
    assert calls[-1] == {"pid": daemon.pid, "call": "exit", "leaks": []}


def test_host_memory_of_the_driver_is_chosen_and_read_by_gpu_and_cpu_ranks(
    scene: Scene, reference: CheckpointReference
) -> None:
    with scene.daemon({"placement": "cpu", "replication": "per_node"}) as daemon:
        status = daemon.status()
        assert {segment.info.backing for segment in status.segments} == {"cuda_host"}
        assert all(segment.huge_bytes == segment.info.nbytes for segment in status.segments)
        assert status.backing_reason.startswith("auto")
        assert all(table.identity.root for table in status.tables)
        ranks = [scene.rank(daemon, rank, 2, f"cuda:{rank}", {}) for rank in range(2)]
        for report in reports(ranks):
            assert report == {
                "rows": table_rows(reference),
                "segments": ["L1", "L14"],
                "leaks": [],
                "usable": True,
            }
        check_owner(scene, daemon)


def test_a_cpu_rank_looks_up_in_host_memory_of_the_driver(
    scene: Scene, reference: CheckpointReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DRIVER_VARIABLE, FAKE[DRIVER_VARIABLE])
    monkeypatch.setattr("engram_client.cuda.access._driver", None)  # this process may have the real one already
    with scene.daemon({"placement": "cpu", "replication": "per_node"}) as daemon:
        with connect(daemon.endpoint, rank=0, world_size=1) as client:
            for layer in client.layers:
                table = client.table(layer)
                ids = np.random.default_rng(1).integers(-1, table.rows, 500)
                rows = table.lookup(torch.from_numpy(ids))
                assert np.array_equal(rows.view(torch.int16).numpy(), reference.rows(layer, ids).view(np.int16))


def test_the_second_table_is_created_while_the_first_is_filled_and_the_roots_are_the_same(scene: Scene) -> None:
    with scene.daemon({"placement": "cpu"}, tp_size=3) as daemon:
        made = daemon.status()
        creates = [event for event in scene.calls(daemon.pid) if event["call"] == "cuMemCreate"]
        assert len(creates) == 6 + 1  # and the probe
        check_owner(scene, daemon)
    with running(scene.folder / "plain", scene.config({"placement": "cpu"}, host={"backing": "memfd"})) as plain:
        roots = [table.identity.root for table in plain.status().tables]
    assert [table.identity.root for table in made.tables] == roots


@pytest.mark.parametrize("lookup", ["collective", "peer_read"])
def test_shards_in_gpu_memory_are_read_by_the_ranks_that_should(
    scene: Scene, reference: CheckpointReference, lookup: str
) -> None:
    machine = {"gpus": 3}
    with scene.daemon({"placement": "gpu", "lookup": lookup}, machine) as daemon:
        infos = [segment.info for segment in daemon.status().segments]
        assert [(info.id, info.device) for info in infos[:3]] == [
            (f"L1.r{rank}of3", f"GPU-{rank:08x}-0000-4000-8000-000000000000") for rank in range(3)
        ]
        assert {(info.row_format, info.backing) for info in infos} == {("planar", "cuda_device")}
        assert all(table.identity.root for table in daemon.status().tables)
        found = reports([scene.rank(daemon, rank, 3, f"cuda:{rank}", machine) for rank in range(3)])
        for rank, report in enumerate(found):
            assert report["leaks"] == []
            mine = [f"L{layer}.r{rank}of3" for layer in (1, 14)]
            every = [info.id for info in infos]
            assert report["segments"] == (every if lookup == "peer_read" else mine)
        total = sum(report["rows"] for report in found)
        assert total == table_rows(reference) * (3 if lookup == "peer_read" else 1)
        check_owner(scene, daemon)


def test_a_whole_copy_is_spread_over_the_gpus_and_read_whole_by_any_rank(
    scene: Scene, reference: CheckpointReference
) -> None:
    with scene.daemon({"placement": "gpu", "replication": "per_node"}, {"gpus": 4}, devices=[3, 1]) as daemon:
        devices = [segment.info.device for segment in daemon.status().segments]
        assert devices == [f"GPU-{index:08x}-0000-4000-8000-000000000000" for index in (3, 1, 3, 1)]
        # world sizes differ from the daemon's, and ranks may see the GPUs in another order
        ranks = [scene.rank(daemon, 4, 5, "cuda:0", {"gpus": 4}), scene.rank(daemon, 0, 1, "cuda:3", {"gpus": 4})]
        ranks.append(scene.rank(daemon, 0, 1, "cuda:0", {"gpus": 4}, visible="1,3"))
        for report in reports(ranks):
            assert report["rows"] == table_rows(reference)


TINY_VOCAB, MANY_RANKS = 2, 4000
"""Tables of 963 and 3,698 rows for more ranks than that."""


@pytest.mark.parametrize("placement", ["gpu", "cpu"])
def test_a_rank_without_a_row_has_an_empty_shard_beside_those_of_others(folder: Path, placement: str) -> None:
    make_checkpoint(folder / "model", engram_vocab_size=TINY_VOCAB, seed=1)
    scene, machine = Scene(folder, folder / "model"), {"gpus": 2}
    tables = open_checkpoint(folder / "model").model.tables()
    shards = [[shard(table, rank, MANY_RANKS).rows for table in tables] for rank in range(MANY_RANKS)]
    # A node of two ranks, of which one has rows of the second table, and the other has nothing at all.
    node = next(k for k in range(MANY_RANKS // 2) if sorted(shards[2 * k : 2 * k + 2]) == [[0, 0], [0, 1]])
    nodes = {"tp_size": MANY_RANKS, "nnodes": MANY_RANKS // 2, "node_rank": node}
    with scene.daemon({"placement": placement}, machine, **nodes) as daemon:
        ranks = range(2 * node, 2 * node + 2)
        found = reports([scene.rank(daemon, k, MANY_RANKS, f"cuda:{k % 2}", machine) for k in ranks])
        assert [report["rows"] for report in found] == [sum(shards[k]) for k in ranks]
        assert all(len(report["segments"]) == 2 and report["leaks"] == [] for report in found)
        check_owner(scene, daemon)


# What a machine may lack


def test_fabric_that_lies_is_said_and_descriptors_are_used(scene: Scene, reference: CheckpointReference) -> None:
    with scene.daemon({"placement": "gpu"}, {"fabric": "lies"}) as daemon:
        assert "fabric unusable: cuMemCreate answers CUDA_ERROR_NOT_PERMITTED" in daemon.log
        found = reports([scene.rank(daemon, rank, 2, f"cuda:{rank}", {"fabric": "lies"}) for rank in range(2)])
        assert sum(report["rows"] for report in found) == table_rows(reference)


def test_memory_that_no_other_node_reads_is_never_exported_to_the_fabric(scene: Scene) -> None:
    with scene.daemon({"placement": "gpu", "lookup": "peer_read"}, {"fabric": "yes"}) as daemon:
        assert "fabric usable" in daemon.status().backing_reason
        blobs = [event for event in scene.calls(daemon.pid) if "fake-fabric" in event.get("result", "")]
        assert len(blobs) == 2, "the probe's, one a GPU"


@pytest.mark.parametrize("machine", [{"driver": False}, {"host_numa": False}])
def test_without_the_drivers_host_memory_auto_is_memfd_and_says_why(
    scene: Scene, reference: CheckpointReference, machine: dict[str, Any]
) -> None:
    with scene.daemon({"placement": "cpu", "replication": "per_node"}, machine) as daemon:
        status = daemon.status()
        assert {segment.info.backing for segment in status.segments} == {"memfd"}
        assert ("not cuda_host" in status.backing_reason) == ("host_numa" in machine)
        (report,) = reports([scene.rank(daemon, 0, 1, "cuda:0", machine)])
        if "driver" in machine:
            assert report["error"] == "NoDriver"
        else:
            assert report == {"rows": table_rows(reference), "segments": ["L1", "L14"], "leaks": [], "usable": True}


@pytest.mark.parametrize(
    ("engram", "machine", "rest", "code", "error"),
    [
        ({"placement": "gpu"}, {"driver": False}, {}, 2, "NoGpu"),
        ({"placement": "gpu"}, {}, {"tp_size": 3}, 2, "TooFewGpus"),
        ({"placement": "gpu"}, {}, {"devices": [0, 7]}, 2, "GpuNotFound"),
        ({"placement": "gpu", "lookup": "peer_read"}, {"peers": False}, {}, 3, "PeerAccessMissing"),
        ({"placement": "gpu", "replication": "per_node"}, {"peers": False}, {}, 3, "PeerAccessMissing"),
        ({"placement": "gpu"}, {"gpu_bytes": 4 << 20}, {}, 3, "NotEnoughGpuMemory"),
        ({"placement": "cpu"}, {"host_numa": False}, {"host": {"backing": "cuda_host"}}, 3, "BackingUnavailable"),
        ({"placement": "cpu"}, {"driver": False}, {"host": {"backing": "cuda_host"}}, 3, "BackingUnavailable"),
    ],
)
def test_what_cannot_be_is_refused_before_the_load(
    scene: Scene, engram: dict[str, str], machine: dict[str, Any], rest: dict[str, Any], code: int, error: str
) -> None:
    exit_code, log = scene.fails(engram, machine, **rest)
    assert exit_code == code, log
    assert f"{error}: " in log
    assert "loading" not in log


@pytest.mark.parametrize("call", ["cuMemGetAllocationGranularity", "cuMemCreate"])
def test_a_driver_without_virtual_memory_management_is_refused_for_its_own_memory_and_not_needed_for_other(
    scene: Scene, reference: CheckpointReference, call: str
) -> None:
    environ = scene.environ({}, f"{call}:*:CUDA_ERROR_NOT_SUPPORTED")
    for engram, host, codes in (
        ({"placement": "gpu"}, "auto", (2, 3)),
        ({"placement": "cpu"}, "cuda_host", (3,)),
    ):
        daemon = Daemon(scene.folder, scene.config(engram, host={"backing": host}), environ=environ)
        try:
            assert daemon.wait_for_exit(60) in codes, daemon.log
            assert call in daemon.log
            assert "CUDA_ERROR_NOT_SUPPORTED" in daemon.log
        finally:
            daemon.kill()
    with running(scene.folder, scene.config(WHOLE), environ=environ) as daemon:
        assert {segment.info.backing for segment in daemon.status().segments} == {"memfd"}
        assert call in daemon.status().backing_reason
        assert daemon.status().options.tp_size == 2, "the GPUs are there"
        (report,) = reports([scene.rank(daemon, 0, 1, "cuda:0", {}, fail=f"{call}:*:CUDA_ERROR_NOT_SUPPORTED")])
        assert report["rows"] == table_rows(reference)


def test_a_driver_that_fails_during_the_load_ends_the_daemon_and_leaves_nothing(scene: Scene) -> None:
    for fail, engram in (
        ("cuMemcpyHtoDAsync:3:CUDA_ERROR_LAUNCH_FAILED", {"placement": "gpu"}),
        ("cuMemSetAccess:1:CUDA_ERROR_UNKNOWN", {"placement": "cpu"}),
        ("cuMemCreate:5:CUDA_ERROR_OUT_OF_MEMORY", {"placement": "cpu"}),
    ):
        daemon = Daemon(scene.folder, scene.config(engram), environ=scene.environ({}, fail))
        try:
            assert daemon.wait_for_exit(60) in (1, 3), daemon.log
            assert fail.split(":")[2] in daemon.log
            assert scene.calls(daemon.pid)[-1]["leaks"] == []
        finally:
            daemon.kill()


# Registration


MEMFD: dict[str, Any] = {"host": {"backing": "memfd"}}
WHOLE = {"placement": "cpu", "replication": "per_node"}


def test_rows_across_ranges_are_right_and_a_failed_range_undoes_all(
    scene: Scene, reference: CheckpointReference
) -> None:
    with scene.daemon(WHOLE, **MEMFD) as daemon:
        assert all(segment.info.nbytes > 2 * PAGE for segment in daemon.status().segments)
        (report,) = reports([scene.rank(daemon, 0, 1, "cuda:1", {}, range_bytes=PAGE)])
        assert report["rows"] == table_rows(reference)
        for nth in (1, 3, 5):
            fail = f"cuMemHostRegister:{nth}:CUDA_ERROR_OUT_OF_MEMORY"
            (report,) = reports([scene.rank(daemon, 0, 1, "cuda:0", {}, range_bytes=PAGE, fail=fail)])
            assert report["error"] == "RegistrationFailed"
            assert report["fields"]["name"] == "CUDA_ERROR_OUT_OF_MEMORY"
            assert (report["leaks"], report["usable"]) == ([], True)
        (report,) = reports([scene.rank(daemon, 0, 1, "cuda:2", {})])
        assert report["error"] == "GpuNotFound"


@pytest.mark.parametrize(("ranks", "backing"), [(1, "memfd"), (4, "memfd"), (8, "memfd"), (8, "cuda_host")])
def test_ranks_that_attach_at_once_all_read_the_table(
    scene: Scene, reference: CheckpointReference, ranks: int, backing: str
) -> None:
    machine = {"gpus": 8, "exclusive": str(scene.folder / "exclusive")}
    with scene.daemon(WHOLE, machine, host={"backing": backing}) as daemon:
        started = [scene.rank(daemon, rank, ranks, f"cuda:{rank}", machine, range_bytes=PAGE) for rank in range(ranks)]
        for report in reports(started):
            assert report["rows"] == table_rows(reference), report
        assert daemon.status().state is State.READY
