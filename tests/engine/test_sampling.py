"""The sampler against its definition, token by token."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierstore_engine.errors import RequestError
from tierstore_engine.sampling import Draw, SamplingParams, penalized, sample, weights

logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=40).map(
    lambda values: torch.tensor(values, dtype=torch.float32)
)
filters = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
uniforms = st.floats(0, 1, exclude_max=True)


def expected(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The filtered distribution, written down as the parameters are documented."""
    weights = [math.exp((value - max(logits)) / params.temperature) for value in logits]
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])  # weights may be rounded to equals
    ranked = ranked[: params.top_k or len(ranked)]
    total = sum(weights[token] for token in ranked)
    kept, before = {}, 0.0
    for token in ranked:
        share = weights[token] / total
        if not kept or (before < params.top_p and share >= params.min_p * weights[ranked[0]] / total):
            kept[token] = share
        before += share
    return {token: share / sum(kept.values()) for token, share in kept.items()}


def choose(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """One row alone."""
    (choice,) = sample(logits.unsqueeze(0), [Draw(params, uniform)]).choices()
    return choice.token


def one_by_one(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """The choice as it is defined: from the tokens that the filters leave, by their cumulative weights."""
    if params.temperature == 0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.max()) / params.temperature
    count = min(params.top_k, len(logits)) or len(logits)
    ranked = scaled.sort(descending=True, stable=True)
    tokens, probabilities = ranked.indices[:count], ranked.values[:count].softmax(0)
    before = probabilities.cumsum(0) - probabilities
    kept = (before < params.top_p) & (probabilities >= params.min_p * probabilities[0])
    kept[0] = True
    tokens, cumulative = tokens[kept], (probabilities[kept] / probabilities[kept].sum()).cumsum(0)
    rank = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(tokens[min(rank, len(tokens) - 1)])


def candidates(logits: torch.Tensor, params: SamplingParams) -> dict[int, float]:
    """The tokens that may come next with their probabilities."""
    tokens, found = weights(logits.unsqueeze(0), [params])
    total = float(found.sum())
    pairs = zip(tokens[0].tolist(), found[0].tolist(), strict=True)
    return {token: weight / total for token, weight in pairs if weight > 0}


@given(logit_rows, filters)
@example(torch.tensor([-1.4013e-45, 0.0]), SamplingParams(temperature=1.0, top_p=0.25))
@example(torch.tensor([0.0, 0.0, 1.0, 3.2e-18]), SamplingParams(temperature=1.0, top_p=0.5))
def test_candidates_are_the_filtered_distribution(logits: torch.Tensor, params: SamplingParams) -> None:
    found = candidates(logits, params)
    assert found[int(logits.argmax())] == max(found.values())
    assert sum(found.values()) == pytest.approx(1)
    wanted = {token: share for token, share in expected(logits.tolist(), params).items() if share > 0}
    # Rounding may decide differently about a token that lies on a filter's very edge.
    for token in found.keys() ^ wanted.keys():
        loosened = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=min(params.top_p + 1e-6, 1),
            min_p=max(params.min_p - 1e-6, 0),
        )
        assert token in expected(logits.tolist(), loosened)
    if found.keys() == wanted.keys():
        assert found == pytest.approx(wanted)


@given(logit_rows, filters, uniforms)
@example(torch.zeros(4), SamplingParams(temperature=1, top_k=3), math.nextafter(1, 0))
def test_the_choice_is_a_candidate(logits: torch.Tensor, params: SamplingParams, uniform: float) -> None:
    assert choose(logits, params, uniform) in candidates(logits, params)


@given(logit_rows, uniforms)
def test_greedy_takes_the_likeliest(logits: torch.Tensor, uniform: float) -> None:
    assert logits[choose(logits, SamplingParams(), uniform)] == logits.max()
    assert logits[choose(logits, SamplingParams(temperature=1, top_k=1), uniform)] == logits.max()


def test_frequencies_are_the_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    params = SamplingParams(temperature=1)
    steps = 4000
    counts = Counter(choose(logits, params, (step + 0.5) / steps) for step in range(steps))
    for token, probability in enumerate(logits.softmax(0).tolist()):
        assert counts[token] / steps == pytest.approx(probability, abs=2 / steps)


def test_extreme_temperatures() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0])
    assert choose(logits, SamplingParams(temperature=1e-30), 0.999) == 1
    assert {choose(logits, SamplingParams(temperature=1e30), u) for u in (0.1, 0.5, 0.9)} == {0, 1, 2}


def mixed_draws(count: int, seed: int) -> list[Draw]:
    """Greedy and every filter, alone and together, and what is asked for beside the tokens."""
    chance = random.Random(seed)
    return [
        Draw(
            SamplingParams(
                temperature=chance.choice((0.0, 0.3, 1.0, 2.5)),
                top_k=chance.choice((0, 0, 1, 7, 40)),
                top_p=chance.choice((1.0, 1.0, 0.95, 0.3)),
                min_p=chance.choice((0.0, 0.0, 0.02)),
                logprobs=chance.choice((None, None, 0, 5)),
                keep_logits=chance.random() < 0.2,
            ),
            chance.random(),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [3, 1000, 32001])
def test_a_batch_is_its_rows_one_by_one(vocab_size: int) -> None:
    """Whoever else is in it, and by the definition."""
    draws = mixed_draws(45, vocab_size)  # more than are sampled together
    logits = torch.randn((len(draws), vocab_size), generator=torch.Generator().manual_seed(1)) * 3
    together = sample(logits, draws).choices()
    for row, draw, choice in zip(logits, draws, together, strict=True):
        (alone,) = sample(row.unsqueeze(0), [draw]).choices()
        assert choice.token == alone.token == one_by_one(row, draw.params, draw.uniform)
        assert choice.logprobs == alone.logprobs
        assert (choice.logprobs is None) == (draw.params.logprobs is None)
        assert (choice.logits is None) == (not draw.params.keep_logits)
        assert choice.logits is None or torch.equal(choice.logits, row)


def test_kept_logits_are_a_copy() -> None:
    """The tensor is the next step's."""
    logits = torch.zeros(1, 4)
    (choice,) = sample(logits, [Draw(SamplingParams(keep_logits=True))]).choices()
    logits[:] = 7
    assert choice.logits is not None
    assert choice.logits.tolist() == [0, 0, 0, 0]


def test_sampling_waits_for_no_device() -> None:
    """A device that has no numbers at all gets as far as one that is still computing them: whatever looks at
    one, or makes a shape of them, raises."""
    draws = mixed_draws(45, 0)
    sampled = sample(torch.empty((len(draws), 1000), device="meta"), draws)
    found = [sampled.tokens, *sampled.logits.values(), *chain(*sampled.logprobs.values())]
    assert {tensor.device.type for tensor in found} == {"meta"}
    assert sampled.logprobs
    assert sampled.logits
    with pytest.raises(RuntimeError, match="meta"):
        sampled.choices()


@given(logit_rows, st.integers(0, 50))
def test_logprobs(logits: torch.Tensor, top: int) -> None:
    (choice,) = sample(logits.unsqueeze(0), [Draw(SamplingParams(logprobs=top))]).choices()
    result = choice.logprobs
    assert result is not None
    exact = logits.double().log_softmax(0)
    assert result.chosen.token == choice.token
    assert result.chosen.logprob == pytest.approx(float(exact[choice.token]), abs=1e-4)
    assert len(result.top) == min(top, len(logits))
    assert [entry.logprob for entry in result.top] == pytest.approx(
        exact.sort(descending=True).values[: len(result.top)].tolist(), abs=1e-4
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": ("",)}, "stop string"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be more than 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ],
)
def test_impossible_parameters(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_a_bias_is_added_before_anything_is_chosen() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    greedy = SamplingParams(logprobs=1)
    choices = sample(logits, [Draw(greedy, bias={0: -1.5, 2: 1.5}), Draw(greedy)]).choices()
    assert [choice.token for choice in choices] == [2, 0]
    assert choices[0].logprobs is not None
    assert choices[0].logprobs.top[0].token == 0, "log probabilities are the model's own"
    assert logits.tolist() == [[3.0, 2.0, 1.0]] * 2


def test_penalties_count_what_was_generated() -> None:
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=0.25, logit_bias={5: 2.0})
    assert params.bias({}) == {5: 2.0}
    assert params.bias({5: 2, 7: 1}) == {5: 0.5, 7: -1.25}


def test_a_repetition_penalty_is_that_of_transformers() -> None:
    """Of each row alone, whatever the others have; log probabilities are the model's own."""
    transformers = pytest.importorskip("transformers")
    logits = torch.randn((3, 500), generator=torch.Generator().manual_seed(3)) * 4
    logits[0, 7] = 0.0
    repeated = [torch.tensor([7, 499, 3, 7, *range(40, 90)]), None, torch.arange(500)]
    penalties = [1.3, 1.0, 0.7]
    draws = [
        Draw(SamplingParams(repetition_penalty=penalty, logprobs=1), repeated=tokens)
        for penalty, tokens in zip(penalties, repeated, strict=True)
    ]
    changed = penalized(logits, draws)
    for row, (penalty, tokens) in enumerate(zip(penalties, repeated, strict=True)):
        one = logits[row : row + 1]
        if tokens is not None:
            one = transformers.RepetitionPenaltyLogitsProcessor(penalty)(tokens.unsqueeze(0), one)
        assert torch.equal(changed[row], one[0])
    choices = sample(logits, draws).choices()
    assert [choice.token for choice in choices] == changed.argmax(-1).tolist()
    assert [choice.logprobs.top[0].token for choice in choices if choice.logprobs] == logits.argmax(
        -1
    ).tolist()


def test_a_tiny_repetition_penalty_leaves_numbers() -> None:
    logits = torch.tensor([[3.0, 2.0, -1.0]])
    params = SamplingParams(repetition_penalty=1e-300, temperature=1.0)
    draw = Draw(params, uniform=0.99, repeated=torch.tensor([0, 1, 2]))
    assert torch.isfinite(penalized(logits, [draw])).all()
    assert sample(logits, [draw]).choices()[0].token in (0, 1)


def test_rows_may_be_drawn_from_more_than_once() -> None:
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    tokens = sample(logits, [Draw(SamplingParams())] * 3, [1, 0, 1]).tokens
    assert tokens.tolist() == [0, 1, 0]
