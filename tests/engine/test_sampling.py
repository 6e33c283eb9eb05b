"""The sampler against its definition, token by token."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tierstore_engine.errors import RequestError
from tierstore_engine.sampling import SamplingParams, candidates, choose, logprobs_of

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


@given(logit_rows, filters)
@example(torch.tensor([-1.4013e-45, 0.0]), SamplingParams(temperature=1.0, top_p=0.25))
def test_candidates_are_the_filtered_distribution(logits: torch.Tensor, params: SamplingParams) -> None:
    tokens, probabilities = candidates(logits, params)
    found = dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))
    assert found[int(logits.argmax())] == max(found.values())
    assert sum(found.values()) == pytest.approx(1)
    wanted = expected(logits.tolist(), params)
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
def test_the_choice_is_a_candidate(logits: torch.Tensor, params: SamplingParams, uniform: float) -> None:
    assert choose(logits, params, uniform) in candidates(logits, params)[0].tolist()


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


@given(logit_rows, st.integers(0, 50), st.data())
def test_logprobs(logits: torch.Tensor, top: int, data: st.DataObject) -> None:
    chosen = data.draw(st.integers(0, len(logits) - 1))
    result = logprobs_of(logits, chosen, top)
    exact = logits.double().log_softmax(0)
    assert result.chosen.logprob == pytest.approx(float(exact[chosen]), abs=1e-4)
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
    ],
)
def test_impossible_parameters(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)
