"""The work of one step: what the scheduler plans, and the batch that the model computes."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from dataclasses import dataclass
from itertools import accumulate

import torch

from tierstore.tiers.hbm import PagePool, arrivals_of
from tierstore_engine.attention.base import Span
from tierstore_engine.sequence import Sequence
from tierstore_engine.step import SeenInputs, Step, StepImages, StepInputs
from tierstore_engine.tables import CrossTable


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the tokens ``start … stop`` of ``sequence``, and the tokens of ``draft`` after its newest one.
    Only drafted tokens that the model chooses itself are accepted. The last ``guessed`` tokens up to ``stop``
    are drafted, too. Recurrent states are stored as they were before all drafted tokens."""

    sequence: Sequence
    start: int
    stop: int
    draft: tuple[int, ...] = ()
    guessed: int = 0

    @property
    def tokens(self) -> int:
        """Return how many rows of the batch this work needs."""
        return self.stop - self.start + len(self.draft)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. It has a ``batch``, and ``beside`` has the separate work of each sequence whose pages are
    still arriving, for the layers that have arrived. If the batch is empty, all layers of that work are
    computed."""

    batch: list[Work]
    beside: list[Work]

    def __bool__(self) -> bool:
        return bool(self.batch or self.beside)


def finishing(work: Ints[Work]) -> list[Work]:
    """Return the work that includes the newest token of its sequence, and therefore yields the next token."""
    return [item for item in work if item.stop == len(item.sequence.tokens)]


def build_step(work: Ints[Work], pools: Ints[PagePool]) -> Step:
    """Return the batch of ``work`` (not empty) over pages of ``pools``, one for each layer group, flattened
    in order. Logits are computed for each of :func:`finishing`: for its newest token and each token of its
    draft."""
    arriving = [tables_of(item.sequence) for item in work if item.sequence.arriving]
    ends = accumulate(item.tokens for item in work)
    rows = [
        row
        for item, end in zip(work, ends, strict=True)
        if item.stop == len(item.sequence.tokens)
        for row in range(end - 1 - len(item.draft), end)
    ]
    return Step(
        spans=tuple(
            Span(
                tables_of(item.sequence),
                item.start,
                item.start + item.tokens,
                drafted=item.guessed + len(item.draft),
                mutual=item.sequence.images.mutual(item.start, item.stop) if item.sequence.images else (),
            )
            for item in work
        ),
        tokens=[
            token for item in work for token in (*item.sequence.tokens[item.start : item.stop], *item.draft)
        ],
        logit_rows=rows,
        arrivals=arrivals_of(
            pools, [[page for tables in arriving for page in tables[group]] for group in range(len(pools))]
        ),
        chunk_tokens=pools[0].spec.chunk_tokens,
        adapters=tuple(item.sequence.adapter for item in work),
        images=_images_of(work) if any(item.sequence.images for item in work) else None,
        inputs=_inputs_of(work) if any(item.sequence.images for item in work) else None,
    )


def _inputs_of(work: Ints[Work]) -> StepInputs | None:
    """Return the images that cross-attention layers read for the rows of a step; None if no row sees any."""
    sights, new, first = list[SeenInputs](), list[tuple[Ints[int], torch.Tensor]](), 0
    for item in work:
        images = item.sequence.images
        table = next((each for each in item.sequence.tables if isinstance(each, CrossTable)), None)
        if images is not None and table is not None:
            shift, inputs = first - item.start, images.inputs
            for number in table.missing(item.stop):
                new.append((table.pages_of(number), images.embedding(number)))
            for tokens, numbers in images.seen(item.start, item.start + item.tokens):
                seen = tuple((table.pages_of(each), inputs[each].rows) for each in numbers)
                sights.append(SeenInputs(range(tokens.start + shift, tokens.stop + shift), seen))
        first += item.tokens
    return StepInputs(tuple(sights), tuple(new)) if sights else None


def _images_of(work: Ints[Work]) -> StepImages:
    """Return the embeddings and positions of all images in the rows of a step."""
    rows, embeddings, positions = list[int](), list[torch.Tensor](), list[torch.Tensor]()
    first, on_axes = 0, False
    for item in work:
        images, stop = item.sequence.images, item.start + item.tokens
        placed = None if images is None else images.positions(item.start, stop)
        on_axes = on_axes or placed is not None
        text = torch.arange(item.start, stop)[:, None].expand(-1, 3)
        positions.append(text if placed is None else placed)
        for start, embedding in () if images is None else images.rows(item.start, item.stop):
            at = first + start - item.start
            rows += range(at, at + len(embedding))
            embeddings.append(embedding)
        first += item.tokens
    return StepImages(
        rows, torch.cat(embeddings) if embeddings else None, torch.cat(positions) if on_axes else None
    )


def tables_of(sequence: Sequence) -> tuple[Ints[int], ...]:
    """Return a sequence's pages by layer group."""
    return tuple(table.pages for table in sequence.tables)
