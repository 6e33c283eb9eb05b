"""Rotary position embedding: the angle of each pair of dimensions, and the rotation."""

from __future__ import annotations

import math

import torch

from tierstore_engine.config import RopeConfig
from tierstore_engine.pointwise import each


class Rope:
    """Rotations for heads of ``head_dim``. Angles are computed in float32 for every dtype."""

    def __init__(self, config: RopeConfig, head_dim: int, *, device: str) -> None:
        self._frequencies = inverse_frequencies(config, config.rotary_dim or head_dim).to(device)
        self._amplitude = config.amplitude
        axes = [axis for axis, pairs in enumerate(config.sections) for _ in range(pairs)]
        self._axes = torch.tensor(axes, device=device) if axes else None

    def rotations(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines ``[tokens, 1, rotary_dim]`` for int64 ``positions``: ``[tokens]``, or
        ``[tokens, 3]`` if each pair of dimensions turns by one of three."""
        if positions.dim() == 1:
            positions = positions[:, None]
        else:
            assert self._axes is not None, "only such a RoPE has images with positions on three axes"
            positions = positions[:, self._axes]
        angles = positions.to(torch.float32) * self._frequencies[None, :]
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        cosines, sines = each(torch.cos, angles), each(torch.sin, angles)
        if self._amplitude != 1.0:
            cosines, sines = cosines * self._amplitude, sines * self._amplitude
        return cosines.to(dtype), sines.to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return ``x [tokens, heads, head_dim]`` rotated. The number of rotated dimensions is the number of
    cosines. Dimension i is rotated together with dimension i plus half of that number."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def paired_by_halves(x: torch.Tensor, width: int) -> torch.Tensor:
    """Reorder the first ``width`` dimensions of ``x``, in which 2i is rotated together with 2i + 1, for
    :func:`rotate`. If queries and keys are both reordered, their products stay the same."""
    return torch.cat((x[..., :width:2], x[..., 1:width:2], x[..., width:]), dim=-1)


def inverse_frequencies(config: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Return radians per position for each of the ``rotary_dim / 2`` pairs, float32."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        return _llama3(frequencies, config)
    if config.kind == "yarn":
        return _yarn(frequencies, config, rotary_dim)
    return frequencies


def _llama3(frequencies: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Apply Llama 3.1's scaling: long wavelengths are stretched by ``factor``, short ones are kept, and those
    between are blended."""
    low, high = config.low_freq_factor, config.high_freq_factor
    turns = config.original_max_positions * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / config.factor


def _yarn(frequencies: torch.Tensor, config: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Apply YaRN's scaling. The scaling is like Llama 3.1's, with a ramp between the pair that turns
    ``beta_fast`` times within the original positions and the pair that turns ``beta_slow`` times."""

    def pair_that_turns(times: float) -> float:
        around = config.original_max_positions / (times * 2 * math.pi)
        return rotary_dim * math.log(around) / (2 * math.log(config.theta))

    first, last = pair_that_turns(config.beta_fast), pair_that_turns(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    last = last if last != first else last + 0.001
    stretched = ((torch.arange(len(frequencies), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / config.factor * stretched + frequencies * (1 - stretched)
