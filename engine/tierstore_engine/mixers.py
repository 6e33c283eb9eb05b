"""Attention layers: over keys and values, or over latents, alone or in a block that layers share. Layers
with a state are in :mod:`tierstore_engine.delta` and :mod:`tierstore_engine.mamba2`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from tierstore_engine.attention.base import Attention, BatchLayout, SeenTokens
from tierstore_engine.attention.cpu import CpuAttention, Partial
from tierstore_engine.config import LatentConfig, ModelConfig, RopeConfig, Temperature
from tierstore_engine.layer_weights import (
    AttentionWeights,
    CrossWeights,
    LatentWeights,
    SharedBlockWeights,
)
from tierstore_engine.mlp import MLPs
from tierstore_engine.pointwise import Pointwise, each
from tierstore_engine.products import bits_are_same, multiply
from tierstore_engine.quantised import ChangedMatrix, LowRank, Matrix, linear
from tierstore_engine.rope import paired_by_halves, rotate
from tierstore_engine.step import SeenInputs

Rotations: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_LATENT_EPSILON = 1e-6  # the epsilon in the norms of latents, independent of the model's other norms


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a step's rows, int64 ``[tokens]``, and their rotations for each kind of RoPE."""

    numbers: torch.Tensor
    rotations: Mapping[RopeConfig, Rotations]


class SelfAttention:
    """One layer with keys and values."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        weights: AttentionWeights,
        attention: Attention,
        pointwise: Pointwise,
    ) -> None:
        self._layer = layer
        self._config = config
        self._weights = weights
        self._attention = attention
        self._pointwise = pointwise
        self._rope = config.rope_of(layer)

    def compute(self, hidden: torch.Tensor, layout: BatchLayout, positions: Positions) -> torch.Tensor:
        """Compute ``hidden [tokens, hidden_size]`` of the layout's spans. Return the same shape. The keys and
        values of these tokens are then in their pages, or being written."""
        weights = self._weights
        queries, gates = self._remembered(hidden, layout, positions)
        if weights.sinks is None:
            attended = self._attention.attend(self._layer, queries, layout)
        else:
            attended, lse = self._attention.attend_with_lse(self._layer, queries, layout)
            # The sink's part of the softmax has no value, so the output is scaled by the share of the other
            # parts.
            attended = attended * each(torch.sigmoid, lse - weights.sinks.float()).unsqueeze(-1).to(
                attended.dtype
            )
        attended = attended.flatten(1)
        if gates is not None:
            attended = attended * each(torch.sigmoid, gates.flatten(1))
        return linear(attended, weights.o, weights.o_bias)

    def remember(self, hidden: torch.Tensor, layout: BatchLayout, positions: Positions) -> None:
        """Write the keys and values of these tokens, as :meth:`compute` does."""
        self._remembered(hidden, layout, positions)

    def _remembered(
        self, hidden: torch.Tensor, layout: BatchLayout, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Write keys and values. Return the rotated queries, and the gates of a model that has gates."""
        config, weights = self._config, self._weights
        query_heads = config.heads * (2 if config.gated_attention else 1)
        heads = (query_heads, config.kv_heads, config.kv_heads)
        projected = linear(hidden, weights.qkv, weights.qkv_bias)
        projected = projected.view(len(hidden), sum(heads), config.head_dim)
        queries, keys, values = torch.split(projected, list(heads), dim=1)
        gates = None
        if config.gated_attention:
            queries, gates = queries.reshape(len(hidden), config.heads, 2 * config.head_dim).chunk(2, dim=-1)
        if not config.qk_norm_late:
            queries, keys = self._normed(queries, weights.q_norm), self._normed(keys, weights.k_norm)
        return self._write((queries, keys, values), layout, positions), gates

    def _write(
        self,
        projections: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        layout: BatchLayout,
        positions: Positions,
    ) -> torch.Tensor:
        """Write rotated keys, and values. Return the rotated queries."""
        config, rope = self._config, self._rope
        queries, keys, values = projections
        if rope is None:
            if config.temperature is not None:
                warmth = _warmth(positions.numbers, config.temperature)
                queries = (queries * warmth[:, None, None]).to(queries.dtype)
            self._attention.write(self._layer, keys, values, layout)
            return queries
        rotations = positions.rotations[rope]
        if rope.interleaved:
            width = rotations[0].shape[-1]
            queries, keys = paired_by_halves(queries, width), paired_by_halves(keys, width)
        if not config.unit_qk and not config.qk_norm_late:
            return self._attention.rotate_and_write(self._layer, (queries, keys, values), rotations, layout)
        queries, keys = rotate(queries, *rotations), rotate(keys, *rotations)
        if config.unit_qk:
            queries, keys = self._unit(queries), self._unit(keys)
        else:
            weights = self._weights
            queries, keys = self._normed(queries, weights.q_norm), self._normed(keys, weights.k_norm)
        self._attention.write(self._layer, keys, values, layout)
        return queries

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Return the norm of ``heads [tokens, heads, head_dim]``, if the model norms queries and keys."""
        if weight is None:
            return heads
        if self._config.qk_norm_over == "all":
            return self._pointwise.norm(heads.flatten(1), weight).view(heads.shape)
        return self._pointwise.norm(heads, weight)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._config.norm_eps)
        return wide.to(x.dtype)


def _warmth(positions: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    steps = torch.floor((positions.float() + 1.0) / temperature.floor)
    return each(torch.log1p, steps.unsqueeze(-1)).squeeze(-1) * temperature.scale + 1.0


class CrossAttention:
    """One layer with keys and values of an encoder's rows, which do not depend on tokens. The outputs have
    trained factors. Only rows that see an image are computed."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        weights: CrossWeights,
        attention: CpuAttention,
        pointwise: Pointwise,
    ) -> None:
        self.mlp_factor = torch.tanh(weights.mlp_gate)
        self._factor = torch.tanh(weights.gate)
        self._layer = layer
        self._config = config
        self._weights = weights
        self._attention = attention
        self._norm = pointwise.norm

    def remember(self, new: Iterable[tuple[Sequence[int], torch.Tensor]]) -> None:
        """Write the keys and values of embeddings ``[rows, hidden_size]`` to their pages. The unused part of
        the last page is zero, so that equal inputs have equal pages."""
        weights, shape = self._weights, (2, self._config.kv_heads, self._config.head_dim)
        for pages, embedding in new:
            keys, values = linear(embedding, weights.kv).view(len(embedding), *shape).unbind(1)
            keys = self._norm(keys, weights.k_norm)
            self._attention.write_pages(self._layer, keys, values, pages)

    def compute(self, hidden: torch.Tensor, sights: Sequence[SeenInputs]) -> torch.Tensor:
        """Return the outputs of ``hidden [rows, hidden_size]``, the rows of ``sights`` in order."""
        weights, config = self._weights, self._config
        queries = linear(hidden, weights.q).view(len(hidden), config.heads, config.head_dim)
        queries = self._norm(queries, weights.q_norm)
        attended = self._over(queries, sights, 0)
        for further in range(1, max(len(sight.images) for sight in sights)):
            rows = torch.tensor(_rows_that_see(sights, further))
            more = self._over(queries[rows], [each for each in sights if len(each.images) > further], further)
            both = Partial(attended.out[rows], attended.lse[rows]).merge(more)
            attended.out[rows], attended.lse[rows] = both.out, both.lse
        return linear(attended.out.to(hidden.dtype).flatten(1), weights.o) * self._factor

    def _over(self, queries: torch.Tensor, sights: Sequence[SeenInputs], number: int) -> Partial:
        """Return attention over image ``number`` of each of ``sights``: ``out [rows, heads, head_dim]``, and
        ``lse`` in the same shape with a last dimension of 1."""
        seen, first = list[SeenTokens](), 0
        for sight in sights:
            pages, rows = sight.images[number]
            firsts = np.zeros(len(sight.rows), np.int64)
            table = torch.tensor(pages, dtype=torch.int64)
            seen.append(SeenTokens(first, table, firsts, np.full_like(firsts, rows)))
            first += len(sight.rows)
        out, lse = self._attention.over(self._layer, queries, self._attention.plan(seen))
        return Partial(out, lse.unsqueeze(-1))


def _rows_that_see(sights: Sequence[SeenInputs], number: int) -> list[int]:
    """Return the rows of ``sights``, counted from 0, that see more than ``number`` images."""
    counts = [len(sight.images) for sight in sights for _ in sight.rows]
    return [row for row, count in enumerate(counts) if count > number]


class LatentAttention:
    """One layer with latents, in the absorbed form.

    A head's matrices for keys and values are applied to its queries and to its attention output, instead of
    to the latents. Attention therefore reads latents, and only latents are stored. If ``qᵢ`` is a head's
    query, ``K`` and ``V`` its matrices and ``c`` a latent: ``qᵢ·(K c) = (Kᵀ qᵢ)·c``, and ``Σ pⱼ (V cⱼ) = V Σ
    pⱼ cⱼ``.
    """

    def __init__(self, layer: int, config: ModelConfig, weights: LatentWeights, attention: Attention) -> None:
        assert config.latent is not None
        self._layer = layer
        self._heads = config.heads
        self._latent: LatentConfig = config.latent
        self._weights = weights
        self._attention = attention
        self._norm = attention.pointwise(replace(config, norm_eps=_LATENT_EPSILON)).norm
        self._rope = config.rope

    def compute(self, hidden: torch.Tensor, layout: BatchLayout, positions: Positions) -> torch.Tensor:
        """Do the same as :meth:`SelfAttention.compute`, with latents in the pages."""
        self.remember(hidden, layout, positions)
        latent, weights = self._latent, self._weights
        inner = hidden
        if weights.q_down is not None and weights.q_norm is not None:
            inner = self._norm(linear(hidden, weights.q_down), weights.q_norm)
        width = latent.nope_dim + latent.rope_dim
        queries = linear(inner, weights.q).view(len(hidden), self._heads, width)
        queries, turning = torch.split(queries, [latent.nope_dim, latent.rope_dim], dim=-1)
        rotations = positions.rotations[self._rope]
        to_keys, to_values = torch.split(weights.kv_up, [latent.nope_dim, latent.value_dim], dim=1)
        absorbed = _by_heads(queries, to_keys.mT)
        queries = torch.cat((absorbed, self._turned(turning, rotations)), dim=-1)
        attended = self._attention.attend(self._layer, queries, layout)[..., : latent.rank]
        values = _by_heads(attended, to_values)
        return linear(values.flatten(1), weights.o)

    def remember(self, hidden: torch.Tensor, layout: BatchLayout, positions: Positions) -> None:
        """Write the latents of these tokens, as :meth:`compute` does."""
        latent, weights = self._latent, self._weights
        both = linear(hidden, weights.kv_down)
        latents, shared = torch.split(both, [latent.rank, latent.rope_dim], dim=-1)
        latents = self._norm(latents, weights.kv_norm).unsqueeze(1)
        shared = self._turned(shared.unsqueeze(1), positions.rotations[self._rope])
        self._attention.write(self._layer, torch.cat((latents, shared), dim=-1), None, layout)

    def _turned(self, x: torch.Tensor, rotations: Rotations) -> torch.Tensor:
        if self._rope.interleaved:
            x = paired_by_halves(x, rotations[0].shape[-1])
        return rotate(x, *rotations)


class SharedBlock:
    """One use of a transformer block that layers share: attention, then an MLP, without residuals."""

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        weights: SharedBlockWeights,
        attention: Attention,
        pointwise: Pointwise,
        mlps: MLPs,
    ) -> None:
        block = weights.block
        self._weights = weights
        self._pointwise = pointwise
        self._attention = SelfAttention(
            layer,
            config,
            replace(block.attention, qkv=_changed(block.attention.qkv, weights.qkv_changes)),
            attention,
            pointwise,
        )
        self._mlps = mlps
        self._mlp = replace(block.mlp, gate_up=_changed(block.mlp.gate_up, [weights.gate_up_change]))

    def compute(
        self, hidden: torch.Tensor, embedded: torch.Tensor, layout: BatchLayout, positions: Positions
    ) -> torch.Tensor:
        """Compute like :meth:`SelfAttention.compute`. ``hidden`` is the residual stream, and ``embedded`` the
        tokens' embeddings in the same shape."""
        block, norm = self._weights.block, self._pointwise.norm
        normed = norm(torch.cat((hidden, embedded), dim=-1), block.norm)
        attended = self._attention.compute(normed, layout, positions)
        given = self._mlps.compute(norm(attended, block.mlp_norm), self._mlp)
        return linear(given, self._weights.out)


# the annotation of these weights is the type of stored matrices
def _changed(matrix: Matrix, changes: Sequence[LowRank]) -> Any:
    return ChangedMatrix(matrix, changes) if changes else matrix


def _by_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the products of ``x [tokens, heads, columns]`` with ``weight [heads, rows, columns]``."""
    if not bits_are_same():
        return torch.einsum("thc,hrc->thr", x, weight)
    heads = zip(x.unbind(1), weight, strict=True)
    return torch.stack([multiply(each.contiguous(), rows.contiguous()) for each, rows in heads], dim=1)
