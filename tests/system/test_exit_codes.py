"""What the daemon refuses, it names, with the exit code of its kind and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from engram_client import connect
from engram_client.errors import (
    EXIT_ALREADY_RUNNING,
    EXIT_CHECKPOINT,
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_RESOURCES,
    ConnectTimeout,
    LoadFailed,
    NoServer,
    ServerDraining,
)
from engram_client.protocol import State
from tests.support.daemon import Daemon, running, wait_until

CPU = {"placement": "cpu"}


def run_to_end(folder: Path, config: dict[str, Any], **options: Any) -> tuple[int, str]:
    """Exit code and log of a daemon that ends by itself."""
    daemon = Daemon(folder, config, **options)
    try:
        code = daemon.wait_for_exit()
        if code != EXIT_ALREADY_RUNNING:
            assert daemon.names_left() == []
        return code, daemon.log
    finally:
        daemon.kill()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "ConfigNotJson"),
        ("[]", "ConfigInvalid"),
        ('{"model_path": 3}', "model_path"),
        ('{"model_path": "/m", "modle_path": "/m"}', "modle_path"),
        ('{"model_path": "/m", "host": {"backing": "floppy"}}', "host.backing"),
        ('{"model_path": "/m", "engram_config": {"placement": "cpu", "lookup": "peer_read"}}', "peer_read"),
        ('{"model_path": "/m", "tp_size": 3, "nnodes": 2}', "nnodes"),
        ('{"model_path": "/m", "control": {"endpoint": "tcp://127.0.0.1:1"}}', "SocketPathInvalid"),
        ('{"model_path": "/m", "control": {"endpoint": "ipc:///' + "x" * 120 + '"}}', "SocketPathInvalid"),
        ("{}", "model_path"),
    ],
)
def test_a_bad_configuration_is_named_and_ends_with_2(text: str, named: str, folder: Path) -> None:
    path = folder / "engram.json"
    path.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "engram_server.cli", "--config", str(path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == EXIT_CONFIG
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_missing_configuration_file_is_named_and_ends_with_2(folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "engram_server.cli", "--config", str(folder / "none.json")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, "ConfigUnreadable" in ended.stderr) == (EXIT_CONFIG, True)


def test_the_flag_replaces_the_files_object_as_a_whole(folder: Path, checkpoint: Path) -> None:
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "gpu", "lookup": "peer_read"}}
    override = '{"placement": "cpu", "replication": "per_node"}'
    with running(folder, config, arguments=("--engram-config", override)) as daemon:
        assert daemon.status().options.replication == "per_node"


def test_gpu_placement_without_a_gpu_names_the_way_out(folder: Path, checkpoint: Path) -> None:
    no_driver = {
        "ENGRAM_CUDA_DRIVER": "tests.support.fake_driver:FakeDriver",
        "ENGRAM_FAKE_CUDA": '{"driver": false}',
    }
    code, log = run_to_end(folder, {"model_path": str(checkpoint), "engram_config": {}}, environ=no_driver)
    assert code == EXIT_CONFIG
    assert '{"placement": "cpu"}' in log


def test_a_deprecated_variable_counts_warns_and_prints_its_json(folder: Path, checkpoint: Path) -> None:
    variables = {
        "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1",
        "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT": "shared",
    }
    config = {"model_path": str(checkpoint), "engram_config": None}
    with running(folder, config, environ=variables) as daemon:
        assert daemon.status().options.replication == "per_node"
        assert '{"placement": "cpu", "replication": "per_node"}' in daemon.log


def copy_of(checkpoint: Path, folder: Path) -> Path:
    target = folder / "model"
    shutil.copytree(checkpoint, target)
    return target


def shard_files(model: Path) -> dict[str, Path]:
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    return {name: model / file for name, file in index.items()}


def make_v4(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "text_config": {}}))


def remove_shard(model: Path) -> None:
    shard_files(model)["layers.14.engram.embed.weight"].unlink()


def dangle(model: Path) -> None:
    path = shard_files(model)["layers.14.engram.embed.weight"]
    path.unlink()
    path.symlink_to(model / "blobs" / "missing-target")


def truncate(model: Path) -> None:
    path = shard_files(model)["layers.1.engram.embed.weight"]
    os.truncate(path, path.stat().st_size - 1000)


def miscount(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["engram_num_embeddings"][0] += 1
    (model / "config.json").write_text(json.dumps(config))


def garble_header(model: Path) -> None:
    path = shard_files(model)["layers.1.engram.embed.weight"]
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


def forget_tensor(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["layers.1.engram.embed.scale"]
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (make_v4, "has no Engram layers"),
        (remove_shard, "MissingFile"),
        (dangle, "missing-target"),
        (truncate, "TruncatedFile"),
        (miscount, "RowCountMismatch"),
        (garble_header, "HeaderInvalid"),
        (forget_tensor, "MissingTensor"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_ends_with_4(damage: Any, named: str, folder: Path, checkpoint: Path) -> None:
    model = copy_of(checkpoint, folder)
    damage(model)
    code, log = run_to_end(folder, {"model_path": str(model), "engram_config": CPU})
    assert code == EXIT_CHECKPOINT, log
    assert named in log
    assert "Traceback" not in log


def test_a_second_daemon_on_the_same_socket_ends_with_5_and_harms_nothing(per_node: Daemon) -> None:
    config = json.loads(per_node.config_path.read_text())
    code, log = run_to_end(per_node.folder, config)
    assert code == EXIT_ALREADY_RUNNING
    assert str(per_node.pid) in log
    with connect(per_node.endpoint, rank=0, world_size=1, timeout=5) as client:
        assert client.server_alive


def test_a_socket_path_taken_by_a_file_is_refused_and_the_file_kept(folder: Path, checkpoint: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "control.sock").write_text("precious")
    daemon = Daemon(folder, {"model_path": str(checkpoint), "engram_config": CPU})
    assert (daemon.wait_for_exit(), "SocketUnavailable" in daemon.log) == (EXIT_RESOURCES, True)
    assert (folder / "run" / "control.sock").read_text() == "precious"


# While it loads: a loader that stops itself before its first step, so that the state lasts as long as the test

SLOW = {
    "load_format": "dummy",
    "geometry": {
        "engram_layer_ids": [1],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 2_000,
        "engram_n_heads": 8,
    },
    "engram_config": {"placement": "cpu", "replication": "per_node"},
}
STOPPING = """
import os, signal, sys
if "engram_server.load_child" in sys.orig_argv: os.kill(os.getpid(), signal.SIGSTOP)
"""


def loading(folder: Path) -> tuple[Daemon, psutil.Process]:
    """A daemon in the middle of a load, and its loader, stopped."""
    (folder / "sitecustomize.py").write_text(STOPPING)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    daemon = Daemon(folder, SLOW, environ={"PYTHONPATH": path})

    def child() -> psutil.Process | None:
        children = psutil.Process(daemon.pid).children()
        return children[0] if children and children[0].status() == psutil.STATUS_STOPPED else None

    try:
        loader = wait_until(child, "the loader")
        daemon.wait_for(State.LOADING)
    except BaseException:
        daemon.kill()
        raise
    return daemon, loader


def start_waiting_client(daemon: Daemon, timeout_s: float = 60) -> subprocess.Popen[str]:
    """A rank in a process of its own that waits for the tables and prints what it got."""
    program = (
        "import sys, engram_client\n"
        "def said(progress): print('progress', progress.state, flush=True)\n"
        "timeout = float(sys.argv[2])\n"
        "try: engram_client.connect(sys.argv[1], rank=0, world_size=1, on_progress=said, timeout=timeout)\n"
        "except engram_client.EngramError as error: print(error.code, error.fields, flush=True)\n"
        "else: print('attached', flush=True)\n"
    )
    command = [sys.executable, "-c", program, daemon.endpoint, str(timeout_s)]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "progress loading\n"
    return waiting


def test_a_loader_that_dies_wakes_waiting_clients_and_ends_the_daemon_with_3(folder: Path) -> None:
    """The first that a short machine kills is the loader: everybody hears of it within seconds."""
    daemon, loader = loading(folder)
    try:
        waiting = start_waiting_client(daemon)
        loader.kill()
        assert daemon.wait_for_exit() == EXIT_RESOURCES
        heard, _ = waiting.communicate(timeout=30)
        assert LoadFailed.__name__ in heard
        assert "LoaderDied" in heard
        assert "LoaderDied" in daemon.log
    finally:
        daemon.kill()


def test_sigterm_during_a_load_ends_the_loader_and_exits_0(folder: Path) -> None:
    """Who waits goes on waiting, now for the next daemon, and gets its tables."""
    daemon, loader = loading(folder)
    try:
        waiting = start_waiting_client(daemon)
        assert daemon.stop() == EXIT_OK
        assert not loader.is_running()
        with running(folder, SLOW):
            heard, _ = waiting.communicate(timeout=60)
        assert heard.splitlines()[-1] == "attached"
    finally:
        daemon.kill()


def test_a_rank_that_waits_for_a_daemon_that_drains_and_has_no_successor_says_what_it_lacks(folder: Path) -> None:
    daemon, _ = loading(folder)
    try:
        waiting = start_waiting_client(daemon, timeout_s=3)
        assert daemon.stop() == EXIT_OK
        heard, _ = waiting.communicate(timeout=60)
        assert heard.splitlines()[-1].split()[0] in (
            NoServer.__name__,
            ServerDraining.__name__,
            ConnectTimeout.__name__,
        )
    finally:
        daemon.kill()


def test_a_stop_that_reaches_the_loader_first_is_still_a_stop(folder: Path) -> None:
    """A service manager signals every process of the unit, a terminal every process of the group."""
    daemon, loader = loading(folder)
    try:
        assert os.getpgid(loader.pid) != os.getpgid(daemon.pid)
        daemon.process.send_signal(signal.SIGSTOP)
        loader.kill()
        daemon.process.send_signal(signal.SIGTERM)
        daemon.process.send_signal(signal.SIGCONT)
        assert daemon.wait_for_exit() == EXIT_OK, daemon.log
        assert "Traceback" not in daemon.log
    finally:
        daemon.kill()


def test_clients_that_leave_while_the_daemon_loads_take_no_tickets(folder: Path) -> None:
    daemon, loader = loading(folder)
    try:
        for _ in range(3):
            waiting = start_waiting_client(daemon)
            waiting.kill()
            waiting.communicate()
        loader.resume()
        daemon.wait_for(State.READY)
        assert daemon.stop() == EXIT_OK
        assert "draining: <Leases: 0 tickets, 0 held>" in daemon.log
    finally:
        daemon.kill()


def test_a_client_with_no_timeout_is_refused_at_once_while_the_daemon_loads(folder: Path) -> None:
    from engram_client.errors import NotAllowedNow

    daemon, _ = loading(folder)
    try:
        with pytest.raises(NotAllowedNow) as caught:
            connect(daemon.endpoint, rank=0, world_size=1, timeout=0)
        assert caught.value.state == "loading"
    finally:
        daemon.kill()


def test_status_works_during_a_load_and_changes_nothing(folder: Path) -> None:
    daemon, _ = loading(folder)
    try:
        first, second = daemon.status(), daemon.status()
        assert first.state == second.state == State.LOADING
        assert (first.tables, first.leases) == (second.tables, second.leases) == ((), ())
    finally:
        daemon.kill()


def test_a_killed_daemon_takes_its_loader_with_it(folder: Path) -> None:
    daemon, loader = loading(folder)
    daemon.process.send_signal(signal.SIGKILL)
    daemon.wait_for_exit()
    loader.resume() if loader.is_running() else None
    wait_until(lambda: not loader.is_running() or loader.status() == psutil.STATUS_ZOMBIE, "the loader's end")


# How it was started


def test_closed_standard_streams_do_not_lend_their_numbers_to_the_tables(folder: Path, checkpoint: Path) -> None:
    wrapper = ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(folder, config, wrapper=wrapper) as daemon:
        descriptors = Path(f"/proc/{daemon.pid}/fd")
        assert {os.readlink(descriptors / str(number)) for number in (0, 1, 2)} == {os.devnull}
        with connect(daemon.endpoint, rank=0, world_size=1, timeout=5) as client:
            assert client.layers == (1, 14)


@pytest.mark.parametrize("limit", [16, 24, 100])
def test_too_small_a_limit_of_open_files_is_named(limit: int, folder: Path, checkpoint: Path) -> None:
    daemon = Daemon(
        folder,
        {"model_path": str(checkpoint), "engram_config": CPU},
        wrapper=("sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"),
    )
    assert daemon.wait_for_exit() == EXIT_RESOURCES
    assert "TooFewDescriptors" in daemon.log
    assert "Traceback" not in daemon.log


def test_the_daemon_and_its_loader_need_no_particular_working_folder(folder: Path, checkpoint: Path) -> None:
    """Nor one that can be entered, nor names of letters only."""
    odd = folder / "тест folder"
    (odd / "cwd").mkdir(parents=True)
    path = str(Path(__file__).parents[2])
    wrapper = ("sh", "-c", f'cd "{odd}/cwd" && rmdir "{odd}/cwd" && exec "$@"', "sh")
    config = {"model_path": str(checkpoint), "engram_config": {"placement": "cpu", "replication": "per_node"}}
    with running(odd, config, wrapper=wrapper, environ={"PYTHONPATH": path}) as daemon:
        with connect(daemon.endpoint, rank=0, world_size=1, timeout=5) as client:
            assert client.layers == (1, 14)


def test_a_second_daemon_does_not_take_the_descriptor_socket_of_another_endpoint(
    folder: Path, checkpoint: Path
) -> None:
    shared = str(folder / "shared" / "handover.sock")
    config = {
        "model_path": str(checkpoint),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "control": {"handover": shared},
    }
    with running(folder / "a", config) as first:
        second = Daemon(folder / "b", config)
        assert second.wait_for_exit() == EXIT_ALREADY_RUNNING
        assert shared in second.log
        with connect(first.endpoint, rank=0, world_size=1, timeout=5, handover=shared) as client:
            assert client.server_alive


# What the machine does not have


def test_a_table_larger_than_the_machine_ends_with_3_and_wakes_who_waits(folder: Path) -> None:
    """Refused before a page is taken, with both numbers."""
    geometry = {**SLOW["geometry"], "engram_vocab_size": 1 << 40}
    code, log = run_to_end(folder, {**SLOW, "geometry": geometry})
    assert code == EXIT_RESOURCES
    assert "NotEnoughMemory" in log
    assert "Traceback" not in log


@pytest.mark.parametrize(("mount", "fill"), [("size=1m", ""), ("size=16m", "head -c 8m /dev/zero > /dev/shm/others")])
def test_a_small_or_full_dev_shm_ends_with_3_and_names_the_way_out(mount: str, fill: str, folder: Path) -> None:
    if subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("no mount namespaces here")
    prepare = f"mount -t tmpfs -o {mount} test /dev/shm; {fill or ':'}"
    wrapper = ("unshare", "--mount", "sh", "-ec", f'{prepare}; exec "$@"', "sh")
    code, log = run_to_end(folder, {**SLOW, "host": {"backing": "posix_shm"}}, wrapper=wrapper)
    assert code == EXIT_RESOURCES
    assert "NotEnoughSpace: /dev/shm has" in log
    assert 'host.backing to "memfd"' in log
