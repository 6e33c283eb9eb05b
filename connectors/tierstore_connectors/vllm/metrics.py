"""Base classes for the statistics and metrics that vLLM collects from the connectors for KV and
embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tierstore_connectors.common.counters import added

PREFIX = "vllm:tierstore_"


class CounterStats:
    """Counters of one step and worker, or sums over several steps and workers."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data = data or {}

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: Any) -> Any:
        return type(self)(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return {f"tierstore {name}": round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class CounterMetrics:
    """Export each counter of ``counters``, by name and description, as a Prometheus counter."""

    counters: ClassVar[Mapping[str, str]]
    prefix: ClassVar[str]

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  # type: ignore[call-arg]
        self._exported = {
            name: self._counter_cls(name=self.prefix + name, documentation=text, labelnames=labelnames)  # type: ignore[attr-defined]
            for name, text in self.counters.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]  # type: ignore[attr-defined]
        for name, count in transfer_stats_data.items():
            if name in self._exported:
                self._exported[name].labels(*labels).inc(count)
