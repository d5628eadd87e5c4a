"""torch.cuda for the fake driver's GPUs, whose memory is the host's: tensors are the CPU's, streams do nothing."""

from __future__ import annotations

import itertools
import json
import os
from contextlib import AbstractContextManager
from typing import Any

import torch

from engram_client.cuda.access import DRIVER_VARIABLE, cuda_driver
from engram_client.lookup import runtime

FAKE = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver"}


class FakeEvent:
    def __init__(self, number: int) -> None:
        self.cuda_event = number


class FakeSide:
    handle = 7
    _numbers = itertools.count(100)

    def __init__(self, ordinal: int) -> None:
        self.log: list[str] = []

    def follow_current(self) -> None:
        self.log.append("fork")

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def event(self) -> FakeEvent:
        return FakeEvent(next(self._numbers))

    def record(self, event: object) -> None:
        self.log.append("record")


capturing = False


def on_fake(machine: dict[str, Any], fail: str = "") -> None:
    """Makes this process one on the fake machine."""
    os.environ.update(FAKE, ENGRAM_FAKE_CUDA=json.dumps(machine), ENGRAM_FAKE_FAIL=fail)
    install()


def install() -> None:
    """For the rest of this process."""
    runtime.device = lambda ordinal: torch.device("cpu")
    runtime.current_stream = lambda ordinal: 0
    runtime.is_current = lambda ordinal: True
    runtime.capturing = lambda: capturing
    runtime.current = current
    runtime.SideStream = FakeSide  # type: ignore[assignment,misc]


def current(ordinal: int) -> AbstractContextManager[None]:
    return cuda_driver().context(ordinal)
