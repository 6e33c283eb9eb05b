"""Compare two variants pair by pair."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedRatio:
    """The median of the ratios with/without over ``pairs`` pairs, and its interval of 95 % confidence (by
    resampling; no distribution is assumed). Pairs come in series, one per start of all processes: ``series``
    are the medians of each."""

    median: float
    low: float
    high: float
    pairs: int
    series: tuple[float, ...]


T = TypeVar("T")
Pairs = Sequence[tuple[float, float]]


def ratio(series: Sequence[Pairs]) -> PairedRatio:
    """Return the ratio over all pairs (with, without). There is at least one series, and each has at least
    one pair.

    Two processes of one kind may differ for their whole life, for example by the place of their memory. The
    confidence interval therefore comes from resampling the series first, and then the pairs in each.
    """
    ratios = [[mine / without for mine, without in each] for each in series]
    chance = random.Random(0)
    medians = sorted(
        statistics.median([value for each in _drawn(chance, ratios) for value in _drawn(chance, each)])
        for _ in range(_RESAMPLES)
    )
    beyond = round(_RESAMPLES * (1 - _CONFIDENCE) / 2)
    everything = [value for each in ratios for value in each]
    median = statistics.median(everything)
    return PairedRatio(
        median,
        min(medians[beyond], median),
        max(medians[-1 - beyond], median),
        len(everything),
        tuple(map(statistics.median, ratios)),
    )


def _drawn(chance: random.Random, values: Sequence[T]) -> list[T]:
    return chance.choices(values, k=len(values))
