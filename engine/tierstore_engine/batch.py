"""From planned work to one step."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from itertools import accumulate

from tierstore.tiers.hbm import PagePool
from tierstore_engine.attention.base import Span
from tierstore_engine.scheduler import Work
from tierstore_engine.sequence import Sequence
from tierstore_engine.step import Step


def finishing(work: Ints[Work]) -> list[Work]:
    """The work that ends at its sequence's newest token, and so yields the next one."""
    return [item for item in work if item.stop == len(item.sequence.tokens)]


def build_step(work: Ints[Work], pool: PagePool) -> Step:
    """The batch of ``work`` (not empty) over pages of ``pool``, flattened in its order; logits for each of
    :func:`finishing`, of its newest token and of each token of its draft."""
    ends = accumulate(item.tokens for item in work)
    rows = [
        row
        for item, end in zip(work, ends, strict=True)
        if item.stop == len(item.sequence.tokens)
        for row in range(end - 1 - len(item.draft), end)
    ]
    return Step(
        spans=tuple(Span(_tables(item.sequence), item.start, item.start + item.tokens) for item in work),
        tokens=[
            token for item in work for token in (*item.sequence.tokens[item.start : item.stop], *item.draft)
        ],
        logit_rows=rows,
        arrivals=pool.arrivals(
            page for item in work if item.sequence.arriving for page in item.sequence.pages
        ),
        chunk_tokens=pool.spec.chunk_tokens,
    )


def _tables(sequence: Sequence) -> tuple[Ints[int], ...]:
    """A sequence's pages by layer group."""
    return (sequence.pages, *(side.pages for side in sequence.sides))
