"""Requests that share: forks, several samples of one prompt, and the pages that they have in common."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.engine.stored import Stored
from tests.portions import chosen
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, FinishReason, RequestId
from tierstore_engine.sampling import SamplingParams

EngineOf = Callable[..., Engine]
StoredEngine = Callable[..., Stored]

CHUNK = 16
PROMPT = [random.Random(3).randrange(256) for _ in range(100)]
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, seed=1, ignore_eos=True, keep_logits=True)


def seeds(count: int, first: int = 1) -> list[SamplingParams]:
    return [replace(SAMPLED, seed=first + number) for number in range(count)]


def finish(engine: Engine) -> dict[RequestId, Completion]:
    ended = {}
    while engine.has_work:
        ended.update({o.request_id: o.completion for o in engine.step() if o.completion is not None})
    return ended


def alone(engine: Engine, prompt: list[int], params: list[SamplingParams]) -> list[Completion]:
    return [engine.generate([prompt], each)[0] for each in params]


def test_samples_are_what_each_seed_gives_alone(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    expected = alone(engine, PROMPT, seeds(5))
    before = engine.stats().computed_tokens
    samples = engine.sample(PROMPT, SAMPLED, n=5)
    assert [sample.tokens for sample in samples] == [each.tokens for each in expected]
    assert [sample.text for sample in samples] == [each.text for each in expected]
    assert len({sample.tokens for sample in samples}) == 5
    # The prompt once, and of each sample every token but its last.
    assert engine.stats().computed_tokens - before == len(PROMPT) + 5 * 39


def test_samples_share_the_prompts_pages(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny, pool_pages=7 + 4 * 4, max_sequences=4)  # unshared they would need 4 x 9
    first = engine.add(PROMPT, replace(SAMPLED, max_new_tokens=4))
    for seed in (2, 3, 4):
        engine.fork(first, seed=seed)
    engine.step()
    stats = engine.stats()
    assert stats.admitted == 4
    assert stats.shared_pages == 3 * 7
    assert stats.total_pages - stats.available_pages == 7
    engine.step()  # the last page is not full: three of four copy it before they write
    stats = engine.stats()
    assert stats.shared_pages == 3 * 6
    assert stats.total_pages - stats.available_pages == 6 + 4
    assert stats.preemptions == 0
    finish(engine)
    assert engine.stats().shared_pages == 0


def test_a_prompt_that_ends_with_a_page_is_never_copied(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    prompt = PROMPT[: 6 * CHUNK]
    samples = engine.sample(prompt, SAMPLED, n=3)
    assert [sample.tokens for sample in samples] == [each.tokens for each in alone(engine, prompt, seeds(3))]


def test_forks_of_forks_in_the_middle(tiny: LoadedModel, engine_of: EngineOf) -> None:
    """A tree: what a branch has in common with its parent it has from there, the rest from its own seed."""
    engine = engine_of(tiny, pool_pages=128)
    trunk = engine.add(PROMPT, SAMPLED)
    for _ in range(8):
        engine.step()
    branches = [engine.fork(trunk, seed=seed) for seed in (11, 12)]
    twigs = [engine.fork(branches[0], seed=13)]  # of one that has not begun
    for _ in range(9):
        engine.step()
    twigs.append(engine.fork(branches[1], seed=14))
    ended = finish(engine)
    root = ended[trunk].tokens
    assert root == alone(engine, PROMPT, [SAMPLED])[0].tokens
    for branch in (*branches, twigs[0]):
        assert ended[branch].tokens[:8] == root[:8]
        assert ended[branch].tokens[8:] != root[8:]
    assert ended[twigs[1]].tokens[:17] == ended[branches[1]].tokens[:17]
    assert len({completion.tokens for completion in ended.values()}) == 5
    # From where it was forked a branch is what its seed gives behind those tokens.
    for branch, seed in zip((*branches, twigs[0]), (11, 12, 13), strict=True):
        [rest] = alone(engine, [*PROMPT, *root[:8]], [replace(SAMPLED, seed=seed, max_new_tokens=32)])
        assert ended[branch].tokens[8:] == rest.tokens
        assert len(ended[branch].text) >= len(rest.text)


def test_a_branch_streams_what_is_its_own(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    trunk = engine.add("What follows is", replace(SAMPLED, stop=("zz",)))
    for _ in range(5):
        engine.step()
    branch = engine.fork(trunk, seed=9)
    texts, completions = {trunk: "", branch: ""}, {}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
            if output.completion is not None:
                completions[output.request_id] = output.completion
    assert completions[branch].text.endswith(texts[branch])
    assert len(completions[branch].tokens) == 40
    assert completions[branch].logits is not None
    assert len(completions[branch].logits) == 40


@pytest.mark.parametrize("pool_pages", chosen([18, 22, 30], 22))
def test_samples_that_have_to_give_way(pool_pages: int, tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny, pool_pages=pool_pages, max_sequences=6)
    params = replace(SAMPLED, max_new_tokens=150)
    expected = alone(engine, PROMPT, [replace(params, seed=seed) for seed in range(1, 5)])
    samples = engine.sample(PROMPT, params, n=4)
    assert [sample.tokens for sample in samples] == [each.tokens for each in expected]
    assert sum(sample.metrics.preemptions for sample in samples) > 0


def test_more_samples_than_sequences_at_a_time(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny, max_sequences=2)
    expected = alone(engine, PROMPT, seeds(5))
    samples = engine.sample(PROMPT, SAMPLED, n=5)
    assert [sample.tokens for sample in samples] == [each.tokens for each in expected]


def test_a_parent_that_is_cancelled_before_it_began(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny, max_sequences=1)
    busy = engine.add(PROMPT[::-1], SAMPLED)
    engine.step()
    parent = engine.add(PROMPT, SAMPLED)
    children = [engine.fork(parent, seed=seed) for seed in (2, 3, 4)]
    assert engine.stats().waiting == 4
    assert engine.cancel(children[1])
    assert engine.cancel(parent)
    ended = finish(engine)
    assert ended[parent].finish_reason is ended[children[1]].finish_reason is FinishReason.CANCELLED
    assert len(ended[busy].tokens) == 40
    expected = alone(engine, PROMPT, [replace(SAMPLED, seed=2), replace(SAMPLED, seed=4)])
    assert [ended[children[0]].tokens, ended[children[2]].tokens] == [each.tokens for each in expected]


def test_what_has_ended_is_not_forked(tiny: LoadedModel, engine_of: EngineOf) -> None:
    engine = engine_of(tiny)
    request_id = engine.add(PROMPT, SAMPLED)
    finish(engine)
    with pytest.raises(RequestError, match="has ended"):
        engine.fork(request_id)


def test_over_a_store_the_prefix_is_stored_once(tiny: LoadedModel, stored_engine: StoredEngine) -> None:
    """Thousands of tokens and eight samples: their pages are in the pool once, and saved once."""
    tokens, new, n = 4_000, 20, 8
    longer = replace(tiny, config=replace(tiny.config, max_positions=16_384))
    prompt = [random.Random(5).randrange(256) for _ in range(tokens)]
    stored = stored_engine(
        longer, pool_pages=tokens // CHUNK + 40, host_bytes=tokens // CHUNK * 2 * 16384, prefill_chunk=1024
    )
    params = replace(SAMPLED, max_new_tokens=new, keep_logits=False)
    first = stored.engine.add(prompt, params)
    for seed in range(2, n + 1):
        stored.engine.fork(first, seed=seed)
    while not stored.engine.stats().shared_pages:
        stored.engine.step()
    assert stored.engine.stats().shared_pages == (n - 1) * tokens // CHUNK
    ended = finish(stored.engine)
    assert len({completion.tokens for completion in ended.values()}) == n
    assert stored.store.flush(30)
    counters = stored.store.stats().counters
    # Each sample's own: 19 tokens behind the prompt are a page and a bit.
    assert counters["saved_pages"] == tokens // CHUNK + n * 2
    assert counters["already_stored_pages"] == 0
    assert stored.engine.stats().computed_tokens == tokens + n * (new - 1)


def test_samples_over_a_store_that_are_parked(tiny: LoadedModel, stored_engine: StoredEngine) -> None:
    reference = stored_engine(tiny, pool_pages=200)
    params = replace(SAMPLED, max_new_tokens=150)
    expected = alone(reference.engine, PROMPT, [replace(params, seed=seed) for seed in range(1, 5)])
    stored = stored_engine(tiny, pool_pages=26)
    samples = stored.engine.sample(PROMPT, params, n=4)
    assert [sample.tokens for sample in samples] == [each.tokens for each in expected]
    assert sum(sample.metrics.preemptions for sample in samples) > 0


@pytest.mark.parametrize("seed", chosen(range(3), 0))
def test_random_trees(seed: int, tiny: LoadedModel, stored_engine: StoredEngine) -> None:
    """Requests forked and cancelled at any time, with too few pages: every one of them is what its seed gives
    behind the tokens it was forked with."""
    chance = random.Random(seed)
    params = SamplingParams(max_new_tokens=50, temperature=1.0, ignore_eos=True)
    reference = stored_engine(tiny, pool_pages=400).engine
    stored = stored_engine(tiny, pool_pages=16, host_bytes=80 * 16384, max_sequences=6)
    engine = stored.engine
    born: dict[RequestId, tuple[list[int], int, int]] = {}  # its prompt, tokens inherited, seed
    so_far: dict[RequestId, list[int]] = {}
    ended: dict[RequestId, Completion] = {}
    started = 0
    while started < 30 or engine.has_work:
        alive = [request_id for request_id in born if request_id not in ended]
        if started < 30 and chance.random() < 0.2:
            number, started = 100 + started, started + 1
            if alive and chance.random() < 0.7:
                parent = chance.choice(alive)
                request_id = engine.fork(parent, seed=number)
                so_far[request_id] = list(so_far[parent])
                born[request_id] = (born[parent][0], len(so_far[parent]), number)
            else:
                prompt = PROMPT[: chance.randrange(1, 100)]
                request_id = engine.add(prompt, replace(params, seed=number))
                so_far[request_id], born[request_id] = [], (prompt, 0, number)
        if alive and chance.random() < 0.02:
            engine.cancel(chance.choice(alive))
        if chance.random() < 0.05:
            stored.store.evict("hbm", chance.randrange(10))
        for output in engine.step():
            so_far[output.request_id] += output.tokens
            if output.completion is not None:
                ended[output.request_id] = output.completion
    assert engine.stats().preemptions > 0
    for request_id, completion in ended.items():
        prompt, inherited, number = born[request_id]
        assert list(completion.tokens) == so_far[request_id]
        assert len(completion.tokens) == 50 or completion.finish_reason is FinishReason.CANCELLED
        if len(completion.tokens) > inherited:
            behind = [*prompt, *completion.tokens[:inherited]]
            own = replace(params, seed=number, max_new_tokens=len(completion.tokens) - inherited)
            assert reference.generate([behind], own)[0].tokens == completion.tokens[inherited:]
