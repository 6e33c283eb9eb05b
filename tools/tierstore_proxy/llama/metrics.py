"""The proxy's counters, at ``/tierstore/metrics``. ``/metrics`` is llama-server's own."""

from __future__ import annotations

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

_PREFIX = "tierstore_llama"


class LlamaOutcome(Enum):
    """The outcomes of looking up a request's prompt."""

    RESTORED = "restored"
    IN_SLOT = "in a slot"
    MISS = "not held"
    SHORT = "too short"
    BUSY = "all slots in use"
    UNSUITED = "not a single prompt of text"
    UNKNOWN = "server not identified"
    FAILED = "failed"


class LlamaMetrics:
    """The counters. Used on the event loop."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            f"{_PREFIX}_requests", "HTTP requests answered", ["endpoint", "status"], registry=registry
        )
        self.hang_ups = Counter(f"{_PREFIX}_hang_ups", "Clients that left before the end", registry=registry)
        self._outcomes = Counter(f"{_PREFIX}_prompts", "Prompts by outcome", ["outcome"], registry=registry)
        for outcome in LlamaOutcome:
            self._outcomes.labels(outcome.value)
        self.prompt_tokens = Counter(f"{_PREFIX}_prompt_tokens", "Tokens looked up", registry=registry)
        self.restored_tokens = Counter(
            f"{_PREFIX}_restored_tokens", "Tokens restored into slots", registry=registry
        )
        self.saved_tokens = Counter(f"{_PREFIX}_saved_tokens", "Tokens saved from slots", registry=registry)
        self.saves = Gauge(f"{_PREFIX}_saves_under_way", "Slots that are being saved", registry=registry)

    def went(self, outcome: LlamaOutcome) -> None:
        """Count a prompt."""
        self._outcomes.labels(outcome.value).inc()

    def text(self) -> bytes:
        """Return all counters in Prometheus's format."""
        return generate_latest(self._registry)
