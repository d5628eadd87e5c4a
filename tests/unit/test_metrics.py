"""Metrics of made-up daemons, read back by prometheus_client's own parser, and the HTTP port that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from engram_client.errors import MetricsUnavailable
from engram_client.protocol import (
    State,
)
from engram_server import httpd
from engram_server.httpd import StatusServer, address_of
from engram_server.metrics import Metrics
from engram_server.tally import ATTACH_BUCKETS_S, Histogram
from tests.support.observed import snapshot


def values(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize("state", State)
def test_exactly_the_daemons_state_is_one(state: State) -> None:
    found = values(Metrics().text(snapshot(state)))
    assert {other: found["engram_state", (("state", other),)] for other in State} == {
        other: float(other is state) for other in State
    }


def test_bytes_coverage_counters_and_identity_are_there() -> None:
    found = values(Metrics().text(snapshot()))
    segment = (("backing", "memfd"), ("layer", "1"), ("numa", "none"), ("segment", "L1"))
    assert found["engram_segment_bytes", segment] == 4096
    assert found["engram_segment_huge_bytes", segment] == 2048
    assert found["engram_lookup_rows_total", ()] == 48
    assert found["engram_lookup_invalid_ids_total", ()] == 5
    assert found["engram_lookup_prefetch_late_total", ()] == 1
    assert found["engram_leases_granted_total", ()] == 4
    assert found["engram_oldest_lease_seconds", ()] == 12.5
    assert found["engram_refused_total", (("code", "RankInvalid"), ("request", "attach"))] == 2
    assert found["engram_verifications_total", (("result", "ok"),)] == 1
    assert found["engram_verifications_total", (("result", "failed"),)] == 0
    assert found["engram_table_identity_info", (("layer", "1"), ("root", "ab" * 16))] == 1
    assert found["engram_attach_seconds_bucket", (("le", "0.05"),)] == 1
    assert found["engram_attach_seconds_bucket", (("le", "0.02"),)] == 0
    assert found["engram_attach_seconds_count", ()] == 1
    assert found["process_open_fds", ()] > 0


@given(st.text(max_size=64))
def test_any_name_of_a_client_survives_as_a_label(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        return  # msgpack refuses it before it comes here
    found = Metrics().text(snapshot(name=name)).decode()
    ages = [line for line in found.split("\n") if line.startswith("engram_lease_age_seconds{")]
    assert len(ages) == 1


@given(st.lists(st.floats(0, 1000)))
def test_a_histogram_counts_every_observation_under_every_bound_it_fits(observed: list[float]) -> None:
    histogram = Histogram(ATTACH_BUCKETS_S)
    for value in observed:
        histogram.observe(value)
    found = histogram.cumulative()
    assert found[-1] == ("+Inf", len(observed))
    for bound, count in found[:-1]:
        assert count == sum(value <= float(bound) for value in observed)


# The HTTP port


class Served:
    """A server over a loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.state = State.READY
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.server = StatusServer("127.0.0.1:0", self.loop, lambda: snapshot(self.state))

    def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(f"http://{self.server.address}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, dict(reply.headers), reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def close(self) -> None:
        self.server.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def served() -> Iterator[Served]:
    found = Served()
    yield found
    found.close()


def test_the_page_metrics_and_status_are_served(served: Served) -> None:
    assert served.get("/")[2].startswith(b"<!doctype html>")
    assert values(served.get("/metrics")[2])["engram_uptime_seconds", ()] == 3
    assert json.loads(served.get("/status.json")[2])["status"]["state"] == "ready"


@pytest.mark.parametrize("state", State)
def test_probes_tell_the_states_apart_and_only_ready_is_ready(state: State, served: Served) -> None:
    """Alive in all of them: a load is no reason to restart, and a degraded daemon's clients read on."""
    served.state = state
    status, _, body = served.get("/livez")
    assert (status, body) == (200, f"{state}\n".encode())
    status, _, body = served.get("/readyz")
    assert (status, body) == (200 if state is State.READY else 503, f"{state}\n".encode())


def test_the_page_may_run_its_own_script_and_nothing_else(served: Served) -> None:
    _, headers, page = served.get("/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert b"http://" not in page, "nothing is fetched from elsewhere"
    assert b"https://" not in page


def test_other_paths_and_methods_are_refused(served: Served) -> None:
    assert served.get("/../etc/passwd")[0] == 404
    assert served.get("/metrics", "POST")[0] == 405
    assert served.get("/livez", "HEAD")[2] == b""


def test_a_loop_that_does_not_answer_fails_the_probes(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpd, "LOOP_ANSWERS_S", 0.05)
    gate = threading.Event()
    served.loop.call_soon_threadsafe(gate.wait)
    try:
        assert served.get("/livez")[0] == 503
    finally:
        gate.set()


def test_silent_peers_take_no_more_than_their_share(served: Served) -> None:
    host, port = address_of(served.server.address)
    with contextlib.ExitStack() as stack:
        for _ in range(httpd.MAX_PEERS):
            stack.enter_context(socket.create_connection((host, port)))
        # One more is cut off at once, whichever of them it is that the server sees as the last.
        late = stack.enter_context(socket.create_connection((host, port)))
        late.settimeout(30)
        with contextlib.suppress(ConnectionError):
            late.sendall(b"GET /livez HTTP/1.0\r\n\r\n")
            assert late.recv(1) == b""


def test_a_port_that_is_taken_is_named() -> None:
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop), socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MetricsUnavailable) as failed:
            StatusServer(listen, loop, snapshot)
        assert failed.value.listen == listen


@pytest.mark.parametrize(
    ("listen", "address"),
    [(":9400", ("127.0.0.1", 9400)), ("[::1]:80", ("::1", 80)), ("0.0.0.0:1", ("0.0.0.0", 1))],
)
def test_a_port_alone_is_loopback(listen: str, address: tuple[str, int]) -> None:
    assert address_of(listen) == address
