"""Forks, drafts, parking and hits from every tier over quantised pages, bit for bit.

A last bit of a float that depends on the shape of a product may put a number on the other side of a code's
border, a whole step away. So that only pages can make a difference here, every token is computed by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from tests.engine.stored import Stored
from tests.portions import chosen, diagonal
from tierstore_engine import mixers, mlp
from tierstore_engine import model as model_module
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion
from tierstore_engine.sampling import SamplingParams

from .conftest import STORED_CHUNK
from .test_drafting import Echo, prompts

StoredEngine = Callable[..., Stored]

PROMPT = [number * 7 % 256 for number in range(100)]
PARAMS = SamplingParams(max_new_tokens=40, temperature=1.0, seed=1, ignore_eos=True, keep_logits=True)


FORMATS = ("fp8_e4m3", "k8v4", "int8, static")


@pytest.fixture(params=FORMATS)
def quantised(request: pytest.FixtureRequest, loaded: Callable[..., LoadedModel]) -> LoadedModel:
    name, *static = request.param.split(", ")
    model = loaded("tiny", kv_dtype=name)
    if not static:
        return model
    ranges = (((4.0, 5.0), (3.0, 2.0)),) * model.config.layers
    return replace(model, config=replace(model.config, kv=replace(model.config.kv, ranges=ranges)))


@pytest.fixture(autouse=True)
def token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CpuAttention.attend

    def alone(self: CpuAttention, layer: int, queries: torch.Tensor, batch: BatchLayout) -> torch.Tensor:
        spans = [Span(span.tables, at, at + 1) for span in batch.spans for at in range(span.start, span.stop)]
        layouts = (BatchLayout.of([span], chunk_tokens=STORED_CHUNK, device="cpu") for span in spans)
        rows = (attend(self, layer, queries[row : row + 1], each) for row, each in enumerate(layouts))
        return torch.cat(list(rows))

    monkeypatch.setattr(CpuAttention, "attend", alone)

    def each(rows: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(row, *weights) for row in rows.split(1)])  # of no rows, too

    for module in (model_module, mixers, mlp):
        monkeypatch.setattr(module, "linear", each)


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tokens == other.tokens
        assert one.logits is not None
        assert other.logits is not None
        assert np.array_equal(one.logits, other.logits)


@pytest.mark.parametrize(*diagonal(tier=["hbm", "host", "disk"], quantised=FORMATS), indirect=["quantised"])
def test_a_hit_that_ends_anywhere(tier: str, quantised: LoadedModel, stored_engine: StoredEngine) -> None:
    """In the middle of a page, too: the rest of the page is written anew."""
    cold = stored_engine(quantised).engine.generate([PROMPT], PARAMS)
    stored = stored_engine(quantised, disk="store")
    stored.engine.generate([[*PROMPT[:70], 255, 254, 253]], PARAMS)
    assert stored.store.flush(30)
    if tier == "disk":
        stored.close()
        stored = stored_engine(quantised, disk="store")
    elif tier == "host":
        stored.store.evict("hbm")
    warm = stored.engine.generate([PROMPT], PARAMS)
    assert warm[0].metrics.reused_by_tier == {tier: 70}
    assert_same(warm, cold)


@pytest.mark.parametrize("quantised", chosen(FORMATS, "k8v4"), indirect=True)
def test_forks_that_are_parked(quantised: LoadedModel, stored_engine: StoredEngine) -> None:
    """They share the prompt's partial page, copy it, and give way to one another with pages half full."""
    params = replace(PARAMS, max_new_tokens=100)
    reference = stored_engine(quantised, pool_pages=200).engine
    expected = [reference.generate([PROMPT], replace(params, seed=seed))[0] for seed in range(1, 5)]
    stored = stored_engine(quantised, pool_pages=22)
    samples = stored.engine.sample(PROMPT, params, n=4)
    assert sum(sample.metrics.preemptions for sample in samples) > 0
    assert_same(samples, expected)


@pytest.mark.parametrize(
    ("quantised", "wrong"),
    chosen([("fp8_e4m3", 1.0), ("k8v4", 0.3), ("int8, static", 0.3)], ("int8, static", 0.3)),
    indirect=["quantised"],
)
def test_drafts(wrong: float, quantised: LoadedModel, stored_engine: StoredEngine) -> None:
    """With too few pages, and asked twice. What was rejected left nothing behind."""
    asked = [prompt * 3 for prompt in prompts(6, seed=2)]
    plain = stored_engine(quantised, pool_pages=300).engine.generate(asked, PARAMS)
    answers = {tuple(p): each.tokens for p, each in zip(asked, plain, strict=True)}
    stored = stored_engine(quantised, pool_pages=20, drafter=Echo(answers, tokens=7, wrong=wrong))
    for _ in range(2):
        assert_same(stored.engine.generate(asked, PARAMS), plain)
    stats = stored.engine.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens > stats.accepted_tokens


@pytest.mark.parametrize("quantised", chosen(FORMATS, "fp8_e4m3"), indirect=True)
def test_random_traffic(quantised: LoadedModel, stored_engine: StoredEngine) -> None:
    """Too few pages in both tiers and evictions at any time: what an undisturbed request gives."""
    rng = random.Random(1)
    bases = [[rng.randrange(256) for _ in range(100)] for _ in range(3)]
    asked = [[*rng.choice(bases)[: rng.randrange(1, 100)], rng.randrange(256)] for _ in range(16)]
    expected = stored_engine(quantised, pool_pages=200).engine.generate(asked, PARAMS)
    stored = stored_engine(
        quantised,
        pool_pages=20,
        host_bytes=60 * quantised.kv_spec(chunk_tokens=16).page_bytes,
        max_sequences=6,
    )
    engine, waiting, running = stored.engine, list(enumerate(asked)), {}
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            index, prompt = waiting.pop()
            running[engine.add(prompt, PARAMS)] = index
        if rng.random() < 0.05:
            stored.store.evict("hbm", rng.randrange(10))
        for output in engine.step():
            if output.completion is not None:
                assert_same([output.completion], [expected[running.pop(output.request_id)]])
    assert engine.stats().preemptions > 0
    assert stored.store.stats().counters["loaded_pages"] > 0
