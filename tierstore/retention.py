"""Which places of a conversation are worth keeping windows and states for. Pure.

Of a layer group of which a hit needs every token, all pages are kept. Of the others a hit needs those at its
end, so they are kept at *save points* only: the ends of prompts and of turns, where prompts part, and now
and then on the way (:func:`checkpoint_tokens`).

A conversation is gone on with at its end. Once it has been saved to a later end, the earlier one is of use to
whoever goes back to about there, and the nearest save point before it would nearly do. So of the ends of one
conversation the last one stays, and of those before it one in each stretch of ``distance`` tokens: the last
that lies in it (:func:`superseded`). Checkpoints are a distance apart and end such stretches, so they stay.

>>> superseded([1000, 3000, 9000], end=12000, distance=8192)
[1000, 9000]
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.groups import GroupRule, Past
from tierstore.spec import KVSpec

_SHARE = 16  # checkpoints take one part of so many of what keeping all KV takes
_LEAST_CHUNKS = 16  # between two checkpoints, where there is no KV to compare with


def checkpoint_tokens(spec: KVSpec) -> int:
    """How far apart checkpoints are, in whole chunks: so far that they take a sixteenth of the bytes that the
    KV of all tokens in between takes. 0 where hits need every token of every group, and none is needed.

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
        if rule.past is not Past.STATE:
            every += part.page_bytes
        if rule.past is not Past.ALL:
            kept += _most_pages(rule, chunk_tokens) * part.page_bytes
    if not kept:
        return 0
    chunks = -(-_SHARE * kept // every) if every else _LEAST_CHUNKS
    return chunks * chunk_tokens


def _most_pages(rule: GroupRule, chunk_tokens: int) -> int:
    """Of a group that a hit may need, where it ends at a chunk's end."""
    if rule.past is Past.STATE:
        return 1
    return -(-rule.tokens // chunk_tokens)


def superseded(points: Sequence[int], end: int, distance: int) -> list[int]:
    """Those save points of a conversation that are not worth keeping since it has been saved up to ``end``:
    all in tokens. A stretch begins behind a multiple of ``distance`` and ends at the next one. With a
    distance of 0, all earlier ones go."""
    earlier = sorted({point for point in points if point < end})
    return [
        point
        for point, after in zip(earlier, [*earlier[1:], end], strict=False)
        if not distance or -(-point // distance) == -(-after // distance)
    ]
