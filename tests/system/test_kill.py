"""Real processes die at every moment there is: what is left serves on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from engram_client import connect
from engram_client.control import ControlConnection, ask_owner, query_status
from engram_client.endpoint import endpoint_tag
from engram_client.errors import ConnectError, EngramError
from engram_client.handover import HandoverConnection
from engram_client.protocol import BEAT_INTERVAL_S, TICKET_LIFETIME_S, Attach, Attached, Evict, State
from tests.support.daemon import Daemon, wait_until
from tests.support.soak import LONG, SEED, pick
from tests.system.test_restart import Node, control, node_of

DAEMON_KILLS = pick(10, 100)
RANK_KILLS = pick(10, 100)
"""Of each kind: during attach, and during lookups."""
CHURN_CLIENTS = pick(8, 64)
CHURN_S = pick(20, 300)
GROWTH_LIMIT_BYTES = 48 << 20
"""What a rank or the daemon may grow by in a long loop: allocators keep some, a leak of every turn is more."""


# The daemon


def at_once(daemon: Daemon, dice: random.Random) -> None:
    time.sleep(dice.uniform(0, 0.3))  # anywhere in the imports, the locks and the first sockets


def bound(daemon: Daemon, dice: random.Random) -> None:
    wait_until(lambda: daemon.control_path.exists() or ended(daemon), "the control socket")


def loading(daemon: Daemon, dice: random.Random) -> None:
    def is_loading() -> bool:
        with suppress(ConnectError):
            return query_status(daemon.endpoint, timeout=0).state in (State.LOADING, State.READY)
        return ended(daemon)

    wait_until(is_loading, "loading")
    time.sleep(dice.uniform(0, 0.2))


def adopting(daemon: Daemon, dice: random.Random) -> None:
    """In the look at what is there, or where nothing is there in the load's first steps."""
    wait_until(lambda: daemon.handover_path.exists() or ended(daemon), "the descriptor socket")
    time.sleep(dice.uniform(0, 0.1))


def sealed(daemon: Daemon, dice: random.Random) -> None:
    """Between the first seal and the manifest, or just after it."""
    marks = ("loaded ", "took over", "ready:")
    wait_until(lambda: any(mark in daemon.log for mark in marks) or ended(daemon), "the end of the load")


def handing_over(daemon: Daemon, dice: random.Random) -> None:
    """A rank has its ticket, and perhaps half of its descriptors."""
    daemon.wait_for()
    with suppress(EngramError):
        with HandoverConnection.open(str(daemon.handover_path), 5) as connection:
            with ControlConnection(daemon.endpoint, connection) as asking:
                request = Attach(rank=0, world_size=1, device="cpu", name="half")
                attached = next(asking.request(request, 5, "attaching"))
                assert isinstance(attached, Attached)
                os.kill(daemon.pid, signal.SIGSTOP)
                with suppress(EngramError):
                    connection.redeem(attached.ticket, 0.05)


def draining(daemon: Daemon, dice: random.Random) -> None:
    daemon.wait_for()
    daemon.process.send_signal(signal.SIGTERM)
    time.sleep(dice.uniform(0, 0.05))


MOMENTS: tuple[Callable[[Daemon, random.Random], None], ...] = (
    at_once,
    bound,
    adopting,
    loading,
    sealed,
    handing_over,
    draining,
)


def ended(daemon: Daemon) -> bool:
    return daemon.process.poll() is not None


@pytest.mark.timeout(pick(240, 3600))
@pytest.mark.parametrize("way", ["posix_shm", "fd_store"])
def test_a_daemon_killed_at_any_moment_leaves_readers_right_and_its_successor_whole(
    way: str, folder: Path, checkpoint: Path
) -> None:
    """Half of the time there is nothing to adopt, so that loads are cut too."""
    dice = random.Random(SEED)
    moments = [MOMENTS[turn % len(MOMENTS)] for turn in range(DAEMON_KILLS)]  # each of them, in any order
    dice.shuffle(moments)
    with node_of(way, folder, checkpoint) as node:
        first, _ = node.start()
        with (
            connect(first.endpoint, rank=0, world_size=1, name="reader") as reader,
            rank("lookup", first, checkpoint) as reading,
        ):
            first.kill_alone()
            node.check_rows(reader)  # opens what is opened once
            descriptors = psutil.Process().num_fds()
            for moment in moments:
                if dice.random() < 0.5:
                    forget(node)
                daemon = node.begin()
                moment(daemon, dice)
                children = children_of(daemon)
                daemon.kill_alone()
                node.check_rows(reader)
                wait_until(lambda: not any(map(runs, children)), f"the children's end after {moment.__name__}")  # noqa: B023
            last, _ = node.start()
            with connect(last.endpoint, rank=0, world_size=1) as late:
                node.check_rows(late)
            names = lambda: sorted(lease.name for lease in last.status().leases)  # noqa: E731
            wait_until(lambda: names() == ["rank_loop.py", "reader"], "the readers' new leases, and no other")
            assert reading.poll() is None, "it compares its rows all the time, and ends where one is wrong"
            assert last.stop() == 0
            wait_until(lambda: psutil.Process().num_fds() <= descriptors, "as many descriptors as before")
        assert_no_more_is_left_than_one_daemon_leaves(node, last)


def assert_no_more_is_left_than_one_daemon_leaves(node: Node, last: Daemon) -> None:
    """Its tables, once, and their manifest; no socket. That a purge frees these too is checked wherever a node ends."""
    if node.manager is not None:
        assert sorted(node.manager.names) == ["engram-manifest", "engram-segment-L1", "engram-segment-L14"]
        assert last.names_left() == []
    else:
        assert sorted(last.names_left()) == sorted(map(str, (*node.named, node.manifest)))
        assert len(node.named) == 2
    tag = endpoint_tag(last.endpoint)
    others = [name for name in os.listdir("/dev/shm") if tag in name and Path("/dev/shm", name) not in node.named]
    assert not others, "a semaphore, or a segment under another name"


def forget(node: Node) -> None:
    if node.manager is not None:
        for _, fd in node.manager.store:
            os.close(fd)
        node.manager.store = []
    assert control(node.daemons[0], "purge").returncode == 0


def children_of(daemon: Daemon) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(daemon.pid).children(recursive=True)
    return []


def runs(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


# Ranks


@contextmanager
def rank(mode: str, daemon: Daemon, checkpoint: Path, seconds: float = 0) -> Iterator[subprocess.Popen[str]]:
    """A rank process that has said "go"."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.rank_loop", mode, daemon.endpoint, str(checkpoint), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.timeout(pick(180, 3600))
@pytest.mark.parametrize("mode", ["attach", "lookup"])
def test_ranks_killed_in_the_middle_leave_the_daemon_as_it_was(mode: str, per_node: Daemon, checkpoint: Path) -> None:
    dice = random.Random(SEED)
    process = psutil.Process(per_node.pid)
    with rank(mode, per_node, checkpoint):
        pass  # what a first client makes the daemon import
    wait_until(lambda: not per_node.status().leases, "the first lease's end")
    descriptors, memory = process.num_fds(), process.memory_info().rss
    # Importing torch takes seconds: in the short form three of those have to do.
    for _ in range(RANK_KILLS if mode == "attach" or LONG else 3):
        with rank(mode, per_node, checkpoint) as victim:
            time.sleep(dice.uniform(0, 0.05))
            assert victim.poll() is None
            victim.kill()
    wait_until(lambda: not per_node.status().leases, "the leases' end")
    wait_until(lambda: process.num_fds() <= descriptors, "as many descriptors as before")
    assert process.memory_info().rss - memory < GROWTH_LIMIT_BYTES


def test_a_stopped_rank_is_seen_holds_nobody_up_can_be_evicted_and_reads_on(per_node: Daemon, checkpoint: Path) -> None:
    with rank("lookup", per_node, checkpoint) as hung:
        os.kill(hung.pid, signal.SIGSTOP)
        wait_until(lambda: per_node.status().leases[0].last_seen_s > 2.5 * BEAT_INTERVAL_S, "a silence")
        lease = per_node.status().leases[0]
        assert lease.pid == hung.pid
        with connect(per_node.endpoint, rank=0, world_size=1, name="other") as other:
            assert other.server_alive
            shown = control(per_node, "status")
            assert "hangs" in shown.stdout
            ask_owner(per_node.endpoint, lambda permit: Evict(permit=permit, lease=lease.id))
            assert [each.name for each in per_node.status().leases] == ["other"]
        os.kill(hung.pid, signal.SIGCONT)
        time.sleep(0.5)
        assert hung.poll() is None, "it compares its rows, and ends where one is wrong"


STOPS_WITH_A_TICKET = """
import os, signal, sys
from engram_client import client
expect = client.Nodes.expect
def stopping(*arguments):
    client.Nodes.expect = expect
    os.kill(os.getpid(), signal.SIGSTOP)
    return expect(*arguments)
client.Nodes.expect = stopping
with client.connect(sys.argv[1], rank=0, world_size=1, timeout=float(sys.argv[2])) as attached:
    print(attached.server_alive)
"""


@pytest.mark.parametrize("timeout", [60, 1])
def test_a_rank_that_is_stopped_for_longer_than_its_ticket_lives_asks_again_while_it_has_time(
    timeout: int, per_node: Daemon
) -> None:
    command = [sys.executable, "-c", STOPS_WITH_A_TICKET, per_node.endpoint, str(timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stopped:
        try:
            process = psutil.Process(stopped.pid)
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "the stop")
            until = time.monotonic() + TICKET_LIFETIME_S
            wait_until(lambda: time.monotonic() > until, "the ticket's end")
            os.kill(stopped.pid, signal.SIGCONT)
            out, err = stopped.communicate(timeout=60)
        finally:
            stopped.kill()
    if timeout > TICKET_LIFETIME_S:
        assert (out, err) == ("True\n", "")
    else:
        assert "TicketInvalid" in err
    wait_until(lambda: not per_node.status().leases, "the leases' end")


@pytest.mark.timeout(CHURN_S + pick(240, 1200))  # the clients' imports of torch come on top
def test_clients_come_and_go_beside_a_daemon_that_restarts(folder: Path, checkpoint: Path) -> None:
    dice = random.Random(SEED)
    with node_of("posix_shm", folder, checkpoint) as node:
        daemon, _ = node.start()
        clients = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.support.rank_loop",
                    "churn",
                    daemon.endpoint,
                    str(checkpoint),
                    str(CHURN_S),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(CHURN_CLIENTS)
        ]
        try:
            restarts = 0
            while any(client.poll() is None for client in clients):
                pause = time.monotonic() + dice.uniform(0.5, 3)
                wait_until(
                    lambda: time.monotonic() > pause or all(c.poll() is not None for c in clients),  # noqa: B023
                    "the next restart",
                )
                (daemon.kill if dice.random() < 0.5 else daemon.stop)()
                daemon, status = node.start()
                assert status.adopted
                restarts += 1
            counted = [json.loads(client.communicate()[0].splitlines()[-1]) for client in clients]
        finally:
            for client in clients:
                client.kill()
                client.wait()
                if client.stdout is not None:
                    client.stdout.close()
        assert [client.returncode for client in clients] == [0] * CHURN_CLIENTS
        assert restarts > 0
        assert min(each["attached"] for each in counted) > 0
        assert sum(each["wrong"] for each in counted) == 0
        assert max(each["descriptors"] for each in counted) <= 0
        assert max(each["grown_bytes"] for each in counted) < GROWTH_LIMIT_BYTES
        wait_until(lambda: not daemon.status().leases, "the leases' end")
