"""`engram-ctl` as people call it: in pipes, on poor terminals, with nothing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engram_client.errors import EXIT_CONFIG, EXIT_OTHER
from tests.support.daemon import Daemon

CTL = [sys.executable, "-m", "engram_server.ctl"]


def ctl(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CTL, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=60,
        env={**os.environ, "COLUMNS": "160", **environ},
    )


@pytest.mark.parametrize(
    "environ",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb"},
        {"COLUMNS": "20"},
    ],
)
def test_a_poor_terminal_gets_a_plain_table(environ: dict[str, str], per_node: Daemon) -> None:
    shown = ctl("status", "--config", str(per_node.config_path), **environ)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("ready ")


def test_a_pipe_whose_reader_has_seen_enough_is_no_traceback(per_node: Daemon) -> None:
    for arguments in (["status"], ["status", "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as pipe:
            ended = subprocess.run(
                [*CTL, *arguments, "--config", str(per_node.config_path)],
                stdout=pipe,
                stderr=subprocess.PIPE,
                text=True,
                timeout=60,
            )
        assert (ended.returncode, ended.stderr) == (EXIT_OTHER, "")


def test_a_full_disk_under_the_output_is_named(per_node: Daemon) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*CTL, "status", "--json", "--config", str(per_node.config_path)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert "No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode != 0


def test_the_json_is_the_whole_reply(per_node: Daemon) -> None:
    shown = json.loads(ctl("status", "--json", "--endpoint", per_node.endpoint).stdout)
    assert (shown["state"], shown["pid"], shown["lease_count"]) == ("ready", per_node.pid, 0)
    assert [table["geometry"]["layer_id"] for table in shown["tables"]] == [1, 14]


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("status", "--endpoint", "ipc:///nowhere/control.sock", "--timeout", "0"), EXIT_OTHER, "NoServer"),
        (("status", "--endpoint", "tcp://127.0.0.1:1"), EXIT_CONFIG, "SocketPathInvalid"),
        (("status", "--config", "/nowhere/engram.json"), EXIT_CONFIG, "ConfigUnreadable"),
        (("status", "--timeout", "nan"), EXIT_CONFIG, "not a number of seconds"),
        (("status", "--timeout", "-1"), EXIT_CONFIG, "not a number of seconds"),
        (("make-checkpoint", "/dev/full"), 3, "WriteFailed"),
        (("make-checkpoint", "/nowhere", "--engram-vocab-size", "0"), EXIT_CONFIG, "ConfigInvalid"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], code: int, named: str) -> None:
    ended = ctl(*arguments)
    assert ended.returncode == code, ended.stderr
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("package", "arguments"), [("torch", ()), ("matplotlib", ("--plot", "x.svg"))])
def test_a_bench_where_only_the_daemons_packages_are_says_what_to_install(
    package: str, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """As after `pip install '.[server]'`, before a daemon is asked for anything."""
    hidden = f"import sys; sys.modules[{package!r}] = None\n"
    code = hidden + "from engram_server.ctl import main; sys.exit(main(sys.argv[1:]))"
    ended = subprocess.run(
        [sys.executable, "-c", code, "bench", "--endpoint", f"ipc://{tmp_path}/none", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (EXIT_CONFIG, False)
    assert "PackageMissing" in ended.stderr
    assert package in ended.stderr
