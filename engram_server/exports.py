"""FABRIC handles of this node's segments, for ranks of other nodes that read them.

They exist only where `peer_read` spans nodes, and only here: they are in no status, log, manifest or metric. A
rank is given those of its own shards over its lease, and the ranks of a group exchange them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engram_client.errors import CudaCallFailed, FabricUnavailable, NotAllowedNow
from engram_client.protocol import FabricHandle, ResolvedOptions
from engram_server.leases import Grant
from engram_server.plan import Plan
from engram_server.segments import Segment
from engram_server.segments.cuda_device import CudaDeviceSegment

_REMEDY = 'set "lookup": "collective" on all nodes, or give them an IMEX domain (nvidia-imex and its channel)'
_RELOAD = "end this daemon with engram-ctl drain --free and start it again: it loads the tables into new memory"


class Exports:
    """The handles by segment id, or why there are none: `problem`, "" where nobody needs them."""

    def __init__(self, options: ResolvedOptions | None = None, problem: str = "", remedy: str = _REMEDY) -> None:
        self._options = options
        self._handles: dict[str, FabricHandle] = {}
        self._ranks: dict[str, int | None] = {}
        self.problem = problem
        self._remedy = remedy

    def __repr__(self) -> str:
        return f"<Exports of {len(self._handles)} segments{self.problem and ', unavailable: '}{self.problem}>"

    @classmethod
    def of(cls, plan: Plan, segments: Iterable[Segment], adopted: Collection[str] = ()) -> Exports:
        """Asks the driver, which is a matter of milliseconds a segment. Raises nothing: what fails is `problem`.

        adopted: ids of those that were imported by their descriptors, which a driver need not export again.
        """
        if not plan.options.reads_across_nodes:
            return cls()
        if plan.fabric_problem:
            return cls(plan.options, plan.fabric_problem)
        made = cls(plan.options)
        for segment in segments:
            if not isinstance(segment, CudaDeviceSegment):
                continue
            try:
                handle = FabricHandle(segment=segment.info.id, handle=segment.export_fabric())
            except CudaCallFailed as error:
                problem = f"{error.call} answers {error.name} for segment {segment.info.id}"
                if segment.info.id not in adopted:
                    return cls(plan.options, problem)
                problem += ", which this daemon took over from an earlier one"
                return cls(plan.options, problem, _RELOAD)
            made._handles[segment.info.id] = handle
            made._ranks[segment.info.id] = segment.info.rank
        return made

    def granted(self, grant: Grant) -> tuple[FabricHandle, ...]:
        """Those of the grant's own rank. Raises FabricUnavailable, or NotAllowedNow where nobody may want them."""
        if self._options is None:
            raise NotAllowedNow(request="export", state="not sharing memory with other nodes")
        if self.problem:
            raise FabricUnavailable(node_rank=self._options.node_rank, problem=self.problem, remedy=self._remedy)
        return tuple(
            self._handles[name] for name in grant.segments if name in self._handles and self._ranks[name] == grant.rank
        )
