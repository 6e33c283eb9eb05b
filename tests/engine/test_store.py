"""The engine over a store: what comes back from each tier continues exactly as what was computed."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.engine.stored import Stored
from tests.portions import chosen
from tierstore_engine.build import build_engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import FinishReason
from tierstore_engine.sampling import SamplingParams

from .conftest import STORED_CHUNK, Oracle
from .test_oracle import GREEDY, assert_same, finish


@pytest.fixture(params=["llama3", "mistral-windowed", "qwen3"])
def oracle(request: pytest.FixtureRequest, oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles(request.param)


@pytest.fixture
def model(oracle: Oracle, loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded(str(oracle.folder))


def test_from_hbm(oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]) -> None:
    engine = stored_engine(model).engine
    engine.generate([oracle.prompt], GREEDY)
    [again] = engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_by_tier == {"hbm": len(oracle.prompt) - 1}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_of_the_pool_without_a_store(prefix_cache: bool, oracle: Oracle, model: LoadedModel) -> None:
    engine = build_engine(model, pool_pages=64, store=None, prefix_cache=prefix_cache)
    engine.generate([oracle.prompt], GREEDY)
    [again] = engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_by_tier == ({"hbm": len(oracle.prompt) - 1} if prefix_cache else {})
    engine.close()


def test_from_host(oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]) -> None:
    stored = stored_engine(model)
    stored.engine.generate([oracle.prompt], GREEDY)
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    [again] = stored.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_by_tier == {"host": len(oracle.prompt) - 1}
    pages = -(-(len(oracle.prompt) - 1) // STORED_CHUNK)
    assert again.metrics.loaded_bytes == pages * stored.store.spec.page_bytes
    assert again.metrics.load_s > 0


def test_from_disk(oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]) -> None:
    first = stored_engine(model, disk="store")
    first.engine.generate([oracle.prompt], GREEDY)
    first.close()
    [again] = stored_engine(model, disk="store").engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_by_tier == {"disk": len(oracle.prompt) - 1}


@pytest.mark.parametrize("tier", ["hbm", "host"])
def test_a_hit_that_ends_with_a_prefill_chunk_gives_the_same_bits(
    tier: str, oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    [cold] = stored_engine(model).engine.generate([oracle.prompt], GREEDY)
    stored = stored_engine(model)
    other = [*oracle.prompt[:256], (oracle.prompt[256] + 1) % 320]
    stored.engine.generate([other], SamplingParams(max_new_tokens=1, ignore_eos=True))
    if tier == "host":
        assert stored.store.flush(30)
        stored.store.evict("hbm")
    [warm] = stored.engine.generate([oracle.prompt], GREEDY)
    assert warm.metrics.reused_by_tier == {tier: 256}
    assert warm.tokens == cold.tokens
    assert np.array_equal(warm.logits, cold.logits)


def test_hits_in_a_mixed_batch(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    stored = stored_engine(model, pool_pages=160)
    stored.engine.generate([oracle.prompt[:200]], GREEDY)
    assert stored.store.flush(30)
    stored.store.evict("hbm")
    cold = stored.engine.add(oracle.prompt[50:150], GREEDY)
    for _ in range(3):
        stored.engine.step()
    warm = [stored.engine.add(oracle.prompt, GREEDY) for _ in range(2)]
    completions = finish(stored.engine)
    for request_id in warm:
        assert_same(completions[request_id], oracle)
        assert completions[request_id].metrics.reused_tokens >= 192
    assert completions[cold].metrics.reused_tokens == 0


def test_parked_and_resumed_without_recompute(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    # Different prompts, so that nothing is shared and both cannot grow to their end together.
    stored = stored_engine(model, pool_pages=2 * 21 + 1)
    first = stored.engine.add(oracle.prompt[::-1], GREEDY)
    second = stored.engine.add(oracle.prompt, GREEDY)
    completions = finish(stored.engine)
    metrics = completions[second].metrics
    assert_same(completions[second], oracle)
    assert completions[first].metrics.preemptions == 0
    assert metrics.preemptions == 1
    assert metrics.recomputed_tokens == 0
    assert metrics.loaded_bytes > 0
    assert metrics.reused_tokens == 0, "what a preempted request gets back is not reuse"


def test_the_next_turn_reuses_the_answer(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    engine = stored_engine(model).engine
    [turn] = engine.generate([oracle.prompt], GREEDY)
    [following] = engine.generate([[*oracle.prompt, *turn.tokens, 5, 6, 7]], GREEDY)
    # The last token of an answer has no KV yet.
    assert following.metrics.reused_tokens == len(oracle.prompt) + len(turn.tokens) - 1


def test_requests_at_the_same_time_share_what_is_held(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    """Four sequences of 23 pages run in 64 pages, because most of their pages are the same ones."""
    engine = stored_engine(model).engine
    engine.generate([oracle.prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))
    for completion in engine.generate([oracle.prompt] * 4, GREEDY):
        assert_same(completion, oracle)
        assert completion.metrics.preemptions == 0
        assert completion.metrics.reused_tokens == len(oracle.prompt) - 1
    assert engine.stats().steps < 6 + 1 + 4 * GREEDY.max_new_tokens


def test_cancelling_during_a_load_gives_everything_back(
    oracle: Oracle, model: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    stored = stored_engine(model)
    stored.engine.generate([oracle.prompt], GREEDY)
    assert stored.store.flush(30)
    for _ in range(20):
        stored.store.evict("hbm")
        request_id = stored.engine.add(oracle.prompt, GREEDY)
        stored.engine.step()
        assert stored.engine.cancel(request_id)
        stored.engine.step()
    assert stored.engine.connector.available() == stored.store.pool.num_pages
    [again] = stored.engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)


@pytest.mark.parametrize("seed", chosen(range(3), 0))
def test_random_traffic(seed: int, tiny: LoadedModel, stored_engine: Callable[..., Stored]) -> None:
    """Prompts with common beginnings, too few pages in both tiers, evictions and cancellations at any time:
    what finishes is what an undisturbed request gives, whatever was reused, parked or lost on the way."""
    rng = random.Random(seed)
    bases = [[rng.randrange(256) for _ in range(200)] for _ in range(3)]
    prompts = [[*rng.choice(bases)[: rng.randrange(1, 200)], rng.randrange(256)] for _ in range(40)]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    alone = stored_engine(tiny, pool_pages=400)
    expected = [completion.tokens for completion in alone.engine.generate(prompts, params)]

    stored = stored_engine(tiny, pool_pages=30, host_bytes=80 * alone.store.spec.page_bytes, max_sequences=6)
    engine, waiting = stored.engine, dict(enumerate(prompts))
    running: dict[int, int] = {}
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.3:
            index = rng.choice(list(waiting))
            running[engine.add(waiting.pop(index), params)] = index
        if rng.random() < 0.05:
            stored.store.evict("hbm", rng.randrange(10))
        if running and rng.random() < 0.01:
            engine.cancel(rng.choice(list(running)))
        for output in engine.step():
            if output.completion is not None:
                tokens, index = output.completion.tokens, running.pop(output.request_id)
                assert tokens == expected[index][: len(tokens)]
                assert len(tokens) == 40 or output.completion.finish_reason is FinishReason.CANCELLED
    assert engine.stats().preemptions > 0
    assert stored.store.stats().counters["loaded_pages"] > 0
