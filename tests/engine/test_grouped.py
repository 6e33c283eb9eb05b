"""The engine with models of several layer groups: what it computes cold, and what comes back from each tier,
continues as transformers does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch

import tierstore
from tests.portions import chosen, diagonal, portion
from tests.tiny_models import GROUPED, STATES, VOCAB, reference_model
from tierstore.errors import UsageError
from tierstore.tiers.group_pools import bytes_for, open_group_pools
from tierstore.tiers.overflow import Overflow
from tierstore_connectors.base import Connector
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine.beams import BeamParams
from tierstore_engine.build import LoadedModel, build_draft_model, build_engine, make_runner
from tierstore_engine.engine import Engine
from tierstore_engine.errors import ModelError, RequestError
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import SequenceState
from tierstore_engine.settings import EngineSettings

from .conftest import NEW_TOKENS, STORED_CHUNK, Oracle
from .test_oracle import GREEDY, MAX_LOGIT_DIFF, assert_same, finish

CHECKPOINT = 4 * STORED_CHUNK


REMEMBERING = (*GROUPED, *STATES)


# Windows, attention chunks, states beside attention, and states alone. The other families differ in what
# their layers compute.
@pytest.fixture(params=chosen(REMEMBERING, "gemma3", "llama4", "qwen3-next", "nemotron-h", "mamba", "mamba2"))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def oracle(name: str, oracles: Callable[[str], Oracle]) -> Oracle:
    return oracles(name)


@pytest.fixture
def model(oracle: Oracle, loaded: Callable[..., LoadedModel]) -> LoadedModel:
    return loaded(str(oracle.folder))


@pytest.fixture
def engine_of(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """Makes an engine; ``disk`` names its store's directory, ``stored`` says whether it has one. When it is
    closed every page is where it belongs."""
    engines: list[Engine] = []

    def make(
        model: LoadedModel,
        *,
        stored: bool = True,
        disk: str | None = None,
        pages: int = 64,
        **settings: Any,
    ) -> Engine:
        spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
        parts = spec.split()
        pools = open_group_pools(parts, bytes_for(parts, [pages] * len(parts)))
        connector: Connector = NoStore(pools, model.identity(spec))
        if stored:
            store = tierstore.open(
                tmp_path / disk if disk else None,
                spec,
                identity=model.identity(spec),
                pools=pools,
                host_bytes=16 << 20,
                disk_bytes=16 << 20,
                checkpoint_tokens=CHECKPOINT,
            )
            connector = StoreConnector(store)
        # These models compute faster than some disks load.
        values = {"prefill_chunk": 64, "plan": "load", "checkpoint_tokens": CHECKPOINT, **settings}
        made = EngineSettings(**values)
        engines.append(Engine(make_runner(model, pools, made), model.tokenizer, connector, made))
        return engines[-1]

    yield make
    for engine in engines:
        if engine not in CLOSED:
            close(engine)


CLOSED: WeakSet[Engine] = WeakSet()


def close(engine: Engine) -> None:
    CLOSED.add(engine)
    connector = engine.connector
    if not engine.has_work:
        if isinstance(connector, StoreConnector):
            assert connector.store.flush(60)
            connector.store.check()
        for group, pool in enumerate(connector.pools):
            assert connector.available(group=group) == pool.capacity
    engine.close()


def forget(engine: Engine) -> None:
    """What is in the page pools has to come from below them."""
    assert isinstance(engine.connector, StoreConnector)
    assert engine.connector.store.flush(60)
    for group, pool in enumerate(engine.connector.pools):
        engine.connector.evict(pool.num_pages, group=group)


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
def test_from_each_tier(
    tier: str, oracle: Oracle, model: LoadedModel, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of(model, disk="store")
    engine.generate([oracle.prompt], GREEDY)
    if tier == "host":
        forget(engine)
    if tier == "disk":
        close(engine)
        engine = engine_of(model, disk="store")
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
    assert following.metrics.reused_tokens == len(oracle.prompt) + NEW_TOKENS - 1


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
    first = engine.add(oracle.prompt[::-1], GREEDY)
    second = engine.add(oracle.prompt, GREEDY)
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


@pytest.mark.parametrize("name", STATES, indirect=True)
def test_states_refuse_what_needs_attention(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an overflow file needs layers that read every token"):
        build_engine(model, pool_pages=4, overflow=Overflow(tmp_path, 1 << 30))
    with pytest.raises(UsageError, match="a draft model cannot have recurrent states"):
        build_draft_model(model, model, pool_pages=4, tokens=2)
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
    assert list(completions[other].tokens) == oracle.tokens
