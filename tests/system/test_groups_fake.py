"""Groups of eight ranks on eight GPUs of the fake driver: the benchmark of groups, and a rank that is killed."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engram_client.cuda import access
from tests.bench import group_arms, groups
from tests.bench.gpu_support import ColumnIds, Results
from tests.bench.group_table import by_group, read_rows, times_of
from tests.support.daemon import running
from tests.support.fake_runtime import FAKE, on_fake
from tests.support.ranks import RankFailed
from tests.support.reading import one_killed_while_the_others_read

RANKS = 8
MACHINE = {"gpus": RANKS}
PEERS = {"placement": "gpu", "lookup": "peer_read"}
GPU_WHOLE = {"placement": "gpu", "replication": "per_node"}
WHOLE = {"placement": "cpu", "replication": "per_node"}


@dataclass(frozen=True)
class FakeGpus(group_arms.Gpus):
    def enter(self, rank: int) -> torch.device:
        on_fake(MACHINE)
        return torch.device("cpu")

    def group(self) -> None:
        """All ranks, through gloo."""

    def median_us(self, ids: ColumnIds, launch: group_arms.Launch, group: Any, together: bool) -> float:
        begin = time.perf_counter()
        for one in ids.ids[:2]:
            launch(one)
        return 1e6 * (time.perf_counter() - begin)


def test_the_benchmark_of_groups_has_every_arm_for_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm's rows are compared with those that were made."""
    for name, value in (FAKE | {"ENGRAM_FAKE_CUDA": json.dumps(MACHINE)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(access, "_driver", None)
    path = tmp_path / "groups.csv"
    options = groups.parser().parse_args(["--gib", "0.02", "--host-gib", "0.02", "--tokens", "1,48"])
    sizes = groups.sizes_that_fit("8,2,16", RANKS)
    assert sizes == [2, 8]
    with closing(Results(path, "none", "cold", gpu="fake")) as results:
        groups.Groups(options, FakeGpus(), results).run(sizes)
    rows = read_rows(path)
    times = times_of(rows)
    arms = {
        ("collective", "collective (all-gather of stored rows)"),
        ("collective", "collective (as the client chooses)"),
        ("collective", "zero-fill + all-reduce, our gather"),
        ("peer_read", "peer_read"),
        ("peer_read", "all ranks at once"),
        ("per_node", "rank 0 alone"),
        ("per_node", "all ranks at once"),
        ("per_node", "split reads"),
        ("per_node", "split reads, by tokens"),
        ("per_node", "split reads (as the client chooses)"),
    }
    assert set(times) == arms
    for found in times.values():
        assert {size: set(line) for size, line in found.items()} == {size: {1, 48} for size in sizes}
    others = {(row["name"], row["ranks"]) for row in rows}
    for kind in groups.KINDS:
        for size in sizes:
            assert {(f"{kind}: attach, median", str(size)), (f"{kind}: attach, worst", str(size))} <= others
    table = by_group(rows)
    assert all(f"| {kind}: {name} | {size} |" in table for kind, name in times for size in sizes)


def test_a_group_that_fails_does_not_cost_the_others_their_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(ranks: int, *rest: Any, **named: Any) -> list[group_arms.Report]:
        if ranks == 4:
            raise RankFailed(1, "out of memory")
        return [group_arms.Report([1.0], [group_arms.Time(1, "arm", 2.0)])] * ranks

    monkeypatch.setattr(groups, "run_ranks", run_ranks)
    monkeypatch.setattr(groups.Groups, "_daemon", lambda *given, **named: nullcontext(SimpleNamespace(endpoint="")))
    options = groups.parser().parse_args(["--kinds", "collective,peer_read"])
    path = tmp_path / "groups.csv"
    with closing(Results(path, "none", "cold", gpu="fake")) as results:
        run = groups.Groups(options, FakeGpus(), results)
        run.run([2, 4, 8])
    assert run.failed == ["collective of 4 ranks", "peer_read of 4 ranks"]
    assert {row["ranks"] for row in read_rows(path)} == {"2", "8"}


def test_a_machine_with_fewer_gpus_than_any_group_is_refused() -> None:
    with pytest.raises(SystemExit):
        groups.sizes_that_fit("2,4,8", 1)


def test_the_benchmark_measures_what_its_options_say() -> None:
    options = groups.parser().parse_args([])
    assert isinstance(options, argparse.Namespace)
    assert groups.sizes_that_fit(options.ranks, 8) == [2, 4, 8]
    assert set(options.kinds.split(",")) == set(group_arms.KINDS)


def enter_fake(machine: dict[str, Any], rank: int) -> tuple[torch.device, Callable[[], None]]:
    on_fake(machine)
    return torch.device("cpu"), do_nothing


def do_nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("engram", "rest"),
    [(PEERS, {"tp_size": RANKS}), (GPU_WHOLE, {}), (WHOLE, {"host": {"backing": "memfd"}})],
    ids=["peer_read", "per_node", "host"],
)
def test_one_of_eight_ranks_is_killed_and_the_others_read_on(
    folder: Path, checkpoint: Path, engram: dict[str, str], rest: dict[str, Any]
) -> None:
    config = {"model_path": str(checkpoint), "engram_config": engram, **rest}
    with running(folder, config, environ=FAKE | {"ENGRAM_FAKE_CUDA": json.dumps(MACHINE)}) as daemon:
        one_killed_while_the_others_read(daemon, checkpoint, RANKS, partial(enter_fake, MACHINE))
