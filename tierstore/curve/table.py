"""Which points of the curve are worth showing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierstore.curve.stats import AddedRoom, CurvePoint, TierWorth
from tierstore.units import GIB

HORIZON = 32  # times the largest tier, that a store's curve looks back
_SMALLER, _LARGER = 6, 5  # octaves below and above the largest tier that points are given for
_ADDED = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)  # of a tier's capacity

HitRate = Callable[[float], float]


def points(hit_rate: HitRate, error: HitRate, tiers: Mapping[str, int]) -> tuple[CurvePoint, ...]:
    """The curve, and its error, around the capacities of ``tiers``, with a point for each of them."""
    largest = max(tiers.values(), default=0) or GIB
    capacities = {largest >> step for step in range(1, _SMALLER + 1)}
    capacities |= {largest << step for step in range(_LARGER + 1)}
    capacities |= {capacity for capacity in tiers.values() if capacity}
    return tuple(
        CurvePoint(capacity, hit_rate(capacity), error(capacity))
        for capacity in sorted(capacities)
        if capacity
    )


def worth(hit_rate: HitRate, tiers: Mapping[str, int]) -> dict[str, TierWorth]:
    """What each of ``tiers`` (name → capacity in bytes, fastest first) adds, and would add with more room."""
    found = {}
    faster = 0
    for name, capacity in tiers.items():
        largest = max(capacity, faster)
        now = hit_rate(largest)
        more = []
        for share in _ADDED:
            added = int(capacity * share)
            then = hit_rate(max(capacity + added, faster))
            more.append(AddedRoom(share, added, max(then - now, 0.0)))  # sums of fractions: not quite now
        found[name] = TierWorth(largest, now, tuple(more))
        faster = largest
    return found
