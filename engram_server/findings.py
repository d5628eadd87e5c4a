"""What a look at a machine found, as data: one finding a subject, each with its remedy."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

from engram_client.errors import EngramError

SEE_ERRORS = "see docs/errors.md"


class Level(enum.StrEnum):
    OK = "ok"
    WARN = "warn"
    """It works, but slower or with less than it could have."""
    FAIL = "fail"
    """It will not work."""


_ORDER = (Level.OK, Level.WARN, Level.FAIL)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`id` names the subject and stays the same from version to version; `seen` and `remedy` are for people."""

    id: str
    level: Level
    seen: str
    remedy: str = ""
    """What to do; empty where nothing needs doing."""
    error: str | None = None
    """Name of the error class that the daemon would end with."""


def of_error(id: str, error: EngramError, level: Level = Level.FAIL) -> Finding:
    """The finding that an error is. Its template says what happened and, after a semicolon, what to do."""
    happened, _, remedy = error.template.partition("; ")
    fields = error.fields
    return Finding(
        id=id,
        level=level,
        seen=happened.format(**fields),
        remedy=remedy.format(**fields) or SEE_ERRORS,
        error=error.code,
    )


def worst(findings: Iterable[Finding]) -> Level:
    return max((finding.level for finding in findings), key=_ORDER.index, default=Level.OK)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: all is well; 1: works, with warnings; 2: will not work."""
    return _ORDER.index(worst(findings))


def gib(nbytes: float) -> str:
    """Bytes as a person reads them."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / 2**20:.1f} MiB"
