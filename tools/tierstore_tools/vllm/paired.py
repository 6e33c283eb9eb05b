"""Two ways of doing the same thing, compared pair by pair."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_DEVIATIONS = 1.96  # of a binomial: 95 %


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios with/without over ``pairs`` pairs, and the interval that holds the true median
    with a confidence of about 95 % (by order statistics: nothing is assumed about how the ratios spread)."""

    median: float
    low: float
    high: float
    pairs: int


def ratio(with_it: Sequence[float], without: Sequence[float]) -> Ratio:
    """The two sequences have the same length, at least 1."""
    ratios = sorted(a / b for a, b in zip(with_it, without, strict=True))
    count = len(ratios)
    spread = _DEVIATIONS * math.sqrt(count) / 2
    low = max(math.floor(count / 2 - spread), 0)
    high = min(math.ceil(count / 2 + spread), count - 1)
    return Ratio(statistics.median(ratios), ratios[low], ratios[high], count)
