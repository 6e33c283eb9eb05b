"""What came of a replay through the tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds to the first token, over all requests."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Waits:
        """Percentiles are waits that occurred (nearest rank); all 0 where there are none."""
        if not seconds:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(seconds)
        ranks = (ordered[max(0, -(-len(ordered) * each // 100) - 1)] for each in _PERCENTILES)
        return cls(sum(ordered) / len(ordered), *ranks)


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Tokens that were not computed, by the tier that had them. ``declined`` were held by a tier that would
    have taken longer than computing them."""

    hbm: int
    host: int
    disk: int
    declined: int


@dataclass(frozen=True, slots=True)
class MovedBytes:
    """Demand loads by way, what the saves wrote, and what prefetching read (and how much of that a request
    then found in the host tier)."""

    host_to_hbm: int
    disk_to_host: int
    hbm_to_host: int
    host_to_disk: int
    not_written: int  # the queue of writes was full
    prefetched: int
    prefetched_used: int


@dataclass(frozen=True, slots=True)
class TieredRow:
    """One line of the result. ``write_amplification`` is bytes written to disk per byte of different pages
    written: what is above 1 was written again after it had been evicted. ``disk_read_per_written`` is what
    came of it: bytes read for requests per byte written."""

    policy: str
    hints: str
    prefetch: bool
    input_tokens: int
    hit_tokens: HitTokens
    moved_bytes: MovedBytes
    write_amplification: float
    disk_read_per_written: float
    ttft: Waits
    recompute_ttft: Waits

    @property
    def hit_rate(self) -> float:
        """Tokens not computed, over all tokens of all prompts."""
        hits = self.hit_tokens
        return (hits.hbm + hits.host + hits.disk) / self.input_tokens if self.input_tokens else 0.0
