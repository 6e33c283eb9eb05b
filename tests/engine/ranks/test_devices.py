"""Ranks with a device each, on the driver of the tests: pages of all tiers, eviction and preemption. The sums
are gloo's, because there is no GPU. NCCL is tested as far as its arguments."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import tierstore.tiers.cuda
from tests.engine.device import FakeDevice, missing
from tests.engine.ranks import on_devices
from tests.forked import Forked
from tests.portions import chosen
from tierstore.errors import UsageError
from tierstore.keys import Identity
from tierstore.testing.processes import DaemonProcess
from tierstore.tiers.device import Device
from tierstore.tiers.divided_pool import DividedRegion, open_divided_pools
from tierstore.tiers.group_pools import bytes_for
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RankLostError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.pool_sizes import group_pages
from tierstore_engine.ranks import collective, member
from tierstore_engine.ranks.collective import Collective
from tierstore_engine.ranks.others import Others
from tierstore_engine.ranks.runner import RankedRunner
from tierstore_engine.ranks.share import Share, kv_heads_of
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.settings import EngineSettings

CHUNK = 16
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True, keep_logits=True)
CASES = (
    ("tiny", 4, "auto"),
    ("tiny-gemma3", 2, "k8v4"),
    ("tiny-deepseek", 2, "auto"),
    ("tiny", 2, "auto"),
    ("tiny-moe", 2, "auto"),
    ("tiny-gpt-oss", 2, "auto"),
)
needs_driver = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")


@pytest.fixture
def engine_on_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Makes an engine of a preset, with ranks that have a device each, over one store directory."""

    def spawn(module: str, arguments: Sequence[str], pass_fds: Sequence[int]) -> Forked:
        assert module == "tierstore_engine.ranks.worker"
        return Forked(on_devices.__file__, arguments, pass_fds=pass_fds)

    monkeypatch.setattr(Others, "spawn", staticmethod(spawn))
    monkeypatch.setattr(member, "make_memory", on_devices.memory_on_device)
    engines: list[Engine] = []

    def make(
        ranks: int, name: str, *, pages: int = 40, seed: int = 2, url: str | None = None, **reading: Any
    ) -> Engine:
        model = load_model(name, device="cpu", tensor_parallel=ranks, **reading)
        spec, settings = model.kv_spec(chunk_tokens=CHUNK), EngineSettings(prefill_chunk=64, plan="load")
        nbytes = bytes_for(spec.split(), group_pages(spec, pages, settings))
        heads = [kv_heads_of(model.config, Share(rank, ranks)) for rank in range(ranks)]
        shares: dict[Device, range] = {FakeDevice(seed, beside=at): own for at, own in enumerate(heads)}
        pools = open_divided_pools(spec.split(), nbytes, shares)
        if url is None:
            store = tierstore.open(
                tmp_path / "store",
                spec,
                identity=model.identity(spec),
                pools=pools,
                host_bytes=16 << 20,
                disk_bytes=64 << 20,
            )
        else:
            identity = Identity.of(spec, model="ranks with devices")
            store = tierstore.connect(url, spec, identity=identity, pools=pools, lookup_s=30.0)
            store.wait_ready()
        runner = RankedRunner.start(model, pools)
        engines.append(Engine(runner, model.tokenizer, StoreConnector(store), settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def a_prompt(seed: int, tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(250) for _ in range(tokens)]


def ask(engine: Engine, prompt: list[int], tier: str | None = None) -> np.ndarray:
    """Return the logits. ``tier``: where pages of the prompt come from ("": nowhere)."""
    [completion] = engine.generate([prompt], PARAMS)
    if tier is not None:
        assert list(completion.metrics.reused_by_tier) == [tier] * bool(tier)
    assert completion.logits is not None
    return completion.logits


def alone(name: str, prompts: Sequence[list[int]], **reading: Any) -> list[np.ndarray]:
    """Return the logits of one process on the CPU."""
    engine = build_engine(load_model(name, device="cpu", **reading), pool_pages=80, chunk_tokens=CHUNK)
    try:
        return [ask(engine, prompt) for prompt in prompts]
    finally:
        engine.close()


@needs_driver
@pytest.mark.parametrize(
    ("name", "ranks", "kv_dtype"),
    chosen(CASES, *CASES[:3]),
)
def test_logits_are_those_of_one_rank_from_every_tier(
    name: str, ranks: int, kv_dtype: str, engine_on_devices: Callable[..., Engine]
) -> None:
    """GQA with fewer heads than ranks, windows, latents, experts, sinks, scales of vectors."""
    prompt, longer = a_prompt(1, 200), [*a_prompt(1, 200), *a_prompt(2, 30)]
    expected, of_longer = alone(name, [prompt, longer], kv_dtype=kv_dtype)
    engine = engine_on_devices(ranks, name, kv_dtype=kv_dtype)
    found = [ask(engine, prompt, ""), ask(engine, prompt, "hbm")]
    for group, pool in enumerate(engine.connector.pools):  # evicted, and other pages lie there
        assert engine.connector.store.flush(60)
        engine.connector.evict(pool.num_pages, group=group)
    ask(engine, a_prompt(3, 150), "")
    found.append(ask(engine, prompt, "host"))
    assert_close([ask(engine, longer, "hbm")], [of_longer], kv_dtype)
    engine.close()
    found.append(ask(engine_on_devices(ranks, name, kv_dtype=kv_dtype), prompt, "disk"))
    assert_close(found, [expected] * len(found), kv_dtype)
    region = engine.connector.pool.region
    assert isinstance(region, DividedRegion)
    device = region.shares[0].runtime
    assert isinstance(device, FakeDevice)
    assert device.strays == 0  # copies of memory that was not pinned, or not mapped


def assert_close(found: list[np.ndarray], expected: list[np.ndarray], kv_dtype: str) -> None:
    most = 1e-5 if kv_dtype == "auto" else 0.05  # a number at the border of two codes may move by a step
    for mine, reference in zip(found, expected, strict=True):
        assert np.abs(mine - reference).max() <= most * max(np.abs(reference).max(), 1.0)


@needs_driver
def test_pages_of_a_daemon(shared_daemon: DaemonProcess, engine_on_devices: Callable[..., Engine]) -> None:
    """Another number of ranks finds them."""
    prompt = a_prompt(4, 150)
    expected = alone("tiny", [prompt])
    for ranks, tier in ((2, ""), (3, "host")):
        engine = engine_on_devices(ranks, "tiny", url=shared_daemon.url)
        assert_close([ask(engine, prompt, tier)], expected, "auto")
        assert engine.connector.store.flush(60)
        engine.close()


@needs_driver
def test_preemption_and_eviction(engine_on_devices: Callable[..., Engine]) -> None:
    """Three prompts that need more pages than there are."""
    prompts = [a_prompt(seed, 60) for seed in (5, 6, 7)]
    params = SamplingParams(max_new_tokens=34, ignore_eos=True)
    engine = build_engine(load_model("tiny", device="cpu"), pool_pages=80, chunk_tokens=CHUNK)
    expected = [engine.generate([prompt], params)[0].tokens for prompt in prompts]
    engine.close()
    engine = engine_on_devices(2, "tiny", pages=13)
    found = engine.generate(prompts, params)
    assert [each.tokens for each in found] == expected
    assert engine.stats().preemptions > 0
    assert [each.tokens for each in engine.generate(prompts, params)] == expected


@needs_driver
def test_the_kernels_over_shares(engine_on_devices: Callable[..., Engine]) -> None:
    prompt = a_prompt(8, 70)
    [expected] = alone("tiny", [prompt], dtype="float16")
    engine = engine_on_devices(2, "tiny", dtype="float16")
    for tier in ("", "hbm"):
        assert np.abs(ask(engine, prompt, tier) - expected).max() < 0.05 * expected.std()


@needs_driver
def test_a_lost_rank_ends_the_engine(engine_on_devices: Callable[..., Engine]) -> None:
    engine = engine_on_devices(2, "tiny")
    ask(engine, a_prompt(9, 40))
    assert isinstance(engine.model, RankedRunner)
    aborted: list[int] = []
    engine.model._others.when_lost = lambda: aborted.append(1)
    os.kill(engine.model._others.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"^rank 1 of 2 was killed by signal 9: restart the engine$"):
        ask(engine, a_prompt(9, 80))
    assert aborted == [1]


class Nccl:
    """NCCL's group, as far as it is used, over gloo. Notes how it is made and used."""

    made: list[Nccl]

    class Options:
        _timeout = timedelta(0)
        is_high_priority_stream = True

    def __init__(self, store: Any, rank: int, size: int, options: Nccl.Options) -> None:
        self.given = rank, size, options._timeout, options.is_high_priority_stream
        self.store = store
        self.calls: list[str] = []
        self.devices: list[torch.device] = []
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.devices.append(device)

    def allreduce(self, tensors: list[torch.Tensor]) -> SimpleNamespace:
        self.calls.append("allreduce")
        return SimpleNamespace(wait=lambda: None)

    def gather(self, out: list[list[torch.Tensor]], given: list[torch.Tensor], _: Any) -> SimpleNamespace:
        self.calls.append("gather")
        for each in out:
            each[0].copy_(given[0])
        return SimpleNamespace(wait=lambda: None)

    def abort(self) -> None:
        self.calls.append("abort")


def test_tensors_on_a_gpu_go_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rank's device, and the time limit of gloo. Messages of numbers stay with gloo."""
    monkeypatch.setattr(collective._distributed, "ProcessGroupNCCL", Nccl, raising=False)
    Nccl.made = []
    on_cpu = Collective(Share(0, 1), str(tmp_path / "cpu"))
    assert not Nccl.made
    on_cpu.abort()
    group = Collective(Share(0, 1), str(tmp_path / "gpu"), "cuda:3")
    [nccl] = Nccl.made
    assert nccl.given == (0, 1, timedelta(hours=1), False)
    assert nccl.devices == [torch.device("cuda:3")]
    group.sum(torch.ones(2))
    group.columns(torch.ones(2, 5), 5)
    assert group.meet(4.0) == [4.0]
    group.abort()
    assert nccl.calls == ["allreduce", "gather", "abort"]


REFUSED = {
    "^--tensor-parallel 3 needs a GPU for each process, from cuda:0 on, and torch sees 2: give at most 2, "
    "or --device cpu$": {"tensor_parallel": 3},
    "from cuda:1 on, and torch sees 2: give at most 1, or --device cpu$": {
        "tensor_parallel": 2,
        "device": "cuda:1",
    },
    "^--sequence-parallel does not work with a GPU: give --device cpu$": {
        "tensor_parallel": 2,
        "sequence_parallel": 2,
    },
    "^--tensor-parallel on GPUs does not work with recurrent states: give --device cpu$": {
        "model": "tiny-qwen3-next",
        "tensor_parallel": 2,
    },
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_gpus_refused_at_the_start(sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match=sentence):
        open_model(**{"model": "tiny", "device": "cuda", "dtype": "float16", **REFUSED[sentence]})


@needs_driver
def test_an_engine_gives_each_gpu_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so only with a size of the page pool."""
    started: list[Sequence[PagePool]] = []

    def start(model: LoadedModel, pools: Sequence[PagePool]) -> None:
        started.append(pools)
        raise RankLostError("as far as this test goes")

    monkeypatch.setattr(tierstore.tiers.cuda, "CudaDevice", lambda index: FakeDevice(beside=index))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(RankedRunner, "start", start)
    model = replace(load_model("tiny", device="cpu", tensor_parallel=2), device="cuda")
    with pytest.raises(UsageError, match=r"^--tensor-parallel on GPUs needs a size .* give --hbm-bytes$"):
        build_engine(model, pool_pages=None)
    with pytest.raises(UsageError, match=r"^a page pool on several devices cannot be resized"):
        build_engine(model, pool_pages=8, most_pool_bytes=1 << 30)
    with pytest.raises(RankLostError):
        build_engine(model, pool_pages=8)
    [[pool]] = started
    assert isinstance(pool.region, DividedRegion)
    assert pool.num_pages == 8
    assert [share.device for share in pool.region.shares] == ["cuda:0", "cuda:1"]
    [pages] = pool.region.shares[1].layout.specs
    assert pages.page_bytes * 2 == pool.spec.page_bytes
