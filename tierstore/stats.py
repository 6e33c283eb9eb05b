"""Statistics of a store: frozen snapshots, and the counters behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tierstore.core.health import TierHealth
from tierstore.curve import CurveStats

DECLINED = frozenset(f"{tier} {why}" for tier in ("host", "disk") for why in ("slower", "late"))
"""The reasons for declined tokens, by tier."""


@dataclass(slots=True)
class Counters:
    """All counters since the store was opened. Guarded by the state's lock."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"hbm": 0, "host": 0, "disk": 0})
    declined_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens found but not loaded, by tier and reason: ``disk slower`` (than computing, by the plan),
    ``disk late`` (the load was cut off at its deadline)."""
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens requested and not served, by :class:`~tierstore.explanation.MissReason`. Lookups have found the
    tokens of ``declined``. All others together are ``lookup_tokens`` minus ``hit_tokens``."""
    expired_leases: int = 0
    loaded_pages: int = 0
    loads_cut_short: int = 0  # fewer pages arrived than the hit promised
    saved_pages: int = 0  # copied into the host tier
    torn_pages: int = 0  # received over TCP, but did not match the sender's checksum: not stored
    already_stored_pages: int = 0
    not_stored_pages: int = 0  # no room in the host tier, or the copy failed
    disk_written_pages: int = 0
    disk_encoded_pages: int = 0  # those that a codec has encoded
    disk_saved_bytes: int = 0  # disk space saved by encoding
    disk_read_pages: int = 0
    disk_dropped_pages: int = 0  # not written: evicted before its turn, no room, or parent not on disk
    # not written: computing is faster than reading them, or the budget is used up
    disk_declined_pages: int = 0
    disk_write_errors: int = 0  # batches and probes that the disk refused
    # batches and lookups that could not be read completely: pages are kept, but a miss for now
    disk_read_errors: int = 0
    disk_slow_lookups: int = 0  # lookups that used only memory, because the index was not read in time
    disk_stalls: int = 0  # calls to the disk that did not return for too long
    disk_read_only_s: float = 0.0  # seconds without writes to the disk
    disk_offline_s: float = 0.0  # seconds without reads from the disk
    unpinned_arenas: int = 0  # refused by the device's driver: loads from them use plain copies
    disk_lost_pages: int = 0  # at open with another capacity: unreadable, or behind such a page
    damaged_pages: int = 0  # checksum mismatch or truncated: the disk has other bytes than were saved
    evicted_pages: dict[str, int] = field(default_factory=lambda: {"hbm": 0, "host": 0, "disk": 0})

    def decline(self, tokens: Mapping[str, int]) -> None:
        """Add declined tokens."""
        for why, count in tokens.items():
            self.declined_tokens[why] = self.declined_tokens.get(why, 0) + count


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Bytes are those of allocated slots, which count against the capacity."""

    capacity_bytes: int
    used_bytes: int
    pages: int
    leased_pages: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store. ``counters`` are totals since it was opened; see :class:`Counters`."""

    tiers: Mapping[str, TierStats]
    pages: int  # distinct pages in any tier
    key_collisions: int
    open_hits: int
    pending_saves: int  # pages on their way into the host tier
    pending_writes: int  # pages on their way to disk
    disk_writable: bool
    health: Mapping[str, TierHealth]  # health of the tiers that can fail
    health_line: str  # the health for people; empty without such a tier
    failed_tasks: int
    counters: Mapping[str, int | float | Mapping[str, int]]
    curve: CurveStats = field(default_factory=CurveStats)  # what more memory would be worth
    missed_last_hour: Mapping[str, int] = field(default_factory=dict)  # like ``counters.missed_tokens``

    @property
    def missed_rows(self) -> tuple[tuple[str, str, str], ...]:
        """The missed tokens of the last hour as rows for people: reason, tokens, and share of all."""
        total = sum(self.missed_last_hour.values())
        return tuple(
            (reason.replace("_", " "), f"{tokens:,}", f"{100 * tokens / total:.1f} %")
            for reason, tokens in self.missed_last_hour.items()
        )


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """The shared store, through which hosts exchange pages. ``counts`` are since the start: pages and bytes
    fetched and published, pages ``damaged``, ``refused`` (no room there) and ``dropped`` (too many to
    publish), lookups, late ones, agents that ended, and agents that were killed. With an object store also
    bundles whose heads were read, and objects ``damaged``, ``deleted`` (for their room) and ``expired``."""

    url: str
    online: bool
    trouble: str  # the present problem; empty without one
    transport: str
    bytes_per_s: float  # recent rate
    counts: dict[str, int]

    @property
    def line(self) -> str:
        """The state in one line, for people."""
        state = "online" if self.online else "offline"
        return f"cluster {self.url}: {state}{f' ({self.trouble})' if self.trouble else ''}"


_IN = {"host": ("saved_pages", "disk_read_pages"), "disk": ("disk_written_pages",)}
_OUT = {"host": ("loaded_pages",), "disk": ("disk_read_pages",)}


class StoreRates:
    """Rates between two snapshots of a store, per second. Without ``before``: since it was opened.

    Counters count pages. So bytes per second are pages per second times the mean size of the pages in the
    tier now.
    """

    def __init__(self, now: StoreStats, before: StoreStats | None, seconds: float) -> None:
        self._now = now
        self._before = before
        self._seconds = max(seconds, 1e-9)

    @property
    def tiers(self) -> Iterable[str]:
        return self._now.tiers.keys()

    def of(self, name: str) -> float:
        """Return the rate of a counter."""
        new, old = self._pair(name)
        assert not isinstance(new, Mapping)
        assert not isinstance(old, Mapping)
        return (new - old) / self._seconds

    def by_tier(self, name: str) -> dict[str, float]:
        """Return the rates of a counter that is kept by tier."""
        new, old = self._pair(name)
        assert isinstance(new, Mapping)
        before = old if isinstance(old, Mapping) else {}
        return {tier: (count - before.get(tier, 0)) / self._seconds for tier, count in new.items()}

    @property
    def hit_rate(self) -> float | None:
        """Tokens found over tokens requested; None if none were requested."""
        asked = self.of("lookup_tokens")
        return sum(self.by_tier("hit_tokens").values()) / asked if asked else None

    def gb_per_s_in(self, tier: str) -> float:
        return self._gb_per_s(tier, _IN.get(tier, ()))

    def gb_per_s_out(self, tier: str) -> float:
        return self._gb_per_s(tier, _OUT.get(tier, ()))

    def _gb_per_s(self, tier: str, names: tuple[str, ...]) -> float:
        stats = self._now.tiers[tier]
        page_bytes = stats.used_bytes / stats.pages if stats.pages else 0.0
        return sum(map(self.of, names)) * page_bytes / 1e9

    def _pair(self, name: str) -> tuple[int | float | Mapping[str, int], int | float | Mapping[str, int]]:
        return self._now.counters[name], self._before.counters[name] if self._before is not None else 0
