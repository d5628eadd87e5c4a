"""Findings: levels, exit codes, and what an error becomes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.errors import BY_CODE, NotEnoughMemory
from engram_server.findings import Finding, Level, exit_code, of_error, worst


def finding(level: Level) -> Finding:
    return Finding(id="x", level=level, seen="s")


@given(st.lists(st.sampled_from(Level)))
def test_the_exit_code_is_that_of_the_worst_finding(levels: list[Level]) -> None:
    code = exit_code([finding(level) for level in levels])
    assert code == (2 if Level.FAIL in levels else 1 if Level.WARN in levels else 0)


def test_nothing_found_is_well() -> None:
    assert worst([]) is Level.OK


def test_an_error_becomes_what_happened_and_what_to_do() -> None:
    found = of_error("memory", NotEnoughMemory(needed=10, available=3, source="a; b"))
    assert found.error == "NotEnoughMemory"
    assert "10" in found.seen
    assert "a; b" in found.seen, "a semicolon in a field is no border"
    assert found.remedy.startswith("free memory")


@pytest.mark.parametrize("kind", [kind for kind in BY_CODE.values() if kind.template], ids=lambda kind: kind.__name__)
def test_every_error_can_be_a_finding_with_a_remedy(kind: type) -> None:
    error = kind.__new__(kind)
    for name in getattr(kind, "__annotations__", {}):
        if name not in ("template", "exit_code"):
            setattr(error, name, 1)
    found = of_error("x", error)
    assert found.seen
    assert found.remedy
