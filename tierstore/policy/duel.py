"""The default: follow whichever of two policies does better right now."""

from __future__ import annotations

import math
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
_LATELY = 2  # turnovers, in which a challenger that is behind by …
_TOO_MUCH = 1.0  # … standard deviations (and its share of all hits) has lost, whatever its lead was
_CAUTION = 1.5  # times as long a lead as before is asked for when it has lost …
_FORGIVEN = 4  # … windows, until two thirds of that are forgiven


class _Score:
    """How two caches did, what is past counting less and less. The pages of one prompt are hits or misses
    together: what is independent is prompts."""

    __slots__ = ("_apart", "_found", "ahead")

    def __init__(self) -> None:
        self.ahead = 0.0  # hits of the second more than of the first
        self._found = 0.0  # hits of the first
        self._apart = 0.0  # the squares of the differences: the variance of ``ahead``, at most

    def fade(self, windows: float) -> None:
        """So many windows have gone by: after one, what was before counts for a third."""
        kept = math.exp(-windows)
        self._found *= kept
        self.ahead *= kept
        self._apart *= kept

    def note(self, found: int, more: int) -> None:
        """The first found so many pages of a prompt, and the second so many ``more``."""
        self._found += found
        self.ahead += more
        self._apart += more * more

    def enough(self, deviations: float) -> float:
        """The lead that is more than chance, and worth a change."""
        return max(deviations * math.sqrt(self._apart), _WORTH_IT * self._found)


class Duel(Policy):
    """LRU, unless :class:`Tenure` has lately found more pages. Both run as small shadow caches over a sample
    of the pages. LRU leads while there is doubt, and again at once when the other falls behind: where
    conversations come to their end all at the same time, half a window of waiting cost 3 %. And each time it
    has, it needs a longer lead the next time: every change costs some hits, and five in a row cost 2 %. Hints
    come before either."""

    name = "default"

    def __init__(self) -> None:
        self._leaders: tuple[Policy, Policy] = LRU(), Tenure()
        self._shadows = ShadowCache(LRU()), ShadowCache(Tenure())
        self._led_by = 0
        self._long = _Score()
        self._lately = _Score()
        self._caution = 1.0
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
        found = sum(first)
        more = sum(second) - found
        for score, turnovers in ((self._long, _WINDOW), (self._lately, _LATELY)):
            score.fade(len(pages) / (turnovers * max(room, 16)))
            score.note(found, more)
        forgiven = len(pages) / (_FORGIVEN * _WINDOW * max(room, 16))
        self._caution = 1 + (self._caution - 1) * math.exp(-forgiven)
        leads = self._second_leads()
        if leads != self._led_by:
            self._led_by = int(leads)
            self._caution *= 1 if leads else _CAUTION
            self.switches += 1

    def _second_leads(self) -> bool:
        enough = self._long.enough(_CONFIDENCE) * self._caution
        self._long.ahead = min(self._long.ahead, _MOST_AHEAD * enough)
        if self._lately.ahead < -self._lately.enough(_TOO_MUCH):
            self._long.ahead = min(self._long.ahead, 0.0)
        return self._long.ahead > (0 if self._led_by else enough)

    def _fit(self, capacity: int) -> float:
        """Let the sample be small enough. Returns how many of its pages a tier of ``capacity`` would hold."""
        while (room := capacity * self.watched / FINGERPRINTS) >= _MOST_PAGES + 1:
            self.watched >>= 1
            for shadow in self._shadows:
                shadow.keep_below(self.watched)
        return room
