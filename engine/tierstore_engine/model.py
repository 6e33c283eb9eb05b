"""The decoder: token ids in, the logits of chosen rows out, keys and values into pages on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear, silu

from tierstore_engine.attention.base import Attention, BatchLayout
from tierstore_engine.config import ModelConfig
from tierstore_engine.rope import Rope
from tierstore_engine.sampling import Choice, Draw, sample
from tierstore_engine.step import PartialStep, Step, StepInput
from tierstore_engine.weights import LayerWeights, ModelWeights


class Model:
    """A Llama-family decoder over paged KV. Not thread-safe: its attention owns buffers."""

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, attention: Attention, *, device: str
    ) -> None:
        self.config = config
        self.device = device
        self._weights = weights
        self._attention = attention
        self._rope = Rope(config.rope, config.head_dim, device=device)

    def compute(self, step: Step) -> torch.Tensor:
        return self.forward(step.on(self.device))

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
        step = partial.input or partial.step.on(self.device)
        hidden = partial.hidden if partial.hidden is not None else self._weights.embed[step.tokens]
        partial.input, partial.hidden = step, self._through(step, hidden, layers)
        return self._logits(step, partial.hidden) if layers.stop == self.config.layers else None

    def _through(self, step: StepInput, hidden: torch.Tensor, layers: range) -> torch.Tensor:
        rotations = self._rope.rotations(step.positions, hidden.dtype)
        for index in layers:
            layer = self._weights.layers[index]
            step.arrivals.wait(index)
            attended = self._attend(
                index, layer, self._norm(hidden, layer.input_norm), rotations, step.layout
            )
            hidden = hidden + linear(attended, layer.o, layer.o_bias)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return hidden

    def _logits(self, step: StepInput, hidden: torch.Tensor) -> torch.Tensor:
        last = self._norm(hidden[step.logit_rows], self._weights.norm)
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
            queries, keys = self._norm(queries, layer.q_norm), self._norm(keys, layer.k_norm)
        queries = self._attention.rotate_and_write(index, (queries, keys, values), rotations, layout)
        return self._attention.attend(index, queries, layout).view(len(hidden), -1)

    def _mlp(self, layer: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = linear(hidden, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension, its mean square in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * wide.to(x.dtype)
