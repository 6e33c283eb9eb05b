"""Which page leaves a full tier next. Policies are small pure classes over the facts of a page.

The index offers a policy only pages that *may* leave (ready, no lease, no child in the tier); the policy
says in which order. One instance serves one tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What a policy may know of a page."""

    nbytes: int
    depth: int  # pages before it in its prompt
    last_use: int  # the store's logical clock: one tick per lookup or save
    hits: int


class Policy(ABC):
    """Orders the pages of one tier for eviction and may refuse newcomers."""

    name: str

    def admit(self, facts: PageFacts) -> bool:
        """Whether a page is worth a place in this tier at all."""
        return True

    @abstractmethod
    def score(self, facts: PageFacts) -> float:
        """The worth of keeping a page: the lowest leaves first. It may only grow with use."""


class LRU(Policy):
    """Least recently used leaves first: the baseline every other policy has to beat on a published trace."""

    name = "lru"

    def score(self, facts: PageFacts) -> float:
        return facts.last_use


POLICIES: dict[str, type[Policy]] = {LRU.name: LRU}
