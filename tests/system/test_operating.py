"""A real daemon under observation: metrics, status page, counters of clients, log levels, top and bench."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from prometheus_client.parser import text_string_to_metric_families

import engram_client
from engram_client.protocol import (
    MAX_HANDOVER_BYTES,
    Attach,
    Beat,
    Drain,
    Evict,
    Export,
    Failed,
    Greeting,
    HandoverReply,
    LogLevel,
    Redeem,
    Reply,
    Request,
    SetLogLevel,
    Status,
    Verify,
    decode,
    encode,
)
from tests.support.daemon import Daemon, running, wait_until

REPOSITORY = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_DEMANDED = "ENGRAM_REQUIRE_BROWSER"
"""Set where a browser has been installed for this: then its lack is a failure and no skip."""


@pytest.fixture
def watched(folder: Path, checkpoint: Path) -> Iterator[Daemon]:
    config = {
        "model_path": str(checkpoint),
        "engram_config": {"placement": "cpu", "replication": "per_node"},
        "metrics": {"listen": "127.0.0.1:0"},
    }
    with running(folder, config, arguments=("--log-format", "json")) as daemon:
        yield daemon


def url(daemon: Daemon) -> str:
    (found,) = re.findall(r"metrics and status page: (http://[0-9.:]+)", daemon.log)
    return str(found)


def metric(daemon: Daemon, name: str, **labels: str) -> float:
    with urllib.request.urlopen(f"{url(daemon)}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def ctl(*arguments: str) -> str:
    done = run_ctl(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_ctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engram_server.ctl", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )


def test_a_clients_counters_reach_the_metrics_and_stay_when_it_has_gone(watched: Daemon) -> None:
    with engram_client.connect(watched.endpoint, rank=0, world_size=1, name="counted") as client:
        table = client.table(1)
        wait_until(lambda: metric(watched, "engram_attach_seconds_count") == 1, "the first report")
        table.lookup(torch.tensor([0, 1, -1, table.rows]))
        assert metric(watched, "engram_leases") == 1
    wait_until(lambda: metric(watched, "engram_leases") == 0, "the lease ends")
    assert metric(watched, "engram_lookup_rows_total") == 4, "the last report leaves at close"
    assert metric(watched, "engram_lookup_invalid_ids_total") == 1
    assert metric(watched, "engram_state", state="ready") == 1
    assert metric(watched, "engram_segment_bytes", backing="memfd") == watched.status().segments[0].info.nbytes + (
        watched.status().segments[1].info.nbytes
    )
    assert metric(watched, "engram_verifications_total", result="ok") == 1


def test_counters_are_reported_while_a_client_works(watched: Daemon) -> None:
    with engram_client.connect(watched.endpoint, rank=0, world_size=1) as client:
        ids = torch.tensor([0, 1, 2])

        def seen() -> bool:
            client.table(1).lookup(ids)
            return watched.status().leases[0].lookups.rows > 0

        wait_until(seen, "rows of a client that goes on")


def test_a_refusal_is_counted_by_its_error(watched: Daemon) -> None:
    with pytest.raises(engram_client.errors.UnknownLayer):
        engram_client.connect(watched.endpoint, rank=0, world_size=1, layers=[99])
    assert metric(watched, "engram_refused_total", request="attach", code="UnknownLayer") == 1


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Verify(permit=b"x" * 32), "NotPermitted"),
        (Evict(permit=b"x" * 32, lease=1), "NotPermitted"),
        (Drain(permit=b"x" * 32), "NotPermitted"),
        (SetLogLevel(permit=b"x" * 32, level=LogLevel.DEBUG), "NotPermitted"),
        (Attach(rank=3, world_size=2, device="cpu", name="x"), "RankInvalid"),
        (None, "MalformedMessage"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_kind_of_request_on_the_control_socket_is_counted_when_it_is_refused(
    watched: Daemon, request_: Request | None, code: str
) -> None:
    frame = encode(request_) if request_ is not None else b"\xc1"
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(watched.endpoint)
        asking.send(frame)
        assert asking.poll(30_000)
        assert decode(asking.recv(), Reply)[1].code == code  # type: ignore[union-attr]
    name = str(request_.__struct_config__.tag) if request_ is not None else "unreadable"
    assert metric(watched, "engram_refused_total", request=name, code=code) == 1
    assert metric(watched, "engram_refused_total") == 1


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (Redeem(ticket=b"x" * 32), "TicketInvalid"),
        (Beat(), "NotAllowedNow"),
        (Export(), "NotAllowedNow"),
        (None, "MalformedMessage"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_kind_of_request_on_the_descriptor_socket_is_counted_when_it_is_refused(
    watched: Daemon, request_: Redeem | Beat | Export | None, code: str
) -> None:
    frame = encode(request_) if request_ is not None else b"\xc1"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.settimeout(30)
        asking.connect(str(watched.handover_path))
        assert isinstance(decode(asking.recv(MAX_HANDOVER_BYTES), HandoverReply)[1], Greeting)
        asking.send(frame)
        assert decode(asking.recv(MAX_HANDOVER_BYTES), HandoverReply)[1].code == code  # type: ignore[union-attr]
    name = str(request_.__struct_config__.tag) if request_ is not None else "unreadable"
    assert metric(watched, "engram_refused_total", request=name, code=code) == 1
    assert metric(watched, "engram_refused_total") == 1


def test_names_that_a_client_makes_up_are_no_labels(watched: Daemon) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(watched.endpoint)
        for number in range(20):
            asking.send(encode(Status()).replace(b"status", b"stat%02d" % number))
            assert asking.poll(30_000)
            assert isinstance(decode(asking.recv(), Reply)[1], Failed)
    assert metric(watched, "engram_refused_total", request="unreadable") == 20
    assert metric(watched, "engram_refused_total") == 20


def test_a_client_survives_a_daemon_that_has_gone_and_still_closes(watched: Daemon) -> None:
    client = engram_client.connect(watched.endpoint, rank=0, world_size=1)
    watched.kill()
    for _ in range(3):
        client.table(1).lookup(torch.tensor([1]))
    client.close()


def test_a_daemon_without_metrics_imports_nothing_for_them() -> None:
    code = "import sys, engram_server.cli; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"prometheus_client", "http", "wsgiref", "socketserver", "rich", "pynvml"}


def test_every_line_of_a_json_log_is_an_object_with_an_event(watched: Daemon) -> None:
    lines = [json.loads(line) for line in watched.log.splitlines()]
    assert {"time", "level", "logger", "event", "message"} <= lines[0].keys()
    assert any(line["message"].startswith("ready: ") for line in lines)


def test_the_log_level_changes_while_the_daemon_runs(watched: Daemon) -> None:
    asked = json.loads(ctl("logs-level", "--endpoint", watched.endpoint, "--json"))
    assert asked == {"type": "log_level_reply", "level": "info", "previous": "info"}
    assert "debug, was info" in ctl("logs-level", "debug", "--endpoint", watched.endpoint)
    assert json.loads(ctl("logs-level", "--config", str(watched.config_path), "--json"))["level"] == LogLevel.DEBUG


def test_top_shows_clients_and_their_rates(watched: Daemon) -> None:
    with engram_client.connect(watched.endpoint, rank=0, world_size=1, name="engine-7") as client:
        client.table(1)
        shown = ctl("top", "--endpoint", watched.endpoint, "--count", "2", "--every", "0.05")
        looks = ctl("top", "--endpoint", watched.endpoint, "--count", "2", "--every", "0.05", "--json")
    assert "engine-7" in shown
    assert "ready" in shown
    samples = [json.loads(line) for line in looks.splitlines()]
    assert len(samples) == 2
    assert samples[0]["status"]["leases"][0]["name"] == "engine-7"
    assert list(samples[1]["rows_per_second"].values()) == [0.0]


def test_bench_measures_both_ways_to_look_up_and_writes_csv_and_plot(watched: Daemon, folder: Path) -> None:
    table, plot = folder / "b.csv", folder / "b.svg"
    arguments = ["--tokens", "1", "8", "--repetitions", "2", "--csv", str(table), "--plot", str(plot), "--json"]
    found = json.loads(ctl("bench", "--endpoint", watched.endpoint, *arguments))["measurements"]
    assert {(each["layer"], each["ids"], each["tokens"]) for each in found} == {
        (layer, ids, tokens) for layer in (1, 14) for ids in ("any", "hashed") for tokens in (1, 8)
    }
    assert all(0 < each["best_us"] <= each["median_us"] <= each["worst_us"] for each in found)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found)
    assert rows[0]["rows"] == "24"
    assert "<svg" in plot.read_text()


def test_bench_brings_a_group_of_ranks_to_split_tables(folder: Path, checkpoint: Path) -> None:
    with running(folder, {"model_path": str(checkpoint), "tp_size": 2}) as daemon:
        arguments = ["--tokens", "4", "--repetitions", "1", "--json"]
        found = json.loads(ctl("bench", "--endpoint", daemon.endpoint, *arguments))["measurements"]
        refused = run_ctl("bench", "--endpoint", daemon.endpoint, *arguments, "--split", "2")
    assert {(each["ranks"], each["lookup"]) for each in found} == {(2, "collective")}
    assert refused.returncode == 1
    assert "split_reads=True is for whole tables in host memory" in refused.stderr


def test_bench_times_ranks_that_share_out_the_reads_beside_one_alone(per_node: Daemon) -> None:
    arguments = ["--tokens", "4", "--repetitions", "1", "--split", "2", "--json"]
    found = json.loads(ctl("bench", "--endpoint", per_node.endpoint, *arguments))["measurements"]
    assert {(each["ranks"], each["lookup"]) for each in found} == {(2, "split reads"), (1, "local")}


ATTACH = """
import sys, torch, engram_client
with engram_client.connect(sys.argv[1], rank=0, world_size=1) as client:
    print(client.table(1).lookup(torch.tensor([3])).view(torch.int16).sum().item())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_an_engine_needs_the_socket_folder_read_only_and_no_namespace_in_common(watched: Daemon) -> None:
    """As two pods are to each other: other PIDs, other IPC, another /dev/shm and /proc."""
    run = watched.control_path.parent
    mounts = f"mount --bind {run} {run} && mount -o remount,ro,bind {run} && mount -t tmpfs none /dev/shm"
    script = f'{mounts} && exec "$0" -c "$1" "$2"'
    unshare = ["unshare", "--mount", "--pid", "--ipc", "--net", "--uts", "--fork", "--mount-proc", "sh", "-c", script]
    done = subprocess.run(
        [*unshare, sys.executable, ATTACH, watched.endpoint],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.stderr.startswith("unshare"):
        pytest.skip(f"no namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    with engram_client.connect(watched.endpoint, rank=0, world_size=1) as client:
        assert int(done.stdout) == client.table(1).lookup(torch.tensor([3])).view(torch.int16).sum().item()


REFUSE_EXEC_GAIN = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, Linux 6.3: what MemoryDenyWriteExecute= stands for
    sys.exit(77)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_the_daemon_needs_no_memory_that_is_writable_and_executable(folder: Path, checkpoint: Path) -> None:
    probe = subprocess.run([sys.executable, "-c", REFUSE_EXEC_GAIN, "/bin/true"], check=False)
    if probe.returncode == 77:
        pytest.skip("this kernel cannot refuse it")
    config = {"model_path": str(checkpoint), "metrics": {"listen": "127.0.0.1:0"}}
    with running(folder, config, wrapper=(sys.executable, "-c", REFUSE_EXEC_GAIN)) as daemon:
        assert metric(daemon, "engram_state", state="ready") == 1


# The page in a browser


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None or shutil.which("chromedriver") is None:
        assert BROWSER_DEMANDED not in os.environ, "a browser was demanded and is not installed"
        pytest.skip("no chromium with chromedriver here; CI installs them")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def test_the_page_shows_the_daemon_and_follows_it_by_itself(watched: Daemon, browser: Any) -> None:
    def text() -> str:
        return str(browser.execute_script("return document.body.innerText"))

    name = "<b>engine</b>"
    browser.get(url(watched))
    wait_until(lambda: "ready" in text(), "the first refresh")
    assert "memfd" in text()
    assert watched.status().tables[0].identity.root in text()
    with engram_client.connect(watched.endpoint, rank=0, world_size=1, name=name) as client:
        wait_until(lambda: name in text(), "a new client, and its name as it is, not as markup")
        rows = 0

        def counted() -> bool:
            nonlocal rows
            client.table(1).lookup(torch.zeros(1000, dtype=torch.int64))
            rows += 1000
            return re.search(r"[1-9][\d,]*,000\s", text()) is not None

        wait_until(counted, "its lookups")
    wait_until(lambda: name not in text(), "it goes")
    watched.stop()
    wait_until(lambda: "does not answer" in text(), "the daemon goes")
    errors = [entry["message"] for entry in browser.get_log("browser") if "status.json" not in entry["message"]]
    assert not [message for message in errors if "favicon" not in message]
