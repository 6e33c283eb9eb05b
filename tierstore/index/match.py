"""What a lookup finds in the tree, and where the pages of it are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.index.page import Page, Tier
from tierstore.keys import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The longest held prefix. ``pages`` in prefix order; of the last one ``tail_tokens`` tokens match, which
    is fewer than it holds when the prompts part inside its chunk. ``runs`` are the tiers of the pages at that
    moment (see :func:`tier_runs`)."""

    pages: tuple[Page, ...]
    tokens: int
    tail_tokens: int
    runs: Sequence[tuple[Tier, int]] = ()


def tier_runs(pages: Sequence[Page]) -> list[tuple[Tier, int]]:
    """The fastest tier of each page, as (tier, end of the run), up to the first without a complete copy."""
    if not pages:
        return []
    for page in pages:  # mostly, all of a prompt is in the host tier: that takes a quarter of the time
        hbm, host, _ = page.copies
        if hbm is not None or host is None or not host.ready:
            break
    else:
        return [(Tier.HOST, len(pages))]
    runs: list[tuple[Tier, int]] = []
    last: Tier | None = None
    for position, page in enumerate(pages):
        tier = page.ready_tier()
        if tier is not last:
            if last is not None:
                runs.append((last, position))
            last = tier
        if tier is None:
            return runs
    return [*runs, (last, len(pages))] if last is not None else runs


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two token strings share."""
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter // TOKEN_BYTES
    low, high = TOKEN_BYTES, shorter  # equal up to low, unequal up to high
    while high - low > TOKEN_BYTES:
        middle = (low + high) // (2 * TOKEN_BYTES) * TOKEN_BYTES
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle)
    return low // TOKEN_BYTES
