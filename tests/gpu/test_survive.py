"""Tables in memory of the CUDA driver outlive the daemon, on a real GPU: killed, started again, adopted, while a rank
reads on. The double of systemd keeps the descriptors."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from engram_client import Client, connect  # noqa: E402
from engram_client.cuda.access import DRIVER_VARIABLE  # noqa: E402
from engram_server.make_checkpoint import make_checkpoint  # noqa: E402
from tests.support.asking import Asking, hashed_ids  # noqa: E402
from tests.support.daemon import wait_until  # noqa: E402
from tests.support.reference import CheckpointReference  # noqa: E402
from tests.support.service_manager import ServiceManager  # noqa: E402
from tests.system.test_restart import Node, control  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]
if os.environ.get(DRIVER_VARIABLE):
    pytest.skip("needs the real driver", allow_module_level=True)

CPU = {"engram_config": {"placement": "cpu", "replication": "per_node"}, "host": {"backing": "cuda_host"}}
GPU = {"engram_config": {"placement": "gpu", "replication": "per_node"}, "devices": [0]}
PEERS = {"engram_config": {"placement": "gpu", "lookup": "peer_read"}, "devices": [0, 0], "tp_size": 2}
RESTARTS = 3


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eg-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


class Reading(threading.Thread):
    """Looks ids up over and over and compares the rows; `failure` is what went wrong."""

    def __init__(self, client: Client, reference: CheckpointReference) -> None:
        super().__init__(name="reading")
        self._client = client
        self._asking = Asking(client, reference, torch.device("cuda", 0), torch.cuda.synchronize)
        self._ending = threading.Event()
        self.rounds = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._ending.is_set():
                for layer in self._client.layers:
                    ids = hashed_ids(self._client.table(layer).columns, 40, self.rounds).cuda()
                    self._asking.same_tokens(layer, ids, True)
                    self._asking.stored(layer, ids)
                self.rounds += 1
        except BaseException as error:
            self.failure = error

    def more(self) -> None:
        """Waits for another round to end. Raises what went wrong."""
        before = self.rounds
        wait_until(lambda: self.rounds > before + 1 or self.failure, "rounds of lookups")
        if self.failure:
            raise self.failure

    def end(self) -> None:
        self._ending.set()
        self.join()


@pytest.mark.parametrize("config", [CPU, GPU, PEERS], ids=["cuda_host", "cuda_device", "shards"])
def test_a_killed_daemons_tables_are_adopted_while_a_rank_reads_on(folder: Path, config: dict[str, Any]) -> None:
    make_checkpoint(folder / "model", engram_vocab_size=1500, seed=11, every_code=True)
    reference = CheckpointReference(folder / "model")
    world_size = config.get("tp_size", 1)
    with ServiceManager(folder / "manager") as manager:
        node = Node(folder, folder / "model", {}, manager)
        node.config |= config
        try:
            daemon, _ = node.start()
            with (
                connect(daemon.endpoint, rank=0, world_size=world_size, device="cuda:0") as first,
                ExitStack() as stack,
            ):
                reading = Reading(first, reference)
                stack.callback(reading.end)
                reading.start()
                reading.more()
                for _ in range(RESTARTS):
                    daemon.kill()
                    reading.more()
                    daemon, status = node.start()
                    assert status.adopted, daemon.log
                    with connect(daemon.endpoint, rank=0, world_size=world_size, device="cuda:0") as second:
                        Asking(second, reference, torch.device("cuda", 0), torch.cuda.synchronize).everything()
                        wait_until(lambda: first.server_alive, "the first rank's new lease")
                    reading.more()
            verified = control(daemon, "verify")
            assert verified.returncode == 0, verified.stdout + verified.stderr
        finally:
            node.clean_up()
