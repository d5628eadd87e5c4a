"""A rank that fails while the others wait for it, where no daemon and no GPU are needed to show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engram_client import connect, group, nodes
from engram_client.errors import EngramError, NoServer, UnknownLayer
from engram_client.nodes import Nodes
from engram_client.protocol import (
    Failed,
    Lookup,
    Placement,
    RankMessage,
    Replication,
    ResolvedOptions,
    Secret,
    decode,
    encode,
)

OPTIONS = ResolvedOptions(
    placement=Placement.GPU,
    replication=Replication.NONE,
    lookup=Lookup.PEER_READ,
    tp_size=4,
    nnodes=2,
    node_rank=0,
)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Failed, int | None]]:
    """What this process, in a group of four, has told the others, and through which GPU's memory."""
    said: list[tuple[Failed, int | None]] = []

    def gather_bytes(mine: bytes, of: Any, ordinal: int | None, limit: int) -> list[bytes]:
        said.append((decode(mine, RankMessage)[1], ordinal))
        return [mine] * 4

    monkeypatch.setattr(group, "size", lambda of: 4)
    monkeypatch.setattr(group, "gather_bytes", gather_bytes)
    monkeypatch.setattr(nodes, "query_status", lambda *asked, **how: SimpleNamespace(options=OPTIONS))
    return said


def test_a_rank_that_fails_before_it_attaches_speaks_through_its_own_gpu(met: list[tuple[Failed, int | None]]) -> None:
    """NCCL ends an exchange in which two ranks come with one GPU."""
    with pytest.raises(EngramError) as failed:
        connect("ipc:///nowhere/control.sock", rank=3, world_size=4, device="cuda:3", timeout=0)
    assert [(said.code, ordinal) for said, ordinal in met] == [(failed.value.code, 3)]


@pytest.mark.parametrize(
    ("rank", "layers", "code"), [(1, None, "NoServer"), (9, None, "RankInvalid"), (1, 14, "InternalError")]
)
def test_ranks_that_split_reads_hear_of_one_that_fails_whatever_a_daemon_says(
    met: list[tuple[Failed, int | None]], rank: int, layers: Any, code: str
) -> None:
    """They know by themselves that all of them meet: else they would wait for it as long as the group's timeout."""
    with pytest.raises((EngramError, TypeError)):
        connect("ipc:///nowhere/control.sock", rank=rank, world_size=4, layers=layers, timeout=0, split_reads=True)
    assert [said.code for said, _ in met] == [code]


def test_a_rank_of_sglang_without_a_daemon_tells_those_that_split_reads(met: list[tuple[Failed, int | None]]) -> None:
    """It asks for the daemon's state before it connects, and must not end there."""
    from engram_client import sglang_attach

    settings = sglang_attach.Settings("ipc:///nowhere/control.sock", None, 0.0, split_reads=True)
    place = sglang_attach.Place(1, 4, "cpu")
    with pytest.raises(NoServer):
        sglang_attach.client_of_process(settings, place, None, remember_failure=False)
    assert [said.code for said, _ in met] == ["NoServer"]


def test_a_rank_that_names_no_device_there_is_speaks_through_the_current_gpu(
    met: list[tuple[Failed, int | None]],
) -> None:
    with pytest.raises(EngramError):
        connect("ipc:///nowhere/control.sock", rank=3, world_size=4, device="tpu", timeout=0)
    assert [(said.code, ordinal) for said, ordinal in met] == [("DeviceUnsupported", None)]


@pytest.mark.parametrize("layer", [2**70, "x" * (1 << 25)], ids=["a number of 70 bits", "too long"])
def test_an_error_that_cannot_be_sent_is_told_as_one_that_can(met: list[tuple[Failed, int | None]], layer: Any) -> None:
    Nodes("ipc:///nowhere/control.sock", None, 1, 4, None).give_up(UnknownLayer(layer_id=layer, served=[]))
    (said, _) = met[0]
    assert said.code == "InternalError"
    assert "UnknownLayer" in said.fields["problem"]


def test_a_secret_is_bytes_and_shows_none_of_them() -> None:
    secret = Secret(b"handle")
    assert secret == b"handle"
    assert bytes(secret) == b"handle"
    assert {repr(secret), str(secret), f"{secret}", f"{[secret]}"[1:-1]} == {"<secret>"}
    assert b"handle" in encode(Failed(code="x", fields={"a": bytes(secret)}))
