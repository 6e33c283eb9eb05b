"""Models of several layer groups over pools on a device: the bits of every tier, however copies and computing
interleave, and the CUDA backend's kernels on the executor over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.device import SCHEDULES, FakeDevice, missing
from tests.engine.device.deferred import DeferredRunner
from tests.portions import diagonal
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.group_pools import bytes_for, open_group_pools
from tierstore.tiers.hbm import PagePool, arrivals_of
from tierstore_connectors.bundled import NoStore, StoreConnector
from tierstore_engine.batch import Work, build_step
from tierstore_engine.engine import Engine
from tierstore_engine.loaded import LoadedModel, make_memory
from tierstore_engine.model import Memory, Model
from tierstore_engine.pool_sizes import fitting_pages, group_pages
from tierstore_engine.presets import preset
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import RequestId, Sequence
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import PartialStep, Step
from tierstore_engine.tables import empty_tables
from tierstore_engine.tokenizer import ByteTokenizer

from .conftest import STORED_CHUNK, Oracle
from .test_cuda_attention import cuda_memory

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

PAGES = 40
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, keep_logits=True)


@dataclass
class Run:
    """An engine over a store."""

    engine: Engine
    connector: StoreConnector

    def ask(self, *prompts: list[int], tiers: Items[str] = ()) -> list[np.ndarray]:
        """``tiers`` are what the prompts come from ("": nothing of it is held); not given, anything will
        do."""
        done = [self.engine.generate([prompt], PARAMS)[0] for prompt in prompts]
        for tier, completion in zip(tiers, done, strict=bool(tiers)):
            assert list(completion.metrics.reused_by_tier) == [tier] * bool(tier)
        assert all(each.logits is not None for each in done)
        return [each.logits for each in done]  # type: ignore[misc]

    def conversation(self, prompt: list[int]) -> list[np.ndarray]:
        """Cold, from host memory with a cold one between, then from HBM with more behind what is known."""
        told = self.ask(prompt, prompt[:70])
        self.forget_in_hbm()
        told += self.ask(prompt, [9] * 40, tiers=("host", ""))
        return told + self.ask([*prompt, *range(40)], tiers=("hbm",))

    def forget_in_hbm(self) -> None:
        """Pages that are given out again must not have the right bytes before they come."""
        assert self.connector.store.flush(60)
        for group, pool in enumerate(self.connector.pools):
            self.connector.evict(pool.num_pages, group=group)
            assert not pool.used_pages
        for pool in self.connector.pools:
            pool.array[:] = 0xA5

    def close(self) -> None:
        assert self.connector.store.flush(60)
        self.connector.store.check()
        for group, pool in enumerate(self.connector.pools):
            assert self.connector.available(group=group) == pool.capacity
        self.engine.close()


def device_pools(spec: KVSpec, seed: int, *, grows: int | None = None) -> tuple[PagePool, ...]:
    """``grows``: by how much at most, in memory that is mapped piece by piece."""
    parts = spec.split()
    nbytes = bytes_for(parts, [PAGES] * len(parts))
    most = None if grows is None else grows * nbytes
    return open_group_pools(parts, nbytes, most_bytes=most, device=FakeDevice(seed), layered_bytes=0)


def plain_pools(spec: KVSpec) -> tuple[PagePool, ...]:
    parts = spec.split()
    return open_group_pools(parts, bytes_for(parts, [PAGES] * len(parts)))


Remembering = Callable[[PagePool, Any], Memory]


@pytest.fixture
def run_over() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(model: LoadedModel, pools: Items[PagePool], memory: Remembering = make_memory) -> Run:
        spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
        store = tierstore.open(None, spec, identity=model.identity(spec), pools=pools, host_bytes=16 << 20)
        memories = [memory(pool, model.config) for pool in pools]
        runnable = Model(model.config, model.weights, memories, device="cpu")
        runner = DeferredRunner(runnable, pools[0]) if isinstance(pools[0], DevicePool) else runnable
        settings = EngineSettings(prefill_chunk=32, max_sequences=4, plan="load")
        connector = StoreConnector(store)
        runs.append(Run(Engine(runner, model.tokenizer, connector, settings), connector))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def on_host(pool: PagePool, config: Any) -> Memory:
    """The CPU's, over memory of the tests' device: that is the host's."""
    pool.device, there = "cpu", pool.device
    try:
        return make_memory(pool, config)
    finally:
        pool.device = there


@pytest.mark.parametrize(
    *diagonal(name=["gemma2", "qwen3-next", "nemotron-h", "falcon-h1", "zamba2"], seed=SCHEDULES[:3])
)
def test_bits_are_those_without_overlap(
    name: str,
    seed: int,
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    run_over: Callable[..., Run],
) -> None:
    """Windows and states whose layers arrive one by one, while the kernels of others run."""
    oracle = oracles(name)
    model = loaded(str(oracle.folder))
    spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
    ours = run_over(model, device_pools(spec, seed), on_host).conversation(oracle.prompt[:150])
    theirs = run_over(model, plain_pools(spec)).conversation(oracle.prompt[:150])
    for number, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
        assert np.array_equal(mine, reference), f"answer {number} differs"


@pytest.mark.parametrize(
    "name",
    ["gemma2", "llama4", "qwen3-next", "falcon-h1", "granite-hybrid-dense", "nemotron-h", "zamba2-plain"],
)
def test_the_kernels_over_groups_on_a_device_that_defers(
    name: str,
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    run_over: Callable[..., Run],
) -> None:
    """Windows, capped scores, attention chunks, states: the tokens are the CPU backend's, from every tier."""
    oracle = oracles(name)
    model = loaded(str(oracle.folder), dtype="float16")
    spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
    ours = run_over(model, device_pools(spec, 3), cuda_memory).conversation(oracle.prompt[:150])
    theirs = run_over(model, plain_pools(spec)).conversation(oracle.prompt[:150])
    for mine, reference in zip(ours, theirs, strict=True):
        assert np.array_equal(mine.argmax(-1), reference.argmax(-1))
        assert np.abs(mine - reference).max() < 0.05 * reference.std()


def test_pages_of_a_group_arrive_by_its_own_layers() -> None:
    """Layer 1 and 3 of the model are the second pool's; nothing waits for it in the others."""
    groups = (
        LayerGroup(LayerKind.FULL_ATTENTION, (0, 2), 1, 16),
        LayerGroup(LayerKind.SLIDING_WINDOW, (1, 3), 1, 16, window=32),
    )
    device = FakeDevice(0)  # lazy: nothing happens that nobody waits for
    parts = KVSpec(groups, "float16", 16).split()
    pools = [
        pool
        for pool in open_group_pools(parts, 1 << 16, device=device, layered_bytes=0)
        if isinstance(pool, DevicePool)
    ]
    assert pools[0].compute == pools[1].compute
    source = np.full(pools[1].spec.page_bytes, 7, np.uint8)
    address = source.ctypes.data
    pages = pools[1].allocate(1)
    assert pages is not None
    filling = pools[1].start_writing([(pages[0], address)])
    arrivals = arrivals_of(pools, [[], pages])
    assert arrivals.pending
    assert [arrivals.arrived(layer) for layer in range(4)] == [True, False, True, False]
    partial, config = PartialStep(Step((), (), (), arrivals, 16)), replace(preset("tiny"), layers=4)
    assert partial.arrived(config) == 1
    assert partial.arrived(replace(config, beside=(1, 3))) == 0  # the first waits for the one beside it
    seen: list[int] = []
    for layer in range(4):
        arrivals.wait(layer)
        device.launch(pools[0].compute, lambda: seen.append(int(pools[1].array[pages[0], 0])))
    device.finish(pools[0].compute)
    filling.wait()
    assert seen[1:] == [7, 7, 7]
    assert arrivals_of(pools, [[], pages]).pending is False


def test_a_batch_waits_for_the_pages_of_each_group() -> None:
    """Whose numbers are not those of another group's."""
    groups = (
        LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 16),
        LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 1, 16, window=32),
    )
    spec = KVSpec(groups, "float16", 16)
    pools = open_group_pools(spec.split(), 1 << 16, device=FakeDevice(0), layered_bytes=0)
    pages = [pool.allocate(count) for pool, count in zip(pools, (3, 2), strict=True)]
    connector = NoStore(pools, Identity.of(spec, model="waited for"))
    sequence = Sequence(
        *(
            RequestId(0),
            connector.prompt([1] * 20),
            [1] * 20,
            SamplingParams(),
            ByteTokenizer().detokenizer(),
        ),
        max_tokens=24,
        stop_ids=frozenset(),
        added=0.0,
    )
    sequence.tables, sequence.arriving = list(empty_tables(connector)), True
    sequence.tables[0].pages, sequence.tables[1].pages = pages[0][1:], pages[1][:1]
    source = np.full(pools[0].spec.page_bytes, 7, np.uint8)

    def pending() -> list[bool]:
        arrivals = build_step([Work(sequence, 16, 20)], pools).arrivals
        return [arrivals.arrived(layer) for layer in range(2)]

    assert pending() == [True, True]
    for pool, page, waiting in ((0, 0, [True, True]), (0, 2, [False, True]), (1, 0, [False, False])):
        pools[pool].start_writing([(pages[pool][page], source.ctypes.data)])
        assert pending() == waiting


@pytest.mark.parametrize(*diagonal(seed=SCHEDULES[:4], name=["gemma2", "qwen3-next"]))
def test_half_of_the_memory_and_back_while_requests_run(
    name: str,
    seed: int,
    oracles: Callable[[str], Oracle],
    loaded: Callable[..., LoadedModel],
    run_over: Callable[..., Run],
) -> None:
    """Large pages go from group to group, to the driver and back; requests are parked and go on."""
    oracle = oracles(name)
    model = loaded(str(oracle.folder))
    spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
    prompts = [oracle.prompt[first : first + 90] for first in (0, 3, 0, 7, 11, 3)]
    alone = run_over(model, plain_pools(spec)).ask(*prompts)
    pools = device_pools(spec, seed, grows=1)
    run = run_over(model, pools, on_host)
    device = pools[0].runtime
    engine, large_pages = run.engine, pools[0].large_pages
    whole, mapped = large_pages.nbytes, set[int]()
    ids = [engine.add(prompt, PARAMS) for prompt in prompts]
    told: dict[int, np.ndarray] = {}
    for step in itertools.count():
        engine.resize_pool(whole // 2 if step % 6 < 3 else whole)
        mapped.add(device.mapped)
        for output in engine.step():
            if output.completion is not None:
                told[output.request_id] = output.completion.logits
        run.connector.store.check()
        if len(told) == len(ids):
            break
    for request, reference in zip(ids, alone, strict=True):
        assert np.array_equal(told[request].argmax(-1), reference.argmax(-1))
        assert np.abs(told[request] - reference).max() < 1e-3 * reference.std()
    assert max(mapped) - min(mapped) > 0.3 * whole
    assert device.strays == 0


def test_as_many_pages_as_fit(loaded: Callable[..., LoadedModel], oracles: Callable[[str], Oracle]) -> None:
    """Of all groups together, and one more would be too many."""
    model = loaded(str(oracles("gemma2").folder))
    spec, settings = model.kv_spec(chunk_tokens=STORED_CHUNK), EngineSettings(prefill_chunk=32)
    device = FakeDevice(total_bytes=8 << 20)
    pages = fitting_pages(spec, device, settings)

    def taken(pages: int) -> int:
        return bytes_for(spec.split(), group_pages(spec, pages, settings))

    room = 0.9 * device.memory().free
    assert taken(pages) <= room < taken(pages + 2)
