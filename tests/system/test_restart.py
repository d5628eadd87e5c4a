"""A restarted daemon serves what its predecessor left in memory, if and only if that is what it would load."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engram_client import Client, connect
from engram_client.cuda.access import DRIVER_VARIABLE
from engram_client.endpoint import endpoint_tag
from engram_client.errors import EXIT_ALREADY_RUNNING, EXIT_CHECKPOINT
from engram_client.protocol import CheckState, StatusReply
from engram_server.make_checkpoint import make_checkpoint
from tests.support.call_filter import UNAVAILABLE
from tests.support.daemon import Daemon, wait_until
from tests.support.fake_machinery import calls_in
from tests.support.kept import earliest
from tests.support.reference import CheckpointReference
from tests.support.service_manager import ServiceManager
from tests.system.test_serving import tmpfs

WAYS = ("posix_shm", "file", "fd_store")
UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "engram-server.service"
PER_NODE = {"placement": "cpu", "replication": "per_node"}


class Node:
    """One endpoint, its daemons one after another, and how tables outlive them."""

    def __init__(self, folder: Path, checkpoint: Path, host: dict[str, Any], manager: ServiceManager | None) -> None:
        self.folder = folder
        self.manager = manager
        self.config: dict[str, Any] = {"model_path": str(checkpoint), "engram_config": PER_NODE, "host": host}
        self.environ: dict[str, str] = {}
        self.before: tuple[str, ...] = ()
        """What the daemon's command is put behind."""
        self.daemons: list[Daemon] = []
        self._reference = CheckpointReference(checkpoint)

    def begin(self, **changes: Any) -> Daemon:
        """A daemon, not waited for."""
        config = {**self.config, **changes}
        options: dict[str, Any] = {"environ": self.environ, "wrapper": self.before}
        if self.manager is not None:
            options = {
                "wrapper": (*self.before, *self.manager.wrapper()),
                "environ": self.environ | self.manager.environ(),
                "pass_fds": self.manager.descriptors(),
            }
        daemon = Daemon(self.folder, config, **options)
        self.daemons.append(daemon)
        return daemon

    def start(self, **changes: Any) -> tuple[Daemon, StatusReply]:
        daemon = self.begin(**changes)
        return daemon, daemon.wait_for()

    @property
    def named(self) -> list[Path]:
        """Files of named segments, in order."""
        tag = endpoint_tag(f"ipc://{self.folder}/run/control.sock")
        found = [*Path("/dev/shm").glob(f"engram-{tag}-*"), *self.folder.glob(f"tmpfs/engram-{tag}-*")]
        return sorted(found)

    @property
    def manifest(self) -> Path:
        return self.folder / "run" / "control.sock.manifest"

    def damage(self, layer: int, at: int) -> None:
        """Flips a byte of a segment, as a fault of the memory would."""
        if self.manager is None:
            path = next(path for path in self.named if path.name.endswith(f"-L{layer}"))
            flip(str(path), at)
        else:
            # The seals let nobody write, root included, so the double swaps in a damaged copy, sealed alike.
            self.manager.store = [
                (name, damaged_copy(fd, at) if name == f"engram-segment-L{layer}" else fd)
                for name, fd in self.manager.store
            ]

    def check_rows(self, client: Client, reference: CheckpointReference | None = None) -> None:
        check_rows(client, reference or self._reference)

    def clean_up(self) -> None:
        for daemon in self.daemons:
            daemon.kill()
        if self.daemons:
            done = control(self.daemons[0], "purge")
            assert done.returncode == 0, done.stderr
            assert self.daemons[0].names_left() == []


def check_rows(client: Client, reference: CheckpointReference) -> None:
    for layer in client.layers:
        table = client.table(layer)
        ids = np.random.default_rng().integers(0, table.rows, 200)
        ids[:2] = 0, table.rows - 1
        found = table.lookup(torch.from_numpy(ids)).view(torch.int16).numpy()
        np.testing.assert_array_equal(found, reference.rows(layer, ids).view(np.int16))


def control(daemon: Daemon, *arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`engram-ctl` for this daemon's configuration."""
    return subprocess.run(
        [sys.executable, "-m", "engram_server.ctl", *arguments, "--config", str(daemon.config_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200", **(environ or {})},
    )


def flip(path: str, at: int) -> None:
    mode = os.stat(path).st_mode & 0o777
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    os.chmod(path, mode)


def damaged_copy(fd: int, at: int) -> int:
    import fcntl

    from engram_server.segments.memfd import F_ADD_SEALS, SEALS

    copy = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    size = os.fstat(fd).st_size
    data = bytearray(os.pread(fd, size, 0))
    data[at] ^= 0x10
    os.pwrite(copy, data, 0)
    fcntl.fcntl(copy, F_ADD_SEALS, SEALS)
    reopened = os.open(f"/proc/self/fd/{copy}", os.O_RDONLY)
    os.close(copy)
    os.close(fd)
    return reopened


@contextlib.contextmanager
def node_of(way: str, folder: Path, checkpoint: Path) -> Iterator[Node]:
    with contextlib.ExitStack() as stack:
        host: dict[str, Any] = {"backing": way}
        manager = None
        if way == "file":
            host["path"] = str(stack.enter_context(tmpfs(folder / "tmpfs")))
        elif way == "fd_store":
            host["backing"] = "memfd"
            manager = stack.enter_context(ServiceManager(folder / "manager"))
        node = Node(folder, checkpoint, host, manager)
        try:
            yield node
        finally:
            node.clean_up()


@pytest.fixture(params=WAYS)
def node(request: pytest.FixtureRequest, folder: Path, checkpoint: Path) -> Iterator[Node]:
    with node_of(request.param, folder, checkpoint) as made:
        yield made


@pytest.fixture
def shm_node(folder: Path, checkpoint: Path) -> Iterator[Node]:
    with node_of("posix_shm", folder, checkpoint) as made:
        yield made


@pytest.fixture
def store_node(folder: Path, checkpoint: Path) -> Iterator[Node]:
    with node_of("fd_store", folder, checkpoint) as made:
        yield made


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restarted_daemon_serves_the_memory_of_the_one_before_and_readers_never_notice(end: str, node: Node) -> None:
    first, before = node.start()
    assert not before.adopted
    with connect(first.endpoint, rank=0, world_size=1) as reader:
        getattr(first, end)()
        node.check_rows(reader)
        second, after = node.start()
        assert after.adopted
        assert after.report == before.report
        assert [table.identity for table in after.tables] == [table.identity for table in before.tables]
        assert after.epoch != before.epoch
        node.check_rows(reader)
        with connect(second.endpoint, rank=0, world_size=1, identity={1: before.tables[0].identity}) as late:
            node.check_rows(late)
            node.check_rows(reader)
    assert second.stop() == 0
    third, again = node.start()
    assert again.adopted
    assert third.stop() == 0


def test_adoption_reads_no_byte_of_the_tables_files(shm_node: Node, tmp_path: Path) -> None:
    """The shard files lose their content and nothing else: same size, time and inode, all zeros."""
    model = tmp_path / "model"
    shutil.copytree(shm_node.config["model_path"], model)
    shm_node.config["model_path"] = str(model)
    first, _ = shm_node.start()
    first.kill()
    for path in model.glob("*.safetensors"):
        kept = path.stat()
        path.write_bytes(b"\0" * kept.st_size)
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    second, status = shm_node.start()
    assert status.adopted
    with connect(second.endpoint, rank=0, world_size=1) as client:
        shm_node.check_rows(client)


def test_a_changed_checkpoint_is_loaded_anew_and_old_readers_keep_their_rows(node: Node, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(node.config["model_path"], model)
    node.config["model_path"] = str(model)
    first, before = node.start()
    with connect(first.endpoint, rank=0, world_size=1) as reader:
        first.stop()
        shutil.rmtree(model)
        make_checkpoint(model, engram_vocab_size=1500, seed=12, every_code=True)
        second, after = node.start()
        assert not after.adopted
        assert "has changed" in second.log
        assert after.tables[0].identity.differences(before.tables[0].identity) == ("root",)
        node.check_rows(reader)
        with connect(second.endpoint, rank=0, world_size=1) as late:
            node.check_rows(late, CheckpointReference(model))
            node.check_rows(reader)
    second.stop()
    _, again = node.start()
    assert again.adopted


def test_memory_is_served_on_when_the_checkpoint_is_gone(shm_node: Node, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(shm_node.config["model_path"], model)
    shm_node.config["model_path"] = str(model)
    first, _ = shm_node.start()
    first.kill()
    shutil.rmtree(model)
    second, status = shm_node.start()
    assert status.adopted
    with connect(second.endpoint, rank=0, world_size=1) as client:
        shm_node.check_rows(client)


def test_a_broken_checkpoint_does_not_cost_the_tables_in_memory(store_node: Node, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(store_node.config["model_path"], model)
    first, _ = store_node.start(model_path=str(model))
    first.stop()
    kept = (model / "config.json").read_text()
    times = (model / "config.json").stat()
    (model / "config.json").write_text("{")
    assert store_node.begin(model_path=str(model)).wait_for_exit() == EXIT_CHECKPOINT
    (model / "config.json").write_text(kept)
    os.utime(model / "config.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    _, status = store_node.start(model_path=str(model))
    assert status.adopted


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tp_size": 2}, "tp_size was 1 and is 2"),
        ({"engram_config": {"placement": "cpu"}}, "replication was per_node and is none"),
        ({"load_format": "dummy"}, "load_format was auto and is dummy"),
    ],
)
def test_another_configuration_is_loaded_anew_and_the_difference_named(
    changes: dict[str, Any], named: str, shm_node: Node
) -> None:
    first, _ = shm_node.start()
    first.stop()
    second, status = shm_node.start(**changes)
    assert not status.adopted
    assert named in second.log


def test_moving_to_another_backing_frees_the_memory_of_the_one_before(shm_node: Node) -> None:
    first, _ = shm_node.start()
    first.stop()
    assert len(shm_node.named) == 2
    second, status = shm_node.start(host={"backing": "memfd"})
    assert not status.adopted
    assert "host.backing was posix_shm and is memfd" in second.log
    assert shm_node.named == []
    assert not shm_node.manifest.exists()


def test_one_damaged_table_is_loaded_anew_and_the_other_taken_over(node: Node) -> None:
    first, before = node.start()
    first.stop()
    node.damage(14, 12345)
    second, after = node.start()
    assert not after.adopted
    assert "DigestMismatch" in second.log or "segment L14, rows 0 to" in second.log
    assert after.report is not None
    assert before.report is not None
    assert 0 < after.report.bytes_read < before.report.bytes_read
    assert [table.identity for table in after.tables] == [table.identity for table in before.tables]
    with connect(second.endpoint, rank=0, world_size=1) as client:
        node.check_rows(client)
    second.stop()
    _, again = node.start()
    assert again.adopted


@pytest.mark.parametrize("fault", ["truncated", "removed", "writable", "stranger"])
def test_a_named_segment_that_is_not_whole_is_loaded_anew(fault: str, shm_node: Node) -> None:
    first, _ = shm_node.start()
    first.kill()
    path = shm_node.named[1]
    if fault == "truncated":
        os.chmod(path, 0o600)
        os.truncate(path, 4096)
        os.chmod(path, 0o440)
    elif fault == "removed":
        path.unlink()
    elif fault == "writable":
        os.chmod(path, 0o640)
    else:
        os.chown(path, 12345, -1)
    second, status = shm_node.start()
    assert not status.adopted
    assert "is not taken over" in second.log
    with connect(second.endpoint, rank=0, world_size=1) as client:
        shm_node.check_rows(client)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"version": 2, "everything": "else"}', "ManifestVersionUnknown"),
        ('{"version": 1}', "ManifestInvalid"),
        ("", "ManifestInvalid"),
        ("\0" * 100, "ManifestInvalid"),
        ("[" * 100_000, "ManifestInvalid"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named_and_costs_a_load(text: str, named: str, shm_node: Node) -> None:
    first, _ = shm_node.start()
    first.kill()
    shm_node.manifest.write_text(text)
    second, status = shm_node.start()
    assert not status.adopted
    assert named in second.log
    assert len(shm_node.named) == 2


def test_what_the_first_daemons_left_is_taken_over_by_this_one(shm_node: Node) -> None:
    """An upgrade: the manifest lacks what later daemons write, and its version is the same."""
    first, before = shm_node.start()
    with connect(first.endpoint, rank=0, world_size=1) as reader:
        first.kill()
        shm_node.manifest.write_bytes(earliest(shm_node.manifest.read_bytes()))
        second, status = shm_node.start()
        assert status.adopted
        assert [table.identity for table in status.tables] == [table.identity for table in before.tables]
        wait_until(lambda: [lease.pid for lease in second.status().leases] == [os.getpid()], "the reader's new lease")
        shm_node.check_rows(reader)


def test_a_manifest_that_others_may_write_is_not_believed(shm_node: Node) -> None:
    first, _ = shm_node.start()
    first.kill()
    assert shm_node.manifest.stat().st_mode & 0o777 == 0o600
    shm_node.manifest.chmod(0o666)
    second, status = shm_node.start()
    assert not status.adopted
    assert "ManifestInvalid" in second.log


def test_a_manifest_whose_digests_do_not_cover_the_rows_is_not_believed(shm_node: Node) -> None:
    first, _ = shm_node.start()
    first.kill()
    manifest = json.loads(shm_node.manifest.read_text())
    manifest["result"]["pieces"]["L1"][0]["row_stop"] -= 1
    shm_node.manifest.write_text(json.dumps(manifest))
    second, status = shm_node.start()
    assert not status.adopted
    assert "do not cover" in second.log


def test_the_manifest_in_the_memory_folder_outlives_the_sockets_folder(folder: Path, checkpoint: Path) -> None:
    """A container that is replaced keeps its mounted tmpfs and loses /run."""
    with node_of("file", folder, checkpoint) as node:
        first, _ = node.start()
        first.kill()
        shutil.rmtree(folder / "run")
        _, status = node.start()
        assert status.adopted


def test_keep_off_leaves_nothing_and_purge_frees_what_keep_left(shm_node: Node) -> None:
    first, _ = shm_node.start()
    assert control(first, "purge").returncode == EXIT_ALREADY_RUNNING
    first.stop()
    assert len(shm_node.named) == 2
    done = control(first, "purge")
    assert done.returncode == 0
    assert done.stdout.count("removed ") == 2
    assert first.names_left() == []
    host = {**shm_node.config["host"], "keep": "off"}
    second, status = shm_node.start(host=host)
    assert "host.keep" in status.outlook
    second.stop()
    assert second.names_left() == []


def test_without_a_way_to_keep_the_daemon_says_what_a_restart_costs(per_node: Daemon) -> None:
    assert "loads the tables again" in per_node.status().outlook
    assert "FileDescriptorStoreMax=3" in per_node.log


# The service manager's side


def test_the_manager_hears_readiness_and_stores_every_segment_and_the_manifest(store_node: Node) -> None:
    assert store_node.manager is not None
    daemon, _ = store_node.start()
    wait_until(lambda: store_node.manager.said("READY=1"), "READY=1")  # type: ignore[union-attr]
    assert sorted(store_node.manager.names) == ["engram-manifest", "engram-segment-L1", "engram-segment-L14"]
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in store_node.manager.lines)
    daemon.stop()
    wait_until(lambda: store_node.manager.said("STOPPING=1"), "STOPPING=1")  # type: ignore[union-attr]
    assert len(store_node.manager.names) == 3


def test_a_store_that_is_too_small_is_named_and_left_alone(folder: Path, checkpoint: Path) -> None:
    with ServiceManager(folder / "manager", store_max=2) as manager:
        node = Node(folder, checkpoint, {"backing": "memfd"}, manager)
        try:
            _, status = node.start()
            assert "stores 2 descriptors and 3 are needed" in status.outlook
            assert manager.names == []
        finally:
            node.clean_up()


def test_segments_that_come_back_without_their_manifest_are_dropped_from_the_store(store_node: Node) -> None:
    """As after a kill between the first descriptor and the manifest."""
    manager = store_node.manager
    assert manager is not None
    first, _ = store_node.start()
    first.kill()
    os.close(next(fd for name, fd in manager.store if name == "engram-manifest"))
    manager.store = [entry for entry in manager.store if entry[0] != "engram-manifest"]
    _, status = store_node.start()
    assert not status.adopted
    assert sorted(manager.names) == ["engram-manifest", "engram-segment-L1", "engram-segment-L14"]


def test_variables_meant_for_another_process_are_passed_over(folder: Path, checkpoint: Path) -> None:
    node = Node(folder, checkpoint, {"backing": "memfd"}, None)
    try:
        daemon = Daemon(folder, node.config, environ={"LISTEN_FDS": "2", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a:b"})
        node.daemons.append(daemon)
        assert not daemon.wait_for().adopted
    finally:
        node.clean_up()


def test_a_manager_that_is_gone_costs_nothing_but_its_news(folder: Path, checkpoint: Path) -> None:
    node = Node(folder, checkpoint, {"backing": "memfd"}, None)
    try:
        daemon = Daemon(folder, node.config, environ={"NOTIFY_SOCKET": str(folder / "nobody")})
        node.daemons.append(daemon)
        status = daemon.wait_for()
        assert "did not take them" in status.outlook
        assert "does not hear us" in daemon.log
    finally:
        node.clean_up()


def test_the_double_that_the_guide_names_brings_a_killed_daemon_back_with_its_tables(
    folder: Path, checkpoint: Path
) -> None:
    node = Node(folder, checkpoint, {"backing": "memfd"}, None)
    try:
        double = (sys.executable, "-m", "tests.support.service_manager", "run", "--")
        daemon = Daemon(folder, node.config, wrapper=double)
        node.daemons.append(daemon)
        first = daemon.wait_for()
        with connect(daemon.endpoint, rank=0, world_size=1) as reader:
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: not reader.server_alive, "the end of the daemon")
            wait_until(lambda: reader.server_alive, "the next one")
            second = daemon.status()
            assert (second.adopted, second.pid != first.pid) == (True, True)
            node.check_rows(reader)
        assert daemon.stop() == 0
        assert "started again; kept: engram-segment-L1" in daemon.log
    finally:
        node.clean_up()


@pytest.mark.parametrize("host", [{"backing": "posix_shm"}, {"numa": "interleave"}], ids=str)
def test_under_the_units_system_call_filter_the_daemon_loads_is_killed_adopts_and_checks(
    host: dict[str, str], folder: Path, checkpoint: Path
) -> None:
    """With systemd's own lists of calls and a real filter: what the unit forgets ends the daemon at its first use."""
    filtered = (sys.executable, "-m", "tests.support.call_filter", str(UNIT), "--")
    probe = subprocess.run([*filtered, "true"], check=False)
    if probe.returncode == UNAVAILABLE:
        pytest.skip("no systemd-analyze or no libseccomp here")
    assert probe.returncode == 0
    with ServiceManager(folder / "manager") as manager:
        node = Node(folder, checkpoint, host, manager)
        node.config["metrics"] = {"listen": "127.0.0.1:0"}
        node.before = filtered
        try:
            first, _ = node.start()
            assert control(first, "verify").returncode == 0, first.log
            first.kill()
            second, status = node.start()
            assert status.adopted
            wait_until(lambda: (c := second.status().check) and c.state is not CheckState.RUNNING, "the check's end")
            check = second.status().check
            assert check is not None
            assert check.state is CheckState.PASSED, check
            with connect(second.endpoint, rank=0, world_size=1) as client:
                node.check_rows(client)
            assert control(second, "drain").returncode == 0
        finally:
            node.clean_up()


# Memory of the CUDA driver, on a fake that keeps exported memory as a driver does


@pytest.mark.parametrize("engram", [{"placement": "gpu"}, {"placement": "cpu", "replication": "per_node"}], ids=str)
def test_memory_of_the_cuda_driver_is_adopted_by_its_descriptors(
    engram: dict[str, str], folder: Path, checkpoint: Path
) -> None:
    machine = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver", "ENGRAM_FAKE_CUDA": json.dumps({"gpus": 2})}
    with ServiceManager(folder / "manager") as manager:
        node = Node(folder, checkpoint, {}, manager)
        node.config["engram_config"] = engram
        node.environ = machine
        try:
            first, before = node.start()
            backings = {segment.info.backing for segment in before.segments}
            assert backings == {"cuda_device" if engram["placement"] == "gpu" else "cuda_host"}
            first.kill()
            second, after = node.start()
            assert after.adopted
            assert [t.identity for t in after.tables] == [t.identity for t in before.tables]
            done = control(second, "verify", environ=machine)
            assert done.returncode == 0, done.stdout + second.log
        finally:
            node.clean_up()


@pytest.mark.parametrize("devices", [None, [1, 0]], ids=["as-before", "others"])
def test_a_successor_asks_the_gpus_again_only_if_its_configuration_does(
    devices: list[int] | None, folder: Path, checkpoint: Path
) -> None:
    """To try what the driver can do takes a tenth of a second, of the half that a restart may."""
    machine = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver", "ENGRAM_FAKE_CUDA": json.dumps({"gpus": 2})}
    with ServiceManager(folder / "manager") as manager:
        node = Node(folder, checkpoint, {}, manager)
        node.config |= {"engram_config": {"placement": "gpu"}, "load": {"verify": "off"}}
        node.environ = machine
        try:
            first, _ = node.start()
            first.kill()
            calls = folder / "calls"
            node.environ = machine | {"ENGRAM_FAKE_LOG": str(calls)}
            _, status = node.start(**({"devices": devices} if devices else {}))
            assert status.adopted == (devices is None)
            asked = any(event["call"] == "cuMemCreate" for event in calls_in(calls))
            assert asked == (devices is not None)
        finally:
            node.clean_up()


HELD_UNLINK = """
import sys
if "engram_server.cli" in sys.orig_argv:
    import engram_server.keep as keep
    unlink = keep.remove_stale
    def held(*arguments):
        found = unlink(*arguments)
        open({begun!r}, "w").close()
        open({fifo!r}).close()  # until the test opens the other end
        return found
    keep.remove_stale = held
"""


def test_the_control_socket_answers_while_memory_that_nobody_wants_is_freed(folder: Path, checkpoint: Path) -> None:
    """The kernel takes seconds for 94 GiB; here as long as the test wants."""
    begun, fifo = folder / "begun", folder / "fifo"
    os.mkfifo(fifo)
    (folder / "sitecustomize.py").write_text(HELD_UNLINK.format(begun=str(begun), fifo=str(fifo)))
    with node_of("posix_shm", folder, checkpoint) as node:
        first, _ = node.start()
        left = node.named
        assert first.stop() == 0
        assert left
        node.environ = {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
        second = node.begin(engram_config={"placement": "cpu"})
        wait_until(lambda: begun.exists() or second.process.poll() is not None, "the unlinking")
        assert second.status().state == "starting"
        assert second.status().state == "starting"
        fifo.write_text("")
        assert not second.wait_for().adopted
