"""`engram-ctl doctor` as an operator runs it: on this machine, on small ones, on recorded ones."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engram_client.cuda.access import DRIVER_VARIABLE
from engram_server.make_checkpoint import make_checkpoint
from tests.support.daemon import Daemon
from tests.support.machines import MEMINFO, record

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
CPU_LIMIT_S = 5.0
"""Of a doctor's own processor time: what the promise of five seconds means on a machine that others use too."""
FAKE = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver"}

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and cgroups need root")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tables of 64 MiB together: more than a small /dev/shm or cgroup holds."""
    path = tmp_path_factory.mktemp("large") / "model"
    make_checkpoint(path, engram_vocab_size=6000, seed=5)
    return path


def written(folder: Path, model: Path, **sections: Any) -> Path:
    path = folder / "engram.json"
    raw = {
        "model_path": str(model),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "control": {"endpoint": f"ipc://{folder}/run/control.sock"},
        **sections,
    }
    path.write_text(json.dumps(raw))
    return path


def doctor(
    *arguments: str, wrapper: tuple[str, ...] = (), fake: dict[str, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Exit code and answer. Raises TimeoutExpired long before a hang, and checks the processor time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*wrapper, sys.executable, "-m", "engram_server.ctl", "doctor", "--json", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=os.environ | (FAKE | {"ENGRAM_FAKE_CUDA": json.dumps(fake)} if fake is not None else {}),
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert done.stdout, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_LIMIT_S
    return done.returncode, json.loads(done.stdout)


def finding(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(found for found in answer["findings"] if found["id"] == name)


def test_this_machine_can_hold_a_small_table_and_is_told_how_long_it_takes(folder: Path, checkpoint: Path) -> None:
    code, answer = doctor("--config", str(written(folder, checkpoint)))
    assert code in (0, 1), answer
    assert answer["plan"]["needed_bytes"] < answer["plan"]["available_bytes"]
    assert answer["forecast"]["load_seconds"] > 0
    assert answer["forecast"]["attach_seconds"] > 0
    assert finding(answer, "read_rate")["level"] in ("ok", "warn")
    assert not (folder / "run").exists(), "a doctor makes no sockets"


def test_without_a_configuration_the_machine_itself_is_described() -> None:
    code, answer = doctor()
    assert code in (0, 1)
    assert {"memory", "thp", "dev_shm", "kernel", "gpu", "open_files"} <= {f["id"] for f in answer["findings"]}
    assert answer["plan"] is None


def test_a_table_for_people_names_every_check(folder: Path, checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "engram_server.ctl", "doctor", "--config", str(written(folder, checkpoint))],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    for name in ("checkpoint", "memory", "thp", "sockets", "load_time", "It will work"):
        assert name in done.stdout


def test_a_missing_shard_is_named_and_everything_else_still_judged(folder: Path, checkpoint: Path) -> None:
    broken = folder / "model"
    shutil.copytree(checkpoint, broken)
    lost = sorted(broken.glob("*.safetensors"))[-1]
    lost.unlink()
    code, answer = doctor("--config", str(written(folder, broken)))
    assert code == 2
    found = finding(answer, "checkpoint")
    assert (found["level"], found["error"]) == ("fail", "MissingFile")
    assert str(lost) in found["seen"]
    assert found["remedy"]
    assert finding(answer, "memory")


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_no_gpu_is_said_clearly_and_refused_only_where_one_is_asked_for(folder: Path, checkpoint: Path) -> None:
    code, answer = doctor("--config", str(written(folder, checkpoint)))
    assert code in (0, 1)
    assert "no GPU" in finding(answer, "gpu")["seen"]
    wanted = '{"placement": "gpu"}'
    code, answer = doctor("--config", str(written(folder, checkpoint)), "--engram-config", wanted)
    assert code == 2
    found = finding(answer, "gpu")
    assert (found["level"], found["error"]) == ("fail", "NoGpu")
    assert '"placement": "cpu"' in found["remedy"]


@root_only
def test_a_dev_shm_of_64_mib_stops_the_backing_that_needs_it_and_no_other(folder: Path, large: Path) -> None:
    mount = "mount -t tmpfs -o size=64m none /dev/shm"
    wrapper = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$0" "$@"')
    code, answer = doctor("--config", str(written(folder, large, host={"backing": "posix_shm"})), wrapper=wrapper)
    assert code == 2
    found = finding(answer, "space")
    assert (found["level"], found["error"]) == ("fail", "NotEnoughSpace")
    assert str(64 * MIB) in found["seen"]
    assert "memfd" in found["remedy"]
    code, answer = doctor("--config", str(written(folder, large)), wrapper=wrapper)
    assert code in (0, 1)
    assert "64.0 MiB" in finding(answer, "dev_shm")["seen"]


@root_only
def test_what_fills_dev_shm_is_named_where_it_is_short_and_removing_it_is_the_remedy(folder: Path, large: Path) -> None:
    fill = "mkdir /dev/shm/old; head -c 30M /dev/zero > /dev/shm/old/rows; head -c 9M /dev/zero > /dev/shm/other"
    setup = f"mount -t tmpfs -o size=64m none /dev/shm && {{ {fill}; }}"
    wrapper = ("unshare", "--mount", "sh", "-c", f'{setup} && exec "$0" "$@"')
    code, answer = doctor("--config", str(written(folder, large, host={"backing": "posix_shm"})), wrapper=wrapper)
    found = finding(answer, "dev_shm_use")
    assert (code, found["level"]) == (2, "warn")
    assert "'old' 30.0 MiB, 'other' 9.0 MiB" in found["seen"]
    assert "purge" in found["remedy"]
    code, answer = doctor("--config", str(written(folder, large)), wrapper=wrapper)
    assert (code in (0, 1), finding(answer, "dev_shm_use")["level"]) == (True, "ok"), "this backing needs none of it"


def test_a_recorded_machine_shows_its_dev_shm_and_its_imex_channels(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    channels = "dev/nvidia-caps-imex-channels"
    content = {"dev/shm/large": "x" * (3 * MIB), "dev/shm/small": "x" * MIB, "dev/shm/empty": ""}
    devices = {f"{channels}/channel{number}": "" for number in (0, 2, 10)}
    root = recorded(tmp_path, **content, **devices, **{f"{channels}/README": ""})
    config = str(written(folder, checkpoint))
    _, answer = doctor("--config", config, "--root", root)
    assert finding(answer, "dev_shm_use")["seen"] == "largest in /dev/shm: 'large' 3.0 MiB, 'small' 1.0 MiB"
    assert finding(answer, "imex")["seen"] == "IMEX channels channel0, channel2, channel10"
    shutil.rmtree(tmp_path / channels)
    assert "no IMEX channel" in finding(doctor("--config", config, "--root", root)[1], "imex")["seen"]


@pytest.mark.parametrize(
    ("fake", "ats", "unified"),
    [
        ({}, "no: a rank registers", "memory of their own"),
        ({"ats": True, "coherent": True}, "yes: GPUs read host memory", "GPU memory is NUMA node 8, 9 of the host"),
        ({"integrated": True}, "no: a rank registers", "memory is the host's own"),
    ],
)
def test_how_gpus_reach_host_memory_is_told(
    folder: Path, checkpoint: Path, fake: dict[str, Any], ats: str, unified: str
) -> None:
    _, answer = doctor("--config", str(written(folder, checkpoint)), fake=fake)
    assert finding(answer, "gpu_places")["seen"].startswith("node 0: GPU 0, 1")
    assert ats in finding(answer, "ats")["seen"]
    assert unified in finding(answer, "unified_memory")["seen"]
    assert finding(answer, "unified_memory")["level"] == "ok"


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup of 200 MiB: less than the tables and their loader."""
    group = MEMORY_CGROUP / f"engram-doctor-{os.getpid()}"
    if not (MEMORY_CGROUP / "memory.limit_in_bytes").exists():
        pytest.skip("no cgroup v1 memory controller here; a recorded one is judged below")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 * MIB))
    except OSError as error:
        pytest.skip(f"no cgroups to make here: {error}")
    yield group
    group.rmdir()


@root_only
def test_a_cgroup_below_the_table_is_refused_by_its_name(folder: Path, large: Path, limited: Path) -> None:
    wrapper = ("sh", "-c", f'echo $$ > {limited}/cgroup.procs && exec "$0" "$@"')
    code, answer = doctor("--config", str(written(folder, large)), wrapper=wrapper)
    assert code == 2
    found = finding(answer, "memory")
    assert (found["level"], found["error"]) == ("fail", "NotEnoughMemory")
    assert str(limited) in found["seen"]
    assert answer["plan"] is not None, "how much is needed is said all the same"


def recorded(tmp_path: Path, **files: str) -> str:
    common = {
        "proc/meminfo": MEMINFO.replace("80000 kB", "90000000 kB").replace("100000 kB", "100000000 kB"),
        "proc/self/status": "Cpus_allowed_list:\t0-3\nSeccomp:\t0\n",
        "proc/sys/kernel/osrelease": "5.15.0\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }
    record(tmp_path, common | files)
    return str(tmp_path)


def test_a_recorded_cgroup_below_the_table_is_refused(folder: Path, large: Path, tmp_path: Path) -> None:
    root = recorded(
        tmp_path,
        **{
            "proc/self/cgroup": "0::/pod\n",
            "sys/fs/cgroup/cgroup.procs": "",
            "sys/fs/cgroup/pod/memory.max": f"{200 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": "4096\n",
        },
    )
    code, answer = doctor("--config", str(written(folder, large)), "--root", root)
    assert code == 2
    assert "/sys/fs/cgroup/pod/memory.max" in finding(answer, "memory")["seen"]


@pytest.mark.parametrize(("kernel", "level", "code"), [("5.15.0", "warn", 1), ("6.8.0", "ok", 0)])
def test_shmem_enabled_never_costs_huge_pages_on_kernels_that_cannot_collapse(
    folder: Path, checkpoint: Path, tmp_path: Path, kernel: str, level: str, code: int
) -> None:
    root = recorded(
        tmp_path,
        **{
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force\n",
            "proc/sys/kernel/osrelease": f"{kernel}\n",
        },
    )
    got, answer = doctor("--config", str(written(folder, checkpoint)), "--root", root)
    found = finding(answer, "thp")
    assert (got, found["level"]) == (code, level)
    assert ("shmem_enabled" in found["remedy"]) == (level == "warn")
    assert answer["forecast"] is None, "another machine cannot be measured"


def test_a_wrong_configuration_is_a_finding_too(folder: Path) -> None:
    path = folder / "engram.json"
    path.write_text('{"model_pth": "x"}')
    code, answer = doctor("--config", str(path))
    assert code == 2
    assert finding(answer, "config")["error"] == "ConfigInvalid"


def test_a_lock_file_that_cannot_be_opened_is_pointed_out(folder: Path, checkpoint: Path) -> None:
    """As a daemon of root leaves it to one of user engram; here a link to nothing, which root cannot open either."""
    path = written(folder, checkpoint)
    (folder / "run").mkdir()
    (folder / "run" / "control.sock.lock").symlink_to(folder / "nothing")
    code, answer = doctor("--config", str(path))
    found = finding(answer, "sockets")
    assert (code, found["level"], "control.sock.lock" in found["seen"]) == (2, "fail", True)
    assert found["remedy"]


def test_a_daemon_that_runs_already_is_pointed_out(per_node: Daemon) -> None:
    code, answer = doctor("--config", str(per_node.config_path))
    assert code == 1
    found = finding(answer, "sockets")
    assert (found["level"], str(per_node.pid) in found["seen"]) == ("warn", True)


def test_the_predicted_load_time_is_made_of_the_rates_it_was_measured_from(folder: Path, large: Path) -> None:
    """How near it comes to the real load is speed, and so for the benchmarks: tests/bench/forecast.py."""
    forecast = doctor("--config", str(written(folder, large)))[1]["forecast"]
    populate = forecast["bytes"] / forecast["populate_bytes_per_second"]
    fill = forecast["bytes"] / forecast["fill_bytes_per_second"]
    assert forecast["bytes"] > 0
    assert forecast["threads"] > 0
    assert forecast["load_seconds"] >= populate + fill
    assert forecast["attach_seconds"] > 0


def test_peer_reads_across_nodes_without_fabric_fail_the_doctor(folder: Path, checkpoint: Path) -> None:
    engram = {"placement": "gpu", "lookup": "peer_read"}
    path = written(folder, checkpoint, engram_config=engram, tp_size=4, nnodes=2)
    code, answer = doctor("--config", str(path), fake={"fabric": "lies"})
    assert code == 2
    assert finding(answer, "fabric")["level"] == "fail"
    assert "CUDA_ERROR_NOT_PERMITTED" in finding(answer, "fabric")["seen"]
    _, answer = doctor("--config", str(path), fake={"fabric": "yes"})
    assert finding(answer, "fabric")["level"] == "ok"
