"""Attention over pages of which some are on a device, and the others in host memory or in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.engine.device import ONE_OF_EACH, FakeDevice, missing
from tests.engine.kernels.executor.launcher import ExecutorLauncher
from tests.engine.test_cuda_attention import memory_kind
from tests.engine.test_decode import config_of
from tierstore.tiers.device import Stream
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.overflow import Overflow
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.attention.push_down import PushDownAttention
from tierstore_engine.config import ModelConfig
from tierstore_engine.kernels.catalog import Instance
from tierstore_engine.kernels.launcher import Argument, Kernel, Launcher
from tierstore_engine.kv_format import KVFormat

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"no device to test with: {missing()}")

CHUNK, PAGES, SLOTS, LAYERS = 16, 40, 7, 2
HOST_PAGES = 6


class LateLauncher(Launcher):
    """Kernels that run when the schedule of a device says so."""

    def __init__(self, device: FakeDevice, stream: Stream) -> None:
        self._inner = ExecutorLauncher()
        self._device = device
        self._stream = stream

    def load(self, instance: Instance) -> Kernel:
        kernel = self._inner.load(instance)

        def launch(grid: Sequence[int], arguments: Sequence[Argument]) -> None:
            given = list(arguments)
            self._device.launch(self._stream, lambda: kernel(grid, given))

        return launch


def pool_over(device: FakeDevice, config: ModelConfig, directory: Path, *, file: bool) -> DeviceOverflowPool:
    [spec] = config.kv_spec(chunk_tokens=CHUNK).split()
    page = -(-spec.page_bytes // 4096) * 4096
    if not file:
        return DeviceOverflowPool.open(spec, SLOTS, Overflow(None, 0, host_bytes=PAGES * page), device)
    return DeviceOverflowPool.open(
        spec, SLOTS, Overflow(directory, 1 << 22, host_bytes=HOST_PAGES * page), device
    )


def push_down(
    pool: DeviceOverflowPool,
    config: ModelConfig,
    launcher: Launcher,
    kind: type[PushDownAttention] = PushDownAttention,
) -> PushDownAttention:
    inner = memory_kind(pool.spec, config)
    return kind(pool, config, inner(torch.from_numpy(pool.array), pool.spec, config, launcher))


class Sequences:
    """Sequences that grow in pages. The same seed gives the same numbers."""

    def __init__(
        self, attention: Attention, config: ModelConfig, finish: Callable[[], None], seed: int
    ) -> None:
        self.attention, self.config, self.finish = attention, config, finish
        self.generator = torch.Generator().manual_seed(seed)
        self.free = list(range(PAGES))
        self.tables: list[list[int]] = [[], [], []]
        self.lengths = [0, 0, 0]

    def numbers(self, tokens: int, heads: int) -> torch.Tensor:
        width = self.config.head_dim if self.config.latent is None else self.config.latent.width
        numbers = torch.randn((tokens, heads, width), generator=self.generator)
        return numbers.to(getattr(torch, self.config.dtype))

    def step(self, news: Sequence[int]) -> list[torch.Tensor]:
        """Write and attend ``news`` tokens. Return the outputs and LSEs of all layers."""
        spans = []
        for at, new in enumerate(news):
            stop = self.lengths[at] + new
            while len(self.tables[at]) * CHUNK < stop:
                self.tables[at].append(self.free.pop(0))
            if new:
                spans.append(Span((list(self.tables[at]),), self.lengths[at], stop))
            self.lengths[at] = stop
        batch = BatchLayout.of(spans, chunk_tokens=CHUNK, device="cpu")
        found, tokens, config = [], sum(news), self.config
        for layer in range(LAYERS):
            keys = self.numbers(tokens, config.kv_heads if config.latent is None else 1)
            values = None if config.latent else self.numbers(tokens, config.kv_heads)
            self.attention.write(layer, keys, values, batch)
            queries = self.numbers(tokens, config.heads)
            found += self.attention.attend_with_lse(layer, queries, batch)
            found.append(self.attention.attend(layer, queries, batch))
        self.finish()
        return found


CONFIGS = {
    "float16": config_of(6, 2, 64, dtype="float16"),
    "bfloat16": config_of(4, 2, 64, dtype="bfloat16"),
    "simt": config_of(2, 2, 64, dtype="bfloat16"),
    "int8": config_of(4, 2, 64, dtype="bfloat16", kv=KVFormat("int8", "int8")),
    "capped": config_of(4, 2, 64, dtype="bfloat16", score_cap=2.0),
}
STEPS = [(90, 20, 3), (40, 0, 40), (1, 1, 1), (1, 5, 0), (0, 1, 30), (1, 1, 1), (1, 1, 0)]


def errors(
    config: ModelConfig,
    directory: Path,
    seed: int,
    *,
    file: bool,
    kind: type[PushDownAttention] = PushDownAttention,
) -> float:
    """Return the largest difference from all pages on the device, over some steps of three sequences."""
    device = FakeDevice(seed)
    pool = pool_over(device, config, directory, file=file)
    try:
        launcher = LateLauncher(device, pool.hbm.compute)
        there = Sequences(
            push_down(pool, config, launcher, kind), config, lambda: device.finish(pool.hbm.compute), 3
        )
        plain = PagePool(pool.spec, PAGES)
        inner = memory_kind(plain.spec, config)
        whole = inner(torch.from_numpy(plain.array), plain.spec, config, ExecutorLauncher())
        assert isinstance(whole, Attention)
        here = Sequences(whole, config, lambda: None, 3)
        worst = 0.0
        for news in STEPS:
            for expected, found in zip(here.step(news), there.step(news), strict=True):
                difference = (expected.float() - found.float()).abs().max().item()
                worst = max(worst, difference if difference == difference else float("inf"))
        assert pool.stats.host_pages > 0
        assert (pool.stats.pages > 0) == file
        assert pool.stats.lost_pages == 0
        return worst
    finally:
        pool.close()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("file", [False, True], ids=["host", "file"])
def test_the_same_as_with_all_pages_on_the_device(name: str, file: bool, tmp_path: Path) -> None:
    unit = 2.0**-10 if name == "float16" else 2.0**-7
    assert errors(CONFIGS[name], tmp_path, 0, file=file) <= 3 * unit


@pytest.mark.parametrize("seed", ONE_OF_EACH)
def test_under_all_schedules(seed: int, tmp_path: Path) -> None:
    assert errors(CONFIGS["bfloat16"], tmp_path, seed, file=True) <= 3 * 2.0**-7
