"""Models of several layer groups over pools on a device: the bits of every tier, however copies and computing
interleave, and the CUDA backend's kernels on the executor over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import tierstore
from tests.engine.device import SCHEDULES, FakeDevice, missing
from tests.engine.device.deferred import DeferredRunner
from tierstore.errors import UsageError
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import PagePool, arrivals_of
from tierstore_connectors.bundled import GroupedConnector, open_connector
from tierstore_engine.build import LoadedModel, fitting_pages, group_pages, make_memory
from tierstore_engine.engine import Engine
from tierstore_engine.model import Memory, Model
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

from .conftest import STORED_CHUNK, Oracle
from .test_cuda_attention import cuda_memory

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

PAGES = 40
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, keep_logits=True)


@dataclass
class Run:
    """An engine over a grouped store."""

    engine: Engine
    connector: GroupedConnector

    def ask(self, *prompts: list[int], tiers: Sequence[str] = ()) -> list[np.ndarray]:
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
            pool.array[:] = 0xA5

    def close(self) -> None:
        assert self.connector.store.flush(60)
        self.connector.store.check()
        for group, pool in enumerate(self.connector.pools):
            assert self.connector.available(group=group) == pool.num_pages
        self.engine.close()


def device_pools(spec: KVSpec, seed: int) -> list[PagePool]:
    device, pools = FakeDevice(seed), list[DevicePool]()
    for part in spec.split():
        first = pools[0] if pools else None
        pools.append(DevicePool(part, PAGES, device, layered_bytes=0, beside=first))
    return list(pools)


def plain_pools(spec: KVSpec) -> list[PagePool]:
    return [PagePool(part, PAGES) for part in spec.split()]


Remembering = Callable[[PagePool, Any], Memory]


@pytest.fixture
def run_over() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(model: LoadedModel, pools: list[PagePool], memory: Remembering = make_memory) -> Run:
        spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
        store = tierstore.open_groups(
            None, spec, identity=model.identity(spec), pools=pools, host_bytes=16 << 20
        )
        memories = [memory(pool, model.config) for pool in pools]
        runnable = Model(model.config, model.weights, memories, device="cpu")
        runner = DeferredRunner(runnable, pools[0]) if isinstance(pools[0], DevicePool) else runnable
        settings = EngineSettings(prefill_chunk=32, max_sequences=4, plan="load")
        connector = GroupedConnector(store)
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


@pytest.mark.parametrize("seed", SCHEDULES[:3])
@pytest.mark.parametrize("name", ["gemma2", "qwen3-next", "nemotron-h"])
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


@pytest.mark.parametrize("name", ["gemma2", "llama4", "qwen3-next", "granite-hybrid-dense", "nemotron-h"])
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
    device, pools = FakeDevice(0), list[DevicePool]()  # lazy: nothing happens that nobody waits for
    for part in KVSpec(groups, "float16", 16).split():
        pools.append(DevicePool(part, 4, device, layered_bytes=0, beside=pools[0] if pools else None))
    assert pools[0].compute == pools[1].compute
    source = np.full(pools[1].spec.page_bytes, 7, np.uint8)
    address = source.ctypes.data
    pages = pools[1].allocate(1)
    assert pages is not None
    filling = pools[1].start_writing([(pages[0], address)])
    arrivals = arrivals_of(pools, [[], pages])
    assert arrivals.pending
    assert [arrivals.arrived(layer) for layer in range(4)] == [True, False, True, False]
    seen: list[int] = []
    for layer in range(4):
        arrivals.wait(layer)
        device.launch(pools[0].compute, lambda: seen.append(int(pools[1].array[pages[0], 0])))
    device.finish(pools[0].compute)
    filling.wait()
    assert seen[1:] == [7, 7, 7]
    assert arrivals_of(pools, [[], pages]).pending is False


def test_as_many_pages_as_fit(loaded: Callable[..., LoadedModel], oracles: Callable[[str], Oracle]) -> None:
    """Of all groups together, and one more would be too many."""
    model = loaded(str(oracles("gemma2").folder))
    spec, settings = model.kv_spec(chunk_tokens=STORED_CHUNK), EngineSettings(prefill_chunk=32)
    device = FakeDevice(total_bytes=8 << 20)
    pages = fitting_pages(spec, device, settings)

    def taken(pages: int) -> int:
        counts = group_pages(spec, pages, settings)
        return sum(count * part.page_bytes for count, part in zip(counts, spec.split(), strict=True))

    room = 0.9 * device.memory().free
    assert taken(pages) <= room < taken(pages + 2)


def test_pools_of_groups_keep_their_size_on_a_device(
    loaded: Callable[..., LoadedModel], oracles: Callable[[str], Oracle]
) -> None:
    model = loaded(str(oracles("gemma2").folder))
    spec = model.kv_spec(chunk_tokens=STORED_CHUNK)
    with pytest.raises(UsageError, match="keep their size: leave the largest size out"):
        open_connector(
            *(spec, model.identity(spec)), pool_pages=(4, 4), store=None, device="cuda", most_bytes=1 << 30
        )
