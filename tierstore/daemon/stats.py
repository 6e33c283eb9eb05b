"""Statistics of a daemon, as frozen snapshots: for ``tierstore stats``, ``tierstore top`` and the metrics."""

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
    """Latencies of requests, from arrival to answer. ``counts[i]`` is the number of requests that took at
    most ``BOUNDS_S[i]`` and more than the bound before it. The last entry counts all longer requests."""

    counts: tuple[int, ...]
    sum_s: float

    def since(self, before: LatencyStats | None) -> LatencyStats:
        """Return the latencies since the snapshot ``before``, or all latencies if it is None."""
        if before is None:
            return self
        counts = tuple(new - old for new, old in zip(self.counts, before.counts, strict=True))
        return LatencyStats(counts, self.sum_s - before.sum_s)

    def quantile(self, share: float) -> float | None:
        """Return the smallest of ``BOUNDS_S`` that at least ``share`` of the requests did not exceed;
        infinity if there is none. Return None without requests."""
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
    """The longest time of a request, by message, in the last 30 to 60 seconds. Every 30 seconds, the oldest
    30 seconds are dropped."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._ends = 0.0  # when ``_now`` becomes ``_before``, by the caller's clock

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
        before, now = self._before.copy(), self._now.copy()  # copies, because other threads may add requests
        if at >= self._ends:
            before, now = {}, now if at < self._ends + _LATELY_S else {}
        slowest = {name: max(before.get(name, 0.0), now.get(name, 0.0)) for name in {**before, **now}}
        return dict(sorted(slowest.items(), key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Statistics of one tenant, or of all clients without a tenant."""

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
    """The bytes of a model's pages for one layer group, saved by any client."""

    model: str
    layers: str
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """Statistics of clients and their requests. Numbers of requests, pages and ended clients count from the
    daemon's start."""

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
    broken_promises: int  # promised lookups whose pages were not all saved in time
    quota_evicted_pages: int
    latency: Mapping[str, LatencyStats]  # of lookup, load and save
    slowest_s: Mapping[str, float]  # by message, in the last minute, slowest first
    tenants: Mapping[str, TenantStats]
    clients: tuple[ClientStats, ...]
    layers: tuple[LayersStats, ...] = ()  # sorted by bytes of the model, largest first


@dataclass(frozen=True, slots=True)
class ServerStats:
    """Traffic on the sockets, counted from the daemon's start."""

    received: int
    received_bytes: int
    sent: int
    malformed: int  # received data that is not a message
    unsent: int  # answers to peers that were gone or did not read
    silent_clients: int  # TCP clients that were silent for too long
    denied: int  # TCP clients that were rejected because of their key
    arena_connections: int


@dataclass(frozen=True, slots=True)
class EventStats:
    """Events of one endpoint since the daemon's start."""

    model: str  # empty: all models
    batches: int
    events: int
    lost_changes: int  # changes that were not reported in time, so followers had to start again
    replays: int  # requests of followers for missed batches
    snapshots: int  # replays that needed a snapshot, because the batches were not kept any more
    unread_listings: int  # reports of stored pages that a disk error cut short


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
