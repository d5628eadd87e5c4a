"""Coverage-guided fuzzing of what decodes both sockets' frames and manifests.

`python -m tests.fuzz.guided [-runs=N] [libFuzzer options]`. Needs atheris (`make fuzz` installs it). A crash is
printed with its bytes, and kept in tests/fuzz/seeds.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["engram_client.protocol", "engram_client.errors", "engram_server.manifest"]):
    from engram_client.errors import EngramError
    from engram_client.protocol import Failed, HandoverReply, HandoverRequest, Reply, Request, decode, request_id_of
    from engram_server import manifest

from tests.fuzz.frames import REAL, REPLIES, SEEDS, change
from tests.support.kept import MANIFEST


def one(data: bytes) -> None:
    for expected in (Request, Reply, HandoverRequest, HandoverReply):
        with contextlib.suppress(EngramError):
            message = decode(data, expected)[1]
            if isinstance(message, Failed):
                str(message.error())
    request_id_of(data)
    with contextlib.suppress(EngramError):
        manifest.decode(data, "fuzz")


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time a change that keeps a frame msgpack: bytes alone rarely get past its parser."""
    dice = random.Random(seed)
    made: bytes = change(dice, data) if dice.random() < 0.5 else atheris.Mutate(data, max_size)
    return made[:max_size]


def main() -> None:
    SEEDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engram-fuzz-") as found:
        for number, frame in enumerate((*REAL, *REPLIES, MANIFEST)):
            Path(found, f"real-{number}").write_bytes(frame)
        # New inputs go into the first folder; what crashes is kept among the seeds.
        options = ["-max_len=4096", "-timeout=10", "-rss_limit_mb=1024", f"-artifact_prefix={SEEDS}/"]
        atheris.Setup([*sys.argv, *options, found, str(SEEDS)], one, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
