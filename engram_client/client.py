"""connect(): attach to the node's daemon, map its tables, hold the lease."""

from __future__ import annotations

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from engram_client.control import ControlConnection
from engram_client.counters import Counters, Reporter
from engram_client.errors import (
    ClientClosed,
    ConnectTimeout,
    DeviceUnsupported,
    ForkedClient,
    RankInvalid,
    TransferCut,
    UnknownLayer,
)
from engram_client.handover import REPLY_LEAST_S, HandoverConnection
from engram_client.identity import TableIdentity
from engram_client.lease import Lease
from engram_client.mapping.segments import CpuMapping, map_for_cpu
from engram_client.protocol import (
    DEFAULT_ENDPOINT,
    Attach,
    Attached,
    Progress,
    ResolvedOptions,
    TableInfo,
    handover_path,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from engram_client.table import MappedTable


def connect(
    endpoint: str = DEFAULT_ENDPOINT,
    *,
    rank: int,
    world_size: int,
    device: str = "cpu",
    group: ProcessGroup | None = None,
    timeout: float = 60.0,
    layers: Sequence[int] | None = None,
    identity: Mapping[int, TableIdentity | str] | None = None,
    strict: bool = False,
    handover: str | None = None,
    name: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> MappedClient:
    """Attaches to the daemon at `endpoint` and maps its tables: see `engram_client.api.Connect`."""
    if not 0 <= rank < world_size:
        raise RankInvalid(rank=rank, world_size=world_size)
    if device != "cpu":
        raise DeviceUnsupported(device=device)
    started = time.monotonic()
    deadline = started + timeout
    request = Attach(
        rank=rank,
        world_size=world_size,
        device=device,
        name=_printable(name or os.path.basename(sys.argv[0] or sys.executable)),
        layers=None if layers is None else tuple(layers),
        # The key says whose identity is demanded; another table's identity under it is a demand that fails.
        identity=tuple(
            msgspec.structs.replace(demand, layer_id=layer)
            for layer, demand in (identity or {}).items()
            if isinstance(demand, TableIdentity)
        ),
        roots={str(layer): d for layer, d in (identity or {}).items() if isinstance(d, str)},
        wait=timeout > 0,
    )
    lease = HandoverConnection.open(handover_path(endpoint, handover), timeout)
    try:
        attached = _attach(endpoint, lease, request, deadline, timeout, on_progress)
        descriptors = lease.redeem(attached.ticket, max(deadline - time.monotonic(), REPLY_LEAST_S))
        mappings = _map(attached.tables, descriptors)
    except BaseException:
        lease.close()
        raise
    again = functools.partial(_renew, endpoint, handover, _same_tables(request, attached))
    held = Lease(lease, again)
    counters = Counters()
    reporter = Reporter(endpoint, lambda: held.address, counters, time.monotonic() - started)
    return MappedClient(endpoint, rank, world_size, attached, held, mappings, group, strict, counters, reporter)


def _same_tables(request: Attach, attached: Attached) -> Attach:
    """The request for a lease on exactly what `attached` handed out; it never waits for a load."""
    return msgspec.structs.replace(
        request,
        layers=tuple(table.geometry.layer_id for table in attached.tables),
        identity=tuple(table.identity for table in attached.tables),
        roots={},
        wait=False,
    )


def _renew(endpoint: str, handover: str | None, request: Attach) -> HandoverConnection:
    """A new lease. Its descriptors are not needed: the memory is mapped."""
    lease = HandoverConnection.open(handover_path(endpoint, handover), 0)
    try:
        attached = _attach(endpoint, lease, request, time.monotonic(), 0, None)
        for descriptor in lease.redeem(attached.ticket, REPLY_LEAST_S).values():
            os.close(descriptor)
    except BaseException:
        lease.close()
        raise
    return lease


def _printable(name: str) -> str:
    """A program's name need not be text: its odd bytes are spelled out, and the message has room for 64."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")[:64]


def _attach(
    endpoint: str,
    lease: HandoverConnection,
    request: Attach,
    deadline: float,
    timeout: float,
    on_progress: Callable[[Progress], None] | None,
) -> Attached:
    with ControlConnection(endpoint, lease) as control:
        left = max(deadline - time.monotonic(), REPLY_LEAST_S)
        for reply in control.request(request, left, "waiting for the tables"):
            if isinstance(reply, Attached):
                if reply.epoch != lease.epoch:
                    raise TransferCut(doing="attaching (the daemon was replaced meanwhile)")
                return reply
            if isinstance(reply, Progress) and on_progress is not None:
                on_progress(reply)
    raise ConnectTimeout(timeout_s=timeout, doing="waiting for the tables", cause="no reply")


def _map(tables: Sequence[TableInfo], descriptors: dict[str, int]) -> dict[str, CpuMapping]:
    """Maps every segment read-only; all or none. Closes the descriptors: a mapping needs none."""
    try:
        return map_for_cpu([segment for table in tables for segment in table.segments], descriptors)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


class MappedClient:
    """A rank's mapped tables and its lease on them: see `engram_client.api.Client`."""

    def __init__(
        self,
        endpoint: str,
        rank: int,
        world_size: int,
        attached: Attached,
        lease: Lease,
        mappings: dict[str, CpuMapping],
        group: ProcessGroup | None,
        strict: bool,
        counters: Counters,
        reporter: Reporter,
    ) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._world_size = world_size
        self._options = attached.options
        self._infos = {info.geometry.layer_id: info for info in attached.tables}
        self._lease = lease
        self._mappings = mappings
        self._group = group
        self._strict = strict
        self._counters = counters
        self._reporter = reporter
        self._tables: dict[int, MappedTable] = {}
        self._owner_pid = os.getpid()
        self._closed = False
        # A client that is dropped without close() gives its lease up all the same.
        weakref.finalize(self, lease.close)
        weakref.finalize(self, reporter.close)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"layers {list(self._infos)}"
        return f"<engram client, rank {self._rank} of {self._world_size} at {self._endpoint}: {state}>"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def options(self) -> ResolvedOptions:
        return self._options

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self._infos)

    @property
    def server_alive(self) -> bool:
        return not self._closed and self._owner_pid == os.getpid() and self._lease.alive

    @property
    def stale(self) -> bool:
        return self._lease.stale

    def table(self, layer_id: int) -> MappedTable:
        self.check_usable(f"table {layer_id}")
        if layer_id not in self._infos:
            raise UnknownLayer(layer_id=layer_id, served=list(self._infos))
        if layer_id not in self._tables:
            from engram_client.table import MappedTable  # brings torch, which a rank has and a tool may not

            info = self._infos[layer_id]
            (segment,) = info.segments
            made = MappedTable(
                info,
                self._mappings[segment.id].view,
                self._rank,
                self._world_size,
                self._group,
                self._strict,
                self.check_usable,
                self._counters,
                self._reporter.tick,
            )
            return self._tables.setdefault(layer_id, made)  # another thread may have been faster
        return self._tables[layer_id]

    def check_usable(self, what: str) -> None:
        """Raises ForkedClient in a forked child and ClientClosed after close()."""
        if os.getpid() != self._owner_pid:
            raise ForkedClient(owner=self._owner_pid)
        if self._closed:
            raise ClientClosed(what=what)

    def close(self) -> None:
        self._closed = True  # first, so that no lookup starts while tables go
        for table in list(self._tables.values()):
            table.close()
        for mapping in self._mappings.values():
            mapping.close()
        self._reporter.close()
        self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
