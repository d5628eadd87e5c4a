"""SGLang's real Engram layers on GPUs: its Triton kernels and its tables, beside the daemon's.

For each placement four engines (eight on two GPUs) run once: SGLang's own table and the daemon's, with harmless values
and with every FP8 and scale code. What is compared is what they returned, eagerly and from captured graphs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engram_client.hashing import Hasher
from engram_client.layout import parse_model_geometry
from tests.sglang.conftest import ENGINE_LIMIT_S, GPUS, Engine, Start, starting
from tests.sglang.test_layer import by_our_rule, compressed_vocabulary
from tests.support.daemon import running
from tests.support.reference import CheckpointReference

LAYERS = (1, 14)
LENGTHS = [64, 1, 31, 200]
CODE_LENGTHS = [900]
NAN, INFINITY = 0x7FC0, 0x7F80

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"
PEER_SHARDS = "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"

pytestmark = pytest.mark.timeout(240)  # the first test of a placement starts its engines, each importing SGLang


@dataclass(frozen=True)
class Case:
    """One placement: how SGLang is told, how the daemon is, and what SGLang's own table must then be."""

    name: str
    environ: dict[str, str]
    config: dict[str, Any]
    layout: str | None = None
    peer: bool = False
    ranks: int = 1
    served_environ: tuple[tuple[str, str], ...] = ()
    """What the served engines are told beside the endpoint."""

    @property
    def checks_the_end(self) -> bool:
        """Whether SGLang's own lookup knows where its table ends; where not, it reads what lies behind."""
        return self.layout != "shared" and not self.peer

    @property
    def keeps_minus_zero(self) -> bool:
        """Whether the code of -0 is -0 in SGLang's own lookup: its peer kernel and a group's sum make it +0. What
        rounds to -0 stays that in its peer kernel."""
        return self.layout == "shared" or self.ranks == 1


PER_RANK = {HOST_TABLE: "1", LAYOUT: "per_rank"}
SHARED = {HOST_TABLE: "1", LAYOUT: "shared"}
HOST, WHOLE_HOST = {"placement": "cpu"}, {"placement": "cpu", "replication": "per_node"}
PEERS = {"placement": "gpu", "lookup": "peer_read"}
ONE = [
    Case("gpu", {}, {"engram_config": {"placement": "gpu"}, "devices": [0]}),
    Case(
        "host-per-rank", PER_RANK, {"engram_config": HOST, "tp_size": 1, "host": {"backing": "cuda_host"}}, "per_rank"
    ),
    Case("host-shared", SHARED, {"engram_config": WHOLE_HOST, "host": {"backing": "memfd"}}, "shared"),
]
TWO = [
    Case("two-gpus-collective", {}, {"engram_config": {"placement": "gpu"}, "devices": [0, 1], "tp_size": 2}, ranks=2),
    Case(
        "two-gpus-peer-read",
        {PEER_SHARDS: "1"},
        {"engram_config": PEERS, "devices": [0, 1], "tp_size": 2},
        peer=True,
        ranks=2,
    ),
    Case("two-gpus-host-per-rank", PER_RANK, {"engram_config": HOST, "tp_size": 2}, "per_rank", ranks=2),
    Case("two-gpus-host-shared", SHARED, {"engram_config": WHOLE_HOST}, "shared", ranks=2),
    Case(
        "two-gpus-host-split",
        SHARED,
        {"engram_config": WHOLE_HOST},
        "shared",
        ranks=2,
        served_environ=(("ENGRAM_SPLIT_READS", "1"),),
    ),
]


@dataclass(frozen=True)
class Outcome:
    """Facts and arrays of the ranks of one engine."""

    facts: list[dict[str, Any]]
    arrays: list[dict[str, np.ndarray]]


@dataclass(frozen=True)
class Compared:
    case: Case
    own: Outcome
    served: Outcome
    own_codes: Outcome
    served_codes: Outcome

    def pairs(self) -> Iterator[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]]:
        """(served, own) arrays of each rank, with harmless values."""
        return zip(self.served.arrays, self.own.arrays, strict=True)


def compare(case: Case, checkpoint: Path, every_code: Path) -> Compared:
    """Runs all engines of a case side by side and ends them. Fails with the traces of those that fail."""
    folder = Path(tempfile.mkdtemp(prefix="eg-"))
    specs: dict[str, dict[str, Any]] = {
        "plain": {"lengths": LENGTHS, "captures": True, "odd_ids": odd_ids(checkpoint, case)},
        "codes": {"lengths": CODE_LENGTHS, "random_ids": True},
    }
    models = {"plain": checkpoint, "codes": every_code}
    engines: dict[str, list[Engine]] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        start = stack.enter_context(starting(folder))
        for name, spec in specs.items():
            store = folder / f"own-{name}"
            engines[f"own {name}"] = ranks_of(start, case, models[name], store, environ=case.environ, **spec)
        for name, spec in specs.items():
            config = {"model_path": str(models[name]), **case.config}
            daemon = stack.enter_context(running(folder / name, config))
            store = folder / f"served-{name}"
            spec |= {"endpoint": daemon.endpoint, "environ": dict(case.served_environ)}
            engines[f"served {name}"] = ranks_of(start, case, models[name], store, **spec)
        found = outcomes_of(engines)
    return Compared(case, found["own plain"], found["served plain"], found["own codes"], found["served codes"])


def ranks_of(start: Start, case: Case, checkpoint: Path, store: Path, **options: Any) -> list[Engine]:
    group = {"device": "cuda", "world_size": case.ranks, "store": str(store)}
    return [start(checkpoint, rank=rank, **group, **options) for rank in range(case.ranks)]


def outcomes_of(engines: dict[str, list[Engine]]) -> dict[str, Outcome]:
    """Waits for all before it fails, so that every failure is told."""
    deadline = time.monotonic() + ENGINE_LIMIT_S
    facts: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    traces = []
    for name, ranks in engines.items():
        for rank, engine in enumerate(ranks):
            try:
                facts[name].append(engine.facts(max(1.0, deadline - time.monotonic())))
            except (TimeoutError, EOFError) as error:
                facts[name].append({"trace": repr(error)})
            if "trace" in facts[name][rank]:
                traces.append(f"{name}, rank {rank}: {facts[name][rank]['trace']}")
    if traces:
        pytest.fail("\n".join(traces))
    return {name: Outcome(facts[name], [engine.arrays() for engine in ranks]) for name, ranks in engines.items()}


def odd_ids(checkpoint: Path, case: Case) -> list[int]:
    """Ids that are no rows, as far as SGLang's own path does not read them out of bounds, and two that are."""
    if case.peer:
        return [0, 1]
    past = min(config_of(checkpoint)["engram_num_embeddings"]) + 100_000
    return [0, 1, -1, -(2**40), *([past, 2**40] if case.checks_the_end else [])]


def config_of(checkpoint: Path) -> dict[str, Any]:
    keys: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())["text_config"]
    return keys


@functools.cache
def vocabulary() -> np.ndarray:
    return compressed_vocabulary()


def case_of(case: Case) -> Any:
    reason = "needs a CUDA GPU" if case.ranks == 1 else f"needs {case.ranks} CUDA GPUs"
    return pytest.param(case, id=case.name, marks=pytest.mark.skipif(case.ranks > GPUS, reason=reason))


@pytest.fixture(scope="module", params=[case_of(case) for case in (*ONE, *TWO)])
def compared(request: pytest.FixtureRequest, checkpoint: Path, every_code: Path) -> Compared:
    return compare(request.param, checkpoint, every_code)


def test_sglangs_own_table_is_where_it_was_told_and_the_served_engine_has_none(compared: Compared) -> None:
    """So that the comparisons below compare what their names say."""
    case = compared.case
    for rank in range(case.ranks):
        for table in compared.own.facts[rank]["tables"]:
            assert not table["served"]
            assert (table["layout"], table["peer"]) == (case.layout, case.peer)
            assert table["device"] == ("cpu" if case.layout else "cuda")
            assert table["rows"] > 10_000
        for table in compared.served.facts[rank]["tables"]:
            assert table["served"]
            assert (table["layout"], table["peer"], table["rows"]) == (None, False, 0)
        proofs = sum("256 rows compared" in line for line in compared.served.facts[rank]["log"])
        assert proofs == len(LAYERS)


def test_a_served_layer_returns_the_bits_of_sglangs_triton_gather(compared: Compared) -> None:
    """Rows, and what the whole layer makes of them with SGLang's gate; hashed by SGLang's kernel."""
    for served, own in compared.pairs():
        for layer in LAYERS:
            for name in (f"rows_{layer}", f"out_{layer}"):
                assert own[name].any()
                np.testing.assert_array_equal(served[name], by_our_rule(name, own[name]), err_msg=name)
            assert (served[f"out_{layer}"] & 0x7FFF).max() < INFINITY, "finite"


def test_idle_batches_come_back_empty(compared: Compared) -> None:
    for outcome in (compared.own, compared.served):
        for facts in outcome.facts:
            assert [facts[f"idle_{layer}"] for layer in LAYERS] == [[0, 4, 64]] * len(LAYERS)


def test_ids_that_are_no_rows_give_zero_rows_as_sglangs_kernels_do(compared: Compared) -> None:
    for served, own in compared.pairs():
        for layer in LAYERS:
            name = f"rows_odd_{layer}"
            np.testing.assert_array_equal(served[name], by_our_rule(name, own[name]))
            assert served[name][:2].any()
            assert not served[name][2:].any()


def test_every_code_comes_out_as_from_the_triton_kernels(compared: Compared, every_code: Path) -> None:
    """Equal after -0 -> +0 for scale bytes up to 254, NaN as NaN. Scale byte 255 is infinity in SGLang's kernels,
    or NaN for a zero, and NaN here."""
    reference = CheckpointReference(every_code)
    for served, own in zip(compared.served_codes.arrays, compared.own_codes.arrays, strict=True):
        for index, layer in enumerate(LAYERS):
            name = f"rows_{layer}"
            ids = own["ids"][:, index]
            np.testing.assert_array_equal(served["ids"][:, index], ids)
            values, scales = reference.raw(layer, ids)
            beyond = np.repeat(scales == 255, 32, axis=1).reshape(*ids.shape, 256)
            found = served[name].view(np.uint16)
            theirs = by_our_rule(name, own[name]).view(np.uint16)
            np.testing.assert_array_equal(found[~beyond], theirs[~beyond])
            assert (found[beyond] == NAN).all()
            assert beyond.any()
            assert ((theirs[beyond] & 0x7FFF) >= INFINITY).all()
            # What docs/sglang.md says of SGLang's kernels.
            assert ((theirs[beyond] & 0x7FFF) == INFINITY).any()
            minus_zero, case = own[name].view(np.uint16) == 0x8000, compared.case
            exact = values.reshape(minus_zero.shape) == 0x80
            assert minus_zero[exact & ~beyond].any() == case.keeps_minus_zero
            assert minus_zero[~exact].any() == (case.keeps_minus_zero or case.peer)
            # All codes were there.
            assert len(np.unique(values)) == len(np.unique(scales)) == 256


def test_every_code_is_what_the_checkpoint_says(compared: Compared, every_code: Path) -> None:
    """Against the files, decoded by others: both engines could be wrong together."""
    reference = CheckpointReference(every_code)
    for served in compared.served_codes.arrays:
        for index, layer in enumerate(LAYERS):
            expected = reference.rows(layer, served["ids"][:, index]).view(np.int16)
            np.testing.assert_array_equal(served[f"rows_{layer}"], expected)


def test_a_captured_layer_follows_its_tokens_and_equals_the_eager_one(compared: Compared) -> None:
    """SGLang's graph backend, decode steps of three batch sizes, captured, dropped and captured again."""
    for facts in (*compared.own.facts, *compared.served.facts):
        if "capture_trace" in facts:
            pytest.fail(facts["capture_trace"])
        assert facts["captured"] == 36
        assert facts["replays_unlike_eager"] == []


def test_replays_on_the_daemons_table_return_the_bits_of_replays_on_sglangs_own(compared: Compared) -> None:
    for served, own in compared.pairs():
        names = [name for name in own if "_replay_" in name]
        assert len(names) == 36 * 2 * len(LAYERS)
        assert served.keys() == own.keys()
        for name in names:
            np.testing.assert_array_equal(served[name], by_our_rule(name, own[name]), err_msg=name)
        assert len({own[name].tobytes() for name in names if name.startswith("rows_replay_0_32_")}) == 6 * len(LAYERS)
        for name in (name for name in names if "_replay_0_" in name):
            np.testing.assert_array_equal(own[name], own[name.replace("_replay_0_", "_replay_1_")], err_msg=name)


def test_the_hash_ids_of_sglangs_kernel_are_those_of_our_reference(compared: Compared, checkpoint: Path) -> None:
    hasher = Hasher(parse_model_geometry(config_of(checkpoint), "config.json"), vocabulary())
    ends = np.cumsum(LENGTHS)[:-1]
    for arrays in compared.served.arrays:
        for index, layer in enumerate(LAYERS):
            parts = [hasher.row_ids(part, layer) for part in np.split(arrays["tokens"], ends)]
            np.testing.assert_array_equal(arrays["ids"][:, index], np.concatenate(parts))


def test_all_ranks_return_the_same(compared: Compared) -> None:
    """Equal tokens on all ranks: what they return goes into the same matrix products."""
    for outcome in (compared.served, compared.served_codes):
        first = outcome.arrays[0]
        for other in outcome.arrays[1:]:
            assert all(np.array_equal(first[name], other[name]) for name in first)
