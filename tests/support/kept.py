"""A manifest as daemons have written it since version 1 of its format, and what of it came later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MANIFEST = Path(__file__).with_name("manifest-1.json").read_bytes()
LATER = {
    "": ("damaged", "gpus"),
    "result": ("phase_seconds",),
    "tables.0": ("sample",),
    "tables.0.segments.0": ("device",),
}
"""Fields that the first daemons did not write, by where they are."""


def earliest(manifest: bytes) -> bytes:
    """`manifest` as the first daemons would have written it."""
    facts = json.loads(manifest)
    for place, names in LATER.items():
        where: Any = facts
        for step in filter(None, place.split(".")):
            where = where[int(step)] if step.isdigit() else where[step]
        for name in names:
            del where[name]
    return json.dumps(facts).encode()
