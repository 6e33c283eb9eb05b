"""The decoder's operations between matrix products and attention, in torch: on any device, exactly.

On a GPU :class:`~tierstore_engine.kernels.operations.PointwiseKernels` does them in one launch instead of up
to eight.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from tierstore_engine.config import ModelConfig


class Pointwise:
    """Pointwise operations. All tensors have the model's dtype; rows are ``[tokens, width]``. Every step is
    rounded to the dtype, except the mean square, which is float32."""

    def __init__(
        self, epsilon: float, *, centred: bool = False, layer_norm: bool = False, biased: bool = False
    ) -> None:
        """``centred``: 1 is added to a norm's weight. ``layer_norm``: norms are LayerNorm instead of RMSNorm.
        If they are ``biased``, a norm's tensor is ``[2, width]``: its weight and its bias."""
        self.epsilon = epsilon
        self._centred = centred
        self._layer_norm = layer_norm
        self._biased = biased

    @classmethod
    def of(cls, config: ModelConfig) -> Pointwise:
        """Return the operations of a model."""
        return Pointwise(
            config.norm_eps,
            centred=config.centred_norms,
            layer_norm=config.norm == "layer",
            biased=config.norm_bias,
        )

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm over the last dimension of a tensor of any shape."""
        if self._layer_norm:
            return self._layer(x, weight)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self._centred:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)

    def _layer(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        scale, shift = weight if self._biased else (weight, None)
        wide = wide * (scale.float() + 1.0 if self._centred else scale.float())
        return (wide if shift is None else wide + shift.float()).to(x.dtype)

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``hidden + added``, and the norm of the sum."""
        total = hidden + added
        return total, self.norm(total, weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return ``SiLU(gate) * up`` of rows whose first half are the gates."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
