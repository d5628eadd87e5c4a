"""Tickets are single-use and short-lived, leases end with their connection."""

from __future__ import annotations

from typing import get_args

import pytest

from engram_client.errors import TicketInvalid, TooManyClients, UnknownLease
from engram_client.protocol import (
    TICKET_BYTES,
    TICKET_LIFETIME_S,
    Attach,
    LookupCounters,
    Report,
    Request,
    State,
    Status,
)
from engram_server import state
from engram_server.leases import Grant, Leases, Peer
from engram_server.tickets import MAX_TICKETS

GRANT = Grant(segments=("L1",), layers=(1,), rank=0, world_size=1, device="cpu", name="engine")
PEER = Peer(pid=7, uid=8, gid=9)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_ticket_becomes_a_lease_once() -> None:
    leases = Leases(Clock())
    ticket = leases.issue(GRANT)
    assert len(ticket) == TICKET_BYTES
    lease = leases.redeem(ticket, PEER)
    assert (lease.grant, lease.peer) == (GRANT, PEER)
    with pytest.raises(TicketInvalid):
        leases.redeem(ticket, PEER)


def test_an_unused_ticket_expires_and_leaves_nothing() -> None:
    clock = Clock()
    leases = Leases(clock)
    early = leases.issue(GRANT)
    clock.now += TICKET_LIFETIME_S / 2
    late = leases.issue(GRANT)
    clock.now += TICKET_LIFETIME_S / 2
    with pytest.raises(TicketInvalid):
        leases.redeem(early, PEER)
    assert leases.open_tickets == 1
    assert leases.redeem(late, PEER).grant == GRANT
    assert leases.open_tickets == 0


def test_tickets_are_limited_until_some_expire() -> None:
    clock = Clock()
    leases = Leases(clock)
    tickets = {leases.issue(GRANT) for _ in range(MAX_TICKETS)}
    assert len(tickets) == MAX_TICKETS
    with pytest.raises(TooManyClients):
        leases.issue(GRANT)
    clock.now += TICKET_LIFETIME_S
    leases.issue(GRANT)


def test_a_snapshot_shows_who_holds_a_lease_and_for_how_long() -> None:
    clock = Clock()
    leases = Leases(clock)
    lease = leases.redeem(leases.issue(GRANT), PEER)
    clock.now += 2.5
    (shown,) = leases.snapshot()
    assert (shown.id, shown.pid, shown.uid, shown.gid, shown.age_s) == (lease.id, 7, 8, 9, 2.5)
    leases.release(lease)
    leases.release(lease)
    assert leases.snapshot() == ()


@pytest.mark.parametrize("current", list(State))
@pytest.mark.parametrize("reached", list(State))
def test_only_the_transitions_in_the_table_are_possible(current: State, reached: State) -> None:
    if reached in state.TRANSITIONS[current]:
        assert state.follow(current, reached) is reached
    else:
        with pytest.raises(RuntimeError):
            state.follow(current, reached)


def test_every_state_can_end_and_every_request_has_states_that_answer_it() -> None:
    ends = {State.DRAINING, State.FAILED}
    for current in set(State) - ends:
        assert ends <= state.TRANSITIONS[current]
    assert state.TRANSITIONS[State.DRAINING] == {State.FAILED}
    assert state.TRANSITIONS[State.FAILED] == frozenset()
    assert set(state.RULES) == set(get_args(Request))
    assert all(rule.answered for rule in state.RULES.values())
    assert not any(rule.answered & rule.waits for rule in state.RULES.values())


def test_only_looking_and_attaching_are_for_everybody() -> None:
    assert {kind for kind, rule in state.RULES.items() if rule.role is state.Role.PEER} == {Attach, Report, Status}
    for kind, rule in state.RULES.items():
        assert ("permit" in kind.__struct_fields__) == (rule.role is state.Role.OWNER)


def test_a_lease_that_is_not_held_is_named_with_those_that_are() -> None:
    leases = Leases(Clock())
    lease = leases.redeem(leases.issue(GRANT), PEER)
    assert leases.find(lease.id) is lease
    with pytest.raises(UnknownLease) as caught:
        leases.find(lease.id + 1)
    assert caught.value.held == [lease.id]


def test_the_last_sign_of_life_is_counted_from_when_it_came() -> None:
    clock = Clock()
    leases = Leases(clock)
    lease = leases.redeem(leases.issue(GRANT), PEER)
    clock.now += 4
    leases.seen(lease)
    clock.now += 3
    assert [(shown.age_s, shown.last_seen_s) for shown in leases.snapshot()] == [(7, 3)]


def report(lease: int, **counts: int) -> Report:
    return Report(epoch="e", lease=lease, lookups=LookupCounters(**counts), attach_s=0.1)


def test_reports_are_totals_and_outlive_their_lease() -> None:
    leases = Leases(Clock())
    first, second = (leases.redeem(leases.issue(GRANT), PEER) for _ in range(2))
    assert leases.report(report(first.id, rows=10)), "the first of a lease"
    assert not leases.report(report(first.id, rows=30, invalid_ids=1))
    leases.report(report(second.id, rows=5))
    assert leases.lookups == LookupCounters(rows=35, invalid_ids=1)
    assert {lease.id: lease.lookups.rows for lease in leases.snapshot()} == {first.id: 30, second.id: 5}
    leases.release(first)
    assert leases.lookups == LookupCounters(rows=35, invalid_ids=1)
    assert leases.granted == 2


def test_a_report_of_no_lease_is_passed_over() -> None:
    leases = Leases(Clock())
    assert not leases.report(report(9, rows=10))
    assert leases.lookups == LookupCounters()


def test_totals_stay_in_the_range_of_a_message() -> None:
    leases = Leases(Clock())
    most = (1 << 63) - 1
    for _ in range(2):
        leases.report(report(leases.redeem(leases.issue(GRANT), PEER).id, rows=most))
    assert leases.lookups.rows == most
