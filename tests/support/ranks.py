"""Real processes as the ranks of a torch.distributed group, for tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


class RankFailed(Exception):
    """A rank raised; the text is its traceback, `error` the exception itself where it could be sent."""

    def __init__(self, rank: int, trace: str, error: BaseException | None = None) -> None:
        super().__init__(f"rank {rank}:\n{trace}")
        self.rank = rank
        self.error = error


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60) -> list[Any]:
    """`function(rank, world_size, *args)` in `world_size` processes that form a gloo group; their results.

    function, args and results are pickled: function is at the top level of a module. The first rank that
    raises, dies (RankFailed) or is late (TimeoutError) ends all the others.
    """
    context = multiprocessing.get_context("forkserver")
    # Only the first call pays for importing torch; 32 ranks then start in a second.
    context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
    deadline = time.monotonic() + timeout_s
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="engram-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(rank, world_size, folder, timeout_s, theirs, function, args), daemon=True
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes[ours] = rank
            return _collected(pipes, world_size, deadline)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _collected(pipes: dict[Connection, int], world_size: int, deadline: float) -> list[Any]:
    results: list[Any] = [None] * world_size
    pending = set(pipes)
    while pending:
        ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(pipes[pipe] for pipe in pending)} of {world_size} did not finish")
        for pipe in ready:
            rank = pipes[pipe]
            try:
                good, result, trace = pipe.recv()
            except EOFError:
                raise RankFailed(rank, "the process died without a word") from None
            if not good:
                raise RankFailed(rank, trace, result)
            results[rank] = result
            pending.discard(pipe)
    return results


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve must not matter
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as pytest does in its own process
    try:
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )
        result = function(rank, world_size, *args)
        dist.barrier()  # nobody leaves while others still talk to it
        pipe.send((True, result, ""))
    except BaseException as error:
        trace = traceback.format_exc()
        try:
            pickle.dumps(error)
            pipe.send((False, error, trace))
        except Exception:
            pipe.send((False, None, trace))
