"""The counts (``stats.py``) as vLLM carries, logs and exports them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from tierstore_connectors.vllm.stats import HELP, added

_PREFIX = "vllm:tierstore_"


class TierStoreStats(KVConnectorStats):
    """Counts since the last step, or of several steps and workers together."""

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return TierStoreStats(added(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return {f"tierstore {name}": round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class TierStoreProm(KVConnectorPromMetrics):
    """A counter for each count: ``vllm:tierstore_loaded_tokens`` and so on."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=labelnames)
            for name, text in HELP.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            counter = self._counters.get(name)
            if counter is not None:
                counter.labels(*labels).inc(count)
