"""The share of a model that each rank computes, and the weights of that share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
    with_tensors,
)
from tierstore_engine.quantised import Matrix
from tierstore_engine.weight_slots import Slot
from tierstore_engine.weights import WeightsDigest, meta_weights, stored_numbers


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
    """Where a rank stands among all ranks: which share of the heads it has, and which part of each sequence's
    tokens.

    >>> RankPlace.of(3, heads=2, parts=2)
    RankPlace(heads=Share(rank=1, count=2), tokens=Share(rank=1, count=2))
    """

    heads: Share
    tokens: Share

    @classmethod
    def of(cls, number: int, *, heads: int, parts: int) -> RankPlace:
        """Return the place of rank ``number`` of ``heads × parts`` ranks."""
        return cls(Share(number % heads, heads), Share(number // heads, parts))


def device_of(device: str, rank: int) -> str:
    """Return the device of a rank, if ``device`` is that of rank 0.

    >>> device_of("cpu", 2), device_of("cuda", 2), device_of("cuda:1", 2)
    ('cpu', 'cuda:2', 'cuda:3')
    """
    if device == "cpu":
        return device
    kind, _, first = device.partition(":")
    return f"{kind}:{int(first or 0) + rank}"


def kv_heads_of(config: ModelConfig, share: Share) -> range:
    """Return the KV heads of a page that a rank computes with. Latents have one."""
    return range(1) if config.latent is not None else share.heads(config.heads, config.kv_heads)[1]


def divides_attention(config: ModelConfig) -> bool:
    """Return whether attention is divided by heads. Otherwise the first rank of each part computes it."""
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
    config: ModelConfig,
    source: Path | None,
    share: Share,
    *,
    seed: int,
    device: str = "cpu",
    digest: WeightsDigest | None = None,
) -> ModelWeights:
    """Return a rank's part of a checkpoint's weights, or of random weights from ``seed``. This reads only the
    part, unless it adds all weights to ``digest``. Memory is needed for the part and one tensor.

    Raises :class:`ModelError` for a tensor that is missing, unreadable or of another shape.
    """
    whole, parts = meta_weights(config), _Parts(config, share)
    targets: dict[int, tuple[torch.Tensor, _Part]] = {}  # by the number of the whole tensor's memory

    def allocate(part: torch.Tensor) -> torch.Tensor:
        cut = parts.cuts.get(id(part)) or _Part(part, part)
        place = _place_of(cut.whole)
        if place not in targets:
            targets[place] = torch.empty_like(part, device=device), cut
        return targets[place][0]

    own = with_tensors(parts.of(whole), allocate)
    for slot, numbers in stored_numbers(config, whole, source, seed=seed):
        if digest is not None:
            digest.add(replace(slot, tensor=numbers.to(_tensor(slot.tensor).dtype)))
        if (found := targets.get(_place_of(slot.tensor))) is not None:
            target, cut = found
            cut.fill(target, slot, numbers)
    if config.tied_embeddings:
        rows = share.cut(config.vocab_size)
        own = replace(own, head=own.embed[rows.start : rows.stop])
    return own


def _place_of(matrix: Matrix) -> int:
    """Return a number that identifies the memory to which a tensor refers, also for tensors that have shapes
    only."""
    return int(_tensor(matrix).untyped_storage()._cdata)


@dataclass(frozen=True, slots=True)
class _Part:
    """``part`` of a ``whole`` tensor: these rows of its first dimension, or these columns of a matrix. None:
    all of them. Both tensors have shapes and no numbers."""

    whole: torch.Tensor
    part: torch.Tensor
    rows: Sequence[range] | None = None
    columns: range | None = None

    def fill(self, target: torch.Tensor, slot: Slot, numbers: torch.Tensor) -> None:
        """Copy the part of a slot's ``numbers`` to ``target``. The slot is a view of the whole tensor."""
        view = _tensor(slot.tensor)
        if self.columns is not None:
            assert view.shape == self.whole.shape, "a slot has some rows of a matrix that is cut by columns"
            target.copy_(numbers[:, self.columns.start : self.columns.stop])
            return
        if slot.swapped:
            view, numbers = view.transpose(-1, -2), numbers.transpose(-1, -2)
        # A line is the last dimension of a matrix, or one number of a vector.
        width = self.whole.shape[-1] if self.whole.ndim > 1 else 1
        shape, strides = view.shape, view.stride()
        if self.whole.ndim > 1:
            assert view.stride(-1) == 1
            assert view.shape[-1] == width
            shape, strides = shape[:-1], strides[:-1]
        lines = torch.arange(self.whole.numel() // width)
        in_slot = lines.as_strided(shape, [each // width for each in strides], view.storage_offset() // width)
        places = self._places(lines)[in_slot.reshape(-1)]
        wanted = (places >= 0).nonzero().squeeze(-1)
        found = numbers.reshape(-1, width)[wanted].to(target.device, target.dtype)
        target.view(-1, width)[places[wanted].to(target.device)] = found

    def _places(self, lines: torch.Tensor) -> torch.Tensor:
        """Return the place in the part of each line of the whole tensor, or -1 for a line of another part."""
        if self.rows is None:
            return lines
        each = len(lines) // self.whole.shape[0]
        chosen = torch.cat([lines[rows.start * each : rows.stop * each] for rows in self.rows])
        return torch.full_like(lines, -1).index_copy_(0, chosen, torch.arange(len(chosen)))


class _Parts:
    """A rank's part of weights that have shapes and no numbers. ``cuts`` says from which tensors the parts
    were cut, by the ids of the parts."""

    def __init__(self, config: ModelConfig, share: Share) -> None:
        self.cuts: dict[int, _Part] = {}
        self._config = config
        self._share = share

    def of(self, weights: ModelWeights) -> ModelWeights:
        head = weights.head
        if not self._config.tied_embeddings:
            head = self._rows(head, self._share.cut(self._config.vocab_size))
        return replace(weights, layers=tuple(map(self._layer, weights.layers)), head=head)

    def _layer(self, layer: LayerWeights) -> LayerWeights:
        mixer = self._mixer(layer.mixer)
        if isinstance(layer.mlp, ExpertsWeights):
            return replace(layer, mixer=mixer, mlp=self._experts(layer.mlp))
        return replace(layer, mixer=mixer, mlp=self._mlp(layer.mlp))

    def _mixer(self, weights: MixerWeights) -> MixerWeights:
        if isinstance(weights, LatentWeights):
            return self._latent(weights)
        if isinstance(weights, AttentionWeights) and divides_attention(self._config):
            return self._attention(weights)
        return weights if self._share.first else Elsewhere()

    def _attention(self, weights: AttentionWeights) -> AttentionWeights:
        config = self._config
        queries, kv = self._share.heads(config.heads, config.kv_heads)
        width, rows_of_head = config.head_dim, config.query_rows // config.heads
        keys, values = config.query_rows, config.query_rows + config.kv_heads * width
        rows = [
            _times(queries, rows_of_head),
            _moved(_times(kv, width), keys),
            _moved(_times(kv, width), values),
        ]
        each = config.qk_norm_over == "each"
        return AttentionWeights(
            qkv=self._rows(weights.qkv, *rows),
            qkv_bias=self._optional(weights.qkv_bias, *rows),
            q_norm=self._optional(weights.q_norm, queries) if each else weights.q_norm,
            k_norm=self._optional(weights.k_norm, kv) if each else weights.k_norm,
            o=self._columns(weights.o, _times(queries, width)),
            o_bias=weights.o_bias if self._share.first else None,
            sinks=self._optional(weights.sinks, queries),
        )

    def _latent(self, weights: LatentWeights) -> LatentWeights:
        latent, heads = self._config.latent, self._share.cut(self._config.heads)
        assert latent is not None
        return replace(
            weights,
            q=self._rows(weights.q, _times(heads, latent.nope_dim + latent.rope_dim)),
            kv_up=self._rows(weights.kv_up, heads),
            o=self._columns(weights.o, _times(heads, latent.value_dim)),
        )

    def _mlp(self, weights: MLPWeights | None) -> MLPWeights | None:
        if weights is None:
            return None
        width = weights.down.shape[-1]
        own = self._share.cut(width)
        rows = [own, _moved(own, width)] if self._config.gated_mlps else [own]
        return MLPWeights(
            gate_up=self._rows(weights.gate_up, *rows),
            gate_up_bias=self._optional(weights.gate_up_bias, *rows),
            down=self._columns(weights.down, own),
            down_bias=weights.down_bias if self._share.first else None,
            xielu=weights.xielu,
        )

    def _experts(self, weights: ExpertsWeights) -> ExpertsWeights:
        assert self._config.experts is not None
        own = self._share.cut(self._config.experts.count)
        return replace(
            weights,
            gate_up=self._rows(weights.gate_up, own),
            gate_up_bias=self._optional(weights.gate_up_bias, own),
            down=self._rows(weights.down, own),
            down_bias=self._optional(weights.down_bias, own),
            shared=self._mlp(weights.shared),
            first=own.start,
        )

    def _rows(self, matrix: Matrix, *rows: range) -> torch.Tensor:
        whole = _tensor(matrix)
        part = whole.new_empty(sum(map(len, rows)), *whole.shape[1:])
        self.cuts[id(part)] = _Part(whole, part, rows=rows)
        return part

    def _optional(self, tensor: torch.Tensor | None, *rows: range) -> torch.Tensor | None:
        return None if tensor is None else self._rows(tensor, *rows)

    def _columns(self, matrix: Matrix, columns: range) -> torch.Tensor:
        whole = _tensor(matrix)
        part = whole.new_empty(len(whole), len(columns))
        self.cuts[id(part)] = _Part(whole, part, columns=columns)
        return part


def _times(numbers: range, width: int) -> range:
    return range(numbers.start * width, numbers.stop * width)


def _moved(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


def _tensor(matrix: Matrix) -> torch.Tensor:
    assert isinstance(matrix, torch.Tensor), "quantised weights are refused before they are read"
    return matrix
