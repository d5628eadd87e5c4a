"""Each error is a class with typed fields, on this side of the wire and on the other."""

from __future__ import annotations

import copy
import importlib
import pickle
import string
import typing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client import errors
from engram_client.errors import BY_CODE, EngramError, UnknownError, from_wire, to_wire

BASES = [kind for kind in BY_CODE.values() if kind.__subclasses__()]
LEAVES = [kind for kind in BY_CODE.values() if not kind.__subclasses__()]
SAMPLES: dict[Any, Any] = {
    str: "a {brace} text",
    int: 7,
    float: 1.5,
    list[str]: ["root", "rows"],
    list[int]: [1, 14],
    dict[str, Any]: {"root": None, "columns": [1, 2]},
}
WRONG: dict[Any, list[Any]] = {
    str: [None, 7, b"bytes", ["text"]],
    int: [None, "7", True, 1.5],
    float: [None, "1.5", True],
    list[str]: [None, "root", [1], {"root": 1}],
    list[int]: [None, 1, ["1"], [True]],
    dict[str, Any]: [None, "root", [], 1],
}
EXIT_CODES = {"ConfigError": 2, "ResourceError": 3, "CheckpointError": 4, "AlreadyRunning": 5}
every_error = pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)


def fields_of(kind: type[EngramError]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    own = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is not typing.ClassVar}
    return {name: SAMPLES[hint] for name, hint in own.items()}


def sample(kind: type[EngramError]) -> EngramError:
    return kind(**fields_of(kind))


def test_every_error_and_exit_code_is_had_from_the_package_itself() -> None:
    folder = Path(errors.__file__).parent
    modules = [importlib.import_module(f"{errors.__name__}.{path.stem}") for path in folder.glob("[a-z]*.py")]
    codes = {name for module in modules for name in vars(module) if name.startswith("EXIT_")}
    assert len(codes) > 5
    for name in {*BY_CODE, *codes}:
        assert hasattr(errors, name), f"{name}: name it in {errors.__file__}"
    assert {kind.__module__ for kind in BY_CODE.values()} == {module.__name__ for module in modules}


@every_error
def test_an_error_takes_each_of_its_fields_by_name_and_no_other(kind: type[EngramError]) -> None:
    fields = fields_of(kind)
    assert kind(**fields).fields == fields
    with pytest.raises(TypeError, match="another"):
        kind(**fields, another=1)
    for name in fields:
        with pytest.raises(TypeError, match=name):
            kind(**{key: value for key, value in fields.items() if key != name})


def test_families_have_a_docstring_and_no_message_of_their_own() -> None:
    assert {kind.__name__ for kind in BASES} == {
        "ConfigError",
        "ResourceError",
        "CheckpointError",
        "AdoptError",
        "ConnectError",
        "MessageError",
        "CudaError",
        "EngineError",
        "UseError",
    }
    assert all(kind.__doc__ and not kind.template for kind in BASES)


@every_error
def test_every_error_states_its_message_with_its_own_fields(kind: type[EngramError]) -> None:
    fields = fields_of(kind)
    used = {name.partition("[")[0] for _, name, _, _ in string.Formatter().parse(kind.template) if name is not None}
    assert kind.template
    assert used == set(fields)
    assert str(sample(kind))
    assert all(str(value) in str(sample(kind)) for name, value in fields.items() if name != "path")


@every_error
def test_every_error_crosses_the_wire_as_the_same_class_with_the_same_fields(kind: type[EngramError]) -> None:
    error = sample(kind)
    code, fields = msgpack.unpackb(msgpack.packb(to_wire(error)))
    rebuilt = from_wire(code, fields)
    assert type(rebuilt) is kind
    assert rebuilt.fields == error.fields
    assert str(rebuilt) == str(error)


@every_error
def test_every_error_survives_pickle_and_copy(kind: type[EngramError]) -> None:
    error = sample(kind)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is kind
        assert twin.fields == error.fields
        assert repr(twin) == repr(error)


@every_error
def test_every_error_ends_a_program_with_the_code_of_its_family(kind: type[EngramError]) -> None:
    family = next((base.__name__ for base in kind.__mro__ if base.__name__ in EXIT_CODES), None)
    assert kind.exit_code == (EXIT_CODES[family] if family else 1)


@every_error
def test_fields_that_are_missing_unknown_or_wrongly_typed_make_an_unknown_error(kind: type[EngramError]) -> None:
    _, good = to_wire(sample(kind))
    hints = typing.get_type_hints(kind)
    damaged = [{**good, "more": 1}]
    damaged += [{key: value for key, value in good.items() if key != name} for name in good]
    damaged += [{**good, name: wrong} for name in good for wrong in WRONG[hints[name]]]
    for fields in damaged:
        rebuilt = from_wire(kind.__name__, fields)
        assert type(rebuilt) is UnknownError
        assert (rebuilt.remote_code, rebuilt.remote_fields) == (kind.__name__, fields)


def test_a_whole_number_of_seconds_is_a_number_of_seconds() -> None:
    assert type(from_wire("ConnectTimeout", {"timeout_s": 60, "doing": "x", "cause": "y"})) is errors.ConnectTimeout


@pytest.mark.parametrize("code", ["", "NoSuchError", "EngramError", "Exception", *(kind.__name__ for kind in BASES)])
def test_a_code_that_names_no_failure_is_an_unknown_error_that_keeps_what_came(code: str) -> None:
    rebuilt = from_wire(code, {})
    assert type(rebuilt) is UnknownError
    assert rebuilt.fields == {"remote_code": code, "remote_fields": {}}


def test_a_field_that_no_message_can_hold_is_sent_as_its_text() -> None:
    error = errors.NoServer(path=Path("/run/x"))  # type: ignore[arg-type]
    assert to_wire(error) == ("NoServer", {"path": "/run/x"})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.data())
def test_whatever_comes_over_the_wire_becomes_an_error_that_can_be_printed_and_sent_on(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(LEAVES))
    names = st.sampled_from([*fields_of(kind), "other"])
    fields = data.draw(st.dictionaries(names, json_values))
    rebuilt = from_wire(kind.__name__, fields)
    assert isinstance(rebuilt, (kind, UnknownError))
    assert str(rebuilt)
    assert msgpack.packb(to_wire(rebuilt))
