"""The document ``/metrics`` for Prometheus, made from one snapshot of the daemon's statistics."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from tierstore.curve import CurveStats
from tierstore.daemon.stats import BOUNDS_S, DaemonStats, LatencyStats
from tierstore.explanation import MissReason


class StatsCollector(Collector):
    """Converts all numbers of a :class:`DaemonStats` to Prometheus metrics."""

    def __init__(self, stats: Callable[[], DaemonStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _gauge("uptime_seconds", "Seconds since the daemon started", stats.uptime_s)
        yield _gauge("ready", "Whether clients are served", stats.ready)
        yield from _tiers(stats)
        yield from _counters(stats)
        yield from _curve(stats.store.curve)
        yield from _service(stats)
        yield from _tenants(stats)
        for name, latency in stats.service.latency.items():
            yield _histogram(name, latency)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tierstore_{name}", help, value=float(value))


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"tierstore_{name}", help, value=float(value))


def _by(name: str, help: str, label: str, values: Mapping[str, float], *, counts: bool) -> Metric:
    kind = CounterMetricFamily if counts else GaugeMetricFamily
    family = kind(f"tierstore_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], float(value))
    return family


def _tiers(stats: DaemonStats) -> Iterator[Metric]:
    tiers = stats.store.tiers
    for name, help in (
        ("capacity_bytes", "Byte capacity of a tier"),
        ("used_bytes", "Bytes of slots in use"),
        ("pages", "Pages in a tier"),
        ("leased_pages", "Pages under at least one lease"),
    ):
        values = {tier: float(getattr(each, name)) for tier, each in tiers.items()}
        yield _by(f"tier_{name}", help, "tier", values, counts=False)
    health = {tier: float(each.condition.value == "online") for tier, each in stats.store.health.items()}
    yield _by("tier_online", "1 while a tier can be read and written", "tier", health, counts=False)


def _counters(stats: DaemonStats) -> Iterator[Metric]:
    for name, value in stats.store.counters.items():
        text = name.replace("_", " ")
        if name == "declined_tokens":
            yield _declined(value)
        elif name == "missed_tokens":
            yield _missed(value)
        elif isinstance(value, Mapping):
            yield _by(name, f"{text}, by tier", "tier", dict(value), counts=True)
        else:
            yield _counter(name, text, value)
    store = stats.store
    yield _gauge("index_pages", "Pages in the tree", store.pages)
    yield _gauge("pending_writes", "Pages that wait to be written to disk", store.pending_writes)
    yield _gauge("disk_writable", "Whether pages are written to disk", store.disk_writable)
    yield _counter("key_collisions", "Pages with an equal key and other tokens", store.key_collisions)
    for name, help in (
        ("events", "KV events published"),
        ("lost_changes", "Changes that were not reported in time"),
        ("replays", "Requests of followers for missed batches"),
        ("snapshots", "Requests for batches that were not kept any more"),
        ("unread_listings", "Reports of stored pages that a disk error cut short"),
    ):
        told = {each.model: getattr(each, name) for each in stats.events}
        label = f"kv_{name}" if name == "events" else f"kv_event_{name}"
        yield _by(label, help, "model", told, counts=True)
    if stats.cluster is not None:
        yield _gauge("cluster_online", "Whether the shared store answers", stats.cluster.online)
        yield _gauge("cluster_bytes_per_second", "Recent rate of fetched pages", stats.cluster.bytes_per_s)
        what = "Pages and bytes fetched and published, and errors"
        yield _by("cluster_events", what, "event", dict(stats.cluster.counts), counts=True)
    yield _counter("failed_tasks", "Mover tasks that failed because of a bug", store.failed_tasks)


def _missed(tokens: Any) -> Metric:
    """Return a counter for every reason, also for reasons with 0 tokens: Prometheus' ``rate`` ignores the
    first value of a counter, which would be lost for a counter that appears later."""
    counts = dict.fromkeys((reason.value for reason in MissReason), 0) | dict(tokens)
    what = "Tokens requested and not served, by reason"
    return _by("missed_tokens", what, "reason", counts, counts=True)


def _declined(tokens: Any) -> Metric:
    family = CounterMetricFamily(
        "tierstore_declined_tokens",
        "Tokens that were found and not loaded, by tier and reason",
        labels=["tier", "reason"],
    )
    for why, count in tokens.items():
        family.add_metric(why.split(), float(count))
    return family


def _curve(curve: CurveStats) -> Iterator[Metric]:
    yield _gauge("curve_ceiling", "Hit rate with unlimited memory", curve.ceiling)
    yield _gauge("curve_sampled", "Pages in the curve's sample", curve.sampled)
    now = {name: tier.hit_rate for name, tier in curve.tiers.items()}
    yield _by("curve_hit_rate", "Estimated hit rate of the tiers down to this one", "tier", now, counts=False)
    doubled = {
        name: tier.hit_rate + more.added_hit_rate
        for name, tier in curve.tiers.items()
        for more in tier.more
        if more.share == 1
    }
    yield _by(
        "curve_hit_rate_doubled",
        "Estimated hit rate with twice the capacity of this tier",
        "tier",
        doubled,
        counts=False,
    )


def _service(stats: DaemonStats) -> Iterator[Metric]:
    service, server = stats.service, stats.server
    yield _gauge("client_connections", "Connected clients", service.connections)
    yield _gauge("arena_connections", "Processes that have mapped the arena", server.arena_connections)
    for name, help in (
        ("leases", "Lookups that hold pages"),
        ("reservations", "Running saves"),
        ("reserved_bytes", "Arena bytes that clients are writing to"),
        ("sending_bytes", "Arena bytes on their way to clients over TCP"),
    ):
        yield _gauge(name, help, getattr(service, name))
    yield _by("requests", "Requests by message", "message", service.requests, counts=True)
    yield _by("refused", "Requests refused, by kind", "kind", service.refused, counts=True)
    for name, help in (
        ("clients_ended", "Client connections that have ended"),
        ("failed_requests", "Requests that failed because of a bug"),
        ("quota_evicted_pages", "Pages evicted because of their tenant's quota"),
        ("promised_lookups", "Lookups that waited for promised pages"),
        ("broken_promises", "Lookups whose promised pages did not all arrive in time"),
    ):
        yield _counter(name, help, getattr(service, name))
    for name, help in (
        ("received", "Messages received"),
        ("received_bytes", "Bytes received, without ZMQ's own overhead"),
        ("sent", "Answers sent"),
        ("malformed", "Received data that is not a message"),
        ("unsent", "Answers to clients that were gone or did not read"),
        ("silent_clients", "TCP clients that were silent for too long"),
        ("denied", "Clients rejected because of their key"),
    ):
        yield _counter(f"server_{name}", help, getattr(server, name))


def _tenants(stats: DaemonStats) -> Iterator[Metric]:
    tenants = stats.service.tenants
    asked = {name: each.lookup_tokens for name, each in tenants.items()}
    yield _by("tenant_lookup_tokens", "Tokens requested, by tenant", "tenant", asked, counts=True)
    hits = CounterMetricFamily(
        "tierstore_tenant_hit_tokens", "Tokens found, by tenant and tier", labels=["tenant", "tier"]
    )
    for name, each in tenants.items():
        for tier, tokens in each.hit_tokens.items():
            hits.add_metric([name, tier], float(tokens))
    yield hits
    used = {name: each.host_bytes for name, each in tenants.items()}
    yield _by("tenant_host_bytes", "Arena bytes, by tenant", "tenant", used, counts=False)
    pinned = {name: each.pinned_bytes for name, each in tenants.items()}
    yield _by("tenant_pinned_bytes", "Bytes of pinned pages, by tenant", "tenant", pinned, counts=False)


def _histogram(name: str, latency: LatencyStats) -> Metric:
    cumulative = list(itertools.accumulate(latency.counts))
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    family = HistogramMetricFamily(f"tierstore_{name}_seconds", f"Seconds from request to answer: {name}")
    family.add_metric([], list(zip(bounds, map(float, cumulative), strict=True)), latency.sum_s)
    return family


class MetricsText:
    """Renders the document of ``/metrics``."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, stats: Callable[[], DaemonStats]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(StatsCollector(stats))

    def __call__(self) -> bytes:
        return generate_latest(self._registry)
