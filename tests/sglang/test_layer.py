"""SGLang's real Engram layers in processes of their own: on the daemon's tables, and on tables of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_client.hashing import Hasher
from engram_client.layout import parse_model_geometry
from tests.sglang.conftest import Start
from tests.support.daemon import Daemon, running

LAYERS = (1, 14)

pytestmark = pytest.mark.timeout(300)  # each process imports SGLang, which takes 8 s of CPU time


def by_our_rule(name: str, array: np.ndarray) -> np.ndarray:
    """What SGLang's CPU path returns, by the value rule of this project: +0 for -0, and one NaN. Rows only."""
    if not name.startswith("rows_"):
        return array
    bits = array.view(np.uint16)
    bits = np.where((bits & 0x7FFF) > 0x7F80, 0x7FC0, np.where(bits == 0x8000, 0, bits))
    return bits.astype(np.uint16).view(np.int16)


def test_a_served_layer_returns_the_bits_of_sglangs_own_layer(start: Start, daemon: Daemon, checkpoint: Path) -> None:
    """Real plugin loader, real layer, real hasher; the layer's other weights load as before."""
    served, own = start(checkpoint, daemon.endpoint), start(checkpoint)
    facts, own_facts = served.facts(), own.facts()
    assert "error" not in facts
    assert "error" not in own_facts
    found, expected = served.arrays(), own.arrays()
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_array_equal(found[name], by_our_rule(name, expected[name]), err_msg=name)
    assert all((found[f"out_{layer}"] & 0x7FFF).max() < 0x7F80 for layer in LAYERS), "finite"
    assert facts["idle_1"] == own_facts["idle_1"] == [0, 4, 64]
    # No memory for tables, all other parameters alike.
    for name, shape in own_facts["parameters"].items():
        empty = ".embed." in name
        assert facts["parameters"][name] == ([0, shape[1]] if empty else shape)
    assert sum("256 rows compared" in line for line in facts["log"]) == len(LAYERS)
    assert own_facts["log"] == []


def test_every_code_comes_out_as_from_sglangs_own_table(start: Start, folder: Path, every_code: Path) -> None:
    """Equal after -0 -> +0, and NaN as NaN: this project's value rule, on which all its paths agree."""
    config = {"model_path": str(every_code), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config) as daemon:
        served = start(every_code, daemon.endpoint, random_ids=True, lengths=[900])
        own = start(every_code, random_ids=True, lengths=[900])
        assert "error" not in served.facts() | own.facts()
    found, expected = served.arrays(), own.arrays()
    theirs = np.stack([expected[f"rows_{layer}"] for layer in LAYERS]).view(np.uint16)
    assert ((theirs & 0x7FFF) > 0x7F80).any()
    assert (theirs == 0x8000).any()
    for layer in LAYERS:
        name = f"rows_{layer}"
        np.testing.assert_array_equal(found[name], by_our_rule(name, expected[name]))


def test_the_hash_ids_are_those_of_our_reference(start: Start, checkpoint: Path) -> None:
    """SGLang's hasher over the released tokenizer, and engram_client.hashing, from the same tokens."""
    lengths = [64, 1, 31, 200]
    engine = start(checkpoint, lengths=lengths)
    assert "error" not in engine.facts()
    arrays = engine.arrays()
    keys = json.loads((checkpoint / "config.json").read_text())["text_config"]
    hasher = Hasher(parse_model_geometry(keys, "config.json"), compressed_vocabulary())
    ends = np.cumsum(lengths)
    for index, layer in enumerate(LAYERS):
        parts = [hasher.row_ids(part, layer) for part in np.split(arrays["tokens"], ends[:-1])]
        np.testing.assert_array_equal(arrays["ids"][:, index], np.concatenate(parts))


def compressed_vocabulary() -> np.ndarray:
    from engram_client.hashing import compress_vocabulary
    from tests.sglang.engine import FastTokenizer

    backend = FastTokenizer().backend_tokenizer
    size = backend.get_vocab_size()
    compressed, _ = compress_vocabulary(
        lambda token: str(backend.decode([token], skip_special_tokens=False)), backend.id_to_token, size
    )
    return compressed


def test_weights_can_be_loaded_again_and_are_compared_again(start: Start, daemon: Daemon, checkpoint: Path) -> None:
    engine = start(checkpoint, daemon.endpoint, random_ids=True, rounds=3)
    facts = engine.facts()
    assert "error" not in facts
    assert sum("256 rows compared" in line for line in facts["log"]) == 3 * len(LAYERS)


def test_a_daemon_with_other_rows_is_a_startup_error(start: Start, daemon: Daemon, other_content: Path) -> None:
    facts = start(other_content, daemon.endpoint, random_ids=True).facts()
    assert facts["error"] == "CheckpointDiffers"


def test_an_absent_daemon_is_a_startup_error_that_names_the_remedy(
    start: Start, folder: Path, checkpoint: Path
) -> None:
    absent = f"ipc://{folder}/none.sock"
    facts = start(checkpoint, absent, {"ENGRAM_TIMEOUT": "0"}, random_ids=True).facts()
    assert facts["error"] == "NoServer"


def test_the_fallback_is_sglangs_own_table_and_a_warning(start: Start, folder: Path, checkpoint: Path) -> None:
    absent = f"ipc://{folder}/none.sock"
    fallen = start(checkpoint, absent, {"ENGRAM_TIMEOUT": "0", "ENGRAM_REQUIRED": "0"}, random_ids=True)
    own = start(checkpoint, random_ids=True)
    facts = fallen.facts()
    assert facts["parameters"] == own.facts()["parameters"]
    assert [line.split(" ")[0] for line in facts["log"]] == ["WARNING"] * len(LAYERS)
    found, expected = fallen.arrays(), own.arrays()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_when_one_rank_cannot_attach_all_ranks_fall_back(start: Start, folder: Path, checkpoint: Path) -> None:
    """Half a group on the daemon would wait for ever for the half that is not."""
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu"}, "tp_size": 2}
    spec: dict[str, Any] = {"random_ids": True, "layers": [1], "world_size": 2, "store": str(folder / "store")}
    with running(folder, config) as daemon:
        attached = start(checkpoint, daemon.endpoint, {"ENGRAM_REQUIRED": "0"}, rank=0, **spec)
        absent = {"ENGRAM_REQUIRED": "0", "ENGRAM_TIMEOUT": "0"}
        alone = start(checkpoint, f"ipc://{folder}/none.sock", absent, rank=1, **spec)
        logs = [engine.facts()["log"] for engine in (attached, alone)]
    assert all(any(line.startswith("WARNING") and "own table" in line for line in log) for log in logs)
    first, second = (engine.arrays()["rows_1"] for engine in (attached, alone))
    np.testing.assert_array_equal(first, second)
    assert first.any()


@pytest.mark.parametrize(("world_size", "split"), [(2, False), (5, False), (2, True)])
def test_ranks_that_assemble_shards_return_the_bits_of_sglangs_own_group(
    start: Start, folder: Path, checkpoint: Path, world_size: int, split: bool
) -> None:
    """Shards by columns (2) and by rows (5), over gloo, and one whole table whose reads the ranks share out; SGLang's
    group sums bfloat16, ours moves bytes."""
    engram_config = {"placement": "cpu", "replication": "per_node" if split else "none"}
    config = {"model_path": str(checkpoint), "engram_config": engram_config, "tp_size": world_size}
    environ = {"ENGRAM_SPLIT_READS": "1"} if split else {}
    spec: dict[str, Any] = {"random_ids": True, "lengths": [40, 9], "layers": [14], "world_size": world_size}
    with running(folder, config) as daemon:
        ranks = [
            start(checkpoint, daemon.endpoint, environ, rank=rank, store=str(folder / "store"), **spec)
            for rank in range(world_size)
        ]
        assert all("error" not in rank.facts() for rank in ranks)
    own = [start(checkpoint, rank=rank, store=str(folder / "own"), **spec) for rank in range(world_size)]
    assert all("error" not in rank.facts() for rank in own)
    for rank, theirs in zip(ranks, own, strict=True):
        found, expected = rank.arrays(), theirs.arrays()
        assert all(np.array_equal(found[name], by_our_rule(name, expected[name])) for name in expected)


@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ([30, 0, 7], {}),  # an idle rank joins without tokens
        ([30, 0, 7], {"padding": 3}),
        ([11, 11, 11], {"context_parallel": True}),
    ],
    ids=["attention-dp", "attention-dp-padded", "context-parallel"],
)
@pytest.mark.parametrize("replication", ["none", "per_node", "per_node-split"])
def test_ranks_with_tokens_of_their_own_get_their_own_rows(
    start: Start, folder: Path, checkpoint: Path, lengths: list[int], options: dict[str, Any], replication: str
) -> None:
    """SGLang's state of attention DP and of prefill CP, three ranks; the rows are those of one engine alone."""
    wanted = start(checkpoint, random_ids=True, lengths=[sum(lengths)], layers=[1])
    assert "error" not in wanted.facts()
    rows = by_our_rule("rows_", wanted.arrays()["rows_1"])
    replication, _, split = replication.partition("-")
    engram_config = {"placement": "cpu", "replication": replication}
    config = {"model_path": str(checkpoint), "engram_config": engram_config, "tp_size": 3}
    environ = {"ENGRAM_SPLIT_READS": "1" if split else "0"}
    spec: dict[str, Any] = {"random_ids": True, "lengths": [sum(lengths)], "layers": [1], "world_size": 3}
    with running(folder, config) as daemon:
        ranks = [
            start(
                checkpoint,
                daemon.endpoint,
                environ,
                rank=rank,
                store=str(folder / "store"),
                own_lengths=lengths,
                **spec,
                **options,
            )
            for rank in range(3)
        ]
        assert [rank.facts().get("trace") for rank in ranks] == [None] * 3
    padding = options.get("padding", 0)
    for rank, expected in zip(ranks, np.split(rows, np.cumsum(lengths)[:-1]), strict=True):
        found = rank.arrays()["rows"]
        np.testing.assert_array_equal(found[: len(expected)], expected)
        assert len(found) == len(expected) + padding
        if replication == "none":
            assert not found[len(expected) :].any()


def test_the_check_command_is_content_where_an_engine_runs(daemon: Daemon, tmp_path: Path) -> None:
    """From a folder that is not the repository: what is installed must be enough."""
    done = subprocess.run(
        [sys.executable, "-m", "engram_client.sglang"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ENGRAM_ENDPOINT": daemon.endpoint, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == 4


def test_two_engines_hold_one_copy_of_the_table(start: Start, daemon: Daemon, checkpoint: Path) -> None:
    """Proportional set sizes of two processes that have both read every row add up to one table."""
    engines = [start(checkpoint, daemon.endpoint, random_ids=True, sweep=True) for _ in range(2)]
    assert all("error" not in engine.facts() for engine in engines)
    shares = [engine.table_share() for engine in engines]
    table = sum(segment.info.nbytes for segment in daemon.status().segments)
    assert sum(shares) <= table
    assert all(0.4 * table < share < 0.6 * table for share in shares)
