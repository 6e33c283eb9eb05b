"""Rotary position embedding: which angle each pair of dimensions turns by, and the turning."""

from __future__ import annotations

import math

import torch

from tierstore_engine.config import RopeConfig


class Rope:
    """Rotations for heads of ``head_dim``; angles are computed in float32 whatever the model's dtype."""

    def __init__(self, config: RopeConfig, head_dim: int, *, device: str) -> None:
        self._frequencies = inverse_frequencies(config, head_dim).to(device)

    def rotations(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[tokens, 1, head_dim]`` for int64 ``positions [tokens]``."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [tokens, heads, head_dim]`` turned; dimension i pairs with i + head_dim/2."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position for each of the ``head_dim / 2`` pairs, float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / config.factor
