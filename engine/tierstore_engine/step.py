"""One step: what is to be computed, and who computes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tierstore.tiers.hbm import COMPLETED, CopyFence
from tierstore_engine.attention.base import BatchLayout, Span, numbers_on, positions_of
from tierstore_engine.config import ModelConfig
from tierstore_engine.sampling import Choice, Draw


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's flattened batch. ``tokens`` and ``positions`` are int64 ``[tokens]``, in the order of
    the spans; ``layouts`` has one for each layer group; ``logit_rows`` (int64) names the rows whose logits
    are wanted. ``arrivals`` are those of its pages that are still on their way."""

    tokens: torch.Tensor
    positions: torch.Tensor
    layouts: tuple[BatchLayout, ...]
    logit_rows: torch.Tensor
    arrivals: CopyFence = COMPLETED

    @property
    def layout(self) -> BatchLayout:
        """Of the first layer group."""
        return self.layouts[0]


@dataclass(frozen=True, slots=True)
class Step:
    """The same before it is on any device. ``tokens`` are those of all spans in a row."""

    spans: tuple[Span, ...]
    tokens: Sequence[int]
    logit_rows: Sequence[int]
    arrivals: CopyFence
    chunk_tokens: int

    def on(self, device: str, *, states: Collection[int] = ()) -> StepInput:
        """As tensors. ``states`` are the layer groups that are recurrent states."""
        layouts = tuple(
            BatchLayout.of_states(self.spans, device=device, group=group)
            if group in states
            else BatchLayout.of(self.spans, chunk_tokens=self.chunk_tokens, device=device, group=group)
            for group in range(len(self.spans[0].tables))
        )
        return StepInput(
            tokens=numbers_on(self.tokens, device),
            positions=positions_of(self.spans, device=device),
            layouts=layouts,
            logit_rows=numbers_on(self.logit_rows, device),
            arrivals=self.arrivals,
        )


@dataclass(slots=True)
class PartialStep:
    """A step that is computed a few layers at a time, as its pages arrive. ``layers`` have been asked for;
    the rest is the model's, and what it goes on with."""

    step: Step
    layers: int = 0
    input: StepInput | None = None
    hidden: torch.Tensor | None = None

    def arrived(self, layers: int) -> int:
        """How many of the model's ``layers`` have been asked for, or could be now without waiting for a
        page."""
        stop = self.layers
        while stop < layers and self.step.arrivals.arrived(stop):
            stop += 1
        return stop


class Runner(Protocol):
    """What computes steps, on one device. Used by one thread."""

    @property
    def config(self) -> ModelConfig: ...

    def compute(self, step: Step) -> torch.Tensor:
        """Logits, float32 ``[len(logit_rows), vocab_size]``, and the KV of all its tokens in its pages: all
        that may still be under way when this returns."""

    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        """Go on with a step: compute these layers of it, which follow the ones before. Gives what
        :meth:`compute` gives when the last is among them, and None before. Other steps may be computed in
        between; a step that is not gone on with is just let go of."""

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        """A token for each draw, from the row of the last ``compute``'s logits that ``rows`` names for it.
        The one place where a step waits for its device, once for all of them."""

    def wait(self) -> None:
        """Block until all that was computed is done."""
