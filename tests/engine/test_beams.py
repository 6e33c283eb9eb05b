"""Beam search: the hypotheses and scores of transformers, over pages that beams share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.stored import Stored
from tests.portions import chosen, diagonal
from tests.tiny_models import VOCAB, reference_model
from tierstore_engine.beams import BeamParams, BeamSearch
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import TokenLogprob
from tierstore_engine.sampling import SamplingParams

from .conftest import Oracle

EngineOf = Callable[..., Engine]
NEW = 24
EOS = tuple(range(40, 60))  # so many that some hypothesis ends at nearly every step


@pytest.fixture(scope="module")
def oracle(oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles("llama3")


def transformers_beams(prompt: list[int], *, width: int, eos: tuple[int, ...], **options: Any) -> Any:
    """What transformers returns: the generated tokens of each hypothesis, and its score."""
    ids = torch.tensor([prompt])
    out = reference_model("llama3").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=NEW,
        eos_token_id=list(eos) or None,
        pad_token_id=VOCAB - 1,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for row, score in zip(
        out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True
    ):
        ends = [place for place, token in enumerate(row) if token in eos]
        found.append((tuple(row[: ends[0] + 1] if ends else row), score))
    return found


def with_eos(model: LoadedModel, eos: tuple[int, ...]) -> LoadedModel:
    return replace(model, config=replace(model.config, eos_ids=eos))


@pytest.mark.parametrize(*diagonal(width=[2, 4], length_penalty=[1.0, 0.0, -1.0, 2.0]))
def test_without_an_end(
    width: int, length_penalty: float, oracle: Oracle, loaded: Callable[..., LoadedModel], engine_of: EngineOf
) -> None:
    expected = transformers_beams(oracle.prompt[:80], width=width, eos=(), length_penalty=length_penalty)
    engine = engine_of(loaded(str(oracle.folder)))
    params = BeamParams(width=width, max_new_tokens=NEW, length_penalty=length_penalty)
    found = engine.beam_search(oracle.prompt[:80], params)
    assert [each.tokens for each in found] == [tokens for tokens, _ in expected]
    assert [each.score for each in found] == pytest.approx([score for _, score in expected], rel=1e-4)


def test_one_beam_is_greedy(oracle: Oracle, loaded: Callable[..., LoadedModel], engine_of: EngineOf) -> None:
    engine = engine_of(loaded(str(oracle.folder)))
    [found] = engine.beam_search(oracle.prompt, BeamParams(width=1, max_new_tokens=NEW))
    assert list(found.tokens) == oracle.tokens[:NEW]


@pytest.mark.parametrize(
    *diagonal(early_stopping=[True, False, "never"], length_penalty=[1.0, 0.0, -0.5, 3.0])
)
@pytest.mark.parametrize("start", chosen([0, 50, 100], 50))
def test_with_ends(
    early_stopping: Any,
    length_penalty: float,
    start: int,
    oracle: Oracle,
    loaded: Callable[..., LoadedModel],
    engine_of: EngineOf,
) -> None:
    prompt = oracle.prompt[start : start + 60]
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    expected = transformers_beams(prompt, width=3, eos=EOS, **options)
    engine = engine_of(with_eos(loaded(str(oracle.folder)), EOS))
    found = engine.beam_search(prompt, BeamParams(width=3, max_new_tokens=NEW, **options))
    assert [each.tokens for each in found] == [tokens for tokens, _ in expected]
    assert [each.score for each in found] == pytest.approx([score for _, score in expected], rel=1e-4)
    assert not engine.has_work


def test_beams_share_their_pages(
    oracle: Oracle, loaded: Callable[..., LoadedModel], engine_of: EngineOf
) -> None:
    """80 tokens are five pages, which all beams have in common; behind them each has two at most."""
    engine = engine_of(loaded(str(oracle.folder)))
    seen = []

    def step() -> Any:
        outputs = Engine.step(engine)
        stats = engine.stats()
        seen.append((stats.total_pages - stats.available_pages, stats.shared_pages))
        return outputs

    engine.step = step  # type: ignore[method-assign]
    engine.beam_search(oracle.prompt[:80], BeamParams(width=3, max_new_tokens=NEW))
    assert seen[0] == (5, 2 * 5)
    assert all(shared >= 2 * 5 for _, shared in seen[:-1])
    assert max(used for used, _ in seen) <= 5 + 3 * 2
    assert seen[-1] == (0, 0)


@pytest.mark.parametrize("others", chosen([4, 5], 5))
def test_beams_beside_others_that_need_pages(
    others: int, oracle: Oracle, loaded: Callable[..., LoadedModel], engine_of: EngineOf
) -> None:
    """Older requests take the beams' pages in the middle of the search."""
    params = BeamParams(width=3, max_new_tokens=100)
    model = loaded(str(oracle.folder))
    prompt = oracle.prompt[:80]
    expected = engine_of(model).beam_search(prompt, params)
    engine = engine_of(model, pool_pages=3 * 12)
    greedy = SamplingParams(max_new_tokens=120, ignore_eos=True)
    for number in range(others):
        engine.add(oracle.prompt[number : number + 90], greedy)
    assert [each.tokens for each in engine.beam_search(prompt, params)] == [each.tokens for each in expected]
    while engine.has_work:
        engine.step()
    assert engine.stats().preemptions > 0


def test_searches_at_the_same_time(
    oracle: Oracle, loaded: Callable[..., LoadedModel], engine_of: EngineOf
) -> None:
    """They wait for each other's pages, and neither for good."""
    params = BeamParams(width=3, max_new_tokens=100)
    model = loaded(str(oracle.folder))
    prompts = [oracle.prompt[start : start + 80] for start in range(0, 200, 40)]
    expected = [engine_of(model).beam_search(prompt, params) for prompt in prompts]
    engine = engine_of(model, pool_pages=3 * 12)
    groups = [engine._beams.begin(prompt, params, None) for prompt in prompts]
    while not all(group.search.done for group in groups):
        engine.step()
        for group in groups:
            if group.search.done:
                engine._beams.end(group)
    assert [[tokens for _, tokens in group.search.hypotheses] for group in groups] == [
        [each.tokens for each in some] for some in expected
    ]
    assert engine.stats().preemptions > 0


def test_over_a_store(
    oracle: Oracle,
    loaded: Callable[..., LoadedModel],
    engine_of: EngineOf,
    stored_engine: Callable[..., Stored],
) -> None:
    params = BeamParams(width=4, max_new_tokens=60)
    model = loaded(str(oracle.folder))
    expected = engine_of(model).beam_search(oracle.prompt[:100], params)
    stored = stored_engine(model)
    for _ in range(2):
        found = stored.engine.beam_search(oracle.prompt[:100], params)
        assert [each.tokens for each in found] == [each.tokens for each in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"early_stopping": "soon"}, "true, false or 'never'"),
        ({"width": 9}, "max_sequences is 8"),
        ({"width": 8, "max_new_tokens": 400}, "may need 208 pages, but the pool has 64"),
    ],
)
def test_searches_that_cannot_be_made(
    options: dict[str, Any], message: str, tiny: LoadedModel, engine_of: EngineOf
) -> None:
    engine = engine_of(tiny, max_sequences=8)
    with pytest.raises(RequestError, match=message):
        engine.beam_search([1] * 10, BeamParams(**options))
    assert not engine.has_work


def test_the_rules_by_hand() -> None:
    search = BeamSearch(BeamParams(width=2, max_new_tokens=2), eos_ids=[9], max_tokens=2)
    offers = [TokenLogprob(1, -0.1), TokenLogprob(9, -0.2), TokenLogprob(2, -3.0), TokenLogprob(3, -4.0)]
    moves = search.advance([offers])
    assert [(move.parent, move.token) for move in moves] == [(0, 1), (0, 2)]
    assert search.hypotheses == [(-0.2, (9,))]
    assert search.advance([offers, offers]) == []
    assert search.done
    assert search.hypotheses[0] == (pytest.approx(-0.1), (1, 1))
    assert search.hypotheses[1] == (pytest.approx(-0.15), (1, 9))
