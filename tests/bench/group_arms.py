"""What each rank of groups.py does: attaches when all others do, then looks up in one kind of tables, arm by arm.

A rank is a process on a GPU of its own. Times are device time of graph replays, ids fresh before each; where all ranks
read at once, their GPUs begin each replay together.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from engram_client import Client, connect
from engram_client.gpu import prepare
from engram_client.lookup import collective as assembling
from engram_client.lookup import split as splitting
from engram_client.lookup.cuda import GpuRows
from engram_server import generate
from tests.bench.gpu_support import ColumnIds, replay_us, sglang_kernel
from tests.support.reference import dequantise

LAYER, SEED = 1, 0
"""Of the daemon's made table, whose rows follow from both."""
IDS_A_GRAPH = 400_000
HEAD_START_CYCLES = 1_000_000
"""Half a millisecond in which the host enqueues a replay that all GPUs then begin."""

Launch = Callable[[torch.Tensor], Any]
Arms = Callable[[torch.Tensor], dict[str, Launch]]
"""The arms by name, for a place for the rows."""


class Gpus:
    """The machine's GPUs, one a rank. Travels to the ranks; a test puts GPUs in its place that there are not."""

    def enter(self, rank: int) -> torch.device:
        """Where ids and rows of this process are."""
        warnings.simplefilter("default")  # torch's own are not ours to refuse
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)

    def group(self) -> dist.ProcessGroup | None:
        return dist.new_group(backend="nccl")

    def median_us(self, ids: ColumnIds, launch: Launch, group: dist.ProcessGroup | None, together: bool) -> float:
        """together: all ranks call this, and begin each replay at the same time."""
        mark = torch.zeros(1, device=ids.ids[0].device)

        def line_up() -> None:
            dist.all_reduce(mark, group=group)
            torch.cuda._sleep(HEAD_START_CYCLES)

        return replay_us(ids, launch, line_up=line_up if together else None)


@dataclass(frozen=True)
class Task:
    endpoint: str
    kind: str
    """A name in KINDS."""
    tokens: tuple[int, ...]
    attaches: int
    sglang: str = ""
    """Path of its engram_gather.py."""


class Time(NamedTuple):
    tokens: int
    arm: str
    us: float


class Report(NamedTuple):
    attach_ms: list[float]
    times: list[Time]


class Seat:
    """A rank's place at the table."""

    def __init__(self, rank: int, world_size: int, gpus: Gpus, task: Task) -> None:
        self.rank, self.world_size, self.gpus, self.task = rank, world_size, gpus, task
        self.device = gpus.enter(rank)
        prepare(rank)
        self.group: dist.ProcessGroup | None = None

    def connect(self, **options: Any) -> Client:
        name = f"cuda:{self.rank}"
        return connect(self.task.endpoint, rank=self.rank, world_size=self.world_size, device=name, **options)

    def attach_ms(self) -> list[float]:
        """Of each time that all ranks attached at once."""
        found = []
        for _ in range(self.task.attaches):
            dist.barrier()
            begin = time.perf_counter()
            client = self.connect()
            found.append(1e3 * (time.perf_counter() - begin))
            dist.barrier()
            client.close()
        return found

    def times(self, columns: tuple[int, ...], arms: Arms, *, together: bool) -> list[Time]:
        """Every arm at every number of tokens. Raises ValueError when one of ours gives other rows than were made."""
        found = []
        for tokens in self.task.tokens:
            out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device=self.device)
            for name, launch in arms(out).items():
                sets = ColumnIds(columns, tokens, max(4, min(50, IDS_A_GRAPH // (24 * tokens))), self.device)
                launch(sets.ids[0])
                if not name.startswith("SGLang"):  # which keeps other bits of a NaN
                    check(name, sets.ids[0], out)
                found.append(Time(tokens, name, self.gpus.median_us(sets, launch, self.group, together)))
        return found


def check(name: str, ids: torch.Tensor, out: torch.Tensor) -> None:
    """The rows of the first and the last token."""
    for at in (0, -1):
        rows = [dequantise(*generate.rows(LAYER, SEED, row, 1)) for row in ids[at].tolist()]
        if not np.array_equal(out[at].view(torch.int16).cpu().numpy(), np.concatenate(rows).view(np.int16)):
            raise ValueError(f"{name} gives other rows than were made")


def work(rank: int, world_size: int, gpus: Gpus, task: Task) -> Report:
    seat = Seat(rank, world_size, gpus, task)
    attach_ms = seat.attach_ms()
    seat.group = gpus.group()
    return Report(attach_ms, KINDS[task.kind](seat))


def collective(seat: Seat) -> list[Time]:
    kernel = sglang_kernel(seat.task.sglang)
    with ExitStack() as stack:
        with mock.patch.object(assembling, "SUM_UP_TO_IDS", 0):
            exchanging = stack.enter_context(seat.connect(group=seat.group)).table(LAYER)
        table = stack.enter_context(seat.connect(group=seat.group)).table(LAYER)
        (part,) = gpu_rows(table).parts
        values, scales = part.planes(gpu_rows(table).row_format)

        def arms(out: torch.Tensor) -> dict[str, Launch]:
            def theirs(ids: torch.Tensor) -> None:
                flat = out.view(-1, 256)
                kernel.engram_gather(values, scales, ids.view(-1), flat, 256, 32, part.start, part.stop)
                dist.all_reduce(flat, group=seat.group)

            found: dict[str, Launch] = {
                "collective (all-gather of stored rows)": lambda ids: exchanging.lookup(ids, out, hashed=True),
                "collective (as the client chooses)": lambda ids: table.lookup(ids, out, hashed=True),
                "zero-fill + all-reduce, our gather": lambda ids: table.lookup(ids, out),
            }
            return found if kernel is None else found | {"SGLang's gather + all-reduce": theirs}

        return seat.times(table.columns, arms, together=True)


def peer_read(seat: Seat) -> list[Time]:
    """Rank 0 alone, beside SGLang's kernel; then all at once."""
    with seat.connect(group=seat.group) as client:
        table = client.table(LAYER)
        theirs = sglang_peer_arm(seat, gpu_rows(table))

        def arms(out: torch.Tensor) -> dict[str, Launch]:
            found: dict[str, Launch] = {"peer_read": lambda ids: table.lookup(ids, out, hashed=True)}
            return found if theirs is None else found | {"SGLang's peer kernel": theirs(out)}

        found = [] if seat.rank else seat.times(table.columns, arms, together=False)
        dist.barrier()
        return found + seat.times(table.columns, one_arm("all ranks at once", table), together=True)


def per_node(seat: Seat) -> list[Time]:
    """Whole tables in host memory: each rank reads all rows over its own link, or a part of them."""
    with seat.connect() as client:
        table = client.table(LAYER)
        alone = one_arm("rank 0 alone", table)
        found = [] if seat.rank else seat.times(table.columns, alone, together=False)
        dist.barrier()
        found += seat.times(table.columns, one_arm("all ranks at once", table), together=True)
    with mock.patch.object(splitting, "SPLIT_FROM_IDS", 1):
        split = seat.connect(group=seat.group, split_reads=True)
    with split, seat.connect(group=seat.group, split_reads=True) as chosen:
        parts, table = split.table(LAYER), chosen.table(LAYER)

        def arms(out: torch.Tensor) -> dict[str, Launch]:
            return {
                "split reads": lambda ids: parts.lookup(ids, out, hashed=True),
                "split reads, by tokens": lambda ids: parts.lookup(ids, out),
                "split reads (as the client chooses)": lambda ids: table.lookup(ids, out, hashed=True),
            }

        return found + seat.times(table.columns, arms, together=True)


KINDS: dict[str, Callable[[Seat], list[Time]]] = {
    "collective": collective,
    "peer_read": peer_read,
    "per_node": per_node,
}


def one_arm(name: str, table: Any) -> Arms:
    return lambda out: {name: lambda ids: table.lookup(ids, out, hashed=True)}


def gpu_rows(table: Any) -> GpuRows:
    local = table.local
    if not isinstance(local, GpuRows):
        raise TypeError("no table on a GPU")
    return local


# SGLang's kernels, on the same memory


def sglang_peer_arm(seat: Seat, local: GpuRows) -> Callable[[torch.Tensor], Launch] | None:
    kernel = sglang_kernel(seat.task.sglang)
    if kernel is None:
        return None
    planes = [part.planes(local.row_format) for part in local.parts]
    starts = torch.tensor([part.start for part in local.parts], device=seat.device)
    weights = torch.tensor([v - part.start * 256 for (v, _), part in zip(planes, local.parts, strict=True)])
    scales = torch.tensor([s - part.start * 8 for (_, s), part in zip(planes, local.parts, strict=True)])
    weights, scales = weights.to(seat.device), scales.to(seat.device)
    return lambda out: lambda ids: kernel.engram_gather_peer(ids, out, weights, scales, starts, 256, 32)
