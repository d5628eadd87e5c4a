"""Reading a checkpoint's layout: good ones give exact byte ranges, bad ones a named error, none a crash.

The checkpoints here are written byte by byte, without the product's own writer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engram_client import errors
from engram_client.errors import CheckpointError
from engram_server.checkpoint import Extent, open_checkpoint, read_model_geometry

VOCAB = 100
LAYERS = (1, 14)
VALUES = "layers.{}.engram.embed.weight"
SCALES = "layers.{}.engram.embed.scale"
SHARDS = {1: "model-00001-of-00002.safetensors", 14: "model-00002-of-00002.safetensors"}


def slow_row_counts(vocab: int, layers: int) -> list[int]:
    """Rows of each table by trial division: three n-gram sizes of eight primes a layer, no prime twice."""
    used: set[int] = set()
    counts = []
    for _ in range(layers):
        total = 0
        for _ in range(3):
            number = vocab - 1
            for _ in range(8):
                number += 1
                while number in used or any(number % d == 0 for d in range(2, number)):
                    number += 1
                used.add(number)
                total += number
        counts.append(total)
    return counts


ROWS = dict(zip(LAYERS, slow_row_counts(VOCAB, 2), strict=True))


def write_safetensors(path: Path, header: Any, data_bytes: int) -> int:
    """Writes a header and a hole of `data_bytes`; returns where the data starts."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + data_bytes)
    return 8 + len(text)


class Recipe:
    """A small, correct checkpoint as data; a test spoils one thing and writes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: Any = {
            "model_type": "deepseek_v41",
            "architectures": ["DeepseekV41ForCausalLM"],
            "text_config": {
                "hidden_size": 4096,
                "engram_layer_ids": list(LAYERS),
                "engram_num_embeddings": list(ROWS.values()),
                "engram_max_ngram_size": 4,
                "engram_vocab_size": VOCAB,
                "engram_n_heads": 8,
                "engram_head_dim": 256,
                "engram_pad_token_id": 2,
                "engram_compressed_vocab_size": 99092,
            },
        }
        self.headers: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.weight_map: dict[str, Any] = {}
        for layer, shard in SHARDS.items():
            rows = ROWS[layer]
            self.headers[shard] = {
                "__metadata__": {"format": "pt"},
                VALUES.format(layer): {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [0, rows * 256]},
                SCALES.format(layer): {
                    "dtype": "F8_E8M0",
                    "shape": [rows, 8],
                    "data_offsets": [rows * 256, rows * 264],
                },
            }
            self.sizes[shard] = rows * 264
            self.weight_map |= {VALUES.format(layer): shard, SCALES.format(layer): shard}
        self.index: Any = {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": self.weight_map}
        self.starts: dict[str, int] = {}

    @property
    def text_config(self) -> dict[str, Any]:
        return self.config["text_config"]

    def values(self, layer: int = 1) -> dict[str, Any]:
        return self.headers[SHARDS[layer]][VALUES.format(layer)]

    def scales(self, layer: int = 1) -> dict[str, Any]:
        return self.headers[SHARDS[layer]][SCALES.format(layer)]

    def write(self) -> Path:
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        if self.index is not None:
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(self.index))
        for name, header in self.headers.items():
            self.starts[name] = write_safetensors(self.folder / name, header, self.sizes[name])
        return self.folder

    @property
    def shard(self) -> Path:
        return self.folder / SHARDS[1]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return Recipe(tmp_path / "model")


def refusal(folder: Path | str, kind: type[CheckpointError]) -> Any:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert type(caught.value) is kind, repr(caught.value)
    assert caught.value.exit_code == 4
    crosses_the_wire(caught.value)
    assert str(caught.value).isprintable()
    return caught.value


def crosses_the_wire(error: CheckpointError) -> None:
    code, fields = errors.to_wire(error)
    assert errors.from_wire(code, msgpack.unpackb(msgpack.packb(fields))).fields == error.fields
    str(error).encode()


# Good checkpoints


def test_every_table_is_found_at_its_exact_bytes(recipe: Recipe) -> None:
    folder = recipe.write()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.path == str(folder)
    assert checkpoint.model.engram_layer_ids == LAYERS
    for layer, source in zip(LAYERS, checkpoint.sources, strict=True):
        path, start, rows = str(folder / SHARDS[layer]), recipe.starts[SHARDS[layer]], ROWS[layer]
        assert source.geometry.layer_id == layer
        assert source.geometry.rows == rows
        assert source.values == Extent(path, start, rows * 256)
        assert source.scales == Extent(path, start + rows * 256, rows * 8)


def test_names_may_carry_the_prefix_of_other_exports(recipe: Recipe) -> None:
    recipe.headers = {
        shard: {name if name.startswith("__") else f"model.{name}": entry for name, entry in header.items()}
        for shard, header in recipe.headers.items()
    }
    recipe.index["weight_map"] = {f"model.{name}": shard for name, shard in recipe.weight_map.items()}
    assert [source.geometry.rows for source in open_checkpoint(recipe.write()).sources] == list(ROWS.values())


def test_older_exports_keep_the_keys_at_the_top_level(recipe: Recipe) -> None:
    recipe.config = {"model_type": "deepseek_v41", **recipe.text_config}
    assert read_model_geometry(recipe.write()).engram_vocab_size == VOCAB


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_one_file_without_an_index_is_enough(recipe: Recipe, name: str) -> None:
    recipe.index = None
    merged: dict[str, Any] = {}
    offset = 0
    for shard, header in recipe.headers.items():
        for tensor, entry in header.items():
            if tensor != "__metadata__":
                begin, end = entry["data_offsets"]
                merged[tensor] = {**entry, "data_offsets": [begin + offset, end + offset]}
        offset += recipe.sizes[shard]
    recipe.headers, recipe.sizes = {name: merged}, {name: offset}
    second = open_checkpoint(recipe.write()).sources[1]
    assert second.values == Extent(str(recipe.folder / name), recipe.starts[name] + ROWS[1] * 264, ROWS[14] * 256)


def test_the_named_single_file_wins_over_other_files(recipe: Recipe) -> None:
    recipe.index = None
    recipe.headers, recipe.sizes = (
        {"model.safetensors": {}, "a.safetensors": {}},
        dict.fromkeys(("model.safetensors", "a.safetensors"), 0),
    )
    folder = recipe.write()
    error = refusal(folder, errors.MissingTensor)
    assert error.path == str(folder / "model.safetensors")


def test_a_snapshot_of_symlinks_is_read_through_its_links(recipe: Recipe) -> None:
    folder = recipe.write()
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..") / "blobs" / str(number))
    assert open_checkpoint(folder).sources[0].values.path == str(folder / SHARDS[1])


def test_other_tensors_in_the_file_and_an_empty_one_are_passed_over(recipe: Recipe) -> None:
    header = recipe.headers[SHARDS[1]]
    end = recipe.sizes[SHARDS[1]]
    header["z"] = {"dtype": "NEW_TYPE", "shape": [3], "data_offsets": [end, end + 7]}
    header["empty"] = {"dtype": "F32", "shape": [0], "data_offsets": [5, 5]}
    recipe.sizes[SHARDS[1]] += 7
    assert len(open_checkpoint(recipe.write()).sources) == 2


def test_the_real_configuration_gives_the_released_row_counts_and_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """The files are sparse: 101 GB each by their size, nothing on the disk."""
    recipe = Recipe(tmp_path / "model")
    rows = {1: 384006168, 14: 384016682}
    recipe.text_config.update(engram_vocab_size=16_000_000, engram_num_embeddings=list(rows.values()))
    for layer, count in rows.items():
        recipe.values(layer).update(shape=[count, 256], data_offsets=[0, count * 256])
        recipe.scales(layer).update(shape=[count, 8], data_offsets=[count * 256, count * 264])
        recipe.sizes[SHARDS[layer]] = count * 264
    sources = open_checkpoint(recipe.write()).sources
    assert [source.geometry.rows for source in sources] == [384006168, 384016682]
    assert sum(source.geometry.nbytes for source in sources) == 202_758_032_400
    assert sources[1].scales.offset == recipe.starts[SHARDS[14]] + 384016682 * 256


def test_reading_a_layout_imports_neither_numpy_nor_torch() -> None:
    code = "import sys, engram_server.checkpoint; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The configuration


def test_a_missing_folder_and_a_file_in_its_place_are_told_apart(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none", errors.CheckpointNotFound).path == str(tmp_path / "none")
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file", errors.CheckpointNotFound).path == str(tmp_path / "file")
    refusal(tmp_path / "file" / "below", errors.CheckpointNotFound)
    with pytest.raises(errors.CheckpointNotFound):
        open_checkpoint(f"{tmp_path}/a\0b")


def test_a_folder_without_a_configuration_is_named(recipe: Recipe) -> None:
    (recipe.write() / "config.json").unlink()
    assert refusal(recipe.folder, errors.CheckpointNotFound).path == str(recipe.folder)


@pytest.mark.parametrize("layers", [None, [], "absent"])
def test_a_checkpoint_without_engram_layers_is_refused_with_its_model_type(recipe: Recipe, layers: Any) -> None:
    recipe.config["model_type"] = "deepseek_v4"
    if layers == "absent":
        recipe.config["text_config"] = {"hidden_size": 1}
    else:
        recipe.text_config["engram_layer_ids"] = layers
    assert refusal(recipe.write(), errors.NoEngramLayers).model_type == "deepseek_v4"


def test_a_flat_v4_configuration_is_refused_too(recipe: Recipe) -> None:
    recipe.config = {"model_type": "deepseek_v4", "hidden_size": 4096}
    assert refusal(recipe.write(), errors.NoEngramLayers).model_type == "deepseek_v4"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engram_layer_ids", [1, 1]),
        ("engram_layer_ids", [-1, 14]),
        ("engram_layer_ids", "1,14"),
        ("engram_layer_ids", list(range(5000))),
        ("engram_max_ngram_size", 1),
        ("engram_max_ngram_size", 4.0),
        ("engram_n_heads", 0),
        ("engram_n_heads", True),
        ("engram_head_dim", 128),
        ("engram_vocab_size", "100"),
        ("engram_vocab_size", 1 << 60),
        ("engram_vocab_size", None),
        ("engram_num_embeddings", [1]),
        ("engram_num_embeddings", [1.5, 2]),
        ("engram_compressed_vocab_size", 0),
    ],
)
def test_a_value_that_makes_no_table_is_refused_by_its_key(recipe: Recipe, key: str, value: Any) -> None:
    recipe.text_config[key] = value
    assert key in refusal(recipe.write(), errors.CheckpointConfigInvalid).problem


def test_stated_row_counts_must_be_those_of_the_primes(recipe: Recipe) -> None:
    recipe.text_config["engram_num_embeddings"][1] += 1
    error = refusal(recipe.write(), errors.RowCountMismatch)
    assert (error.expected, error.found) == (ROWS[14], ROWS[14] + 1)


BAD_JSON = [
    b"",
    b"{",
    b"\xff\xfe{}",
    b"[1, 2]",
    b"17",
    b'{"a": 1, "a": 2}',
    b'{"a": NaN}',
    b'{"a": ' + b"9" * 10_000 + b"}",
    b'{"a": 18446744073709551616}',
    b'{"\\ud800": 1}',
    b"[" * 200_000,
    b'{"a":' * 200_000,
]
BAD_JSON_NAMES = ["empty", "cut", "utf16", "array", "number", "duplicate", "nan", "digits", "big", "surrogate"]
BAD_JSON_NAMES += ["deep-arrays", "deep-objects"]


@pytest.mark.parametrize("text", BAD_JSON, ids=BAD_JSON_NAMES)
def test_a_configuration_that_is_no_sound_json_is_refused(recipe: Recipe, text: bytes) -> None:
    (recipe.write() / "config.json").write_bytes(text)
    refusal(recipe.folder, errors.CheckpointConfigInvalid)


@pytest.mark.parametrize("text", BAD_JSON, ids=BAD_JSON_NAMES)
def test_an_index_that_is_no_sound_json_is_refused(recipe: Recipe, text: bytes) -> None:
    (recipe.write() / "model.safetensors.index.json").write_bytes(text)
    refusal(recipe.folder, errors.IndexInvalid)


@pytest.mark.parametrize("text", BAD_JSON, ids=BAD_JSON_NAMES)
def test_a_header_that_is_no_sound_json_is_refused(recipe: Recipe, text: bytes) -> None:
    recipe.headers[SHARDS[1]] = text
    assert refusal(recipe.write(), errors.HeaderInvalid).path == str(recipe.shard)


def test_a_json_file_too_large_to_be_one_is_not_read(recipe: Recipe) -> None:
    os.truncate(recipe.write() / "config.json", 1 << 40)
    refusal(recipe.folder, errors.CheckpointConfigInvalid)


# The index and its files


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": None}, []])
def test_an_index_without_a_map_is_refused(recipe: Recipe, index: Any) -> None:
    recipe.index = index
    refusal(recipe.write(), errors.IndexInvalid)


@pytest.mark.parametrize(
    "name",
    ["a\nb", "../x.safetensors", "/etc/passwd", "a/../../x", "..", "", "a\0b", "\ud800", 3, None, ["a"], {"a": 1}],
)
def test_an_index_that_leaves_the_folder_or_names_no_file_is_refused(recipe: Recipe, name: Any) -> None:
    recipe.weight_map[VALUES.format(1)] = name
    refusal(recipe.write(), errors.IndexInvalid)


def test_a_file_that_the_index_names_and_nobody_fetched_is_named(recipe: Recipe) -> None:
    recipe.write()
    recipe.shard.unlink()
    error = refusal(recipe.folder, errors.MissingFile)
    assert (error.path, error.tensor) == (str(recipe.shard), VALUES.format(1))


def test_a_dangling_symlink_is_named_with_the_end_of_its_chain(recipe: Recipe) -> None:
    recipe.write()
    recipe.shard.unlink()
    (recipe.folder / "middle").symlink_to("../blobs/abc")
    recipe.shard.symlink_to("middle")
    error = refusal(recipe.folder, errors.DanglingSymlink)
    assert (error.path, error.target) == (str(recipe.shard), str(recipe.folder.parent / "blobs" / "abc"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_dangling_configuration_or_index_is_not_taken_for_none(recipe: Recipe, name: str) -> None:
    path = recipe.write() / name
    path.unlink()
    path.symlink_to("/nowhere/blob")
    assert refusal(recipe.folder, errors.DanglingSymlink).target == "/nowhere/blob"


def test_a_dangling_folder_and_a_dangling_folder_below_are_named(recipe: Recipe) -> None:
    link = recipe.folder.parent / "link"
    link.symlink_to("gone")
    assert refusal(link, errors.DanglingSymlink).path == str(link)
    recipe.weight_map[VALUES.format(1)] = "sub/a.safetensors"
    (recipe.write() / "sub").symlink_to("/nowhere")
    assert refusal(recipe.folder, errors.DanglingSymlink).path == str(recipe.folder / "sub")


def test_a_loop_of_symlinks_cannot_be_read(recipe: Recipe) -> None:
    recipe.write()
    recipe.shard.unlink()
    recipe.shard.symlink_to(recipe.shard.name)
    assert refusal(recipe.folder, errors.ReadFailed).path == str(recipe.shard)


@pytest.mark.parametrize("kind", ["folder", "fifo"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", SHARDS[1]])
def test_what_is_no_regular_file_is_refused_at_once(recipe: Recipe, name: str, kind: str) -> None:
    path = recipe.write() / name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    assert refusal(recipe.folder, errors.ReadFailed).path == str(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", SHARDS[1], ""])
def test_a_file_or_folder_without_permission_is_refused_by_its_path(name: str) -> None:
    me = os.geteuid()
    with tempfile.TemporaryDirectory() as base:  # pytest's own folders let no other user in
        os.chmod(base, 0o755)
        recipe = Recipe(Path(base) / "model")
        path = recipe.write() / name
        path.chmod(0)
        if me == 0:
            os.seteuid(65534)  # permissions do not bind root
        try:
            error = refusal(recipe.folder, errors.ReadFailed)
        finally:
            os.seteuid(me)
            path.chmod(0o755)
    assert error.path == str(path if name else path / "config.json")


def test_a_read_that_the_system_fails_is_reported(recipe: Recipe) -> None:
    path = recipe.write() / "config.json"
    path.unlink()
    path.symlink_to("/proc/self/mem")  # a regular file whose first page cannot be read; its size is 0
    refusal(recipe.folder, errors.CheckpointConfigInvalid)


def test_no_tensor_file_and_too_many_without_an_index_are_refused(recipe: Recipe) -> None:
    recipe.index = None
    folder = recipe.write()
    assert refusal(folder, errors.CheckpointNotFound).path == str(folder)
    for shard in SHARDS.values():
        (folder / shard).unlink()
    assert refusal(folder, errors.CheckpointNotFound).path == str(folder)


def test_a_tensor_that_the_index_or_the_file_lacks_is_named_with_the_place(recipe: Recipe) -> None:
    del recipe.weight_map[SCALES.format(14)]
    error = refusal(recipe.write(), errors.MissingTensor)
    assert (error.tensor, Path(error.path).name) == (SCALES.format(14), "model.safetensors.index.json")
    recipe.weight_map[SCALES.format(14)] = SHARDS[14]
    del recipe.headers[SHARDS[14]][SCALES.format(14)]
    error = refusal(recipe.write(), errors.MissingTensor)
    assert (error.tensor, Path(error.path).name) == (SCALES.format(14), SHARDS[14])


def test_two_names_for_one_table_are_refused(recipe: Recipe) -> None:
    recipe.weight_map["model." + VALUES.format(1)] = SHARDS[1]
    error = refusal(recipe.write(), errors.AmbiguousTensor)
    assert {error.first, error.second} == {VALUES.format(1), "model." + VALUES.format(1)}


# Headers


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_shorter_than_its_length_field_is_truncated(recipe: Recipe, size: int) -> None:
    os.truncate(recipe.write() / SHARDS[1], size)
    assert refusal(recipe.folder, errors.TruncatedFile).size == size


def test_a_file_cut_inside_its_header_is_truncated(recipe: Recipe) -> None:
    os.truncate(recipe.write() / SHARDS[1], 100)
    error = refusal(recipe.folder, errors.TruncatedFile)
    assert (error.size, error.expected) == (100, recipe.starts[SHARDS[1]])


def test_a_file_that_lacks_its_last_byte_is_truncated(recipe: Recipe) -> None:
    recipe.sizes[SHARDS[1]] -= 1
    error = refusal(recipe.write(), errors.TruncatedFile)
    assert (error.path, error.expected - error.size) == (str(recipe.shard), 1)


@pytest.mark.parametrize("length", [100_000_001, 1 << 63, (1 << 64) - 1])
def test_an_absurd_header_length_is_refused_without_reading_it(recipe: Recipe, length: int) -> None:
    recipe.write()
    with recipe.shard.open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(1 << 33)
    refusal(recipe.folder, errors.HeaderInvalid)


def test_a_git_lfs_pointer_is_recognised(recipe: Recipe) -> None:
    recipe.write()
    recipe.shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 101377628352\n")
    assert "LFS" in refusal(recipe.folder, errors.HeaderInvalid).problem


BAD_SIZES = [-1, 1.0, True, "0", None, 1 << 62, [0], 1e300]


@pytest.mark.parametrize("offset", BAD_SIZES)
@pytest.mark.parametrize("place", [0, 1])
def test_an_offset_that_is_no_size_is_refused(recipe: Recipe, offset: Any, place: int) -> None:
    recipe.values()["data_offsets"][place] = offset
    refusal(recipe.write(), errors.HeaderInvalid)


@pytest.mark.parametrize("offsets", [[0], [0, 1, 2], [], None, "0,1", {"a": 0}, [300, 200]])
def test_offsets_that_are_no_range_are_refused(recipe: Recipe, offsets: Any) -> None:
    recipe.values()["data_offsets"] = offsets
    refusal(recipe.write(), errors.HeaderInvalid)


@pytest.mark.parametrize("size", BAD_SIZES)
def test_a_shape_of_no_sizes_is_refused(recipe: Recipe, size: Any) -> None:
    recipe.values()["shape"][0] = size
    refusal(recipe.write(), errors.HeaderInvalid)


@pytest.mark.parametrize("entry", [None, [], "x", {}, {"dtype": 3, "shape": [], "data_offsets": [0, 0]}])
def test_an_entry_that_describes_no_tensor_is_refused(recipe: Recipe, entry: Any) -> None:
    recipe.headers[SHARDS[1]]["other"] = entry
    refusal(recipe.write(), errors.HeaderInvalid)


@pytest.mark.parametrize("metadata", [[], "x", {"format": 1}])
def test_metadata_that_is_no_map_of_strings_is_refused(recipe: Recipe, metadata: Any) -> None:
    recipe.headers[SHARDS[1]]["__metadata__"] = metadata
    refusal(recipe.write(), errors.HeaderInvalid)


def test_a_huge_offset_within_64_bits_is_a_truncated_file(recipe: Recipe) -> None:
    recipe.scales()["data_offsets"] = [(1 << 62) - 1 - ROWS[1] * 8, (1 << 62) - 1]
    refusal(recipe.write(), errors.TruncatedFile)


def test_a_tensor_whose_bytes_do_not_match_its_shape_is_refused(recipe: Recipe) -> None:
    recipe.scales()["data_offsets"][1] -= 1
    assert SCALES.format(1) in refusal(recipe.write(), errors.HeaderInvalid).problem


def test_two_tensors_that_share_one_byte_are_both_named(recipe: Recipe) -> None:
    end = ROWS[1] * 264
    recipe.headers[SHARDS[1]]["other"] = {"dtype": "U8", "shape": [9], "data_offsets": [end - 1, end + 8]}
    recipe.sizes[SHARDS[1]] += 8
    error = refusal(recipe.write(), errors.OverlappingTensors)
    assert {error.first, error.second} == {SCALES.format(1), "other"}


def test_hostile_tensor_names_stay_harmless_in_the_message(recipe: Recipe) -> None:
    for name in ("evil\nline", "x" * 5000):
        recipe.headers[SHARDS[1]][name] = {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}
    assert len(str(refusal(recipe.write(), errors.OverlappingTensors))) < 1000


@pytest.mark.parametrize("dtype", ["F8_E5M2", "U8", "BF16", "f8_e4m3", "", "\ud800", "x" * 1000])
def test_another_dtype_is_refused_by_name(recipe: Recipe, dtype: str) -> None:
    recipe.values()["dtype"] = dtype
    error = refusal(recipe.write(), errors.WrongDtype)
    assert (error.tensor, error.expected) == (VALUES.format(1), "F8_E4M3")


def test_scales_of_another_dtype_are_refused(recipe: Recipe) -> None:
    recipe.scales(14)["dtype"] = "F8_E4M3"
    assert refusal(recipe.write(), errors.WrongDtype).expected == "F8_E8M0"


@pytest.mark.parametrize("shape", [[], [ROWS[1] * 256], [ROWS[1], 128], [256, ROWS[1]], [1, ROWS[1], 256]])
def test_another_shape_is_refused(recipe: Recipe, shape: list[int]) -> None:
    recipe.values()["shape"] = shape
    error = refusal(recipe.write(), errors.WrongShape)
    assert (error.expected, error.found) == (str([ROWS[1], 256]), str(shape))


def test_a_table_with_other_rows_than_the_primes_give_is_refused(recipe: Recipe) -> None:
    rows = ROWS[1] - 1
    recipe.values().update(shape=[rows, 256], data_offsets=[0, rows * 256])
    error = refusal(recipe.write(), errors.RowCountMismatch)
    assert (error.expected, error.found) == (ROWS[1], rows)


# Garbage in, named errors out

leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
names = st.sampled_from([VALUES.format(1), SCALES.format(1), "__metadata__", "dtype", "shape", "data_offsets", "x"])
json_values = st.recursive(
    leaves | st.sampled_from(["F8_E4M3", "F8_E8M0", ROWS[1], ROWS[1] * 256, 256, 8, 0]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)
sizes = st.sampled_from([0, 8, 256, ROWS[1], ROWS[1] * 8, ROWS[1] * 256, ROWS[1] * 264, -1, 2**62, 2**64]) | leaves
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F8_E4M3", "F8_E8M0", "U8", ""]),
        "shape": st.lists(sizes, min_size=1, max_size=3),
        "data_offsets": st.lists(sizes, min_size=2, max_size=2),
    }
)
headers = st.dictionaries(names | st.text(max_size=4), entries | json_values, max_size=5) | json_values
fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = Recipe(tmp_path_factory.mktemp("shared") / "model")
    recipe.write()
    return recipe


def opens_or_refuses(folder: Path) -> bool:
    """True when it opens; any exception other than a CheckpointError is the test's failure."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        crosses_the_wire(error)
        return False
    for source in checkpoint.sources:
        for extent in (source.values, source.scales):
            assert 0 <= extent.offset <= extent.offset + extent.nbytes <= os.stat(extent.path).st_size
    return True


@fuzz
@given(content=st.binary(max_size=200))
@example(content=(2).to_bytes(8, "little") + b"{}")
def test_any_bytes_in_a_shard_file_give_a_checkpoint_error(shared: Recipe, content: bytes) -> None:
    shared.shard.write_bytes(content)
    assert not opens_or_refuses(shared.folder)


@fuzz
@given(header=headers, padding=st.integers(0, 3))
def test_any_json_header_opens_soundly_or_gives_a_checkpoint_error(shared: Recipe, header: Any, padding: int) -> None:
    write_safetensors(shared.shard, json.dumps(header).encode() + b" " * padding, ROWS[1] * 264)
    opens_or_refuses(shared.folder)


@fuzz
@given(position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_one_changed_byte_of_a_header_opens_soundly_or_gives_a_checkpoint_error(
    shared: Recipe, position: int, value: int
) -> None:
    shared.write()
    with shared.shard.open("r+b") as file:
        file.seek(position % shared.starts[SHARDS[1]])
        file.write(bytes([value]))
    opens_or_refuses(shared.folder)


@fuzz
@given(
    name=st.sampled_from(["config.json", "model.safetensors.index.json"]),
    content=st.binary(max_size=100) | json_values.map(lambda value: json.dumps(value).encode()),
)
def test_anything_in_a_configuration_or_index_gives_a_checkpoint_error(
    shared: Recipe, name: str, content: bytes
) -> None:
    shared.write()
    (shared.folder / name).write_bytes(content)
    assert not opens_or_refuses(shared.folder)


@fuzz
@given(key=st.sampled_from(sorted(Recipe(Path()).text_config)), value=json_values)
def test_any_value_of_a_key_opens_soundly_or_gives_a_checkpoint_error(shared: Recipe, key: str, value: Any) -> None:
    config = {**shared.config, "text_config": {**shared.text_config, key: value}}
    shared.write()
    (shared.folder / "config.json").write_text(json.dumps(config))
    opens_or_refuses(shared.folder)
