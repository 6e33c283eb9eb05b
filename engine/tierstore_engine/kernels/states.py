"""The kernels for recurrent states as operations on tensors, like those in
:mod:`~tierstore_engine.kernels.operations`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tierstore_engine.config import DeltaConfig, Mamba2Config, StateConfig
from tierstore_engine.kernels.catalog import (
    CONVOLVED_CHANNELS,
    MAMBA2_COLUMNS,
    StateSet,
    delta_set,
    mamba2_set,
)
from tierstore_engine.kernels.launcher import Argument, Launcher
from tierstore_engine.layer_weights import Mamba2Terms


@dataclass(frozen=True, slots=True)
class StateSpans:
    """The sequences of one launch, as int32 device arrays like
    :class:`~tierstore_engine.kernels.operations.Sequences`. A sequence is new if all of its tokens are new.
    The first column of ``tables [sequences, width]`` has the page of each sequence's state. The last
    ``drafts`` tokens of a sequence are a draft, and the page keeps the state before the draft. ``drafts`` is
    None if no sequence has a draft."""

    rows: torch.Tensor
    counts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    drafts: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def arguments(self) -> tuple[Argument, ...]:
        """Return the kernels' arguments."""
        places = (self.rows, self.counts, self.lengths, self.drafts, self.tables)
        return *places, np.int32(self.tables.stride(0))


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The states of a layer, at ``offset`` bytes in each page of ``pool`` (uint8)."""

    pool: torch.Tensor
    offset: int

    def arguments(self, behind: int = 0) -> tuple[Argument, ...]:
        """Return the kernels' arguments for the data that begins ``behind`` bytes after the beginning of each
        state."""
        return self.pool, np.int64(self.pool.stride(0)), np.int64(self.offset + behind)


class _Kernels:
    """The convolution and the rule of one kind of states, loaded."""

    def __init__(self, launcher: Launcher, kernels: StateSet, shape: StateConfig, dtype: str) -> None:
        self._channels = shape.channels
        self._matrices = shape.inputs_bytes(dtype)
        self._convolve = launcher.load(kernels.convolve)
        self._rule = launcher.load(kernels.rule)

    def _convolved(
        self,
        states: LayerStates,
        channels: torch.Tensor,
        conv: torch.Tensor,
        conv_bias: torch.Tensor | None,
        spans: StateSpans,
    ) -> torch.Tensor:
        assert channels.stride(1) == 1
        mixed = channels.new_empty(channels.shape)
        inputs = (channels, np.int32(channels.stride(0)), conv, conv_bias)
        grid = (-(-self._channels // CONVOLVED_CHANNELS), len(spans))
        places = (*spans.arguments(), *states.arguments())
        self._convolve(grid, (*inputs, *places, mixed, np.int32(self._channels)))
        return mixed


class DeltaKernels(_Kernels):
    """The kernels for the states of ``delta``, loaded on one device. Raises
    :class:`~tierstore_engine.errors.KernelError` as
    :class:`~tierstore_engine.kernels.operations.AttentionKernels` does."""

    def __init__(self, launcher: Launcher, delta: DeltaConfig, *, dtype: str) -> None:
        kernels = delta_set(
            dtype=dtype, key_dim=delta.key_dim, value_dim=delta.value_dim, conv_width=delta.conv_width
        )
        super().__init__(launcher, kernels, delta, dtype)
        self._delta = delta

    def advance(
        self,
        states: LayerStates,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        spans: StateSpans,
        out: torch.Tensor,
    ) -> None:
        """Update the states with the tokens of the spans. ``channels [tokens, channels]`` are the input of
        the convolution with ``conv [channels, 1, width]``. ``rates`` and ``decays`` (logarithms) are float32
        ``[tokens, value_heads]``. ``out [tokens, value_heads, value_dim]`` receives each token's output. Rows
        of ``channels`` may be part of longer rows.
        """
        mixed = self._convolved(states, channels, conv, None, spans)
        places = (*spans.arguments(), *states.arguments(self._matrices))
        rule = (mixed, rates, decays, *places, out, np.int32(self._delta.key_heads))
        self._rule((self._delta.value_heads, len(spans)), rule)


class Mamba2Kernels(_Kernels):
    """The kernels for the states of ``mamba``; see :class:`DeltaKernels`."""

    def __init__(self, launcher: Launcher, mamba: Mamba2Config, *, dtype: str) -> None:
        kernels = mamba2_set(dtype=dtype, state_dim=mamba.state_dim, conv_width=mamba.conv_width)
        super().__init__(launcher, kernels, mamba, dtype)
        self._mamba = mamba
        most = np.inf if mamba.most_step is None else mamba.most_step
        self._limits = np.float32(mamba.least_step), np.float32(most)

    def advance(
        self,
        states: LayerStates,
        channels: torch.Tensor,
        steps: torch.Tensor,
        terms: Mamba2Terms,
        spans: StateSpans,
        out: torch.Tensor,
    ) -> None:
        """Update the states with the tokens of the spans. ``channels [tokens, channels]`` are the input of
        the convolution. ``steps [tokens, heads]`` are the step sizes before their bias is added. Rows of both
        may be parts of longer rows. ``out [tokens, heads, head_dim]``, float32, receives each token's output.
        """
        assert steps.stride(1) == 1
        mamba = self._mamba
        mixed = self._convolved(states, channels, terms.conv, terms.conv_bias, spans)
        of_heads = (terms.step_bias, terms.decay, terms.skip)
        given = (steps, np.int32(steps.stride(0)), *of_heads, *self._limits)
        places = (*spans.arguments(), *states.arguments(self._matrices))
        slices = -(-mamba.head_dim // MAMBA2_COLUMNS)
        sizes = (np.int32(mamba.groups), np.int32(mamba.head_dim))
        self._rule((slices, mamba.heads, len(spans)), (mixed, *given, *places, out, *sizes))
