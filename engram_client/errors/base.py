"""The root of all errors: typed fields, their way over the wire and back, exit codes."""

from __future__ import annotations

import functools
import typing
from typing import Any, ClassVar, dataclass_transform

import msgspec

EXIT_OK = 0
EXIT_OTHER = 1
EXIT_CONFIG = 2
EXIT_RESOURCES = 3
EXIT_CHECKPOINT = 4
EXIT_ALREADY_RUNNING = 5

BY_CODE: dict[str, type[EngramError]] = {}


@dataclass_transform(kw_only_default=True, eq_default=False)
class EngramError(Exception):
    """The root of all errors of this project."""

    template: ClassVar[str] = ""
    exit_code: ClassVar[int] = EXIT_OTHER

    field_types: ClassVar[dict[str, str]] = {}
    """The class's fields, those of its bases first, with their types as written."""

    def __init_subclass__(cls) -> None:
        # A hundred generated dataclasses would cost every start of the daemon and of a rank 15 ms.
        cls.field_types = cls.field_types | cls.__annotations__
        BY_CODE[cls.__name__] = cls

    def __init__(self, **fields: Any) -> None:
        """Takes every field of the class by name. Raises TypeError for one too many or too few."""
        if fields.keys() != self.field_types.keys():
            wrong = sorted(fields.keys() ^ self.field_types.keys())
            raise TypeError(f"{self.code} takes the fields {list(self.field_types)}; wrong: {wrong}")
        super().__init__()
        self.__dict__.update(fields)

    @property
    def code(self) -> str:
        """The name the error has on the wire: its class's name."""
        return type(self).__name__

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.field_types}

    def __str__(self) -> str:
        return self.template.format(**self.fields)

    def __repr__(self) -> str:
        return f"{self.code}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(kind: type[EngramError], fields: dict[str, Any]) -> EngramError:
    return kind(**fields)


def to_wire(error: EngramError) -> tuple[str, dict[str, Any]]:
    """The error as a code and a map of fields that any msgpack reader understands."""
    return error.code, msgspec.to_builtins(error.fields, enc_hook=str)


def from_wire(code: str, fields: dict[str, Any]) -> EngramError:
    """The error that `to_wire` took apart; `UnknownError` when this version does not know the code, or
    knows it with other fields or types."""
    kind = BY_CODE.get(code)
    if kind is not None and kind.template:  # a class without one is a base, which nobody raises
        try:
            checked = msgspec.convert(fields, _shape(code), strict=True)
            return kind(**msgspec.structs.asdict(checked))
        except msgspec.ValidationError:
            pass
    return UnknownError(remote_code=code, remote_fields=fields)


@functools.cache
def _shape(code: str) -> type[msgspec.Struct]:
    """The fields of an error and their types as a struct, to check what came over the wire."""
    kind = BY_CODE[code]
    hints = typing.get_type_hints(kind)
    fields = [(name, hints[name]) for name in kind.field_types]
    return msgspec.defstruct(code, fields, forbid_unknown_fields=True)


class UnknownError(EngramError):
    """The daemon reported a failure that this version of the client does not know."""

    template = "the daemon reported {remote_code} {remote_fields}; this client does not know it: update the client"
    remote_code: str
    remote_fields: dict[str, Any]


class InternalError(EngramError):
    """A fault of ours: one request failed, the daemon goes on."""

    template = "internal error while {doing}: {problem}; this is a bug, please report it with the daemon's log"
    doing: str
    problem: str
