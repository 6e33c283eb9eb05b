"""The class of the connector for embeddings, which vLLM loads. The class calls the scheduler half or the
worker half (``embeddings.py``) and catches errors. After an error, vLLM encodes the input itself.

As for KV, vLLM creates one connector object in its scheduler's process and one in each worker process. The
scheduler half makes the identities of embeddings, and sends them to the workers with its orders.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from tierstore.errors import TierStoreError
from tierstore.keys import Identity
from tierstore.sizing import embedding_worth
from tierstore.spec import KVSpec
from tierstore_connectors.common.counters import ConnectorCounters, added
from tierstore_connectors.common.facts import host_device
from tierstore_connectors.common.guard import ErrorLog, guarded, nothing
from tierstore_connectors.vllm.config import EncoderSettings
from tierstore_connectors.vllm.embeddings import EncoderScheduler, EncoderWork, EncoderWorker
from tierstore_connectors.vllm.identity import model_digest, weights_revision
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.metrics import PREFIX, CounterMetrics, CounterStats
from tierstore_connectors.vllm.watch import ChangeWatcher, watch_engines

# Counters of both halves, exported with the prefix ``vllm:tierstore_encoder_``.
_COUNTERS = {
    "lookups": "Inputs, such as images, that were looked up",
    "found": "Inputs whose embedding was found in the store, so that they were not encoded",
    "loaded_bytes": "Bytes of embeddings loaded",
    "late_lookups": "Lookups of embeddings that missed the deadline",
    "failed_loads": "Embeddings that were found but could not be loaded, so that they were computed",
    "saved_tokens": "Rows of embeddings saved",
    "not_saved_tokens": "Rows of embeddings that could not be stored",
    "errors": "Errors caught by the connector",
}
_log = logging.getLogger("vllm.tierstore")  # a child of vLLM's logger, so that vLLM's format applies


class EncoderStats(CounterStats, ECConnectorStats):
    """Counters of the connector for embeddings. vLLM finds the class through its base class."""


class EncoderMetrics(CounterMetrics, ECConnectorPromMetrics):
    """Export each counter of ``_COUNTERS`` as a Prometheus counter."""

    counters = _COUNTERS
    prefix = f"{PREFIX}encoder_"


@dataclass
class EncoderMetadata(ECConnectorMetadata):
    """The orders of the scheduler half to the workers for one step."""

    work: EncoderWork


@dataclass
class EncoderReport(ECConnectorWorkerMetadata):
    """The counters of a worker, which the worker sends to the scheduler's process."""

    counts: dict[str, float]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> ECConnectorWorkerMetadata:
        assert isinstance(other, EncoderReport), "the other report must come from this connector, too"
        return EncoderReport(added(self.counts, other.counts))


class TierStoreECConnector(ChangeWatcher, ECConnectorBase):
    """The connector that keeps embeddings in a tierstore daemon; see ``embeddings.py``."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self.errors = ErrorLog(_log)
        self.counters = ConnectorCounters()
        self._settings = EncoderSettings()
        self._scheduler: EncoderScheduler | None = None
        self._worker: EncoderWorker | None = None
        self._changed = False  # whether the weights may have changed since the last forget_everything
        self._open()

    # -- both halves ---------------------------------------------------------------------------------

    @guarded(nothing)
    def _open(self) -> None:
        config = self._vllm_config
        try:
            extra = config.ec_transfer_config.ec_connector_extra_config or {}
            self._settings = settings = EncoderSettings.parse(extra).named(config)
            if self._role is not ECConnectorRole.SCHEDULER:
                self._worker = EncoderWorker(
                    settings, self.errors, self.counters, saves=self.is_producer and _is_first_rank()
                )
                return
            lora = config.lora_config
            scheduler = EncoderScheduler(
                settings,
                _identities(config, settings),
                self.errors,
                self.counters,
                loads=self.is_consumer,
                saves=self.is_producer,
                adapters=lora is not None and bool(lora.enable_tower_connector_lora),
            )
            scheduler.connect(config.ec_transfer_config.mm_encoder_output_widths or ("image",))
            self._scheduler = scheduler
            watch_engines()
            _log.info("tierstore: embeddings go to %s", settings.store)
        except (TierStoreError, UnsupportedError) as error:
            self.errors.warn("the start", f"runs without the cache of embeddings: {error}")

    @guarded(nothing)
    def shutdown(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        worker, self._worker = self._worker, None
        for half in (scheduler, worker):
            if half is not None:
                half.close()

    def _counts(self) -> dict[str, float]:
        if errors := self.errors.unreported():
            self.counters.add("errors", errors)
        return self.counters.take()

    @guarded(nothing)
    def get_ec_connector_stats(self) -> EncoderStats | None:
        """Return the sums of the scheduler half's counters and the workers' reported counters."""
        counts = self._counts() if self._role is ECConnectorRole.SCHEDULER else {}
        return EncoderStats(counts) if counts else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EncoderStats:
        return EncoderStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> EncoderMetrics:
        return EncoderMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- the worker half ------------------------------------------------------------------------------

    @guarded(nothing)
    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        work = self._work()
        if work is not None and work.loads and self._worker is not None:
            self._worker.load(work, encoder_cache, _device())

    @guarded(nothing)
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        work = self._work()
        if work is not None and self._worker is not None:
            self._worker.save(work, encoder_cache, mm_hash)

    @guarded(lambda self, finished_req_ids: (None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """In an engine that only encodes, wait for the saves of a step, because the engine that uses the
        embeddings looks them up at once. Engines that also load embeddings do not wait."""
        work = self._work()
        if not self.is_consumer and work is not None and work.saves and self._worker is not None:
            self._worker.wait_saved(self._settings.load_s)
        return None, None

    @guarded(nothing)
    def build_connector_worker_meta(self) -> EncoderReport | None:
        counts = self._counts()
        return EncoderReport(counts) if counts else None

    def _work(self) -> EncoderWork | None:
        metadata = self._connector_metadata
        return metadata.work if isinstance(metadata, EncoderMetadata) else None

    # -- the scheduler half -----------------------------------------------------------------------------

    def _trusted(self) -> EncoderScheduler | None:
        """Return the scheduler half. If the weights may have changed, first make it forget all embeddings."""
        if self._changed and self._scheduler is not None:
            self._scheduler.forget_everything(uuid.uuid4().hex)
        self._changed = False
        return self._scheduler

    def weights_changed(self) -> None:
        self._changed = True

    @guarded(lambda self, request, num_computed_tokens: True)
    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        scheduler = self._trusted()
        return scheduler is None or scheduler.ready(request, num_computed_tokens)

    @guarded(lambda self, identifier: False)
    def has_cache_item(self, identifier: str) -> bool:
        scheduler = self._trusted()
        return scheduler is not None and scheduler.has(identifier)

    @guarded(nothing)
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, index)

    @guarded(lambda self, scheduler_output: EncoderMetadata(EncoderWork()))
    def build_connector_meta(self, scheduler_output: Any) -> EncoderMetadata:
        scheduler = self._scheduler
        return EncoderMetadata(scheduler.work(scheduler_output) if scheduler is not None else EncoderWork())

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.ec_connector_worker_meta
        if isinstance(report, EncoderReport):
            for name, count in report.counts.items():
                self.counters.add(name, count)

    @guarded(lambda self, request: (False, None))
    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None


def _identities(config: Any, settings: EncoderSettings) -> Callable[[str], Identity]:
    """Return a function that returns the identity of a modality's embeddings. An embedding has the width that
    vLLM has measured, or in engines that do not encode the width of the language model's inputs."""
    sampled = settings.hash_weights == "sample"
    weights = weights_revision(config, settings.namespace, sampled=sampled)
    model = model_digest(config, vllm.__version__, [], _device_name(), settings.namespace, os.environ)
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    widths = config.ec_transfer_config.mm_encoder_output_widths
    inputs = int(config.model_config.get_inputs_embeds_size())
    shape = config.model_config.hf_config.to_dict()

    def identity_of(modality: str) -> Identity:
        worth = embedding_worth(shape, modality)
        spec = KVSpec.embedding(width=widths.get(modality) or inputs, dtype=dtype, worth=worth)
        return Identity.of(spec, model=model, revision=weights.revision, codec="vllm-encoder")

    return identity_of


def _is_first_rank() -> bool:
    """Return whether this worker is the first of its tensor-parallel group. All workers of the group compute
    the same embeddings."""
    from vllm.distributed.parallel_state import get_tp_group

    return bool(get_tp_group().rank_in_group == 0)


def _device() -> str:
    """Return the device of vLLM's encoder cache in this worker."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    return f"{kind}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else kind


def _device_name() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return host_device()
    return f"{current_platform.device_type}-{current_platform.get_device_capability()}"
