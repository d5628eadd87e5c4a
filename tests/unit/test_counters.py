"""What a rank tells about its lookups leaves at most once a second, whatever it does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engram_client import counters
from engram_client.counters import REPORT_EVERY_S, Reporter
from engram_client.protocol import Report, decode


class Wire:
    """A socket that notes when what left."""

    def __init__(self, clock: list[float], full: bool = False) -> None:
        self.sent: list[tuple[float, Report]] = []
        self.closed = False
        self._clock, self._full = clock, full

    def send(self, frame: bytes, flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if self._full:
            raise zmq.Again
        self.sent.append((self._clock[0], decode(frame, Report)[1]))

    def close(self, linger: int) -> None:
        self.closed = True

    def term(self) -> None:
        """The context's, which is the same object here."""


def reporter(wire: Any) -> Reporter:
    return Reporter(wire, wire, lambda: ("epoch", 1), 0.25)


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 2), st.integers(1, 100)), max_size=60))
def test_reports_are_a_second_apart_and_the_last_one_has_everything(lookups: list[tuple[float, int, int]]) -> None:
    """Over any pauses, layers and sizes; two meters of one client share its one report a second."""
    clock = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counters.time, "monotonic", lambda: clock[0])
        wire = Wire(clock)
        told = reporter(wire)
        for pause, layer, ids in lookups:
            clock[0] += pause
            told.meter(layer).looked_up(ids, lambda: 0)
        in_time = [when for when, _ in wire.sent]
        assert all(later >= earlier + REPORT_EVERY_S for earlier, later in itertools.pairwise(in_time))
        told.close()
        told.close()
    assert wire.sent[-1][1].lookups.rows == sum(ids for _, _, ids in lookups)
    assert len(wire.sent) == len(in_time) + 1
    assert wire.closed


def test_a_daemon_that_takes_nothing_costs_a_lookup_nothing() -> None:
    wire = Wire([0.0], full=True)
    told = reporter(wire)
    told.meter(1).looked_up(5, lambda: 0)
    told.close()
    assert wire.sent == []
