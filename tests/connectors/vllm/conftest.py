"""Both halves of the connector over a real daemon, with tensors and requests of our own instead of vLLM's."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from tierstore.groups import GroupRule
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.copies import HostBlocks
from tierstore_connectors.vllm.groups import CacheGroup, Groups
from tierstore_connectors.vllm.layout import TensorShape, page_layout
from tierstore_connectors.vllm.orders import GroupShard
from tierstore_connectors.vllm.scheduler import SchedulerHalf
from tierstore_connectors.vllm.worker import WorkerGroup, WorkerHalf

BLOCK, CHUNK, NUM_BLOCKS = 8, 16, 64
WINDOW = 20  # tokens before a hit
_models = itertools.count()


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
    """Where digests of files are remembered: not in the cache of who runs the tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@dataclass
class Request:
    """As much of vLLM's request as the connector looks at."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict | None = None
    lora_request: object = None
    cache_salt: str | None = None
    mm_features: list = field(default_factory=list)
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self):
        self.num_prompt_tokens = self.num_tokens
        self.hash_blocks()

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    def hash_blocks(self):
        """Chained, and with the salt in the first one, as vLLM's are."""
        for start in range(len(self.block_hashes) * BLOCK, self.num_tokens - BLOCK + 1, BLOCK):
            parent = self.block_hashes[-1] if self.block_hashes else (self.cache_salt or "").encode()
            tokens = str(self.all_token_ids[start : start + BLOCK]).encode()
            self.block_hashes.append(parent[-8:] + bytes([hash(parent + tokens) & 0xFF for _ in range(24)]))


def step(new=(), cached=(), scheduled=None, tables=None, preempted=(), tokens=None, states=None):
    """A ``SchedulerOutput``: ``new`` and ``cached`` are (request id, computed tokens, new blocks by
    group); ``states`` are (group, block, tokens) by request."""
    scheduled = scheduled or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=done, block_ids=blocks)
            for name, done, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in cached],
            num_computed_tokens=[done for _, done, _ in cached],
            new_block_ids=[blocks for _, _, blocks in cached],
        ),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        preempted_req_ids=set(preempted),
        kv_connector_block_state=SimpleNamespace(
            get_block_ids=lambda name: (tables or {}).get(name), boundary_state_offloads=states or {}
        ),
    )


class HostMemory:
    """KV memory on the processor, and who computes with it."""

    def array(self, shape):
        return np.zeros(shape, np.float32)

    def blocks(self, layout, array):
        return HostBlocks(layout)

    def compute(self, work):
        work()


class Engine:
    """One scheduler's half, one worker's, and the KV memory of ``windowed`` groups, or those of ``rules``.
    ``lacking``: groups whose layers are in other pipeline stages."""

    def __init__(
        self,
        url,
        model,
        *,
        windowed=(False,),
        rules=None,
        lacking=(),
        on=None,
        loads=True,
        saves=True,
        clock=time.monotonic,
        **settings,
    ):
        self.on = on or HostMemory()
        self.settings = VllmSettings(store=url, **{"lookup_s": 5.0, **settings})
        self.errors, self.counters = ErrorLog(logging.getLogger("vllm.tierstore")), ConnectorCounters()
        rules = rules or [GroupRule.window(WINDOW) if each else GroupRule.all() for each in windowed]
        groups = tuple(
            CacheGroup(number, (f"layer {number}",), BLOCK, rule) for number, rule in enumerate(rules)
        )
        self.groups = Groups(groups, len(groups), BLOCK, CHUNK)
        self.memory, kept = [], {}
        for group in groups:
            array = self.on.array((NUM_BLOCKS, 2, BLOCK, 32))
            self.memory.append(array)
            pointer = array.__array_interface__["data"][0]
            shape = TensorShape(group.layers[0], pointer, array.shape, array.strides, 4, "float32")
            blocks = self.groups.blocks_per_page(group)
            layout = page_layout([shape], num_blocks=NUM_BLOCKS, blocks=blocks)
            spec = KVSpec.opaque(layout.page_bytes, chunk_tokens=CHUNK)
            identity = Identity.of(spec, model=model, shard=f"group{group.number}")
            pages = GroupShard(group.number, identity, layout.page_bytes, group.rule)
            if group.number not in lacking:
                kept[group.number] = WorkerGroup(pages, layout, self.on.blocks(layout, array))
        self.worker = WorkerHalf(self.settings, kept, len(groups), CHUNK, self.errors, self.counters)
        self.scheduler = SchedulerHalf(
            self.settings, self.groups, self.errors, self.counters, loads=loads, saves=saves, clock=clock
        )
        self.scheduler.connect([self.worker.shard])

    def connected(self):
        """A daemon that has just been started takes a moment."""
        return self.worker._stores.wait_connected(30) and self.scheduler.lookups.store.wait_connected(30)

    def matched(self, request, local=0):
        """What vLLM is told in the end."""
        while (tokens := self.scheduler.matched(request, local)) is None:
            self.scheduler.work(step())
        return tokens

    def fill(self, table, value):
        """Compute ``value + n`` as the n-th block of a table, in each group."""

        def compute():
            for array, blocks in zip(self.memory, table, strict=True):
                for at, block in enumerate(blocks):
                    if block:
                        array[block] = value + at

        self.on.compute(compute)

    def run(self, output, *, between=lambda: None):
        """A step, as the worker goes through it; the results."""
        work = self.scheduler.work(output)
        self.worker.fence(work)
        between()
        self.worker.load(work)
        self.worker.save(work)
        return self.results(work)

    def results(self, work=None):
        results = self.worker.results(work)
        self.scheduler.reported(sorted(results.finished), self.worker.report())
        return results

    def until_loaded(self):
        """Steps without tokens until a load has ended."""
        while True:
            results = self.run(step())
            if results.finished:
                return results

    def save(self, request, table, tokens, value=1.0):
        """Compute a whole prompt and have it stored."""
        self.matched(request)
        self.scheduler.allocated(request, table, 0)
        name = request.request_id
        output = step(new=[(name, 0, table)], scheduled={name: tokens}, tables={name: table})
        self.run(output, between=lambda: self.fill(table, value))
        self.settle()

    def forget_everything(self, epoch):
        """In both halves, with new sessions."""
        self.scheduler.forget_everything(epoch)
        self.run(step())
        assert self.connected()

    def settle(self):
        """Until no save is under way."""
        self.worker._saves.fence(None, 30.0)

    def close(self):
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def engine(shared_daemon):
    """``engine(model=…, windowed=…)``: engines of one model by default, which nobody else has."""
    model = f"model {next(_models)}"
    engines = []

    def make(**options):
        url = options.pop("url", None)
        engines.append(Engine(url or shared_daemon.url, options.pop("model", model), **options))
        assert url or engines[-1].connected()
        return engines[-1]

    yield make
    for each in engines:
        each.close()
        assert not each.errors.counts, each.errors.counts
