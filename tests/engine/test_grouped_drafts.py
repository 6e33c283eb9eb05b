"""Drafts for and by models of several layer groups: a state goes on from the accepted tokens, as transformers
does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.grouped import CHUNK, GroupedEngines, forget
from tests.portions import chosen
from tests.tiny_models import GROUPED, STATES
from tierstore.errors import UsageError
from tierstore_engine.build import build_draft_model, check_draft
from tierstore_engine.draft_model import DraftModel
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.pool_sizes import draft_pages
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import Sequence
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step

from .conftest import Oracle
from .test_drafting import Echo, prompts
from .test_oracle import WHOLE, assert_same, finish

EngineOf = Callable[..., Engine]
REMEMBERING = (*GROUPED, *STATES)
STATEFUL = ("qwen3-next", "nemotron-h", "mamba", "lfm2")  # each kind of state
SAMPLED = SamplingParams(max_new_tokens=24, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture
def engine_of(grouped: GroupedEngines) -> EngineOf:
    return grouped.make


def echo(oracle: Oracle, *, wrong: float = 0.3) -> Echo:
    return Echo({tuple(oracle.prompt): tuple(oracle.tokens)}, tokens=5, wrong=wrong)


@pytest.mark.parametrize("name", chosen(REMEMBERING, *STATEFUL))
def test_right_and_wrong_drafts_from_each_tier(
    oracle: Oracle, model: LoadedModel, grouped: GroupedEngines
) -> None:
    """And what was saved meanwhile is of accepted tokens only: at the last page's end within the answer, and
    where the last turn ended."""
    engine = grouped.make(model, disk="store", drafter=echo(oracle))
    for tier in ("", "hbm", "host", "disk"):
        if tier == "host":
            forget(engine)
        if tier == "disk":
            grouped.close(engine)
            engine = grouped.make(model, disk="store", drafter=echo(oracle))
        [found] = engine.generate([oracle.prompt], WHOLE)
        assert_same(found, oracle)
        assert (tier in found.metrics.reused_by_tier) == bool(tier)
        assert 0 < found.metrics.accepted_tokens < found.metrics.drafted_tokens
    forget(engine)
    known = [*oracle.prompt, *oracle.tokens]
    ended = (len(known) - 6) // CHUNK * CHUNK
    once = replace(WHOLE, max_new_tokens=2)
    for prompt, least in (([*known, 5, 6, 7], len(known) - 6), ([*known[:ended], 5, 6, 7], ended)):
        [warm] = engine.generate([prompt], once)
        [cold] = grouped.make(model, stored=False).generate([prompt], once)
        assert warm.metrics.reused_tokens >= least
        assert warm.tokens == cold.tokens
        assert abs(warm.logits - cold.logits).max() < 1e-4


@pytest.mark.parametrize("name", ["mamba"])
def test_a_state_is_stored_at_the_end_of_each_page(
    oracle: Oracle, model: LoadedModel, engine_of: EngineOf
) -> None:
    """Six tokens a step would jump over the last one of the answer."""
    engine = engine_of(model, drafter=echo(oracle, wrong=0.0))
    [found] = engine.generate([oracle.prompt], WHOLE)
    assert found.metrics.accepted_tokens == found.metrics.drafted_tokens
    known = [*oracle.prompt, *oracle.tokens]
    ended = (len(known) - 6) // CHUNK * CHUNK
    assert (ended - len(oracle.prompt)) % 6
    [other] = engine.generate([[*known[:ended], 5, 6, 7]], replace(WHOLE, max_new_tokens=1))
    assert other.metrics.reused_tokens == ended


def lagging(engine: Engine, request: int) -> Sequence:
    """Step until a sequence's states lack accepted tokens."""
    sequence = engine._roster.get(request)
    assert sequence is not None
    while not sequence.repeated:
        engine.step()
    return sequence


@pytest.mark.parametrize("name", STATEFUL)
def test_parked_and_forked_behind_an_accepted_draft(
    oracle: Oracle, model: LoadedModel, engine_of: EngineOf
) -> None:
    engine = engine_of(model, drafter=echo(oracle, wrong=0.1))
    parked = engine.add(oracle.prompt, WHOLE)
    lagging(engine, parked)
    engine._scheduler._park()
    forked = engine.fork(parked)
    lagging(engine, parked)
    late = engine.fork(parked)
    done = finish(engine)
    assert done[parked].metrics.preemptions == 1
    for request in (parked, forked, late):
        assert list(done[request].tokens) == oracle.tokens
    assert_same(done[parked], oracle)


@pytest.mark.parametrize("name", ["qwen3-next"])
def test_repeated_tokens_are_no_prompt(oracle: Oracle, model: LoadedModel, engine_of: EngineOf) -> None:
    """A request whose prompt was found whole drafts in its first step. It is not ordered as a prompt then."""
    drafter = echo(oracle, wrong=0.0)
    engine = engine_of(model, drafter=drafter)
    engine.generate([oracle.prompt], WHOLE)
    known = [*oracle.prompt, *oracle.tokens]
    ended = (len(known) - 6) // CHUNK * CHUNK
    prompt, answer = known[: ended + 1], tuple(known[ended + 1 :])
    drafter._answers[tuple(prompt)] = answer
    request = engine.add(prompt, replace(WHOLE, max_new_tokens=len(answer)))
    sequence = lagging(engine, request)
    assert sequence.computed == len(prompt)
    assert sequence not in engine._scheduler._prompts
    assert finish(engine)[request].tokens == answer


@pytest.mark.parametrize("name", STATEFUL)
def test_sampled_side_by_side(model: LoadedModel, engine_of: EngineOf) -> None:
    """Several continuations of each prompt, with too little room for all. The drafts are those of the first
    one, so they are wrong for the others."""
    asked = [prompt * 3 for prompt in prompts(2, seed=2)]
    plain = engine_of(model, stored=False)
    expected = [plain.sample(prompt, SAMPLED, n=3) for prompt in asked]
    known = {tuple(prompt): some[0].tokens for prompt, some in zip(asked, expected, strict=True)}
    engine = engine_of(model, drafter=Echo(known, tokens=4, wrong=0.2), max_sequences=2)
    found = [engine.sample(prompt, SAMPLED, n=3) for prompt in asked]
    assert [[each.tokens for each in some] for some in found] == [
        [each.tokens for each in some] for some in expected
    ]
    assert 0 < engine.stats().accepted_tokens < engine.stats().drafted_tokens


def noisy(model: LoadedModel) -> LoadedModel:
    """A model that often chooses alike, and often not."""
    noise = torch.randn(model.weights.norm.shape, generator=torch.Generator().manual_seed(1))
    norm = model.weights.norm * (1 + 0.1 * noise)
    return replace(model, weights=replace(model.weights, norm=norm), digest=f"{model.digest}-noisy")


@pytest.fixture
def draft_of() -> Callable[..., DraftModel]:
    """Makes a drafter of a model; when the test is over, none of its pages may be missing."""
    made: list[DraftModel] = []

    def make(draft: LoadedModel, model: LoadedModel, **options: Any) -> DraftModel:
        settings = EngineSettings(prefill_chunk=64, max_sequences=4)
        sizes = {"pool_pages": 64, "tokens": 4, "chunk_tokens": CHUNK, "settings": settings}
        made.append(build_draft_model(draft, model, **{**sizes, **options}))
        return made[-1]

    yield make
    for drafter in made:
        for group, pool in enumerate(drafter.connector.pools):
            assert drafter.connector.available(group=group) == pool.capacity


@pytest.mark.parametrize("name", chosen([*REMEMBERING, "deepseek-v3"], "gemma3", *STATEFUL))
def test_a_draft_model_of_groups(
    oracle: Oracle, model: LoadedModel, engine_of: EngineOf, draft_of: Callable[..., DraftModel]
) -> None:
    """Right and wrong, its pages stored and found again; as the model itself it is always right."""
    [plain] = engine_of(model, stored=False).generate([oracle.prompt], SAMPLED)
    for draft in (model, noisy(model)):
        drafter = draft_of(draft, model)
        engine = engine_of(model, drafter=drafter)
        for _ in range(2):
            [found] = engine.generate([oracle.prompt], SAMPLED)
            assert found.tokens == plain.tokens
            accepted, drafted = found.metrics.accepted_tokens, found.metrics.drafted_tokens
            assert accepted == drafted if draft is model else 0 < accepted < drafted
        stats = drafter.connector.stats()
        assert stats is not None
        assert stats.counters["hit_tokens"]["hbm"] >= len(oracle.prompt) - CHUNK


@pytest.mark.parametrize(("name", "starved"), [("qwen3-next", False), ("mamba", True), ("mamba", False)])
def test_a_draft_model_computes_a_drafted_token_once(
    starved: bool,
    model: LoadedModel,
    engine_of: EngineOf,
    draft_of: Callable[..., DraftModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its states go ahead, and back after the draft. Without room for copies of them, it computes its whole
    draft again for each token."""
    drafter, prompt = draft_of(noisy(model), model), prompts(1)[0]
    connector, [group], compute = drafter.connector, model.config.states, drafter._model.compute
    rows: list[int] = []
    taken: list[int] = []

    def noted(step: Step) -> torch.Tensor:
        rows.append(len(step.tokens))
        if starved:
            taken.extend(connector.allocate(connector.available(group=group), group=group) or ())
        return compute(step)

    monkeypatch.setattr(drafter._model, "compute", noted)
    [found] = engine_of(model, drafter=drafter, stored=False).generate([prompt], SAMPLED)
    assert rows[-3:] == ([1, 2, 3] if starved else [1, 1, 1])
    assert found.metrics.accepted_tokens > 0
    [plain] = engine_of(model, stored=False).generate([prompt], SAMPLED)
    assert found.tokens == plain.tokens
    connector.release(taken, group=group)


@pytest.mark.parametrize("name", ["qwen3-next"])
def test_a_draft_model_whose_leader_got_no_token(
    oracle: Oracle, model: LoadedModel, engine_of: EngineOf, draft_of: Callable[..., DraftModel]
) -> None:
    """Its states are ahead of the tokens that are left to compute: it begins again."""
    drafter = draft_of(model, model)
    engine = engine_of(model, drafter=drafter)
    request = engine.add(oracle.prompt, WHOLE)
    while engine.stats().drafted_tokens < 8:
        engine.step()
    leader = engine._roster.get(request)
    assert leader is not None
    first = list(drafter.propose([leader])[request])
    assert not drafter.propose([leader])  # it has left its pages
    while not (again := drafter.propose([leader]).get(request)):
        pass
    assert list(again) == first
    assert_same(finish(engine)[request], oracle)


def test_a_draft_model_of_another_family(
    loaded: Callable[..., LoadedModel], engine_of: EngineOf, draft_of: Callable[..., DraftModel]
) -> None:
    """States draft for attention, attention drafts for states, and both are mostly wrong."""
    asked = prompts(2)
    for target, draft in (("tiny", "tiny-mamba2"), ("tiny-mamba2", "tiny"), ("tiny-gemma3", "tiny-deepseek")):
        model = loaded(target)
        plain = engine_of(model, stored=False).generate(asked, SAMPLED)
        engine = engine_of(model, drafter=draft_of(loaded(draft), model))
        assert [each.tokens for each in engine.generate(asked, SAMPLED)] == [each.tokens for each in plain]
        assert engine.stats().drafted_tokens > 40


def test_a_draft_for_which_the_draft_model_has_no_positions(loaded: Callable[..., LoadedModel]) -> None:
    """Without a refusal, it would never draft."""
    tiny = loaded("tiny")
    most = tiny.config.max_positions - 1
    with pytest.raises(UsageError, match=f"at most {most} tokens, got {most + 1}: draft fewer"):
        build_draft_model(tiny, tiny, pool_pages=8, tokens=most + 1)


def test_the_room_of_a_draft_model() -> None:
    """For as many tokens as the model has room for; a model that has only states has room for any number."""
    settings = EngineSettings(max_sequences=8)
    tiny, mamba = preset("tiny"), preset("tiny-mamba2")
    assert draft_pages(tiny, tiny, 100, settings) == 100
    assert draft_pages(mamba, tiny, 100, settings) == 4 * 8
    assert draft_pages(tiny, mamba, 32, settings) == 65_536 // 64
    with pytest.raises(UsageError, match="a draft model must have the model's vocabulary"):
        check_draft(preset("llama-3-8b"), tiny)
