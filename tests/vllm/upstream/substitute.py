"""A pytest plugin that puts this connector into vLLM's schedulers. For ``python -m tests.vllm.upstream``.

* A scheduler without a connector gets ours: one that has nothing, and is asked to save everything.
* vLLM's ``MockKVConnector`` is answered for by ours where it loads asynchronously: the number of tokens that
  it would find is what ours finds. (Ours has no synchronous loads.)
* Connectors of other kinds are left alone: such a test is about that connector.

No daemon runs; the workers are those of vLLM's tests, which say themselves what was loaded. After every test the
connector must have caught no error (it would have hidden it from the test) and must have forgotten every
request that vLLM has.
"""

from __future__ import annotations

import pytest

_schedulers: list = []
_used: list[str] = []


class Found:
    """What ours finds in place of a daemon's answer."""

    answered, on_disk = True, 0

    def release(self):
        pass


def pytest_configure(config):
    for marker in ("cpu_test", "skip_global_cleanup", "optional", "slow_test"):
        config.addinivalue_line("markers", f"{marker}: vLLM's")
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.__init__

    def make(self, vllm_config, *args, **kwargs):
        replaced = vllm_config.kv_transfer_config
        if replaced is None or _is_asynchronous_mock(replaced):
            vllm_config.kv_transfer_config = _ours(vllm_config)
            original(self, vllm_config, *args, **kwargs)
            _connect(self, replaced.kv_connector_extra_config if replaced else None)
            _schedulers.append((self, self.connector))
        else:
            original(self, vllm_config, *args, **kwargs)

    Scheduler.__init__ = make


def _is_asynchronous_mock(config):
    return config.kv_connector == "MockKVConnector" and config.kv_connector_extra_config["is_async"]


def _ours(vllm_config):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="TierStoreConnector",
        kv_connector_module_path="tierstore_connectors.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={
            "store": "ipc:///tmp/nobody-listens-here",
            "chunk_tokens": vllm_config.cache_config.block_size,
        },
    )


def _connect(scheduler, mock):
    """Tell the connector of a worker; ``mock`` is what MockKVConnector was to do."""
    from tierstore.keys import Identity
    from tierstore.spec import KVSpec
    from tierstore_connectors.vllm import finder
    from tierstore_connectors.vllm.connector import WorkerShard
    from tierstore_connectors.vllm.work import GroupPages, Shard

    half = scheduler.connector._scheduler
    if half is None:
        return  # a model that it does not keep: it has said so
    finder._CONNECT_S = 0.0
    spec = KVSpec.opaque(4096, chunk_tokens=half.groups.chunk_tokens)
    pages = tuple(
        GroupPages(group.number, Identity.of(spec, model="m", shard=str(group.number)), 4096, group.windowed)
        for group in half.groups.groups
    )
    workers = scheduler.vllm_config.parallel_config.world_size
    shard = WorkerShard(Shard(half.groups.chunk_tokens, pages))
    scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, rank): shard for rank in range(workers)})
    assert half.finder.connected
    if mock is not None:
        _find(half, mock["matched_tokens"], mock.get("num_defers_before_matching", 0))


def _find(half, tokens, defers):
    matched = half.matched
    deferred = {}
    local = []

    def ask(request, computed):
        local[:] = [request.request_id, computed]
        return matched(request, computed)

    def look(probe, *, patient):
        request, computed = local
        deferred[request] = deferred.get(request, 0) + 1
        return computed + tokens if deferred[request] > defers else None

    half.matched = ask
    half.finder.begin = lambda keys, *rest: Found()
    half.finder.look = look


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    for scheduler, connector in _schedulers:
        _used.append(item.nodeid)
        assert not connector.faults.counts, f"caught: {connector.faults.counts}"
        if connector._scheduler is not None:
            assert set(connector._scheduler.requests) <= set(scheduler.requests)
    return result


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    for _, connector in _schedulers:
        connector.shutdown()
    _schedulers.clear()


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{len(set(_used))} tests had tierstore's connector in their scheduler")
