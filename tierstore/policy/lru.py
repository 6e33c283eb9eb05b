"""Least recently used."""

from __future__ import annotations

from tierstore.policy.base import Number, PageFacts, Policy


class LRU(Policy):
    """Least recently used leaves first: the baseline every other policy has to beat on a published trace."""

    name = "lru"

    def score(self, facts: PageFacts) -> Number:
        return facts.last_use
