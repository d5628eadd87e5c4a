"""Both sockets are cut, half-closed or made to lose a message at every boundary that an attach has."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engram_client import connect
from engram_client.errors import ConnectTimeout, EngramError
from tests.support.daemon import Daemon, wait_until
from tests.support.proxy import Interference, Proxy

ATTACH_S = 1.0
WHOLE_S = 30.0
REQUEST = REPLY = 4
"""Index on the control socket: three pieces of ZMTP's greeting and its READY go before."""


@contextlib.contextmanager
def between(
    daemon: Daemon, folder: Path, control: Interference | None = None, handover: Interference | None = None
) -> Iterator[tuple[str, Proxy, Proxy]]:
    """An endpoint whose both sockets lead through a proxy."""
    path = folder / "p.sock"
    beside = Path(f"{path}.handover")
    try:
        with (
            Proxy(path, daemon.control_path, socket.SOCK_STREAM, control) as first,
            Proxy(beside, daemon.handover_path, socket.SOCK_SEQPACKET, handover) as second,
        ):
            yield f"ipc://{path}", first, second
    finally:
        path.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)


def test_every_boundary_of_both_sockets_may_be_cut(per_node: Daemon, folder: Path) -> None:
    """The client ends with an error that has a name, or, where nothing that mattered was lost, attaches."""
    with between(per_node, folder) as (endpoint, control, handover):
        with connect(endpoint, rank=0, world_size=1, timeout=WHOLE_S):
            pass
        counts = {"control": dict(control.seen), "handover": dict(handover.seen)}
    assert counts["handover"] == {"up": 1, "down": 2}
    assert counts["control"]["up"] >= 3
    wait_until(lambda: not per_node.status().leases, "the lease's end")
    process = psutil.Process(per_node.pid)
    descriptors = process.num_fds()
    outcomes = []
    for which, seen in counts.items():
        for direction, count in seen.items():
            for index in range(count):
                for action in ("cut", "half", "drop"):
                    plan = {which: Interference(direction, index, action)}
                    outcomes.append(attempt(per_node, folder, plan))
    assert "attached" in outcomes
    assert {"TransferCut", "ConnectTimeout"} <= set(outcomes)
    wait_until(lambda: not per_node.status().leases, "the leases' end")
    wait_until(lambda: process.num_fds() <= descriptors, "as many descriptors as before")


def attempt(daemon: Daemon, folder: Path, plan: dict[str, Interference]) -> str:
    with between(daemon, folder, **plan) as (endpoint, _, _):
        try:
            with connect(endpoint, rank=0, world_size=1, timeout=ATTACH_S):
                return "attached"
        except EngramError as error:
            return error.code


@pytest.mark.parametrize(
    "plan",
    [
        {"control": Interference("down", REPLY, "drop")},
        {"control": Interference("up", REQUEST, "drop")},
        {"handover": Interference("down", 1, "drop")},
        {"handover": Interference("up", 0, "drop")},
    ],
    ids=["attached is lost", "attach is lost", "granted is lost", "redeem is lost"],
)
def test_a_lost_message_is_a_time_out_and_asking_again_is_harmless(
    plan: dict[str, Interference], per_node: Daemon, folder: Path
) -> None:
    with between(per_node, folder, **plan) as (endpoint, _, _):
        with pytest.raises(ConnectTimeout):
            connect(endpoint, rank=0, world_size=1, timeout=ATTACH_S)
        with connect(endpoint, rank=0, world_size=1, timeout=WHOLE_S) as client:
            assert client.server_alive
            wait_until(lambda: len(per_node.status().leases) == 1, "the lost one's end")
