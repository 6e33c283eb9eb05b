"""Recurrent states on a GPU, by the kernels of :mod:`tierstore_engine.kernels.states`: two launches for all
sequences of a step, decoding or prefilling."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from tierstore.spec import KVSpec
from tierstore_engine.attention.base import BatchLayout, Prepared
from tierstore_engine.config import ModelConfig
from tierstore_engine.delta import DeltaStates
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import Sequences, Slots
from tierstore_engine.kernels.states import DeltaKernels, LayerStates, Mamba2Kernels, StateSpans
from tierstore_engine.layer_weights import Mamba2Terms
from tierstore_engine.mamba2 import Mamba2States
from tierstore_engine.moving import to_device


class CudaStates:
    """States in ``pages``; see :class:`~tierstore_engine.attention.cuda.CudaAttention`. Not thread-safe."""

    def __init__(self, pages: torch.Tensor, spec: KVSpec) -> None:
        assert pages.shape[1] == spec.page_bytes, "the pool has another layout than the model"
        self.chunk_tokens = spec.chunk_tokens
        self._spec, self._pages = spec, pages
        self._steps: Prepared[StateSpans] = Prepared()

    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        """Return a fixed batch; see :meth:`~tierstore_engine.attention.cuda.CudaAttention.fix`. The page of a
        state is the first entry of its sequence's block table."""
        layout = BatchLayout((), (), slots.pages, slots.offsets)
        spans = StateSpans(decoding.rows, decoding.counts, decoding.lengths, decoding.tables)
        return self._steps.fix(layout, spans)

    def _of(self, layer: int, layout: BatchLayout) -> tuple[LayerStates, StateSpans]:
        spans = self._steps.of(layout, lambda: _prepare(layout, self._pages.device))
        return LayerStates(self._pages, self._spec.layer(layer).start), spans


class CudaDeltaStates(CudaStates, DeltaStates):
    """Recurrent states with the gated delta rule, on a GPU."""

    def __init__(self, pages: torch.Tensor, spec: KVSpec, config: ModelConfig, launcher: Launcher) -> None:
        super().__init__(pages, spec)
        assert config.delta is not None
        self._delta = config.delta
        self._kernels = DeltaKernels(launcher, config.delta, dtype=config.dtype)

    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        out = channels.new_empty(len(channels), self._delta.value_heads, self._delta.value_dim)
        states, spans = self._of(layer, layout)
        inputs = (channels, conv.contiguous(), rates.contiguous(), decays.contiguous())
        self._kernels.advance(states, *inputs, spans, out)
        return out


class CudaMamba2States(CudaStates, Mamba2States):
    """States of Mamba-2."""

    def __init__(self, pages: torch.Tensor, spec: KVSpec, config: ModelConfig, launcher: Launcher) -> None:
        super().__init__(pages, spec)
        assert config.mamba is not None
        self._mamba = config.mamba
        self._kernels = Mamba2Kernels(launcher, config.mamba, dtype=config.dtype)

    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        steps: torch.Tensor,
        terms: Mamba2Terms,
        layout: BatchLayout,
    ) -> torch.Tensor:
        shape = (len(channels), self._mamba.heads, self._mamba.head_dim)
        out = channels.new_empty(shape, dtype=torch.float32)
        states, spans = self._of(layer, layout)
        self._kernels.advance(states, channels, steps, terms, spans, out)
        return out


def _prepare(layout: BatchLayout, device: torch.device) -> StateSpans:
    spans = layout.spans
    first_rows = list(accumulate((span.tokens for span in spans), initial=0))[:-1]
    columns = (
        first_rows,
        [span.tokens for span in spans],
        [span.stop for span in spans],
        [span.tables[layout.group][0] for span in spans],
        [span.drafted for span in spans],
    )
    rows, counts, lengths, pages, drafts = to_device(torch.from_numpy(np.array(columns, np.int32)), device)
    return StateSpans(rows, counts, lengths, pages.unsqueeze(1), drafts)
