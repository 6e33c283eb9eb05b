"""Recurrent states in pages, and the gated delta rule that reads and writes them. (Mamba-2 is in
:mod:`tierstore_engine.mamba2`.)

A sequence has one page of a layer group with states, whatever its length: for each layer the last inputs of
its convolution, then its matrices. A step reads what the tokens before left there (nothing, where its span
begins with token 0), and writes what its own tokens leave. A copy of the page is a snapshot.

For each token, with a decay ``a``, a rate ``b``, a key ``k`` and a value ``v``, the matrix ``S`` of a head
becomes::

    S  ←  a S + k ⊗ b (v - a Sᵀk)            and what the token reads is      Sᵀq

Tokens are taken ``BLOCK`` at a time. Within a block all of these depend on one another linearly, so that
they are solved for at once: with ``A[i, j]`` the decay from token j to token i, the corrections
``u = b (v - …)`` of the block's tokens are the solution of a triangular system::

    uᵢ + bᵢ Σⱼ﹤ᵢ A[i, j] (kᵢ·kⱼ) uⱼ  =  bᵢ (vᵢ - aᵢ…a₁ S₀ᵀkᵢ)

Blocks begin at multiples of ``BLOCK`` tokens of the sequence, wherever spans begin: the same tokens are
computed in the same shapes, unless a span ends within a block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import conv1d, linear, silu, softplus

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import BatchLayout, Span, pages_on_device
from tierstore_engine.config import DeltaConfig, ModelConfig
from tierstore_engine.errors import ModelError
from tierstore_engine.pointwise import Pointwise
from tierstore_engine.weights import DeltaWeights

MAMBA_ON_CPU = "Mamba-2 layers are computed on the CPU only in this version: use --device cpu"

BLOCK = 64
_EPSILON = 1e-6  # of the norms of queries and keys


class RecurrentStates(ABC):
    """The states of a layer group, in the pages of its pool. One class per kind of device."""

    @abstractmethod
    def advance(
        self,
        layer: int,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
        layout: BatchLayout,
    ) -> torch.Tensor:
        """Take a layer's states through the tokens of the layout's spans, by the gated delta rule. What the
        tokens read, ``[tokens, value_heads, value_dim]`` in the model's dtype; the pages have the states
        behind the spans then, or will have.

        ``channels [tokens, channels]`` go into the convolution by ``conv [channels, 1, width]``; ``rates``
        and ``decays`` (logarithms) are float32 ``[tokens, value_heads]``.
        """


class CpuStates(RecurrentStates):
    """In blocks of tokens, by torch."""

    def __init__(self, pool: PagePool, config: ModelConfig) -> None:
        assert config.recurrent is not None
        self._delta = config.delta
        shape, dtype = config.recurrent, getattr(torch, config.dtype)
        memory = torch.from_numpy(pool.array)
        self._inputs: dict[int, torch.Tensor] = {}
        self._matrices: dict[int, torch.Tensor] = {}
        [group] = pool.spec.groups
        for layer in group.layers:
            inputs = pool.spec.layer(layer).start
            matrices = inputs + shape.inputs_bytes(config.dtype)
            self._inputs[layer] = _view(memory, dtype, inputs, (shape.channels, shape.conv_width - 1))
            self._matrices[layer] = _view(memory, torch.float32, matrices, shape.matrices)

    def state(self, layer: int, page: int) -> State:
        """What is in a page."""
        return State(self._inputs[layer][page], self._matrices[layer][page])

    def before(self, span: Span, layer: int, page: int) -> State:
        """Of the tokens before ``span``: nothing, before token 0."""
        state = self.state(layer, page)
        if span.start == 0:
            state.inputs.zero_()
            state.matrices.zero_()
        return state

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
        assert delta is not None
        out = channels.new_empty(len(channels), delta.value_heads, delta.value_dim)
        for span, page, rows in sequences(layout):
            state = self.before(span, layer, page)
            out[rows] = self._of_span(span, state, channels[rows], conv, rates[rows], decays[rows])
        return out

    def _of_span(
        self,
        span: Span,
        state: State,
        channels: torch.Tensor,
        conv: torch.Tensor,
        rates: torch.Tensor,
        decays: torch.Tensor,
    ) -> torch.Tensor:
        """``[tokens, value_heads, value_dim]``; ``state`` is that behind the span then."""
        delta = self._delta
        assert delta is not None
        mixed = state.convolve(channels, conv, None)
        keys_width = delta.key_heads * delta.key_dim
        widths = [keys_width, keys_width, delta.value_heads * delta.value_dim]
        queries, keys, values = torch.split(mixed.float(), widths, dim=1)
        shared = delta.value_heads // delta.key_heads
        queries = _unit(queries.view(-1, delta.key_heads, delta.key_dim)) * delta.key_dim**-0.5
        keys = _unit(keys.view(-1, delta.key_heads, delta.key_dim))
        queries, keys = (each.repeat_interleave(shared, dim=1).transpose(0, 1) for each in (queries, keys))
        values = values.view(-1, delta.value_heads, delta.value_dim).transpose(0, 1)
        out = torch.empty_like(values)
        for rows in blocks(span):
            out[:, rows] = delta_rule(
                state.matrices,
                queries[:, rows],
                keys[:, rows],
                values[:, rows],
                rates.T[:, rows],
                decays.T[:, rows],
            )
        return out.transpose(0, 1)


def make_states(pool: PagePool, config: ModelConfig) -> RecurrentStates:
    """For the device of ``pool``. Raises :class:`ModelError` for layers that are not computed there, and what
    :func:`~tierstore_engine.attention.base.make_attention` does."""
    if pool.device == "cpu":
        return CpuStates(pool, config)
    if config.delta is None:
        raise ModelError(MAMBA_ON_CPU)
    from tierstore_engine.attention.cuda_states import CudaStates
    from tierstore_engine.kernels.cupy_launcher import CupyLauncher

    launcher = CupyLauncher(pool.device)  # first: it says what is missing
    return CudaStates(pages_on_device(pool), pool.spec, config, launcher)


@dataclass(frozen=True, slots=True)
class State:
    """One layer's state of a sequence: views of its page."""

    inputs: torch.Tensor
    """``[channels, conv_width - 1]``, the newest last."""
    matrices: torch.Tensor
    """float32 ``[heads, key_dim, value_dim]``."""

    def convolve(
        self, channels: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The causal convolution of the next tokens' ``channels [tokens, channels]``, through SiLU; the same
        shape. Keeps the last of them."""
        series = torch.cat((self.inputs, channels.T), dim=1)
        self.inputs.copy_(series[:, series.shape[1] - self.inputs.shape[1] :])
        return silu(conv1d(series.unsqueeze(0), weight, bias, groups=len(series))).squeeze(0).T


def _view(memory: torch.Tensor, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    """One tensor of every page: ``shape`` of ``dtype``, from byte ``start`` on."""
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    return memory[:, start : start + nbytes].view(dtype).view(len(memory), *shape)


class GatedDelta:
    """One layer with a gated delta rule."""

    def __init__(
        self, layer: int, config: ModelConfig, weights: DeltaWeights, states: RecurrentStates
    ) -> None:
        assert config.delta is not None
        self._layer = layer
        self._delta = config.delta
        self._weights = weights
        self._states = states
        self._pointwise = Pointwise(config.norm_eps)
        self._decay = -weights.a_log.float().exp()

    def compute(self, hidden: torch.Tensor, layout: BatchLayout) -> torch.Tensor:
        """``hidden [tokens, hidden_size]`` of the layout's spans; the same shape."""
        delta, weights = self._delta, self._weights
        channels, gates = _by_kind(linear(hidden, weights.qkvz), delta)
        rates, steps = (
            each.flatten(1) for each in _by_key_head(linear(hidden, weights.ba), delta).chunk(2, -1)
        )
        decays = self._decay * softplus(steps.float() + weights.dt_bias)
        out = self._states.advance(
            self._layer, channels, weights.conv, rates.float().sigmoid(), decays, layout
        )
        normed = self._pointwise.norm(out, weights.norm)
        gated = (normed * silu(gates.float())).to(hidden.dtype)
        return linear(gated.flatten(1), weights.o)


def delta_rule(
    state: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rates: torch.Tensor,
    decays: torch.Tensor,
) -> torch.Tensor:
    """What a block of tokens reads, ``[heads, tokens, value_dim]``. ``state [heads, key_dim, value_dim]`` is
    that before them, and behind them afterwards. ``queries`` and ``keys`` are ``[heads, tokens, key_dim]``,
    ``rates`` and ``decays`` (as logarithms) ``[heads, tokens]``; all are float32."""
    left = BlockDecays.of(decays)
    system = rates.unsqueeze(-1) * (keys @ keys.mT) * left.between  # its diagonal counts as 1
    target = rates.unsqueeze(-1) * (values - left.since_start * (keys @ state))
    corrections = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    return read_and_add(state, queries, keys, corrections, left)


@dataclass(frozen=True, slots=True)
class BlockDecays:
    """What decays leave within a block of tokens: after each of what was before the block ``[heads, tokens,
    1]``, after token i of what token j adds ``[heads, i, j]``, and behind the block of what each adds
    ``[heads, tokens, 1]``."""

    since_start: torch.Tensor
    between: torch.Tensor
    until_end: torch.Tensor

    @staticmethod
    def of(decays: torch.Tensor) -> BlockDecays:
        """Of each token's decay, as logarithms ``[heads, tokens]``."""
        total = decays.cumsum(-1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        until_end = (total[:, -1:] - total).exp().unsqueeze(-1)
        return BlockDecays(total.exp().unsqueeze(-1), between, until_end)


def read_and_add(
    state: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    added: torch.Tensor,
    left: BlockDecays,
) -> torch.Tensor:
    """What a block of tokens reads of a state to which each token adds ``key ⊗ added``; shapes as of
    :func:`delta_rule`, and ``state`` is that behind them afterwards."""
    before = left.since_start * (queries @ state)
    out: torch.Tensor = before + (queries @ keys.mT * left.between) @ added
    state.mul_(left.since_start[:, -1:]).add_((keys * left.until_end).mT @ added)
    return out


def sequences(layout: BatchLayout) -> Iterator[tuple[Span, int, slice]]:
    """Each span of a layer group with states, its page, and its rows in the step."""
    row = 0
    for span, table in zip(layout.spans, layout.block_tables, strict=True):
        yield span, int(table[0]), slice(row, row + span.tokens)
        row += span.tokens


def blocks(span: Span) -> Iterator[slice]:
    """The rows of a span, cut where a block of the sequence begins."""
    start = span.start
    while start < span.stop:
        stop = min((start // BLOCK + 1) * BLOCK, span.stop)
        yield slice(start - span.start, stop - span.start)
        start = stop


def _by_key_head(projected: torch.Tensor, delta: DeltaConfig) -> torch.Tensor:
    """``[tokens, key_heads, …]``: what belongs to a key head stands together in the projections."""
    return projected.view(len(projected), delta.key_heads, -1)


def _by_kind(projected: torch.Tensor, delta: DeltaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The convolution's inputs ``[tokens, channels]`` (all queries, all keys, all values), and the gates
    ``[tokens, value_heads, value_dim]``."""
    values = delta.value_heads // delta.key_heads * delta.value_dim
    widths = [delta.key_dim, delta.key_dim, values, values]
    parts = torch.split(_by_key_head(projected, delta), widths, dim=-1)
    channels = torch.cat([part.flatten(1) for part in parts[:3]], dim=1)
    return channels, parts[3].reshape(len(projected), delta.value_heads, delta.value_dim)


def _unit(x: torch.Tensor) -> torch.Tensor:
    unit: torch.Tensor = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPSILON)
    return unit
