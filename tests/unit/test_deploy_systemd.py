"""The systemd unit, looked at by systemd's own analysis of the file; no systemd runs."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engram_client import errors

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "systemd"
UNIT = FOLDER / "engram-server.service"
ANALYZE = shutil.which("systemd-analyze")
MOST_EXPOSED = 15
"""Of 100, as `systemd-analyze security` counts; 10 when this was written."""

needs_analyze = pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze (apt-get install systemd)")


def settings(path: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def version() -> int:
    done = subprocess.run([str(ANALYZE), "--version"], capture_output=True, text=True, check=True)
    (found,) = re.findall(r"^systemd (\d+)", done.stdout)
    return int(found)


def installed(folder: Path, *drop_ins: str) -> Path:
    """The unit with a program that exists here, and drop-ins beside it."""
    unit = folder / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/engram/bin/engram-server", "/bin/true"))
    for name in drop_ins:
        place = folder / f"{UNIT.name}.d"
        place.mkdir(exist_ok=True)
        shutil.copy(FOLDER / name, place / name)
    return unit


@needs_analyze
@pytest.mark.parametrize("drop_ins", [(), ("engram-server-gpu.conf", "engram-server-metrics.conf")])
def test_systemd_finds_nothing_to_say_about_the_unit(tmp_path: Path, drop_ins: tuple[str, ...]) -> None:
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(installed(tmp_path, *drop_ins))],
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stdout + done.stderr).splitlines()
    if version() < 254:  # which is when the key came; an older systemd goes on without it
        said = [line for line in said if "'FileDescriptorStorePreserve'" not in line]
    assert (done.returncode, said) == (0, [])


@needs_analyze
def test_the_sandbox_leaves_little_exposed(tmp_path: Path) -> None:
    done = subprocess.run(
        [str(ANALYZE), "security", "--offline=true", f"--threshold={MOST_EXPOSED}", str(installed(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "Overall exposure level" in done.stdout


def test_the_unit_restarts_on_none_of_the_errors_that_would_come_again() -> None:
    codes = {errors.EXIT_CONFIG, errors.EXIT_CHECKPOINT, errors.EXIT_ALREADY_RUNNING}
    assert {int(code) for code in settings(UNIT)["RestartPreventExitStatus"][0].split()} == codes


def test_the_tables_survive_a_restart() -> None:
    found = settings(UNIT)
    assert int(found["FileDescriptorStoreMax"][0]) > 0
    assert found["FileDescriptorStorePreserve"] == ["yes"]
    assert found["NotifyAccess"] == ["main"]
    assert found["Type"] == ["notify"]
    assert int(found["WatchdogSec"][0]) > 0
    assert found["RemoveIPC"] == ["no"], "it would delete tables of backing posix_shm"
    assert found["PrivateUsers"] == ["no"], "it would hide the peers' uids"


def test_the_unit_starts_the_daemon_with_arguments_that_it_takes() -> None:
    (command,) = settings(UNIT)["ExecStart"]
    done = subprocess.run(
        [sys.executable, "-m", "engram_server.cli", *command.split()[1:], "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_reserved_huge_pages_hold_the_released_tables() -> None:
    parsed = configparser.ConfigParser()
    parsed.read_string("[x]\n" + (FOLDER / "engram.sysctl.conf").read_text())
    released = 202_758_032_400
    pages = int(parsed["x"]["vm.nr_hugepages"])
    assert released <= pages * (2 << 20) < released * 1.01
