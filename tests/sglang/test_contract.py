"""What of SGLang the plugin relies on. A failure here means: this SGLang is another one, look before you support it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers import engram
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engram_client import sglang as plugin
from engram_client import sglang_attach
from engram_client.errors import IncompatibleSGLang
from engram_client.layout import TableGeometry, column_primes, shard


def test_this_sglang_has_every_name_and_signature_that_the_plugin_was_written_for() -> None:
    assert plugin.problem_of(engram) is None
    assert importlib.metadata.version("sglang") in plugin.SUPPORTED.split(", ")


def test_the_plugin_is_found_under_the_group_that_sglang_reads() -> None:
    (found,) = [each for each in importlib.metadata.entry_points(group=GENERAL_PLUGINS_GROUP) if each.name == "engram"]
    assert found.load() is plugin.plugin


@pytest.mark.parametrize("name", plugin.HOOKED)
def test_a_changed_signature_of_the_real_class_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: object, *, another: int) -> None: ...

    monkeypatch.setattr(engram.EngramEmbedding, name, changed)
    assert name in str(plugin.problem_of(engram))


@pytest.mark.parametrize("name", plugin.HOOKED)
def test_a_missing_method_of_the_real_class_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Without:
        new_rows = shared_host_table_without_ats = None

    for each in plugin.HOOKED:
        if each != name:
            setattr(Without, each, vars(engram.EngramEmbedding)[each])
    monkeypatch.setattr(engram, "EngramEmbedding", Without)
    assert plugin.problem_of(engram) is not None


def source_of(name: str) -> str:
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise RuntimeError("sglang is not installed")
    return (Path(spec.origin).parent / name).read_text(encoding="utf-8")


def test_the_layer_builds_and_calls_its_embedding_as_the_hooks_expect() -> None:
    layer = inspect.getsource(engram.Engram)
    assert "self.embed = EngramEmbedding(" in layer
    assert "self.embed(hash_ids, forward_batch, cp_all_tokens=cp_all_tokens)" in layer
    # All that the layer, the stager and the megakernels read of an embedding; `furnish` and the class have them.
    read = {name for name in dir(engram.EngramEmbedding) if f"self.embed.{name}" in layer}
    assert read == {"dequant_staged", "new_rows"}
    assert "self.embed.staged_by_scheduler" in layer


def test_the_model_finishes_the_load_of_every_layer_and_passes_strided_ids() -> None:
    """Read as text: importing the model needs CUDA packages."""
    model = source_of("srt/models/deepseek_v4.py")
    assert 'layer.engram.embed.finish_load(label=f"layer {i}")' in model
    assert "hash_ids[:, engram.layer_hash_index]," in model
    assert "cp_all_tokens=cp_extend," in model
    assert 'getattr(module, "weight_loader", default_weight_loader)' in model


def test_the_settings_that_the_plugin_reads_exist() -> None:
    for name in (sglang_attach.HOST_TABLE, sglang_attach.LAYOUT, sglang_attach.PEER_SHARDS, sglang_attach.STAGING):
        assert hasattr(envs, name)
    assert envs.SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT.get() == "shared"


@pytest.mark.parametrize("tp_size", [1, 2, 3, 5, 7, 8, 24, 32])
def test_shards_are_sglangs_shards(tp_size: int) -> None:
    (columns,) = column_primes(1, 3, 8, 500)
    geometry = TableGeometry(layer_id=1, columns=columns)
    for rank in range(tp_size):
        ours = shard(geometry, rank, tp_size)
        assert (ours.row_start, ours.row_stop) == engram.shard_range(
            geometry.rows, geometry.column_starts, rank, tp_size
        )


@pytest.mark.parametrize("vocab_size", [2, 1500, 16_000_000])
def test_the_layout_is_sglangs_layout(vocab_size: int) -> None:
    config: Any = type(
        "Config",
        (),
        {
            "engram_layer_ids": (1, 14),
            "engram_num_embeddings": (0, 0),
            "engram_max_ngram_size": 4,
            "engram_vocab_size": vocab_size,
            "engram_n_heads": 8,
            "engram_head_dim": 256,
        },
    )
    layout = engram.EngramLayout.from_config(config)
    assert layout is not None
    for index, columns in enumerate(column_primes(2, 3, 8, vocab_size)):
        assert TableGeometry(layer_id=0, columns=columns).column_starts == layout.column_bounds(index)


def test_a_refused_class_raises_when_it_is_built_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram.EngramEmbedding, "__init__", engram.EngramEmbedding.__init__)  # restored afterwards
    plugin.refuse(engram, "a test")
    with pytest.raises(IncompatibleSGLang) as caught:
        engram.EngramEmbedding(10, 256, 1, (0, 10))
    assert caught.value.supported == plugin.SUPPORTED


def test_a_hook_that_sglang_never_applies_leaves_a_class_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs and drops a hook that fails to apply; the guard is what then stands in __init__."""
    monkeypatch.setattr(engram.EngramEmbedding, "__init__", engram.EngramEmbedding.__init__)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    plugin.install(engram.EngramEmbedding)
    with pytest.raises(IncompatibleSGLang):
        engram.EngramEmbedding(10, 256, 1, (0, 10))


def test_hooks_on_some_methods_only_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own forward on an embedding without rows would return zeros."""
    embedding = engram.EngramEmbedding
    for name in plugin.HOOKED:
        monkeypatch.setattr(embedding, name, getattr(embedding, name))
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    plugin.install(embedding)
    del HookRegistry._hooks[f"{plugin.LAYER_MODULE}.{plugin.EMBEDDING}.forward"]
    HookRegistry.apply_hooks()
    assert plugin.unhooked(embedding) == ["forward"]
    with pytest.raises(IncompatibleSGLang):
        embedding(10, 256, 1, (0, 10))


def test_another_plugins_hook_on_the_same_method_does_not_hide_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = engram.EngramEmbedding
    for name in plugin.HOOKED:
        monkeypatch.setattr(embedding, name, getattr(embedding, name))
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    plugin.install(embedding)
    target = f"{plugin.LAYER_MODULE}.{plugin.EMBEDDING}.forward"
    HookRegistry.register(target, lambda result, *arguments, **options: result, HookType.AFTER)
    HookRegistry.apply_hooks()
    assert plugin.unhooked(embedding) == []


def test_an_sglang_without_the_embedding_refuses_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("moved")

    class Engram(torch.nn.Module): ...

    module.Engram = Engram  # type: ignore[attr-defined]
    problem = plugin.problem_of(module)
    assert problem is not None
    plugin.refuse(module, problem)
    with pytest.raises(IncompatibleSGLang):
        Engram()
