"""Measure decoding over pages in host memory: the attention of a step, beside a copy of these pages over the
link, and beside the same step with all pages on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from tierstore.machine import memory_bytes
from tierstore.memory import ALIGNMENT
from tierstore.tiers.device import Device, Stream
from tierstore.tiers.device_overflow import DeviceOverflowPool
from tierstore.tiers.device_pool import DevicePool
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.overflow import Overflow
from tierstore.units import round_up
from tierstore_engine.attention.base import Attention, BatchLayout, Span
from tierstore_engine.config import ModelConfig
from tierstore_tools.gpu.transfers import TransferBench
from tierstore_tools.longctx.beyond import fill

_STEPS = 3
_SHARE = 0.8  # pages take at most this share of the free memory
_SPARE_PAGES = 8  # more pages in host memory, for the pages that move together and for the new token's page
_LINK_PAGES = 128  # the copy that measures the link has at most this many pages


@dataclass(frozen=True, slots=True)
class PushDownCase:
    """A sequence of ``tokens`` tokens, ``on_device`` of them in the device's memory."""

    tokens: int
    on_device: int


CASES = (PushDownCase(1 << 18, 1 << 16), PushDownCase(1 << 20, 1 << 16))


@dataclass(frozen=True, slots=True)
class PushDownRow:
    """The result of one case. ``wanted`` is its number of tokens, and ``tokens`` the number that memory had
    room for.

    ``step_s`` is the time of attention for one new token, in all layers, without the rest of the model.
    ``host_gb_per_s`` is the size of the pages in host memory over this time. ``fraction`` is this rate over
    the rate of a plain copy from pinned memory. If it is above 1, it would be slower to copy the pages to the
    device for each token. ``resident_s`` is the time of the same step with all pages on the device, and
    ``largest_difference`` the largest difference between the last layer's outputs of the two steps. Both are
    None if the pages do not fit.
    """

    wanted: int
    tokens: int
    device_bytes: int
    host_bytes: int
    step_s: float
    host_gb_per_s: float
    link_gb_per_s: float
    fraction: float
    resident_s: float | None
    largest_difference: float | None


@dataclass(frozen=True)
class PushDownBench:
    """Attention for a new token of a model on ``device``. ``attend`` makes attention over a pool,
    ``computing`` is a context in which torch's work goes to a stream, and ``tensors`` is torch's name of the
    device. Pages take at most ``device_bytes`` and ``host_bytes``."""

    device: Device
    config: ModelConfig
    attend: Callable[[PagePool, ModelConfig], Attention]
    computing: Callable[[Stream], AbstractContextManager[object]]
    tensors: str
    device_bytes: int
    host_bytes: int
    chunk_tokens: int = 64

    @classmethod
    def on(
        cls,
        device: Device,
        config: ModelConfig,
        attend: Callable[[PagePool, ModelConfig], Attention],
        computing: Callable[[Stream], AbstractContextManager[object]],
    ) -> PushDownBench:
        """Return the benchmark with pages in most of the device and host memory that is free now."""
        room = int(device.memory().free * _SHARE), int(memory_bytes().available * _SHARE)
        return cls(device, config, attend, computing, device.name, *room)

    def rows(self, cases: Sequence[PushDownCase] = CASES) -> Iterator[PushDownRow]:
        """Yield one row per case."""
        for case in cases:
            yield self._one(case)

    def _one(self, case: PushDownCase) -> PushDownRow:
        spec = self.config.kv_spec(chunk_tokens=self.chunk_tokens)
        page = round_up(spec.page_bytes, ALIGNMENT)
        here = min(case.on_device // self.chunk_tokens, self.device_bytes // page)
        beyond = min(case.tokens // self.chunk_tokens - here, self.host_bytes // page - _SPARE_PAGES)
        pages = here + beyond
        resident_s = expected = None
        if (pages + 1) * page <= self.device_bytes:
            resident = DevicePool(spec, pages + 1, self.device)
            resident_s, expected = self._decode(resident, resident, pages)
            del resident  # release its memory for the next pool
        host = Overflow(None, 0, host_bytes=(beyond + _SPARE_PAGES) * page)
        pool = DeviceOverflowPool.open(spec, here, host, self.device)
        link = self._link_gb_per_s(pool.hbm)
        step_s, found = self._decode(pool, pool.hbm, pages)
        host_bytes = pool.stats.host_pages * spec.page_bytes
        pool.close()
        rate = host_bytes / step_s / 1e9
        return PushDownRow(
            wanted=case.tokens,
            tokens=pages * self.chunk_tokens,
            device_bytes=here * spec.page_bytes,
            host_bytes=host_bytes,
            step_s=step_s,
            host_gb_per_s=rate,
            link_gb_per_s=link,
            fraction=rate / link,
            resident_s=resident_s,
            largest_difference=None if expected is None else float((found - expected).abs().max()),
        )

    def _decode(self, pool: PagePool, hbm: DevicePool, pages: int) -> tuple[float, torch.Tensor]:
        """Fill ``pages`` pages of ``pool`` and decode one token behind them a few times. Return the median of
        the seconds, and the last layer's output."""
        table = pool.allocate(pages + 1)
        assert table is not None, "the pool has room for this many pages"
        fill(pool, table[:-1], getattr(torch, self.config.dtype))
        attention, took = self.attend(pool, self.config), []
        with self.computing(hbm.compute):
            inputs = self._inputs()
            for _ in range(1 + _STEPS):
                begun = time.perf_counter()
                out = self._step(attention, inputs, table, pages * self.chunk_tokens)
                self.device.synchronize(self.device.record(hbm.compute))
                took.append(time.perf_counter() - begun)
            return statistics.median(took[1:]), out.float().cpu()

    def _inputs(self) -> list[list[torch.Tensor]]:
        """Return keys, values and queries of the new token for each layer, the same in each call."""
        config, generator = self.config, torch.Generator(self.tensors).manual_seed(1)
        dtype: torch.dtype = getattr(torch, config.dtype)

        def numbers(heads: int) -> torch.Tensor:
            shape = (1, heads, config.head_dim)
            return torch.randn(shape, generator=generator, device=self.tensors).to(dtype)

        heads = (config.kv_heads, config.kv_heads, config.heads)
        return [[numbers(each) for each in heads] for _ in range(config.layers)]

    def _step(
        self, attention: Attention, inputs: list[list[torch.Tensor]], table: list[int], past: int
    ) -> torch.Tensor:
        """Return the last layer's output for the token behind ``past`` tokens."""
        span = Span((table,), past, past + 1)
        batch = BatchLayout.of([span], chunk_tokens=self.chunk_tokens, device=self.tensors)
        for layer, (keys, values, queries) in enumerate(inputs):
            attention.write(layer, keys, values, batch)
            out = attention.attend(layer, queries, batch)
        return out

    def _link_gb_per_s(self, hbm: DevicePool) -> float:
        """Return the rate of a plain copy from pinned memory to some pages of ``hbm``, which overwrites
        them."""
        bench = TransferBench(hbm, min(hbm.num_pages, _LINK_PAGES))
        try:
            return next(bench.rows()).plain_gb_per_s
        finally:
            bench.close()
