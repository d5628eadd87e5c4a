"""What can go wrong between a rank and the daemon: each its own error, none a hang, nothing leaked."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from engram_client import connect
from engram_client.control import ControlConnection, query_status
from engram_client.errors import (
    ClientClosed,
    ConnectTimeout,
    DeviceUnsupported,
    ForkedClient,
    IdentityMismatch,
    NoServer,
    ProtocolMismatch,
    RankInvalid,
    ServerDraining,
    ServerRefused,
    TpSizeMismatch,
    TransferCut,
    UnknownLayer,
)
from engram_client.handover import HandoverConnection
from engram_client.identity import TableIdentity
from engram_client.protocol import Attach, Greeting, encode
from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon, running, wait_until
from tests.support.reference import CheckpointReference


def test_with_no_socket_connect_waits_for_its_time_and_names_the_path(folder: Path) -> None:
    started = time.monotonic()
    with pytest.raises(NoServer) as caught:
        connect(f"ipc://{folder}/control.sock", rank=0, world_size=1, timeout=0.2)
    assert time.monotonic() - started >= 0.15
    assert str(folder) in caught.value.path


def test_a_client_that_comes_before_the_daemon_gets_its_tables(folder: Path, checkpoint: Path) -> None:
    endpoint = f"ipc://{folder}/run/control.sock"
    result: list[tuple[int, ...]] = []

    def attach() -> None:
        with connect(endpoint, rank=0, world_size=1, timeout=60) as client:
            result.append(client.layers)

    early = threading.Thread(target=attach)
    early.start()
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config):
        early.join(60)
    assert result == [(1, 14)]


def test_a_rank_that_meets_a_daemon_being_replaced_attaches_to_the_next_one(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    epochs: list[str] = []
    with running(folder, config) as first, HandoverConnection.open(str(first.handover_path), 10) as waiting:
        with ControlConnection(first.endpoint, waiting) as asking:
            # A ticket that nobody redeems holds the drain up for seconds.
            next(asking.request(Attach(rank=0, world_size=1, device="cpu", name="slow"), 10, "attaching"))
        first.process.send_signal(signal.SIGTERM)
        wait_until(lambda: first.status().state == "draining", "draining")
        with pytest.raises(ServerDraining):
            connect(first.endpoint, rank=0, world_size=1, timeout=0)
        draining = first.status().epoch

        def attach() -> None:
            with connect(first.endpoint, rank=0, world_size=1, timeout=60) as client:
                epochs.append(query_status(first.endpoint).epoch)
                assert client.server_alive

        rank = threading.Thread(target=attach)
        rank.start()
        assert first.wait_for_exit() == 0
        with running(folder, config) as second:
            rank.join(60)
            assert epochs == [second.status().epoch]
    assert draining not in epochs


def test_a_socket_that_nobody_serves_is_refused_not_believed(folder: Path, checkpoint: Path) -> None:
    """SIGKILL leaves the socket files: a client must not think that the daemon is ready."""
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config) as daemon:
        daemon.kill()
        assert stat.S_ISSOCK(daemon.handover_path.stat().st_mode)
        with pytest.raises(ServerRefused):
            connect(daemon.endpoint, rank=0, world_size=1, timeout=0)
    with running(folder, config) as successor, connect(successor.endpoint, rank=0, world_size=1) as client:
        assert client.server_alive


def test_another_tables_identity_is_refused_by_name(folder: Path, checkpoint: Path) -> None:
    """Two checkpoints of equal shape and different bytes: a client that wants one never reads the other."""
    other = folder / "other"
    make_checkpoint(other, engram_vocab_size=1500, seed=12, every_code=True)
    identities = []
    for name, model in (("a", checkpoint), ("b", other)):
        config = {"model_path": str(model), "engram_config": {"placement": "cpu", "replication": "per_node"}}
        with running(folder / name, config) as daemon:
            with connect(daemon.endpoint, rank=0, world_size=1) as client:
                identities.append({layer: client.table(layer).identity for layer in client.layers})
            mine = identities[-1]
            with connect(daemon.endpoint, rank=0, world_size=1, identity=mine, timeout=5) as client:
                assert client.table(1).identity == mine[1]
            roots = {layer: str(identity.root) for layer, identity in mine.items()}
            connect(daemon.endpoint, rank=0, world_size=1, identity=roots, timeout=5).close()
            if name == "b":
                with pytest.raises(IdentityMismatch) as caught:
                    connect(daemon.endpoint, rank=0, world_size=1, identity=identities[0], timeout=5)
                assert caught.value.differing == ["root"]
                smaller = TableIdentity(layer_id=1, rows=5, columns=(5,), root=None)
                with pytest.raises(IdentityMismatch) as caught:
                    connect(daemon.endpoint, rank=0, world_size=1, identity={1: smaller}, timeout=5)
                assert caught.value.differing == ["rows", "columns", "root"]
    assert identities[0][1].root != identities[1][1].root


def test_the_identity_does_not_depend_on_split_or_backing(folder: Path, checkpoint: Path) -> None:
    roots = set()
    for number, (engram, host) in enumerate(
        (
            ({"placement": "cpu", "replication": "per_node"}, {"backing": "memfd"}),
            ({"placement": "cpu"}, {"backing": "posix_shm", "keep": "off"}),
        )
    ):
        config = {"model_path": str(checkpoint), "tp_size": 5, "engram_config": engram, "host": host}
        with running(folder / str(number), config) as daemon:
            roots.add(tuple(table.identity.root for table in daemon.status().tables))
    assert len(roots) == 1
    assert None not in roots.pop()


@contextlib.contextmanager
def impostor(folder: Path, behave: Callable[[socket.socket], None]):  # type: ignore[no-untyped-def]
    """Something else behind the descriptor socket."""
    path = folder / "control.sock.handover"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                behave(accepted)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"ipc://{folder}/control.sock"
        thread.join(30)


def test_another_protocol_version_is_named_with_both_versions(folder: Path) -> None:
    frame = encode(Greeting(epoch="e")).replace(b"\xa1v\x01", b"\xa1v\x63")
    with impostor(folder, lambda peer: peer.send(frame) and None) as endpoint:
        with pytest.raises(ProtocolMismatch) as caught:
            connect(endpoint, rank=0, world_size=1, timeout=5)
    assert (caught.value.client, caught.value.server) == (1, 99)


def test_a_transfer_cut_in_the_middle_is_an_error_of_its_own(folder: Path) -> None:
    with impostor(folder, lambda peer: None) as endpoint, pytest.raises(TransferCut):
        connect(endpoint, rank=0, world_size=1, timeout=5)


def test_a_daemon_that_says_nothing_is_a_time_out(folder: Path) -> None:
    done = threading.Event()
    with impostor(folder, lambda peer: done.wait(30) and None) as endpoint:
        with pytest.raises(ConnectTimeout):
            connect(endpoint, rank=0, world_size=1, timeout=0.2)
        done.set()


def test_an_unlisted_user_is_denied(folder: Path, checkpoint: Path) -> None:
    """Even where the socket's mode lets everybody in, the peer's uid decides."""
    config = {
        "model_path": str(checkpoint),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "control": {"mode": "0666", "uids": [0]},
    }
    folder.chmod(0o755)
    with running(folder, config) as daemon:
        (folder / "run").chmod(0o755)
        program = (
            "import os, sys\n"
            "import engram_client, engram_client.errors as errors\n"
            "os.setgid(65534); os.setuid(65534)\n"
            "try: engram_client.connect(sys.argv[1], rank=0, world_size=1, timeout=5)\n"
            "except errors.AccessDenied as error: sys.exit(error.uid == 65534)\n"
        )
        ended = subprocess.run([sys.executable, "-c", program, daemon.endpoint], timeout=60)
        assert ended.returncode == 1
        (folder / "run").chmod(0o700)
        ended = subprocess.run([sys.executable, "-c", program, daemon.endpoint], timeout=60)
        assert ended.returncode == 1


def test_the_sockets_and_their_folder_are_closed_to_others(per_node: Daemon) -> None:
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (per_node.folder / "run").iterdir()}
    assert modes == {"control.sock": 0o600, "control.sock.handover": 0o600, "control.sock.lock": 0o600}
    assert stat.S_IMODE((per_node.folder / "run").stat().st_mode) == 0o700


def test_a_wrong_rank_or_layer_or_device_is_named(per_node: Daemon) -> None:
    with pytest.raises(RankInvalid):
        connect(per_node.endpoint, rank=2, world_size=2)
    with pytest.raises(UnknownLayer) as caught:
        connect(per_node.endpoint, rank=0, world_size=1, layers=[1, 7], timeout=5)
    assert (caught.value.layer_id, caught.value.served) == (7, [1, 14])
    with pytest.raises(DeviceUnsupported):
        connect(per_node.endpoint, rank=0, world_size=1, device="gpu")
    with connect(per_node.endpoint, rank=0, world_size=1, layers=[14]) as client:
        assert client.layers == (14,)
        with pytest.raises(UnknownLayer):
            client.table(1)


def test_a_world_size_that_contradicts_the_shards_is_refused_with_both_numbers(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "tp_size": 4, "engram_config": {"placement": "cpu"}}
    with running(folder, config) as daemon:
        with pytest.raises(TpSizeMismatch) as caught:
            connect(daemon.endpoint, rank=0, world_size=2, timeout=5)
        assert (caught.value.client, caught.value.server) == (2, 4)


def test_the_old_rows_are_served_on_when_the_files_are_truncated_or_overwritten(folder: Path, checkpoint: Path) -> None:
    import shutil

    import torch

    model = folder / "model"
    shutil.copytree(checkpoint, model)
    reference = CheckpointReference(checkpoint)
    config = {"model_path": str(model), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config) as daemon:
        shards = sorted(model.glob("*.safetensors"))
        os.truncate(shards[-1], 100)
        shards[-2].write_bytes(b"\xaa" * shards[-2].stat().st_size)
        with connect(daemon.endpoint, rank=0, world_size=1) as client:
            for layer in client.layers:
                ids = np.arange(0, client.table(layer).rows, 97)
                rows = client.table(layer).lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
                np.testing.assert_array_equal(rows, reference.rows(layer, ids).view(np.int16))


def test_lookups_go_on_when_the_daemon_is_killed_and_the_client_knows_at_once(
    per_node: Daemon, reference: CheckpointReference
) -> None:
    import torch

    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        assert client.server_alive
        per_node.kill()
        assert not client.server_alive
        ids = np.arange(500)
        rows = client.table(1).lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
        np.testing.assert_array_equal(rows, reference.rows(1, ids).view(np.int16))


def test_lookups_go_on_after_the_daemon_has_drained(per_node: Daemon, reference: CheckpointReference) -> None:
    import torch

    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        assert per_node.stop() == 0
        ids = np.arange(500)
        rows = client.table(14).lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
        np.testing.assert_array_equal(rows, reference.rows(14, ids).view(np.int16))


def test_a_rank_that_writes_to_a_table_is_stopped_and_the_others_read_on(
    per_node: Daemon, reference: CheckpointReference
) -> None:
    """A bug in one rank cannot change a row for the others."""
    import torch

    program = (
        "import ctypes, sys, engram_client\n"
        "client = engram_client.connect(sys.argv[1], rank=0, world_size=1)\n"
        "address = next(iter(client._mappings.values())).address\n"
        "print('attached', flush=True)\n"
        "ctypes.c_uint8.from_address(address).value = 1\n"
        "print('written', flush=True)\n"
    )
    with connect(per_node.endpoint, rank=0, world_size=1) as client:
        ended = subprocess.run(
            [sys.executable, "-c", program, per_node.endpoint], capture_output=True, text=True, timeout=60
        )
        assert (ended.returncode, ended.stdout) == (-signal.SIGSEGV, "attached\n")
        ids = np.arange(100)
        rows = client.table(1).lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
        np.testing.assert_array_equal(rows, reference.rows(1, ids).view(np.int16))


def test_a_closed_client_says_so_and_closing_twice_is_harmless(per_node: Daemon) -> None:
    import torch

    client = connect(per_node.endpoint, rank=0, world_size=1)
    table = client.table(1)
    assert "rank 0 of 1" in repr(client)
    client.close()
    client.close()
    assert "closed" in repr(client)
    with pytest.raises(ClientClosed):
        client.table(1)
    with pytest.raises(ClientClosed):
        table.lookup(torch.tensor([0]))
    wait_until(lambda: not per_node.status().leases, "the lease's end")


def test_a_forked_child_neither_uses_nor_keeps_the_lease(per_node: Daemon) -> None:
    client = connect(per_node.endpoint, rank=0, world_size=1)
    client.table(1)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if child == 0:
        try:
            client.table(1)
            writer.send("used")
        except ForkedClient as error:
            writer.send(error.owner)
        signal.pause()
        os._exit(0)
    try:
        assert reader.poll(30)
        assert reader.recv() == os.getpid()
        client.close()
        wait_until(lambda: not per_node.status().leases, "the lease's end while the child lives")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_hundred_clients_killed_while_they_attach_leave_nothing(per_node: Daemon) -> None:
    """Descriptors, leases and memory of the daemon stay flat."""
    program = (
        "import os, sys, threading, engram_client\n"
        "threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), 9)).start()\n"
        "while True: engram_client.connect(sys.argv[1], rank=0, world_size=1).close()\n"
    )
    process = psutil.Process(per_node.pid)

    def settled() -> tuple[int, int] | None:
        status = per_node.status()
        return None if status.leases else (process.num_fds(), process.memory_info().rss)

    before = wait_until(settled, "no leases before")
    for batch in range(10):
        killed = [
            subprocess.Popen([sys.executable, "-c", program, per_node.endpoint, str(0.001 * (batch + 3 * n))])
            for n in range(10)
        ]
        for one in killed:
            assert one.wait(60) == -signal.SIGKILL
    after = wait_until(settled, "no leases after")
    wait_until(lambda: process.num_fds() <= before[0] + 2, "descriptors flat")
    assert after[1] <= before[1] + (16 << 20)


def test_status_names_what_is_served_and_by_whom(per_node: Daemon) -> None:
    with connect(per_node.endpoint, rank=1, world_size=3, name="engine"):
        status = query_status(per_node.endpoint)
    assert status.state == "ready"
    assert status.report is not None
    assert status.report.bytes_read == sum(table.geometry.nbytes for table in status.tables)
    assert [lease.name for lease in status.leases] == ["engine"]
    shown = subprocess.run(
        [sys.executable, "-m", "engram_server.ctl", "status", "--config", str(per_node.config_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert "per_node" in shown
    assert status.segments[0].info.backing in shown


def test_the_running_daemon_has_loaded_neither_torch_nor_numpy(per_node: Daemon) -> None:
    maps = Path(f"/proc/{per_node.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "numpy" not in maps
