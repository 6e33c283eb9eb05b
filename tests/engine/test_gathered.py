"""Prefill by torch over gathered pages, and the choices that are measured once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.device import FakeDevice
from tests.engine.kernels.executor import missing_tools
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Span
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.attention.cuda import CudaAttention
from tierstore_engine.attention.gathered import (
    EVERYWHERE,
    NOWHERE,
    GatheredPrefill,
    LibraryRanges,
    choose,
)
from tierstore_engine.build import _fitting_pages, build_engine, resolve_device
from tierstore_engine.choices import kept_choice
from tierstore_engine.config import ModelConfig
from tierstore_engine.gather import KernelGather, crossover
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.presets import preset
from tierstore_engine.settings import EngineSettings

CHUNK = 16
executed = pytest.mark.skipif(
    missing_tools() is not None, reason=f"kernels cannot be executed: {missing_tools()}"
)


def filled_pool(config: ModelConfig, pages: int) -> PagePool:
    pool = PagePool(config.kv_spec(chunk_tokens=CHUNK), pages)
    numbers = pool.array.view(np.float16)
    numbers[:] = np.random.default_rng(1).standard_normal(numbers.shape)
    return pool


@executed
@pytest.mark.parametrize("windowed", [False, True])
def test_library_beside_the_other_backends(windowed: bool) -> None:
    """A mixed batch: the chunks go to torch (not those of a model with windows), the decodes to the
    kernel."""
    config = replace(
        preset("tiny", dtype="float16"),
        heads=6,
        kv_heads=2,
        head_dim=64,
        windows=(None, 20 if windowed else None),
    )
    pool = filled_pool(config, 24)
    launcher = ExecutorLauncher()
    ours = CudaAttention(torch.from_numpy(pool.array), pool.spec, config, launcher)
    ours.library_at = LibraryRanges(((0, 50),))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2)).tolist()
    spans = [
        Span(([order.pop() for _ in range(-(-stop // CHUNK))],), start, stop)
        for start, stop in ((0, 40), (33, 34), (16, 41), (60, 67), (5, 7))
    ]
    batch = BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")
    tokens = sum(span.tokens for span in spans)
    queries = torch.randn((tokens, 6, 64), generator=torch.Generator().manual_seed(3)).half()
    theirs = CpuAttention(pool, config)
    for layer in range(2):
        expected = theirs.attend(layer, queries, batch)
        torch.testing.assert_close(ours.attend(layer, queries, batch), expected, atol=4e-3, rtol=4e-3)
    alone = [span for span in spans if span.start >= 50 or span.tokens == 1 or windowed]
    prefills = sum(name.startswith("prefill") for name in launcher.launches)
    assert prefills == 2 * any(span.tokens > 1 for span in alone)
    assert len(ours._prepared(batch).gathered) == (0 if windowed else 3)
    # Who needs the LSE gets it, from the kernels, and the next one the library again.
    out, lse = ours.attend_with_lse(1, queries, batch)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3)
    assert lse.isfinite().all()
    assert len(ours._prepared(batch).gathered) == (0 if windowed else 3)


def test_gathered_keys_are_those_of_the_pages() -> None:
    config = preset("tiny", dtype="float16")
    pool = filled_pool(config, 6)
    shape = (6, config.layers, 2, config.kv_heads, CHUNK, config.head_dim)
    kv = torch.from_numpy(pool.array).view(torch.float16).view(shape)
    keys, values = GatheredPrefill(kv, 1.0).gather(1, torch.tensor([4, 0, 5]), 35)
    for plane, found in enumerate((keys, values)):
        expected = torch.cat([kv[page, 1, plane] for page in (4, 0, 5)], dim=1)[:, :35]
        assert torch.equal(found.squeeze(0), expected)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize(("past", "tokens"), [(1, 2), (16, 33), (200, 7), (47, 64)])
def test_a_chunk_behind_a_past_is_two_parts_merged(heads: int, kv_heads: int, past: int, tokens: int) -> None:
    """Beside attention under a mask, in float64."""
    config = replace(preset("tiny", dtype="float16"), heads=heads, kv_heads=kv_heads, head_dim=32)
    pool = filled_pool(config, 16)
    shape = (16, config.layers, 2, kv_heads, CHUNK, 32)
    library = GatheredPrefill(torch.from_numpy(pool.array).view(torch.float16).view(shape), 32**-0.5)
    table = torch.randperm(16, generator=torch.Generator().manual_seed(4))[: -(-(past + tokens) // CHUNK)]
    queries = 3 * torch.randn((tokens, heads, 32), generator=torch.Generator().manual_seed(5)).half()
    told = library.attend(1, queries, table, past + tokens)
    keys, values = (
        each[0].double().repeat_interleave(heads // kv_heads, dim=0)
        for each in library.gather(1, table, past + tokens)
    )
    scores = torch.einsum("thd,hsd->hts", queries.double(), keys) * 32**-0.5
    hidden = torch.arange(past + tokens)[None] > torch.arange(past, past + tokens)[:, None]
    expected = torch.einsum("hts,hsd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    torch.testing.assert_close(told.double(), expected, atol=4e-3, rtol=4e-3)


def test_the_library_is_chosen_where_it_is_faster() -> None:
    kernels = {0: 1.0, 2048: 2.0, 8192: 4.0, 32768: 9.0}
    library = {0: 0.98, 2048: 1.5, 8192: 3.0, 32768: 9.5, 96 * 1024: 30.0}
    chosen = choose(kernels.__getitem__, library.__getitem__, chunk=1024, limit=100_000)
    assert chosen == LibraryRanges(((2048, 32768),), least_tokens=512)  # 2 % are not worth it
    assert chosen.takes(1024, 2048)
    assert chosen.takes(512, 32767)
    assert not chosen.takes(1024, 32768)
    assert not chosen.takes(511, 2048)  # nobody has measured that
    assert choose(lambda _: 1.0, lambda _: 0.5, chunk=64, limit=3000).ranges == ((0, 3000),)
    assert EVERYWHERE.takes(2, 10**6)
    assert not EVERYWHERE.takes(1, 0)  # a decode is the kernels'
    assert not NOWHERE.takes(1024, 0)


def test_the_library_is_not_chosen_for_lengths_that_it_has_no_memory_for() -> None:
    def library(past: int) -> float:
        return 0.5 if past < 90_000 else float("inf")

    measured = choose(lambda _: 1.0, library, chunk=1024, limit=100_000)
    assert measured.ranges == ((0, 32768),)
    assert choose(lambda _: 1.0, library, chunk=1024, limit=90_000).ranges == ((0, 90_000),)


def test_a_choice_is_measured_once(tmp_path: Path) -> None:
    measured: list[int] = []

    def choice(facts: str, answer: int) -> int:
        def measure() -> int:
            measured.append(answer)
            return answer

        return int(kept_choice("test", {"about": facts}, measure, folder=tmp_path))

    assert [choice("a", 1), choice("a", 2), choice("b", 3)] == [1, 1, 3]
    assert measured == [1, 3]


def test_who_measures_at_the_same_time_takes_the_first_answer(tmp_path: Path) -> None:
    def measure() -> int:
        return 1 + int(kept_choice("test", {}, lambda: 10, folder=tmp_path))

    assert kept_choice("test", {}, measure, folder=tmp_path) == 10


def test_a_damaged_choice_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept_choice("test", {}, lambda: 1, folder=tmp_path)
    [file] = tmp_path.iterdir()
    assert json.loads(file.read_text())["facts"] == {"name": "test"}
    file.write_text("{")
    assert kept_choice("test", {}, lambda: 2, folder=tmp_path) == 2
    assert "measuring again" in caplog.text
    assert kept_choice("test", {}, lambda: 3, folder=tmp_path) == 2
    file.unlink()
    tmp_path.joinpath("no").write_text("")
    assert kept_choice("test", {}, lambda: 4, folder=tmp_path / "no") == 4
    assert "the next process will measure again" in caplog.text


def test_on_the_cpu_a_pools_size_must_be_said(tiny: LoadedModel) -> None:
    with pytest.raises(UsageError, match="number of pages"):
        build_engine(tiny, pool_pages=None)


def test_devices_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cuda:0", "cuda:1"):
        assert resolve_device(device, "bfloat16") == device
    with pytest.raises(UsageError, match=r"no device cuda:2: torch sees 2 \(the last is cuda:1\)"):
        resolve_device("cuda:2", "bfloat16")
    asked: list[int] = []

    class Counted(FakeDevice):
        def __init__(self, index: int) -> None:
            asked.append(index)
            super().__init__()

    monkeypatch.setattr("tierstore_engine.build.CudaDevice", Counted)
    assert _fitting_pages(preset("tiny", dtype="float16").kv_spec(), "cuda:1", EngineSettings()) > 0
    assert asked == [1]


def test_crossover() -> None:
    assert crossover(2.0, 1.0, 4096) == 4097
    assert crossover(1.0, 1.0, 4096) == 0


@executed
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_layers_go_up_by_the_kernel_where_that_is_faster(seed: int) -> None:
    config = preset("tiny", dtype="float16")
    device = FakeDevice(seed)
    pool = DevicePool(config.kv_spec(chunk_tokens=CHUNK), 4, device, layered_bytes=0)
    gather = KernelGather(ExecutorLauncher(), device.launch, device="cpu")
    layer = pool.spec.layer(0)
    gather.below_bytes = crossover(2.0, 1.0, layer.stop - layer.start)
    pool.gather = gather
    host = Memory(4 * pool.spec.page_bytes, shared=False)
    pool.register(host.address, host.nbytes)
    host.view(0, host.nbytes)[:] = np.random.default_rng(seed).bytes(host.nbytes)
    pool.start_writing([(page, host.address + page * pool.spec.page_bytes) for page in range(4)])
    arrivals = pool.arrivals(range(4))
    seen: list[bytes] = []

    def look() -> None:
        for number in range(pool.spec.num_layers):
            arrivals.wait(number)
            span = pool.spec.layer(number)
            seen.append(pool.array[:, span.start : span.stop].tobytes())

    device.launch(pool.compute, look)
    device.finish(pool.compute)
    pages = np.frombuffer(host.view(0, host.nbytes), np.uint8)[: 4 * pool.spec.page_bytes].reshape(4, -1)
    spans = [pool.spec.layer(number) for number in range(pool.spec.num_layers)]
    assert seen == [pages[:, span.start : span.stop].tobytes() for span in spans]
    assert (device.batches, device.copies) == (0, 0)
