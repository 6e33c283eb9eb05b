"""Policies in which pages stand in two lines: S3-FIFO, SIEVE and 2Q.

Made for caches whose entries do not depend on each other. Here an entry can only leave after those behind it
in its prompts. So the line's first page is the first *that may leave*: pages with others behind them are
passed over and keep their place, and are first in line once nothing is behind them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierstore.policy.base import Number, PageFacts, Policy

_APART = 2.0**40


class _OnTrial(Policy):
    """New pages stand in a line of their own, first in first out, with a share of the tier. Pages that are
    remembered from earlier skip it."""

    segments = 2
    share: float

    def segment(self, facts: PageFacts) -> int:
        return int(facts.hits > 0)

    def turn(self, sizes: Sequence[int]) -> int:
        return int(sizes[0] <= self.share * sum(sizes))

    def rank(self, facts: PageFacts) -> Number:
        """As many of the oldest pages without hits as are too many leave first, then those with hits, least
        recently used first."""
        arrived, last_use, segment = (
            np.asarray(each, np.float64) for each in (facts.arrived, facts.last_use, facts.segment)
        )
        trial = np.flatnonzero(segment == 0)
        worth = last_use
        worth[trial] = arrived[trial] + _APART
        over = int(len(trial) - self.share * len(worth))
        if over > 0:
            oldest: npt.NDArray[np.intp] = trial[np.argpartition(arrived[trial], over - 1)[:over]]
            worth[oldest] -= 2 * _APART
        return worth


class S3FIFO(_OnTrial):
    """A tenth of the tier for pages on trial. At its end a page that was used twice moves to the main line,
    in which every use lets a page go round once more (three at most).

    On disk, where pages do not stand in line, the main line is least recently used first."""

    name = "s3fifo"
    share = 0.1
    spared_go_last = True

    def score(self, facts: PageFacts) -> Number:
        return facts.arrived

    def spare(self, facts: PageFacts) -> tuple[int, int] | None:
        uses = int(min(facts.hits - facts.spent, 3))
        if facts.segment:
            return (1, int(facts.hits) - uses + 1) if uses > 0 else None
        return (1, int(facts.hits)) if uses > 1 else None


class TwoQ(_OnTrial):
    """A quarter of the tier for pages on trial, however often they are used there. A page that comes back
    after its trial is kept as long as it is among the most recently used."""

    name = "2q"
    share = 0.25

    def score(self, facts: PageFacts) -> Number:
        return facts.last_use if facts.segment else facts.arrived


class Sieve(Policy):
    """A hand goes over the pages in the order of their arrival; a page that was used since it last came by
    stays where it is, any other leaves. The two lines are those that the hand has before it in this round,
    and those that it has passed.

    There is no hand on disk: there it is LRU."""

    name = "sieve"
    segments = 2

    def __init__(self) -> None:
        self._round = 0

    def score(self, facts: PageFacts) -> Number:
        return facts.arrived

    def rank(self, facts: PageFacts) -> Number:
        return facts.last_use

    def segment(self, facts: PageFacts) -> int:
        return self._round

    def turn(self, sizes: Sequence[int]) -> int:
        return self._round

    def spare(self, facts: PageFacts) -> tuple[int, int] | None:
        self._round = int(facts.segment)  # the other one, when nobody was left in this round's line
        return (1 - self._round, int(facts.hits)) if facts.hits > facts.spent else None
