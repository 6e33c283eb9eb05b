"""Which points of a conversation are worth keeping windows and states for. Pure.

If a hit needs every token of a layer group, all its pages are kept. From other groups, a hit needs only the
pages at its end. So these are kept only at *save points*: the ends of prompts and of turns, points where
prompts diverge, and some points in between (:func:`checkpoint_tokens`).

A conversation usually continues at its end. Once it was saved to a later end, an earlier end helps only a
request that returns to about there, and the nearest save point before it would be almost as good. So the
last end of a conversation stays. Among the earlier ends, one stays in each stretch of ``distance`` tokens:
the last in it (:func:`superseded`). Checkpoints are a distance apart and end such stretches, so they stay.

>>> superseded([1000, 3000, 9000], end=12000, distance=8192)
[1000, 9000]
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.groups import GroupRule, Past
from tierstore.spec import KVSpec

_SHARE = 16  # checkpoints take 1/16 of the bytes for keeping all KV
_LEAST_CHUNKS = 16  # between two checkpoints, if there is no KV to compare with


def checkpoint_tokens(spec: KVSpec) -> int:
    """Return the distance between checkpoints, in whole chunks. With this distance, a checkpoint takes 1/16
    of the bytes of all KV between two of them. 0 if hits need every token of every group, so that none is
    needed.

    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (5,), 1, 128), LayerGroup(
    ...     LayerKind.SLIDING_WINDOW, (0, 1, 2, 3, 4), 1, 128, window=1024
    ... )
    >>> checkpoint_tokens(KVSpec((full, window), "bfloat16"))
    13696
    """
    chunk_tokens = spec.chunk_tokens
    kept = every = 0  # bytes of a checkpoint, and of a chunk's KV
    for part in spec.split():
        rule = GroupRule.of(part.groups[0])
        if rule.past is Past.CROSS:  # an input's pages do not belong to a save point
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
    """Return the pages of a group that a hit may need at the end of a chunk."""
    if rule.past is Past.STATE:
        return 1
    return -(-rule.tokens // chunk_tokens)


def superseded(points: Sequence[int], end: int, distance: int) -> list[int]:
    """Return the save points of a conversation that are no longer worth keeping after it was saved up to
    ``end``. All are in tokens. A stretch begins behind a multiple of ``distance`` and ends at the next one.
    With a distance of 0, all earlier points are returned."""
    earlier = sorted({point for point in points if point < end})
    return [
        point
        for point, after in zip(earlier, [*earlier[1:], end], strict=False)
        if not distance or -(-point // distance) == -(-after // distance)
    ]
