"""The scheduler's orders to the workers for one forward pass. TensorRT-LLM pickles them for ranks in other
processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Write to these blocks before the pass. ``data`` has, for each rank, one row of bytes per block."""

    blocks: Sequence[int]
    data: Sequence[npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class PageSave:
    """Save pages after the pass: page ``first`` of the prompt ``tokens`` and all that follow it. ``blocks``
    has the blocks of these pages."""

    tokens: npt.NDArray[np.uint32]
    first: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class PassOrders:
    """The orders for one forward pass."""

    loads: Sequence[BlockWrite] = ()
    saves: Sequence[PageSave] = ()
