"""What the decoder computes between its matrix products and its attention, by torch: on any device, exactly.

On a GPU the kernels' own version of it (:class:`~tierstore_engine.kernels.operations.PointwiseKernels`) is
one launch where this is up to eight."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


class Pointwise:
    """All tensors are in the model's dtype; rows are ``[tokens, width]``. Every step is rounded to the dtype
    but the mean square, which is float32."""

    def __init__(self, epsilon: float, *, centred: bool = False) -> None:
        """``centred``: a norm's weight is what is to be added to 1."""
        self.epsilon = epsilon
        self._centred = centred

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm over the last dimension of a tensor of any shape."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        if self._centred:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + added``, and the norm of that."""
        total = hidden + added
        return total, self.norm(total, weight)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``SiLU(gate) * up`` of rows whose first half are the gates."""
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up
