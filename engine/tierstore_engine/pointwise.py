"""The decoder's operations between matrix products and attention, in torch: on any device, exactly.

On a GPU :class:`~tierstore_engine.kernels.operations.PointwiseKernels` does them in one launch instead of up
to eight.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu


class Pointwise:
    """Pointwise operations. All tensors have the model's dtype; rows are ``[tokens, width]``. Every step is
    rounded to the dtype, except the mean square, which is float32."""

    def __init__(self, epsilon: float, *, centred: bool = False) -> None:
        """``centred``: 1 is added to a norm's weight."""
        self.epsilon = epsilon
        self._centred = centred

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return RMSNorm over the last dimension of a tensor of any shape."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self._centred:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)

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
