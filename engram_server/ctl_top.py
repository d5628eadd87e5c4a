"""`engram-ctl top`: state, memory and clients with their lookups per second, again and again."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from engram_client.control import query_status
from engram_client.errors import EXIT_OK
from engram_client.protocol import LeaseStatus, State, StatusReply
from engram_server.ctl_common import add_endpoint, add_json, endpoint_of
from engram_server.findings import gib

if TYPE_CHECKING:
    from rich.console import Group


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("top", help="state, memory and clients with their lookups, refreshed")
    add_endpoint(parser)
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="(default: %(default)s)")
    parser.add_argument("--count", type=int, metavar="N", help="end after N looks (default: at Ctrl-C)")
    add_json(parser)
    parser.set_defaults(run=run)


class Sample(msgspec.Struct, frozen=True):
    """One look; `rows_per_second` by lease since the look before it."""

    status: StatusReply
    rows_per_second: dict[int, float]


def samples(options: argparse.Namespace) -> Iterator[Sample]:
    endpoint, handover = endpoint_of(options)
    before: dict[int, int] = {}
    looked = time.monotonic()
    made = 0
    while options.count is None or made < options.count:
        status = query_status(endpoint, timeout=options.timeout, handover=handover)
        now = time.monotonic()
        rates = {lease.id: _rate(lease, before, now - looked) for lease in status.leases}
        before, looked = {lease.id: lease.lookups.rows for lease in status.leases}, now
        yield Sample(status, rates)
        made += 1
        if made != options.count:
            time.sleep(max(options.every, 0.05))


def _rate(lease: LeaseStatus, before: dict[int, int], seconds: float) -> float:
    if lease.id not in before or seconds <= 0:
        return 0.0
    return max(0, lease.lookups.rows - before[lease.id]) / seconds


def run(options: argparse.Namespace) -> int:
    try:
        if options.json:
            for sample in samples(options):
                print(json.dumps(msgspec.to_builtins(sample, str_keys=True)), flush=True)
        else:
            _watch(options)
    except KeyboardInterrupt:
        pass
    return EXIT_OK


def _watch(options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    with Live(console=console, auto_refresh=False, screen=console.is_terminal and options.count is None) as live:
        for sample in samples(options):
            live.update(picture(sample), refresh=True)


def picture(sample: Sample) -> Group:
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    status = sample.status
    head = f"[bold]{status.state}[/]  pid {status.pid}, up {status.uptime_s:.0f} s"
    if status.state is State.LOADING and status.load is not None:
        done = 100 * status.load.done_bytes / max(status.load.total_bytes, 1)
        head += f"  {status.load.phase} {done:.0f} % of {gib(status.load.total_bytes)}"
    total = sum(segment.info.nbytes for segment in status.segments)
    huge = sum(segment.huge_bytes for segment in status.segments)
    head += f"\n{len(status.segments)} segments, {gib(total)}, {100 * huge / max(total, 1):.0f} % in huge pages"
    clients = Table("lease", "name", "rank", "device", "age", "rows", "rows/s", "invalid", "prefetch hits", "late")
    for lease in status.leases:
        looked = lease.lookups
        clients.add_row(
            str(lease.id),
            escape(lease.name),
            f"{lease.rank} of {lease.world_size}",
            escape(lease.device),
            f"{lease.age_s:.0f} s",
            f"{looked.rows:,}",
            f"{sample.rows_per_second[lease.id]:,.0f}",
            f"{looked.invalid_ids:,}",
            f"{looked.prefetch_hits:,}",
            f"{looked.prefetch_late:,}",
        )
    return Group(head, clients)
