"""Made checkpoints: read back by an independent reader, whole or nothing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engram_client import errors
from engram_server import make_checkpoint as module
from engram_server.checkpoint import open_checkpoint
from engram_server.generate import rows
from engram_server.make_checkpoint import make_checkpoint

VOCAB = 100


@pytest.mark.parametrize("every_code", [False, True])
def test_the_safetensors_package_reads_the_generated_rows(tmp_path: Path, every_code: bool) -> None:
    folder = tmp_path / "new" / "model"
    files = make_checkpoint(folder, engram_vocab_size=VOCAB, seed=9, every_code=every_code)
    assert sorted(files) == sorted(folder.iterdir())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    config = json.loads((folder / "config.json").read_text())["text_config"]
    for layer, count in zip((1, 14), config["engram_num_embeddings"], strict=True):
        expected = rows(layer, 9, 0, count, every_code)
        wanted = (("weight", torch.float8_e4m3fn), ("scale", torch.float8_e8m0fnu))
        for (kind, dtype), bytes_ in zip(wanted, expected, strict=True):
            name = f"layers.{layer}.engram.embed.{kind}"
            with safe_open(folder / index["weight_map"][name], framework="pt") as file:
                tensor = file.get_tensor(name)
            assert tensor.dtype == dtype
            assert np.array_equal(tensor.view(torch.uint8).numpy(), bytes_)
    if every_code:
        assert len(np.unique(expected[0])) == len(np.unique(expected[1])) == 256


def test_the_index_names_every_tensor_of_every_file_and_their_total_size(tmp_path: Path) -> None:
    files = make_checkpoint(tmp_path, engram_vocab_size=VOCAB, seed=0)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    found: dict[str, str] = {}
    total = 0
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - the reader is no mapping
                    found[name] = path.name
                    tensor = file.get_tensor(name)
                    total += tensor.numel() * tensor.element_size()
    assert index == {"metadata": {"total_size": total}, "weight_map": found}
    assert "layers.1.engram.wkv.weight" in found


def test_each_table_sits_alone_in_its_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, engram_vocab_size=VOCAB, seed=0, layer_ids=(0, 3, 5))
    sources = open_checkpoint(tmp_path).sources
    assert [source.geometry.layer_id for source in sources] == [0, 3, 5]
    assert len({source.values.path for source in sources}) == 3
    for source in sources:
        assert source.values.path == source.scales.path
        assert os.path.getsize(source.values.path) == source.scales.offset + source.scales.nbytes


def test_the_configuration_is_that_of_a_v41_checkpoint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, engram_vocab_size=VOCAB, seed=0)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "deepseek_v41"
    assert config["architectures"] == ["DeepseekV41ForCausalLM"]
    text_config = config["text_config"]
    counts = text_config.pop("engram_num_embeddings")
    assert counts == [source.geometry.rows for source in open_checkpoint(tmp_path).sources]
    assert text_config == {
        "engram_layer_ids": [1, 14],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": VOCAB,
        "engram_n_heads": 8,
        "engram_head_dim": 256,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092,
    }


def test_the_same_seed_makes_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    first, second, third = (
        make_checkpoint(tmp_path / name, engram_vocab_size=2, seed=seed)
        for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert first[1].read_bytes() != third[1].read_bytes()


def test_tables_larger_than_a_chunk_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [path.read_bytes() for path in make_checkpoint(tmp_path / "a", engram_vocab_size=VOCAB, seed=5)]
    monkeypatch.setattr(module, "_CHUNK_ROWS", 101)
    steps: list[tuple[int, int]] = []
    pieces = make_checkpoint(
        tmp_path / "b", engram_vocab_size=VOCAB, seed=5, on_progress=lambda done, total: steps.append((done, total))
    )
    assert [path.read_bytes() for path in pieces] == whole
    done = [step[0] for step in steps]
    assert done == sorted(set(done))
    assert len(done) > 50
    assert {step[1] for step in steps} == {done[-1]}
    assert done[-1] == sum(source.geometry.nbytes for source in open_checkpoint(tmp_path / "b").sources)


def test_a_folder_with_anything_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".hidden").write_text("mine")
    with pytest.raises(errors.FolderNotEmpty) as caught:
        make_checkpoint(tmp_path, engram_vocab_size=VOCAB, seed=0)
    assert caught.value.example == ".hidden"
    assert [path.name for path in tmp_path.iterdir()] == [".hidden"]


def test_a_file_in_the_folders_place_is_a_failed_write(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(errors.WriteFailed):
        make_checkpoint(tmp_path / "model", engram_vocab_size=VOCAB, seed=0)
    assert (tmp_path / "model").read_text() == "mine"


@pytest.mark.parametrize(
    ("vocab", "layers"), [(1, (1, 14)), (0, (1,)), (-5, (1,)), (VOCAB, ()), (VOCAB, (1, 1)), (VOCAB, (-1,))]
)
def test_numbers_that_make_no_table_are_refused_before_a_folder_is_made(
    tmp_path: Path, vocab: int, layers: tuple[int, ...]
) -> None:
    with pytest.raises(errors.ConfigInvalid):
        make_checkpoint(tmp_path / "model", engram_vocab_size=vocab, seed=0, layer_ids=layers)
    assert not (tmp_path / "model").exists()


def test_a_disk_without_the_space_is_found_before_the_first_byte(tmp_path: Path) -> None:
    with pytest.raises(errors.WriteFailed):
        make_checkpoint(tmp_path / "model", engram_vocab_size=1 << 40, seed=0)
    assert not (tmp_path / "model").exists()


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("existing", [False, True])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, existing: bool) -> None:
    folder = tmp_path / "model"
    if existing:
        folder.mkdir()

    def interrupt(done: int, total: int) -> None:
        if done == total:
            raise Interrupted

    with pytest.raises(Interrupted):
        make_checkpoint(folder, engram_vocab_size=VOCAB, seed=0, on_progress=interrupt)
    assert (sorted(folder.iterdir()) if existing else folder.exists()) == ([] if existing else False)


@pytest.mark.parametrize("fail_at", range(1, 9))
def test_a_disk_that_fills_up_at_any_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    real, calls = os.pwrite, 0

    def failing(file: int, content: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, content, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(errors.WriteFailed):
        make_checkpoint(tmp_path / "model", engram_vocab_size=VOCAB, seed=0)
    assert calls == fail_at
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("fail_at", range(1, 6))
def test_a_rename_that_fails_takes_the_earlier_ones_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    real, calls = os.rename, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(errors.WriteFailed) as caught:
        make_checkpoint(tmp_path, engram_vocab_size=VOCAB, seed=0)
    assert caught.value.path.startswith(str(tmp_path))
    assert sorted(tmp_path.iterdir()) == []


def test_writes_that_the_system_cuts_short_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [path.read_bytes() for path in make_checkpoint(tmp_path / "a", engram_vocab_size=2, seed=5)]
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: real(file, content[:997], offset))
    short = make_checkpoint(tmp_path / "b", engram_vocab_size=2, seed=5)
    assert [path.read_bytes() for path in short] == whole


def test_until_the_end_no_file_has_its_own_name(tmp_path: Path) -> None:
    """A reader that comes early finds no checkpoint, not half of one."""
    seen: set[str] = set()
    make_checkpoint(
        tmp_path,
        engram_vocab_size=VOCAB,
        seed=0,
        on_progress=lambda done, total: seen.update(path.suffix for path in tmp_path.iterdir()),
    )
    assert seen == {".part"}
