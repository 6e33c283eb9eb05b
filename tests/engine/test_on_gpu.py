"""The engine on a GPU, where there is one: each tier, captured decoding, and the numbers of a pool
that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore import open_pool
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.device_pool import DevicePool
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import build_engine, load_model
from tierstore_engine.device import CudaRunner, on_stream
from tierstore_engine.engine import Engine
from tierstore_engine.gather import KernelGather
from tierstore_engine.kernels.cupy_launcher import CupyLauncher
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings
from tierstore_engine.weight_slots import slots

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch warns of what it does on a device (a capture that is empty, an attention it cannot use), and
    # differently in each release.
    pytest.mark.filterwarnings("default:::torch"),
]

PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True, keep_logits=True)
# A hit on all but the last token is then as long as what was computed in whole chunks.
PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (1537, 769, 33)]
SETTINGS = EngineSettings(prefill_chunk=256, max_sequences=4, plan="load", prefill_backend="kernels")
POOL_PAGES = 64


@pytest.fixture(scope="module")
def models() -> Callable[[str], LoadedModel]:
    return model_on


def model_on(device: str) -> LoadedModel:
    """The same model on any device: random numbers of one seed are others on a GPU."""
    model, made = (load_model("tiny", dtype="float16", device=place) for place in (device, "cpu"))
    for ours, theirs in zip(
        slots(model.config, model.weights), slots(made.config, made.weights), strict=True
    ):
        ours.tensor.copy_(theirs.tensor)
    return replace(model, digest=made.digest)


@pytest.fixture
def engine(models: Callable[[str], LoadedModel]) -> Iterator[Engine]:
    opened = open_engine(models("cuda"), None)
    yield opened
    opened.close()


def open_engine(model: LoadedModel, store: str | None, settings: EngineSettings = SETTINGS) -> Engine:
    return build_engine(
        model, pool_pages=POOL_PAGES, store=store, host_bytes=64 << 20, disk_bytes=64 << 20, settings=settings
    )


def logits_of(engine: Engine, prompts: list[list[int]]) -> list[np.ndarray]:
    found = [engine.generate([prompt], PARAMS)[0].logits for prompt in prompts]
    assert all(logits is not None for logits in found)
    return found  # type: ignore[return-value]


def test_beside_the_cpu(engine: Engine, models: Callable[[str], LoadedModel]) -> None:
    reference = open_engine(models("cpu"), None)
    for ours, theirs in zip(logits_of(engine, PROMPTS), logits_of(reference, PROMPTS), strict=True):
        same = int(np.argmin(np.append(ours.argmax(-1) == theirs.argmax(-1), False)))
        assert same >= 5
        assert np.abs(ours[: same + 1] - theirs[: same + 1]).max() < 0.1 * theirs.std()


def test_decoding_is_replayed(engine: Engine) -> None:
    engine.generate(PROMPTS, PARAMS)
    graphs = engine.model.graphs  # type: ignore[attr-defined]
    assert graphs.replayed > 20
    assert set(graphs.eager) <= {"prefill"}


@pytest.mark.parametrize("backend", ["kernels", "library"])
def test_steps_wait_for_nothing_but_their_tokens(
    backend: str, models: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises wherever the host would wait for the device. The runner's own wait is let through."""
    opened = open_engine(models("cuda"), None, replace(SETTINGS, prefill_backend=backend))
    ways = [{}, {"temperature": 0.8, "top_p": 0.9, "logprobs": 3}, {"temperature": 1.0, "min_p": 0.1}]
    params = [SamplingParams(max_new_tokens=8, ignore_eos=True, **way) for way in ways]  # type: ignore[arg-type]
    for given in params:  # what is set up once may wait
        opened.generate(PROMPTS[:1], given)
    for prompt, given in zip(PROMPTS, params, strict=True):
        opened.add(prompt, given)
    waits = 0
    original = CudaRunner.wait

    def wait(self: CudaRunner) -> None:
        nonlocal waits
        waits += 1
        torch.cuda.set_sync_debug_mode("default")
        original(self)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(CudaRunner, "wait", wait)
    steps = 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        while opened.has_work:
            steps += bool(opened.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits == steps
    opened.close()


def test_every_tier_continues_as_the_cold_run(models: Callable[[str], LoadedModel], tmp_path: Path) -> None:
    model, store = models("cuda"), str(tmp_path / "store")
    engine = open_engine(model, store)
    pool = engine.connector.pool
    assert isinstance(pool, DevicePool)
    pool._layered_bytes = 0
    cold = logits_of(engine, PROMPTS)
    for tier in ("hbm", "host"):
        if tier == "host":
            assert engine.connector.store.flush(30)  # type: ignore[attr-defined]
            engine.connector.evict(POOL_PAGES)
        assert_same_tokens(logits_of(engine, PROMPTS), cold)
    engine.close()
    again = open_engine(model, store)
    assert_same_tokens(logits_of(again, PROMPTS), cold)
    again.close()


def test_a_pool_that_may_grow(models: Callable[[str], LoadedModel]) -> None:
    """What is measured at the start reads and writes pages that there are."""
    model, settings = models("cuda"), replace(SETTINGS, prefill_backend="auto")
    fixed = open_engine(model, None, settings)
    expected = logits_of(fixed, PROMPTS)
    fixed.close()
    page_bytes = model.kv_spec().page_bytes
    most = 32 * POOL_PAGES * page_bytes
    engine = build_engine(model, pool_pages=POOL_PAGES, most_pool_bytes=most, settings=settings)
    for pages in (POOL_PAGES, 2 * POOL_PAGES, POOL_PAGES // 2):
        engine.resize_pool(pages * page_bytes)
        assert_same_tokens(logits_of(engine, PROMPTS), expected)
    engine.close()


def test_over_a_daemon(models: Callable[[str], LoadedModel], shared_daemon: DaemonProcess) -> None:
    """Its arena is registered here, and pages go up from it as from an arena of our own."""
    engine = open_engine(models("cuda"), shared_daemon.url)
    connector = engine.connector
    assert isinstance(connector, StoreConnector)
    pool, store = connector.pool, connector.store
    assert isinstance(pool, DevicePool)
    pool._layered_bytes = 0
    store.wait_ready()
    assert store.stats().counters["connection"]["unpinned_arenas"] == 0
    cold = logits_of(engine, PROMPTS)
    assert store.flush(30)
    connector.evict(POOL_PAGES)
    hit = store.lookup(PROMPTS[0])
    assert "host" in hit.by_tier
    hit.release()
    assert_same_tokens(logits_of(engine, PROMPTS), cold)
    engine.close()


def assert_same_tokens(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for mine, reference in zip(ours, theirs, strict=True):
        assert np.array_equal(mine.argmax(-1), reference.argmax(-1))
        assert np.abs(mine - reference).max() < 0.05 * reference.std()


@pytest.mark.parametrize("backend", ["auto", "library"])
def test_prefill_backends(backend: str, engine: Engine, models: Callable[[str], LoadedModel]) -> None:
    other = open_engine(
        models("cuda"), None, EngineSettings(prefill_chunk=256, plan="load", prefill_backend=backend)
    )
    assert_same_tokens(logits_of(other, PROMPTS[1:]), logits_of(engine, PROMPTS[1:]))
    other.close()


def test_a_pool_as_large_as_what_is_free(models: Callable[[str], LoadedModel]) -> None:
    opened = build_engine(models("cuda"), pool_pages=None, settings=SETTINGS)
    free, total = torch.cuda.mem_get_info()
    assert free < 0.2 * total
    opened.close()


def test_a_pool_that_does_not_fit(models: Callable[[str], LoadedModel]) -> None:
    spec = models("cuda").kv_spec()
    with pytest.raises(UsageError, match=r"does not fit cuda:0: .* are free, room for \d+ pages"):
        open_pool(spec, (1 << 44) // spec.page_bytes, device="cuda")


@pytest.mark.parametrize("by_kernel", [False, True])
def test_loaded_bytes_are_those_that_were_saved(by_kernel: bool, engine: Engine) -> None:
    """Through the pool alone, layered and whole, both ways."""
    pool = engine.connector.pool
    assert isinstance(pool, DevicePool)
    pool.gather = KernelGather(CupyLauncher(pool.device), on_stream(pool.device), device=pool.device)
    pool.gather.below_bytes = 1 << 30 if by_kernel else 0
    page_bytes = pool.spec.page_bytes
    memories = [
        Memory(16 * page_bytes, shared=False) for _ in range(2)
    ]  # whole pages of the machine, as arenas are
    for memory in memories:
        pool.register(memory.address, memory.nbytes)
    out, back = (
        np.frombuffer(memory.view(0, 16 * page_bytes), np.uint8).reshape(16, page_bytes)
        for memory in memories
    )
    out[:] = np.random.default_rng(1).integers(256, size=out.shape)
    for layered in (0, 1 << 40):
        pool._layered_bytes = layered
        back[:] = 0
        pool.write_pages([(page, memories[0].address + (15 - page) * page_bytes) for page in range(16)])
        pool.read_pages([(page, memories[1].address + page * page_bytes) for page in range(16)])
        assert np.array_equal(back, out[::-1])
    assert pool.runtime.refused_batches == 0  # type: ignore[attr-defined]
    for memory in memories:
        pool.unregister(memory.address)
