"""Greedy-dual size frequency: pages that are dear to compute stay longer."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from tierstore.policy.base import Number, PageFacts, Policy

_MOST_STEPS = 1024
_MIB = float(1 << 20)


class GDSF(Policy):
    """Worth is the clock at a page's last use plus uses × cost of computing it ÷ bytes; the clock is the
    worth of what last left, so what is not used becomes worthless in time.

    Cost is the time to compute a page again with all before it at hand: constant for the weights, and growing
    with depth for attention, which is as dear as the rest after ``doubling_depth`` pages (for 64-token pages
    of an 8-billion-parameter model, half a thousand)."""

    name = "gdsf"

    def __init__(self, doubling_depth: float = 512.0) -> None:
        self._doubling_depth = doubling_depth
        # The clock over time, so that nothing has to be kept for each page: in steps of (first tick, clock).
        self._ticks = [0]
        self._clocks = [0.0]

    def score(self, facts: PageFacts) -> Number:
        cost = 1 + facts.depth / self._doubling_depth
        return self._clock_at(facts.last_use) + (facts.hits + 1) * cost / (facts.nbytes / _MIB)

    def leaves(self, facts: PageFacts, score: float, tick: int) -> None:
        if score <= self._clocks[-1]:
            return
        if tick > self._ticks[-1]:
            self._ticks.append(tick)
            self._clocks.append(score)
        else:
            self._clocks[-1] = score
        if len(self._ticks) > _MOST_STEPS:  # coarser in the past: every other step goes, never the first
            del self._ticks[1:-1:2], self._clocks[1:-1:2]

    def _clock_at(self, tick: Number) -> Number:
        if isinstance(tick, int):
            return self._clocks[bisect_right(self._ticks, tick) - 1]
        return np.asarray(self._clocks)[np.searchsorted(self._ticks, tick, "right") - 1]
