"""Load, seed and digest the weights of a model.

:mod:`tierstore_engine.layer_weights` has the tensors, :mod:`tierstore_engine.weight_slots` the place of each
checkpoint tensor in them. Weights that are quantised in a checkpoint stay quantised
(:class:`~tierstore_engine.quantised.QuantisedMatrix`), or are expanded when they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch
import xxhash

from tierstore_engine.checkpoint import Checkpoint, StoredWeights
from tierstore_engine.config import ModelConfig
from tierstore_engine.gguf_file import GGUFWeights
from tierstore_engine.layer_weights import (
    ModelWeights,
)
from tierstore_engine.quantised import Matrix, MatrixKernels, QuantisedMatrix
from tierstore_engine.weight_memory import allocate
from tierstore_engine.weight_slots import Slot, layer_slots, slots
from tierstore_engine.weights_on_disk import WeightStream

_DIGEST_STEP_BYTES = 64 << 20


def open_weights(source: Path, *, mapped: bool = False) -> StoredWeights:
    """Return the weights of a checkpoint folder or of a GGUF file. If ``mapped``, the weights are views of
    the files."""
    return (GGUFWeights if source.is_file() else Checkpoint)(source, mapped=mapped)


def stored_numbers(
    config: ModelConfig, weights: ModelWeights, source: Path | None, *, seed: int
) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Yield each slot of weights, which need no memory, and its numbers on the CPU: from a checkpoint
    (:meth:`Slot.numbers <tierstore_engine.weight_slots.Slot.numbers>`), or from ``seed`` without one. Raises
    :class:`ModelError` for a tensor that is missing, unreadable or of another shape."""
    if source is None:
        generator = torch.Generator("cpu")
        for slot in slots(config, weights):
            assert isinstance(slot.tensor, torch.Tensor)
            # The order of random numbers depends on the strides of a tensor.
            numbers = torch.empty_strided(
                slot.tensor.shape, slot.tensor.stride(), dtype=slot.tensor.dtype, device="cpu"
            )
            _seed(replace(slot, tensor=numbers), config, generator, seed)
            yield slot, numbers
        return
    with open_weights(source) as checkpoint:
        stored = _stored_names(config, checkpoint)
        for slot in slots(config, weights):
            yield slot, slot.numbers(checkpoint, stored(slot.name))


def load_weights(
    config: ModelConfig,
    source: Path,
    *,
    device: str,
    expand: bool = False,
    on_disk: bool = False,
    kernels: MatrixKernels | None = None,
) -> ModelWeights:
    """Return the weights of a checkpoint, in ``config.dtype``. Quantised weights stay quantised unless
    ``expand``; a GPU computes with them by ``kernels``. This needs memory for the weights and one tensor.
    With ``on_disk``, matrices stay in their files (:mod:`tierstore_engine.weights_on_disk`).

    Raises :class:`ModelError` for a tensor that is missing, unreadable or of another shape.
    """
    with open_weights(source, mapped=on_disk) as checkpoint:
        keep = on_disk or (checkpoint.quantised is not None and not expand)
        weights = allocate(config, device, keep=keep, kernels=kernels)
        stored = _stored_names(config, checkpoint)
        for slot in slots(config, weights):
            slot.fill(checkpoint, stored(slot.name))
        if not on_disk:
            return weights
        parts = [list(_codes(layer_slots(config, layer))) for layer in weights.layers]
        parts.append(list(_codes([Slot("head", weights.head)])))
        return replace(weights, stream=WeightStream(parts, checkpoint.mapped))


def _codes(slots_: Iterable[Slot]) -> Iterator[torch.Tensor]:
    """Yield the bytes of matrices that are used in the form in which they are stored."""
    for slot in slots_:
        if isinstance(slot.tensor, QuantisedMatrix):
            for _, inner, rows, packed in slot.tensor.parts():
                yield packed.codes[inner : inner + rows]


FileStates: TypeAlias = tuple[tuple[str, int, int, int], ...]
"""The name, inode, size and last change of each of a checkpoint's files."""


def states_of(source: Path | None) -> FileStates:
    """Return the states of the weights' files, which differ after a change of their contents. Raises
    :class:`OSError`."""
    if source is None:
        return ()
    files = sorted(source.glob("*.safetensors*")) if source.is_dir() else [source]
    found = ((file.name, file.stat()) for file in files)
    return tuple((name, state.st_ino, state.st_size, state.st_ctime_ns) for name, state in found)


def check_tensors(config: ModelConfig, source: Path) -> None:
    """Check by name and dtype that a checkpoint holds exactly the model of ``config``. No weights are read.

    Raises :class:`ModelError` for a tensor that is missing, in an unreadable dtype, or not part of the model.
    """
    with open_weights(source) as checkpoint:
        stored = _stored_names(config, checkpoint)
        names = {stored(slot.name) for slot in slots(config, meta_weights(config))}
        tied = {stored("lm_head.weight")} if config.tied_embeddings else set()
        checkpoint.account_for(names, unread=tied)


def _stored_names(config: ModelConfig, checkpoint: StoredWeights) -> Callable[[str], str]:
    """Return a function from a tensor's name to its name in the checkpoint. Some families have names of their
    own. In models for images, the names of the text part have a prefix, and in Nemotron-H they begin with
    ``backbone``."""

    if config.names.renamed:
        return lambda name: stored_name(config, name)
    for prefix, head in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in checkpoint:
            return lambda name: prefix + name[6:] if name.startswith("model.") else head + name
    if "backbone.embeddings.weight" in checkpoint:
        return lambda name: _BACKBONE.get(name, name.replace("model.", "backbone."))
    return lambda name: name


def stored_name(config: ModelConfig, name: str) -> str:
    """Return a tensor's name in a checkpoint of the model's family, without a prefix of the text part."""
    for part, stored in config.names.renamed:
        name = name.replace(part, stored)
    return name


def meta_weights(config: ModelConfig) -> ModelWeights:
    """Return weights that have shapes and places, and no memory."""
    return allocate(config, "meta")


_PREFIXES = (
    ("model.language_model.", ""),
    ("language_model.model.", "language_model."),
)
_BACKBONE = {
    "model.embed_tokens.weight": "backbone.embeddings.weight",
    "model.norm.weight": "backbone.norm_f.weight",
}


def random_weights(config: ModelConfig, *, seed: int, device: str) -> ModelWeights:
    """Return seeded random weights, made in place, tensor by tensor."""
    weights = allocate(config, device)
    generator = torch.Generator(device)
    for slot in slots(config, weights):
        _seed(slot, config, generator, seed)
    return weights


def digest_weights(config: ModelConfig, weights: ModelWeights) -> str:
    """Return the :class:`WeightsDigest` of all tensors. It is the same on any device."""
    digest = WeightsDigest()
    digest.add_all(config, weights)
    return digest.hexdigest()


class WeightsDigest:
    """XXH3-128 over every tensor's name, shape, dtype and bytes, in the order of
    :func:`~tierstore_engine.weight_slots.slots`."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def add(self, slot: Slot) -> None:
        """Add the next slot to the digest. Its tensor must be filled."""
        self._digest.update(f"{slot.name}{list(slot.tensor.shape)}{slot.tensor.dtype}".encode())
        for tensor in _bytes_of(slot.tensor, self._digest):
            flat = tensor.reshape(-1).view(torch.uint8)
            for start in range(0, flat.numel(), _DIGEST_STEP_BYTES):
                self._digest.update(flat[start : start + _DIGEST_STEP_BYTES].cpu().numpy().data)

    def add_all(self, config: ModelConfig, weights: ModelWeights) -> None:
        """Add all slots of a model."""
        for slot in slots(config, weights):
            self.add(slot)
            if weights.stream is not None:
                weights.stream.release()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def _bytes_of(matrix: Matrix, digest: xxhash.xxh3_128) -> Iterator[torch.Tensor]:
    """Yield the tensors of a matrix. If it is quantised, add its formats to ``digest``."""
    if isinstance(matrix, torch.Tensor):
        yield matrix
        return
    for _, _, _, packed in matrix.parts():
        digest.update(f"{packed.format.name}/{packed.group}/{packed.block_rows}".encode())
        yield from packed.tensors()


def weights_bytes(config: ModelConfig) -> int:
    """Return the memory that the weights need if they are not quantised."""
    sizes = []
    for slot in slots(config, meta_weights(config)):
        assert isinstance(slot.tensor, torch.Tensor)
        sizes.append(slot.tensor.nbytes)
    return sum(sizes)


# Standard deviation of each kind of random matrix, in units of 1/√(inputs). Q and K are large enough for
# attention to select a few of very many tokens. o and down are large enough to outweigh the newest token's
# own embedding. Otherwise this embedding alone would decide the next token, and the text would soon repeat
# itself. The head spreads the logits, so that ties are rare.
_GAINS = {
    "embed_tokens.weight": 3.0,  # a tied embedding is also used as the head
    "lm_head.weight": 3.0,
    "q_proj.weight": 2.2,
    "k_proj.weight": 2.2,
    "o_proj.weight": 3.0,
    "down_proj.weight": 2.0,
    "output_linear.weight": 2.0,
}
_STATE_DECAY = 0.02
"""About this part of its state is forgotten by a recurrent layer of random weights at each token, so that
several hundred tokens have an influence."""


def _seed(slot: Slot, config: ModelConfig, generator: torch.Generator, seed: int) -> None:
    """Fill a slot with random numbers. They are scaled so that the greedy continuation depends on the whole
    context, as in a trained model."""
    generator.manual_seed(xxhash.xxh3_64_intdigest(slot.name.encode(), seed) >> 1)
    kind, tensor = ".".join(slot.name.split(".")[-2:]), slot.tensor
    assert isinstance(tensor, torch.Tensor)
    if kind.endswith("norm.weight"):
        tensor.fill_(0.0 if config.centred_norms and "linear_attn" not in slot.name else 1.0)
    elif kind.endswith(".D"):
        tensor.fill_(1.0)
    elif kind.endswith("A_log"):
        tensor.fill_(math.log(_STATE_DECAY))
    elif kind.endswith(("bias", "sinks")):
        tensor.normal_(0.0, 0.1, generator=generator)
    elif kind == "embed_tokens.weight" and not config.tied_embeddings:
        tensor.normal_(0.0, 1.0, generator=generator)
    else:
        deviation = _GAINS.get(kind, 1.0) * (slot.inputs or tensor.shape[-1]) ** -0.5
        tensor.normal_(0.0, deviation, generator=generator)
