"""What a daemon can tell about itself: one frozen snapshot, for ``stats``, ``top`` and the metrics."""

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
    """From a request's arrival to its answer. ``counts`` has one entry for each of ``BOUNDS_S`` (not
    cumulative) and one for all that took longer."""

    counts: tuple[int, ...]
    sum_s: float

    def since(self, before: LatencyStats | None) -> LatencyStats:
        """What came after ``before``; None: all of it."""
        if before is None:
            return self
        counts = tuple(new - old for new, old in zip(self.counts, before.counts, strict=True))
        return LatencyStats(counts, self.sum_s - before.sum_s)

    def quantile(self, share: float) -> float | None:
        """The least bound below which ``share`` of the requests took, infinite for the last one; None without
        any."""
        total = sum(self.counts)
        if not total:
            return None
        for bound, below in zip(BOUNDS_S, itertools.accumulate(self.counts), strict=False):
            if below >= share * total:
                return bound
        return math.inf


class Histogram:
    """Counts latencies."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def stats(self) -> LatencyStats:
        return LatencyStats(tuple(self._counts), self._sum_s)


class Slowest:
    """The longest that a request of each kind took in the last minute, or (its halves go by as one) half."""

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._before: dict[str, float] = {}
        self._ends = 0.0  # of the half minute that ``_now`` is about, by the clock of whoever adds

    def add(self, name: str, seconds: float, at: float) -> None:
        """A request that was answered at ``at``."""
        if at >= self._ends:
            self._before = self._now if at < self._ends + _LATELY_S else {}
            self._now = {}
            self._ends = at + _LATELY_S
        if seconds > self._now.get(name, 0.0):
            self._now[name] = seconds

    def stats(self, at: float) -> dict[str, float]:
        """As of ``at``, the slowest first."""
        before, now = self._before.copy(), self._now.copy()  # requests go on meanwhile
        if at >= self._ends:
            before, now = {}, now if at < self._ends + _LATELY_S else {}
        slowest = {name: max(before.get(name, 0.0), now.get(name, 0.0)) for name in {**before, **now}}
        return dict(sorted(slowest.items(), key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True)
class TenantStats:
    """One tenant (the empty name: clients without one)."""

    lookup_tokens: int
    hit_tokens: Mapping[str, int]  # by tier
    host_bytes: int
    quota_bytes: int | None
    pinned_pages: int = 0
    pinned_bytes: int = 0  # of all tiers: pages count once


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
    """What is kept of the layers of a model that remember the past alike, by all clients."""

    model: str
    layers: str
    host_bytes: int


@dataclass(frozen=True, slots=True)
class ServiceStats:
    """What the clients do. Everything but the connections counts from the start."""

    connections: int
    leases: int
    reservations: int
    reserved_bytes: int
    sending_bytes: int
    clients_ended: int
    requests: Mapping[str, int]  # by message
    refused: Mapping[str, int]  # by kind
    failed_requests: int  # by a bug of ours
    promised_lookups: int  # that waited for pages which somebody had promised
    broken_promises: int  # of these, those whose pages had not all come when the time was over
    quota_evicted_pages: int
    latency: Mapping[str, LatencyStats]  # of lookup, load, save
    slowest_s: Mapping[str, float]  # by message, in the last minute; the slowest first
    tenants: Mapping[str, TenantStats]
    clients: tuple[ClientStats, ...]
    layers: tuple[LayersStats, ...] = ()  # a model's one after the other, the one with the most bytes first


@dataclass(frozen=True, slots=True)
class ServerStats:
    """What went over the sockets. Counts from the start."""

    received: int
    received_bytes: int
    sent: int
    malformed: int  # messages that were none, dropped or refused
    unsent: int  # answers to peers that had gone, or did not read
    silent_clients: int  # clients over TCP that were taken for dead
    denied: int  # CURVE keys that are not allowed here
    arena_connections: int


@dataclass(frozen=True, slots=True)
class EventStats:
    """What an endpoint has told since the start."""

    model: str  # empty: of all models
    batches: int
    events: int
    lost_changes: int  # that were not told in time: followers had to begin anew
    replays: int  # asked for
    snapshots: int  # of these, asked for more than was known


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
    events: tuple[EventStats, ...] = ()  # for each endpoint of KV events
    cluster: ClusterStats | None = None


@functools.cache
def version() -> str:
    """Of this package."""
    try:
        return importlib.metadata.version("tierstore")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
