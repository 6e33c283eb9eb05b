"""Build one step from planned work."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from itertools import accumulate

from tierstore.tiers.hbm import PagePool, arrivals_of
from tierstore_engine.attention.base import Span
from tierstore_engine.scheduler import Work
from tierstore_engine.sequence import Sequence
from tierstore_engine.step import Step


def finishing(work: Ints[Work]) -> list[Work]:
    """Return the work that ends at its sequence's newest token, and so yields the next one."""
    return [item for item in work if item.stop == len(item.sequence.tokens)]


def build_step(work: Ints[Work], pools: Ints[PagePool]) -> Step:
    """Return the batch of ``work`` (not empty) over pages of ``pools``, one for each layer group, flattened
    in order. Logits are computed for each of :func:`finishing`: for its newest token and each token of its
    draft."""
    arriving = [_tables(item.sequence) for item in work if item.sequence.arriving]
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
        arrivals=arrivals_of(
            pools, [[page for tables in arriving for page in tables[group]] for group in range(len(pools))]
        ),
        chunk_tokens=pools[0].spec.chunk_tokens,
    )


def _tables(sequence: Sequence) -> tuple[Ints[int], ...]:
    """Return a sequence's pages by layer group."""
    return tuple(table.pages for table in sequence.tables)
