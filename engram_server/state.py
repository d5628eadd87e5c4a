"""The daemon's states as data: which follow which, and which requests each may answer."""

from __future__ import annotations

from engram_client.protocol import Attach, Report, Request, SetLogLevel, State, Status

TRANSITIONS: dict[State, frozenset[State]] = {
    State.STARTING: frozenset({State.LOADING, State.DRAINING, State.FAILED}),
    State.LOADING: frozenset({State.READY, State.DRAINING, State.FAILED}),
    State.READY: frozenset({State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset(),
    State.FAILED: frozenset(),
}

WAITS: dict[type[Request], frozenset[State]] = {Attach: frozenset({State.STARTING, State.LOADING})}
"""Requests that may wait for the next state instead of being refused."""

ANSWERS: dict[type[Request], frozenset[State]] = {
    Attach: frozenset({State.READY}),
    Status: frozenset(State),
    Report: frozenset(State),
    SetLogLevel: frozenset(State),
}


def follow(current: State, reached: State) -> State:
    """`reached`, when it may follow `current`. Raises RuntimeError, a bug of ours, when it may not."""
    if reached not in TRANSITIONS[current]:
        raise RuntimeError(f"the daemon cannot go from {current} to {reached}")
    return reached
