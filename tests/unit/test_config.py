"""engram.json from outside: what a user writes, what the daemon gets, and what the user reads when it is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import (
    ConfigContradiction,
    ConfigError,
    ConfigInvalid,
    ConfigNotJson,
    ConfigUnreadable,
    SocketPathInvalid,
)
from engram_client.protocol import Lookup, Placement, Replication
from engram_server.config import Config, EngramConfig, LoadedConfig, from_deprecated_variables, load_config, parse_json

HOST_TABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
LAYOUT = "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT"
PEER_SHARDS = "SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS"

FULL: dict[str, Any] = {
    "model_path": "/models/v41",
    "load_format": "auto",
    "geometry": None,
    "seed": 3,
    "engram_config": {"placement": "cpu", "replication": "per_node", "lookup": None},
    "tp_size": 8,
    "nnodes": 2,
    "node_rank": 1,
    "devices": [0, "GPU-5f1c"],
    "host": {
        "backing": "file",
        "path": "/dev/hugepages",
        "huge_pages": "hugetlb",
        "numa": "0-1,3",
        "memory_check": "warn",
    },
    "control": {
        "endpoint": "ipc:///run/e.sock",
        "handover": "/run/h.sock",
        "mode": "0660",
        "uids": [0, 1000],
        "gids": [4294967294],
    },
    "load": {"threads": 4, "direct_io": "on", "verify": "full"},
    "metrics": {"listen": "[::1]:9400"},
}


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load(raw: Any, flag: str | None = None, **environ: str) -> LoadedConfig:
        path = tmp_path / "engram.json"
        path.write_text(raw if isinstance(raw, str) else json.dumps(raw), encoding="utf-8")
        return load_config(path, flag, environ)

    return load


def with_model(**keys: Any) -> dict[str, Any]:
    return {"model_path": "/m", **keys}


def test_a_model_path_is_enough_and_the_rest_has_the_documented_defaults(load: Any) -> None:
    loaded = load({"model_path": "/m"})
    assert loaded.remarks == ()
    assert loaded.config.engram == EngramConfig(placement=Placement.GPU, replication=Replication.NONE, lookup=None)
    assert msgspec.to_builtins(loaded.config) == {
        "model_path": "/m",
        "load_format": "auto",
        "geometry": None,
        "seed": 0,
        "engram_config": None,
        "tp_size": None,
        "nnodes": 1,
        "node_rank": 0,
        "devices": None,
        "host": {"backing": "auto", "path": None, "huge_pages": "auto", "numa": "none", "memory_check": "strict"},
        "control": {
            "endpoint": "ipc:///run/engram/control.sock",
            "handover": None,
            "mode": "0600",
            "uids": (),
            "gids": (),
        },
        "load": {"threads": 0, "direct_io": "auto", "verify": "sample"},
        "metrics": {"listen": None},
    }


def test_every_key_reaches_the_configuration_as_written(load: Any) -> None:
    loaded = load(FULL)
    assert json.loads(json.dumps(msgspec.to_builtins(loaded.config))) == FULL
    assert loaded.remarks == ()


def test_the_full_example_of_this_test_leaves_no_key_out() -> None:
    def keys(kind: Any) -> dict[str, Any]:
        return {
            field.name: keys(section) if (section := section_of(field.type)) else None
            for field in msgspec.structs.fields(kind)
        }

    def section_of(kind: Any) -> Any:
        parts = (kind, *getattr(kind, "__args__", ()))
        return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)

    expected = keys(Config)
    assert set(FULL) == set(expected)
    assert all(set(FULL[name]) == set(inner) for name, inner in expected.items() if inner is not None)


SECTIONS = ["", "engram_config", "host", "control", "load", "metrics"]


@pytest.mark.parametrize("section", SECTIONS)
def test_an_unknown_key_is_refused_with_its_path_and_the_known_keys(load: Any, section: str) -> None:
    raw = with_model(**{section: {"a.b": 1}}) if section else with_model(**{"a.b": 1})
    with pytest.raises(ConfigInvalid) as caught:
        load(raw)
    known = FULL[section] if section else FULL
    assert caught.value.path == (f"{section}.a.b" if section else "a.b")
    assert caught.value.allowed.split(", ") == list(known)


def wrong(path: str, value: Any, found: str, allowed: str) -> Any:
    return pytest.param(path, value, found, allowed, id=f"{path}={found}")


@pytest.mark.parametrize(
    ("path", "value", "found", "allowed"),
    [
        wrong("model_path", 5, "5", "null or a string that is not empty"),
        wrong("model_path", "", '""', "null or a string that is not empty"),
        wrong("load_format", "fast", '"fast"', '"auto" or "dummy"'),
        wrong("geometry", [], "[]", "null or an object"),
        wrong("seed", 2**63, "9223372036854775808", "an integer from 0 to 9223372036854775807"),
        wrong("engram_config", 5, "5", "null or an object with the keys placement, replication, lookup"),
        wrong("engram_config.placement", "tpu", '"tpu"', '"gpu" or "cpu"'),
        wrong("engram_config.replication", None, "null", '"none" or "per_node"'),
        wrong("engram_config.lookup", "x", '"x"', 'null, "collective" or "peer_read"'),
        wrong("tp_size", 0, "0", "null or an integer from 1 to 1048576"),
        wrong("tp_size", 2.0, "2.0", "null or an integer from 1 to 1048576"),
        wrong("tp_size", True, "true", "null or an integer from 1 to 1048576"),
        wrong("nnodes", "2", '"2"', "an integer from 1 to 1048576"),
        wrong("node_rank", -1, "-1", "an integer from 0 to 1048576"),
        wrong("devices[1]", [0, 1.5], "1.5", "an integer from 0 to 1048576 or a string that is not empty"),
        wrong("devices[0]", [True], "true", "an integer from 0 to 1048576 or a string that is not empty"),
        wrong("devices[0]", [-1], "-1", "an integer from 0 to 1048576 or a string that is not empty"),
        wrong(
            "devices",
            "all",
            '"all"',
            "null or a list, each item an integer from 0 to 1048576 or a string that is not empty",
        ),
        wrong("host", None, "null", "an object with the keys backing, path, huge_pages, numa, memory_check"),
        wrong("host.backing", "shm", '"shm"', '"auto", "memfd", "posix_shm", "file" or "cuda_host"'),
        wrong("host.huge_pages", "x", '"x"', '"auto", "hugetlb", "thp" or "off"'),
        wrong("host.huge_pages", "a - at `$.seed`", '"a - at `$.seed`"', '"auto", "hugetlb", "thp" or "off"'),
        wrong("host.memory_check", False, "false", '"strict", "warn" or "off"'),
        wrong("host.numa", "3-", '"3-"', '"none", "interleave" or a node list such as "0-1"'),
        wrong("host.numa", "٣", '"\\u0663"', '"none", "interleave" or a node list such as "0-1"'),
        wrong("control.mode", "600", '"600"', 'an octal mode such as "0600"'),
        wrong("control.mode", "0600\n", '"0600\\n"', 'an octal mode such as "0600"'),
        wrong("control.mode", 600, "600", 'an octal mode such as "0600"'),
        wrong("control.uids", 5, "5", "a list, each item an integer from 0 to 4294967294"),
        wrong("control.uids[1]", [1, "a"], '"a"', "an integer from 0 to 4294967294"),
        wrong("load.threads", 2000, "2000", "an integer from 0 to 1024"),
        wrong("load.direct_io", True, "true", '"auto", "on" or "off"'),
        wrong("metrics.listen", "9400", '"9400"', 'null or host:port, such as "127.0.0.1:9400"'),
        wrong("metrics.listen", "a:65536", '"a:65536"', 'null or host:port, such as "127.0.0.1:9400"'),
        wrong("metrics.listen", "", '""', 'null or host:port, such as "127.0.0.1:9400"'),
        wrong("host.huge_pages", "x" * 99, '"' + "x" * 56 + "...", '"auto", "hugetlb", "thp" or "off"'),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_what_it_is_and_what_it_may_be(
    load: Any, path: str, value: Any, found: str, allowed: str
) -> None:
    section, _, key = re.sub(r"\[.*", "", path).rpartition(".")
    with pytest.raises(ConfigInvalid) as caught:
        load(with_model(**({section: {key: value}} if section else {key: value})))
    assert (caught.value.path, caught.value.problem, caught.value.allowed) == (path, f"is {found}", allowed)
    assert str(caught.value).endswith(f"engram.json: {path} is {found}; allowed: {allowed}")


def test_values_that_only_fail_together_with_others_are_refused_with_their_path(load: Any) -> None:
    for raw, path in (
        ({}, "model_path"),
        (with_model(node_rank=2, nnodes=2), "node_rank"),
        (with_model(devices=[]), "devices"),
        (with_model(control={"endpoint": "ipc:///run/a", "handover": "/run/a"}), "control.handover"),
    ):
        with pytest.raises(ConfigInvalid) as caught:
            load(raw)
        assert caught.value.path == path


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (with_model(engram_config={"lookup": "peer_read", "replication": "per_node"}), ["peer_read", "per_node"]),
        (with_model(engram_config={"lookup": "peer_read", "placement": "cpu"}), ["peer_read", "cpu"]),
        (with_model(tp_size=3, nnodes=2), ["tp_size 3", "nnodes 2"]),
        (with_model(geometry={}), ["geometry", "auto"]),
        (with_model(load_format="dummy", geometry={}), ["dummy", "model_path", "geometry"]),
        ({"load_format": "dummy"}, ["dummy", "model_path", "geometry"]),
        (with_model(host={"backing": "file"}), ["file", "host.path"]),
        (with_model(host={"path": "/dev/shm"}), ["auto", "host.path"]),
    ],
)
def test_a_contradiction_names_both_sides(load: Any, raw: Any, named: list[str]) -> None:
    with pytest.raises(ConfigContradiction) as caught:
        load(raw)
    assert all(word in caught.value.keys for word in named)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        (with_model(engram_config={"lookup": "collective", "replication": "per_node"}), "collective"),
        (with_model(engram_config={"lookup": "peer_read"}, tp_size=1), "peer_read"),
        (with_model(control={"uids": [5]}), "control.mode"),
    ],
)
def test_a_value_without_effect_is_accepted_and_remarked_on(load: Any, raw: Any, named: str) -> None:
    (remark,) = load(raw).remarks
    assert named in remark


def test_values_that_were_not_written_are_not_remarked_on(load: Any) -> None:
    assert load(with_model(engram_config={"replication": "per_node"}, tp_size=1)).remarks == ()


@pytest.mark.parametrize("control", [{"endpoint": "tcp://a:1"}, {"handover": "run/a"}, {"endpoint": "ipc:///a" * 99}])
def test_a_socket_path_that_cannot_be_used_is_refused_before_anything_starts(load: Any, control: Any) -> None:
    with pytest.raises(SocketPathInvalid):
        load(with_model(control=control))


def test_dummy_tables_take_a_geometry_instead_of_a_model(load: Any) -> None:
    loaded = load({"load_format": "dummy", "geometry": {"engram_layer_ids": [1]}, "seed": 2**63 - 1})
    assert loaded.config.geometry == {"engram_layer_ids": [1]}


# The flag


def test_the_flag_replaces_the_files_object_as_a_whole(load: Any) -> None:
    raw = with_model(engram_config={"placement": "cpu", "replication": "per_node", "unknown": "goes with it"})
    assert load(raw, '{"lookup": "collective"}').config.engram == EngramConfig(lookup=Lookup.COLLECTIVE)
    assert load(raw, "{}").config.engram == EngramConfig()


def test_a_wrong_flag_is_blamed_and_not_the_file(load: Any) -> None:
    for flag, kind, path in (
        ('{"placement": "tpu"}', ConfigInvalid, "placement"),
        ("null", ConfigInvalid, "$"),
        ("[]", ConfigInvalid, "$"),
        ('{"placement": "cpu", "placement": "gpu"}', ConfigInvalid, "placement"),
        ("{", ConfigNotJson, None),
    ):
        with pytest.raises(kind) as caught:
            load(with_model(), flag)
        assert caught.value.where == "--engram-config"
        assert path is None or caught.value.path == path


# Files that are no configuration


@pytest.mark.parametrize("text", ["", "{", '{"a": 1,}', "{'a': 1}", "// x\n{}", "\ufeff{}"])
def test_what_is_not_json_is_refused_with_its_line(load: Any, text: str) -> None:
    with pytest.raises(ConfigNotJson) as caught:
        load(text)
    assert caught.value.line >= 1
    assert caught.value.column >= 1


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"host": {"path": "a", "path": "b"}}', "path"),
        ('{"seed": NaN}', "$"),
        ('{"seed": -Infinity}', "$"),
        ('{"model_path": "a\\u0000b"}', "$"),
        ('{"geometry": {"a": [{"\\ud800": 1}]}}', "$"),
        ('{"seed": ' + "9" * 5000 + "}", "$"),
        ("[" * 100_000, "$"),
        ("5", "$"),
        ("[]", "$"),
        ("null", "$"),
    ],
)
def test_json_that_no_configuration_can_hold_is_refused(load: Any, text: str, path: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(text)
    assert caught.value.path == path


def test_a_backslash_before_u0000_is_text(load: Any) -> None:
    assert load('{"model_path": "a\\\\u0000"}').config.model_path == "a\\u0000"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing", tmp_path, binary, "nul\0byte"):
        with pytest.raises(ConfigUnreadable) as caught:
            load_config(path, None, {})
        assert caught.value.path == str(path)
        assert caught.value.problem


# The deprecated variables


@pytest.mark.parametrize("word", ["1", "true", "TRUE", "True", "yes", "YES", "y", "Y"])
def test_host_table_alone_means_one_host_shard_per_rank(load: Any, word: str) -> None:
    loaded = load(with_model(), **{HOST_TABLE: word})
    assert loaded.config.engram == EngramConfig(placement=Placement.CPU)
    assert HOST_TABLE in loaded.remarks[0]
    assert '"engram_config": {"placement": "cpu"}' in loaded.remarks[0]
    assert LAYOUT in loaded.remarks[1]


@pytest.mark.parametrize("word", ["0", "false", "FALSE", "no", "n", "N"])
def test_a_variable_that_says_no_asks_for_nothing_and_is_still_deprecated(load: Any, word: str) -> None:
    loaded = load(with_model(), **{HOST_TABLE: word, PEER_SHARDS: word})
    assert loaded.config.engram_config is None
    (remark,) = loaded.remarks
    assert HOST_TABLE in remark
    assert PEER_SHARDS in remark


@pytest.mark.parametrize("word", ["", "on", "2", " 1", "maybe"])
def test_a_boolean_that_sglang_cannot_read_counts_as_false_and_is_warned_about(load: Any, word: str) -> None:
    loaded = load(with_model(), **{HOST_TABLE: word})
    assert loaded.config.engram_config is None
    assert json.dumps(word) in loaded.remarks[1]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({HOST_TABLE: "1", LAYOUT: "shared"}, {"placement": "cpu", "replication": "per_node"}),
        ({HOST_TABLE: "1", LAYOUT: "per_rank"}, {"placement": "cpu"}),
        ({LAYOUT: "shared"}, {}),
        ({LAYOUT: "nonsense"}, {}),
        ({HOST_TABLE: "0", LAYOUT: "nonsense"}, {}),
        ({PEER_SHARDS: "1"}, {"lookup": "peer_read"}),
        ({PEER_SHARDS: "1", HOST_TABLE: "1", LAYOUT: "shared"}, {"lookup": "peer_read"}),
        ({PEER_SHARDS: "1", HOST_TABLE: "1", LAYOUT: "nonsense"}, {"lookup": "peer_read"}),
        ({PEER_SHARDS: "0", HOST_TABLE: "1"}, {"placement": "cpu"}),
        ({"SGLANG_OPT_DSV41_ENGRAM_HOST_STAGING": "1"}, {}),
        ({}, {}),
    ],
)
def test_the_old_variables_mean_what_they_meant(environ: dict[str, str], expected: dict[str, str]) -> None:
    deprecated = from_deprecated_variables(environ)
    assert deprecated.engram_config == expected
    assert bool(deprecated.warnings) == any(name in environ for name in (HOST_TABLE, LAYOUT, PEER_SHARDS))


def test_peer_shards_says_that_it_wins_over_host_table() -> None:
    warnings = from_deprecated_variables({PEER_SHARDS: "1", HOST_TABLE: "1"}).warnings
    assert any("precedence" in warning for warning in warnings)


@pytest.mark.parametrize("layout", ["", "Shared", "nonsense"])
def test_a_wrong_layout_is_refused_where_it_counts(load: Any, layout: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(with_model(), **{HOST_TABLE: "1", LAYOUT: layout})
    assert (caught.value.where, caught.value.path) == ("environment", LAYOUT)


@pytest.mark.parametrize(("raw", "flag"), [(with_model(engram_config={}), None), (with_model(), "{}")])
def test_old_variables_are_ignored_when_a_config_is_given(load: Any, raw: Any, flag: str | None) -> None:
    loaded = load(raw, flag, **{HOST_TABLE: "1", LAYOUT: "nonsense", PEER_SHARDS: "maybe"})
    assert loaded.config.engram == EngramConfig()
    assert loaded.remarks == ()


def test_a_null_config_gives_the_old_variables_their_say(load: Any) -> None:
    loaded = load(with_model(engram_config=None), **{HOST_TABLE: "y"})
    assert loaded.config.engram.placement is Placement.CPU


# Whatever is written


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "cpu", "peer_read", "per_node", "file", "dummy", "ipc:///run/x", "0-1", "a:1"])
)
json_values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
sections = {
    name: st.dictionaries(st.sampled_from(sorted(value)) | st.text(max_size=4), json_values, max_size=4)
    for name, value in FULL.items()
    if isinstance(value, dict)
}
documents = json_values | st.fixed_dictionaries(
    {}, optional={name: json_values | sections.get(name, json_values) for name in [*FULL, "unknown"]}
)


@given(documents, st.none() | json_values | sections["engram_config"])
def test_any_json_gives_a_configuration_or_a_named_refusal(
    tmp_path_factory: pytest.TempPathFactory, document: Any, flag: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    try:
        loaded = load_config(path, None if flag is None else json.dumps(flag), {})
    except ConfigError as error:
        assert len(str(error)) > 10  # noqa: PT017
    else:
        assert isinstance(loaded.config, Config)


@given(st.text())
def test_any_text_gives_json_or_a_named_refusal(text: str) -> None:
    for candidate in (text, json.dumps({text: text}), json.dumps(text)):
        try:
            parse_json(candidate, "engram.json")
        except ConfigError as error:
            assert error.where == "engram.json"  # type: ignore[attr-defined]  # noqa: PT017
