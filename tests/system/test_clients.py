"""What a rank's process does around its client: threads, forks, odd arguments, scarce descriptors."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_client import connect
from engram_client.client import MappedClient
from engram_client.control import query_status
from engram_client.errors import ClientClosed, IdentityMismatch
from engram_client.handover import HandoverConnection
from tests.support.daemon import Daemon, running, wait_until
from tests.support.reference import CheckpointReference


@pytest.mark.parametrize("timeout", [math.inf, 1e300, 10**10])
def test_a_client_may_wait_for_ever(timeout: float, per_node: Daemon) -> None:
    assert query_status(per_node.endpoint, timeout=timeout).state == "ready"
    with connect(per_node.endpoint, rank=0, world_size=1, timeout=timeout) as client:
        assert client.server_alive


def test_another_tables_identity_under_a_layer_is_refused(per_node: Daemon) -> None:
    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        identities = {layer: client.table(layer).identity for layer in client.layers}
    connect(per_node.endpoint, rank=0, world_size=1, identity=identities).close()
    with pytest.raises(IdentityMismatch) as caught:
        connect(per_node.endpoint, rank=0, world_size=1, identity={1: identities[14]})
    assert caught.value.layer_id == 1
    assert "root" in caught.value.differing


def test_a_demand_for_a_table_that_is_not_asked_for_is_looked_at_too(per_node: Daemon) -> None:
    with pytest.raises(IdentityMismatch) as caught:
        connect(per_node.endpoint, rank=0, world_size=1, layers=[1], identity={14: "0" * 32})
    assert caught.value.layer_id == 14


def test_a_program_may_have_any_name(per_node: Daemon) -> None:
    for name in ("x" * 5000, "\udcff" * 255, "[/bold]\x1b[2J\nforged line"):
        with connect(per_node.endpoint, rank=0, world_size=1, name=name):
            (lease,) = per_node.status().leases
            assert lease.name.isprintable()
            assert len(lease.name) == min(len(name), 64)
            shown = subprocess.run(
                [sys.executable, "-m", "engram_server.ctl", "status", "--endpoint", per_node.endpoint],
                capture_output=True,
                text=True,
                timeout=60,
                env={**os.environ, "COLUMNS": "200"},
            )
            assert (shown.returncode, shown.stderr) == (0, "")
            assert lease.name in shown.stdout
        wait_until(lambda: not per_node.status().leases, "the lease's end")
    assert "\nforged" not in per_node.log


def test_many_threads_share_a_client(per_node: Daemon, reference: CheckpointReference) -> None:
    """One table a layer whoever asks first, right rows for everybody, and no invalid id uncounted."""
    threads, rounds = 8, 25
    start = threading.Barrier(threads)
    with connect(per_node.endpoint, rank=0, world_size=1) as client:

        def work(seed: int) -> int:
            start.wait(30)
            table = client.table(1)
            ids = np.random.default_rng(seed).integers(0, table.rows, 3000)
            ids[7] = table.rows
            for _ in range(rounds):
                rows = table.lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
            np.testing.assert_array_equal(np.delete(rows, 7, 0), reference.rows(1, np.delete(ids, 7)).view(np.int16))
            return id(table)

        with ThreadPoolExecutor(threads) as pool:
            assert set(pool.map(work, range(threads))) == {id(client.table(1))}
        assert client.table(1).invalid_ids == threads * rounds


def test_a_client_closed_under_running_lookups_ends_them_by_name_and_leaves_nothing(per_node: Daemon) -> None:
    for _ in range(20):
        _close_under_a_running_lookup(connect(per_node.endpoint, rank=0, world_size=1))
    wait_until(lambda: not per_node.status().leases, "the leases' end")
    assert "engram-" not in Path("/proc/self/maps").read_text()


def _close_under_a_running_lookup(client: MappedClient) -> None:
    table = client.table(1)
    ids = torch.arange(200_000) % table.rows
    started, ended = threading.Event(), []

    def look() -> None:
        try:
            while True:
                started.set()
                table.lookup(ids)
        except Exception as error:
            ended.append(type(error))

    def closed() -> bool:
        with contextlib.suppress(BufferError):
            client.close()
            return True
        return False

    thread = threading.Thread(target=look)
    thread.start()
    assert started.wait(30)
    wait_until(closed, "the client's end")
    thread.join(30)
    assert ended == [ClientClosed]


def test_a_fork_in_the_middle_of_connecting_does_not_keep_the_connection(per_node: Daemon) -> None:
    connection = HandoverConnection.open(str(per_node.handover_path), 5)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        writer.send(connection.closed)
        signal.pause()
        os._exit(0)
    try:
        assert reader.poll(30)
        assert reader.recv() is True
        assert connection.alive
    finally:
        connection.close()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("limit", [8, 12, 16])
def test_a_rank_without_descriptors_is_told_and_not_aborted(limit: int, per_node: Daemon) -> None:
    program = (
        "import resource, sys, engram_client\n"
        "from engram_client.errors import TooFewDescriptors\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)\n"
        "try: engram_client.connect(sys.argv[1], rank=0, world_size=1, timeout=20)\n"
        "except TooFewDescriptors: print('told')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, per_node.endpoint, str(limit)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "told\n"), ended.stderr


AS_ANOTHER = (
    "import os, sys, engram_client\n"
    "os.setgroups([int(g) for g in sys.argv[2].split(',') if g]); os.setgid(65534); os.setuid(65534)\n"
    "try: print(engram_client.connect(sys.argv[1], rank=0, world_size=1, timeout=5).layers)\n"
    "except engram_client.EngramError as error: print(error.code)\n"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(
    ("control", "groups", "heard"),
    [
        ({"mode": "0666", "uids": [65534]}, "", "(1, 14)"),
        ({"mode": "0666", "uids": [4_000_000_000]}, "", "AccessDenied"),
        ({"mode": "0660", "gids": [54321]}, "54321", "(1, 14)"),
        ({"mode": "0660", "gids": [54321]}, "54322", "AccessDenied"),
        ({"mode": "0660", "gids": [65534]}, "", "(1, 14)"),
    ],
)
def test_listed_users_and_members_of_listed_groups_get_in_and_others_do_not(
    control: dict[str, object], groups: str, heard: str, folder: Path, checkpoint: Path
) -> None:
    """With nothing but the configuration: also the folder that the daemon makes lets them pass."""
    folder.chmod(0o755)
    daemon = Daemon(
        folder,
        {
            "model_path": str(checkpoint),
            "engram_config": {"placement": "cpu", "replication": "per_node"},
            "control": control,
        },
    )
    try:
        wait_until(lambda: "ready" in daemon.log, "the daemon")
        asked = subprocess.run(
            [sys.executable, "-c", AS_ANOTHER, daemon.endpoint, groups], capture_output=True, text=True, timeout=60
        )
        assert asked.stdout.strip() == heard, asked.stderr
    finally:
        assert daemon.stop() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_unlisted_user_cannot_ask_for_tickets_either(folder: Path, checkpoint: Path) -> None:
    """The mode may let everybody connect; the control socket answers only those who may attach."""
    program = (
        "import os, sys, zmq\n"
        "from engram_client.protocol import Status, encode\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "asking = zmq.Context().socket(zmq.DEALER); asking.setsockopt(zmq.LINGER, 0)\n"
        "events = asking.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)\n"
        "asking.connect(sys.argv[1]); asking.send(encode(Status(), 1))\n"
        "print('refused' if zmq.select([asking, events], [], [], 20)[0] == [events] else 'answered or nothing')\n"
    )
    folder.chmod(0o755)
    config = {
        "model_path": str(checkpoint),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "control": {"mode": "0666", "uids": [0, 4_000_000_000]},
    }
    with running(folder, config) as daemon:
        asked = subprocess.run(
            [sys.executable, "-c", program, daemon.endpoint], capture_output=True, text=True, timeout=60
        )
        assert asked.stdout == "refused\n", asked.stderr
        assert daemon.status().state == "ready"
