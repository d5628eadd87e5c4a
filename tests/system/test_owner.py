"""verify, evict and drain: what they do, and that only the daemon's owner may ask for them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engram_client import connect
from engram_client.control import ControlConnection, ask_owner
from engram_client.errors import (
    EXIT_CHECKPOINT,
    EXIT_OK,
    AccessDenied,
    EngramError,
    NotAllowedNow,
    NotPermitted,
    TableDamaged,
    UnknownLease,
)
from engram_client.handover import HandoverConnection
from engram_client.protocol import Attach, CheckState, Drain, Evict, Request, State, Verify
from tests.support.daemon import Daemon, running, wait_until
from tests.support.service_manager import ServiceManager
from tests.system.test_restart import Node, control, node_of

NOBODY = 65534
WATCHDOG_S = 0.2


@pytest.fixture
def node(folder: Path, checkpoint: Path) -> Iterator[Node]:
    with node_of("posix_shm", folder, checkpoint) as made:
        yield made


def ask(daemon: Daemon, request: Request) -> None:
    with HandoverConnection.open(str(daemon.handover_path), 5) as connection:
        with ControlConnection(daemon.endpoint, connection) as asking:
            next(asking.request(request, 5, "asking"))


@pytest.mark.parametrize("permit", [b"", b"x" * 32, b"x" * 64])
@pytest.mark.parametrize("kind", [Verify, Evict, Drain], ids=lambda kind: kind.__name__)
def test_without_a_permit_nothing_is_done(kind: Any, permit: bytes, per_node: Daemon) -> None:
    arguments = {"lease": 1} if kind is Evict else {}
    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        with pytest.raises(NotPermitted):
            ask(per_node, kind(permit=permit, **arguments))
        assert client.server_alive
    status = per_node.status()
    assert status.state is State.READY
    assert status.check is None


def test_a_permit_is_good_for_one_request(per_node: Daemon) -> None:
    with HandoverConnection.open(str(per_node.handover_path), 5) as connection:
        permit = connection.authorize(5)
    ask(per_node, Verify(permit=permit))
    with pytest.raises(NotPermitted):
        ask(per_node, Verify(permit=permit))


def test_another_user_who_may_attach_is_given_no_permit(folder: Path, checkpoint: Path) -> None:
    config = {
        "model_path": str(checkpoint),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "control": {"mode": "0666", "uids": [0, NOBODY]},
    }
    code = """
        import os, sys
        from engram_client import connect
        from engram_client.control import ask_owner
        from engram_client.errors import NotPermitted
        from engram_client.protocol import Drain
        os.setgid(65534); os.setuid(65534)
        with connect(sys.argv[1], rank=0, world_size=1):
            try:
                ask_owner(sys.argv[1], lambda permit: Drain(permit=permit))
            except NotPermitted:
                print("not permitted")
    """
    with running(folder, config) as daemon:
        for each in (folder, folder / "run"):
            each.chmod(0o755)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), daemon.endpoint], capture_output=True, text=True, check=False
        )
        assert (done.stdout, done.stderr) == ("not permitted\n", "")
        assert daemon.status().state is State.READY


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="becomes another user")
def test_root_looks_and_commands_where_another_user_runs_the_daemon_and_attaches_only_if_it_is_listed(
    folder: Path, checkpoint: Path
) -> None:
    """As an administrator who types `engram-ctl status` into a root shell."""
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    reads = "+dac_override,+dac_read_search"  # Python and the checkpoint may lie where only root may look
    ids = (f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    wrapper = ("setpriv", *ids, f"--inh-caps={reads}", f"--ambient-caps={reads}")
    os.chown(folder, NOBODY, NOBODY)
    with running(folder, config, wrapper=wrapper) as daemon:
        assert daemon.control_path.stat().st_uid == NOBODY
        for command in ("status", "verify", "logs-level"):
            done = control(daemon, command)
            assert (done.returncode, done.stderr) == (EXIT_OK, "")
        with pytest.raises(AccessDenied) as caught:
            connect(daemon.endpoint, rank=0, world_size=1, timeout=5)
        assert caught.value.uid == 0
        assert daemon.status().leases == ()
        assert control(daemon, "drain").returncode == EXIT_OK
        assert daemon.wait_for_exit() == EXIT_OK


def test_verify_reads_everything_and_says_so(per_node: Daemon) -> None:
    shown = control(per_node, "verify", "--show")
    assert (shown.returncode, shown.stdout) == (EXIT_OK, "no check has run since the daemon started\n")
    done = control(per_node, "verify")
    assert done.returncode == EXIT_OK
    status = per_node.status()
    assert status.check is not None
    assert status.check.state is CheckState.PASSED
    assert status.report is not None
    assert status.check.done_bytes == status.check.total_bytes == status.report.bytes_read
    assert control(per_node, "verify", "--show").stdout == done.stdout


def test_every_command_of_the_owner_answers_programs_with_one_json_object(node: Node) -> None:
    daemon, _ = node.start()
    assert answer(daemon, "verify", "--show") == {"check": None}
    check = answer(daemon, "verify")["check"]
    assert (check["state"], check["done_bytes"]) == ("passed", check["total_bytes"])
    with connect(daemon.endpoint, rank=0, world_size=1):
        (lease,) = daemon.status().leases
        assert answer(daemon, "evict", str(lease.id)) == {"lease": lease.id, "ended": True}
    assert answer(daemon, "logs-level")["level"] == "info"
    assert answer(daemon, "drain") == {"ended": True, "free": False}
    assert daemon.wait_for_exit() == EXIT_OK
    removed = answer(daemon, "purge")["removed"]
    assert len(removed) == 2
    assert answer(daemon, "purge") == {"removed": []}


def answer(daemon: Daemon, *arguments: str) -> dict[str, Any]:
    done = control(daemon, *arguments, "--json")
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_a_byte_that_changes_while_serving_is_found_named_and_not_handed_out(node: Node) -> None:
    daemon, _ = node.start()
    with connect(daemon.endpoint, rank=0, world_size=1) as early:
        node.damage(14, 100)
        done = control(daemon, "verify")
        assert done.returncode == EXIT_CHECKPOINT
        assert "segment L14, rows 0 to" in done.stdout
        wait_until(lambda: daemon.status().state == State.DEGRADED, "degraded")
        assert early.server_alive
        with pytest.raises(TableDamaged) as caught:
            connect(daemon.endpoint, rank=0, world_size=1, timeout=5)
        assert (caught.value.layer_id, caught.value.segment) == (14, "L14")
        with connect(daemon.endpoint, rank=0, world_size=1, timeout=5, layers=[1]) as late:
            assert late.layers == (1,)
    daemon.kill()
    second, status = node.start()
    assert not status.adopted
    assert "a check found it damaged" in second.log
    with connect(second.endpoint, rank=0, world_size=1) as client:
        node.check_rows(client)


def test_a_restarted_daemon_checks_everything_in_the_background(node: Node) -> None:
    first, _ = node.start()
    first.kill()
    second, status = node.start()
    assert status.check is not None
    wait_until(lambda: (found := second.status().check) and found.state is CheckState.PASSED, "the check's end")
    checked = second.status().check
    assert checked is not None
    assert status.report is not None
    assert checked.done_bytes == status.report.bytes_read


def test_verify_off_starts_no_check_and_verify_still_can(node: Node) -> None:
    first, _ = node.start()
    first.kill()
    second, status = node.start(load={"verify": "off"})
    assert status.adopted
    assert status.check is None
    assert control(second, "verify").returncode == EXIT_OK


def test_evict_ends_one_lease_for_good_and_its_holder_reads_on(node: Node) -> None:
    daemon, _ = node.start()
    with (
        connect(daemon.endpoint, rank=0, world_size=1, name="hung") as hung,
        connect(daemon.endpoint, rank=0, world_size=1, name="well") as well,
    ):
        (lease,) = (each.id for each in daemon.status().leases if each.name == "hung")
        done = control(daemon, "evict", str(lease))
        assert done.returncode == EXIT_OK, done.stderr
        assert [each.name for each in daemon.status().leases] == ["well"]
        wait_until(lambda: not hung.server_alive, "the end of the lease")
        node.check_rows(hung)
        assert well.server_alive
        with pytest.raises(UnknownLease):
            ask_owner(daemon.endpoint, lambda permit: Evict(permit=permit, lease=lease))
        daemon.stop()
        second, _ = node.start()
        wait_until(lambda: [each.name for each in second.status().leases] == ["well"], "the other's new lease")
        assert not hung.server_alive


@pytest.mark.parametrize("free", [False, True])
def test_drain_ends_the_daemon_and_frees_what_is_kept_only_when_asked_to(free: bool, node: Node) -> None:
    daemon, _ = node.start()
    done = control(daemon, "drain", *(["--free"] if free else []))
    assert done.returncode == EXIT_OK, done.stderr
    assert daemon.wait_for_exit() == EXIT_OK
    assert len(node.named) == (0 if free else 2)
    assert node.manifest.exists() is not free


@pytest.mark.parametrize("seen", [True, False], ids=["here", "from another PID namespace"])
def test_drain_waits_for_the_daemons_end_also_while_tickets_are_open(seen: bool, per_node: Daemon) -> None:
    """A ticket that nobody redeems holds a drain up for seconds, in which whoever asks is told that it drains."""
    with HandoverConnection.open(str(per_node.handover_path), 5) as connection:
        with ControlConnection(per_node.endpoint, connection) as asking:
            next(asking.request(Attach(rank=0, world_size=1, device="cpu", name="late"), 5, "attaching"))
    wrapper = [] if seen else ["unshare", "--pid", "--fork", "--kill-child"]
    command = [*wrapper, sys.executable, "-m", "engram_server.ctl", "drain", "--endpoint", per_node.endpoint]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.stderr.startswith("unshare"):
        pytest.skip(f"no namespaces here: {done.stderr}")
    assert (done.returncode, done.stderr) == (EXIT_OK, "")
    if seen:
        assert per_node.process.poll() == EXIT_OK
    else:
        assert not per_node.handover_path.exists()


def test_drain_with_free_empties_the_service_managers_store(folder: Path, checkpoint: Path) -> None:
    with node_of("fd_store", folder, checkpoint) as node:
        assert node.manager is not None
        daemon, _ = node.start()
        wait_until(lambda: len(node.manager.names) == 3, "the stored descriptors")  # type: ignore[union-attr]
        ask_owner(daemon.endpoint, lambda permit: Drain(permit=permit, free=True))
        assert daemon.wait_for_exit() == EXIT_OK
        wait_until(lambda: node.manager.names == [], "an empty store")  # type: ignore[union-attr]


def test_a_check_is_refused_while_there_is_nothing_to_check(folder: Path) -> None:
    """A load that takes its time: of dummy rows, generated by one thread."""
    keys = {"engram_layer_ids": [1], "engram_max_ngram_size": 4, "engram_vocab_size": 200_000, "engram_n_heads": 8}
    config = {"load_format": "dummy", "geometry": keys, "engram_config": {"placement": "cpu"}, "load": {"threads": 1}}
    daemon = Daemon(folder, config)
    try:
        daemon.wait_for(State.LOADING)
        with pytest.raises(NotAllowedNow):
            ask_owner(daemon.endpoint, lambda permit: Verify(permit=permit))
        ask_owner(daemon.endpoint, lambda permit: Drain(permit=permit))
        assert daemon.wait_for_exit() == EXIT_OK
        assert daemon.names_left() == []
    finally:
        daemon.kill()


def test_status_changes_nothing(per_node: Daemon) -> None:
    def constant(status: Any) -> Any:
        return status.state, status.epoch, status.tables, status.segments, status.leases, status.check, status.outlook

    first = constant(per_node.status())
    descriptors = len(os.listdir(f"/proc/{per_node.pid}/fd"))
    for _ in range(20):
        assert constant(per_node.status()) == first
    wait_until(lambda: len(os.listdir(f"/proc/{per_node.pid}/fd")) <= descriptors, "as many descriptors as before")


def test_the_watchdog_is_fed_while_the_daemon_serves(folder: Path, checkpoint: Path) -> None:
    with ServiceManager(folder / "manager", watchdog_s=WATCHDOG_S) as manager:
        node = Node(folder, checkpoint, {"backing": "memfd"}, manager)
        try:
            daemon, _ = node.start()
            before = manager.count("WATCHDOG=1")
            assert before > 0
            wait_until(lambda: manager.count("WATCHDOG=1") >= before + 5, "five signs of life")
            os.kill(daemon.pid, 19)  # SIGSTOP
            os.kill(daemon.pid, 18)  # SIGCONT
            daemon.stop()
        finally:
            node.clean_up()


def test_errors_of_the_owners_commands_end_with_their_exit_code(per_node: Daemon) -> None:
    done = control(per_node, "evict", "77")
    assert done.returncode == EngramError.exit_code
    assert "UnknownLease" in done.stderr
