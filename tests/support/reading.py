"""Ranks of one group that read on and on, each a process, for tests that end one of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from engram_client import connect
from tests.support.asking import Asking, hashed_ids
from tests.support.daemon import Daemon, wait_until
from tests.support.reference import CheckpointReference

START_LIMIT_S = 100.0
ANSWER_LIMIT_S = 60.0
TOKENS = 5

Enter = Callable[[int], tuple[torch.device, Callable[[], None]]]
"""Called in the process of a rank: where its ids and rows are, and what waits for that device."""


class ReadingRank:
    """A process that looks rows up on cuda:`rank` until it is told to end, and compares each with the checkpoint's."""

    def __init__(self, daemon: Daemon, checkpoint: Path, rank: int, world_size: int, enter: Enter) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        self.rank = rank
        self._pipe, theirs = context.Pipe()
        arguments = theirs, daemon.endpoint, str(checkpoint), rank, world_size, enter
        self._process = context.Process(target=_read_on, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    def answer(self, limit_s: float = ANSWER_LIMIT_S) -> int:
        """How many rounds it has read. Raises AssertionError with the rank's own words when something went wrong."""
        assert self._pipe.poll(limit_s), f"rank {self.rank} is silent"
        try:
            found = self._pipe.recv()
        except EOFError:
            raise AssertionError(f"rank {self.rank} died without a word") from None
        assert isinstance(found, int), f"rank {self.rank}: {found}"
        return found

    def ask(self, what: str) -> None:
        """more: an answer, when the round that it reads has ended; end: another, when it has closed its client."""
        self._pipe.send(what)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def join(self) -> None:
        self._process.join(ANSWER_LIMIT_S)
        assert self._process.exitcode == 0

    def clean_up(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _read_on(pipe: Connection, endpoint: str, checkpoint: str, rank: int, world_size: int, enter: Enter) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest does in its own process
    try:
        device, settle = enter(rank)
        reference = CheckpointReference(Path(checkpoint))
        rounds, ending = 0, False
        with connect(endpoint, rank=rank, world_size=world_size, device=f"cuda:{rank}") as client:
            asking = Asking(client, reference, device, settle)
            while not ending:
                for layer in client.layers:
                    ids = hashed_ids(client.table(layer).columns, TOKENS, rounds).to(device)
                    asking.same_tokens(layer, ids, True)
                    asking.stored(layer, ids)
                rounds += 1
                if rounds == 1:
                    pipe.send(rounds)
                if pipe.poll():
                    ending = pipe.recv() == "end"
                    if not ending:
                        pipe.send(rounds)
        pipe.send(rounds)
    except BaseException:
        pipe.send(traceback.format_exc())


@contextmanager
def group_of(daemon: Daemon, checkpoint: Path, world_size: int, enter: Enter) -> Iterator[list[ReadingRank]]:
    """All ranks of a group, reading."""
    ranks: list[ReadingRank] = []
    try:
        for rank in range(world_size):
            ranks.append(ReadingRank(daemon, checkpoint, rank, world_size, enter))
        for one in ranks:
            one.answer(START_LIMIT_S)
        yield ranks
    finally:
        for one in ranks:
            one.clean_up()


def more(ranks: Sequence[ReadingRank]) -> None:
    """Returns when each has begun and ended another round, of which every row was right."""
    for _ in range(2):  # the first answer may be about a round that had begun before
        for one in ranks:
            one.ask("more")
        for one in ranks:
            one.answer()


def one_killed_while_the_others_read(daemon: Daemon, checkpoint: Path, world_size: int, enter: Enter) -> None:
    """Kills a rank in the middle of a lookup: the others read on, its lease goes, and a new one takes its place."""
    with group_of(daemon, checkpoint, world_size, enter) as ranks:

        def held() -> set[int]:
            return {lease.rank for lease in daemon.status().leases}

        assert held() == set(range(world_size))
        *others, last = ranks
        last.kill()
        more(others)
        wait_until(lambda: held() == {other.rank for other in others}, "the end of the killed rank's lease")
        successor = ReadingRank(daemon, checkpoint, last.rank, world_size, enter)
        ranks.append(successor)
        successor.answer(START_LIMIT_S)
        everybody = [*others, successor]
        more(everybody)
        for one in everybody:
            one.ask("end")
        for one in everybody:
            one.answer()
            one.join()
        wait_until(lambda: not held(), "the end of all leases")
        assert daemon.process.poll() is None
