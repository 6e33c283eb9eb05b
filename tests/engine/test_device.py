"""The engine over a pool on a device: the bits of every tier, however copies and computing interleave."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierstore
from tests.engine.device import SCHEDULES, FakeDevice, missing
from tests.engine.device.deferred import DeferredRunner
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tierstore.keys import Identity
from tierstore.store import Store
from tierstore.store.buffers import HbmPages
from tierstore.store.destinations import IntoHbm
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.device import Event
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import COMPLETED, CopyFence, PagePool
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.model import Model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import PartialStep, Step

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

CHUNK = 16
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, keep_logits=True)
PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (150, 70, 33)]
POOL_PAGES = 40


@dataclass
class Run:
    """An engine over a store, and what tells it from another: the logits of all that it answered."""

    engine: Engine
    store: Store

    def ask(
        self, prompts: list[list[int]], *, together: bool = False
    ) -> tuple[list[np.ndarray], list[dict[str, int]]]:
        """One after the other: who is in a batch with whom depends on when loads end, and with it the
        bits."""
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        done = [each for batch in batches for each in self.engine.generate(batch, PARAMS)]
        assert all(each.logits is not None for each in done)
        return [each.logits for each in done], [dict(each.metrics.reused_by_tier) for each in done]

    def conversation(self) -> list[np.ndarray]:
        """All prompts cold, then from host memory with a cold one between, then from HBM with more behind
        what is known."""
        told, _ = self.ask(PROMPTS)
        self.forget_in_hbm()
        again, reused = self.ask([PROMPTS[0], [9] * 40, PROMPTS[1]])
        assert [set(each) for each in reused] == [{"host"}, set(), {"host"}]
        longer, reused = self.ask([[*PROMPTS[0], *range(40)], PROMPTS[1][:50]])
        assert all("hbm" in each for each in reused)
        return told + again + longer

    def forget_in_hbm(self) -> None:
        assert self.store.flush(30)
        self.engine.connector.evict(POOL_PAGES)
        # A page that is given to the same chunk again must not have the right bytes before they come.
        self.engine.connector.pool.array[:] = 0xA5

    def close(self) -> None:
        assert self.store.flush(30)
        self.store.check()
        assert self.store.stats().failed_tasks == 0
        assert self.engine.connector.available() == POOL_PAGES
        self.engine.close()


def open_run(model: LoadedModel, pool: PagePool, path: Path | None = None) -> Run:
    store = tierstore.open(
        path,
        pool.spec,
        identity=model.identity(pool.spec),
        pools=pool,
        host_bytes=4 << 20,
        disk_bytes=16 << 20,
    )
    return run_over(store, model, pool)


def run_over(store: Store, model: LoadedModel, pool: PagePool) -> Run:
    attention = CpuAttention(pool, model.config)
    runnable = Model(model.config, model.weights, [attention], device="cpu")
    runner = DeferredRunner(runnable, pool) if isinstance(pool, DevicePool) else runnable
    settings = EngineSettings(prefill_chunk=32, max_sequences=4, plan="load")
    return Run(Engine(runner, model.tokenizer, StoreConnector(store), settings), store)


def device_pool(model: LoadedModel, seed: int, pages: int = POOL_PAGES) -> DevicePool:
    return DevicePool(model.kv_spec(chunk_tokens=CHUNK), pages, FakeDevice(seed), layered_bytes=0)


@pytest.fixture(scope="module")
def without_overlap(loaded: Callable[..., LoadedModel]) -> list[np.ndarray]:
    """What the conversation says where every copy is done before anything is computed."""
    model = loaded("tiny")
    run = open_run(model, PagePool(model.kv_spec(chunk_tokens=CHUNK), POOL_PAGES))
    try:
        return run.conversation()
    finally:
        run.close()


@pytest.fixture
def copies_may_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """While a test has cleared this event, no load waits for its copies. On a lazy device they do not end."""
    event = threading.Event()
    event.set()
    original = IntoHbm._release_source

    def release_source(self: IntoHbm, *arguments: Any) -> None:
        event.wait()
        original(self, *arguments)

    monkeypatch.setattr(IntoHbm, "_release_source", release_source)
    yield event
    event.set()


def begin_to_load(engine: Engine, request: int) -> None:
    """Admit a request, and wait until all copies of its load have begun: the next step takes it over. What
    the others compute until then does not depend on how fast the mover is."""
    engine.step()
    sequence = engine._roster.get(request)
    assert sequence in engine._scheduler.admitted
    if sequence.loading is not None:
        sequence.loading.transfer.wait()


def assert_equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for number, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        assert np.array_equal(mine, reference), f"answer {number} differs"


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Equal but for how steps were cut; wrong bytes are far from that."""
    for mine, reference in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, reference, atol=1e-3)


@pytest.mark.parametrize("seed", SCHEDULES[:6])
def test_bits_are_those_without_overlap(
    seed: int, tiny: LoadedModel, without_overlap: list[np.ndarray]
) -> None:
    run = open_run(tiny, device_pool(tiny, seed))
    try:
        assert_equal(run.conversation(), without_overlap)
    finally:
        run.close()


@pytest.mark.parametrize("seed", SCHEDULES[1:3])
def test_scales_arrive_with_their_layer(seed: int, loaded: Callable[..., LoadedModel]) -> None:
    model = loaded("tiny", kv_dtype="k8v4")
    told = []
    for pool in (PagePool(model.kv_spec(chunk_tokens=CHUNK), POOL_PAGES), device_pool(model, seed)):
        run = open_run(model, pool)
        try:
            told.append(run.conversation())
        finally:
            run.close()
    assert_equal(told[1], told[0])


def test_a_driver_that_refuses_the_host_tier_costs_speed_only(
    tiny: LoadedModel, without_overlap: list[np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    pool = device_pool(tiny, 2)
    device = pool.runtime
    assert isinstance(device, FakeDevice)
    device.refuse_registrations()
    run = open_run(tiny, pool)
    try:
        assert_equal(run.conversation(), without_overlap)
        assert run.store.stats().counters["unpinned_arenas"] == 1
        assert device.registrations == 0
        assert "the host tier (4 MiB) cannot be pinned" in caplog.text
    finally:
        run.close()


@pytest.mark.parametrize("seed", SCHEDULES[1:5])
def test_loads_beside_what_others_compute(
    seed: int, tiny: LoadedModel, without_overlap: list[np.ndarray]
) -> None:
    """In batches of any kind: the same numbers, as far as those depend on the shape of a batch."""
    run = open_run(tiny, device_pool(tiny, seed))
    for _ in range(2):
        told, _ = run.ask(PROMPTS, together=True)
        assert_close(told, without_overlap[: len(told)])
        run.forget_in_hbm()
    run.close()


@pytest.mark.parametrize("seed", SCHEDULES[:6])
def test_a_pool_that_changes_its_size(
    seed: int, tiny: LoadedModel, without_overlap: list[np.ndarray]
) -> None:
    """Half of it and back, again and again, while requests load, compute and decode."""
    gc.collect()  # what an earlier pool has left is not this one's
    device = FakeDevice(seed)
    before = device.mapped
    pool = DevicePool(tiny.kv_spec(chunk_tokens=CHUNK), POOL_PAGES, device, most=POOL_PAGES, layered_bytes=0)
    run = open_run(tiny, pool)
    engine, whole = run.engine, pool.large_pages.nbytes
    mapped: set[int] = set()
    for number in range(3):
        ids = [engine.add(prompt, PARAMS) for prompt in PROMPTS]
        told: dict[int, np.ndarray] = {}
        steps = 0
        while len(told) < len(ids):
            engine.resize_pool(whole // 2 if steps % 4 < 2 else whole)
            mapped.add(device.mapped - before)
            steps += 1
            for output in engine.step():
                if output.completion is not None:
                    told[output.request_id] = output.completion.logits
        assert_close([told[each] for each in ids], without_overlap[: len(ids)])
        engine.resize_pool(whole)
        if number == 0:
            assert run.store.flush(30)
            engine.connector.evict(POOL_PAGES)
    assert min(mapped) < 0.75 * whole < max(mapped)
    assert device.strays == 0
    run.close()


@pytest.mark.parametrize("seed", [1, 3, 4])
def test_from_disk(seed: int, tiny: LoadedModel, tmp_path: Path, without_overlap: list[np.ndarray]) -> None:
    run = open_run(tiny, device_pool(tiny, seed), tmp_path / "store")
    told, _ = run.ask(PROMPTS)
    run.close()
    run = open_run(tiny, device_pool(tiny, seed + 1), tmp_path / "store")
    again, reused = run.ask([PROMPTS[0], [9] * 40, PROMPTS[1]])
    run.close()
    assert reused[0].get("disk", 0) > 0
    assert_equal(told + again, without_overlap[: len(told + again)])


@pytest.mark.parametrize("seed", SCHEDULES[:4])
def test_over_a_daemon(
    seed: int,
    tiny: LoadedModel,
    shared_daemon: DaemonProcess,
    without_overlap: list[np.ndarray],
) -> None:
    """Pages go between the device and another process's arena by the same copies as with one of ours."""
    pool = device_pool(tiny, seed)
    identity = Identity.of(pool.spec, model=f"tiny {seed}")
    store = tierstore.connect(shared_daemon.url, pool.spec, identity=identity, pools=pool, lookup_s=30.0)
    store.wait_ready()
    run = run_over(store, tiny, pool)
    try:
        assert_equal(run.conversation(), without_overlap)
    finally:
        run.close()
    assert isinstance(pool.runtime, FakeDevice)
    assert (pool.runtime.copies, pool.runtime.strays) == (0, 0)  # all in batches


def test_an_engine_that_goes_leaves_no_stream(tiny: LoadedModel) -> None:
    gc.collect()  # what tests before this one have left
    before = FakeDevice(0).streams
    pool = device_pool(tiny, 3)
    run = open_run(tiny, pool)
    device = pool.runtime
    assert isinstance(device, FakeDevice)
    assert device.streams == before + 5
    run.conversation()
    run.close()
    del run, pool
    gc.collect()
    assert device.streams == before


def test_parked_sequences_continue_with_their_bits(tiny: LoadedModel) -> None:
    """In a pool that is too small for both, pages are saved, given back and loaded all the time."""
    answers = []
    for pool in (PagePool(tiny.kv_spec(chunk_tokens=CHUNK), 8), device_pool(tiny, 5, 8)):
        run = open_run(tiny, pool)
        done = run.engine.generate(
            [[3] * 60, [4] * 60], SamplingParams(max_new_tokens=24, ignore_eos=True, keep_logits=True)
        )
        assert sum(each.metrics.preemptions for each in done) > 0
        answers.append([each.logits for each in done])
        run.engine.close()
    assert_equal(answers[1], answers[0])


def test_nobody_waits_for_the_pages_of_another(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, copies_may_end: threading.Event
) -> None:
    """While a hit is on its way others go on decoding; alone it is computed before all of it has arrived."""
    run = open_run(tiny, device_pool(tiny, 0))  # lazy: nothing arrives that nobody waits for
    run.ask([PROMPTS[0]])
    run.forget_in_hbm()
    copies_may_end.clear()
    original_compute, original_advance = DeferredRunner.compute, DeferredRunner.advance
    steps: list[list[bool]] = []  # of each: whether each of its sequences was arriving

    def compute(self: DeferredRunner, step: Step) -> torch.Tensor:
        steps.append([self._pool.arrivals(span.block_table).pending for span in step.spans])
        return original_compute(self, step)

    def advance(self: DeferredRunner, partial: PartialStep, layers: range) -> torch.Tensor | None:
        steps.append([self._pool.arrivals(span.block_table).pending for span in partial.step.spans])
        return original_advance(self, partial, layers)

    monkeypatch.setattr(DeferredRunner, "compute", compute)
    monkeypatch.setattr(DeferredRunner, "advance", advance)
    engine = run.engine
    first = engine.add([9] * 40, SamplingParams(max_new_tokens=12, ignore_eos=True))
    while engine.computed_tokens(first) < 40:
        engine.step()
    second = engine.add(PROMPTS[0], PARAMS)
    begin_to_load(engine, second)
    done = []
    while len(done) < 2:
        done += [output.request_id for output in engine.step() if output.finished]
    copies_may_end.set()
    assert done == [first, second]
    assert all(len(set(step)) == 1 for step in steps)
    assert [True] in steps
    run.close()


def test_a_hit_goes_through_the_model_layer_by_layer_beside_what_others_decode(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, copies_may_end: threading.Event
) -> None:
    """Each layer as soon as it has arrived, with no token of the others waiting for one, and with the bits
    that the hit has when it is alone."""
    run = open_run(tiny, device_pool(tiny, 0))  # lazy: nothing arrives that nobody waits for
    run.ask([PROMPTS[0]])
    run.forget_in_hbm()
    alone, _ = run.ask([PROMPTS[0]])
    run.forget_in_hbm()
    copies_may_end.clear()
    advanced: list[range] = []
    original_advance = DeferredRunner.advance

    def advance(self: DeferredRunner, partial: PartialStep, layers: range) -> torch.Tensor | None:
        advanced.append(layers)
        return original_advance(self, partial, layers)

    monkeypatch.setattr(DeferredRunner, "advance", advance)
    engine = run.engine
    other = engine.add([9] * 40, SamplingParams(max_new_tokens=40, ignore_eos=True))
    while engine.computed_tokens(other) < 40:
        engine.step()
    hit = engine.add(PROMPTS[0], SamplingParams(max_new_tokens=1, ignore_eos=True, keep_logits=True))
    begin_to_load(engine, hit)
    sequence, pool = engine._roster.get(hit), run.engine.connector.pool
    while sequence.partial is None:
        assert [output.request_id for output in engine.step()] == [other]
    assert isinstance(pool, DevicePool)
    assert engine.computed_tokens(hit) == 149  # though no byte of it is there
    (filling,) = pool._under_way(sequence.tables[0].pages)
    layers = tiny.config.layers
    for layer in range(layers):
        assert advanced == [range(past, past + 1) for past in range(layer)]
        assert [output.request_id for output in engine.step()] == [other]  # its next one has not come
        pool.runtime.synchronize(filling.event(layer))
        outputs = engine.step()
    assert advanced == [range(layer, layer + 1) for layer in range(layers)]
    told = {output.request_id: output for output in outputs}
    assert set(told) == {other, hit}
    completion = told[hit].completion
    assert completion is not None
    assert completion.logits is not None
    assert np.array_equal(completion.logits, alone[0][:1])
    copies_may_end.set()
    engine.cancel(other)
    engine.step()
    run.close()


@pytest.mark.parametrize("parked", [True, False], ids=["parked", "cancelled"])
def test_a_hit_that_is_half_computed_can_be_given_up(
    parked: bool, tiny: LoadedModel, copies_may_end: threading.Event
) -> None:
    """What is in its pages by then is nobody's, and one that was parked begins anew."""
    run = open_run(tiny, device_pool(tiny, 0))
    told, _ = run.ask([PROMPTS[0]])
    run.forget_in_hbm()
    copies_may_end.clear()
    engine = run.engine
    other = engine.add([9] * 40, SamplingParams(max_new_tokens=40, ignore_eos=True))
    while engine.computed_tokens(other) < 40:
        engine.step()
    hit = engine.add(PROMPTS[0], PARAMS)
    begin_to_load(engine, hit)
    sequence, pool = engine._roster.get(hit), engine.connector.pool
    while sequence.partial is None:
        engine.step()
    assert isinstance(pool, DevicePool)
    pool.runtime.synchronize(pool._under_way(sequence.tables[0].pages)[0].event(0))
    engine.step()
    assert sequence.partial.layers == 1
    if parked:
        assert engine._scheduler._park() is sequence
    else:
        engine.cancel(hit)
    assert sequence.partial is None
    copies_may_end.set()
    completions = {}
    while engine.has_work:
        completions.update({each.request_id: each.completion for each in engine.step() if each.finished})
    if parked:
        assert_close([completions[hit].logits], told)
    again, _ = run.ask([PROMPTS[0]])
    assert_close(again, told)
    run.close()


def test_who_decodes_is_not_looked_for_among_the_pages_of_a_load(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, copies_may_end: threading.Event
) -> None:
    """What a step costs the host while a load goes on does not grow with the tokens of all the others."""
    run = open_run(tiny, device_pool(tiny, 0))  # lazy: the load stays under way until somebody waits for it
    run.ask([PROMPTS[1]])
    run.forget_in_hbm()
    asked: list[int] = []
    copies_may_end.clear()
    original_arrivals = DevicePool.arrivals

    def arrivals(self: DevicePool, pages: Iterable[int]) -> CopyFence:
        listed = list(pages)
        asked.extend(listed)
        return original_arrivals(self, listed)

    monkeypatch.setattr(DevicePool, "arrivals", arrivals)
    engine = run.engine
    first = engine.add([9] * 100, SamplingParams(max_new_tokens=12, ignore_eos=True))
    while engine.computed_tokens(first) < 100:
        engine.step()
    assert asked == []
    second = engine.add(PROMPTS[1], PARAMS)
    begin_to_load(engine, second)
    pages = set(engine._roster.get(first).tables[0].pages)
    done = []
    while not done:
        done += [output.request_id for output in engine.step() if output.finished]
    assert done == [first]
    assert asked  # those of the second, which was on its way all the time
    assert not pages & set(asked)
    copies_may_end.set()
    while second not in done:
        done += [output.request_id for output in engine.step() if output.finished]
    run.close()


def test_a_step_waits_once_for_all_its_sequences(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """However each of them is continued; and a chunk that yields no token waits for nothing."""
    run = open_run(tiny, device_pool(tiny, 0))
    waits: list[int] = []
    original = FakeDevice.synchronize

    def synchronize(self: FakeDevice, event: Event) -> None:
        if threading.current_thread() is threading.main_thread():
            waits[-1] += 1
        original(self, event)

    monkeypatch.setattr(FakeDevice, "synchronize", synchronize)
    ways = [
        {},
        {"temperature": 0.7, "top_k": 5, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9, "keep_logits": True},
        {"temperature": 1.3, "min_p": 0.1, "seed": 3},
    ]
    for n, way in enumerate(ways):
        run.engine.add([n + 1] * 70, SamplingParams(max_new_tokens=16, ignore_eos=True, **way))
    tokens = []
    while run.engine.has_work:
        waits.append(0)
        tokens.append(len(run.engine.step()))
    assert max(tokens) == 4
    assert 0 in tokens
    assert waits == [min(count, 1) for count in tokens]
    run.close()


def test_the_kernels_on_a_device_that_defers(loaded: Callable[..., LoadedModel]) -> None:
    """The CUDA backend end to end, its kernels on the executor: a hit from host memory, layer by layer."""
    model = loaded("tiny", dtype="float16")
    pool = device_pool(model, 3)
    run = open_run(model, pool)
    attention = CudaAttention(torch.from_numpy(pool.array), pool.spec, model.config, ExecutorLauncher())
    run.engine.model = DeferredRunner(Model(model.config, model.weights, [attention], device="cpu"), pool)
    told, _ = run.ask([PROMPTS[1]])
    run.forget_in_hbm()
    again, reused = run.ask([PROMPTS[1]])
    run.close()
    assert set(reused[0]) == {"host"}
    np.testing.assert_allclose(again[0], told[0], atol=0.02)  # float16, and steps are cut otherwise


# -- mistakes in who waits for whom, above the pool ------------------------------------------------------


@contextmanager
def no_waiting_for_layers(patch: pytest.MonkeyPatch, pool: DevicePool) -> Iterator[None]:
    """And the mover does not make up for it: it waits for the copies too, to end the leases of their host
    slots, and where it is quick they are there before the model computes."""
    steps = threading.Condition()
    done = 0
    original_wait, original_release = DeferredRunner.wait, IntoHbm._release_source

    def wait(self: DeferredRunner) -> None:
        nonlocal done
        original_wait(self)
        with steps:
            done += 1
            steps.notify_all()

    def release_source(self: IntoHbm, *arguments: Any) -> None:
        with steps:
            before = done
            steps.wait_for(lambda: done > before, timeout=1.0)  # where that was the last one there is none
        original_release(self, *arguments)

    patch.setattr(pool, "arrivals", lambda pages: COMPLETED)
    patch.setattr(DeferredRunner, "wait", wait)
    patch.setattr(IntoHbm, "_release_source", release_source)
    yield


@contextmanager
def marker_before_the_step(patch: pytest.MonkeyPatch, pool: DevicePool) -> Iterator[None]:
    """A save that waits for an event from before its pages were computed."""
    early = pool.computed()
    original = HbmPages.__init__

    def init(self: HbmPages, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        self._computed = early

    patch.setattr(HbmPages, "__init__", init)
    yield


@contextmanager
def leases_end_when_copies_begin(patch: pytest.MonkeyPatch, pool: DevicePool) -> Iterator[None]:
    """Host slots are given to others while pages are still copied from them."""

    def release_source(self: IntoHbm, under_way: Any, *_: Any) -> None:
        under_way._located.release()

    patch.setattr(IntoHbm, "_release_source", release_source)
    yield


def reuse_of_host_slots(run: Run) -> None:
    """While a hit is loaded the host tier is filled with something else."""
    store, pool = run.store, run.engine.connector.pool
    spec = pool.spec
    first = list(range(3 * CHUNK))
    content = [bytes([page + 1]) * spec.page_bytes for page in range(3)]
    assert store.save(store.prompt(first), content).wait() == len(first)
    loaded = store.load(store.lookup(first)).wait()
    store.evict("host")
    for number in range(4):
        other = [number + 100] * (8 * CHUNK)
        store.save(store.prompt(other), [b"\xee" * spec.page_bytes] * 8).wait()
        store.evict("host")
    run.engine.model.wait()
    for page, expected in zip(loaded.pages, content, strict=True):
        assert isinstance(pool, DevicePool)
        for filling in pool._under_way([page]):
            filling.wait()
        assert pool.array[page].tobytes() == expected
    store.release_hbm(loaded.pages)


def reuse_of_pages(run: Run) -> None:
    """A request is given up in the middle of its prefill, and what comes next is loaded into its pages."""
    told, _ = run.ask([PROMPTS[0]])
    run.forget_in_hbm()
    given_up = run.engine.add([5] * 500, PARAMS)
    run.engine.step()
    run.engine.cancel(given_up)
    again, _ = run.ask([PROMPTS[0]])
    assert_close(again, told)


def talk(run: Run) -> None:
    told, _ = run.ask(PROMPTS[:2])
    run.forget_in_hbm()
    again, _ = run.ask(PROMPTS[:2])
    assert_close(again, told)


MISTAKES = [
    (no_waiting_for_layers, talk),
    (marker_before_the_step, talk),
    (leases_end_when_copies_begin, reuse_of_host_slots),
]


@pytest.mark.parametrize(("mistake", "scene"), MISTAKES, ids=[mistake.__name__ for mistake, _ in MISTAKES])
def test_planted_bugs_are_caught(
    mistake: Callable[..., object],
    scene: Callable[[Run], None],
    tiny: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in SCHEDULES[:8]:
        run = open_run(tiny, device_pool(tiny, seed))
        pool = run.engine.connector.pool
        with monkeypatch.context() as patch, mistake(patch, pool):  # type: ignore[attr-defined]
            try:
                scene(run)
            except AssertionError:
                run.engine.close()
                return
        run.engine.close()
    pytest.fail("not caught")


@pytest.mark.parametrize("scene", [talk, reuse_of_host_slots, reuse_of_pages])
def test_without_a_mistake_nothing_is_caught(scene: Callable[[Run], None], tiny: LoadedModel) -> None:
    for seed in (0, 3, 4):
        run = open_run(tiny, device_pool(tiny, seed))
        scene(run)
        run.engine.close()
