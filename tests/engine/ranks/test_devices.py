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
from tierstore.types import Promise
from tierstore_connectors.bundled import StoreConnector
from tierstore_engine.build import build_engine, load_model, open_model
from tierstore_engine.drafting import Drafter, PromptLookupDrafter
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RankLostError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, RequestId
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
    ("tiny", 4, 1, "auto"),
    ("tiny-gemma3", 2, 1, "k8v4"),
    ("tiny", 2, 2, "auto"),
    ("tiny-deepseek", 1, 2, "auto"),
    ("tiny-deepseek", 2, 1, "auto"),
    ("tiny", 2, 1, "auto"),
    ("tiny", 1, 3, "int8"),
    ("tiny-moe", 2, 1, "auto"),
    ("tiny-moe", 1, 2, "auto"),
    ("tiny-gpt-oss", 2, 1, "auto"),
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
        ranks: int,
        name: str,
        *,
        parts: int = 1,
        pages: int = 40,
        seed: int = 2,
        url: str | None = None,
        drafter: Drafter | None = None,
        **reading: Any,
    ) -> Engine:
        model = load_model(name, device="cpu", tensor_parallel=ranks, sequence_parallel=parts, **reading)
        spec, settings = model.kv_spec(chunk_tokens=CHUNK), EngineSettings(prefill_chunk=64, plan="load")
        nbytes = bytes_for(spec.split(), group_pages(spec, pages, settings))
        heads = [kv_heads_of(model.config, Share(rank, ranks)) for rank in range(ranks)] * parts
        shares: dict[Device, range] = {FakeDevice(seed, beside=at): own for at, own in enumerate(heads)}
        pools = open_divided_pools(spec.split(), nbytes, shares, parts=parts)
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
        connector = StoreConnector(store, daemon=url is not None)
        engines.append(Engine(runner, model.tokenizer, connector, settings, drafter=drafter))
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
    ("name", "ranks", "parts", "kv_dtype"),
    chosen(CASES, *CASES[:3]),
)
def test_logits_are_those_of_one_rank_from_every_tier(
    name: str, ranks: int, parts: int, kv_dtype: str, engine_on_devices: Callable[..., Engine]
) -> None:
    """GQA with fewer heads than ranks, windows, latents, experts, sinks, scales of vectors; tokens in parts,
    some of which pass their KV."""
    prompt, longer = a_prompt(1, 200), [*a_prompt(1, 200), *a_prompt(2, 30)]
    expected, of_longer = alone(name, [prompt, longer], kv_dtype=kv_dtype)
    engine = engine_on_devices(ranks, name, parts=parts, kv_dtype=kv_dtype)
    found = [ask(engine, prompt, ""), ask(engine, prompt, "hbm")]
    for group, pool in enumerate(engine.connector.pools):  # evicted, and other pages lie there
        assert engine.connector.store.flush(60)
        engine.connector.evict(pool.num_pages, group=group)
    ask(engine, a_prompt(3, 150), "")
    found.append(ask(engine, prompt, "host"))
    assert_close([ask(engine, longer, "hbm")], [of_longer], kv_dtype)
    engine.close()
    found.append(ask(engine_on_devices(ranks, name, parts=parts, kv_dtype=kv_dtype), prompt, "disk"))
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
@pytest.mark.parametrize(("ranks", "parts"), chosen([(2, 1), (1, 2)], (1, 2)))
def test_preemption_and_eviction(ranks: int, parts: int, engine_on_devices: Callable[..., Engine]) -> None:
    """Three prompts that need more pages than there are. Each needs more than a part has."""
    prompts = [a_prompt(seed, 100) for seed in (5, 6, 7)]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    engine = build_engine(load_model("tiny", device="cpu"), pool_pages=80, chunk_tokens=CHUNK)
    expected = [engine.generate([prompt], params)[0].tokens for prompt in prompts]
    engine.close()
    engine = engine_on_devices(ranks, "tiny", parts=parts, pages=15)
    large = engine.connector.pool.large_pages
    assert large.part_size == -(-15 // parts)
    found = engine.generate(prompts, params)
    assert [each.tokens for each in found] == expected
    assert engine.stats().preemptions > 0
    assert [each.tokens for each in engine.generate(prompts, params)] == expected


@needs_driver
@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (1, 2)])
def test_the_kernels_over_shares(ranks: int, parts: int, engine_on_devices: Callable[..., Engine]) -> None:
    prompt = a_prompt(8, 70)
    [expected] = alone("tiny", [prompt], dtype="float16")
    engine = engine_on_devices(ranks, "tiny", parts=parts, dtype="float16")
    for tier in ("", "hbm"):
        assert np.abs(ask(engine, prompt, tier) - expected).max() < 0.05 * expected.std()


@needs_driver
@pytest.mark.parametrize(("ranks", "parts"), chosen([(2, 1), (1, 2)], (2, 1)))
def test_answers_with_drafts_and_copies_of_pages(
    ranks: int, parts: int, engine_on_devices: Callable[..., Engine]
) -> None:
    """Three continuations of one prompt write to copies of its last page, and their drafts are checked."""
    likely = dict.fromkeys((65, 66, 67), 12.0)  # so answers repeat themselves
    params = SamplingParams(max_new_tokens=24, temperature=0.6, seed=3, logit_bias=likely)
    prompt = a_prompt(10, 90)
    engine = build_engine(load_model("tiny", device="cpu"), pool_pages=80, chunk_tokens=CHUNK)
    expected = [each.tokens for each in engine.sample(prompt, params, n=3)]
    engine.close()
    engine = engine_on_devices(ranks, "tiny", parts=parts, drafter=PromptLookupDrafter())
    assert [each.tokens for each in engine.sample(prompt, params, n=3)] == expected
    assert engine.stats().drafted_tokens > 0


@needs_driver
@pytest.mark.parametrize(("ranks", "parts"), chosen([(2, 1), (1, 2)], (1, 2)))
def test_hand_over(
    ranks: int, parts: int, shared_daemon: DaemonProcess, engine_on_devices: Callable[..., Engine]
) -> None:
    """An engine computes a prompt, and another one waits for the pages that it has promised."""
    prompt = a_prompt(11, 150 + parts)
    expected = alone("tiny", [prompt])
    first = engine_on_devices(ranks, "tiny", parts=parts, url=shared_daemon.url)
    [done] = first.generate([prompt], replace(PARAMS, max_new_tokens=1))
    assert done.submitted_tokens == 144
    second = engine_on_devices(parts, "tiny", parts=ranks, url=shared_daemon.url)
    request = second.add(prompt, PARAMS, promise=Promise(done.submitted_tokens, 10.0))
    found = finished(second)[request]
    assert found.metrics.reused_by_tier.keys() == {"host"}
    assert found.metrics.reused_tokens >= 144
    assert found.logits is not None
    assert_close([found.logits], expected, "auto")


def finished(engine: Engine) -> dict[RequestId, Completion]:
    done: dict[RequestId, Completion] = {}
    while engine.has_work:
        done.update((each.request_id, each.completion) for each in engine.step() if each.completion)
    return done


@needs_driver
@pytest.mark.parametrize(("ranks", "parts"), [(2, 1), (1, 2)])
def test_a_lost_rank_ends_the_engine(
    ranks: int, parts: int, engine_on_devices: Callable[..., Engine]
) -> None:
    engine = engine_on_devices(ranks, "tiny", parts=parts)
    ask(engine, a_prompt(9, 40))
    assert isinstance(engine.model, RankedRunner)
    aborted: list[int] = []
    engine.model._others.when_lost = lambda: aborted.append(1)
    os.kill(engine.model._others.processes[0].pid, signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"^rank 1 of 2 was killed by signal 9: restart the engine$"):
        ask(engine, a_prompt(9, 80))
    assert aborted == [1]


class Nccl:
    """NCCL's group of one rank, as far as it is used. Notes how it is made and used."""

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

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> SimpleNamespace:
        self.calls.append("end")
        return SimpleNamespace(wait=lambda: self.calls.append("wait"))

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(f"send {tensors[0].tolist()} to {rank}")

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(f"receive {len(tensors[0])} of {rank}")

    def abort(self) -> None:
        self.calls.append("abort")


def test_tensors_on_a_gpu_go_by_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rank's device, and the time limit of gloo. Tensors to and from other ranks go together."""
    monkeypatch.setattr(collective, "to_device", lambda numbers, device: numbers)
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
    group.exchange({1: torch.ones(2), 2: torch.ones(0)}, {1: torch.empty(3), 2: torch.empty(1)}).wait()
    group.exchange({1: torch.ones(0)}, {}).wait()
    assert group.passed_bytes == 8
    assert nccl.calls == [
        *("allreduce", "allreduce", "gather", "allreduce", "abort"),
        *("start", "receive 3 of 1", "receive 1 of 2", "send [1.0, 1.0] to 1", "end", "wait"),
    ]


REFUSED = {
    "^--tensor-parallel 3 needs a GPU for each of 3 processes, from cuda:0 on, and torch sees 2: give fewer, "
    "or --device cpu$": {"tensor_parallel": 3},
    "^--sequence-parallel 2 needs a GPU for each of 2 processes, from cuda:1 on, and torch sees 2: ": {
        "sequence_parallel": 2,
        "device": "cuda:1",
    },
    "^--tensor-parallel 2 --sequence-parallel 2 needs a GPU for each of 4 processes": {
        "tensor_parallel": 2,
        "sequence_parallel": 2,
    },
    "^--sequence-parallel on GPUs does not work with windows or attention chunks: give --device cpu$": {
        "model": "tiny-gemma3",
        "sequence_parallel": 2,
    },
    "^--sequence-parallel on GPUs does not work with recurrent states: give --device cpu$": {
        "model": "tiny-qwen3-next",
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
    model = replace(load_model("tiny", device="cpu", tensor_parallel=2, sequence_parallel=2), device="cuda")
    with pytest.raises(UsageError, match=r"^--tensor-parallel on GPUs needs a size .* give --hbm-bytes$"):
        build_engine(model, pool_pages=None)
    with pytest.raises(UsageError, match=r"^a page pool on several devices cannot be resized"):
        build_engine(model, pool_pages=8, most_pool_bytes=1 << 30)
    with pytest.raises(RankLostError):
        build_engine(model, pool_pages=8)
    [[pool]] = started
    assert isinstance(pool.region, DividedRegion)
    assert pool.num_pages == 8
    assert [share.device for share in pool.region.shares] == [f"cuda:{index}" for index in range(4)]
    assert [share.layout.count for share in pool.region.shares] == [4] * 4
    [pages] = pool.region.share(1, 1).layout.specs
    assert pages.page_bytes * 2 == pool.spec.page_bytes
    assert [pool.books.allocate(1) for _ in range(3)] == [[0], [4], [1]]
