"""``/metrics``: the server's counters, and a snapshot of the engine and its store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore.stats import StoreStats
from tierstore.tiers.beyond import OverflowStats
from tierstore_engine.outputs import Completion, EngineStats, WaitReason

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PREFIX = "tierstore_engine"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of the engine and its store at one moment. ``store`` is None if there is no store, or if it
    did not answer."""

    engine: EngineStats
    store: StoreStats | None
    requests: int
    queued_tokens: int
    step_errors: int


class ServerMetrics:
    """The server's counters. Use it on the event loop; :meth:`text` may run on any thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        self.requests = Counter(
            f"{_PREFIX}_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self.refused = Counter(
            f"{_PREFIX}_refused_requests", "HTTP requests refused because of their number", registry=registry
        )
        self.hang_ups = Counter(f"{_PREFIX}_hang_ups", "Clients that left before the end", registry=registry)
        self._seconds = Histogram(
            f"{_PREFIX}_request_seconds", "Duration of answered requests", buckets=_SECONDS, registry=registry
        )
        self._ttft = Histogram(
            f"{_PREFIX}_ttft_seconds", "Time to first token", buckets=_SECONDS, registry=registry
        )
        self._prompt_tokens = Counter(f"{_PREFIX}_prompt_tokens", "Prompt tokens", registry=registry)
        self._cached = Counter(
            f"{_PREFIX}_cached_tokens", "Prompt tokens that came from the cache", ["tier"], registry=registry
        )
        self._started = Gauge(
            f"{_PREFIX}_start_time_seconds", "Start of the server, since the epoch", registry=registry
        )
        self._started.set_to_current_time()

    def served(self, seconds: float, first: list[Completion]) -> None:
        """Count an answered request. ``first`` has one continuation of each of its prompts."""
        self._seconds.observe(seconds)
        for completion in first:
            metrics = completion.metrics
            self._prompt_tokens.inc(metrics.prompt_tokens)
            if completion.tokens:
                self._ttft.observe(metrics.ttft_s)
            for tier, tokens in metrics.reused_by_tier.items():
                self._cached.labels(tier).inc(tokens)

    def text(self, snapshot: Snapshot) -> bytes:
        """Return all metrics in Prometheus's format."""
        current = CollectorRegistry(auto_describe=False)
        current.register(_SnapshotCollector(snapshot))
        return generate_latest(self._registry) + generate_latest(current)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot, engine = self._snapshot, self._snapshot.engine
        for name, help, count in (
            ("steps", "Batches computed", engine.steps),
            ("computed_tokens", "Tokens computed, drafts included", engine.computed_tokens),
            ("generated_tokens", "Tokens generated", engine.generated_tokens),
            ("drafted_tokens", "Tokens drafted", engine.drafted_tokens),
            ("accepted_tokens", "Drafted tokens that were accepted", engine.accepted_tokens),
            ("preemptions", "Sequences preempted to free their pages", engine.preemptions),
            ("late_requests", "Requests refused because of their deadlines", engine.late_requests),
            ("step_errors", "Steps that failed", snapshot.step_errors),
            ("encoded_images", "Images that the encoder has computed", engine.encoded_images),
            ("found_images", "Images whose embedding the store had", engine.found_images),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", help, value=count)
        for name, help, value in (
            ("http_requests_in_progress", "HTTP requests running or waiting", snapshot.requests),
            ("queued_tokens", "Prompt tokens of these requests", snapshot.queued_tokens),
            ("waiting_sequences", "Sequences without pages", engine.waiting),
            ("running_sequences", "Sequences with pages", engine.admitted),
            ("pages", "Pages of the pool", engine.total_pages),
            ("available_pages", "Pages that are free, or cached and unused", engine.available_pages),
            ("shared_pages", "Pages saved by sharing among forks", engine.shared_pages),
            (
                "longest_overtaken_seconds",
                "Longest time for which a request was overtaken",
                engine.longest_overtaken_s,
            ),
        ):
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", help, value=value)
        reasons = GaugeMetricFamily(
            f"{_PREFIX}_waiting_for", "Sequences without pages, by what they wait for", labels=["reason"]
        )
        for reason in WaitReason:
            reasons.add_metric([reason.value], engine.waiting_for.get(reason, 0))
        yield reasons
        if engine.overflow is not None:
            yield from _of_overflow(engine.overflow)
        if snapshot.store is not None:
            yield from _of_store(snapshot.store)


def _of_overflow(stats: OverflowStats) -> Iterator[Metric]:
    for name, help, value in (
        ("overflow_bytes", "Size of the overflow file", stats.file_bytes),
        ("overflow_pages", "Pages whose content is only in the overflow file", stats.pages),
        ("overflow_host_pages", "Pages of a GPU's pool whose content is in host memory", stats.host_pages),
        ("overflow_failed", "Whether the overflow file takes no more pages", int(stats.failed)),
    ):
        yield GaugeMetricFamily(f"{_PREFIX}_{name}", help, value=value)
    for name, help, value in (
        ("overflow_read_bytes", "Bytes read from the overflow file", stats.read_bytes),
        ("overflow_written_bytes", "Bytes written to the overflow file", stats.written_bytes),
        ("overflow_lost_pages", "Pages that the overflow file did not return", stats.lost_pages),
    ):
        yield CounterMetricFamily(f"{_PREFIX}_{name}", help, value=value)


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    pages = GaugeMetricFamily(f"{_PREFIX}_store_pages", "Pages in a tier", labels=["tier"])
    used = GaugeMetricFamily(f"{_PREFIX}_store_used_bytes", "Bytes in use in a tier", labels=["tier"])
    for tier, each in stats.tiers.items():
        pages.add_metric([tier], each.pages)
        used.add_metric([tier], each.used_bytes)
    yield pages
    yield used
    pending = stats.pending_saves + stats.pending_writes
    yield GaugeMetricFamily(f"{_PREFIX}_store_pending_pages", "Pages being saved", value=pending)
    for name in ("saved_pages", "not_stored_pages", "disk_written_pages", "disk_dropped_pages"):
        value = stats.counters.get(name)
        if isinstance(value, int | float):
            yield CounterMetricFamily(
                f"{_PREFIX}_store_{name}", f"{name} since the store was opened", value=value
            )
