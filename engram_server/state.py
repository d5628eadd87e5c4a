"""The daemon's states as data: which follow which, and who may ask for what in which of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engram_client.protocol import Attach, Drain, Evict, Report, Request, SetLogLevel, State, Status, Verify

TRANSITIONS: dict[State, frozenset[State]] = {
    # straight to READY where everything was taken over from an earlier daemon
    State.STARTING: frozenset({State.LOADING, State.READY, State.DRAINING, State.FAILED}),
    State.LOADING: frozenset({State.READY, State.DRAINING, State.FAILED}),
    State.READY: frozenset({State.DEGRADED, State.DRAINING, State.FAILED}),
    State.DEGRADED: frozenset({State.DRAINING, State.FAILED}),
    State.DRAINING: frozenset({State.FAILED}),
    State.FAILED: frozenset(),
}


class Role(enum.StrEnum):
    """Who asks."""

    PEER = "peer"
    """Whoever the control socket's mode lets in."""
    OWNER = "owner"
    """The daemon's own user, or root: shown by a permit from the handover socket."""


@dataclass(frozen=True)
class Rule:
    """Of one request: who may make it, in which states it is answered, and in which it may wait for one."""

    role: Role
    answered: frozenset[State]
    waits: frozenset[State] = frozenset()


_SERVING = frozenset({State.READY, State.DEGRADED})

RULES: dict[type[Request], Rule] = {
    Attach: Rule(Role.PEER, _SERVING, frozenset({State.STARTING, State.LOADING})),
    Status: Rule(Role.PEER, frozenset(State)),
    Report: Rule(Role.PEER, frozenset(State)),
    Verify: Rule(Role.OWNER, _SERVING),
    Evict: Rule(Role.OWNER, _SERVING | {State.DRAINING}),
    Drain: Rule(Role.OWNER, frozenset(State)),
    SetLogLevel: Rule(Role.OWNER, frozenset(State)),
}


def follow(current: State, reached: State) -> State:
    """`reached`, when it may follow `current`. Raises RuntimeError, a bug of ours, when it may not."""
    if reached not in TRANSITIONS[current]:
        raise RuntimeError(f"the daemon cannot go from {current} to {reached}")
    return reached
