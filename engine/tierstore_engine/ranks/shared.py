"""One copy of a model's weights for ranks on one host that have the same weights."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch

from tierstore.memory import Memory
from tierstore.units import round_up
from tierstore_engine.config import ModelConfig
from tierstore_engine.layer_weights import with_tensors
from tierstore_engine.weights import WeightsDigest, meta_weights, stored_numbers

_ALIGNMENT = 64  # of tensors, in bytes


class SharedWeights:
    """``weights`` in memory that another process can map by its descriptor ``fd``. They are not quantised.

    Example::

        ours = SharedWeights(config)
        ours.fill(source, seed=0, digest=WeightsDigest())
        theirs = SharedWeights(config, fd)  # in a process that has inherited ours.fd as fd
    """

    def __init__(self, config: ModelConfig, fd: int | None = None) -> None:
        """Map another process's memory, and take over ``fd``. If ``fd`` is None, make new memory, which the
        caller fills. Raise :class:`~tierstore.errors.UsageError` if the memory cannot be mapped or made."""
        self._config = config
        places: dict[int, int] = {}  # by the id of the tensor that has a shape only
        end = 0

        def reserve(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal end
            if id(tensor) not in places:
                places[id(tensor)] = end
                end += round_up(tensor.nbytes, _ALIGNMENT)
            return tensor

        shapes = with_tensors(meta_weights(config), reserve)
        made = Memory(end, shared=True, name="tierstore-weights") if fd is None else Memory.attach(fd, end)
        weakref.finalize(self, made.close)
        tensors: dict[int, torch.Tensor] = {}

        def place(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in tensors:
                numbers = torch.frombuffer(made.view(places[id(tensor)], tensor.nbytes), dtype=tensor.dtype)
                tensors[id(tensor)] = numbers.view(tensor.shape)
            return tensors[id(tensor)]

        self.weights = with_tensors(shapes, place)
        assert made.fd is not None
        self.fd = made.fd

    def fill(self, source: Path | None, *, seed: int, digest: WeightsDigest) -> None:
        """Read the weights from a checkpoint, or make random ones from ``seed``. Add them to ``digest``.
        Raises :class:`ModelError` as :func:`~tierstore_engine.weights.stored_numbers` does."""
        for slot, numbers in stored_numbers(self._config, self.weights, source, seed=seed):
            assert isinstance(slot.tensor, torch.Tensor)
            slot.tensor.copy_(numbers)
            digest.add(slot)
