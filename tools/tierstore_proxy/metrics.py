"""``/metrics``: the proxy's counters, and the current requests at its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tierstore_proxy.upstream import Upstream

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_PREFIX = "tierstore_proxy"


class Outcome(Enum):
    """The route of a request, with the reason if it went to a decode engine alone."""

    HANDED_OVER = "handed over"
    HELD = "held or short"
    UNSUITED = "several prompts, or none that is known"
    NO_PREFILL = "no prefill engine is up"
    LATE = "prefill was late"
    FAILED = "prefill failed"
    REFUSED = "prefill refused"


class ProxyMetrics:
    """The proxy's counters. Used on the event loop."""

    def __init__(self, engines: Sequence[Upstream]) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            f"{_PREFIX}_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self.hang_ups = Counter(f"{_PREFIX}_hang_ups", "Clients that left before the end", registry=registry)
        self._ways = Counter(f"{_PREFIX}_ways", "Requests by their route", ["way"], registry=registry)
        for way in Outcome:
            self._ways.labels(way.value)
        self.retried = Counter(
            f"{_PREFIX}_retried", "Requests sent to another decode engine after a failure", registry=registry
        )
        self.cut_off = Counter(
            f"{_PREFIX}_cut_off", "Answers that an engine did not finish, or not in time", registry=registry
        )
        self.prompt_tokens = Counter(
            f"{_PREFIX}_prompt_tokens", "Prompt tokens, some estimated from text", registry=registry
        )
        self.held_tokens = Counter(
            f"{_PREFIX}_held_tokens", "Prompt tokens known to be at the decode engine", registry=registry
        )
        self.untokenized = Counter(
            f"{_PREFIX}_untokenized", "Prompts that no engine tokenized in time", registry=registry
        )
        self.prefill_s = Histogram(
            f"{_PREFIX}_prefill_seconds",
            "Duration of prefills handed over",
            buckets=_SECONDS,
            registry=registry,
        )
        self.first_byte_s = Histogram(
            f"{_PREFIX}_first_byte_seconds",
            "Time to the first byte of answers, prefill included",
            buckets=_SECONDS,
            registry=registry,
        )
        self.request_s = Histogram(
            f"{_PREFIX}_request_seconds", "Duration of whole answers", buckets=_SECONDS, registry=registry
        )
        registry.register(_Engines(engines))

    def went(self, way: Outcome) -> None:
        """Count a request by its route."""
        self._ways.labels(way.value).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's format."""
        return generate_latest(self._registry)


class _Engines(Collector):
    def __init__(self, engines: Sequence[Upstream]) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "url"]
        up = GaugeMetricFamily(f"{_PREFIX}_up", "Whether an engine answers", labels=labels)
        requests = GaugeMetricFamily(
            f"{_PREFIX}_requests_in_progress", "Requests running at an engine", labels=labels
        )
        tokens = GaugeMetricFamily(
            f"{_PREFIX}_queued_tokens", "Prompt tokens of these requests", labels=labels
        )
        failures = CounterMetricFamily(f"{_PREFIX}_failures", "Failures of an engine", labels=labels)
        for each in self._engines:
            labelled = [each.role, each.url]
            up.add_metric(labelled, float(not each.problem))
            requests.add_metric(labelled, each.requests)
            tokens.add_metric(labelled, each.tokens)
            failures.add_metric(labelled, each.failures)
        yield from (up, requests, tokens, failures)
