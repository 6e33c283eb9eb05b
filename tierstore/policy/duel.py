"""The default: follow whichever of two policies does better right now."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.policy.base import Number, PageFacts, Policy
from tierstore.policy.departed import FINGERPRINTS, MOST_WATCHED
from tierstore.policy.hinted import band
from tierstore.policy.lru import LRU
from tierstore.policy.shadow import ShadowCache
from tierstore.policy.tenure import Tenure

_MOST_PAGES = 512  # in the sample
_WINDOW = 16  # turnovers of a shadow cache, after which what it said counts for a third
_CONFIDENCE = 1.5  # standard deviations by which the challenger has to lead …
_WORTH_IT = 1 / 50  # … and the share of all hits: what a change costs may be as much
_MOST_AHEAD = 2.0  # times that: a longer lead would be followed for long after it is over


class Duel(Policy):
    """LRU, unless :class:`Tenure` has lately found more pages. Both run as small shadow caches over a sample
    of the pages. LRU leads while there is doubt. Hints come before either."""

    name = "default"

    def __init__(self) -> None:
        self._leaders: tuple[Policy, Policy] = LRU(), Tenure()
        self._shadows = ShadowCache(LRU()), ShadowCache(Tenure())
        self._led_by = 0
        self._ahead = 0.0  # hits of the second more than of the first
        self._found = 0.0  # hits of the first
        self._apart = 0.0  # the squares of the differences: the variance of ``_ahead``, at most
        self.watched = MOST_WATCHED

    @property
    def leader(self) -> Policy:
        """Whose order pages leave in now."""
        return self._leaders[self._led_by]

    def score(self, facts: PageFacts) -> Number:
        return band(facts) + self._leaders[self._led_by].score(facts)

    def leaves(self, facts: PageFacts, score: float, tick: int) -> None:
        for policy in self._leaders:
            policy.leaves(facts, score, tick)

    def accessed(self, pages: Sequence[int], capacity: int) -> None:
        if not pages:
            return
        room = self._fit(capacity)
        first, second = (shadow.access(pages, room) for shadow in self._shadows)
        # The pages of one prompt are hits or misses together: what is independent is prompts.
        kept = (1 - 1 / (_WINDOW * max(room, 16))) ** len(pages)
        found = sum(first)
        more = sum(second) - found
        self._found = self._found * kept + found
        self._ahead = self._ahead * kept + more
        self._apart = self._apart * kept + more * more
        enough = max(_CONFIDENCE * self._apart**0.5, _WORTH_IT * self._found)
        self._ahead = min(self._ahead, _MOST_AHEAD * enough)
        leads = self._ahead > (0 if self._led_by else enough)
        if leads != self._led_by:
            self._led_by = int(leads)
            self.switches += 1

    def _fit(self, capacity: int) -> float:
        """Let the sample be small enough. Returns how many of its pages a tier of ``capacity`` would hold."""
        while (room := capacity * self.watched / FINGERPRINTS) >= _MOST_PAGES + 1:
            self.watched >>= 1
            for shadow in self._shadows:
                shadow.keep_below(self.watched)
        return room
