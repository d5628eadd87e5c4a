"""Asking a daemon for its tables: the first time, and for a new lease when it was replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from engram_client.control import ControlConnection
from engram_client.errors import ConnectTimeout, IdentityMismatch, ServerDraining, TicketInvalid, TransferCut
from engram_client.handover import REPLY_LEAST_S, HandoverConnection, wait_for_end
from engram_client.nodes import Nodes
from engram_client.protocol import TICKET_LIFETIME_S, Attach, Attached, Progress, handover_path


class Question(NamedTuple):
    """What is asked for, of which daemon, and for how long: `timeout` seconds in all, which end at `deadline`."""

    endpoint: str
    sockets: str
    """Path of the handover socket."""
    request: Attach
    deadline: float
    timeout: float
    on_progress: Callable[[Progress], None] | None = None


def receive(
    question: Question, nodes: Nodes, undo: contextlib.ExitStack, received: contextlib.ExitStack
) -> tuple[HandoverConnection, ControlConnection, Attached, dict[str, int]]:
    """What a daemon answers, and the descriptors by segment id. The connections belong to `undo`, the descriptors to
    `received`. A process that was stopped for longer than a ticket lives asks for another while there is time.
    `nodes` hears of the options before the ticket is redeemed."""
    while True:
        lease, control, attached = _obtain(question, undo)
        answered = time.monotonic()
        nodes.expect(attached.options)
        try:
            patience = max(question.deadline - time.monotonic(), REPLY_LEAST_S)
            return lease, control, attached, received.enter_context(lease.redeemed(attached.ticket, patience))
        except TicketInvalid:
            if not answered + TICKET_LIFETIME_S <= time.monotonic() < question.deadline:
                raise
            undo.close()  # the connections of this attempt


def _obtain(question: Question, undo: contextlib.ExitStack) -> tuple[HandoverConnection, ControlConnection, Attached]:
    """What a daemon answers. One that drains is about to be replaced: while there is time, its successor is waited
    for."""
    left = question.timeout
    while True:
        with contextlib.ExitStack() as attempt:
            lease = None
            try:
                lease = attempt.enter_context(HandoverConnection.open(question.sockets, left))
                control = attempt.enter_context(ControlConnection(question.endpoint, lease))
                attached = _attach(question, control, lease)
                undo.enter_context(attempt.pop_all())
                return lease, control, attached
            except ServerDraining:
                wait_for_end(lease, question.deadline)
                left = question.deadline - time.monotonic()
                if left <= 0:
                    raise


def _attach(question: Question, control: ControlConnection, lease: HandoverConnection) -> Attached:
    left = max(question.deadline - time.monotonic(), REPLY_LEAST_S)
    for reply in control.request(question.request, left, "waiting for the tables"):
        if isinstance(reply, Attached):
            if reply.epoch != lease.epoch:
                raise lease.last_error() or TransferCut(doing="attaching (the daemon was replaced meanwhile)")
            return reply
        if isinstance(reply, Progress) and question.on_progress is not None:
            question.on_progress(reply)
    raise ConnectTimeout(timeout_s=question.timeout, doing="waiting for the tables", cause="no reply")


def renew(endpoint: str, handover: str | None, request: Attach, before: Attached) -> HandoverConnection:
    """A new lease on exactly what `before` handed out. Its descriptors are not needed: the memory is mapped."""
    sockets = handover_path(endpoint, handover)
    lease = HandoverConnection.open(sockets, 0)
    try:
        with ControlConnection(endpoint, lease) as control:
            question = Question(endpoint, sockets, _same_tables(request, before), time.monotonic(), 0)
            attached = _attach(question, control, lease)
        _compare_samples(before, attached)
        with lease.redeemed(attached.ticket, REPLY_LEAST_S):
            pass
    except BaseException:
        lease.close()
        raise
    return lease


def _same_tables(request: Attach, attached: Attached) -> Attach:
    """The request for a lease on the same tables; it never waits for a load."""
    return msgspec.structs.replace(
        request,
        layers=tuple(table.geometry.layer_id for table in attached.tables),
        identity=tuple(table.identity for table in attached.tables),
        roots={},
        wait=False,
    )


def _compare_samples(before: Attached, now: Attached) -> None:
    """Tells tables apart where no node has read a whole one, and their identities have no root."""
    known = {table.geometry.layer_id: table.sample for table in before.tables}
    for table in now.tables:
        layer, served = table.geometry.layer_id, table.sample
        demanded = known[layer]
        if None not in (served, demanded) and served != demanded:
            raise IdentityMismatch(
                layer_id=layer, differing=["sample"], demanded={"sample": demanded}, served={"sample": served}
            )
