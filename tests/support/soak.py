"""How long the long tests are: short in CI, long in `make soak` and `make fuzz`, with the same seeds."""

from __future__ import annotations

import os

LONG = os.environ.get("ENGRAM_SOAK") == "1"
SEED = int(os.environ.get("ENGRAM_SEED", "20261129"))


def pick(short: int, long: int) -> int:
    return long if LONG else short
