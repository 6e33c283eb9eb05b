"""The same logits and greedy tokens as transformers, for every architecture and however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.portions import diagonal
from tests.tiny_models import ARCHITECTURES, reference_model
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, FinishReason, RequestId
from tierstore_engine.sampling import SamplingParams

from .conftest import NEW_TOKENS, Oracle

MAX_LOGIT_DIFF = 2e-4
WHOLE = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, keep_logits=True)
GREEDY = replace(WHOLE, max_new_tokens=24)  # enough for pages that begin in the answer


def assert_same(completion: Completion, oracle: Oracle) -> None:
    """The answer ends at its limit, and is the oracle's as far as it goes."""
    tokens = len(completion.tokens)
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.logits is not None
    assert list(completion.tokens) == oracle.tokens[:tokens]
    assert np.abs(completion.logits - oracle.logits[:tokens].numpy()).max() <= MAX_LOGIT_DIFF


def finish(engine: Engine) -> dict[RequestId, Completion]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return {output.request_id: output.completion for output in outputs if output.completion}


@pytest.mark.parametrize(*diagonal(name=ARCHITECTURES, prefill_chunk=[16, 112, 512]))
def test_alone(
    name: str,
    prefill_chunk: int,
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    engine_of: Callable[..., Engine],
) -> None:
    oracle = oracles(name)
    engine = engine_of(loaded(str(oracle.folder)), prefill_chunk=prefill_chunk)
    [completion] = engine.generate([oracle.prompt], GREEDY)
    assert_same(completion, oracle)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_in_a_mixed_batch(
    name: str,
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    engine_of: Callable[..., Engine],
) -> None:
    """Others decode while it prefills, and prefill while it decodes."""
    oracle = oracles(name)
    engine = engine_of(loaded(str(oracle.folder)), prefill_chunk=48, pool_pages=128)
    engine.add(oracle.prompt[5:40], GREEDY)
    for _ in range(3):
        engine.step()
    request_id = engine.add(oracle.prompt, GREEDY)
    for length in (200, 77, 1):
        for _ in range(6):
            engine.step()
        engine.add(oracle.prompt[:length], GREEDY)
    assert_same(finish(engine)[request_id], oracle)


@pytest.mark.parametrize("name", ["llama3", "mistral-windowed", "qwen3"])
def test_after_preemptions(
    name: str,
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    engine_of: Callable[..., Engine],
) -> None:
    """Both fit when admitted but not when they have grown; without a store the younger is computed again."""
    oracle = oracles(name)
    engine = engine_of(loaded(str(oracle.folder)), prefill_chunk=64, pool_pages=2 * 21 + 1)
    first = engine.add(oracle.prompt, GREEDY)
    second = engine.add(oracle.prompt, GREEDY)
    completions = finish(engine)
    assert_same(completions[first], oracle)
    assert_same(completions[second], oracle)
    assert completions[first].metrics.preemptions == 0
    assert completions[second].metrics.preemptions == 1
    assert completions[second].metrics.recomputed_tokens >= len(oracle.prompt)


def test_sharded_checkpoint(
    checkpoints: Callable[..., Path],
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    engine_of: Callable[..., Engine],
) -> None:
    folder = checkpoints("qwen3", sharded=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    [completion] = engine_of(loaded(str(folder))).generate([oracles("qwen3").prompt], GREEDY)
    assert_same(completion, oracles("qwen3"))


def test_a_repetition_penalty(
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    engine_of: Callable[..., Engine],
) -> None:
    oracle = oracles("qwen3")
    params = replace(GREEDY, repetition_penalty=1.3)
    [completion] = engine_of(loaded(str(oracle.folder))).generate([oracle.prompt], params)
    generated = reference_model("qwen3").generate(
        torch.tensor([oracle.prompt]),
        max_new_tokens=params.max_new_tokens,
        min_new_tokens=params.max_new_tokens,
        do_sample=False,
        repetition_penalty=1.3,
        pad_token_id=0,
    )
    assert completion.tokens == tuple(generated[0, len(oracle.prompt) :].tolist())
    assert list(completion.tokens) != oracle.tokens[: len(completion.tokens)]


def test_bfloat16_is_close(
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    engine_of: Callable[..., Engine],
) -> None:
    oracle = oracles("llama3")
    engine = engine_of(loaded(str(oracle.folder), dtype="bfloat16"))
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, keep_logits=True)
    [completion] = engine.generate([oracle.prompt], params)
    assert completion.logits is not None
    exact = oracle.logits[0].numpy()
    assert np.abs(completion.logits[0] - exact).max() < 0.15 * exact.std()
