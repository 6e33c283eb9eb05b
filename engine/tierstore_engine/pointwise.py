"""The decoder's operations between matrix products and attention, in torch: on any device, exactly.

On a GPU, :class:`~tierstore_engine.kernels.operations.PointwiseKernels` computes them in one launch instead
of up to eight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad, silu

from tierstore_engine.config import ModelConfig
from tierstore_engine.products import bits_are_same

_WHOLE = 64  # the padding in numbers: two of torch's longest vectors of 2-byte numbers


def each(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return ``function`` of each number of ``x``. Use it for functions that are not exact, such as
    exponentials.

    Torch computes most numbers in vectors, and the remaining numbers by other instructions, which give other
    bits. Which numbers remain depends on the number of rows. Within
    :func:`~tierstore_engine.products.same_bits`, rows are padded so that no number remains.

    >>> each(torch.exp, torch.zeros(1, 3))
    tensor([[1., 1., 1.]])
    """
    if not bits_are_same():
        return function(x)
    width = x.shape[-1]
    return function(pad(x, (0, -width % _WHOLE)))[..., :width]


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
        return each(silu, gate) * up
