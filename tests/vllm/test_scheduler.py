"""The scheduler's half under vLLM's own Scheduler, with a worker of ours: what a real one can hardly be
brought to do. Loads that fail again and again, in models with one KV cache group and with several, must not
go in circles."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from tests.vllm import models

BLOCK, TOKENS = 32, 200


@pytest.fixture
def make_scheduler(model, monkeypatch):
    """A scheduler whose connector finds 192 tokens of every prompt. ``groups`` of full attention."""
    pytest.importorskip("vllm")
    import torch
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        SlidingWindowSpec,
    )
    from vllm.v1.structured_output import StructuredOutputManager

    from tierstore_connectors.vllm.lookup import VllmLookups

    monkeypatch.setattr(VllmLookups, "may_ask", lambda self: True)
    monkeypatch.setattr(VllmLookups, "ask", lambda self, lookups: None)
    monkeypatch.setattr(VllmLookups, "poll", lambda self, lookup, *, patient: 192)
    schedulers = []

    def make(groups):
        model_config = ModelConfig(model=str(model(models.LLAMA)), dtype="float32", max_model_len=1024)
        config = VllmConfig(
            scheduler_config=SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=1024,
                max_model_len=1024,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
            ),
            model_config=model_config,
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="TierStoreConnector",
                kv_connector_module_path="tierstore_connectors.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={"store": "ipc:///tmp/nobody-listens-here"},
            ),
        )
        sizes = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
        specs = [FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=64)][:groups]
        kv_cache_config = KVCacheConfig(
            num_blocks=200,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer {at}"], spec) for at, spec in enumerate(specs)],
        )
        config.cache_config.num_gpu_blocks = 200
        scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        schedulers.append(scheduler)
        return scheduler

    yield make
    for scheduler in schedulers:
        scheduler.connector.shutdown()


def request(name):
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(ord(name), ord(name) + TOKENS)),
        sampling_params=SamplingParams(max_tokens=2),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
    )


def answer(output, kv_output):
    """What the model's runner says: a token for each request that has computed something."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[7] for _ in names],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=kv_output,
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_loads_that_always_fail_do_not_go_in_circles(make_scheduler, groups):
    from vllm.v1.outputs import KVConnectorOutput

    from tierstore_connectors.vllm.connector import WorkerReport
    from tierstore_connectors.vllm.orders import LoadReport

    scheduler = make_scheduler(groups)
    assert scheduler.recompute_kv_load_failures  # though vLLM's default is to fail the request
    assert not scheduler.requires_kv_delivery
    for name in "ab":
        scheduler.add_request(request(name))
    loads, computed = [], 0
    for _ in range(20):
        output = scheduler.schedule()
        work = output.kv_connector_metadata.work
        orders = work.loads
        loads += [order.request for order in orders]
        computed += output.total_num_scheduled_tokens
        kv_output = KVConnectorOutput()
        if orders:
            failed = {order.request: 1 for order in orders}
            kv_output = KVConnectorOutput(
                finished_recving=set(failed),
                failed_recving=set(failed) if groups > 1 else set(),
                invalid_block_ids=set()
                if groups > 1
                else {block for order in orders for block in order.groups[0].chunks[1]},
                kv_connector_worker_meta=WorkerReport(LoadReport(failed)),
            )
        scheduler.update_from_output(output, answer(output, kv_output))
        if not scheduler.has_unfinished_requests():
            break
    assert not scheduler.has_unfinished_requests()
    assert loads == ["a", "b"]  # once each
    assert computed >= 2 * (TOKENS - 64)
    assert not scheduler.connector.errors.counts
    assert not scheduler.connector._scheduler.requests


def test_a_request_that_is_aborted_while_it_loads(make_scheduler):
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import RequestStatus

    scheduler = make_scheduler(1)
    scheduler.add_request(request("a"))
    output = scheduler.schedule()
    assert [order.request for order in output.kv_connector_metadata.work.loads] == ["a"]
    scheduler.update_from_output(output, answer(output, KVConnectorOutput()))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert (
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    )  # the worker still writes there
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, KVConnectorOutput(finished_recving={"a"})))
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > free
    assert not scheduler.connector._scheduler.requests
    assert not scheduler.connector.errors.counts


def test_missed_tokens_are_exported_by_reason():
    pytest.importorskip("vllm")
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    from tierstore_connectors.vllm.connector import TierStoreProm

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    prom = TierStoreProm(SimpleNamespace(kv_transfer_config=None), kinds, ["engine"], {1: ["1"]})
    for _ in range(2):
        prom.observe({"missed_tokens:evicted": 32.0, "missed_tokens:tail": 5.0, "loads": 1.0}, engine_idx=1)
    for reason, count in ("evicted", 64.0), ("tail", 10.0), ("late", None):
        labels = {"engine": "1", "reason": reason}
        assert registry.get_sample_value("vllm:tierstore_missed_tokens_total", labels) == count
    assert registry.get_sample_value("vllm:tierstore_loads_total", {"engine": "1"}) == 2.0
