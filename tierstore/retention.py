"""Decide at which tokens of a conversation windows and states are kept. Pure.

A hit needs every page of some layer groups, and all of these pages are kept. In other groups, a hit needs
only the pages at its end. These groups keep pages only at *save points*: the ends of prompts and of turns,
tokens at which prompts diverge, and some tokens in between (:func:`checkpoint_tokens`).

A conversation usually continues at its end, so its last save point is kept. An earlier save point helps only
a request that returns to about its token. The nearest save point before that token is almost as good. So each
stretch of ``distance`` tokens keeps only its last save point (:func:`superseded`). Checkpoints lie at the
ends of these stretches, so they are kept.

>>> superseded([1000, 3000, 9000], end=12000, distance=8192)
[1000, 9000]
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.groups import GroupRule, Past
from tierstore.spec import KVSpec

_SHARE = 16  # checkpoints take 1/16 of the bytes of all KV
_LEAST_CHUNKS = 16  # chunks between two checkpoints in a model without KV, which has only states


def checkpoint_tokens(spec: KVSpec) -> int:
    """Return the distance in tokens between checkpoints, a whole number of chunks. With this distance, a
    checkpoint takes 1/16 of the bytes of all KV between two checkpoints. Return 0 if hits need every token of
    every group, so that no checkpoints are needed.

    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (5,), 1, 128), LayerGroup(
    ...     LayerKind.SLIDING_WINDOW, (0, 1, 2, 3, 4), 1, 128, window=1024
    ... )
    >>> checkpoint_tokens(KVSpec((full, window), "bfloat16"))
    13696
    """
    chunk_tokens = spec.chunk_tokens
    kept = every = 0  # bytes of one checkpoint, and of the KV of one chunk
    for part in spec.split():
        rule = GroupRule.of(part.groups[0])
        if rule.past is Past.CROSS:  # pages of an input belong to no save point
            continue
        if rule.past is not Past.STATE:
            every += part.page_bytes
        if rule.past is not Past.ALL:
            kept += _most_pages(rule, chunk_tokens) * part.page_bytes
    if not kept:
        return 0
    chunks = -(-_SHARE * kept // every) if every else _LEAST_CHUNKS
    return chunks * chunk_tokens


def _most_pages(rule: GroupRule, chunk_tokens: int) -> int:
    """Return the largest number of a group's pages that a hit can need at the end of a chunk."""
    if rule.past is Past.STATE:
        return 1
    return -(-rule.tokens // chunk_tokens)


def superseded(points: Sequence[int], end: int, distance: int) -> list[int]:
    """Return the save points of a conversation that are not worth keeping after it was saved up to token
    ``end``. A stretch begins behind a multiple of ``distance`` tokens and ends at the next multiple. With a
    distance of 0, all earlier save points are returned."""
    earlier = sorted({point for point in points if point < end})
    return [
        point
        for point, after in zip(earlier, [*earlier[1:], end], strict=False)
        if not distance or -(-point // distance) == -(-after // distance)
    ]
