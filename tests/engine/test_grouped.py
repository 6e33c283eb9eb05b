"""The engine with models of several layer groups: what it computes cold, and what comes back from each tier,
continues as transformers does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.grouped import CHECKPOINT, GroupedEngines, forget
from tests.portions import chosen, diagonal, portion
from tests.tiny_models import GROUPED, STATES, VOCAB, reference_model
from tierstore.errors import UsageError
from tierstore.tiers.overflow import Overflow
from tierstore_engine.beams import BeamParams
from tierstore_engine.build import build_engine
from tierstore_engine.engine import Engine
from tierstore_engine.errors import ModelError, RequestError
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import SequenceState

from .conftest import STORED_CHUNK, Oracle
from .test_oracle import GREEDY, MAX_LOGIT_DIFF, WHOLE, assert_same, finish

REMEMBERING = (*GROUPED, *STATES)


# Windows, attention chunks, states beside attention, and states alone. The other families differ in what
# their layers compute.
@pytest.fixture(params=chosen(REMEMBERING, "gemma3", "llama4", "qwen3-next", "nemotron-h", "mamba", "mamba2"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine_of(grouped: GroupedEngines) -> Callable[..., Engine]:
    return grouped.make


def last_chunk(tokens: int) -> int:
    """Where the last hit can begin that leaves a token to compute."""
    return (tokens - 1) // STORED_CHUNK * STORED_CHUNK


@pytest.mark.parametrize(*diagonal(name=REMEMBERING, prefill_chunk=[16, 112]), indirect=["name"])
def test_cold(
    oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine], prefill_chunk: int
) -> None:
    [completion] = engine_of(model, stored=False, prefill_chunk=prefill_chunk).generate(
        [oracle.prompt], GREEDY
    )
    assert_same(completion, oracle)


def test_in_a_mixed_batch(oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(model, stored=False, pages=128, prefill_chunk=48)
    engine.add(oracle.prompt[5:40], GREEDY)
    for _ in range(3):
        engine.step()
    request_id = engine.add(oracle.prompt, GREEDY)
    for length in (200, 1):
        for _ in range(6):
            engine.step()
        engine.add(oracle.prompt[:length], GREEDY)
    assert_same(finish(engine)[request_id], oracle)


@pytest.mark.parametrize(*diagonal(name=REMEMBERING, tier=["host", "disk", "hbm"]), indirect=["name"])
def test_from_each_tier(tier: str, oracle: Oracle, model: LoadedModel, grouped: GroupedEngines) -> None:
    engine = grouped.make(model, disk="store")
    engine.generate([oracle.prompt], GREEDY)
    if tier == "host":
        forget(engine)
    if tier == "disk":
        grouped.close(engine)
        engine = grouped.make(model, disk="store")
    [again] = engine.generate([oracle.prompt], GREEDY)
    assert_same(again, oracle)
    assert again.metrics.reused_by_tier == {tier: last_chunk(len(oracle.prompt))}


def test_the_next_turn_goes_on_at_the_end_of_the_answer(
    oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of(model)
    [turn] = engine.generate([oracle.prompt], GREEDY)
    forget(engine)
    [following] = engine.generate([[*oracle.prompt, *turn.tokens, 5, 6, 7]], GREEDY)
    # The last token of an answer has not been computed.
    assert following.metrics.reused_tokens == len(oracle.prompt) + len(turn.tokens) - 1


@pytest.mark.parametrize("step", portion(5, 1))
def test_prompts_that_share_a_beginning_of_any_length(
    step: int, name: str, oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]
) -> None:
    """At every offset within a chunk and a window, each from what all before it have left. A fifth of the
    offsets have no factor in common with a chunk's tokens."""
    engine = engine_of(model, pages=160)
    once = SamplingParams(max_new_tokens=1, ignore_eos=True, keep_logits=True)
    engine.generate([oracle.prompt[:150]], once)
    reused = 0
    for shared in range(97, 97 + 37 + STORED_CHUNK, step):
        other = [(token + 1) % VOCAB for token in oracle.prompt[shared : shared + 9]]
        prompt = [*oracle.prompt[:shared], *other]
        [completion] = engine.generate([prompt], once)
        with torch.inference_mode():
            right = reference_model(name)(torch.tensor([prompt]), use_cache=False).logits[0, -1].numpy()
        assert completion.logits is not None
        assert np.abs(completion.logits[0] - right).max() <= MAX_LOGIT_DIFF
        assert completion.metrics.reused_tokens <= shared
        reused += completion.metrics.reused_tokens
    assert reused > 0


def shrink_to_one(engine: Engine) -> None:
    """To the least memory that has room for each request alone."""
    size = engine.connector.pool.large_pages.large_bytes
    for large_pages in itertools.count(1):
        try:
            engine.resize_pool(large_pages * size)
        except UsageError:
            continue
        return


@pytest.mark.parametrize("stored", [False, True])
def test_after_preemptions(
    stored: bool, oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]
) -> None:
    """Both fit when admitted but not when they have grown: the memory gets smaller meanwhile, and comes
    back."""
    if not model.config.attends:
        pytest.skip("states do not grow")
    engine = engine_of(model, stored=stored)
    whole = engine.pool_size().nbytes
    first = engine.add(oracle.prompt[::-1], WHOLE)
    second = engine.add(oracle.prompt, WHOLE)
    while not any(output.request_id == second for output in engine.step()):
        pass
    shrink_to_one(engine)
    while engine._roster.get(second).state is SequenceState.RUNNING:
        engine.step()
    engine.resize_pool(whole)
    completions = finish(engine)
    metrics = completions[second].metrics
    assert_same(completions[second], oracle)
    assert completions[first].metrics.preemptions == 0
    assert metrics.preemptions == 1
    if stored:  # of states perhaps the last save point: there was no room for a later one
        assert metrics.recomputed_tokens < CHECKPOINT


@pytest.mark.parametrize("name", STATES, indirect=True)
def test_a_parked_state_goes_on(oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]) -> None:
    """Without attention too: it is found at the token where its sequence left, in the middle of a page."""
    engine = engine_of(model)
    request = engine.add(oracle.prompt, GREEDY)
    while engine.computed_tokens(request) < len(oracle.prompt) + 5:
        engine.step()
    assert engine.computed_tokens(request) % STORED_CHUNK
    engine._scheduler._park()
    completion = finish(engine)[request]
    assert_same(completion, oracle)
    assert completion.metrics.preemptions == 1
    assert completion.metrics.recomputed_tokens == 0


@pytest.mark.parametrize("name", STATES, indirect=True)
def test_the_room_for_states_does_not_depend_on_the_tokens(
    oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]
) -> None:
    """Four pages for a prompt of 21 chunks, and then for a second sequence beside it."""
    engine = engine_of(model, pages=4, max_sequences=2)
    assert engine.limits.longest == model.config.max_positions
    for completion in engine.generate([oracle.prompt, oracle.prompt], GREEDY):
        assert_same(completion, oracle)
    with pytest.raises(RequestError, match="width 3"):
        engine.beam_search(oracle.prompt, BeamParams(width=3))


@pytest.mark.parametrize("family", ["granite-hybrid", "qwen3-next", "deepseek-v3"])
def test_quantised_pages_beside_states_from_each_tier(
    family: str,
    checkpoints: Callable[..., Path],
    loaded: Callable[..., LoadedModel],
    grouped: GroupedEngines,
) -> None:
    """A warm run has the answer of a cold one. Float pages have another identity."""
    plain, model = (loaded(str(checkpoints(family)), kv_dtype=bits) for bits in ("auto", "int8"))
    prompt = [token % 300 for token in range(7, 7 + 11 * 200, 11)]
    other = grouped.make(plain, disk="store")
    other.generate([prompt], GREEDY)
    grouped.close(other)
    [cold] = grouped.make(model, stored=False).generate([prompt], GREEDY)
    engine = grouped.make(model, disk="store")
    for tier in ("", "host", "disk"):
        if tier == "host":
            forget(engine)
        if tier == "disk":
            grouped.close(engine)
            engine = grouped.make(model, disk="store")
        [found] = engine.generate([prompt], GREEDY)
        assert (tier in found.metrics.reused_by_tier) == bool(tier)
        assert found.tokens == cold.tokens
        assert found.logits is not None
        assert cold.logits is not None
        assert abs(found.logits - cold.logits).max() < MAX_LOGIT_DIFF


@pytest.mark.parametrize("name", STATES, indirect=True)
def test_states_refuse_what_needs_attention(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an overflow file needs layers that read every token"):
        build_engine(model, pool_pages=4, overflow=Overflow(tmp_path, 1 << 30))
    with pytest.raises(ModelError, match="--kv-dtype is for keys and values"):
        replace(model.config, kv=KVFormat.parse("int8"))


def test_a_fork_goes_on_by_itself(
    oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]
) -> None:
    """From pages that both have, and a copy of a state."""
    engine = engine_of(model, stored=False, pages=128)
    one = engine.add(oracle.prompt, GREEDY)
    while engine.stats().computed_tokens < len(oracle.prompt) + 5:
        engine.step()
    other = engine.fork(one)
    completions = finish(engine)
    assert_same(completions[one], oracle)
    assert completions[other].tokens == completions[one].tokens
