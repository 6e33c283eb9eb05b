"""Attention over pages beyond memory has the same bits as over pages in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.test_decode import config_of
from tests.portions import diagonal
from tierstore import native
from tierstore.errors import UsageError
from tierstore.testing.faulty_io import Effect, Fail, Fault, FaultyIO, FlipBit, Lose, Misdirect, Short, Stall
from tierstore.tiers import overflow
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.overflow import Overflow, OverflowFailedError, OverflowPool
from tierstore_engine.attention import cpu, make_attention
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.beams import BeamParams
from tierstore_engine.build import build_engine
from tierstore_engine.config import ModelConfig
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.kv_format import KVFormat
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, FinishReason, StepOutput
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

CHUNK, PAGES, LAYERS = 8, 96, 2
FORMATS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"kv": KVFormat("int8", "int8")},
    "fp8": {"kv": KVFormat("fp8_e4m3", "fp8_e4m3")},
    "capped": {"score_cap": 2.0},
}


class Sequences:
    """Sequences that grow in the pages of a pool. The same seed gives the same numbers."""

    def __init__(self, pool: PagePool, config: ModelConfig, count: int, seed: int) -> None:
        self.pool = pool
        self.config = config
        self.attention = make_attention(pool, config)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(PAGES, generator=self.generator).tolist()
        self.tables: list[list[int]] = [[] for _ in range(count)]
        self.lengths = [0] * count

    def step(self, news: list[int], shared: int = 0) -> list[torch.Tensor]:
        """Write and attend ``news`` tokens. Return the outputs of all layers."""
        spans = []
        for at, new in enumerate(news):
            stop = self.lengths[at] + new
            while len(self.tables[at]) * CHUNK < stop:
                self.tables[at].append(self.free.pop())
            if new:
                spans.append(Span((list(self.tables[at]),), self.lengths[at], stop))
            self.lengths[at] = stop
        batch = BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")
        found = []
        for layer in range(LAYERS):
            tokens, config = sum(news), self.config
            keys, values = torch.randn(
                (2, tokens, config.kv_heads, config.head_dim), generator=self.generator
            ).to(getattr(torch, config.dtype))
            queries = torch.randn((tokens, config.heads, config.head_dim), generator=self.generator)
            self.attention.write(layer, keys, values, batch)
            found += self.attention.attend_with_lse(layer, queries.to(keys.dtype), batch)
        return found

    def share(self, of: int, to: int) -> None:
        """Let one sequence have the whole pages of another one."""
        whole = self.lengths[of] // CHUNK
        self.tables[to], self.lengths[to] = self.tables[of][:whole], whole * CHUNK


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(native, "DECODE", None)
    elif native.DECODE is None:
        pytest.skip("tierstore was built without a C compiler")
    monkeypatch.setattr(cpu, "BLOCK_TOKENS", 32)
    return str(request.param)


steps = st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3).filter(any), min_size=1, max_size=5)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(4, 2, 16), (6, 1, 8), (9, 3, 64)]),
    kind=st.sampled_from(sorted(FORMATS)),
    steps=steps,
    shared=st.booleans(),
    resident=st.integers(14, 30),
    seed=st.integers(0, 99),
)
def test_the_same_bits(
    way: str,
    tmp_path: Path,
    shape: tuple[int, int, int],
    kind: str,
    steps: list[list[int]],
    shared: bool,
    resident: int,
    seed: int,
) -> None:
    config = config_of(*shape, **FORMATS[kind])
    spec = config.kv_spec(chunk_tokens=CHUNK)
    here = Sequences(PagePool(spec, PAGES), config, 3, seed)
    pool = OverflowPool(spec, PAGES, resident_pages=resident, directory=tmp_path, staging_bytes=1)
    there = Sequences(pool, config, 3, seed)
    try:
        for each in (here, there):
            each.step([90, 0, 0])
            if shared:
                each.share(0, 1)
        for news in [[1, 1, 1], *steps, [1, 1, 1]]:
            expected, found = here.step(news), there.step(news)
            assert all(map(torch.equal, expected, found))
        assert pool.stats.lost_pages == 0
        assert int(pool._backed.sum()) <= resident
    finally:
        pool.close()


# -- the engine ------------------------------------------------------------------------------------------

GREEDY = SamplingParams(max_new_tokens=20, ignore_eos=True, keep_logits=True)
MODELS = ["llama3", "deepseek-v3", "gemma3", "qwen3-next"]
PROMPT = list(range(3, 250)) * 2  # larger than what stays in memory


SETTINGS = EngineSettings(prefill_chunk=64, max_sequences=4, plan="load")
RESIDENT = 24


def engine_beyond(model: LoadedModel, folder: Path, **options: Any) -> Engine:
    """An engine over ``RESIDENT`` pages in memory and 400 in a file."""
    layers = model.kv_spec(chunk_tokens=16).split()[0].num_layers
    beyond = Overflow(folder, 400 * layers * 16384)
    options = {"chunk_tokens": 16, "settings": SETTINGS, **options}
    return build_engine(model, pool_pages=RESIDENT, overflow=beyond, **options)


class Engines:
    """Engines of one model over pages in memory, and over pages of which only some are."""

    def __init__(self, model: LoadedModel, folder: Path) -> None:
        self.model = model
        self.here = build_engine(model, pool_pages=400, chunk_tokens=16, settings=SETTINGS)
        self.there = engine_beyond(model, folder)

    @property
    def pool(self) -> OverflowPool:
        pool = self.there.connector.pool
        assert isinstance(pool, OverflowPool)
        return pool

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def engines_of(
    tmp_path: Path, loaded: Callable[..., LoadedModel], checkpoints: Callable[..., Path]
) -> Iterator[Callable[..., Engines]]:
    made: list[Engines] = []

    def make(name: str) -> Engines:
        made.append(Engines(loaded(str(checkpoints(name))), tmp_path / str(len(made))))
        return made[-1]

    yield make
    for each in made:
        each.close()


def same(first: Completion, second: Completion, *, within: float = 0.0) -> bool:
    assert first.logits is not None
    assert second.logits is not None
    return first.tokens == second.tokens and np.allclose(first.logits, second.logits, rtol=0, atol=within)


@pytest.mark.parametrize("name", MODELS)
def test_sequences_larger_than_their_memory(name: str, engines_of: Callable[..., Engines]) -> None:
    engines = engines_of(name)
    prompts = [PROMPT, PROMPT[:100], PROMPT[5:500], PROMPT[:333]]
    for prompt in [
        *prompts,
        *prompts,
    ]:  # the second time with pages of the first; alone, for steps of equal shapes
        [expected], [found] = (each.generate([prompt], GREEDY) for each in (engines.here, engines.there))
        assert same(expected, found)
        assert found.metrics.reused_tokens == expected.metrics.reused_tokens
        assert int(engines.pool._backed.sum()) <= RESIDENT
    assert engines.pool.stats.pages > 0
    together = zip(*(each.generate(prompts, GREEDY) for each in (engines.here, engines.there)), strict=True)
    assert all(same(expected, found, within=1e-4) for expected, found in together)


def test_samples_share_pages_beyond_memory(engines_of: Callable[..., Engines]) -> None:
    engines = engines_of("llama3")
    params = replace(GREEDY, temperature=1.0, seed=3)
    expected, found = (each.sample(PROMPT, params, n=3) for each in (engines.here, engines.there))
    assert all(map(same, expected, found))


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_a_store_below(name: str, engines_of: Callable[..., Engines], tmp_path: Path) -> None:
    """Pages return from the store to a pool in the next life, beyond its memory as well."""
    options = {"store": str(tmp_path / "store"), "disk_bytes": 64 << 20, "host_bytes": 1 << 20}
    [expected] = engines_of(name).here.generate([PROMPT], GREEDY)
    for hit in (False, True):
        model = engines_of(name)
        engine = engine_beyond(model.model, tmp_path / f"life {hit}", **options)
        try:
            [found] = engine.generate([PROMPT], GREEDY)
            assert same(expected, found, within=1e-4 if hit else 0)
            assert (found.metrics.reused_tokens > 450) == hit
        finally:
            engine.close()


FAULTS: dict[str, Callable[[], tuple[str, Effect]]] = {
    "flipped": lambda: ("preadv", FlipBit(12345)),
    "unreadable": lambda: ("preadv", Fail(errno.EIO)),
    "short": lambda: ("preadv", Short()),
    "unwritable": lambda: ("pwritev", Fail(errno.EIO)),
    "full": lambda: ("pwritev", Fail(errno.ENOSPC)),
    "lost": lambda: ("pwritev", Lose()),
    "elsewhere": lambda: ("pwritev", Misdirect(4096)),
}


@pytest.mark.parametrize(*diagonal(fault=FAULTS, name=["llama3", "qwen3-next"]))
def test_a_bad_disk_costs_time_or_its_own_request(
    name: str, fault: str, engines_of: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    io = FaultyIO()
    monkeypatch.setattr(overflow, "QueuedIO", lambda: io)
    engines = engines_of(name)
    kind, effect = FAULTS[fault]()
    random = Random(fault)
    for first, often in enumerate((0.0, 0.01, 0.2)):
        io.set(Fault(lambda call, often=often: call.kind == kind and random.random() < often, effect))
        prompts = [PROMPT[first:], PROMPT[first:100], PROMPT[first + 5 : 500]]
        if engines.pool.failed:  # larger requests are refused from now on
            with pytest.raises(RequestError, match="pages"):
                engines.there.generate(prompts, GREEDY)
            prompts = prompts[1:2]
        expected, found = (each.generate(prompts, GREEDY) for each in (engines.here, engines.there))
        for wanted, got in zip(expected, found, strict=True):
            if got.finish_reason is FinishReason.ERROR:
                assert got.error
                assert often
            else:  # computed again behind another hit, with other shapes
                assert same(wanted, got, within=1e-4)
    assert engines.pool.stats.lost_pages or engines.pool.failed
    connector = engines.there.connector
    assert connector.available() == connector.pool.num_pages  # none has leaked


def test_a_failing_disk_ends_a_beam_search(
    engines_of: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with one error, and others go on."""
    io = FaultyIO()
    monkeypatch.setattr(overflow, "QueuedIO", lambda: io)
    engines = engines_of("llama3")
    io.set(Fault(lambda call: call.kind == "preadv", Fail(errno.EIO)))
    with pytest.raises(OverflowFailedError, match="the beam search has ended"):
        engines.there.beam_search(PROMPT, BeamParams(width=2, max_new_tokens=6))
    assert not engines.there.has_work
    [expected], [found] = (each.generate([PROMPT[:100]], GREEDY) for each in (engines.here, engines.there))
    assert same(expected, found, within=1e-4)
    connector = engines.there.connector
    assert connector.available() == connector.pool.num_pages


def test_a_disk_that_does_not_answer(
    engines_of: Callable[..., Engines], monkeypatch: pytest.MonkeyPatch
) -> None:
    io, stall = FaultyIO(), Stall()
    monkeypatch.setattr(overflow, "QueuedIO", lambda: io)
    engines = engines_of("llama3")
    engines.pool.answer_s = 0.2
    [expected] = engines.there.generate([PROMPT[:100]], GREEDY)
    engines.there.add(PROMPT, GREEDY)
    while not engines.pool.stats.pages:
        engines.there.step()
    io.set(Fault(lambda call: call.kind == "preadv", stall))
    try:
        outputs: list[StepOutput] = []
        while engines.there.has_work:
            outputs += engines.there.step()
        completion = outputs[-1].completion
        assert completion is not None
        assert "did not answer" in str(completion.error)
        [found] = engines.there.generate([PROMPT[:100]], GREEDY)
        assert same(expected, found, within=1e-4)
        with pytest.raises(RequestError, match="pages"):
            engines.there.add(PROMPT, GREEDY)
    finally:
        stall.release()


def test_what_is_refused(loaded: Callable[..., LoadedModel], tmp_path: Path) -> None:
    tiny = loaded("tiny")
    with pytest.raises(UsageError, match="a step may write"):
        build_engine(tiny, pool_pages=4, overflow=Overflow(tmp_path, 1 << 24))
    many = EngineSettings(max_sequences=65)
    with pytest.raises(UsageError, match="at most 64, got 65"):
        build_engine(tiny, pool_pages=400, settings=many, overflow=Overflow(tmp_path, 1 << 24))
    with pytest.raises(UsageError, match="holds 0 pages, and the memory 400"):
        build_engine(tiny, pool_pages=400, overflow=Overflow(tmp_path, 1))
    with pytest.raises(UsageError, match="no room for an overflow file"):
        build_engine(tiny, pool_pages=400, overflow=Overflow(tmp_path, 1 << 44))
    with pytest.raises(UsageError, match="cannot be resized"):
        build_engine(tiny, pool_pages=400, most_pool_bytes=1 << 30, overflow=Overflow(tmp_path, 1 << 24))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot create an overflow file"):
        build_engine(tiny, pool_pages=400, overflow=Overflow(tmp_path / "file", 1 << 24))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
