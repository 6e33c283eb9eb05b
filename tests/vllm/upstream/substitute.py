"""A pytest plugin that puts this connector into vLLM's schedulers. For ``python -m tests.vllm.upstream``.

* A scheduler without a connector gets ours: one that finds nothing, and saves everything.
* vLLM's ``MockKVConnector`` gives way to ours where it loads asynchronously: ours then finds as many tokens
  as it would. (Ours has no synchronous loads.)
* Tests that put a ``Mock`` in the place of a connector get one around ours: what the test does not dictate is
  answered by ours.
* Connectors of other kinds are left alone: such a test is about that connector.

No daemon runs; the workers are those of vLLM's tests, which say themselves what was loaded. After every test
the connector must have caught no error (it would have hidden it from the test), and must have forgotten every
request that vLLM has forgotten.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import Mock

import pytest

_NO_MODEL = "Invalid repository ID or local directory specified"
_MOCKED = {  # in these the connector that the configuration names is replaced at once
    "test_kv_load_failure_recovery",
    "test_invalid_blocks_correctness",
    "test_cache_pollution_prevention",
    "test_error_propagation",
}
# Tests that expect something else of a connector than ours promises.
_OTHERS = {
    "test_reset_connector_cache_no_connector_is_no_op_success": "no connector",
    "test_throttle_prefills_excludes_fully_transferred_remote_kv": "a hit as long as the prompt",
    "test_external_prefix_cache_metrics[False-True]": "a hit of part of a block",
}

_made: list = []  # the schedulers of the test that runs, each with its connector
_asked_for: dict[int, Any] = {}  # by vLLM's configuration: the connector that it named before
_used: set[str] = set()
_running: list[str] = [""]  # the module of the test


def pytest_configure(config):
    for marker in ("cpu_test", "skip_global_cleanup", "optional", "slow_test"):
        config.addinivalue_line("markers", f"{marker}: vLLM's")
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__

    def make(self, vllm_config, *args, **kwargs):
        if not _is_to_be_ours(vllm_config.kv_transfer_config):
            original(self, vllm_config, *args, **kwargs)
            return
        theirs = _replace(vllm_config)
        original(self, vllm_config, *args, **kwargs)
        _made.append((self, self.connector))
        _connect(self)
        if theirs is None or theirs.kv_connector == "MockKVConnector":
            _stand_in(self.connector, theirs.kv_connector_extra_config if theirs else None)
        else:
            # Ours has vLLM recompute, but inside of a MultiConnector it cannot.
            self.recompute_kv_load_failures = theirs.kv_load_failure_policy == "recompute"

    Scheduler.__init__ = make


def _is_to_be_ours(config):
    if config is None or config.kv_connector == "TierStoreConnector" or _running[0] in _MOCKED:
        return True
    return config.kv_connector == "MockKVConnector" and config.kv_connector_extra_config["is_async"]


def _replace(vllm_config):
    """Name ours; what the test had named. (Some make two schedulers of one configuration.)"""
    from vllm.config import KVTransferConfig

    if id(vllm_config) not in _asked_for:
        _asked_for[id(vllm_config)] = vllm_config.kv_transfer_config
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector="TierStoreConnector",
            kv_connector_module_path="tierstore_connectors.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={
                "store": "ipc:///tmp/nobody-listens-here",
                "chunk_tokens": vllm_config.cache_config.block_size,
            },
        )
    return _asked_for[id(vllm_config)]


def _connect(scheduler):
    """Tell the connector of its workers, as the engine does."""
    from tierstore.keys import Identity
    from tierstore.spec import KVSpec
    from tierstore_connectors.vllm import lookup
    from tierstore_connectors.vllm.connector import WorkerShard
    from tierstore_connectors.vllm.orders import GroupShard, Shard

    half = scheduler.connector._scheduler
    if half is None:
        return  # a model that it does not keep, and has said so
    lookup._CONNECT_S = 0.0
    spec = KVSpec.opaque(4096, chunk_tokens=half.groups.chunk_tokens)
    pages = tuple(
        GroupShard(group.number, Identity.of(spec, model="m", shard=str(group.number)), 4096, group.rule)
        for group in half.groups.groups
    )
    shard = WorkerShard(Shard(half.groups.chunk_tokens, pages))
    workers = scheduler.vllm_config.parallel_config.world_size
    scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, rank): shard for rank in range(workers)})
    assert half.lookups.connected


def _stand_in(connector, mock):
    """List the scheduled requests in the orders, as MockKVConnector does and tests count, and find what it
    would find: ``matched_tokens`` after the local ones, once it has been asked often enough."""
    build = connector.build_connector_meta

    def build_connector_meta(output):
        metadata = build(output)
        cached = output.scheduled_cached_reqs
        metadata.requests = [new.req_id for new in output.scheduled_new_reqs]
        metadata.requests += [name for name in cached.req_ids if name in cached.resumed_req_ids]
        return metadata

    connector.build_connector_meta = build_connector_meta
    if mock is None:
        return
    half = connector._scheduler
    if half is None:
        pytest.skip("a KV cache group of a kind that is not kept")
    matched = half.matched
    asked: dict[str, int] = {}
    asking: list = []

    def ask(request, local):
        asking[:] = [request.request_id, local]
        return matched(request, local)

    def poll(lookup, *, patient):
        name, local = asking
        asked[name] = asked.get(name, 0) + 1
        return local + mock["matched_tokens"] if asked[name] > mock["num_defers_before_matching"] else None

    half.matched = ask
    half.lookups.may_ask = lambda: True
    half.lookups.ask = lambda lookups, epoch: None
    half.lookups.poll = poll


def _mock_around_ours():
    """vLLM's ``create_mock_connector``."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    mock = Mock(wraps=_made[-1][1])
    mock.get_external_cache_hit_sources.side_effect = lambda request, tokens: (
        {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens} if tokens else {}
    )
    return mock


def pytest_collection_modifyitems(items):
    for item in items:
        if item.module.__name__.rpartition(".")[2] in _MOCKED:
            item.module.create_mock_connector = _mock_around_ours
        if item.name in _OTHERS:
            item.add_marker(pytest.mark.xfail(reason=f"expects {_OTHERS[item.name]}", strict=True))


@pytest.fixture
def caplog_vllm(caplog):
    """Of vLLM's conftest.py, which is not there."""
    return caplog


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    _running[0] = item.module.__name__.rpartition(".")[2]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        result = yield
    except ValueError as error:  # as pydantic's are
        if _NO_MODEL in str(error):
            pytest.skip("needs a model from the hub")
        raise
    for scheduler, connector in _made:
        _used.add(item.nodeid)
        connector.errors.counts.pop("the start", None)  # a model that is not kept
        assert not connector.errors.counts, f"caught: {connector.errors.counts}"
        if connector._scheduler is not None and _running[0] not in _MOCKED:  # a mock may not pass it on
            assert set(connector._scheduler.requests) <= set(scheduler.requests)
    return result


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    for _, connector in _made:
        connector.shutdown()
    _made.clear()
    _asked_for.clear()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{len(_used)} tests that were run to their end had this connector:")
    for file, count in Counter(name.partition("::")[0] for name in _used).items():
        terminalreporter.write_line(f"  {count} of {file}")
