"""The share of a model that each rank computes, and the weights of that share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch

from tierstore.errors import UsageError
from tierstore_engine.config import ModelConfig
from tierstore_engine.layer_weights import (
    AttentionWeights,
    Elsewhere,
    ExpertsWeights,
    LatentWeights,
    LayerWeights,
    MixerWeights,
    MLPWeights,
    ModelWeights,
)
from tierstore_engine.quantised import Matrix
from tierstore_engine.weight_memory import Maker
from tierstore_engine.weights import WeightsDigest, fill


@dataclass(frozen=True, slots=True)
class Share:
    """The share of ``rank`` of ``count`` ranks."""

    rank: int
    count: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    def cut(self, total: int) -> range:
        """Return this rank's part of ``total`` items. The sizes of two parts differ by at most one.

        >>> [Share(rank, 3).cut(8) for rank in range(3)]
        [range(0, 2), range(2, 5), range(5, 8)]
        """
        return range(total * self.rank // self.count, total * (self.rank + 1) // self.count)

    def heads(self, heads: int, kv_heads: int) -> tuple[range, range]:
        """Return this rank's query heads and KV heads. If there are fewer KV heads than ranks, several ranks
        have the same KV head.

        >>> [Share(rank, 2).heads(9, 3) for rank in range(2)]
        [(range(0, 3), range(0, 1)), (range(3, 9), range(1, 3))]
        >>> [Share(rank, 4).heads(8, 2) for rank in range(4)]  # doctest: +NORMALIZE_WHITESPACE
        [(range(0, 2), range(0, 1)), (range(2, 4), range(0, 1)),
         (range(4, 6), range(1, 2)), (range(6, 8), range(1, 2))]
        """
        group = heads // kv_heads
        if kv_heads >= self.count:
            kv = self.cut(kv_heads)
            return range(kv.start * group, kv.stop * group), kv
        head = self.rank * kv_heads // self.count
        alike = [rank for rank in range(self.count) if rank * kv_heads // self.count == head]
        part = Share(alike.index(self.rank), len(alike)).cut(group)
        return range(head * group + part.start, head * group + part.stop), range(head, head + 1)


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of a rank: its share of the heads, and its part of each sequence's tokens.

    >>> RankPlace.of(3, heads=2, parts=2)
    RankPlace(heads=Share(rank=1, count=2), tokens=Share(rank=1, count=2))
    """

    heads: Share
    tokens: Share

    @classmethod
    def of(cls, number: int, *, heads: int, parts: int) -> RankPlace:
        """Return the place of rank ``number`` of ``heads × parts`` ranks."""
        return cls(Share(number % heads, heads), Share(number // heads, parts))


def divides_attention(config: ModelConfig) -> bool:
    """Return whether attention is divided by heads. Otherwise rank 0 computes it alone."""
    normed_together = config.qk_norm and config.qk_norm_over == "all"
    return config.attends and config.shared is None and not normed_together


def check_ranks(config: ModelConfig, count: int) -> None:
    """Raise :class:`UsageError` if the model has nothing to divide, or if a divided part is too small for
    ``count`` ranks."""
    if not config.attends or config.shared is not None:
        what = "blocks that layers share" if config.shared is not None else "recurrent states"
        raise UsageError(f"--tensor-parallel divides attention and MLPs: this model has only {what}")
    parts = {"rows of an MLP": config.intermediate_size, "tokens in the vocabulary": config.vocab_size}
    if config.experts is not None:
        parts["experts"] = config.experts.count
        if set(config.dense_layers).issubset(config.bare_layers):
            del parts["rows of an MLP"]
        if config.experts.shared_width:
            parts["rows of the shared expert"] = config.experts.shared_width
    if divides_attention(config):
        parts["query heads"] = config.heads
    for name, number in parts.items():
        if number < count:
            raise UsageError(
                f"--tensor-parallel {count}: the model has only {number} {name}, so give at most {number}"
            )
    if divides_attention(config) and config.latent is None:
        least = min(len(Share(rank, count).heads(config.heads, config.kv_heads)[0]) for rank in range(count))
        if not least:
            raise UsageError(
                f"--tensor-parallel {count}: {config.heads} query heads over {config.kv_heads} KV heads "
                "leave a rank without any: give fewer ranks"
            )


def config_of(config: ModelConfig, share: Share) -> ModelConfig:
    """Return the configuration of a rank: its heads are the rank's heads only."""
    if share.count == 1 or not divides_attention(config):
        return config
    if config.latent is not None:
        heads = len(share.cut(config.heads))
        return replace(config, heads=heads, kv_heads=heads)
    queries, kv = share.heads(config.heads, config.kv_heads)
    return replace(config, heads=len(queries), kv_heads=len(kv), first_kv_head=kv.start)


def read_share(
    config: ModelConfig, source: Path | None, share: Share, *, seed: int
) -> tuple[ModelWeights, str]:
    """Return a rank's part of a checkpoint's weights, or of random weights from ``seed``. Also return the
    digest of all weights, as :func:`~tierstore_engine.weights.digest_weights` does. All weights are read, and
    memory is needed for the part, one whole layer, the embeddings and the head.

    Raises :class:`ModelError` for a tensor that is missing, unreadable or of another shape.
    """
    make = Maker(config, "cpu")
    layers = _Layers(config, make, share)
    embed, norm = make.matrix(config.vocab_size, config.hidden_size), make.norm()
    head = embed if config.tied_embeddings else make.matrix(config.vocab_size, config.hidden_size)
    # The slots are filled in order, so only one layer at a time is whole.
    whole = ModelWeights(embed, cast("tuple[LayerWeights, ...]", layers), norm, head)
    digest = WeightsDigest()
    for slot in fill(config, whole, source, seed=seed):
        digest.add(slot)
    rows = _rows(head, share.cut(config.vocab_size), copy=not config.tied_embeddings)
    return ModelWeights(embed, tuple(layers.kept), norm, rows), digest.hexdigest()


class _Layers:
    """The layers of a model, made one by one. ``kept`` has a rank's part of each layer before the newest."""

    def __init__(self, config: ModelConfig, make: Maker, share: Share) -> None:
        self.kept: list[LayerWeights] = []
        self._config = config
        self._make = make
        self._share = share

    def __iter__(self) -> Iterator[LayerWeights]:
        for index in range(self._config.layers):
            layer = self._make.layer(index)
            yield layer
            self.kept.append(part_of(self._config, layer, self._share))


def part_of(config: ModelConfig, layer: LayerWeights, share: Share) -> LayerWeights:
    """Return a rank's part of a layer. Divided tensors are copied; the others are the layer's own."""
    mixer = _mixer(config, layer.mixer, share)
    if isinstance(layer.mlp, ExpertsWeights):
        return replace(layer, mixer=mixer, mlp=_experts(config, layer.mlp, share))
    return replace(layer, mixer=mixer, mlp=_mlp(config, layer.mlp, share))


def _mixer(config: ModelConfig, weights: MixerWeights, share: Share) -> MixerWeights:
    if isinstance(weights, LatentWeights):
        return _latent(config, weights, share)
    if isinstance(weights, AttentionWeights) and divides_attention(config):
        return _attention(config, weights, share)
    return weights if share.first else Elsewhere()


def _attention(config: ModelConfig, weights: AttentionWeights, share: Share) -> AttentionWeights:
    queries, kv = share.heads(config.heads, config.kv_heads)
    width, rows_of_head = config.head_dim, config.query_rows // config.heads
    keys, values = config.query_rows, config.query_rows + config.kv_heads * width
    rows = [
        _times(queries, rows_of_head),
        _moved(_times(kv, width), keys),
        _moved(_times(kv, width), values),
    ]
    each = config.qk_norm_over == "each"
    return AttentionWeights(
        qkv=_joined(weights.qkv, rows),
        qkv_bias=None if weights.qkv_bias is None else _joined(weights.qkv_bias, rows),
        q_norm=_part(weights.q_norm, queries) if each else weights.q_norm,
        k_norm=_part(weights.k_norm, kv) if each else weights.k_norm,
        o=_columns(weights.o, _times(queries, width)),
        o_bias=weights.o_bias if share.first else None,
        sinks=_part(weights.sinks, queries),
    )


def _latent(config: ModelConfig, weights: LatentWeights, share: Share) -> LatentWeights:
    assert config.latent is not None
    heads, latent = share.cut(config.heads), config.latent
    return replace(
        weights,
        q=_rows(weights.q, _times(heads, latent.nope_dim + latent.rope_dim)),
        kv_up=weights.kv_up[heads.start : heads.stop].clone(),
        o=_columns(weights.o, _times(heads, latent.value_dim)),
    )


def _mlp(config: ModelConfig, weights: MLPWeights | None, share: Share) -> MLPWeights | None:
    if weights is None:
        return None
    width = weights.down.shape[-1]
    own = share.cut(width)
    rows = [own, _moved(own, width)] if config.gated_mlps else [own]
    return MLPWeights(
        gate_up=_joined(weights.gate_up, rows),
        gate_up_bias=None if weights.gate_up_bias is None else _joined(weights.gate_up_bias, rows),
        down=_columns(weights.down, own),
        down_bias=weights.down_bias if share.first else None,
        xielu=weights.xielu,
    )


def _experts(config: ModelConfig, weights: ExpertsWeights, share: Share) -> ExpertsWeights:
    assert config.experts is not None
    own = share.cut(config.experts.count)
    return replace(
        weights,
        gate_up=_rows(weights.gate_up, own),
        gate_up_bias=_part(weights.gate_up_bias, own),
        down=_rows(weights.down, own),
        down_bias=_part(weights.down_bias, own),
        shared=_mlp(config, weights.shared, share),
        first=own.start,
    )


def _times(numbers: range, width: int) -> range:
    return range(numbers.start * width, numbers.stop * width)


def _moved(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


def _plain(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "quantised weights are refused when they are read"
    return matrix


def _joined(matrix: Matrix, parts: list[range]) -> torch.Tensor:
    return torch.cat([_plain(matrix)[part.start : part.stop] for part in parts])


def _rows(matrix: Matrix, rows: range, *, copy: bool = True) -> torch.Tensor:
    part = _plain(matrix)[rows.start : rows.stop]
    return part.clone() if copy else part


def _columns(matrix: Matrix, columns: range) -> torch.Tensor:
    return _plain(matrix)[:, columns.start : columns.stop].clone(memory_format=torch.contiguous_format)


def _part(tensor: torch.Tensor | None, rows: range) -> torch.Tensor | None:
    return None if tensor is None else tensor[rows.start : rows.stop].clone()
