"""One step: its work, and the interface of the runner that computes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch

from tierstore.tiers.hbm import COMPLETED, CopyFence
from tierstore_engine.attention.base import BatchLayout, Span, numbers_on, positions_of
from tierstore_engine.config import ModelConfig
from tierstore_engine.moving import to_device
from tierstore_engine.sampling import Choice, Draw


@dataclass(frozen=True, slots=True, eq=False)
class SeenInputs:
    """Consecutive rows of a step that see the same images by cross attention. Each image has its pages
    and its number of rows."""

    rows: range
    images: tuple[tuple[Sequence[int], int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """The images that cross-attention layers read in a step, in the order of the step's rows. The KV of the
    embeddings in ``new``, ``[rows, hidden_size]``, is written to their pages first."""

    sights: tuple[SeenInputs, ...]
    new: tuple[tuple[Sequence[int], torch.Tensor], ...]


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step's flattened batch.

    ``tokens`` and ``positions`` are int64 ``[tokens]``, in the order of the spans. ``layouts`` has one layout
    for each layer group. ``logit_rows`` (int64) names the rows whose logits are needed. ``arrivals`` are the
    pages that are still arriving. ``adapters`` has the rows (int64) of each adapter, by its digest.
    ``positions`` are ``[tokens, 3]`` if a sequence has images with positions on three axes. ``embeddings``
    replace those of the tokens in ``embedded_rows`` (int64). Both are None if the step has no images.
    ``inputs`` is None if no row sees an input of cross attention.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    layouts: tuple[BatchLayout, ...]
    logit_rows: torch.Tensor
    arrivals: CopyFence = COMPLETED
    adapters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    embedded_rows: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    inputs: StepInputs | None = None

    @property
    def layout(self) -> BatchLayout:
        """Return the first layer group's layout."""
        return self.layouts[0]


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """The images in a step. ``embeddings [rows, hidden_size]`` take the places of the tokens in ``rows``.
    ``positions`` is int64 ``[tokens, 3]``, None if all tokens have positions like text."""

    rows: Sequence[int]
    embeddings: torch.Tensor | None
    positions: torch.Tensor | None

    def __reduce__(self) -> tuple[Any, ...]:
        # Other ranks get the tensors as bytes, because torch would send handles of files, which these
        # processes do not share.
        return _unpacked, (tuple(self.rows), _packed(self.embeddings), _packed(self.positions))


@dataclass(frozen=True, slots=True)
class Step:
    """A step as arrays on the host, before it is copied to a device. ``tokens`` are the tokens of all spans,
    concatenated. ``adapters`` has the digest of each span's adapter (empty: none), or nothing if no span has
    one. ``images`` is None if no sequence has images, and ``inputs`` if no row sees any by cross
    attention."""

    spans: tuple[Span, ...]
    tokens: Sequence[int]
    logit_rows: Sequence[int]
    arrivals: CopyFence
    chunk_tokens: int
    adapters: tuple[str, ...] = ()
    images: StepImages | None = None
    inputs: StepInputs | None = None

    def on(self, device: str, *, without_tokens: Collection[int] = ()) -> StepInput:
        """Return the step as tensors. ``without_tokens`` are the layer groups that keep nothing for a token:
        recurrent states, and cross attention."""
        layouts = tuple(
            BatchLayout.of_states(self.spans, device=device, group=group)
            if group in without_tokens
            else BatchLayout.of(self.spans, chunk_tokens=self.chunk_tokens, device=device, group=group)
            for group in range(len(self.spans[0].tables))
        )
        images = self.images or _NO_IMAGES
        return StepInput(
            tokens=numbers_on(self.tokens, device),
            positions=positions_of(self.spans, device=device)
            if images.positions is None
            else to_device(images.positions, device),
            layouts=layouts,
            logit_rows=numbers_on(self.logit_rows, device),
            arrivals=self.arrivals,
            adapters={name: numbers_on(rows, device) for name, rows in self._adapter_rows().items()},
            embedded_rows=numbers_on(images.rows, device) if images.rows else None,
            embeddings=None if images.embeddings is None else to_device(images.embeddings, device),
            inputs=self.inputs,
        )

    def _adapter_rows(self) -> Mapping[str, Sequence[int]]:
        rows: dict[str, list[int]] = {}
        first = 0
        for span, adapter in zip(self.spans, self.adapters, strict=False):
            if adapter:
                rows.setdefault(adapter, []).extend(range(first, first + span.tokens))
            first += span.tokens
        return rows


_NO_IMAGES = StepImages((), None, None)
_Packed: TypeAlias = tuple[bytes, torch.dtype, torch.Size] | None


def _packed(tensor: torch.Tensor | None) -> _Packed:
    if tensor is None:
        return None
    return tensor.contiguous().view(torch.uint8).numpy().tobytes(), tensor.dtype, tensor.shape


def _unpacked(rows: Sequence[int], *packed: _Packed) -> StepImages:
    embeddings, positions = (
        None if each is None else torch.frombuffer(bytearray(each[0]), dtype=each[1]).view(each[2])
        for each in packed
    )
    return StepImages(rows, embeddings, positions)


@dataclass(slots=True)
class PartialStep:
    """A step that is computed a few layers at a time, as its pages arrive. The first ``layers`` layers were
    computed or queued. The model stores the step's input and activations in ``input`` and ``hidden``."""

    step: Step
    layers: int = 0
    input: StepInput | None = None
    hidden: torch.Tensor | None = None

    def arrived(self, config: ModelConfig) -> int:
        """Return how many of the model's layers were computed, or could be computed now without waiting for a
        page. Layers that are always computed together are counted together."""
        stop = self.layers
        while stop < config.layers and self.step.arrivals.arrived(stop):
            stop += 1
        while stop in config.joined:
            stop -= 1
        return stop


class Runner(Protocol):
    """An object that computes steps on one device. Used by one thread."""

    @property
    def config(self) -> ModelConfig: ...

    def compute(self, step: Step) -> torch.Tensor:
        """Compute a step. Return logits, float32 ``[len(logit_rows), vocab_size]``, and write the KV of all
        its tokens to its pages. All of this may still be running when the method returns."""

    def advance(self, partial: PartialStep, layers: range) -> torch.Tensor | None:
        """Compute the next ``layers`` of a step. Return the result of :meth:`compute` if the last layer is
        among them, otherwise None. A layer in ``ModelConfig.joined`` must be computed together with the layer
        before it.

        Other steps may be computed in between. A step may be dropped without finishing it.
        """

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int]) -> list[Choice]:
        """Choose a token for each draw. ``rows`` names the row of the last logits for each draw. Only this
        method waits for the device, once for all draws."""

    def wait(self) -> None:
        """Wait until all computing is done."""

    def close(self) -> None:
        """End the processes and threads that the runner has started."""
