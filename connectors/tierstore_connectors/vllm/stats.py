"""What the connector counts, in the form in which vLLM carries and shows it.

vLLM collects what the workers and the scheduler have counted since the last step, adds it up, logs it with
its own throughput line, and offers it to Prometheus.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

HELP: Mapping[str, str] = {
    "lookups": "Prompts looked up",
    "lookup_tokens": "Tokens asked for",
    "found_tokens": "Tokens that were held",
    "promised_tokens": "Tokens that vLLM was told can be loaded",
    "late_lookups": "Lookups that were not answered in time",
    "loads": "Loads of requests that came in full",
    "loaded_tokens": "Tokens loaded into KV blocks",
    "loaded_bytes": "Bytes loaded into KV blocks",
    "load_seconds": "Seconds from the order to the last byte, all loads together",
    "failed_loads": "Loads that did not come in full: vLLM computed instead",
    "saves": "Saves that have ended",
    "saved_tokens": "Tokens that are stored, new or already there",
    "not_saved_tokens": "Tokens that could not be stored",
    "fenced_saves": "Saves given up because vLLM needed their blocks",
    "faults": "Errors that were caught",
}


class Counts:
    """Since the last :meth:`take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """What has been counted; counting begins anew."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts


def added(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """The sums of both."""
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
