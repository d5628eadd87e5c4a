"""peer_read over two nodes: two daemons, each with its own fake machine, and the ranks of one gloo group."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import traceback
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import engram_client.nodes
from engram_client import connect
from engram_client.cuda.access import DRIVER_VARIABLE, cuda_driver
from engram_client.endpoint import handover_path
from engram_client.errors import EngramError, GroupNeeded, NotAllowedNow
from engram_client.handover import HandoverConnection
from engram_client.protocol import Progress, State, encode
from engram_server.make_checkpoint import make_checkpoint
from tests.support import fake_runtime
from tests.support.asking import Asking
from tests.support.daemon import Daemon, wait_until
from tests.support.fake_driver import FakeDriver
from tests.support.ranks import run_ranks
from tests.support.reference import CheckpointReference
from tests.support.service_manager import ServiceManager
from tests.system.conftest import VOCAB

FAKE = {DRIVER_VARIABLE: "tests.support.fake_driver:FakeDriver"}
ACROSS = {"placement": "gpu", "lookup": "peer_read"}
GROUP_TIMEOUT_S = 20
SECRET = b"fake-fabric:"
"""What the fake's handles begin with, and how those twelve bytes read in base64 and in hex."""
SPELLINGS = (SECRET, b"ZmFrZS1mYWJyaWM6", SECRET.hex().encode())


class Nodes:
    """Two nodes with `tp` ranks together; `machines` and `configs` say in what a node differs."""

    def __init__(self, folder: Path, checkpoint: Path, tp: int = 2) -> None:
        self.folder, self.checkpoint, self.tp = folder, checkpoint, tp
        self.machines: list[dict[str, Any]] = [{"gpus": tp // 2, "fabric": "yes", "node": node} for node in range(2)]
        self.configs: list[dict[str, Any]] = [{}, {}]
        self.daemons: list[Daemon] = []

    def begin(self, node: int, **options: Any) -> Daemon:
        """A daemon, not waited for."""
        config = {
            "model_path": str(self.checkpoint),
            "engram_config": ACROSS,
            "tp_size": self.tp,
            "nnodes": 2,
            "node_rank": node,
            **self.configs[node],
        }
        environ = FAKE | {"ENGRAM_FAKE_CUDA": json.dumps(self.machines[node])} | options.pop("environ", {})
        return Daemon(self.folder / f"n{node}", config, environ=environ, **options)

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[Nodes]:
        self.daemons = [self.begin(node, **options) for node in range(2)]
        try:
            for daemon in self.daemons:
                daemon.wait_for()
            yield self
        finally:
            for daemon in self.daemons:
                daemon.kill()

    @property
    def endpoints(self) -> list[str]:
        return [daemon.endpoint for daemon in self.daemons]

    def outcomes(self, **options: Any) -> list[Any]:
        """What each rank's attach comes to: "attached", or the error's code and fields."""
        return run_ranks(self.tp, attach, self.endpoints, self.machines, options)


def on_node(machine: dict[str, Any], fail: str = "") -> None:
    """Makes this process one of that fake machine."""
    os.environ.update(FAKE, ENGRAM_FAKE_CUDA=json.dumps(machine), ENGRAM_FAKE_FAIL=fail)
    fake_runtime.install()


def attach(
    rank: int, world_size: int, endpoints: list[str], machines: list[dict[str, Any]], options: dict[str, Any]
) -> Any:
    """options, by rank: `endpoint`, `fail` (a driver call), `layers`, `claim` (another rank to attach as),
    `end_loader` (a daemon's id, whose loader is killed when this rank waits). `kill`: a daemon's id, for all ranks; it
    is killed when they know each other's handles and have mapped nothing."""
    node = rank // (world_size // 2)
    on_node(machines[node], options.get("fail", {}).get(rank, ""))
    endpoint = options.get("endpoint", {}).get(rank, endpoints[node])
    if "kill" in options:
        kill_after_exchange(options["kill"])
    loader_of = options.get("end_loader", {}).get(rank)

    def on_progress(progress: Progress) -> None:
        for child in psutil.Process(loader_of).children() if loader_of else []:
            child.kill()

    try:
        client = connect(
            endpoint,
            rank=options.get("claim", {}).get(rank, rank),
            world_size=world_size,
            device=f"cuda:{rank % (world_size // 2)}",
            layers=options.get("layers", {}).get(rank),
            timeout=30,
            on_progress=on_progress,
        )
    except EngramError as error:
        driver = cuda_driver()
        assert isinstance(driver, FakeDriver)
        assert all("of context" in leak for leak in driver.leaks()), "the kernels' own context stays"
        told = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        assert SECRET.decode() not in told, "what reports errors may send the frames' variables along"
        return error.code, error.fields
    client.close()
    return "attached"


def kill_after_exchange(pid: int) -> None:
    exchange, daemon = engram_client.nodes.Nodes.exchange, psutil.Process(pid)

    def then_kill(self: engram_client.nodes.Nodes, *held: Any) -> Any:
        found = exchange(self, *held)
        daemon.kill()
        wait_until(lambda: daemon.status() == psutil.STATUS_ZOMBIE, "the daemon's end")
        return found

    engram_client.nodes.Nodes.exchange = then_kill  # type: ignore[method-assign]


def ask_everything(
    rank: int, world_size: int, endpoints: list[str], machines: list[dict[str, Any]], checkpoint: str
) -> tuple[int, str]:
    """Rows compared with the checkpoint's files, and all that this rank logged and shows."""
    node = rank // (world_size // 2)
    on_node(machines[node])
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger("engram_client").setLevel(logging.DEBUG)
    device = f"cuda:{rank % (world_size // 2)}"
    with connect(endpoints[node], rank=rank, world_size=world_size, device=device) as client:
        shown.append(f"{client!r} {client.options!r} {vars(client)}")
        compared = Asking(client, CheckpointReference(Path(checkpoint)), torch.device("cpu"), lambda: None).everything()
    driver = cuda_driver()
    assert isinstance(driver, FakeDriver)
    assert driver.leaks() == [f"1 of context {device[5:]}"], "the kernels' own"
    return compared, "\n".join(shown)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_of_two_nodes_read_all_shards_and_no_handle_is_shown_anywhere(
    folder: Path, checkpoint: Path, tp: int
) -> None:
    nodes = Nodes(folder, checkpoint, tp)
    nodes.configs = [{"metrics": {"listen": f"127.0.0.1:{port}"}} for port in free_ports(2)]
    with nodes.running(arguments=("--log-level", "debug")):
        found = run_ranks(tp, ask_everything, nodes.endpoints, nodes.machines, str(checkpoint), timeout_s=100)
        assert min(compared for compared, _ in found) > 4000
        shown = [said.encode() for _, said in found]
        for daemon, config in zip(nodes.daemons, nodes.configs, strict=True):
            shown += [daemon.log.encode(), encode(daemon.status()), repr(daemon.status()).encode()]
            for page in ("metrics", ""):
                with urllib.request.urlopen(f"http://{config['metrics']['listen']}/{page}") as reply:
                    shown.append(reply.read())
        assert all(len(each) > 10 for each in shown)
        assert not [each for each in shown for spelling in SPELLINGS if spelling in each]


def free_ports(count: int) -> list[int]:
    import socket

    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in taken]


def test_a_node_without_fabric_is_named_with_its_reason_on_all_ranks(folder: Path, checkpoint: Path) -> None:
    nodes = Nodes(folder, checkpoint, 4)
    nodes.machines[1]["fabric"] = "lies"
    (port,) = free_ports(1)
    nodes.configs[1] = {"metrics": {"listen": f"127.0.0.1:{port}"}}
    with nodes.running():
        assert "no rank will be able to attach" in nodes.daemons[1].log
        for code, fields in nodes.outcomes():
            assert (code, fields["node_rank"]) == ("FabricUnavailable", 1)
            assert "cuMemCreate answers CUDA_ERROR_NOT_PERMITTED" in fields["problem"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            assert b'engram_refused_total{code="FabricUnavailable",request="export"} 2.0' in reply.read()
        for daemon in nodes.daemons:
            wait_until(lambda daemon=daemon: not daemon.status().leases, "the leases end")  # type: ignore[misc]


def test_nodes_that_serve_different_tables_are_refused_with_both_sides(
    folder: Path, checkpoint: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    make_checkpoint(other, engram_vocab_size=VOCAB, seed=12, every_code=True)
    nodes = Nodes(folder, checkpoint)
    nodes.configs[1] = {"model_path": str(other)}
    with nodes.running():
        for code, fields in nodes.outcomes():
            assert code == "NodesDiffer"
            assert (fields["rank"], fields["node"], fields["other_rank"], fields["other_node"]) == (0, 0, 1, 1)
            assert fields["differing"] == ["layer 1 sample", "layer 14 sample"]
            assert set(fields["found"]) == set(fields["other_found"]) == set(fields["differing"])
            assert not set(fields["found"].values()) & set(fields["other_found"].values())


def test_ranks_that_ask_for_other_layers_are_refused(folder: Path, checkpoint: Path) -> None:
    with Nodes(folder, checkpoint).running() as nodes:
        for code, fields in nodes.outcomes(layers={1: [14]}):
            assert code == "NodesDiffer"
            assert (fields["found"]["layers"], fields["other_found"]["layers"]) == ([1, 14], [14])


def test_one_rank_that_cannot_attach_is_heard_of_by_all_and_none_attaches(folder: Path, checkpoint: Path) -> None:
    with Nodes(folder, checkpoint, 4).running() as nodes:
        for fail, own in (
            ("cuMemImportFromShareableHandle:3:CUDA_ERROR_NOT_PERMITTED", "CudaCallFailed"),  # of another node
            ("cuLibraryLoadData:1:CUDA_ERROR_NO_BINARY_FOR_GPU", "CudaCallFailed"),  # before it asks its daemon
        ):
            outcomes = nodes.outcomes(fail={2: fail})
            assert outcomes[2][0] == own
            for rank in (0, 1, 3):
                code, fields = outcomes[rank]
                assert (code, fields["rank"], fields["cause_code"]) == ("OtherRankFailed", 2, own)
        outcomes = nodes.outcomes(endpoint={3: nodes.endpoints[0]})
        code, fields = outcomes[3]
        assert (code, fields["node_rank"], fields["held"]) == ("RankOnOtherNode", 0, [0, 1])
        assert {outcome[1]["cause_code"] for outcome in outcomes[:3]} == {"RankOnOtherNode"}
        assert nodes.outcomes() == ["attached"] * 4


def test_a_daemon_that_dies_between_the_exchange_and_the_mapping_leaves_no_rank_attached(
    folder: Path, checkpoint: Path
) -> None:
    with Nodes(folder, checkpoint).running() as nodes:
        first, second = nodes.outcomes(kill=nodes.daemons[1].pid)
        assert (first[0], first[1]["call"]) == ("CudaCallFailed", "cuMemImportFromShareableHandle")
        assert (second[0], second[1]["rank"], second[1]["cause_code"]) == ("OtherRankFailed", 0, "CudaCallFailed")
        wait_until(lambda: not nodes.daemons[0].status().leases, "the other node's leases end")


def test_a_rank_that_takes_itself_for_another_tells_the_others_who_do_not(folder: Path, checkpoint: Path) -> None:
    with Nodes(folder, checkpoint, 4).running() as nodes:
        for fail in ({}, {3: "cuLibraryLoadData:1:CUDA_ERROR_NO_BINARY_FOR_GPU"}):  # and before it asks its daemon
            outcomes = nodes.outcomes(claim={3: 2}, fail=fail)
            own = "CudaCallFailed" if fail else "GroupRankMismatch"
            assert outcomes[3][0] == own
            for code, fields in outcomes[:3]:
                assert (code, fields["rank"], fields["cause_code"]) == ("OtherRankFailed", 3, own)


STOPPING = """
import os, signal, sys
if "engram_server.load_child" in sys.orig_argv: os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_load_that_fails_on_one_node_ends_the_attach_on_all(folder: Path, checkpoint: Path, tmp_path: Path) -> None:
    """Its daemon is gone then, and cannot be asked any more whether the other nodes' ranks wait."""
    (tmp_path / "sitecustomize.py").write_text(STOPPING)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    nodes = Nodes(folder, checkpoint)
    with contextlib.ExitStack() as stack:
        nodes.daemons = [nodes.begin(0), nodes.begin(1, environ={"PYTHONPATH": path})]
        for daemon in nodes.daemons:
            stack.callback(daemon.kill)
        nodes.daemons[0].wait_for()
        nodes.daemons[1].wait_for(State.LOADING)
        first, second = nodes.outcomes(end_loader={1: nodes.daemons[1].pid})
        assert second[0] == "LoadFailed"
        assert (first[0], first[1]["rank"], first[1]["cause_code"]) == ("OtherRankFailed", 1, "LoadFailed")


def test_a_client_without_a_group_is_told_so(folder: Path, checkpoint: Path) -> None:
    daemon = Nodes(folder, checkpoint).begin(0)
    try:
        daemon.wait_for()
        with pytest.raises(GroupNeeded) as refused:
            connect(daemon.endpoint, rank=0, world_size=2)
        assert refused.value.nnodes == 2
        assert not daemon.status().leases
    finally:
        daemon.kill()


def survive(rank: int, store: str, endpoint: str, machine: dict[str, Any], pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )
    dist.barrier()
    if rank == 1:
        os._exit(9)
    on_node(machine)
    try:
        connect(endpoint, rank=0, world_size=2, device="cuda:0").close()
        pipe.send("attached")
    except EngramError as error:
        pipe.send(error.code)


def test_a_rank_that_dies_before_the_exchange_ends_the_attach_of_the_others(folder: Path, checkpoint: Path) -> None:
    with Nodes(folder, checkpoint).running() as nodes:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(
                target=survive,
                args=(rank, str(folder / "store"), nodes.endpoints[0], nodes.machines[0], theirs),
                daemon=True,
            )
            for rank in range(2)
        ]
        try:
            for process in ranks:
                process.start()
            assert ours.poll(3 * GROUP_TIMEOUT_S)
            assert ours.recv() == "ExchangeFailed"
        finally:
            for process in ranks:
                process.kill()
                process.join()


@pytest.mark.parametrize("again", [True, False])
def test_memory_that_was_taken_over_is_shared_again_or_asks_for_a_reload(
    folder: Path, checkpoint: Path, again: bool
) -> None:
    nodes = Nodes(folder, checkpoint)
    nodes.machines[1]["export_again"] = again
    with contextlib.ExitStack() as stack:
        manager = stack.enter_context(ServiceManager(folder / "manager"))

        def start() -> Daemon:
            daemon = nodes.begin(
                1, environ=manager.environ(), wrapper=manager.wrapper(), pass_fds=manager.descriptors()
            )
            stack.callback(daemon.kill)
            return daemon

        nodes.daemons = [nodes.begin(0), start()]
        stack.callback(nodes.daemons[0].kill)
        for daemon in nodes.daemons:
            daemon.wait_for()
        assert not [fd for name, fd in manager.store if SECRET in read(name, fd)], "the manifest is no place for it"
        assert nodes.outcomes() == ["attached", "attached"]
        nodes.daemons[1].kill()
        nodes.daemons[1] = start()
        assert nodes.daemons[1].wait_for().adopted
        if again:
            found = run_ranks(2, ask_everything, nodes.endpoints, nodes.machines, str(checkpoint), timeout_s=100)
            assert min(compared for compared, _ in found) > 4000
            return
        for code, fields in nodes.outcomes():
            assert (code, fields["node_rank"]) == ("FabricUnavailable", 1)
            assert "took over from an earlier one" in fields["problem"]
            assert "engram-ctl drain --free" in fields["remedy"]


def read(name: str, fd: int) -> bytes:
    return os.pread(fd, 1 << 20, 0) if name == "engram-manifest" else b""


def test_without_a_lease_nobody_is_given_a_handle(folder: Path, checkpoint: Path) -> None:
    with Nodes(folder, checkpoint).running() as nodes:
        with HandoverConnection.open(handover_path(nodes.endpoints[0]), 10) as connection:
            with pytest.raises(NotAllowedNow) as refused:
                connection.export(10)
        assert refused.value.state == "without a lease on this connection"
