"""The kernels for recurrent states as operations on tensors, like those in
:mod:`~tierstore_engine.kernels.operations`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tierstore_engine.config import DeltaConfig
from tierstore_engine.kernels.catalog import CONVOLVED_CHANNELS, state_set
from tierstore_engine.kernels.launcher import Launcher


@dataclass(frozen=True, slots=True)
class StateSpans:
    """The sequences of one launch, by int32 device arrays of one number each, as in
    :class:`~tierstore_engine.kernels.operations.Sequences`: a sequence begins where it has as many tokens as
    new ones. ``tables [sequences, width]`` has the page of each one's state in its first column."""

    rows: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)


class StateKernels:
    """The kernels for the states of ``delta`` on one device, loaded. Raises
    :class:`~tierstore_engine.kernels.errors.KernelError` as
    :class:`~tierstore_engine.kernels.operations.AttentionKernels` does."""

    def __init__(self, launcher: Launcher, delta: DeltaConfig, *, dtype: str) -> None:
        kernels = state_set(
            dtype=dtype, key_dim=delta.key_dim, value_dim=delta.value_dim, conv_width=delta.conv_width
        )
        self._delta = delta
        self._matrices = delta.inputs_bytes(dtype)
        self._convolve = launcher.load(kernels.convolve)
        self._rule = launcher.load(kernels.rule)

    def advance(
        self,
        pool: torch.Tensor,
        offset: int,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        spans: StateSpans,
        out: torch.Tensor,
    ) -> None:
        """Take the states of a layer, which is ``offset`` bytes into each page of ``pool`` (uint8), through
        the spans' tokens.

        ``channels [tokens, channels]`` go into the convolution by ``conv [channels, 1, width]``; ``rates``
        and ``decays`` (logarithms) are float32 ``[tokens, value_heads]``. ``out [tokens, value_heads,
        value_dim]`` is what the tokens read.
        """
        delta, mixed = self._delta, torch.empty_like(channels)
        sequences = (spans.rows, spans.counts, spans.lengths, spans.tables, np.int32(spans.tables.stride(0)))
        stride = np.int64(pool.stride(0))
        width = channels.shape[1]
        grid = (-(-width // CONVOLVED_CHANNELS), len(spans))
        place = (pool, stride, np.int64(offset))
        self._convolve(grid, (channels, conv, *sequences, *place, mixed, np.int32(width)))
        place = (pool, stride, np.int64(offset + self._matrices))
        rule = (mixed, rates, decays, *sequences, *place, out, np.int32(delta.key_heads))
        self._rule((delta.value_heads, len(spans)), rule)
