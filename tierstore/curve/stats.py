"""The curve as a snapshot: what ``stats`` and the metrics show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A cache of ``capacity_bytes`` that lets the least recently used page go first would have had this hit
    rate: tokens found over tokens asked for. As a rule that is no further off than ``error``: 0 where all
    pages are in the sample and nothing was left out, 1 where it says nothing."""

    capacity_bytes: int
    hit_rate: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class TierWorth:
    """What a tier's capacity is worth: the hit rate of all tiers down to this one, as they are and with more
    room in this one."""

    capacity_bytes: int  # of the largest of these tiers, for a colder tier holds what the faster ones do
    hit_rate: float
    more: tuple[AddedRoom, ...]


@dataclass(frozen=True, slots=True)
class AddedRoom:
    """What ``added_bytes``, a ``share`` of what the tier has, would add to a hit rate."""

    share: float
    added_bytes: int
    added_hit_rate: float


@dataclass(frozen=True, slots=True)
class CurveStats:
    """The estimate. All rates are 0 until something has been asked for."""

    asked_tokens: int = 0  # that it is made of, those of long ago counting less
    sampled: int = 0  # pages and groups of pages that are in the sample
    rate: float = 1.0  # the share of all that they are
    left_out: int = 0  # lookups and saves that came before the sample was thin enough for so many
    measured_hit_rate: float = 0.0  # of the store as it is, since it was opened
    ceiling: float = 0.0  # of a cache as large as the curve looks back
    horizon_bytes: int = 0  # how far that is; 0: without an end
    points: tuple[CurvePoint, ...] = ()
    tiers: Mapping[str, TierWorth] = field(default_factory=dict)
