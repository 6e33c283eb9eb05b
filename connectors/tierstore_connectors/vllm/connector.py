"""The class that vLLM loads: it delegates, and stops errors.

Each method has an answer for the case that it fails. One rule decides which: vLLM waits for every load that
it was promised, and must hear of each exactly once. If something fails before a load is ordered, the worker
is ordered to refuse it; if something fails in the worker, it reports the load as failed.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
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
from tierstore_connectors.common import handover
from tierstore_connectors.common.counters import ConnectorCounters, added
from tierstore_connectors.common.guard import ErrorLog, guarded
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.groups import read_groups
from tierstore_connectors.vllm.identity import Weights, hashes_are_private, weights_revision
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.orders import LoadReport, Shard, StepWork
from tierstore_connectors.vllm.scheduler import SchedulerHalf
from tierstore_connectors.vllm.watch import watch_engines
from tierstore_connectors.vllm.worker import Results, WorkerHalf

# vLLM's MultiConnector looks for the statistics' class by name only.
with suppress(ValueError):  # it is registered already
    KVConnectorFactory.register_connector("TierStoreConnector", __name__, "TierStoreConnector")

_REPORTS_REQUESTS = "get_transfer_results" in vars(KVConnectorBase_V1)  # from 0.30 on
_OFFERS_STATES = "take_boundary_state_offloads" in vars(KVCacheManager)  # from 0.32 on
_FIXED_SEED = "resolve_none_hash_seed" in vars(kv_cache_utils)  # from 0.29 on


# What is counted, by either half: ``vllm:tierstore_loaded_tokens`` and so on.
_COUNTERS: Mapping[str, str] = {
    "lookups": "Prompts looked up",
    "lookup_tokens": "Tokens asked for",
    "found_tokens": "Tokens that were held",
    "promised_tokens": "Tokens that vLLM was told can be loaded",
    "declined_tokens": "Tokens held on disk that are computed instead, because that is faster",
    "handed_over_tokens": "Tokens that an engine which goes on with the prompt was promised",
    "expected_tokens": "Tokens that another engine had promised",
    "missing_tokens": "Of these, tokens that had not come when the time was over",
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
    "errors": "Errors that were caught",
}
_PREFIX = "vllm:tierstore_"
_log = logging.getLogger("vllm.tierstore")  # below vLLM's, so that it is formatted and shown like vLLM's own


class TierStoreStats(KVConnectorStats):
    """Counters since the last step, or of several steps and workers together."""

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
            for name, text in _COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, count in transfer_stats_data.items():
            counter = self._counters.get(name)
            if counter is not None:
                counter.labels(*labels).inc(count)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Goes from the scheduler's half to the workers' with each step."""

    work: StepWork


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Goes back from the workers' halves."""

    report: LoadReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, WorkerReport), "one connector's reports only"
        return WorkerReport(self.report.merge(other.report))


@dataclass
class WorkerShard(KVConnectorHandshakeMetadata):
    """Describes what a worker keeps; sent once."""

    shard: Shard


def _nothing(self: Any, *args: Any, **kwargs: Any) -> None:
    """Answer as a cache that is not there."""


def _check_prefixes(config: Any) -> None:
    """Raise :class:`UnsupportedError` where vLLM cannot go on from a part of a prompt: there it
    switches its prefix caching off, and a hit would end the engine or change the answer."""
    if config.cache_config.enable_prefix_caching:
        return
    model = config.model_config
    if model.runner_type == "pooling":
        raise UnsupportedError("vLLM computes the prompts of this pooling model in one piece")
    if model.use_mla and config.device_config.device_type == "cpu":
        raise UnsupportedError("vLLM computes the prompts of MLA models in one piece on this processor")


class TierStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """KV blocks in a tierstore daemon. See the package's first page."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.errors = ErrorLog(_log)
        self.counters = ConnectorCounters()
        self._settings: VllmSettings | None = None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._caches: Mapping[str, Any] = {}
        self._weights: Future[Weights] | None = None  # None until the worker's start
        self._changed = False  # the weights may have, and nothing has been forgotten yet
        self._orphans: set[str] = set()  # loads that no half of ours could take
        self._invalid: set[int] = set()
        self._errors_counted = 0
        self._open()

    # -- both halves ---------------------------------------------------------------------------------

    @guarded(_nothing)
    def _open(self) -> None:
        config = self._vllm_config
        try:
            settings = VllmSettings.parse(config.kv_transfer_config.kv_connector_extra_config or {})
            if not settings.model_name:
                settings = replace(settings, model_name=str(config.model_config.served_model_name or ""))
            groups = read_groups(
                self._kv_cache_config,
                config.cache_config,
                settings.chunk_tokens,
                offers_states=_OFFERS_STATES,
            )
            if not _REPORTS_REQUESTS and (len(groups.groups) > 1 or groups.groups[0].windowed):
                # Earlier ones do not say which blocks have gone.
                raise UnsupportedError("sliding windows need vLLM 0.30 or later")
            _check_prefixes(config)
        except (TierStoreError, UnsupportedError) as error:
            self.errors.warn("the start", f"runs without the cache: {error}")
            return
        self._groups = groups
        self._settings = settings
        if self._role is KVConnectorRole.SCHEDULER:
            # What could not be loaded can always be computed. vLLM's default, to fail the request, is for
            # engines that have not computed it themselves. It is read after this constructor.
            config.kv_transfer_config.kv_load_failure_policy = "recompute"
            algorithm = str(config.cache_config.prefix_caching_hash_algo)
            if hashes_are_private(algorithm, os.environ, fixed_seed=_FIXED_SEED):
                self.errors.warn(
                    "the start",
                    "vLLM's block hashes are others in each process: set PYTHONHASHSEED=0 for all engines, "
                    "or nothing is found again after a restart or by another engine",
                )
            if lacking := watch_engines(TierStoreConnector):
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
        """No: a save that is dropped is a later miss."""
        return False

    @guarded(_nothing)
    def shutdown(self) -> None:
        scheduler, self._scheduler = self._scheduler, None
        worker, self._worker = self._worker, None
        if scheduler is not None:
            scheduler.close()
        if worker is not None:
            worker.close()

    @guarded(_nothing)
    def get_kv_connector_stats(self) -> TierStoreStats | None:
        errors = self.errors.counts.total()
        if errors > self._errors_counted:
            self.counters.add("errors", errors - self._errors_counted)
            self._errors_counted = errors
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

    # -- the worker's half -----------------------------------------------------------------------------

    @guarded(_nothing)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Begin to identify the weights. vLLM warms its kernels up meanwhile, and asks for the handshake's
        metadata then: what the worker keeps is known from there on."""
        if self._settings is None:
            return
        self._caches = kv_caches
        if self._weights is None:
            settings = self._settings
            hashing = ThreadPoolExecutor(1, thread_name_prefix="tierstore-weights")
            self._weights = hashing.submit(
                weights_revision,
                self._vllm_config,
                settings.namespace,
                sampled=settings.hash_weights == "sample",
            )
            hashing.shutdown(wait=False)

    def _attach(self) -> None:
        """Have a worker's half for the tensors that vLLM has registered."""
        if self._settings is None or self._weights is None or self._worker is not None:
            return
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        from tierstore_connectors.vllm.registration import Rank, register_groups

        tensors, pipeline = get_tp_group(), get_pp_group()
        rank = Rank(tensors.rank_in_group, tensors.world_size, pipeline.rank_in_group, pipeline.world_size)
        try:
            weights = self._weights.result()
            if weights.files is not None:
                _log.info("tierstore: identified the model by %s", weights.files)
            kept = register_groups(
                self._vllm_config,
                vllm.__version__,
                self._settings.namespace,
                weights.revision,
                self._groups,
                self._kv_cache_config.num_blocks,
                self._caches,
                rank,
            )
            groups = self._groups
            self._worker = WorkerHalf(
                self._settings, kept, groups.count, groups.chunk_tokens, self.errors, self.counters
            )
            _log.info(
                "tierstore: pages go to %s under identity %s",
                self._settings.store,
                ", ".join(each.pages.identity.digest.hex()[:8] for each in kept.values()),
            )
        except (TierStoreError, UnsupportedError) as error:
            self.errors.warn("the start", f"runs without the cache: {error}")

    @guarded(_nothing)
    def unregister_kv_caches(self) -> None:
        """vLLM goes to sleep and takes the tensors back."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    @guarded(_nothing)
    def restore_kv_caches(self) -> None:
        """vLLM has woken up."""
        self._attach()

    @guarded(_nothing)
    def get_handshake_metadata(self) -> WorkerShard | None:
        self._attach()
        return WorkerShard(self._worker.shard) if self._worker is not None else None

    @guarded(_nothing)
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
        """All loads are asynchronous: what a step computes with has been loaded before."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved whole, after the step."""

    @guarded(_nothing)
    def wait_for_save(self) -> None:
        work = self._work()
        if work is not None and self._worker is not None:
            self._worker.save(work)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """For versions that know no failed requests: there is one group then, and failures are blocks."""
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

    @guarded(_nothing)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        report = self._worker.report() if self._worker is not None else None
        return WorkerReport(report) if report is not None else None

    def _work(self) -> StepWork | None:
        metadata = self._connector_metadata
        return metadata.work if isinstance(metadata, StepMetadata) else None

    # -- the scheduler's half ----------------------------------------------------------------------------

    @guarded(_nothing)
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._connect(metadata.values())

    @guarded(_nothing)
    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._connect(metadata.values())

    def _connect(self, answers: Iterable[Any]) -> None:
        if self._scheduler is None:
            return
        shards = [each.shard for each in answers if isinstance(each, WorkerShard)]
        workers = self._vllm_config.parallel_config.world_size
        if len(shards) != workers:
            self.errors.warn(
                "the start", f"runs without the cache: {len(shards)} of {workers} workers have one"
            )
            return
        try:
            self._scheduler.connect(shards)
        except TierStoreError as error:
            self.errors.warn("the start", f"runs without the cache: {error}")

    def _trusted(self) -> SchedulerHalf | None:
        """The scheduler's half, after it has forgotten what may be of other weights. Until that succeeds
        nothing is found and nothing is saved."""
        if self._changed and self._scheduler is not None:
            self._scheduler.forget_everything(uuid.uuid4().hex)
        self._changed = False
        return self._scheduler

    def weights_changed(self) -> None:
        """The engine computes with other weights from now on, or may do so: what has been stored is not found
        any more (:mod:`tierstore_connectors.vllm.watch`)."""
        self._changed = True

    @guarded(_nothing)
    def adapter_loads(self, adapter: Any) -> None:
        """vLLM is about to load a LoRA adapter, before any request has come for it."""
        if self._scheduler is not None:
            self._scheduler.adapter_loads(adapter)

    @guarded(_nothing)
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

    @guarded(_nothing)
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
        """No block is held, whoever goes on with the prompt: pages are found by prompt."""
        if self._scheduler is None:
            return False, None
        promise = self._scheduler.handed_over(request.request_id)
        self._scheduler.finished(request.request_id)
        return False, None if promise is None else handover.answer(promise)

    @guarded(lambda self: False)
    def reset_cache(self) -> bool | None:
        """What has been stored so far is not found any more, by this engine. If this fails, it is tried again
        before anything is looked up."""
        self.weights_changed()
        self._trusted()
        return True
