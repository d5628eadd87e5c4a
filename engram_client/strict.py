"""Untyped data (engram.json, a model's config.json) as typed structs, nothing coerced.

msgspec does the checking. What is here turns its refusals into the key's path, the value found and the values
allowed, all three in a user's words, and describes a type in the same words for the documentation.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from engram_client.errors import ConfigInvalid

_S = TypeVar("_S")
_Step = str | int
"""A key of an object, or an index of a list."""


def convert(raw: Any, kind: type[_S], where: str) -> _S:
    """`raw` as `kind`. Raises ConfigInvalid with the offending key's path, `where` in front."""
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _refusal(raw, kind, where, str(error)) from error


def _refusal(raw: Any, kind: Any, where: str, message: str) -> ConfigInvalid:
    unknown = _unknown_key(raw, kind, [])
    if unknown is not None:
        path, section = unknown
        known = ", ".join(field.name for field in msgspec.structs.fields(section))
        return ConfigInvalid(where=where, path=_path(path), problem="is not a known key", allowed=known)
    # The last one, for a refused value may contain the same words; no key of the user's is in the path any more.
    at = message.rpartition(" - at `$")[2] if " - at `$" in message else ""
    steps: list[_Step] = [int(index) if index else key for key, index in re.findall(r"\.(\w+)|\[([0-9]+)\]", at)]
    missing = re.match(r"Object missing required field `(\w+)`", message)
    if missing:
        steps.append(missing[1])
    value, target = _descend(raw, kind, steps)
    problem = "is missing" if missing else f"is {shown(value)}"
    return ConfigInvalid(where=where, path=_path(steps), problem=problem, allowed=describe(target))


def _unknown_key(value: Any, kind: Any, steps: list[_Step]) -> tuple[list[_Step], type[msgspec.Struct]] | None:
    """The path of the first key that its section does not have, and the section."""
    section = _section_in(kind)
    if section is None or not isinstance(value, dict):
        return None
    fields = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, item in value.items():
        if key not in fields and section.__struct_config__.forbid_unknown_fields:
            return [*steps, key], section
        found = _unknown_key(item, fields.get(key), [*steps, key])
        if found is not None:
            return found
    return None


def _descend(value: Any, kind: Any, steps: list[_Step]) -> tuple[Any, Any]:
    """What lies at the end of `steps`, in the data and in the type."""
    for step in steps:
        if isinstance(step, int):
            value = value[step]
            kind = next(get_args(part)[0] for part in _parts(kind) if get_origin(part) is tuple)
        else:
            value = value.get(step)
            kind = next(
                field.type
                for part in _parts(kind)
                if _is_section(part)
                for field in msgspec.structs.fields(part)
                if field.name == step
            )
    return value, kind


def _path(steps: list[_Step]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".") or "$"


def _parts(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union; of any other type, itself."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _section_in(kind: Any) -> type[msgspec.Struct] | None:
    return next((part for part in _parts(kind) if _is_section(part)), None)


def shown(value: Any) -> str:
    """A value as JSON, short enough for a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def describe(kind: Any) -> str:
    """The values of a type in a user's words: null, "auto" or "dummy"; an integer from 1 to 8."""
    # null first: after a list it would read as one of the items.
    *others, last = sorted((word for part in _parts(kind) for word in _words(part)), key=lambda word: word != "null")
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> Iterator[str]:
    origin = get_origin(kind)
    if origin is Annotated:
        yield _annotated(*get_args(kind))
    elif origin is Literal:
        yield from (json.dumps(value) for value in get_args(kind))
    elif origin is tuple:
        yield f"a list, each item {describe(get_args(kind)[0])}"
    elif isinstance(kind, type) and issubclass(kind, enum.StrEnum):
        yield from (json.dumps(str(member)) for member in kind)
    elif _is_section(kind):
        yield f"an object with the keys {', '.join(field.name for field in msgspec.structs.fields(kind))}"
    else:
        yield {str: "a string", int: "an integer", bool: "true or false", NoneType: "null"}.get(kind, "an object")


def _annotated(base: Any, meta: msgspec.Meta) -> str:
    if meta.description is not None:
        return meta.description
    return f"{describe(base)} from {meta.ge} to {meta.le}"
