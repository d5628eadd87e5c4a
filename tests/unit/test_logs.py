"""The daemon's log: one line an event, whatever a client calls itself, and repeats held back."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_client.protocol import LogLevel
from engram_server import logs


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, as it was before and after."""
    found = logging.getLogger()
    before = (found.level, list(found.handlers))
    yield found
    found.setLevel(before[0])
    found.handlers[:] = before[1]


def record(message: str, *values: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("engram_server.x", level, "x.py", 1, message, values, None)


@given(st.text(max_size=80), st.integers())
def test_a_json_line_is_one_object_with_the_event_and_its_values(name: str, number: int) -> None:
    line = logs.JsonFormatter().format(record("lease %d ended: %s", number, name))
    assert "\n" not in line
    found = json.loads(line)
    assert found["event"] == "lease %d ended: %s"
    assert found["message"] == f"lease {number} ended: {name}"
    assert found["values"] == [number, name]
    assert found["level"] == "info"


@given(st.text(max_size=80))
def test_a_text_line_is_one_line_whatever_a_client_calls_itself(name: str) -> None:
    assert not {"\n", "\r"} & set(logs.TextFormatter().format(record("client %s", name)))


def test_an_exception_stays_inside_its_json_line(root: logging.Logger) -> None:
    stream = io.StringIO()
    logs.set_up("info", "json", stream)
    try:
        raise ValueError("surprise")
    except ValueError:
        logging.getLogger("engram_server.y").exception("a request failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: surprise" in json.loads(line)["exception"]


def test_repeats_are_held_back_and_counted() -> None:
    now = [0.0]
    repeats = logs.HoldRepeats(lambda: now[0])
    passed = [repeats.filter(record("refused %d", index)) for index in range(logs.BURST + 7)]
    assert passed == [True] * logs.BURST + [False] * 7
    assert repeats.filter(record("something else")), "another kind is not held back"
    now[0] = logs.WINDOW_S
    late = record("refused %d", 99)
    assert repeats.filter(late)
    assert "7 more" in logs.TextFormatter().format(late)
    assert json.loads(logs.JsonFormatter().format(late))["held_back"] == 7
    again = record("refused %d", 100)
    assert repeats.filter(again)
    assert "more" not in logs.TextFormatter().format(again)


def test_the_level_can_be_asked_for_and_changed(root: logging.Logger) -> None:
    stream = io.StringIO()
    logs.set_up("info", "text", stream)
    assert logs.set_level(None).level is LogLevel.INFO
    changed = logs.set_level(LogLevel.DEBUG)
    assert (changed.previous, changed.level) == (LogLevel.INFO, LogLevel.DEBUG)
    logging.getLogger("engram_server.z").debug("seen now")
    assert "seen now" in stream.getvalue()
