"""Speculative decoding changes how many tokens a step gives, and never which."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import tierstore
from tests.engine.stored import Stored
from tests.portions import chosen, diagonal, portion
from tierstore.errors import UsageError
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.base import Connector
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine.attention import make_attention
from tierstore_engine.draft_model import DraftModel
from tierstore_engine.drafting import PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.kv_format import CODES
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

EngineOf = Callable[..., Engine]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)


def prompts(count: int, *, seed: int = 1) -> list[list[int]]:
    """Such as repeat parts of themselves, with few tokens, so that drafts are made."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        part = [chance.randrange(12) for _ in range(chance.randrange(2, 12))]
        made.append([*part, *(chance.randrange(256) for _ in range(chance.randrange(9))), *part * 2])
    return made


class Echo:
    """Drafts what the sequence is known to continue with, changed at some places."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, ...]], *, tokens: int, wrong: float) -> None:
        self._answers = answers
        self._tokens = tokens
        self._wrong = wrong
        self._chance = random.Random(1)

    def propose(self, sequences):
        drafts = {}
        for sequence in sequences:
            prompt, done = (
                sequence.tokens[: sequence.prompt_tokens],
                len(sequence.tokens) - sequence.prompt_tokens,
            )
            answer = self._answers.get(tuple(prompt), ())[done : done + self._tokens]
            drafts[sequence.request_id] = [
                (token + 1) % 256 if self._chance.random() < self._wrong else token for token in answer
            ]
        return drafts

    def follow(self, work): ...

    def forget(self, sequence): ...

    def close(self): ...


@pytest.mark.parametrize("count", portion(40, 200))
@pytest.mark.parametrize("kv", chosen(["auto", *CODES, "k8v4"], "auto", "fp8_e4m3", "k8v4"))
def test_greedy_output_is_equal(
    kv: str, count: int, loaded: Callable[..., LoadedModel], engine_of: EngineOf
) -> None:
    """With quantised KV as well: a drafted token's keys and values have the bits of one computed alone, so
    they become the same codes."""
    asked, tiny = prompts(count), loaded("tiny", kv_dtype=kv)
    plain = engine_of(tiny, pool_pages=256).generate(asked, GREEDY)
    engine = engine_of(tiny, pool_pages=256, drafter=PromptLookupDrafter())
    drafted = engine.generate(asked, GREEDY)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    assert [each.text for each in drafted] == [each.text for each in plain]
    stats = engine.stats()
    assert stats.drafted_tokens > 2 * count
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert sum(each.metrics.accepted_tokens for each in drafted) == stats.accepted_tokens
    assert stats.generated_tokens == count * 40


@pytest.mark.parametrize(*diagonal(tokens=[1, 7, 33], wrong=[1.0, 0.3, 0.0]))
def test_whatever_is_drafted(
    tokens: int, wrong: float, tiny: LoadedModel, stored_engine: Callable[..., Stored]
) -> None:
    """Sampled, with stops, penalties and too few pages: token by token what is chosen without a draft.
    Nothing that was rejected is saved: asked again, prompts go on from what is stored, and alike."""
    params = SamplingParams(
        max_new_tokens=60,
        temperature=1.0,
        top_p=0.95,
        seed=4,
        ignore_eos=True,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        stop=("~", "q"),
    )
    asked = [prompt * 3 for prompt in prompts(12, seed=2)]
    plain = stored_engine(tiny, pool_pages=300).engine.generate(asked, params)
    answers = {tuple(p): each.tokens for p, each in zip(asked, plain, strict=True)}
    assert len({each.finish_reason for each in plain}) == 2
    drafter = Echo(answers, tokens=tokens, wrong=wrong)
    stored = stored_engine(tiny, pool_pages=14, drafter=drafter)
    for _ in range(2):
        drafted = stored.engine.generate(asked, params)
        assert [each.tokens for each in drafted] == [each.tokens for each in plain]
        assert [each.text for each in drafted] == [each.text for each in plain]
    stats = stored.engine.stats()
    if wrong == 0.0:  # a stop string may end it in the midst of a draft
        assert stats.drafted_tokens - 24 * tokens <= stats.accepted_tokens <= stats.drafted_tokens
    assert stats.preemptions > 0
    # And each answer goes on from the pages that it left behind as from computed ones.
    behind = [[*prompt, *each.tokens, 5] for prompt, each in zip(asked, plain, strict=True)]
    logits = replace(GREEDY, max_new_tokens=3, keep_logits=True)
    expected = stored_engine(tiny, pool_pages=300).engine.generate(behind, logits)
    found = stored.engine.generate(behind, logits)
    assert sum(each.metrics.reused_tokens for each in found) > 0
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.logits - other.logits).max() < 1e-4


def repeating(model: LoadedModel) -> LoadedModel:
    """A model whose next token depends on the last one alone: greedily it soon goes in a circle."""
    layers = []
    for layer in model.weights.layers:
        mixer = replace(layer.mixer, o=torch.zeros_like(layer.mixer.o))
        mlp = replace(layer.mlp, down=torch.zeros_like(layer.mlp.down))
        layers.append(replace(layer, mixer=mixer, mlp=mlp))
    return replace(model, weights=replace(model.weights, layers=tuple(layers)), digest="repeating")


def test_text_that_repeats_itself_takes_fewer_steps(tiny: LoadedModel, engine_of: EngineOf) -> None:
    model, params = repeating(tiny), replace(GREEDY, max_new_tokens=300)
    prompt = [7, 3, 200]
    [plain] = engine_of(model).generate([prompt], params)
    engine = engine_of(model, drafter=PromptLookupDrafter())
    [drafted] = engine.generate([prompt], params)
    assert drafted.tokens == plain.tokens
    assert 300 / engine.stats().steps > 1.5
    assert drafted.metrics.accepted_tokens == 300 - engine.stats().steps


@pytest.mark.parametrize("count", portion(1000, 20_000))
@pytest.mark.parametrize("kv", chosen(["auto", *CODES, "k8v4"], "auto", "int8"))
def test_sampling_is_distributed_as_without(
    kv: str,
    count: int,
    loaded: Callable[..., LoadedModel],
    engine_of: EngineOf,
    record_property: Callable[[str, object], None],
) -> None:
    """Three tokens, many times, of which the second is drafted: chi-squared of the 27 outcomes against what
    the model's logits give them. Fails by chance once in 10,000 seeds, and these are fixed."""
    prompt, tiny = prompts(1)[0], loaded("tiny", kv_dtype=kv)
    params = SamplingParams(max_new_tokens=3, temperature=1.5, top_k=3, seed=0, ignore_eos=True)
    reference = engine_of(tiny)

    def likeliest(behind: tuple[int, ...]) -> dict[int, float]:
        one = SamplingParams(max_new_tokens=1, keep_logits=True, ignore_eos=True)
        [completion] = reference.generate([[*prompt, *behind]], one)
        best = torch.tensor(completion.logits[0]).topk(3)
        chances = (best.values.double() / 1.5).softmax(0)
        return dict(zip(best.indices.tolist(), chances.tolist(), strict=True))

    expected, second = {}, {}
    for one, first_chance in likeliest(()).items():
        second[one] = likeliest((one,))
        for two, second_chance in second[one].items():
            for three, third_chance in likeliest((one, two)).items():
                expected[one, two, three] = first_chance * second_chance * third_chance
    answers = {tuple(prompt): (0, 0)}
    drafter = Echo(answers, tokens=1, wrong=0.0)
    drafter.propose = lambda sequences: {  # type: ignore[method-assign]
        sequence.request_id: [min(second[sequence.tokens[-1]])]
        for sequence in sequences
        if sequence.tokens[-1] in second and len(sequence.tokens) == len(prompt) + 1
    }
    settings = {"max_sequences": count, "max_batch_tokens": 3 * count}
    engine = engine_of(tiny, drafter=drafter, pool_pages=2 * count, **settings)
    found = Counter(completion.tokens for completion in engine.sample(prompt, params, n=count))
    assert found.keys() <= expected.keys()
    stats = engine.stats()
    assert stats.drafted_tokens == count
    assert 0.05 < stats.accepted_tokens / count < 0.95
    chi_squared = sum((found[cell] - count * p) ** 2 / (count * p) for cell, p in expected.items())
    chance = torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(chi_squared / 2))
    record_property("outcome", f"{chi_squared=:.1f} {chance=:.3f} accepted={stats.accepted_tokens}/{count}")
    assert chance > 1e-4, (chi_squared, found)


@pytest.fixture
def draft_of(loaded: Callable[..., LoadedModel]) -> Callable[..., DraftModel]:
    """Makes a drafter of a model, over a store of its own or without one; no page may be missing."""
    made: list[DraftModel] = []

    def make(model: LoadedModel, *, pool_pages: int = 256, stored: bool = False) -> DraftModel:
        spec = model.kv_spec(chunk_tokens=16)
        pool, identity = PagePool(spec, pool_pages), model.identity(spec)
        connector: Connector = NoStore(pool, identity)
        if stored:
            connector = StoreConnector(
                tierstore.open(None, spec, identity=identity, pools=pool, host_bytes=16 << 20)
            )
        runner = Model(model.config, model.weights, [make_attention(pool, model.config)], device="cpu")
        made.append(DraftModel(runner, connector, settings=EngineSettings(prefill_chunk=64)))
        return made[-1]

    yield make
    for each in made:
        assert each.connector.available() == each.connector.pool.num_pages


@pytest.mark.parametrize(("pool_pages", "count"), [(20, 20), *portion((256, 20), (256, 200))])
def test_a_draft_models_greedy_output_is_equal(
    pool_pages: int,
    count: int,
    tiny: LoadedModel,
    engine_of: EngineOf,
    draft_of: Callable[..., DraftModel],
) -> None:
    """The draft is half of the model: right often, and wrong often. Also where it has too few pages."""
    half = replace(
        tiny,
        config=replace(tiny.config, layers=1),
        weights=replace(tiny.weights, layers=tiny.weights.layers[:1]),
        digest="half",
    )
    asked = prompts(count)
    plain = engine_of(tiny, pool_pages=256).generate(asked, GREEDY)
    engine = engine_of(tiny, pool_pages=256, drafter=draft_of(half, pool_pages=pool_pages))
    drafted = engine.generate(asked, GREEDY)
    assert [each.tokens for each in drafted] == [each.tokens for each in plain]
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens


def test_a_draft_model_that_is_the_model_is_always_right(
    tiny: LoadedModel, engine_of: EngineOf, draft_of: Callable[..., DraftModel]
) -> None:
    """Sampled as well: it is asked with the same random numbers. Its pages are stored, and found again."""
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    drafter = draft_of(tiny, stored=True)
    [plain] = engine_of(tiny).generate([prompts(1)[0] * 3], params)
    engine = engine_of(tiny, drafter=drafter)
    for _ in range(2):
        [drafted] = engine.generate([prompts(1)[0] * 3], params)
        assert drafted.tokens == plain.tokens
        assert drafted.metrics.accepted_tokens == drafted.metrics.drafted_tokens
    assert engine.stats().generated_tokens / engine.stats().steps > 3
    store_stats = drafter.connector.stats()
    assert store_stats is not None
    assert store_stats.counters["hit_tokens"]["hbm"] > 0


def test_a_drafter_that_cannot_work() -> None:
    with pytest.raises(UsageError, match="at least one token"):
        PromptLookupDrafter(tokens=0)
    with pytest.raises(UsageError, match="shortest"):
        PromptLookupDrafter(longest=1, shortest=2)
