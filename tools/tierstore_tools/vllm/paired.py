"""Several ways of doing the same thing, compared pair by pair."""

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
    """The median of the ratios with/without over ``pairs`` pairs, and the interval that holds the true one
    with a confidence of about 95 % (by resampling; nothing is assumed about how the ratios spread). Pairs
    come in series, one for each time that everything was started: ``series`` are their medians."""

    median: float
    low: float
    high: float
    pairs: int
    series: tuple[float, ...]


T = TypeVar("T")
Pairs = Sequence[tuple[float, float]]


def ratio(series: Sequence[Pairs]) -> PairedRatio:
    """Each pair is a figure with and the one without. At least one series, and in each at least one pair.

    Two processes of one kind may differ for as long as they live (by where their memory lies, for one), so
    first the series are resampled, and then the pairs in them.
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
