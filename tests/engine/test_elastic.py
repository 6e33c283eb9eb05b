"""Pools that grow and shrink under requests: every token is what it is alone, each page accounted for.

Two engines with models of different kinds share one memory: what one gives back the other takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

from tests.portions import portion
from tierstore.errors import UsageError
from tierstore.tiers.two_level import SmallPages, check
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.attention.base import NO_PAGE
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import SequenceState
from tierstore_engine.settings import EngineSettings
from tierstore_engine.tables import StateTable
from tierstore_engine.weights import digest_weights, random_weights

CHUNK = 16
MODELS = ("tiny", "tiny-gemma3", "tiny-qwen3-next")


@cache
def loaded(name: str) -> LoadedModel:
    """In float32, so that the same sums in another order choose the same tokens."""
    config = replace(preset(name), dtype="float32")
    weights = random_weights(config, seed=3, device="cpu")
    tokenizer = load_model("tiny", device="cpu").tokenizer
    return LoadedModel(config, tokenizer, weights, digest_weights(config, weights), "cpu")


def open_engine(name: str, folder: Path | None, *, pages: int = 48, most: int | None = None) -> Engine:
    return build_engine(
        loaded(name),
        pool_pages=pages,
        most_pool_bytes=most,
        store=None if folder is None else str(folder / name),
        host_bytes=16 << 20,
        disk_bytes=64 << 20,
        chunk_tokens=CHUNK,
        settings=EngineSettings(prefill_chunk=32, max_sequences=6, plan="load"),
    )


@dataclass(frozen=True)
class Ask:
    """A request: its tokens, and how many are to follow."""

    prompt: tuple[int, ...]
    answer: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_new_tokens=self.answer, ignore_eos=True)


def asks(count: int, draw: random.Random) -> list[Ask]:
    """Requests of which many begin alike."""
    stems = [tuple(draw.choices(range(3, 250), k=96)) for _ in range(4)]
    made = []
    for _ in range(count):
        stem = draw.choice(stems)[: draw.randrange(97)]
        made.append(
            Ask((*stem, *draw.choices(range(3, 250), k=draw.randrange(1, 30))), draw.randrange(1, 24))
        )
    return made


class Alone:
    """What a model says to a request that is the only one, without a store."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}
        self._answers: dict[tuple[str, Ask], tuple[int, ...]] = {}

    def __call__(self, name: str, ask: Ask) -> tuple[int, ...]:
        if (name, ask) not in self._answers:
            engine = self._engines.get(name)
            if engine is None:
                engine = self._engines[name] = open_engine(name, None)
            [completion] = engine.generate([list(ask.prompt)], ask.params)
            self._answers[name, ask] = tuple(completion.tokens)
        return self._answers[name, ask]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    made = Alone()
    yield made
    made.close()


def check_books(engine: Engine) -> None:
    """Free + used + cached = all there is, and each page in use is somebody's."""
    pools = engine.connector.pools
    assert isinstance(engine.connector, StoreConnector)
    store = engine.connector.store
    store.check()
    pools[0].large_pages.check()
    sequences = list(engine._roster)
    moving = any(s.state is SequenceState.LOADING or s.meeting or s.loading for s in sequences)
    for group, pool in enumerate(pools):
        tables = [sequence.tables[group] for sequence in sequences if sequence.tables]
        held = {page for table in tables for page in table.pages} - {NO_PAGE}
        held.update(*(table.snapshot for table in tables if isinstance(table, StateTable)))
        with store._hbm.lock:
            published, idle = set(store._hbm.published[group]), set(store._hbm.idle(group))
            used = pool.used_pages
        assert not held & idle, "a page in use may leave"
        if not moving:
            assert used == len(held | published)
        if len(pools) == 1:
            assert pool.free_pages + len(idle) + (used - len(idle)) == pool.capacity
    if len(pools) > 1:
        check([pool.books for pool in pools if isinstance(pool.books, SmallPages)])
        large = pools[0].large_pages
        assert large.present * large.large_bytes == engine.pool_size().nbytes


def finished(engine: Engine) -> None:
    """Nothing is left in use."""
    assert engine.connector.store.flush(30)
    check_books(engine)
    pool = engine.connector.pool
    engine.resize_pool(pool.large_pages.large_bytes)
    assert engine.pool_size().nbytes <= 2 * pool.large_pages.large_bytes
    assert all(
        each.used_pages == 0 for each in engine.connector.pools if each.capacity > each.books.per_large
    )


def run(engine: Engine, pending: Sequence[Ask], turn) -> dict[Ask, tuple[int, ...]]:
    """Serve all, a few new ones at a time; ``turn(step)`` is called before each step."""
    waiting, ids, answers = list(pending), {}, {}
    step = 0
    while waiting or engine.has_work:
        while waiting and len(ids) - len(answers) < 8:
            ask = waiting.pop()
            ids[engine.add(list(ask.prompt), ask.params)] = ask
        turn(step)
        step += 1
        for output in engine.step():
            if output.completion is not None:
                answers[ids[output.request_id]] = tuple(output.completion.tokens)
    return answers


@pytest.mark.parametrize("count", portion(10, 24))
@pytest.mark.parametrize("name", MODELS)
def test_half_the_pool_and_back_while_requests_run(name, count, alone, tmp_path):
    draw = random.Random(5)
    engine = open_engine(name, tmp_path)
    whole = engine.pool_size().nbytes
    sizes: set[int] = set()
    targets: set[int] = set()

    def turn(step: int) -> None:
        if step % 12 == 11:
            size = engine.resize_pool(whole // 2 if step % 24 == 11 else whole)
            targets.add(size.target_bytes)
        sizes.add(engine.pool_size().nbytes)
        check_books(engine)

    pending = asks(count, draw)
    answers = run(engine, pending, turn)
    assert answers == {ask: alone(name, ask) for ask in pending}
    assert min(sizes) < 0.6 * whole
    assert max(sizes) == whole
    assert len(targets) == 2
    finished(engine)
    engine.close()


def test_what_does_not_fit_is_refused_before_anything_changes(tmp_path):
    engine = open_engine("tiny", tmp_path)
    page = engine.connector.pool.spec.page_bytes
    request = engine.add([5] * 100, SamplingParams(max_new_tokens=60, ignore_eos=True))
    with pytest.raises(UsageError, match=r"request 0 may reach 160 tokens, and a pool of .* cancel it first"):
        engine.resize_pool(9 * page)
    with pytest.raises(UsageError, match=r"the pool's size must be .* to .*, got"):
        engine.resize_pool(49 * page)
    assert engine.pool_size().nbytes == engine.pool_size().target_bytes == 48 * page
    engine.discard(request)
    assert engine.resize_pool(9 * page).nbytes == 9 * page
    with pytest.raises(RequestError, match="but the pool has 9"):
        engine.add([5] * 100, SamplingParams(max_new_tokens=60))
    engine.close()


class Shared:
    """Two engines and one memory: ``give`` moves some of it from one to the other."""

    def __init__(self, names: tuple[str, str], folder: Path, draw: random.Random, alone: Alone) -> None:
        self.names, self._draw, self._alone = names, draw, alone
        self.total = 0
        for name in names:
            probe = open_engine(name, None, pages=24)
            self.total += probe.pool_size().nbytes
            probe.close()
        self.engines = [open_engine(name, folder, pages=24, most=self.total) for name in names]
        self._left = [[], []]
        self._ids: list[dict] = [{}, {}]
        self.answered = self.moves = 0

    def serve(self, count: int) -> None:
        """``count`` sequences, each for one of the two."""
        for ask in asks(count, self._draw):
            self._left[self._draw.randrange(2)].append(ask)
        while any(self._left) or any(engine.has_work for engine in self.engines):
            for number, engine in enumerate(self.engines):
                while self._left[number] and len(self._ids[number]) < 7 and self._draw.random() < 0.5:
                    self._add(number, engine, self._left[number].pop())
                if engine.has_work:
                    self._step(number, engine)
                check_books(engine)
            if self._draw.random() < 0.15:
                self._give()
            assert sum(engine.pool_size().nbytes for engine in self.engines) <= self.total

    def _add(self, number: int, engine: Engine, ask: Ask) -> None:
        try:
            self._ids[number][engine.add(list(ask.prompt), ask.params)] = ask
        except RequestError:  # the pool is small just now
            self._left[number].insert(0, ask)
            self._give(to=number)

    def _step(self, number: int, engine: Engine) -> None:
        for output in engine.step():
            if output.completion is not None:
                ask = self._ids[number].pop(output.request_id)
                assert tuple(output.completion.tokens) == self._alone(self.names[number], ask)
                self.answered += 1

    def _give(self, to: int | None = None) -> None:
        """The one gives some, as far as its requests let it; the other takes what has been given so far."""
        to = self._draw.randrange(2) if to is None else to
        giver, taker = self.engines[1 - to], self.engines[to]
        small = giver.pool_size().nbytes // self._draw.choice((1, 2, 2, 3))
        before = giver.pool_size()
        try:
            giver.resize_pool(max(small, giver.connector.pool.large_pages.large_bytes))
        except UsageError:  # one of its requests would not fit
            unchanged = giver.pool_size() == before
            assert unchanged
        left = self.total - giver.pool_size().nbytes
        if left > taker.pool_size().nbytes:
            had = taker.pool_size().nbytes
            self.moves += taker.resize_pool(left).nbytes > had

    def close(self) -> None:
        for engine in self.engines:
            finished(engine)
            engine.close()


@pytest.mark.parametrize("count", portion(12, 24))
@pytest.mark.parametrize("names", [("tiny", "tiny-gemma3"), ("tiny-qwen3-next", "tiny-gemma3")], ids="+".join)
def test_two_engines_on_one_memory(names, count, alone, tmp_path):
    shared = Shared(names, tmp_path, random.Random(11), alone)
    shared.serve(count)
    assert shared.answered == count
    assert shared.moves
    shared.close()


@pytest.mark.soak
def test_a_thousand_sequences_of_mixed_models_on_one_memory(alone, tmp_path):
    pairs = [(one, other) for one in MODELS for other in MODELS if one < other]
    for number, names in enumerate(pairs):
        shared = Shared(names, tmp_path / str(number), random.Random(number), alone)
        shared.serve(334)
        assert shared.answered == 334
        assert shared.moves > 10
        shared.close()
