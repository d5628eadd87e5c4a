"""The SGLang plugin where it must refuse, stay out of the way or say something; on a stand-in for SGLang."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import engram_client
from engram_client import errors, sglang, sglang_attach, sglang_check
from engram_client.api import RawRows
from engram_client.layout import column_primes
from engram_client.protocol import (
    LoadProgress,
    Lookup,
    Placement,
    Progress,
    Replication,
    ResolvedOptions,
    State,
)
from tests.support.fake_sglang import FILES, write_tree
from tests.support.tables import random_table, reference_bf16

ROOT = Path(__file__).parents[2]
ABSENT = "ipc:///nonexistent/control.sock"
(COLUMNS,) = column_primes(1, 3, 8, 20)
ROWS = sum(COLUMNS)
BOUNDS = tuple(np.concatenate([[0], np.cumsum(COLUMNS)]).tolist())

Install = Callable[..., None]


def forget_modules() -> None:
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]
    if sys.modules.pop("engram_client.sglang_layer", None) is not None:
        del engram_client.sglang_layer  # else `from engram_client import` would still find it


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """fake(**changed_files): a stand-in for SGLang can be imported, in which nothing has been hooked."""
    forget_modules()
    for name in [name for name in os.environ if name.startswith(("ENGRAM_", "SGLANG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ENGRAM_TIMEOUT", "0")
    monkeypatch.setattr(sglang_attach, "_clients", {})
    monkeypatch.setattr(sglang_attach, "_failures", {})

    def install(**changed: str | None) -> None:
        write_tree(tmp_path, **changed)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    forget_modules()


def load(monkeypatch: pytest.MonkeyPatch, endpoint: str = ABSENT) -> None:
    """What SGLang's loader does with the plugin."""
    monkeypatch.setenv("ENGRAM_ENDPOINT", endpoint)
    sglang.plugin()
    registry().apply_hooks()


def registry() -> Any:
    return importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry


def layer_module() -> Any:
    return importlib.import_module("sglang.srt.layers.engram")


def loaded_by(code: str, **environ: str) -> set[str]:
    """Top-level modules in a fresh interpreter after `code`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ENGRAM_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(list(sys.modules)))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**clean, **environ},
    )
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stdout)}


def test_every_sglang_process_imports_the_plugin_so_it_loads_neither_torch_nor_sglang() -> None:
    loaded = loaded_by("import engram_client.sglang")
    assert not loaded & {"torch", "sglang"}


@pytest.mark.parametrize("environ", [{}, {"ENGRAM_ENDPOINT": ""}], ids=["unset", "empty"])
def test_without_an_endpoint_the_plugin_changes_and_imports_nothing(environ: dict[str, str]) -> None:
    loaded = loaded_by("import engram_client.sglang\nengram_client.sglang.plugin()", **environ)
    assert not loaded & {"torch", "sglang"}


def test_three_methods_of_one_class_are_hooked_and_nothing_is_connected(
    fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake()
    load(monkeypatch)  # the endpoint does not exist: a connection would raise
    assert sorted(target for target, *_ in registry().registered) == [
        f"sglang.srt.layers.engram.EngramEmbedding.{name}" for name in sorted(sglang.HOOKED)
    ]


def test_an_absent_daemon_is_an_error_where_the_embedding_is_built(
    fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake()
    load(monkeypatch)
    with pytest.raises(errors.NoServer):
        layer_module().Engram(1, BOUNDS)


def test_with_required_off_the_embedding_is_sglangs_own_and_one_attempt_is_made(
    fake: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake()
    monkeypatch.setenv("ENGRAM_REQUIRED", "0")
    load(monkeypatch)
    attempts = []
    query = sglang_attach.query_status
    monkeypatch.setattr(
        sglang_attach, "query_status", lambda *given, **named: (attempts.append(given), query(*given, **named))[1]
    )
    for layer in (1, 14):
        built = layer_module().Engram(layer, BOUNDS).embed
        assert built.own
        assert built(torch.zeros(2, 24, dtype=torch.int64)).shape == (2, 24, 256)
        built.finish_load("layer")
        assert built.finished == "layer"
    assert len(attempts) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [*(("ENGRAM_TIMEOUT", value) for value in ("soon", "-1", "nan", "1e9")), ("ENGRAM_SPLIT_READS", "maybe")],
)
def test_a_bad_setting_is_an_error_where_the_embedding_is_built(
    fake: Install, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    fake()
    monkeypatch.setenv(variable, value)
    load(monkeypatch)
    with pytest.raises(errors.EngineSettingInvalid) as caught:
        layer_module().Engram(1, BOUNDS)
    assert caught.value.variable == variable


@pytest.mark.parametrize(("value", "split"), [("", False), ("0", False), ("off", False), ("1", True), (" True", True)])
def test_reads_are_split_where_the_environment_says_so(value: str, split: bool) -> None:
    from engram_client.sglang_attach import Settings

    assert Settings.from_environment({"ENGRAM_SPLIT_READS": value}).split_reads is split
    assert Settings.from_environment({}).split_reads is False


ORIGINAL = FILES["srt/layers/engram.py"]
INCOMPATIBLE = {
    "another parameter in __init__": ORIGINAL.replace(
        "layer_id, column_bounds):", "layer_id, column_bounds, group=None):"
    ),
    "a parameter less in __init__": ORIGINAL.replace("layer_id, column_bounds):", "layer_id):"),
    "another name in forward": ORIGINAL.replace("indices, forward_batch=None, *", "ids, forward_batch=None, *"),
    "a positional cp_all_tokens": ORIGINAL.replace("forward_batch=None, *, ", "forward_batch=None, "),
    "no finish_load": ORIGINAL.replace("def finish_load", "def after_load"),
    "no new_rows": ORIGINAL.replace("new_rows", "fresh_rows"),
    "no staging property": ORIGINAL.replace("shared_host_table_without_ats", "staged"),
    "no embed_rows": ORIGINAL.replace("embed_rows", "rows_of"),
}


@pytest.mark.parametrize("text", INCOMPATIBLE.values(), ids=INCOMPATIBLE)
def test_another_sglang_is_refused_where_the_embedding_is_built(
    fake: Install, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Not while plugins load: SGLang drops what is raised there and would run on its own tables."""
    fake(srt__layers__engram=text)
    load(monkeypatch)
    with pytest.raises(errors.IncompatibleSGLang) as caught:
        layer_module().Engram(1, BOUNDS)
    assert (caught.value.found, caught.value.supported) == ("9.9.9", sglang.SUPPORTED)


@pytest.mark.parametrize("text", INCOMPATIBLE.values(), ids=INCOMPATIBLE)
def test_with_required_off_another_sglang_is_left_alone_with_a_warning(
    fake: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    fake(srt__layers__engram=text)
    monkeypatch.setenv("ENGRAM_REQUIRED", "0")
    load(monkeypatch)
    assert registry().registered == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_an_sglang_without_the_embeddings_class_refuses_the_layer(
    fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(srt__layers__engram=ORIGINAL.replace("EngramEmbedding", "NewEmbedding"))
    load(monkeypatch)
    with pytest.raises(errors.IncompatibleSGLang):
        layer_module().Engram(1, BOUNDS)


def test_an_sglang_without_engram_layers_refuses_v41_models_only(
    fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(srt__layers__engram=None)
    load(monkeypatch)
    config = importlib.import_module("sglang.srt.configs.model_config").ModelConfig
    config(SimpleNamespace(engram_layer_ids=()))
    config(SimpleNamespace())
    with pytest.raises(errors.IncompatibleSGLang):
        config(SimpleNamespace(engram_layer_ids=[1, 14]))
    with pytest.raises(errors.IncompatibleSGLang):
        config(SimpleNamespace(text_config=SimpleNamespace(engram_layer_ids=[1, 14])))


def test_without_any_name_to_refuse_at_the_plugin_itself_raises(fake: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(srt__layers__engram=None, srt__plugins__hook_registry="")
    monkeypatch.setenv("ENGRAM_ENDPOINT", ABSENT)
    with pytest.raises(errors.IncompatibleSGLang):
        sglang.plugin()


def test_a_registry_of_another_shape_is_refused_where_the_embedding_is_built(
    fake: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(srt__plugins__hook_registry="")
    monkeypatch.setenv("ENGRAM_ENDPOINT", ABSENT)
    sglang.plugin()
    with pytest.raises(errors.IncompatibleSGLang):
        layer_module().Engram(1, BOUNDS)


def found_by(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """What is installed beside SGLang."""
    points = [EntryPoint(name, "somewhere:plugin", sglang_check.GROUP) for name in names]
    monkeypatch.setattr(sglang_check, "entry_points", lambda group: points if group == sglang_check.GROUP else [])


@pytest.mark.parametrize("endpoint", ["", ABSENT], ids=["no endpoint", "no daemon"])
def test_the_check_command_fails_where_an_engine_would_not_use_the_daemon(
    fake: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], endpoint: str
) -> None:
    fake()
    found_by(monkeypatch, "another", "engram")
    monkeypatch.setenv("ENGRAM_ENDPOINT", endpoint)
    assert sglang.main() == 1
    assert (endpoint or "ENGRAM_ENDPOINT") in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("names", "allowed", "finds"),
    [
        (["engram"], "", True),
        (["engram"], "another, engram", True),
        (["engram"], "another", False),
        (["another"], "", False),
        ([], "engram", False),
    ],
)
def test_the_check_command_says_whether_sglang_would_load_the_plugin(
    monkeypatch: pytest.MonkeyPatch, names: list[str], allowed: str, finds: bool
) -> None:
    found_by(monkeypatch, *names)
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    if finds:
        assert "engram" in sglang_check.loader()
    else:
        with pytest.raises(sglang_check.Problem):
            sglang_check.loader()


def test_the_check_command_names_what_another_sglang_lacks(fake: Install, capsys: pytest.CaptureFixture[str]) -> None:
    fake(srt__layers__engram=ORIGINAL.replace("def finish_load", "def after_load"))
    assert sglang.main() == 1
    assert "finish_load" in capsys.readouterr().out


def on_machine(monkeypatch: pytest.MonkeyPatch, **machine: Any) -> None:
    monkeypatch.setenv("ENGRAM_CUDA_DRIVER", "tests.support.fake_driver:FakeDriver")
    monkeypatch.setenv("ENGRAM_FAKE_CUDA", json.dumps(machine))
    monkeypatch.setattr("engram_client.cuda.access._driver", None)


def test_the_check_command_compiles_the_kernels_that_the_engines_ranks_will_want(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENGRAM_KERNEL_CACHE", str(tmp_path))
    on_machine(monkeypatch, gpus=2)
    assert "sm_90" in sglang_check.gpus()
    assert [path.suffix for path in tmp_path.iterdir()] == [".cubin"]


def test_the_check_command_fails_where_the_kernels_of_the_gpus_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENGRAM_KERNEL_CACHE", str(tmp_path))
    on_machine(monkeypatch, gpus=1)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(sglang_check.Problem):
        sglang_check.gpus()


@pytest.mark.parametrize("machine", [{"driver": False}, {"gpus": 0}])
def test_the_check_command_is_content_without_a_gpu(monkeypatch: pytest.MonkeyPatch, machine: dict[str, Any]) -> None:
    on_machine(monkeypatch, **machine)
    assert "CPU" in sglang_check.gpus()


# What a layer does with its table


class FakeTable:
    """A table in this process's memory; records how it was asked."""

    layer_id, rows, columns = 1, ROWS, COLUMNS

    def __init__(self) -> None:
        self.values, self.scales = random_table(ROWS)
        self.asked: list[dict[str, Any]] = []

    def lookup(self, ids: torch.Tensor, out: torch.Tensor | None = None, raw: bool = False, **options: Any) -> Any:
        flat = ids.reshape(-1).numpy()
        if raw:
            return RawRows(torch.from_numpy(self.values[flat]), torch.from_numpy(self.scales[flat]))
        self.asked.append({"tokens": len(ids), **options})
        bits = reference_bf16(self.values[flat], self.scales[flat]).reshape(*ids.shape, 256)
        found = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
        return found if out is None else out.copy_(found)


Serve = Callable[..., Any]


@pytest.fixture
def serve(fake: Install, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """serve(table, layer_id=1, bounds=BOUNDS, **options): an Engram layer that is attached to `table`."""
    fake()
    load(monkeypatch)

    def attached(table: Any, layer_id: int = 1, bounds: tuple[int, ...] = BOUNDS, **options: Any) -> Any:
        client = SimpleNamespace(table=lambda layer: table, options=resolved(**options), server_alive=True)
        layer = importlib.import_module("engram_client.sglang_layer")
        monkeypatch.setattr(layer, "client_of_process", lambda *given, **named: client)
        return layer_module().Engram(layer_id, bounds).embed

    return attached


def resolved(**options: Any) -> ResolvedOptions:
    given: dict[str, Any] = {
        "placement": Placement.CPU,
        "replication": Replication.PER_NODE,
        "lookup": Lookup.COLLECTIVE,
        "tp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
    }
    return ResolvedOptions(**{**given, **options})


def show(embedding: Any, table: FakeTable) -> None:
    """What a load does: every parameter's own loader gets the tensor of the checkpoint."""
    values = torch.from_numpy(table.values).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(table.scales).view(torch.float8_e8m0fnu)
    embedding.weight.weight_loader(embedding.weight, values)
    embedding.scale.weight_loader(embedding.scale, scales)


def test_the_parameters_take_no_memory_and_keep_their_names(serve: Serve) -> None:
    embedding = serve(FakeTable())
    assert {name: tuple(each.shape) for name, each in embedding.named_parameters()} == {
        "weight": (0, 256),
        "scale": (0, 8),
    }
    assert all(each.untyped_storage().nbytes() == 0 for each in embedding.parameters())
    assert (embedding.host_table, embedding.peer, embedding.staged_by_scheduler) == (None, None, False)
    assert embedding.shared_host_table_without_ats is False
    assert (embedding.row_start, embedding.rows, embedding.dim) == (0, ROWS, 256)


def test_moving_and_filling_the_models_parameters_does_not_touch_the_table(serve: Serve) -> None:
    """Sleep and wake, dummy weights and dtype changes walk over parameters and buffers."""
    table = FakeTable()
    embedding = serve(table)
    before = table.values.copy()
    embedding.to("cpu")
    embedding.load_state_dict(embedding.state_dict())
    for each in embedding.parameters():
        each.data.copy_(each.data.to(torch.float16).uniform_(-1, 1).to(each.dtype))
    ids = torch.arange(24).view(1, 24)
    assert embedding(ids).shape == (1, 24, 256)
    assert np.array_equal(table.values, before)


def test_a_load_of_the_same_checkpoint_is_proven_each_time(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    table = FakeTable()
    embedding = serve(table)
    for _ in range(3):
        show(embedding, table)
        embedding.finish_load(label="layer 1")
    assert sum("256 rows compared" in record.message for record in caplog.records) == 3


@pytest.mark.parametrize("what", ["values", "scales"])
def test_a_load_of_another_checkpoint_is_refused(serve: Serve, what: str) -> None:
    table, other = FakeTable(), FakeTable()
    getattr(other, what)[ROWS - 1] = 0x41  # the last row is always among those compared
    embedding = serve(table)
    show(embedding, other)
    with pytest.raises(errors.CheckpointDiffers) as caught:
        embedding.finish_load(label="layer 1")
    assert (caught.value.compared, caught.value.differing, caught.value.first_row) == (256, 1, ROWS - 1)


def test_weights_of_another_shape_are_refused(serve: Serve) -> None:
    embedding = serve(FakeTable())
    with pytest.raises(errors.WrongShape):
        embedding.weight.weight_loader(embedding.weight, torch.zeros(ROWS - 1, 256, dtype=torch.uint8))


def test_a_model_without_loaded_tables_runs_and_says_once_that_nothing_was_compared(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    embedding = serve(FakeTable())
    for _ in range(3):
        embedding(torch.zeros(1, 24, dtype=torch.int64))
        embedding.finish_load(label="layer 1")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_table_of_another_shape_is_refused(serve: Serve) -> None:
    with pytest.raises(errors.LayerGeometryMismatch):
        serve(FakeTable(), bounds=(*BOUNDS[:-2], BOUNDS[-2] + 1, BOUNDS[-1]))


def test_a_copied_model_reads_the_same_table(serve: Serve) -> None:
    import copy

    table = FakeTable()
    embedding = serve(table)
    copied = copy.deepcopy(embedding)
    ids = torch.arange(24).view(1, 24)
    assert torch.equal(copied(ids).view(torch.int16), embedding(ids).view(torch.int16))
    assert len(table.asked) == 2


def test_columns_are_named_only_for_ids_that_have_them(serve: Serve) -> None:
    table = FakeTable()
    embedding = serve(table)
    embedding(torch.zeros(3, 24, dtype=torch.int64))
    embedding(torch.zeros(5, dtype=torch.int64))
    assert [asked["hashed"] for asked in table.asked] == [True, False]


# What is said


SETTINGS: dict[str, tuple[dict[str, str], int, dict[str, Any], bool]] = {
    "nothing set": ({}, 4, {}, False),
    "the same": ({sglang_attach.HOST_TABLE: "1"}, 4, {}, False),
    "another layout": ({sglang_attach.HOST_TABLE: "1", sglang_attach.LAYOUT: "per_rank"}, 4, {}, True),
    "peer shards": ({sglang_attach.PEER_SHARDS: "1"}, 4, {}, True),
    "peer shards of one rank": ({sglang_attach.PEER_SHARDS: "1", sglang_attach.HOST_TABLE: "1"}, 1, {}, False),
    "the same peer shards": (
        {sglang_attach.PEER_SHARDS: "1"},
        4,
        {"placement": Placement.GPU, "replication": Replication.NONE, "lookup": Lookup.PEER_READ},
        False,
    ),
    "off": ({sglang_attach.HOST_TABLE: "0"}, 4, {}, True),
    "staging": ({sglang_attach.STAGING: "1"}, 4, {}, True),
    "staging off": ({sglang_attach.STAGING: "0"}, 4, {}, False),
}


@pytest.mark.parametrize(("variables", "world_size", "options", "contradicts"), SETTINGS.values(), ids=SETTINGS)
def test_one_line_says_what_decides_and_warns_of_contradicting_settings(
    fake: Install,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: dict[str, str],
    world_size: int,
    options: dict[str, Any],
    contradicts: bool,
) -> None:
    fake()
    caplog.set_level(logging.INFO)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sglang_attach.announce(ABSENT, resolved(**options), world_size)
    (record,) = caplog.records
    assert record.message.startswith("DeepSeek-V4.1 Engram tables: ")
    assert "\n" not in record.message
    assert record.levelno == (logging.WARNING if contradicts else logging.INFO)
    assert all(name in record.message for name in variables) is contradicts or not variables


@pytest.mark.parametrize(
    ("config", "contradicts"),
    [
        ({}, True),
        ({"placement": "cpu", "replication": "per_node"}, False),
        ({"placement": "cpu"}, True),
    ],
)
def test_a_newer_releases_engram_config_goes_before_the_variables(
    fake: Install,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, str],
    contradicts: bool,
) -> None:
    fake()
    caplog.set_level(logging.INFO)
    monkeypatch.setenv(sglang_attach.PEER_SHARDS, "1")
    importlib.import_module("sglang.srt.runtime_context").get_server_args().engram_config = config
    sglang_attach.announce(ABSENT, resolved(), 4)
    (record,) = caplog.records
    assert record.levelno == (logging.WARNING if contradicts else logging.INFO)
    assert ("--engram-config" in record.message) is contradicts
    assert sglang_attach.PEER_SHARDS not in record.message


def test_a_load_that_is_waited_for_is_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = sglang_attach.ProgressLog(every_s=3600)
    for done in (1, 2, 3):
        load = LoadProgress(phase="loading", done_bytes=done << 30, total_bytes=4 << 30, elapsed_s=1.0)
        log(Progress(state=State.LOADING, load=load))
    log(Progress(state=State.LOADING, load=None))
    (record,) = caplog.records
    assert "25 %" in record.message
