"""Sequences that leave inside of a page, in models of several layer groups: who goes on from there computes
what it would have alone, from every tier, on a CPU and on a device that does everything as late as it may."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tierstore
from tests.engine.device import SCHEDULES, missing
from tests.engine.device.deferred import DeferredRunner
from tests.portions import diagonal
from tierstore.errors import UsageError
from tierstore.store.destinations import IntoHbm
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine.attention.base import NO_PAGE
from tierstore_engine.build import load_model
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel, make_memory
from tierstore_engine.model import Model
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import SequenceState
from tierstore_engine.settings import EngineSettings
from tierstore_engine.tables import StateTable, WindowTable
from tierstore_engine.weights import digest_weights, random_weights

from .test_device_groups import Run, device_pools, on_host, plain_pools
from .test_grouped import shrink_to_one
from .test_layer_groups import CHUNK, Engines, assert_same, prompt

WINDOW = 40  # of which a hit needs 39 tokens
NAMES = ["tiny-gemma3", "tiny-llama4", "tiny-qwen3-next"]
ANSWER = SamplingParams(max_new_tokens=13, ignore_eos=True, keep_logits=True)
on_device = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")


@pytest.fixture(scope="module")
def models() -> Callable[[str], LoadedModel]:
    """A preset with short windows, in float32."""

    @cache
    def make(name: str) -> LoadedModel:
        config = preset(name, dtype="float32")
        windows = tuple(None if window is None else WINDOW for window in config.windows or ())
        config = replace(config, windows=windows or config.windows)
        weights = random_weights(config, seed=3, device="cpu")
        tokenizer = load_model("tiny", device="cpu").tokenizer
        return LoadedModel(config, tokenizer, weights, digest_weights(config, weights), "cpu")

    return make


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    made = Engines(tmp_path)
    yield made
    made.close()


def ended(told: list[int], answer: Any) -> int:
    """Tokens whose KV a finished request has left: its newest one has not been looked at."""
    return len(told) + len(answer.tokens) - 1


def reused(answer: Any) -> int:
    return sum(answer.metrics.reused_by_tier.values())


@pytest.mark.parametrize(*diagonal(name=NAMES, tier=["hbm", "host", "disk"]))
def test_a_turn_goes_on_where_the_last_one_ended(models, engines, name, tier):
    model = models(name)
    engine, alone = engines(model), engines(model, store=False)
    told, known = prompt(75), 0
    for turn in range(3):
        [answer], [expected] = engine.generate([told], ANSWER), alone.generate([told], ANSWER)
        assert_same(answer, expected)
        assert answer.metrics.reused_by_tier == ({tier: known} if turn else {})
        known = ended(told, answer)
        assert known % CHUNK
        told = [*told, *answer.tokens, *prompt(9 + turn, seed=turn)]
        if tier == "host":
            assert isinstance(engine.connector, StoreConnector)
            assert engine.connector.store.flush(30)  # pages that are being saved are not idle
            engine._keeper.evict_idle()
        if tier == "disk":
            engines.close()
            engine, alone = engines(model), engines(model, store=False)


@pytest.mark.parametrize("name", NAMES)
def test_two_that_go_on_from_one_page_write_to_copies(models, engines, name):
    model = models(name)
    engine, alone = engines(model), engines(model, store=False)
    told = prompt(75)
    [first] = engine.generate([told], ANSWER)
    told += first.tokens
    turns = [[*told, *prompt(20 + seed, seed=seed)] for seed in (1, 2, 3)]
    answers = engine.generate(turns[:2], ANSWER) + engine.generate(turns[2:], ANSWER)
    for answer, turn in zip(answers, turns, strict=True):
        assert reused(answer) == len(told) - 1
        assert_same(answer, alone.generate([turn], ANSWER)[0])


@pytest.mark.parametrize("name", NAMES)
def test_who_has_other_tokens_in_the_last_page_goes_on_from_before_it(models, engines, name):
    model = models(name)
    engine, alone = engines(model), engines(model, store=False)
    told = prompt(75)
    [first] = engine.generate([told], ANSWER)
    known = ended(told, first)
    turn = [*told, *first.tokens[: known - 2 - len(told)], *prompt(30, seed=1)]
    [answer] = engine.generate([turn], ANSWER)
    assert reused(answer) == known // CHUNK * CHUNK
    assert_same(answer, alone.generate([turn], ANSWER)[0])


@pytest.mark.parametrize("name", NAMES)
def test_parked_sequences_go_on_as_if_nothing_had_been(models, engines, name):
    model = models(name)
    pages = (12, 4 if name == "tiny-qwen3-next" else 12)  # a state has as many bytes as four others
    engine, alone = engines(model, pages=pages, max_sequences=8), engines(model, store=False)
    prompts = [prompt(20 + 7 * seed, seed=seed) for seed in range(5)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    answers = engine.generate(prompts, params)
    assert [answer.tokens for answer in answers] == [
        alone.generate([each], params)[0].tokens for each in prompts
    ]
    assert engine.stats().preemptions
    if name != "tiny-qwen3-next":  # in so little memory a load may find no page for a state
        assert sum(answer.metrics.recomputed_tokens for answer in answers) == 0


@pytest.mark.parametrize(*diagonal(name=NAMES, seed=range(3)))
def test_conversations_that_are_taken_up_anywhere(models, engines, name, seed):
    """At their end, mostly, and else at any token, by two at a time."""
    model, chance = models(name), random.Random(seed)
    engine, alone = engines(model), engines(model, store=False)
    talks = [prompt(chance.randint(1, 60), seed=each) for each in (1, 2)]
    for turn in range(6):
        told = []
        for each, talk in enumerate(talks):
            cut = len(talk) if chance.random() < 0.6 else chance.randint(1, len(talk))
            told.append([*talk[:cut], *prompt(chance.randint(1, 40), seed=10 * turn + each)])
        params = replace(ANSWER, max_new_tokens=chance.randint(1, 20))
        sessions = [None, "b"]
        ids = [engine.add(each, params, session=name) for each, name in zip(told, sessions, strict=True)]
        answers = engine._finish(ids)
        for answer, each in zip(answers, told, strict=True):
            assert_same(answer, alone.generate([each], params)[0])
        talks = [[*each, *answer.tokens] for each, answer in zip(told, answers, strict=True)]
        if chance.random() < 0.4:
            engine._keeper.evict_idle()


@pytest.mark.parametrize("name", NAMES)
def test_forks_that_share_the_last_page_leave_it_to_the_last_of_them(models, engines, name):
    model = models(name)
    engine, alone = engines(model), engines(model, store=False)
    sampled = SamplingParams(max_new_tokens=9, ignore_eos=True, temperature=1.0, seed=4)
    told = prompt(75)
    for seed, answer in enumerate(engine.sample(told, sampled, n=3)):
        turn = [*told, *answer.tokens, *prompt(20, seed=seed)]
        [following] = engine.generate([turn], ANSWER)
        assert reused(following) == ended(told, answer)
        assert_same(following, alone.generate([turn], ANSWER)[0])


@pytest.mark.parametrize("name", NAMES)
def test_what_a_failed_step_has_left_in_a_state_is_not_saved(models, engines, name, monkeypatch):
    """It has gone on by a token that the sequence knows nothing of."""
    model = models(name)
    engine, alone = engines(model), engines(model, store=False)
    told = prompt(75)
    request = engine.add(told, ANSWER)
    while engine.computed_tokens(request) < 83:
        engine.step()
    compute = engine.model.compute

    def failing(step):
        compute(step)
        raise RuntimeError("the device has gone")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "compute", failing)
        with pytest.raises(RuntimeError, match="gone"):
            engine.step()
    engine.cancel_all()
    [cancelled] = [output.completion for output in engine.step()]
    turn = [*told, *cancelled.tokens, *prompt(20, seed=1)]
    [following] = engine.generate([turn], ANSWER)
    assert reused(following) == 80
    assert_same(following, alone.generate([turn], ANSWER)[0])


def test_pages_behind_the_prompt_are_refused(models, engines):
    engine = engines(models("tiny-gemma3"))
    connector = engine.connector
    pages = connector.allocate(2, group=1)
    with pytest.raises(UsageError, match="must lie within the prompt's 2 chunks"):
        connector.save(connector.prompt(prompt(20)), pages, first=1, group=1)
    connector.release(pages, group=1)


# -- on a device -----------------------------------------------------------------------------------------

SETTINGS = EngineSettings(prefill_chunk=32, max_sequences=4, plan="load")


def open_run(model: LoadedModel, seed: int) -> Run:
    """An engine over pools on a device with this schedule, and host memory."""
    spec = model.kv_spec(chunk_tokens=CHUNK)
    pools = device_pools(spec, seed, grows=1)
    store = tierstore.open(None, spec, identity=model.identity(spec), pools=pools, host_bytes=16 << 20)
    memories = [on_host(pool, model.config) for pool in pools]
    runner = DeferredRunner(Model(model.config, model.weights, memories, device="cpu"), pools[0])
    connector = StoreConnector(store)
    return Run(Engine(runner, model.tokenizer, connector, SETTINGS), connector)


@pytest.fixture(scope="module")
def alone(models: Callable[[str], LoadedModel]) -> Callable[[str, list[int], int], Any]:
    """Answers of an engine that keeps nothing, and has nothing else to do."""

    @cache
    def answer(name: str, told: tuple[int, ...], tokens: int) -> Any:
        model = models(name)
        spec = model.kv_spec(chunk_tokens=CHUNK)
        pools = plain_pools(spec)
        memories = [make_memory(pool, model.config) for pool in pools]
        runner = Model(model.config, model.weights, memories, device="cpu")
        engine = Engine(runner, model.tokenizer, NoStore(pools, model.identity(spec)), SETTINGS)
        [answer] = engine.generate([list(told)], replace(ANSWER, max_new_tokens=tokens))
        engine.close()
        return answer

    return lambda name, told, tokens: answer(name, tuple(told), tokens)


class WrongAnswer(AssertionError):
    """Another one than that of a run alone."""


def asked(tokens: int) -> SamplingParams:
    return replace(ANSWER, max_new_tokens=tokens)


@dataclass
class Asking:
    """Asks an engine, and compares what it says with ``alone``."""

    run: Run
    name: str
    alone: Callable[[str, list[int], int], Any]

    def __call__(self, told: list[list[int]], tokens: int) -> list[Any]:
        return self.checked(told, tokens, self.run.engine.generate(told, asked(tokens)))

    def checked(self, told: list[list[int]], tokens: int, answers: list[Any]) -> list[Any]:
        for each, answer in zip(told, answers, strict=True):
            try:
                assert_same(answer, self.alone(self.name, each, tokens))
            except AssertionError as error:
                raise WrongAnswer from error
        return answers


def taken_up(ask: Asking) -> None:
    """Finished and gone on with: by two at once from HBM, by a third from host memory, and by a fourth from
    what that has left in HBM."""
    told = prompt(77)
    [first] = ask([told], 6)
    told += first.tokens
    assert (len(told) - 1) % CHUNK
    turns = [[*told, *prompt(10 + seed, seed=seed)] for seed in range(1, 5)]
    followed = ask(turns[:2], 6)
    ask.run.forget_in_hbm()
    followed += ask(turns[2:3], 6) + ask(turns[3:], 6)
    assert [reused(each) for each in followed] == [len(told) - 1] * 4
    assert "host" in followed[2].metrics.reused_by_tier


def given_way(ask: Asking) -> None:
    """Parked while they decode, since the memory has become smaller, and resumed when it comes back."""
    engine, answers = ask.run.engine, dict[int, Any]()
    whole = engine.pool_size().nbytes
    told = [prompt(135 + 5 * seed, seed=seed) for seed in range(4)]
    ids = [engine.add(each, asked(40)) for each in told]

    def step() -> None:
        done = (output for output in engine.step() if output.completion is not None)
        answers.update((output.request_id, output.completion) for output in done)

    while any(engine._roster.get(each).state is not SequenceState.RUNNING for each in ids):
        step()
    shrink_to_one(engine)
    while not engine.stats().preemptions:
        step()
    engine.resize_pool(whole)
    while len(answers) < len(ids):
        step()
    checked = ask.checked(told, 40, [answers[each] for each in ids])
    assert sum(answer.metrics.recomputed_tokens for answer in checked) == 0


@on_device
@pytest.mark.parametrize(*diagonal(name=NAMES, seed=SCHEDULES[:4], scene=[taken_up, given_way]))
def test_sequences_that_left_a_device_go_on(name, seed, scene, models, alone):
    run = open_run(models(name), seed)
    scene(Asking(run, name, alone))
    run.close()


# -- mistakes in parking ---------------------------------------------------------------------------------


@contextmanager
def copied_before_it_arrived(patch: pytest.MonkeyPatch, run: Run) -> Iterator[None]:
    """The copy that is written to is made while the parked page is on its way from host memory. And the mover
    does not make up for it: it waits for that, too, and where it is quick the page is there."""
    copied = threading.Event()
    for pool in run.connector.pools:
        copy, under_way, copying = pool.start_copying, pool._under_way, []

        def start(copies, copy=copy, copying=copying):
            copying.append(True)
            try:
                return copy(copies)
            finally:
                copying.pop()
                copied.set()

        def none_of(pages, under_way=under_way, copying=copying):
            return [] if copying else under_way(pages)

        patch.setattr(pool, "start_copying", start)
        patch.setattr(pool, "_under_way", none_of)

    def release_source(self, *arguments, original=IntoHbm._release_source):
        copied.wait(1.0)  # where nothing is copied there is no wait for it
        original(self, *arguments)

    def forget(self=run, original=run.forget_in_hbm):
        original()
        copied.clear()

    patch.setattr(IntoHbm, "_release_source", release_source)
    patch.setattr(run, "forget_in_hbm", forget)
    yield


@contextmanager
def given_back_before_it_was_copied(patch: pytest.MonkeyPatch, run: Run) -> Iterator[None]:
    """Somebody else computes with the live page that was published."""

    def save(self, point, original=StateTable.save):
        saves = original(self, point)
        if point.live is not None and saves:
            [pool] = [pool for pool in run.connector.pools if pool.spec.groups[0].state_bytes]
            pool.runtime.launch(pool.compute, lambda page=self.pages[0]: pool.array[page].fill(0))
        return saves

    patch.setattr(StateTable, "save", save)
    yield


@contextmanager
def written_in_place(patch: pytest.MonkeyPatch, run: Run) -> Iterator[None]:
    """Who goes on writes to the parked page itself."""

    def begin(self, held, tokens, stop, original=WindowTable.begin):
        if not held.pages:
            return original(self, held, tokens, stop)
        self.pages, self.saved_at = [NO_PAGE] * held.first + list(held.pages), tokens
        return True

    def begin_state(self, held, tokens, stop, original=StateTable.begin):
        if not held.pages:
            return original(self, held, tokens, stop)
        self.pages, self.saved_at = [held.pages[-1]], tokens
        return True

    patch.setattr(WindowTable, "begin", begin)
    patch.setattr(StateTable, "begin", begin_state)
    yield


@contextmanager
def a_snapshot_of_before(patch: pytest.MonkeyPatch, run: Run) -> Iterator[None]:
    """The last chunk's end is taken for the sequence's."""

    def save(self, point, original=StateTable.save):
        if point.live is None:
            return []
        if self.snapshot:
            self.snapshot, self.pages = self.pages, self.snapshot
        return original(self, point)

    patch.setattr(StateTable, "save", save)
    yield


MISTAKES = [
    (copied_before_it_arrived, "tiny-gemma3"),
    (copied_before_it_arrived, "tiny-qwen3-next"),
    (given_back_before_it_was_copied, "tiny-qwen3-next"),
    (written_in_place, "tiny-gemma3"),
    (written_in_place, "tiny-llama4"),
    (written_in_place, "tiny-qwen3-next"),
    (a_snapshot_of_before, "tiny-qwen3-next"),
]


@on_device
@pytest.mark.parametrize(
    ("mistake", "name"), MISTAKES, ids=[f"{each.__name__}-{of}" for each, of in MISTAKES]
)
def test_planted_mistakes_are_caught(mistake, name, models, alone, monkeypatch):
    """By a wrong token, and not by what is counted."""
    for seed in SCHEDULES[:8]:
        run = open_run(models(name), seed)
        with monkeypatch.context() as patch, mistake(patch, run):
            ask = Asking(run, name, alone)
            try:
                taken_up(ask)
            except WrongAnswer:
                run.engine.close()
                return
        run.engine.close()
    pytest.fail("not caught")
