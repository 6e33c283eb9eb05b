"""The engine on the device of the tests: what it computes happens when the schedule says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.engine.device.driver import FakeDevice
from tierstore.tiers.device_pool import DevicePool
from tierstore_engine.config import ModelConfig
from tierstore_engine.model import Model
from tierstore_engine.sampling import Choice, Draw, Sampled, sample
from tierstore_engine.step import PartialStep, Runner, Step


class DeferredRunner(Runner):
    """``model``, whose steps are put on the pool's compute stream. Its pages are those of ``pool``."""

    def __init__(self, model: Model, pool: DevicePool) -> None:
        assert isinstance(pool.runtime, FakeDevice)
        self._runtime = pool.runtime
        self._model = model
        self._pool = pool

    @property
    def config(self) -> ModelConfig:
        return self._model.config

    def compute(self, step: Step) -> torch.Tensor:
        step = _told(step)
        logits = torch.full((len(step.logit_rows), self.config.vocab_size), torch.nan)
        self._runtime.launch(self._pool.compute, lambda: logits.copy_(self._model.compute(step)))
        return logits

    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        if not layers.start:
            partial.step = _told(partial.step)
        logits = torch.full((len(partial.step.logit_rows), self.config.vocab_size), torch.nan)

        def work() -> None:
            told = self._model.advance(partial, layers)
            if told is not None:
                logits.copy_(told)

        self._runtime.launch(self._pool.compute, work)
        return logits if layers.stop == self.config.layers else None

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        sampled: list[Sampled] = []
        self._runtime.launch(self._pool.compute, lambda: sampled.append(sample(logits, draws, rows)))
        self.wait()
        return sampled[0].choices()

    def wait(self) -> None:
        self._runtime.finish(self._pool.compute)


def _told(step: Step) -> Step:
    """With tables as they are now: a device is told of them when a step is put on it, and pages of windows
    that are given back after that are gone from them."""
    spans = (replace(span, tables=tuple(list(table) for table in span.tables)) for span in step.spans)
    return replace(step, spans=tuple(spans))
