"""Which page leaves a full tier next. Policies are small pure classes over the facts of a page.

The store offers a policy only pages that *may* leave (ready, no lease, no child in the tier); the policy
says in which order. One instance serves one tier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Number: TypeAlias = "int | float | npt.NDArray[np.generic]"


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What a policy may know of a page, or of many: then each field is an array, all of one length. (A disk
    holds millions of pages, which are scored in one stroke.)"""

    nbytes: Number
    depth: Number  # pages before it in its prompt
    last_use: Number  # the store's logical clock: one tick per lookup or save
    hits: Number


class Policy(ABC):
    """Orders the pages of one tier for eviction and may refuse newcomers."""

    name: str

    def admit(self, facts: PageFacts) -> bool:
        """Whether a page is worth a place in this tier at all."""
        return True

    @abstractmethod
    def score(self, facts: PageFacts) -> Number:
        """The worth of keeping a page (of each page): the lowest leaves first. It may only grow with use."""


class LRU(Policy):
    """Least recently used leaves first: the baseline every other policy has to beat on a published trace."""

    name = "lru"

    def score(self, facts: PageFacts) -> Number:
        return facts.last_use


POLICIES: dict[str, type[Policy]] = {LRU.name: LRU}
