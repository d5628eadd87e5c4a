"""Times lookups as a rank does them: fresh random rows at every repetition, warm.

Runs in `engram-ctl bench` only; brings torch.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import msgspec
import torch
import torch.distributed
from torch import Tensor

import engram_client
from engram_client.api import Table
from engram_client.client import MappedClient
from engram_client.control import query_status
from engram_client.errors import EngramError, InternalError, Unsupported
from engram_client.layout import ROW_BYTES, ROW_VALUES
from engram_client.protocol import Replication

WARM_UP = 3


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One path at one size. Times are of a whole lookup, as the caller waits for it."""

    device: str
    layer: int
    ids: str
    """`hashed`: one id a hash column, so that column paths may be used; `any`: without that promise."""
    placement: str
    replication: str
    lookup: str
    """`local` where the rank maps whole tables, `split reads` where several do and share out the reads."""
    ranks: int
    tokens: int
    rows: int
    repetitions: int
    median_us: float
    best_us: float
    worst_us: float
    rows_per_second: float
    bytes_per_second: float


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure; goes to every rank."""

    endpoint: str
    handover: str | None
    device: str
    tokens: tuple[int, ...]
    repetitions: int
    timeout: float
    split_ranks: int = 0
    """Of the group that shares out the reads of whole tables, which is measured beside one rank; 0 for none."""


def measure(order: Order, tell: Callable[[str], None] = lambda text: None) -> list[Measurement]:
    """One rank where the node holds whole tables, and `split_ranks` together; else all ranks of the group, each a
    process.

    Raises what `engram_client.connect` does, and Unsupported where the group spans several nodes.
    """
    status = query_status(order.endpoint, timeout=order.timeout, handover=order.handover)
    options = status.options
    if order.split_ranks:
        alone = msgspec.structs.replace(order, split_ranks=0)
        return _as_group(order.split_ranks, order) + _as_rank(0, 1, alone, tell)  # refused before time is spent
    if options is None or options.replication is Replication.PER_NODE or options.tp_size == 1:
        return _as_rank(0, 1, order, tell)
    if options.nnodes > 1:
        raise Unsupported(
            feature="a bench of tables that are split over several nodes",
            reason="it starts the ranks of this node only",
            remedy="measure with the engine itself",
        )
    return _as_group(options.tp_size, order)


def _as_group(size: int, order: Order) -> list[Measurement]:
    """The first rank's measurements: a collective ends together."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="engram-bench-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        ranks = [
            context.Process(target=_rank, args=(rank, size, order, f"{folder}/store", pipes[rank][1]), daemon=True)
            for rank in range(size)
        ]
        for rank, (_, theirs) in zip(ranks, pipes, strict=True):
            rank.start()
            theirs.close()  # so that a rank that dies ends its pipe
        try:
            answers = [_answer(ours) for ours, _ in pipes]
        finally:
            for rank in ranks:
                rank.terminate()
                rank.join()
    return answers[0]


def _answer(pipe: Connection) -> list[Measurement]:
    try:
        answer = pipe.recv()
    except EOFError as error:
        raise InternalError(doing="a bench", problem="a rank ended without a word") from error
    if isinstance(answer, BaseException):
        raise answer
    found: list[Measurement] = answer
    return found


def _rank(rank: int, size: int, order: Order, store: str, pipe: Connection) -> None:
    device = f"cuda:{rank}" if order.device.startswith("cuda") else order.device
    try:
        backend = "nccl" if device != "cpu" else "gloo"
        torch.distributed.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        pipe.send(_as_rank(rank, size, msgspec.structs.replace(order, device=device)))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except EngramError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(InternalError(doing=f"a bench as rank {rank}", problem=repr(error)[:500]))


def _as_rank(rank: int, size: int, order: Order, tell: Callable[[str], None] = lambda text: None) -> list[Measurement]:
    found = []
    with engram_client.connect(
        order.endpoint,
        rank=rank,
        world_size=size,
        device=order.device,
        timeout=order.timeout,
        handover=order.handover,
        split_reads=order.split_ranks > 1,
        name="engram-ctl bench",
    ) as client:
        for layer in client.layers:
            for hashed in (True, False):
                for count in order.tokens:
                    tell(f"{order.device}, layer {layer}, {'hashed' if hashed else 'ids'}: {count} tokens")
                    found.append(_time(client, layer, hashed, order, count))
    return found


def _ids(columns: Sequence[int], count: int, generator: torch.Generator) -> Tensor:
    """`[count, len(columns)]`: a random row of each hash column."""
    sizes = torch.tensor(columns)
    starts = sizes.cumsum(0) - sizes
    # torch.randint takes one bound only; 2**53 steps are fine enough for tables of 2**29 rows.
    return starts + (torch.rand(count, len(columns), generator=generator, dtype=torch.float64) * sizes).long()


def _time(client: MappedClient, layer: int, hashed: bool, order: Order, count: int) -> Measurement:
    table: Table = client.table(layer)
    device, columns = order.device, table.columns
    generator = torch.Generator().manual_seed(count)
    out = torch.empty(count, len(columns), ROW_VALUES, dtype=torch.bfloat16, device=device)
    times = []
    for turn in range(WARM_UP + order.repetitions):
        ids = _ids(columns, count, generator).to(device)
        _settle(device)
        started = time.perf_counter()
        table.lookup(ids, out, hashed=hashed)
        _settle(device)
        if turn >= WARM_UP:
            times.append((time.perf_counter() - started) * 1e6)
    median = statistics.median(times)
    rows = count * len(columns)
    options = client.options
    alone = "local" if client.world_size == 1 else str(options.lookup)
    return Measurement(
        device=device,
        layer=layer,
        ids="hashed" if hashed else "any",
        placement=options.placement,
        replication=options.replication,
        lookup="split reads" if order.split_ranks else alone,
        ranks=client.world_size,
        tokens=count,
        rows=rows,
        repetitions=order.repetitions,
        median_us=median,
        best_us=min(times),
        worst_us=max(times),
        rows_per_second=rows / median * 1e6,
        bytes_per_second=rows * ROW_BYTES / median * 1e6,
    )


def _settle(device: str) -> None:
    """Waits for the GPU: a launch returns before it is done."""
    if device != "cpu":
        torch.cuda.synchronize(device)
