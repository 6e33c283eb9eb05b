"""Recurrent states on a GPU, by the kernels of :mod:`tierstore_engine.kernels.states`: two launches for all
sequences of a step, whether they decode or prefill."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch

from tierstore.spec import KVSpec
from tierstore_engine.attention.base import BatchLayout, Prepared
from tierstore_engine.config import ModelConfig
from tierstore_engine.kernels.launcher import Launcher
from tierstore_engine.kernels.operations import Sequences, Slots
from tierstore_engine.kernels.states import StateKernels, StateSpans
from tierstore_engine.moving import to_device
from tierstore_engine.states import RecurrentStates


class CudaStates(RecurrentStates):
    """States in ``pages``, as :class:`~tierstore_engine.attention.cuda.CudaAttention`'s. Not thread-safe."""

    def __init__(self, pages: torch.Tensor, spec: KVSpec, config: ModelConfig, launcher: Launcher) -> None:
        assert config.delta is not None
        assert pages.shape[1] == spec.page_bytes, "the pool has another layout than the model"
        self.chunk_tokens = spec.chunk_tokens
        self._delta, self._spec, self._pages = config.delta, spec, pages
        self._kernels = StateKernels(launcher, config.delta, dtype=config.dtype)
        self._steps: Prepared[StateSpans] = Prepared()

    def fix(self, slots: Slots, decoding: Sequences) -> BatchLayout:
        """As :meth:`~tierstore_engine.attention.cuda.CudaAttention.fix`; a state's page is the first of its
        sequence's table."""
        layout = BatchLayout((), (), slots.pages, slots.offsets)
        spans = StateSpans(decoding.rows, decoding.counts, decoding.lengths, decoding.tables)
        return self._steps.fix(layout, spans)

    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        delta = self._delta
        out = channels.new_empty(len(channels), delta.value_heads, delta.value_dim)
        inputs = (channels.contiguous(), conv.contiguous(), rates.contiguous(), decays.contiguous())
        offset = self._spec.layer(layer).start
        spans = self._steps.of(layout, lambda: _prepare(layout, self._pages.device))
        self._kernels.advance(self._pages, offset, *inputs, spans, out)
        return out


def _prepare(layout: BatchLayout, device: torch.device) -> StateSpans:
    spans = layout.spans
    first_rows = list(accumulate((span.tokens for span in spans), initial=0))[:-1]
    columns = (
        first_rows,
        [span.tokens for span in spans],
        [span.stop for span in spans],
        [span.tables[layout.group][0] for span in spans],
    )
    rows, counts, lengths, pages = to_device(torch.from_numpy(np.array(columns, np.int32)), device)
    return StateSpans(rows, counts, lengths, pages.unsqueeze(1))
