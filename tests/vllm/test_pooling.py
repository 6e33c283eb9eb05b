"""Pooling models: where vLLM cannot go on from a part of a prompt, a hit would end the engine."""

from __future__ import annotations

import pytest

from tests.vllm import models
from tests.vllm.harness import EXACT, patient
from tests.vllm.models import prompt
from tests.vllm.pooling import embed

TOKENS = prompt(500)


def equal(vectors):
    return all(
        abs(mine - theirs) <= EXACT
        for vector in vectors
        for mine, theirs in zip(vectors[0], vector, strict=True)
    )


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_a_prompt_that_is_computed_in_one_piece_goes_without_the_cache(model, daemon, pooling):
    vectors, hits, said = embed(model(models.LLAMA), TOKENS, pooling, patient(daemon.url))
    assert equal(vectors)
    assert hits == 0
    assert daemon.stats().store.pages == 0
    assert (
        "runs without the cache: vLLM cannot continue prompts of this pooling model from a cached prefix"
        in said
    )


def test_other_prompts_that_are_pooled_come_from_the_cache(model, daemon):
    vectors, hits, _ = embed(model(models.LLAMA), TOKENS, "LAST", patient(daemon.url))
    assert equal(vectors)
    assert hits == 448
