"""Engines of any parallelism load what others have saved, over a real daemon."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tierstore
from tests.connectors.vllm.conftest import Request, step
from tierstore.errors import UsageError
from tierstore.groups import GroupRule
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.common.shared_pages import stage_layers
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.groups import (
    CacheGroup,
    Groups,
    blocks_to_load,
    blocks_to_save,
    joined,
)
from tierstore_connectors.vllm.layout import TensorShape, page_layout
from tierstore_connectors.vllm.orders import Rank
from tierstore_connectors.vllm.scheduler import SchedulerHalf
from tierstore_connectors.vllm.sharing import SharedModel, engine_blocks, layer_number, model_identity
from tierstore_connectors.vllm.worker import WorkerHalf

BLOCK, CHUNK, NUM_BLOCKS = 8, 16, 64
LAYERS, HEADS, DIM = 3, 4, 8
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
_models = itertools.count()


def computed(tokens: list[int]) -> np.ndarray:
    """KV of a model that adds up: ``[layer, plane, head, token, dim]``."""
    seen = np.cumsum(tokens).astype(np.float32)
    shape = np.arange(LAYERS * 2 * HEADS * DIM, dtype=np.float32).reshape(LAYERS, 2, HEADS, 1, DIM)
    return shape + 1000 * seen[:, None]


class Worker:
    """A rank's KV memory, and its half of the connector."""

    def __init__(self, engine: Engine, rank: Rank, sizes: list[tuple[int, int]], backend: str) -> None:
        layers = [NAMES[layer] for layer in stage_layers(LAYERS, rank.pipelines)[rank.pipeline]]
        each = max(HEADS // rank.tensors, 1)
        first = rank.tensor * HEADS // rank.tensors
        self.heads, self.backend = range(first, first + each), backend
        self.tensors = {name: torch.zeros(NUM_BLOCKS, each, BLOCK, 2 * DIM) for name in layers}
        shapes = [
            TensorShape(
                name, each.data_ptr(), tuple(each.shape), tuple(4 * at for at in each.stride()), 4, "float32"
            )
            for name, each in self.tensors.items()
        ]
        layout = page_layout(shapes, num_blocks=NUM_BLOCKS, blocks=CHUNK // BLOCK)
        shared = SharedModel(engine.model, LAYERS, rank, sizes)
        group = shared.worker_group(
            engine.groups.groups[0], layout, self.tensors, dict.fromkeys(layers, backend)
        )
        self.half = WorkerHalf(
            engine.settings, {0: group}, 1, CHUNK, engine.errors, engine.counters, engine.model
        )

    def planes(self, tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """K and V of a layer as ``[block, head, token, dim]``, as the backend places them."""
        array = tensor.numpy()
        if self.backend == "FLASH_ATTN":
            return array[..., :DIM], array[..., DIM:]
        halves = array.reshape(NUM_BLOCKS, -1, 2, BLOCK * DIM)
        keys = halves[:, :, 0].reshape(NUM_BLOCKS, -1, DIM, BLOCK).swapaxes(2, 3)
        return keys, halves[:, :, 1].reshape(NUM_BLOCKS, -1, BLOCK, DIM)

    def compute(self, kv: np.ndarray, blocks: list[int]) -> None:
        for name, tensor in self.tensors.items():
            for plane, memory in enumerate(self.planes(tensor)):
                mine = kv[layer_number(name), plane, list(self.heads)]
                for at, block in enumerate(blocks):
                    memory[block] = mine[:, at * BLOCK : (at + 1) * BLOCK]

    def holds(self, kv: np.ndarray, blocks: list[int]) -> bool:
        """Whether the blocks have exactly this KV, and no other block has any."""
        for name, tensor in self.tensors.items():
            for plane, memory in enumerate(self.planes(tensor)):
                mine = kv[layer_number(name), plane, list(self.heads)]
                there = memory[blocks].transpose(1, 0, 2, 3).reshape(len(self.heads), -1, DIM)
                others = np.delete(memory, blocks, axis=0)
                if not np.array_equal(there, mine[:, : there.shape[1]]) or others.any():
                    return False
        return True


class Engine:
    """A scheduler and the workers of an engine of ``ranks`` and ``stages``."""

    def __init__(self, url, model, ranks=1, stages=1, sizes="1x1", backend="CPU_ATTN(vec)", **settings):
        self.model = model
        self.settings = VllmSettings(
            store=url, lookup_s=20.0, share_engines=True, share_sizes=sizes, **settings
        )
        self.errors, self.counters = ErrorLog(logging.getLogger("vllm.tierstore")), ConnectorCounters()
        group = CacheGroup(0, tuple(NAMES), BLOCK, GroupRule.all())
        self.groups = Groups((group,), 1, BLOCK, CHUNK)
        places = [
            Rank(rank, ranks, stage, stages) for stage, rank in itertools.product(range(stages), range(ranks))
        ]
        self.workers = [Worker(self, place, self.settings.sizes, backend) for place in places]
        self.scheduler = SchedulerHalf(self.settings, self.groups, self.errors, self.counters)
        self.scheduler.connect([worker.half.shard for worker in self.workers])
        for worker in self.workers:
            assert worker.half._stores.wait_connected(30)
        for size in self.scheduler.lookups._sizes:
            assert size.store.wait_connected(30)

    def matched(self, request):
        while (tokens := self.scheduler.matched(request, 0)) is None:
            self.scheduler.work(step())
        return tokens

    def run(self, output, between=lambda: None):
        """A step on all workers; the requests whose loads ended on all of them, and those that failed."""
        work = self.scheduler.work(output)
        for worker in self.workers:
            worker.half.fence(work)
        between()
        for worker in self.workers:
            worker.half.load(work)
            worker.half.save(work)

    def save(self, name, tokens, blocks, before=0):
        """Compute a prompt's tokens after the first ``before``, and have all of it stored that is not."""
        request = Request(name, tokens) if isinstance(name, str) else name
        name = request.request_id
        if not before:
            assert self.matched(request) == 0
            self.scheduler.allocated(request, [blocks], 0)
        kv = computed(tokens)
        output = step(
            new=[(name, before, [blocks])],
            scheduled={name: len(tokens) - before},
            tables={name: [blocks]},
        )
        self.run(output, lambda: [worker.compute(kv, blocks) for worker in self.workers])
        for worker in self.workers:
            worker.half._saves.fence(None, 30.0)

    def load(self, request, blocks):
        """Load what is found into ``blocks``; how many tokens that is."""
        tokens = self.matched(request)
        if not tokens:
            return 0
        self.scheduler.allocated(request, [blocks], tokens)
        self.run(step())
        left = set(self.workers)
        while left:
            for worker in list(left):
                results = worker.half.results(None)
                assert not results.failed
                assert not results.blocks
                if results.finished:
                    left.discard(worker)
        self.scheduler.reported([request.request_id], None)
        return tokens

    def close(self):
        self.scheduler.close()
        for worker in self.workers:
            worker.half.close()


@pytest.fixture
def engine(shared_daemon):
    """``engine(ranks=2)``: engines of one model, which nobody else has."""
    spec = KVSpec.uniform(layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="float32", chunk_tokens=CHUNK)
    model = Identity.of(spec, model=f"shared {next(_models)}")
    engines = []

    def make(**options):
        engines.append(Engine(shared_daemon.url, options.pop("model", model), **options))
        return engines[-1]

    make.model = model
    yield make
    for each in engines:
        each.close()
        assert not each.errors.counts, each.errors.counts


TOKENS = list(range(3, 3 + 4 * CHUNK + 1))
BLOCKS, OTHERS = [7, 3, 12, 5, 9, 20, 11, 2], [30, 4, 41, 17, 52, 6, 18, 33]
SIZES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 2)]


@pytest.mark.parametrize("here", SIZES, ids=str)
def test_any_size_loads_what_any_other_has_saved(engine, here):
    first = engine(ranks=here[0], stages=here[1])
    first.save("saved", TOKENS, BLOCKS)
    for ranks, stages in SIZES:
        other = engine(ranks=ranks, stages=stages, sizes=f"{here[0]}x{here[1]}", backend="FLASH_ATTN")
        assert other.load(Request("loaded", TOKENS), OTHERS) == 4 * CHUNK
        kv = computed(TOKENS)
        assert all(worker.holds(kv[..., : 4 * CHUNK, :], OTHERS) for worker in other.workers)


def test_a_page_is_what_the_bundled_engine_reads(engine, shared_daemon):
    engine().save("saved", TOKENS, BLOCKS)
    spec = KVSpec.parse(engine.model.layout)
    with tierstore.connect(shared_daemon.url, spec, identity=engine.model) as store:
        hit = store.lookup(TOKENS)
        pages = [bytearray(spec.page_bytes) for _ in hit.chunks(0)]
        assert store.load(hit, pages).wait().tokens == 4 * CHUNK
    kv = computed(TOKENS)
    expected = [kv[..., at * CHUNK : (at + 1) * CHUNK, :].tobytes() for at in range(4)]
    assert [bytes(page) for page in pages] == expected


def test_what_the_bundled_engine_saves_is_loaded_up_to_the_last_whole_page(engine, shared_daemon):
    """It keeps the page of an incomplete chunk, too, which vLLM cannot continue in."""
    spec = KVSpec.parse(engine.model.layout)
    kv, tokens = computed(TOKENS), TOKENS[: 2 * CHUNK + 5]
    pages = [kv[..., at * CHUNK : (at + 1) * CHUNK, :].tobytes() for at in range(3)]
    with tierstore.connect(shared_daemon.url, spec, identity=engine.model) as store:
        assert store.save(tokens, pages).wait() == len(tokens)
    other = engine()
    assert other.load(Request("loaded", TOKENS), OTHERS) == 2 * CHUNK
    assert other.workers[0].holds(kv[..., : 2 * CHUNK, :], OTHERS[:4])


def test_a_hit_inside_of_a_page_counts_as_whole_pages(engine, shared_daemon):
    spec = KVSpec.parse(engine.model.layout)
    page = computed(TOKENS)[..., :CHUNK, :].tobytes()
    with tierstore.connect(shared_daemon.url, spec, identity=engine.model) as store:
        assert store.save(TOKENS[:5], [page]).wait() == 5
        assert store.lookup(TOKENS).tokens == 5
    other = engine()
    request = Request("longer", TOKENS)
    assert other.matched(request) == 0
    assert other.scheduler.requests["longer"].held == 0


def test_an_engine_that_continues_pages_of_another_size_saves_all_of_its_own(engine):
    engine().save("saved", TOKENS, BLOCKS)
    second = engine(ranks=2)
    longer = [*TOKENS, *range(500, 500 + 2 * CHUNK)]
    request = Request("longer", longer)
    blocks = [*OTHERS, 60, 61, 62, 63]
    assert second.load(request, blocks) == 4 * CHUNK
    second.save(request, longer, blocks, before=4 * CHUNK)
    third = engine(ranks=2, sizes="2x1")
    assert third.load(Request("again", longer), blocks) == 6 * CHUNK


def test_requests_that_more_than_tokens_decide_go_without_the_cache(engine, caplog):
    first = engine()
    assert first.matched(Request("salted", TOKENS, cache_salt="tenant")) == 0
    first.save("saved", TOKENS, BLOCKS)
    assert first.matched(Request("salted again", TOKENS, cache_salt="tenant")) == 0
    assert first.matched(Request("plain", TOKENS)) == 4 * CHUNK
    assert "requests with a cache_salt bypass the cache" in caplog.text
    first.errors.counts.clear()


def test_forgetting_everything_makes_shared_pages_unreachable(engine):
    first = engine()
    first.save("saved", TOKENS, BLOCKS)
    first.scheduler.forget_everything("epoch")
    assert first.matched(Request("again", TOKENS)) == 0
    assert engine().load(Request("other", TOKENS), OTHERS) == 4 * CHUNK


def test_models_do_not_meet(engine):
    engine().save("saved", TOKENS, BLOCKS)
    spec = KVSpec.parse(engine.model.layout)
    for changes in ({"revision": "x"}, {"tenant": "x"}, {"model": "x"}, {"codec": "x"}):
        fields = {"model": engine.model.model, **changes}
        assert engine(model=Identity.of(spec, **fields)).matched(Request("other", TOKENS)) == 0


def test_kv_in_another_dtype_is_refused(engine):
    worker = engine().workers[0]
    group = CacheGroup(0, tuple(NAMES), BLOCK, GroupRule.all())
    shared = SharedModel(engine.model, LAYERS, Rank(0, 1, 0, 1), [])
    halves = {name: tensor.half() for name, tensor in worker.tensors.items()}
    layout = worker.half._groups[0].layout
    with pytest.raises(UsageError, match=r"is in torch\.float16, but the model is in float32"):
        shared.worker_group(group, layout, halves, dict.fromkeys(NAMES, "FLASH_ATTN"))


def vllm_config(**changes):
    """As much of vLLM's configuration as is looked at: of an engine that computes what the files say."""
    model = {
        "model": "/nowhere",
        "dtype": "torch.float32",
        "quantization": None,
        "hf_overrides": {},
        "hf_config_path": None,
        "config_format": "auto",
        "is_multimodal_model": False,
        "runner_type": "generate",
    }
    own = {name: changes.get(name, value) for name, value in model.items()}
    return SimpleNamespace(
        model_config=SimpleNamespace(**own),
        cache_config=SimpleNamespace(cache_dtype=changes.get("cache_dtype", "auto")),
        load_config=SimpleNamespace(load_format=changes.get("load_format", "auto")),
        lora_config=changes.get("lora_config"),
        speculative_config=changes.get("speculative_config"),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "the model needs a local folder"),  # the next check
        ({"quantization": "awq"}, "--quantization may change KV"),
        ({"hf_overrides": {"rope_theta": 1.0}}, "--hf-overrides may change KV"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype may change KV"),
        ({"load_format": "dummy"}, "--load-format may change KV"),
        ({"config_format": "mistral"}, "--config-format may change KV"),
        ({"lora_config": "any"}, "--lora may change KV"),
        ({"speculative_config": "any"}, "--speculative-config may change KV"),
        ({"runner_type": "pooling", "is_multimodal_model": True}, "a multimodal model, a pooling model may"),
    ],
    ids=str,
)
def test_an_engine_that_computes_something_else_is_refused(changes, message):
    with pytest.raises(UsageError, match=f"share_engines: {message}"):
        model_identity(vllm_config(**changes), VllmSettings(share_engines=True), CHUNK)


def test_vllms_groups_of_one_kind_are_one_group():
    window, full = GroupRule.window(15), GroupRule.all()
    rules = [window, full, window]
    found = joined(
        Groups(tuple(CacheGroup(at, (NAMES[at],), BLOCK, rule) for at, rule in enumerate(rules)), 3, 8, 16)
    )
    assert [(group.rule, group.numbers) for group in found.groups] == [(window, (0, 2)), (full, (1,))]
    tables = [[0, 0, 3, 4], [5, 6, 7, 8], [0, 0, 9, 10]]
    assert blocks_to_save(found, found.groups[0], tables, 0, 2).chunks == ((3, 4, 9, 10),)
    loaded = blocks_to_load(found, found.groups[0], tables, 0, 32)
    assert (loaded.first, loaded.chunks) == (1, ((3, 4, 9, 10),))
    assert [found.blocks_per_page(group) for group in found.groups] == [4, 2]


def blocks_of(tensor: torch.Tensor, backend: str):
    return engine_blocks({0: tensor}, {0: backend}, num_blocks=NUM_BLOCKS, heads=2, head_dim=DIM)


@pytest.mark.parametrize(
    ("shape", "backend", "message"),
    [
        ((NUM_BLOCKS, 2, BLOCK, 2 * DIM), "CPU_ATTN(amx)", "order of K and V in blocks of CPU_ATTN"),
        ((NUM_BLOCKS, 2, BLOCK, 2 * DIM), "FLASHINFER", "order of K and V in blocks of FLASHINFER"),
        ((NUM_BLOCKS, 3, BLOCK, 2 * DIM), "FLASH_ATTN", "has shape"),
        ((NUM_BLOCKS, 2, BLOCK, DIM), "FLASH_ATTN", "has shape"),
        ((NUM_BLOCKS + 1, 2, BLOCK, 2 * DIM), "FLASH_ATTN", "blocks of different sizes"),
    ],
)
def test_blocks_that_are_not_understood_are_refused(shape, backend, message):
    with pytest.raises(UsageError, match=message):
        blocks_of(torch.zeros(shape), backend)


def test_the_settings_are_checked_at_the_start():
    for wrong in ("", "2", "2x", "0x1", "1x1;2x1"):
        with pytest.raises(UsageError, match="share_sizes must be a list like 1x1,4x2"):
            VllmSettings.parse({"share_engines": True, "share_sizes": wrong})
    assert VllmSettings.parse({"share_engines": True, "share_sizes": "1x1, 4x2"}).sizes == [(1, 1), (4, 2)]
