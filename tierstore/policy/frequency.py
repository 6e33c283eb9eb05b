"""FIFO and LFU: recency and frequency at their simplest, to compare with."""

from __future__ import annotations

import numpy as np

from tierstore.policy.base import Number, PageFacts, Policy

_TICKS = 2.0**40  # more than there will ever be
_MOST_HITS = 4095  # above which pages are equal


class FIFO(Policy):
    """First in, first out. A page before another in a prompt came before it and still stays longer."""

    name = "fifo"

    def score(self, facts: PageFacts) -> Number:
        return facts.arrived


class LFU(Policy):
    """Least frequently used leaves first, among equals the least recently used. In memory tiers uses count
    from when the page came into the tier: what it was before is forgotten, as in the textbook."""

    name = "lfu"

    def score(self, facts: PageFacts) -> Number:
        uses = facts.hits - facts.spent
        if isinstance(uses, int):
            return min(uses, _MOST_HITS) * _TICKS + facts.last_use
        return np.minimum(uses, _MOST_HITS) * _TICKS + facts.last_use
