"""Prometheus metrics, made from one snapshot of the daemon at each scrape. Imported only when they are on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engram_client.protocol import LookupCounters, State, StatusReply
from engram_server.tally import Tally


class Snapshot(msgspec.Struct, frozen=True):
    """The daemon at one moment; `tally` and `lookups` are read by the caller's thread only."""

    status: StatusReply
    lookups: LookupCounters
    """Totals, clients that are gone included."""
    leases_granted: int
    attach_buckets: tuple[tuple[str, int], ...]
    attach_sum_s: float
    refused: dict[str, dict[str, int]]
    """How often, by the request's name and the error's."""
    verified: dict[str, int]
    verified_at: float

    @classmethod
    def of(cls, status: StatusReply, lookups: LookupCounters, leases_granted: int, tally: Tally) -> Snapshot:
        return cls(
            status,
            lookups,
            leases_granted,
            tuple(tally.attach_s.cumulative()),
            tally.attach_s.total,
            _nested(tally.refused),
            dict(tally.verified),
            tally.verified_at,
        )


def _nested(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (outer, inner), count in counts.items():
        found.setdefault(outer, {})[inner] = count
    return found


class Metrics:
    """`text(snapshot)` is a scrape."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._registry)

    def text(self, snapshot: Snapshot) -> bytes:
        own = CollectorRegistry(auto_describe=False)
        own.register(_Once(snapshot))
        return generate_latest(own) + generate_latest(self._registry)


class _Once(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            yield from family(self._snapshot)


def _state(now: Snapshot) -> Iterator[Metric]:
    status = now.status
    states = GaugeMetricFamily("engram_state", "1 for the state the daemon is in, 0 for the others", labels=["state"])
    for state in State:
        states.add_metric([state], status.state == state)
    yield states
    build = InfoMetricFamily("engram_build", "The daemon")
    build.add_metric([], {"version": status.version})
    yield build
    yield GaugeMetricFamily("engram_uptime_seconds", "Time since the daemon started", status.uptime_s)


def _load(now: Snapshot) -> Iterator[Metric]:
    load, report = now.status.load, now.status.report
    done, total = (load.done_bytes, load.total_bytes) if load else (0, 0)
    yield GaugeMetricFamily("engram_load_done_bytes", "Bytes done in the load's current phase", done)
    yield GaugeMetricFamily("engram_load_total_bytes", "Bytes of the load's current phase", total)
    if report is not None:
        yield GaugeMetricFamily("engram_load_seconds", "Wall time of the load", report.seconds)
        rate = report.bytes_per_second
        yield GaugeMetricFamily("engram_load_bytes_per_second", "Rows read, digested and stored", rate)


def _memory(now: Snapshot) -> Iterator[Metric]:
    labels = ["segment", "layer", "backing", "numa"]
    sizes = GaugeMetricFamily("engram_segment_bytes", "Memory of a segment", labels=labels)
    huge = GaugeMetricFamily("engram_segment_huge_bytes", "Of that, in pages of 2 MiB or more", labels=labels)
    for segment in now.status.segments:
        values = [segment.info.id, str(segment.info.layer_id), segment.info.backing, segment.numa]
        sizes.add_metric(values, segment.info.nbytes)
        huge.add_metric(values, segment.huge_bytes)
    yield sizes
    yield huge


def _tables(now: Snapshot) -> Iterator[Metric]:
    rows = GaugeMetricFamily("engram_table_rows", "Rows of a table", labels=["layer"])
    identity = InfoMetricFamily("engram_table_identity", "Digest of a table's content", labels=["layer"])
    for table in now.status.tables:
        layer = str(table.geometry.layer_id)
        rows.add_metric([layer], table.geometry.rows)
        identity.add_metric([layer], {"root": table.identity.root or ""})
    yield rows
    yield identity


def _clients(now: Snapshot) -> Iterator[Metric]:
    leases = now.status.leases
    yield GaugeMetricFamily("engram_leases", "Clients that are attached", now.status.lease_count)
    oldest = max((lease.age_s for lease in leases), default=0.0)
    yield GaugeMetricFamily("engram_oldest_lease_seconds", "Age of the oldest lease", oldest)
    ages = GaugeMetricFamily("engram_lease_age_seconds", "Age of a lease", labels=["lease", "name", "rank"])
    for lease in leases:
        ages.add_metric([str(lease.id), lease.name, str(lease.rank)], lease.age_s)
    yield ages
    yield CounterMetricFamily("engram_leases_granted", "Leases given so far", now.leases_granted)
    yield HistogramMetricFamily(
        "engram_attach_seconds",
        "How long clients took to connect, the wait for a load included",
        buckets=list(now.attach_buckets),
        sum_value=now.attach_sum_s,
    )
    refused = CounterMetricFamily("engram_refused", "Requests answered with an error", labels=["request", "code"])
    for request, errors in now.refused.items():
        for code, count in errors.items():
            refused.add_metric([request, code], count)
    yield refused


def _verification(now: Snapshot) -> Iterator[Metric]:
    verified = CounterMetricFamily("engram_verifications", "Digests of memory compared", labels=["result"])
    for result in ("ok", "failed"):
        verified.add_metric([result], now.verified.get(result, 0))
    yield verified
    yield GaugeMetricFamily("engram_last_verification_time_seconds", "When, as a Unix time", now.verified_at)


def _lookups(now: Snapshot) -> Iterator[Metric]:
    total = now.lookups
    for name, help_text, value in (
        ("rows", "Ids looked up by all clients, padding included", total.rows),
        ("invalid_ids", "Ids that named no row", total.invalid_ids),
        ("prefetch_hits", "Prefetches whose rows were there in time", total.prefetch_hits),
        ("prefetch_late", "Prefetches that had to be waited for", total.prefetch_late),
    ):
        yield CounterMetricFamily(f"engram_lookup_{name}", help_text, value)


FAMILIES: tuple[Callable[[Snapshot], Iterator[Metric]], ...] = (
    _state,
    _load,
    _memory,
    _tables,
    _clients,
    _verification,
    _lookups,
)
