"""Statistics of a store: frozen snapshots, and the counters behind them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tierstore.core.health import TierHealth
from tierstore.curve import CurveStats

DECLINED = frozenset(f"{tier} {why}" for tier in ("host", "disk") for why in ("slower", "late"))
"""The keys of ``Counters.declined_tokens``: a tier and a reason."""


@dataclass(slots=True)
class Counters:
    """All counters since the store was opened. The state's lock protects them."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=lambda: {"hbm": 0, "host": 0, "disk": 0})
    declined_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens found but not loaded, by tier and reason. ``disk slower``: the planner expected computing to be
    faster than the disk. ``disk late``: the load reached its deadline."""
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens requested and not served, by :class:`~tierstore.explanation.MissReason`. Tokens with the reason
    ``declined`` count as hits of lookups. All other missed tokens together are ``lookup_tokens`` minus
    ``hit_tokens``."""
    expired_leases: int = 0
    loaded_pages: int = 0
    loads_cut_short: int = 0  # loads with fewer pages than their hit
    saved_pages: int = 0  # pages copied into the host tier
    torn_pages: int = 0  # pages received over TCP and not stored, because their checksum did not match
    already_stored_pages: int = 0
    not_stored_pages: int = 0  # pages without room in the host tier, or with a failed copy
    disk_written_pages: int = 0
    disk_encoded_pages: int = 0  # pages written to disk in the encoding of a codec
    disk_saved_bytes: int = 0  # disk space saved by encoding
    disk_read_pages: int = 0
    # pages not written to disk because they were evicted first, found no room, or have no parent on disk
    disk_dropped_pages: int = 0
    # pages not written to disk because computing them is faster, or because the write budget was used up
    disk_declined_pages: int = 0
    disk_write_errors: int = 0  # batches and probes that the disk failed to write
    disk_read_errors: int = 0  # batches and lookups with pages that the disk failed to read, and still keeps
    disk_slow_lookups: int = 0  # lookups that used only memory, because reading the index took too long
    disk_stalls: int = 0  # calls to the disk that took longer than ``stall_s``
    disk_read_only_s: float = 0.0  # seconds without writes to the disk
    disk_offline_s: float = 0.0  # seconds without reads from the disk
    unpinned_arenas: int = 0  # arenas that a device's driver did not pin, so loads from them are slower
    # pages that could not be read when the disk tier was opened with another capacity, and pages behind them
    disk_lost_pages: int = 0
    damaged_pages: int = 0  # pages that the disk returned truncated or with a wrong checksum
    evicted_pages: dict[str, int] = field(default_factory=lambda: {"hbm": 0, "host": 0, "disk": 0})

    def decline(self, tokens: Mapping[str, int]) -> None:
        """Add to the declined tokens."""
        for why, count in tokens.items():
            self.declined_tokens[why] = self.declined_tokens.get(why, 0) + count


@dataclass(frozen=True, slots=True)
class TierStats:
    """The state of one tier. Bytes count allocated slots, as the capacity does."""

    capacity_bytes: int
    used_bytes: int
    pages: int
    leased_pages: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """A snapshot of a store. ``counters`` are totals since the store was opened; see :class:`Counters`."""

    tiers: Mapping[str, TierStats]
    pages: int  # distinct pages in all tiers
    key_collisions: int
    open_hits: int
    pending_saves: int  # pages on their way into the host tier
    pending_writes: int  # pages on their way to disk
    disk_writable: bool
    health: Mapping[str, TierHealth]  # health of the tiers that can fail
    health_line: str  # the health in one line for people; empty if no tier can fail
    failed_tasks: int
    counters: Mapping[str, int | float | Mapping[str, int]]
    curve: CurveStats = field(default_factory=CurveStats)  # hit rates with more memory
    missed_last_hour: Mapping[str, int] = field(default_factory=dict)  # like ``counters.missed_tokens``

    @property
    def missed_rows(self) -> tuple[tuple[str, str, str], ...]:
        """The missed tokens of the last hour in rows for people: reason, number of tokens, and share of all
        missed tokens."""
        total = sum(self.missed_last_hour.values())
        return tuple(
            (reason.replace("_", " "), f"{tokens:,}", f"{100 * tokens / total:.1f} %")
            for reason, tokens in self.missed_last_hour.items()
        )


@dataclass(frozen=True, slots=True)
class ClusterStats:
    """A snapshot of the shared store, through which hosts exchange pages. ``counts`` are totals since the
    start. They count pages and bytes fetched and published, lookups, late lookups, and agents that ended or
    were killed. Pages were ``damaged``, ``refused`` (no room in the shared store) or ``dropped`` (too many
    waited to be published). With an object store, they also count bundles whose heads were read, and objects
    ``damaged``, ``deleted`` (to make room) and ``expired``."""

    url: str
    online: bool
    trouble: str  # the present problem; empty without one
    transport: str
    bytes_per_s: float  # recent rate
    counts: dict[str, int]

    @property
    def line(self) -> str:
        """The state of the shared store in one line, for people."""
        state = "online" if self.online else "offline"
        return f"cluster {self.url}: {state}{f' ({self.trouble})' if self.trouble else ''}"


_IN = {"host": ("saved_pages", "disk_read_pages"), "disk": ("disk_written_pages",)}
_OUT = {"host": ("loaded_pages",), "disk": ("disk_read_pages",)}


class StoreRates:
    """Rates per second between two snapshots of a store; without ``before``, since the store was opened.

    Counters count pages. So bytes per second are pages per second times the present mean size of the tier's
    pages.
    """

    def __init__(self, now: StoreStats, before: StoreStats | None, seconds: float) -> None:
        self._now = now
        self._before = before
        self._seconds = max(seconds, 1e-9)

    @property
    def tiers(self) -> Iterable[str]:
        return self._now.tiers.keys()

    def of(self, name: str) -> float:
        """Return the counter's increase per second."""
        new, old = self._pair(name)
        assert not isinstance(new, Mapping)
        assert not isinstance(old, Mapping)
        return (new - old) / self._seconds

    def by_tier(self, name: str) -> dict[str, float]:
        """Return the increase per second of a counter with a value for each tier."""
        new, old = self._pair(name)
        assert isinstance(new, Mapping)
        before = old if isinstance(old, Mapping) else {}
        return {tier: (count - before.get(tier, 0)) / self._seconds for tier, count in new.items()}

    @property
    def hit_rate(self) -> float | None:
        """Tokens found over tokens requested; None if no tokens were requested."""
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
