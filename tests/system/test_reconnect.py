"""An attached client reads on without a daemon, and takes a new lease by itself where the same tables are served."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from engram_client import Client, connect
from engram_client.protocol import LeaseStatus
from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon, running, wait_until
from tests.system.conftest import VOCAB
from tests.system.test_restart import Node, node_of

RENEW_LIMIT_S = 60.0
EXIT_LIMIT_S = 10.0


@pytest.fixture
def node(folder: Path, checkpoint: Path) -> Iterator[Node]:
    with node_of("posix_shm", folder, checkpoint) as made:
        yield made


def lease_of(daemon: Daemon, name: str) -> LeaseStatus:
    """The one lease of that name, once it is there."""

    def found() -> LeaseStatus | None:
        return next((lease for lease in daemon.status().leases if lease.name == name), None)

    return wait_until(found, f"a lease of {name}", RENEW_LIMIT_S)


def alive_again(client: Client) -> None:
    wait_until(lambda: client.server_alive, "a new lease", RENEW_LIMIT_S)


@pytest.mark.parametrize("reloads", [False, True], ids=["adopted", "loaded anew"])
def test_a_new_lease_comes_by_itself_and_rows_are_read_meanwhile(reloads: bool, node: Node) -> None:
    first, _ = node.start()
    with connect(first.endpoint, rank=0, world_size=1, name="engine") as client:
        lease_of(first, "engine")
        first.kill()
        wait_until(lambda: not client.server_alive, "the end of the daemon")
        node.check_rows(client)
        assert not client.stale
        second, status = node.start(**({"host": {"backing": "memfd"}} if reloads else {}))
        assert status.adopted is not reloads
        assert lease_of(second, "engine").layers == (1, 14)
        alive_again(client)
        assert not client.stale
        node.check_rows(client)
    wait_until(lambda: not second.status().leases, "the lease's end")


def test_a_daemon_with_other_tables_leaves_the_client_on_its_own_and_says_so(node: Node, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_checkpoint(model, engram_vocab_size=1500, seed=12, every_code=True)
    first, _ = node.start()
    with connect(first.endpoint, rank=0, world_size=1, name="engine") as client:
        first.stop()
        second, _ = node.start(model_path=str(model))
        wait_until(lambda: client.stale, "the client's word that it is stale", RENEW_LIMIT_S)
        assert not client.server_alive
        assert second.status().leases == ()
        node.check_rows(client)
        second.stop()
        node.start()
        alive_again(client)
        assert not client.stale
        node.check_rows(client)


def test_other_tables_are_told_where_no_node_has_read_a_whole_one(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Identities have no root there: the sample of the rows tells."""
    other, config = tmp_path / "model", {"tp_size": 2, "nnodes": 2, "node_rank": 0, "host": {"backing": "memfd"}}
    make_checkpoint(other, engram_vocab_size=VOCAB, seed=12, every_code=True)
    with contextlib.ExitStack() as stack:

        def start(model: Path) -> Daemon:
            daemon = stack.enter_context(running(folder, {"model_path": str(model), **config}))
            assert {(table.identity.root, table.sample is None) for table in daemon.status().tables} == {(None, False)}
            return daemon

        first = start(checkpoint)
        client = stack.enter_context(connect(first.endpoint, rank=0, world_size=2, name="engine"))
        first.stop()
        second = start(other)
        wait_until(lambda: client.stale, "the client's word that it is stale", RENEW_LIMIT_S)
        assert not client.server_alive
        second.stop()
        start(checkpoint)
        alive_again(client)
        assert not client.stale


def test_closing_while_no_daemon_is_there_is_immediate(per_node: Daemon) -> None:
    client = connect(per_node.endpoint, rank=0, world_size=1)
    per_node.kill()
    wait_until(lambda: not client.server_alive, "the end of the daemon")
    client.close()
    client.close()
    assert not client.server_alive
    wait_until(lambda: not lease_threads(), "the thread's end")


def table_mappings() -> list[str]:
    """Of this process, those that other tests may have left to the garbage collector included."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "engram-" in line]


def test_a_client_that_is_dropped_without_close_gives_its_lease_and_its_memory_up(per_node: Daemon) -> None:
    gc.collect()
    before = table_mappings()
    client = connect(per_node.endpoint, rank=0, world_size=1)
    assert len(per_node.status().leases) == 1
    client.table(1).lookup(torch.tensor([0, 1, 2]))
    assert len(table_mappings()) > len(before)
    del client
    gc.collect()
    assert table_mappings() == before
    wait_until(lambda: not per_node.status().leases, "the lease's end")
    wait_until(lambda: not lease_threads(), "the thread's end")


def test_the_thread_takes_no_signal_of_the_host_and_does_not_keep_it_alive(per_node: Daemon) -> None:
    with connect(per_node.endpoint, rank=0, world_size=1):
        (thread,) = lease_threads()
        assert thread.daemon
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(next(line for line in status.splitlines() if line.startswith("SigBlk")).split()[1], 16)
        assert all(blocked >> (number - 1) & 1 for number in (1, 2, 10, 12, 14, 15, 17))


@pytest.mark.parametrize("server", ["alive", "gone"])
def test_a_host_that_just_ends_is_not_held_up(server: str, per_node: Daemon) -> None:
    code = f"""
        import engram_client
        client = engram_client.connect({per_node.endpoint!r}, rank=0, world_size=1)
        print("attached", flush=True)
        input()
    """
    host = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "attached\n"
    if server == "gone":
        per_node.kill()
    host.communicate("\n", timeout=EXIT_LIMIT_S)
    assert host.returncode == 0


@pytest.mark.parametrize("when", ["attached", "knocking"])
def test_a_forked_child_holds_no_lease_and_tries_for_none(when: str, node: Node) -> None:
    first, _ = node.start()
    with connect(first.endpoint, rank=0, world_size=1) as client:
        if when == "knocking":
            first.kill()
            wait_until(lambda: not client.server_alive, "the end of the daemon")
        said, says = os.pipe()
        stop, stops = os.pipe()
        child = os.fork()
        if child == 0:  # nothing of pytest may run here
            os.close(stops)
            held = [name for name in os.listdir("/proc/self/fd") if is_socket_to(name)]
            os.write(says, f"{client.server_alive} {len(held)}\n".encode())
            os.read(stop, 1)
            os._exit(0)
        assert os.read(said, 100) == b"False 0\n"
        daemon = first if when == "attached" else node.start()[0]
        alive_again(client)
        client.close()
        wait_until(lambda: not daemon.status().leases, "the lease's end while the child lives")
        os.close(stops)
        assert os.waitpid(child, 0)[1] == 0
        for fd in (said, says, stop):
            os.close(fd)


def is_socket_to(name: str) -> bool:
    """Whether a descriptor of this process is a connected SEQPACKET socket."""
    try:
        target = os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return False
    inode = target.removeprefix("socket:[").removesuffix("]")
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    return target.startswith("socket:") and any(
        line.split()[6] == inode and line.split()[4] == "0005" for line in lines
    )


def test_waiting_for_a_daemon_costs_no_processor_time(per_node: Daemon) -> None:
    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        per_node.kill()
        wait_until(lambda: not client.server_alive, "the end of the daemon")
        process = psutil.Process()
        (thread,) = lease_threads()

        def used() -> float:
            return sum(t.user_time + t.system_time for t in process.threads() if t.id == thread.native_id)

        before, until = used(), time.monotonic() + 3
        wait_until(lambda: time.monotonic() > until, "three seconds")
        assert used() - before < 1.0


def test_the_lease_survives_many_restarts_with_flat_descriptors_and_threads(node: Node) -> None:
    daemon, _ = node.start()
    with connect(daemon.endpoint, rank=0, world_size=1) as client:
        process = psutil.Process()
        before = process.num_fds(), process.num_threads()
        for _ in range(4):
            daemon.kill()
            wait_until(lambda: not client.server_alive, "the end of the daemon")
            daemon, _ = node.start()
            alive_again(client)
        wait_until(lambda: (process.num_fds(), process.num_threads()) <= before, "as many as before")
        node.check_rows(client)


def test_a_client_of_a_lost_folder_knocks_until_it_is_there_again(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config) as daemon, connect(daemon.endpoint, rank=0, world_size=1) as client:
        daemon.stop()
        shutil.rmtree(folder / "run")
        with running(folder, config):
            alive_again(client)


def lease_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engram-lease"]
