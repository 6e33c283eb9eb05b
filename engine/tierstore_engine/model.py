"""The decoder: token ids in, the logits of chosen rows out, keys and values into pages on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from tierstore_engine.attention.base import Attention, BatchLayout
from tierstore_engine.config import ModelConfig
from tierstore_engine.rope import Rope
from tierstore_engine.sampling import Choice, Draw, sample
from tierstore_engine.step import PartialStep, Step, StepInput
from tierstore_engine.weights import LayerWeights, ModelWeights


class Model:
    """A Llama-family decoder over paged KV, with a backend for each layer group. Not thread-safe: these own
    buffers."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, attentions: Sequence[Attention], *, device: str
    ) -> None:
        self.config = config
        self.device = device
        self._weights = weights
        self._attentions = [attentions[config.group_of(layer)] for layer in range(config.layers)]
        self._pointwise = attentions[0].pointwise(config)
        self._rope = Rope(config.rope, config.head_dim, device=device)

    def compute(self, step: Step) -> torch.Tensor:
        return self.forward(step.on(self.device, states=self.config.states))

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        return sample(logits, draws, rows).choices()

    def wait(self) -> None:
        """On the CPU nothing is under way when :meth:`compute` returns."""

    @torch.inference_mode()
    def forward(self, step: StepInput) -> torch.Tensor:
        """Logits, float32 ``[len(logit_rows), vocab_size]``; on the CPU the KV of all rows is in its pages
        then."""
        hidden = self._weights.embed[step.tokens]
        return self._logits(step, self._through(step, hidden, range(self.config.layers)))

    @torch.inference_mode()
    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        step = partial.input or partial.step.on(self.device, states=self.config.states)
        hidden = partial.hidden if partial.hidden is not None else self._weights.embed[step.tokens]
        partial.input, partial.hidden = step, self._through(step, hidden, layers)
        return self._logits(step, partial.hidden) if layers.stop == self.config.layers else None

    def _through(self, step: StepInput, hidden: torch.Tensor, layers: range) -> torch.Tensor:
        if not layers:
            return hidden
        pointwise, weights = self._pointwise, self._weights.layers
        rotations = self._rope.rotations(step.positions, hidden.dtype)
        normed = pointwise.norm(hidden, weights[layers.start].input_norm)
        for index in layers:
            layer = weights[index]
            step.arrivals.wait(index)
            attended = self._attend(
                index, layer, normed, rotations, step.layouts[self.config.group_of(index)]
            )
            hidden, normed = pointwise.add_norm(
                hidden, linear(attended, layer.o, layer.o_bias), layer.mlp_norm
            )
            gated = pointwise.silu_mul(linear(normed, layer.gate_up, layer.gate_up_bias))
            produced = linear(gated, layer.down, layer.down_bias)
            if index + 1 == layers.stop:  # whose norm comes next is not known here, nor of which rows
                return hidden + produced
            hidden, normed = pointwise.add_norm(hidden, produced, weights[index + 1].input_norm)
        return hidden

    def _logits(self, step: StepInput, hidden: torch.Tensor) -> torch.Tensor:
        last = self._pointwise.norm(hidden[step.logit_rows], self._weights.norm)
        return linear(last, self._weights.head).float()

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        hidden: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        layout: BatchLayout,
    ) -> torch.Tensor:
        config = self.config
        heads = (config.heads, config.kv_heads, config.kv_heads)
        projected = linear(hidden, layer.qkv, layer.qkv_bias)
        projected = projected.view(len(hidden), sum(heads), config.head_dim)
        queries, keys, values = torch.split(projected, list(heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = self._pointwise.norm
            queries, keys = norm(queries, layer.q_norm), norm(keys, layer.k_norm)
        attention = self._attentions[index]
        queries = attention.rotate_and_write(index, (queries, keys, values), rotations, layout)
        return attention.attend(index, queries, layout).view(len(hidden), -1)
