"""Statistics of a daemon: one frozen snapshot, for ``stats``, ``top`` and the metrics."""

from __future__ import annotations

import bisect
import functools
import importlib.metadata
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from tierstore.stats import ClusterStats, StoreStats

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

_LATELY_S = 30.0


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Latencies of requests, from arrival to answer. ``counts`` has one entry for each of ``BOUNDS_S`` (not
    cumulative) and one for all longer ones."""

    counts: tuple[int, ...]
    sum_s: float

    def since(self, before: LatencyStats | None) -> LatencyStats:
        """Return the latencies after the snapshot ``before``; None: all of them."""
        if before is None:
            return self
        counts = tuple(new - old for new, old in zip(self.counts, before.counts, strict=True))
        return LatencyStats(counts, self.sum_s - before.sum_s)

    def quantile(self, share: float) -> float | None:
        """Return the smallest bound below which ``share`` of the requests took; infinity for the last one,
        None without requests."""
        total = sum(self.counts)
        if not total:
            return None
        for bound, below in zip(BOUNDS_S, itertools.accumulate(self.counts), strict=False):
            if below >= share * total:
                return bound
        return math.inf


class Histogram:
    """Counts latencies in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def stats(self) -> LatencyStats:
        return LatencyStats(tuple(self._counts), self._sum_s)


class Slowest:
    """The longest time of a request of each kind in the last 30 to 60 seconds. (It forgets half a minute at
    once.)"""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._ends = 0.0  # end of the half minute of ``_now``, by the caller's clock

    def add(self, name: str, seconds: float, at: float) -> None:
        """Add a request that was answered at ``at``."""
        if at >= self._ends:
            self._before = self._now if at < self._ends + _LATELY_S else {}
            self._now = {}
            self._ends = at + _LATELY_S
        if seconds > self._now.get(name, 0.0):
            self._now[name] = seconds

    def stats(self, at: float) -> dict[str, float]:
        """Return the longest times as of ``at``, the slowest request first."""
        before, now = self._before.copy(), self._now.copy()  # other threads may add requests meanwhile
        if at >= self._ends:
            before, now = {}, now if at < self._ends + _LATELY_S else {}
        slowest = {name: max(before.get(name, 0.0), now.get(name, 0.0)) for name in {**before, **now}}
        return dict(sorted(slowest.items(), key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Statistics of one tenant (empty name: clients without a tenant)."""

    lookup_tokens: int
    hit_tokens: Mapping[str, int]  # by tier
    host_bytes: int
    quota_bytes: int | None
    pinned_pages: int = 0
    pinned_bytes: int = 0  # in all tiers; each page counts once


@dataclass(frozen=True, slots=True)
class ClientStats:
    """One connected client."""

    number: int
    client: str
    tenant: str
    local: bool
    leases: int
    reserved_bytes: int
    sending_bytes: int


@dataclass(frozen=True, slots=True)
class LayersStats:
    """The pages of one group of a model's layers, those of all clients."""

    model: str
    layers: str
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Statistics of the requests. Everything but the connections counts from the daemon's start."""

    connections: int
    leases: int
    reservations: int
    reserved_bytes: int
    sending_bytes: int
    clients_ended: int
    requests: Mapping[str, int]  # by message
    refused: Mapping[str, int]  # by kind
    failed_requests: int  # because of a bug in tierstore
    promised_lookups: int  # lookups that waited for promised pages
    broken_promises: int  # those whose pages did not all arrive in time
    quota_evicted_pages: int
    latency: Mapping[str, LatencyStats]  # of lookup, load and save
    slowest_s: Mapping[str, float]  # by message, in the last minute, slowest first
    tenants: Mapping[str, TenantStats]
    clients: tuple[ClientStats, ...]
    layers: tuple[LayersStats, ...] = ()  # grouped by model; the model with most bytes comes first


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Traffic on the sockets, counted from the daemon's start."""

    received: int
    received_bytes: int
    sent: int
    malformed: int  # received data that is not a message
    unsent: int  # answers to peers that were gone or did not read
    silent_clients: int  # TCP clients that were silent for too long
    denied: int  # CURVE keys that are not admitted
    arena_connections: int


@dataclass(frozen=True, slots=True)
class EventStats:
    """Events of one endpoint since the daemon's start."""

    model: str  # empty: all models
    batches: int
    events: int
    lost_changes: int  # not reported in time: followers had to start again
    replays: int  # requested by followers
    snapshots: int  # replays for batches that were not kept any more
    unread_listings: int  # reports of held pages that a disk error cut short


@dataclass(frozen=True, slots=True)
class DaemonStats:
    """A snapshot of a daemon."""

    version: str
    uptime_s: float
    pid: int
    ready: bool
    store: StoreStats
    service: ServiceStats
    server: ServerStats
    events: tuple[EventStats, ...] = ()  # one for each endpoint of KV events
    cluster: ClusterStats | None = None


@functools.cache
def version() -> str:
    """Return the version of this package."""
    try:
        return importlib.metadata.version("tierstore")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
