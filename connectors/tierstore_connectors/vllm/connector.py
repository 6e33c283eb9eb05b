"""The connector class that vLLM loads. The class calls the scheduler half or the worker half and catches
errors.

If a method raises, a fallback returns the result of an empty cache. vLLM waits for every promised load, and
each load must be reported exactly once. So if an error occurs before the scheduler half has ordered a load,
the worker is ordered to refuse the load. If an error occurs in the worker, the worker reports the load as
failed.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager

from tierstore.errors import TierStoreError
from tierstore.keys import Identity
from tierstore_connectors.common import handover
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.explaining import MISSED
from tierstore_connectors.common.guard import ErrorLog, guarded, nothing
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.groups import joined, read_groups
from tierstore_connectors.vllm.identity import Weights, hashes_are_private, weights_revision
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.metrics import PREFIX, CounterMetrics, CounterStats
from tierstore_connectors.vllm.orders import LoadReport, Rank, Shard, StepWork
from tierstore_connectors.vllm.scheduler import SchedulerHalf
from tierstore_connectors.vllm.watch import ChangeWatcher, watch_engines
from tierstore_connectors.vllm.worker import Results, WorkerHalf

# vLLM's MultiConnector finds the statistics class only through the registered connector name.
with suppress(ValueError):  # already registered
    KVConnectorFactory.register_connector("TierStoreConnector", __name__, "TierStoreConnector")

_REPORTS_REQUESTS = "get_transfer_results" in vars(KVConnectorBase_V1)  # from vLLM 0.30 on
_OFFERS_STATES = "take_boundary_state_offloads" in vars(KVCacheManager)  # from vLLM 0.32 on
_FIXED_SEED = "resolve_none_hash_seed" in vars(kv_cache_utils)  # from vLLM 0.29 on


# Counters of both halves, exported as ``vllm:tierstore_loaded_tokens`` and so on.
_COUNTERS: Mapping[str, str] = {
    "lookups": "Prompts looked up",
    "lookup_tokens": "Tokens of the prompts looked up",
    "found_tokens": "Tokens found in the store",
    "promised_tokens": "Tokens promised to vLLM as loadable",
    "declined_tokens": "Tokens found on disk but computed, because computing is faster",
    "handed_over_tokens": "Prompt tokens promised to the decode engine that continues the prompt",
    "expected_tokens": "Tokens promised by another engine",
    "missing_tokens": "Tokens promised by another engine that missed the deadline",
    "late_lookups": "Lookups that missed the deadline",
    "loads": "Loads that succeeded",
    "loaded_tokens": "Tokens loaded into KV blocks",
    "loaded_bytes": "Bytes loaded into KV blocks",
    "load_seconds": "Seconds from the order of a load to its last byte, summed over all loads",
    "failed_loads": "Loads that failed, so that vLLM computed their tokens",
    "saves": "Saves that have ended",
    "saved_tokens": "Tokens saved, including tokens that were already stored",
    "not_saved_tokens": "Tokens that could not be stored",
    "fenced_saves": "Saves dropped because vLLM reused their blocks",
    "errors": "Errors caught by the connector",
}
_MISSED_TEXT = "Prompt tokens that were not reused, by reason (with the setting explain)"
_log = logging.getLogger("vllm.tierstore")  # a child of vLLM's logger, so that vLLM's format applies


class TierStoreStats(CounterStats, KVConnectorStats):
    """Counters of the KV connector. vLLM finds the class through its base class."""


class TierStoreProm(CounterMetrics, KVConnectorPromMetrics):
    """Export each counter of ``_COUNTERS`` as a Prometheus counter, and missed tokens as one counter with the
    label ``reason``."""

    counters = _COUNTERS
    prefix = PREFIX

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._missed = self._counter_cls(
            name=PREFIX + MISSED.rstrip(":"), documentation=_MISSED_TEXT, labelnames=[*labelnames, "reason"]
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            if name.startswith(MISSED):
                self._missed.labels(*labels, name.removeprefix(MISSED)).inc(count)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The orders of the scheduler half to the workers for one step."""

    work: StepWork


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The report of a worker to the scheduler half."""

    report: LoadReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport), "the other report must come from this connector, too"
        return WorkerReport(self.report.merge(other.report))


@dataclass
class WorkerShard(KVConnectorHandshakeMetadata):
    """The description of a worker's pages, which the worker sends once."""

    shard: Shard


def _check_prefixes(config: Any) -> None:
    """Raise :class:`UnsupportedError` if vLLM cannot continue a prompt from a cached prefix.

    vLLM has then switched off its own prefix caching, because a hit would stop the engine or change the
    output.
    """
    if config.cache_config.enable_prefix_caching:
        return
    model = config.model_config
    if model.runner_type == "pooling":
        raise UnsupportedError("vLLM cannot continue prompts of this pooling model from a cached prefix")
    if model.use_mla and config.device_config.device_type == "cpu":
        raise UnsupportedError("vLLM cannot continue prompts of MLA models from a cached prefix on CPUs")


class TierStoreConnector(ChangeWatcher, KVConnectorBase_V1, SupportsHMA):
    """The connector that keeps KV blocks in a tierstore daemon; see the package docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.errors = ErrorLog(_log)
        self.counters = ConnectorCounters()
        self._settings: VllmSettings | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._caches: Mapping[str, Any] = {}
        self._weights: Future[Weights | Identity] | None = None  # None until the worker starts
        self._changed = False  # whether the weights may have changed since the last forget_everything
        self._orphans: set[str] = set()  # requests whose loads were ordered while there was no worker half
        self._invalid: set[int] = set()
        self._open()

    # -- both halves ---------------------------------------------------------------------------------

    @guarded(nothing)
    def _open(self) -> None:
        config = self._vllm_config
        try:
            extra = config.kv_transfer_config.kv_connector_extra_config or {}
            settings = VllmSettings.parse(extra).named(config)
            groups = read_groups(
                self._kv_cache_config,
                config.cache_config,
                settings.chunk_tokens,
                offers_states=_OFFERS_STATES,
            )
            if not _REPORTS_REQUESTS and (len(groups.groups) > 1 or groups.groups[0].windowed):
                # Earlier versions do not report which blocks outside the window they have freed.
                raise UnsupportedError("sliding windows need vLLM 0.30 or later")
            _check_prefixes(config)
            if settings.share_engines:
                groups = joined(groups)
        except (TierStoreError, UnsupportedError) as error:
            self.errors.warn("the start", f"runs without the cache: {error}")
            return
        self._groups = groups
        self._settings = settings
        if self._role is KVConnectorRole.SCHEDULER:
            # This engine can compute the tokens of every failed load, but vLLM's default policy fails the
            # request. vLLM reads the setting after this constructor.
            config.kv_transfer_config.kv_load_failure_policy = "recompute"
            algorithm = str(config.cache_config.prefix_caching_hash_algo)
            private = hashes_are_private(algorithm, os.environ, fixed_seed=_FIXED_SEED)
            if private and not settings.share_engines:  # shared pages have keys over tokens
                self.errors.warn(
                    "the start",
                    "vLLM's block hashes differ between processes: set PYTHONHASHSEED=0 for all engines, "
                    "or pages are not found after a restart or by other engines",
                )
            if lacking := watch_engines():
                self.errors.warn(
                    "the start",
                    f"this vLLM has no {', '.join(lacking)}: after a change of the weights, reset the cache "
                    "with reset_connector=True",
                )
            transfer = config.kv_transfer_config
            self._scheduler = SchedulerHalf(
                settings,
                groups,
                self.errors,
                self.counters,
                loads=transfer.is_kv_consumer,
                saves=transfer.is_kv_producer,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False, because a dropped save only causes a later miss."""
        return False

    @guarded(nothing)
    def shutdown(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        worker, self._worker = self._worker, None
        if scheduler is not None:
            scheduler.close()
        if worker is not None:
            worker.close()

    @guarded(nothing)
    def get_kv_connector_stats(self) -> TierStoreStats | None:
        if errors := self.errors.unreported():
            self.counters.add("errors", errors)
        counts = self.counters.take()
        return TierStoreStats(counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TierStoreStats:
        return TierStoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> TierStoreProm:
        return TierStoreProm(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- the worker half ------------------------------------------------------------------------------

    @guarded(nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Begin to hash the weights in the background, while vLLM warms up its kernels.
        :meth:`get_handshake_metadata` waits for the result."""
        if self._settings is None:
            return
        self._caches = kv_caches
        if self._weights is None:
            hashing = ThreadPoolExecutor(1, thread_name_prefix="tierstore-weights")
            self._weights = hashing.submit(self._identify)
            hashing.shutdown(wait=False)

    def _identify(self) -> Weights | Identity:
        """Return the identity of the weights, or with ``share_engines`` that of the model's shared pages."""
        settings = self._settings
        assert settings is not None, "only an engine with settings is identified"
        if settings.share_engines:
            from tierstore_connectors.vllm.sharing import model_identity

            return model_identity(self._vllm_config, settings, self._groups.chunk_tokens)
        sampled = settings.hash_weights == "sample"
        return weights_revision(self._vllm_config, settings.namespace, sampled=sampled)

    def _attach(self) -> None:
        """Create the worker half over the tensors that vLLM has registered."""
        if self._settings is None or self._weights is None or self._worker is not None:
            return
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        from tierstore_connectors.vllm.registration import register_groups
        from tierstore_connectors.vllm.sharing import SharedModel

        tensors, pipeline = get_tp_group(), get_pp_group()
        rank = Rank(tensors.rank_in_group, tensors.world_size, pipeline.rank_in_group, pipeline.world_size)
        try:
            weights = self._weights.result()
            shared, revision = None, ""
            if isinstance(weights, Identity):
                layers = self._vllm_config.model_config.get_total_num_hidden_layers()
                shared = SharedModel(weights, layers, rank, self._settings.sizes)
            else:
                revision = weights.revision
                if weights.files is not None:
                    _log.info("tierstore: identified the model by %s", weights.files)
            kept = register_groups(
                self._vllm_config,
                vllm.__version__,
                self._settings.namespace,
                revision,
                self._groups,
                self._kv_cache_config.num_blocks,
                self._caches,
                rank,
                shared,
            )
            groups = self._groups
            self._worker = WorkerHalf(
                self._settings,
                kept,
                groups.count,
                groups.chunk_tokens,
                self.errors,
                self.counters,
                shared.model if shared is not None else None,
            )
            _log.info(
                "tierstore: pages go to %s under identity %s",
                self._settings.store,
                ", ".join(each.pages.identity.digest.hex()[:8] for each in kept.values()),
            )
        except (TierStoreError, UnsupportedError) as error:
            self.errors.warn("the start", f"runs without the cache: {error}")

    @guarded(nothing)
    def unregister_kv_caches(self) -> None:
        """Close the worker half, because vLLM frees the KV tensors when it goes to sleep."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    @guarded(nothing)
    def restore_kv_caches(self) -> None:
        """Create the worker half again after a sleep."""
        self._attach()

    @guarded(nothing)
    def get_handshake_metadata(self) -> WorkerShard | None:
        self._attach()
        return WorkerShard(self._worker.shard) if self._worker is not None else None

    @guarded(nothing)
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None and isinstance(kv_connector_metadata, StepMetadata):
            self._worker.fence(kv_connector_metadata.work)

    def _not_loaded(self, *args: Any, **kwargs: Any) -> None:
        work = self._work()
        if work is not None and self._worker is not None:
            self._worker.refuse(work)

    @guarded(_not_loaded)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        work = self._work()
        if work is None:
            return
        if self._worker is None:
            self._orphans.update(work.refused, (order.request for order in work.loads))
            return
        self._worker.load(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: vLLM schedules a request only after its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: :meth:`wait_for_save` starts the saves of a step."""

    @guarded(nothing)
    def wait_for_save(self) -> None:
        work = self._work()
        if work is not None and self._worker is not None:
            self._worker.save(work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Report finished loads to vLLM versions without :meth:`get_transfer_results`. With these versions
        the connector supports one KV cache group only, and reports failures by block."""
        return None, self._results().finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        results = self._results()
        return KVConnectorTransferResults(finished_recving=results.finished, failed_recving=results.failed)

    def _all_failed(self) -> Results:
        results = self._worker.bail_out() if self._worker is not None else Results()
        orphans, self._orphans = self._orphans, set()
        results.finished |= orphans
        results.failed |= orphans
        return results

    @guarded(_all_failed)
    def _results(self) -> Results:
        if self._worker is None:
            return self._all_failed()
        results = self._worker.results(self._work())
        self._invalid |= results.blocks
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    @guarded(nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = self._worker.report() if self._worker is not None else None
        return WorkerReport(report) if report is not None else None

    def _work(self) -> StepWork | None:
        metadata = self._connector_metadata
        return metadata.work if isinstance(metadata, StepMetadata) else None

    # -- the scheduler half -----------------------------------------------------------------------------

    @guarded(nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._connect(metadata.values())

    @guarded(nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._connect(metadata.values())

    def _connect(self, answers: Iterable[Any]) -> None:
        if self._scheduler is None:
            return
        shards = [each.shard for each in answers if isinstance(each, WorkerShard)]
        workers = self._vllm_config.parallel_config.world_size
        if len(shards) != workers:
            self.errors.warn(
                "the start", f"runs without the cache: only {len(shards)} of {workers} workers have one"
            )
            return
        try:
            self._scheduler.connect(shards)
        except TierStoreError as error:
            self.errors.warn("the start", f"runs without the cache: {error}")

    def _trusted(self) -> SchedulerHalf | None:
        """Return the scheduler half. If the weights may have changed, first make it forget all earlier pages.

        If forgetting raises, no page is found or saved until a later call succeeds.
        """
        if self._changed and self._scheduler is not None:
            self._scheduler.forget_everything(uuid.uuid4().hex)
        self._changed = False
        return self._scheduler

    def weights_changed(self) -> None:
        """Record that the engine may compute with other weights from now on. Pages saved earlier are then no
        longer found (:mod:`tierstore_connectors.vllm.watch`)."""
        self._changed = True

    @guarded(nothing)
    def adapter_loads(self, adapter: Any) -> None:
        """Record the files of a LoRA adapter that vLLM is about to load, before a request uses it."""
        if self._scheduler is not None:
            self._scheduler.adapter_loads(adapter)

    @guarded(nothing)
    def on_new_request(self, request: Any) -> None:
        scheduler = self._trusted()
        if scheduler is not None:
            scheduler.arrived(request)

    @guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        scheduler = self._trusted()
        if scheduler is None:
            return 0, False
        tokens = scheduler.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def _not_allocated(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.lose(request.request_id)

    @guarded(_not_allocated)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @guarded(lambda self, request, num_external_tokens: {})
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        if self._scheduler is None or not num_external_tokens:
            return {}
        disk = min(self._scheduler.from_disk(request.request_id), num_external_tokens)
        sources = {CacheHitSource.HOST: num_external_tokens - disk, CacheHitSource.DISK: disk}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def _no_work(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._scheduler.no_work() if self._scheduler is not None else StepWork())

    @guarded(_no_work)
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        scheduler = self._trusted()
        if scheduler is None:
            return StepMetadata(StepWork())
        return StepMetadata(scheduler.work(scheduler_output))

    @guarded(nothing)
    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduler is None:
            return
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, WorkerReport) else None
        self._scheduler.reported(list(connector_output.finished_recving or ()), report)

    @guarded(lambda self, request, block_ids: (False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    @guarded(lambda self, request, block_ids: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finished(request)

    def _finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Let vLLM free the request's blocks, and return the parameters for a decode engine that continues
        the prompt, which finds pages in the store."""
        if self._scheduler is None:
            return False, None
        promise = self._scheduler.handed_over(request.request_id)
        self._scheduler.finished(request.request_id)
        return False, None if promise is None else handover.answer(promise)

    @guarded(lambda self: False)
    def reset_cache(self) -> bool | None:
        """Make the pages that this engine saved earlier unfindable. After an error, this is tried again
        before the next lookup."""
        self.weights_changed()
        self._trusted()
        return True
