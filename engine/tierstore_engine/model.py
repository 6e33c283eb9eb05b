"""The decoder: it turns token ids into the logits of chosen rows, and stores what layers remember in pages.

A layer is a mixer, which reads earlier tokens (:mod:`~tierstore_engine.mixers`,
:mod:`~tierstore_engine.delta`, :mod:`~tierstore_engine.mamba2`), and an MLP or a mixture of MLPs
(:mod:`~tierstore_engine.mlp`). The configuration names both for each layer. One decoder serves all families.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch

from tierstore_engine.adapters import Adapter, adapted
from tierstore_engine.attention.base import Attention, BatchLayout, WithoutFirst
from tierstore_engine.attention.cpu import CpuAttention
from tierstore_engine.config import ModelConfig
from tierstore_engine.delta import DeltaStates, GatedDelta
from tierstore_engine.layer_weights import (
    AttentionWeights,
    CrossWeights,
    DeltaWeights,
    Elsewhere,
    LatentWeights,
    LayerWeights,
    Mamba1Weights,
    Mamba2Weights,
    MLPWeights,
    ModelWeights,
    SharedBlockWeights,
    ShortConvWeights,
)
from tierstore_engine.mamba1 import CpuMamba1States, Mamba1
from tierstore_engine.mamba2 import Mamba2, Mamba2States
from tierstore_engine.mixers import CrossAttention, LatentAttention, Positions, SelfAttention, SharedBlock
from tierstore_engine.mlp import MLPs
from tierstore_engine.pointwise import Pointwise, each
from tierstore_engine.products import same_bits
from tierstore_engine.quantised import AdapterRows, embedded, linear
from tierstore_engine.ranks.collective import Ranks
from tierstore_engine.ranks.sequence import TokenSplit
from tierstore_engine.rope import Rope
from tierstore_engine.sampling import Choice, Draw, sample
from tierstore_engine.short_conv import CpuShortConvStates, ShortConv
from tierstore_engine.step import PartialStep, Step, StepInput

Memory: TypeAlias = Attention | DeltaStates | Mamba2States | CpuMamba1States | CpuShortConvStates
"""The memory of a layer group: attention over its pages, or the states in them."""

Mixer: TypeAlias = (
    SelfAttention | CrossAttention | LatentAttention | SharedBlock | GatedDelta | Mamba1 | Mamba2 | ShortConv
)


class Model:
    """A decoder over paged memory, with one :data:`Memory` for each layer group. Not thread-safe, because the
    memories own buffers.

    If the model has a predictor, ``outputs`` are the inputs of the head in the last step, ``[tokens,
    hidden_size]``.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        memories: Sequence[Memory],
        *,
        device: str,
        adapters: Sequence[Adapter] = (),
        ranks: Ranks | None = None,
        split: TokenSplit | None = None,
    ) -> None:
        """If there are ``ranks``, ``config`` and ``weights`` are the share of one rank. If there is a
        ``split``, the model computes the rows of one part. All ranks compute each step."""
        self.config = config
        self._ranks = ranks
        self.split = split
        self.device = device
        self._adapter_rows = AdapterRows()
        self._weights = adapted(weights, adapters, self._adapter_rows, device)
        # The operations of the first attention are used for all layers, because all are on one device.
        attention = next((memory for memory in memories if isinstance(memory, Attention)), None)
        self._pointwise = Pointwise.of(config) if attention is None else attention.pointwise(config)
        self._product = None if attention is None or not config.arithmetic else attention.product(config)
        self._mlps = MLPs(config, self._pointwise)
        with self._bits():  # these layers use exponentials of weights
            self._mixers = [self._mixer(layer, memories) for layer in range(len(weights.layers))]
        self.outputs: torch.Tensor | None = None
        head_dim = config.latent.rope_dim if config.latent is not None else config.head_dim
        ropes = {config.rope_of(layer) for layer in range(config.layers)}
        self._ropes = {rope: Rope(rope, head_dim, device=device) for rope in ropes if rope is not None}

    def _mixer(self, layer: int, memories: Sequence[Memory]) -> Mixer | None:
        config, weights = self.config, self._weights.layers[layer].mixer
        memory = memories[config.group_of(layer)]
        if isinstance(weights, Elsewhere):
            return None
        if layer == config.layers:
            assert isinstance(memory, Attention)
            memory = WithoutFirst(memory)
        if isinstance(memory, Mamba2States):
            assert isinstance(weights, Mamba2Weights)
            return Mamba2(layer, config, weights, memory)
        if isinstance(memory, CpuMamba1States):
            assert isinstance(weights, Mamba1Weights)
            return Mamba1(layer, config, weights, memory)
        if isinstance(memory, CpuShortConvStates):
            assert isinstance(weights, ShortConvWeights)
            return ShortConv(layer, weights, memory)
        if isinstance(memory, DeltaStates):
            assert isinstance(weights, DeltaWeights)
            return GatedDelta(layer, config, weights, memory)
        if isinstance(weights, CrossWeights):
            assert isinstance(memory, CpuAttention), "refused by open_model"
            return CrossAttention(layer, config, weights, memory, self._pointwise)
        if isinstance(weights, LatentWeights):
            return LatentAttention(layer, config, weights, memory)
        if isinstance(weights, SharedBlockWeights):
            return SharedBlock(layer, config, weights, memory, self._pointwise, self._mlps)
        assert isinstance(weights, AttentionWeights)
        return SelfAttention(layer, config, weights, memory, self._pointwise)

    def _bits(self) -> AbstractContextManager[None]:
        return same_bits(self._product) if self.config.arithmetic else nullcontext()

    def compute(self, step: Step) -> torch.Tensor:
        return self.forward(step.on(self.device, without_tokens=self.config.without_tokens))

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        with self._bits():
            return sample(logits, draws, rows).choices()

    def wait(self) -> None:
        """Do nothing: on the CPU everything is done when :meth:`compute` returns."""

    def close(self) -> None:
        """Do nothing: a decoder has memory only, and no processes."""

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        """Return logits, float32 ``[len(logit_rows), vocab_size]``. On the CPU the pages then have what the
        layers remember of all rows."""
        if self.split is not None:
            step = self.split.begin(step)
        with self._bits():
            return self._logits(step, self._through(step, self._embedded(step), range(self.config.layers)))

    @torch.inference_mode()
    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        assert layers.stop not in self.config.joined
        step = partial.input or partial.step.on(self.device, without_tokens=self.config.without_tokens)
        with self._bits():
            hidden = partial.hidden if partial.hidden is not None else self._embedded(step)
            partial.input, partial.hidden = step, self._through(step, hidden, layers)
            return self._logits(step, partial.hidden) if layers.stop == self.config.layers else None

    @torch.inference_mode()
    def remember(self, step: Step, before: torch.Tensor) -> None:
        """Write the KV of the predictor's layer for a step's tokens. ``before [tokens, hidden_size]`` are the
        ``outputs`` of the token before each."""
        index, given = self.config.layers, step.on(self.device, without_tokens=self.config.without_tokens)
        with self._bits():
            normed = _normed(
                self._pointwise, self._merged(given, before), self._weights.layers[index].mixer_norm
            )
            mixer = self._mixers[index]
            assert isinstance(mixer, LatentAttention | SelfAttention)
            mixer.remember(
                normed, given.layouts[self.config.group_of(index)], self._positions(given, normed.dtype)
            )

    @torch.inference_mode()
    def predict(self, step: Step, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the predictor of a step's tokens like :meth:`remember`. Return its outputs, and the logits
        of the tokens that follow."""
        index, given = self.config.layers, step.on(self.device, without_tokens=self.config.without_tokens)
        assert self._weights.predictor is not None
        with self._bits():
            hidden = self._through(given, self._merged(given, before), range(index, index + 1))
            outputs = self._pointwise.norm(hidden, self._weights.predictor.norm)
            return outputs, self._head(outputs)

    def _merged(self, step: StepInput, before: torch.Tensor) -> torch.Tensor:
        """Return the input of the predictor's layer."""
        weights, norm = self._weights.predictor, self._pointwise.norm
        assert weights is not None
        parts = norm(self._embedded(step), weights.embed_norm), norm(before, weights.hidden_norm)
        return linear(torch.cat(parts, dim=-1), weights.merge)

    def _embedded(self, step: StepInput) -> torch.Tensor:
        hidden = embedded(step.tokens, self._weights.embed)
        if self.config.embed_scale != 1.0:
            hidden = hidden * torch.tensor(self.config.embed_scale, dtype=hidden.dtype)
        if step.embedded_rows is not None and step.embeddings is not None:
            hidden = hidden.index_copy(0, step.embedded_rows, step.embeddings.to(hidden.dtype))
        return hidden

    def _through(self, step: StepInput, hidden: torch.Tensor, layers: range) -> torch.Tensor:
        if not layers:
            return hidden
        self._adapter_rows.of = step.adapters
        pointwise, weights = self._pointwise, self._weights.layers
        positions = self._positions(step, hidden.dtype)
        normed = _normed(pointwise, hidden, weights[layers.start].mixer_norm)
        for index in layers:
            layer = weights[index]
            step.arrivals.wait(index)
            self._begin(index)
            if isinstance(mixer := self._mixers[index], CrossAttention):
                hidden = self._crossed(mixer, layer, hidden, normed, step)
                if index + 1 < layers.stop:
                    normed = _normed(pointwise, hidden, weights[index + 1].mixer_norm)
                continue
            given = self._mixed(index, normed, step, positions)
            if index + 1 in self.config.beside:
                earlier = given
                continue
            # the output of a shared block is not added to the residual stream
            if index + 1 in self.config.fed:
                normed = _normed(pointwise, hidden + given, weights[index + 1].mixer_norm)
                continue
            if index in self.config.beside:
                given = earlier + given
            if layer.mixer_post_norm is not None:
                given = pointwise.norm(given, layer.mixer_post_norm)
            if self.config.parallel and layer.mlp is not None:
                own = normed if layer.mlp_norm is None else pointwise.norm(hidden, layer.mlp_norm)
                given = given + self._summed(self._mlps.compute(own, layer.mlp))
            elif layer.mlp is not None:
                hidden, normed = _added(pointwise, hidden, self._scaled(given), layer.mlp_norm)
                given = self._summed(self._mlps.compute(normed, layer.mlp))
                if layer.mlp_post_norm is not None:
                    given = pointwise.norm(given, layer.mlp_post_norm)
            given = self._scaled(given)
            if index + 1 == layers.stop:  # the next norm, and its rows, are not known at this place
                return hidden + given
            hidden, normed = _added(pointwise, hidden, given, weights[index + 1].mixer_norm)
        return hidden

    def _crossed(
        self,
        mixer: CrossAttention,
        layer: LayerWeights,
        hidden: torch.Tensor,
        normed: torch.Tensor,
        step: StepInput,
    ) -> torch.Tensor:
        """Compute a cross-attention layer for the rows that see an input. Others pass it unchanged."""
        if step.inputs is None:
            return hidden
        assert isinstance(layer.mlp, MLPWeights)
        mixer.remember(step.inputs.new)
        rows = torch.tensor([row for sight in step.inputs.sights for row in sight.rows])
        seeing = hidden[rows] + mixer.compute(normed[rows], step.inputs.sights)
        given = self._mlps.compute(_normed(self._pointwise, seeing, layer.mlp_norm), layer.mlp)
        return hidden.index_copy(0, rows, seeing + mixer.mlp_factor * given)

    def _positions(self, step: StepInput, dtype: torch.dtype) -> Positions:
        rotations = {config: rope.rotations(step.positions, dtype) for config, rope in self._ropes.items()}
        return Positions(step.positions, rotations)

    def _begin(self, layer: int) -> None:
        """Record that the weights of a layer are read now. The weights of the head come after the last
        layer."""
        if self._weights.stream is not None:
            self._weights.stream.begin(layer)

    def _summed(self, given: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts of the output of a mixer or an MLP."""
        return given if self._ranks is None else self._ranks.sum(given)

    def _scaled(self, given: torch.Tensor) -> torch.Tensor:
        scale = self.config.residual_scale
        return given if scale == 1.0 else given * scale

    def _mixed(self, layer: int, hidden: torch.Tensor, step: StepInput, positions: Positions) -> torch.Tensor:
        mixer, layout = self._mixers[layer], step.layouts[self.config.group_of(layer)]
        scale = self.config.mixer_scale(layer)
        if mixer is None:  # another rank computes it
            given = torch.zeros_like(hidden)
        elif isinstance(mixer, GatedDelta | Mamba1 | Mamba2 | ShortConv):
            given = self._remembered(mixer, hidden, layout)
        elif isinstance(mixer, SharedBlock):
            given = mixer.compute(hidden, self._embedded(step), layout, positions)
        else:
            assert not isinstance(mixer, CrossAttention)
            given = mixer.compute(hidden, layout, positions)
        given = self._summed(given)
        return given if scale == 1.0 else given * scale

    def _remembered(
        self, mixer: GatedDelta | Mamba1 | Mamba2 | ShortConv, hidden: torch.Tensor, layout: BatchLayout
    ) -> torch.Tensor:
        """Compute a mixer with a state, which needs all rows of a sequence."""
        if self.split is None:
            return mixer.compute(hidden, layout)
        return self.split.at_first(hidden, lambda whole: mixer.compute(whole, layout))

    def _logits(self, step: StepInput, hidden: torch.Tensor) -> torch.Tensor:
        if self.config.predictor:
            self.outputs = self._pointwise.norm(hidden, self._weights.norm)
        rows = step.logit_rows
        last = hidden[rows] if self.split is None else self.split.last(hidden, rows)
        return self._head(self._pointwise.norm(last, self._weights.norm))

    def _head(self, normed: torch.Tensor) -> torch.Tensor:
        self._begin(len(self._weights.layers))
        logits = linear(normed, self._weights.head).float()
        if self._ranks is not None:
            logits = self._ranks.columns(logits, self.config.vocab_size)
        if self.config.logit_divisor != 1.0:
            logits = logits / self.config.logit_divisor
        cap = self.config.logit_cap
        return logits if cap is None else cap * each(torch.tanh, logits / cap)


def _normed(pointwise: Pointwise, hidden: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return hidden if weight is None else pointwise.norm(hidden, weight)


def _added(
    pointwise: Pointwise, hidden: torch.Tensor, given: torch.Tensor, weight: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum, and its norm if there is one."""
    if weight is not None:
        return pointwise.add_norm(hidden, given, weight)
    total = hidden + given
    return total, total
