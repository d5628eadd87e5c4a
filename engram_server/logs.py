"""The daemon's log: one line an event, as text or JSON, with repeats held back.

The standard library's logging: structlog would cost each start of the daemon 60 ms of imports for what is
one small formatter here.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from engram_client.protocol import LogLevel, LogLevelReply

FORMATS = ("text", "json")
BURST = 10
"""Lines of one kind that may come within WINDOW_S; the rest is counted."""
WINDOW_S = 10.0
_MAX_KINDS = 1024
_TIME = "%Y-%m-%dT%H:%M:%S"


def set_up(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Everything that is logged goes to `stream`, stderr by default. For the daemon's entry alone."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(HoldRepeats())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_level(level: LogLevel | None) -> LogLevelReply:
    """Changes what is logged, unless `level` is None; what it was and is."""
    root = logging.getLogger()
    previous = LogLevel(logging.getLevelName(root.getEffectiveLevel()).lower())
    if level is not None and level is not previous:
        root.setLevel(level.upper())
        logging.getLogger(__name__).warning("log level: %s, was %s", level, previous)
    return LogLevelReply(level=level or previous, previous=previous)


class TextFormatter(logging.Formatter):
    """`time LEVEL message`; names that clients choose cannot begin a line of their own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(message)s", _TIME)
        self.converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")
        held = _held(record)
        return f"{line} ({held} more like this were held back)" if held else line


class JsonFormatter(logging.Formatter):
    """One object a line. `event` is the message before its values were put in: the same for the same event."""

    def __init__(self) -> None:
        super().__init__()
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{self.formatTime(record, _TIME)}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str(record.msg),
            "message": record.getMessage(),
        }
        if record.args:
            values = record.args.values() if isinstance(record.args, dict) else record.args
            line["values"] = [value if isinstance(value, int | float | None) else str(value) for value in values]
        if held := _held(record):
            line["held_back"] = held
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


class HoldRepeats(logging.Filter):
    """Lets BURST lines of a kind through in WINDOW_S; the first one after that says how many were held back.

    A kind is a logger, a level and a message before its values. `now` is a monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._lock = threading.Lock()
        self._kinds: dict[tuple[str, int, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = (record.name, record.levelno, str(record.msg)), self._now()
        with self._lock:
            if len(self._kinds) > _MAX_KINDS:
                self._kinds.clear()
            since, count = self._kinds.get(kind, (now, 0))
            held = 0
            if now - since >= WINDOW_S:
                held, since, count = max(0, count - BURST), now, 0
            self._kinds[kind] = (since, count + 1)
        if count >= BURST:
            return False
        record.held_back = held
        return True


def _held(record: logging.LogRecord) -> int:
    return int(getattr(record, "held_back", 0))
