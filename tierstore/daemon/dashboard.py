"""The content of a daemon's dashboard: its statistics as tiles, bars, plots and tables."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tierstore.core.busiest import BusyPrefix
from tierstore.daemon.stats import DaemonStats, LatencyStats
from tierstore.dashboard import of_store
from tierstore.dashboard.of_store import percent, short
from tierstore.dashboard.view import ConditionRow, Number, Plot, Sample, Table, Tile, Unit, View, ViewState
from tierstore.printable import printable
from tierstore.stats import StoreRates
from tierstore.units import format_duration, format_size

_LATELY_S = 60.0
_PREFIXES = 10
_PREFIXES_S = 2.0  # least time between two searches for the busiest prefixes
_PREFIXES_DUTY = 1 / 100  # largest share of one thread's time for these searches
_MOST_ROWS = 12
_PLOTS = (
    Plot("hit_rate", "Hit rate", Unit.PERCENT, ("share of the requested tokens",)),
    Plot("tokens", "Prompt tokens", Unit.PER_SECOND, ("requested", "found in host", "found on disk")),
    Plot(
        "traffic",
        "Traffic",
        Unit.GB_PER_S,
        ("loaded from host", "saved to host", "read from disk", "written to disk"),
    ),
)


@dataclass(frozen=True, slots=True)
class _DaemonMoment:
    at: float
    stats: DaemonStats


class DaemonDashboard:
    """Makes the samples that the dashboard shows. Only one thread at a time may use it."""

    def __init__(
        self,
        stats: Callable[[], DaemonStats],
        busiest: Callable[[int], list[BusyPrefix]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._busiest = busiest
        self._clock = clock
        self._lately: deque[_DaemonMoment] = deque()
        self._prefixes: list[BusyPrefix] = []
        self._prefixes_due = -math.inf

    def look(self) -> Sample:
        """Return the current state. The plots get rates since the last call, the tiles and tables rates of
        the last minute."""
        now = _DaemonMoment(self._clock(), self._stats())
        if now.at >= self._prefixes_due:
            self._prefixes = self._busiest(_PREFIXES)
            self._prefixes_due = now.at + max((self._clock() - now.at) / _PREFIXES_DUTY, _PREFIXES_S)
        before = self._lately[-1] if self._lately else None
        self._lately.append(now)
        while len(self._lately) > 1 and self._lately[1].at <= now.at - _LATELY_S:
            self._lately.popleft()
        minute_ago = self._lately[0] if len(self._lately) > 1 else None
        return Sample(
            time.time(), self._view(now, minute_ago), _values(_rates(now, before)) if before else {}
        )

    def _view(self, now: _DaemonMoment, minute_ago: _DaemonMoment | None) -> View:
        stats = now.stats
        return View(
            title="tierstore daemon",
            about=f"version {stats.version}, pid {stats.pid}, up {format_duration(stats.uptime_s)}",
            version=stats.version,
            conditions=tuple(_conditions(stats)),
            tiles=_tiles(stats, _rates(now, minute_ago)),
            meters=of_store.meters(stats.store),
            plots=_PLOTS,
            curve=of_store.curve(stats.store.curve),
            tables=(
                of_store.missed(stats.store),
                of_store.worth(stats.store.curve),
                _tenants(stats),
                _busy(self._prefixes),
                _requests(now, minute_ago),
                _clients(stats),
            ),
        )


def _rates(now: _DaemonMoment, before: _DaemonMoment | None) -> StoreRates:
    if before is None:
        return StoreRates(now.stats.store, None, now.stats.uptime_s)
    return StoreRates(now.stats.store, before.stats.store, now.at - before.at)


def _values(rates: StoreRates) -> dict[str, tuple[Number, ...]]:
    hits = rates.by_tier("hit_tokens")
    share = rates.hit_rate
    tiers = rates.tiers
    return {
        "hit_rate": (None if share is None else 100 * share,),
        "tokens": (rates.of("lookup_tokens"), hits["host"], hits["disk"]),
        "traffic": (
            rates.gb_per_s_out("host"),
            rates.gb_per_s_in("host"),
            rates.gb_per_s_out("disk") if "disk" in tiers else None,
            rates.gb_per_s_in("disk") if "disk" in tiers else None,
        ),
    }


def _conditions(stats: DaemonStats) -> list[ConditionRow]:
    serving = ConditionRow("daemon", ViewState.GOOD, "serves") if stats.ready else _NOT_READY
    found = [serving, *of_store.conditions(stats.store)]
    if stats.cluster is not None:
        state = ViewState.GOOD if stats.cluster.online else ViewState.WARNING
        found.append(ConditionRow("cluster", state, printable(stats.cluster.line.removeprefix("cluster "))))
    failed = stats.service.failed_requests
    if failed:
        text = f"{failed:,} requests failed because of a bug in tierstore: its log has a traceback"
        found.append(ConditionRow("requests", ViewState.WARNING, text))
    return found


_NOT_READY = ConditionRow("daemon", ViewState.BAD, "not serving: it is starting or stopping")


def _tiles(stats: DaemonStats, lately: StoreRates) -> tuple[Tile, ...]:
    ever = StoreRates(stats.store, None, stats.uptime_s)
    hits = lately.by_tier("hit_tokens")
    pending = stats.store.pending_writes
    dropped = stats.store.counters["disk_dropped_pages"]
    return (
        Tile("Hit rate, last minute", percent(lately.hit_rate), f"{percent(ever.hit_rate)} since the start"),
        Tile(
            "Tokens found per second",
            short(sum(hits.values())),
            f"host {short(hits['host'])}, disk {short(hits['disk'])}",
        ),
        Tile(
            "Loaded per second",
            f"{lately.gb_per_s_out('host'):.2f} GB",
            f"saved {lately.gb_per_s_in('host'):.2f} GB",
        ),
        Tile("Lookups per second", short(lately.of("lookups")), f"{stats.service.leases:,} leases"),
        Tile("Clients", f"{stats.service.connections:,}", f"{stats.service.reservations:,} running saves"),
        Tile("Waiting for disk", f"{pending:,} pages", f"{dropped:,} dropped so far"),
    )


def _tenants(stats: DaemonStats) -> Table:
    tenants = sorted(stats.service.tenants.items(), key=lambda each: -each[1].lookup_tokens)
    return Table(
        "Tenants",
        ("tenant", "requested tokens", "found", "host", "quota", "pinned"),
        tuple(
            (
                _name(name),
                f"{each.lookup_tokens:,}",
                percent(sum(each.hit_tokens.values()) / each.lookup_tokens if each.lookup_tokens else None),
                format_size(each.host_bytes),
                "–" if each.quota_bytes is None else format_size(each.quota_bytes),
                format_size(each.pinned_bytes),
            )
            for name, each in tenants[:_MOST_ROWS]
        ),
        "No client has connected yet.",
        note=_more(len(tenants)),
    )


def _busy(prefixes: list[BusyPrefix]) -> Table:
    return Table(
        "Busiest prefixes",
        ("prefix", "model", "tenant", "tokens", "size", "hits", "in"),
        tuple(
            (
                each.name,
                printable(each.model),
                _name(each.tenant),
                f"{each.tokens:,}",
                format_size(each.bytes),
                f"{each.hits:,}",
                each.tier,
            )
            for each in prefixes
        ),
        "No prefix has been found yet.",
        left=3,
        note="A prefix ends where the prompts that share it diverge. A prefix's name hides its text.",
    )


def _requests(now: _DaemonMoment, before: _DaemonMoment | None) -> Table:
    def row(name: str) -> tuple[str, ...]:
        latency = now.stats.service.latency[name]
        lately = latency.since(before.stats.service.latency[name] if before else None)
        seconds = now.at - before.at if before else now.stats.uptime_s
        rate = sum(lately.counts) / max(seconds, 1e-9)
        return name, short(rate), _quantile(lately, 0.5), _quantile(lately, 0.99)

    return Table(
        "Requests, last minute",
        ("request", "per second", "p50", "p99"),
        tuple(map(row, now.stats.service.latency)),
        "",
    )


def _clients(stats: DaemonStats) -> Table:
    clients = sorted(stats.service.clients, key=lambda each: (-each.reserved_bytes, -each.leases))
    return Table(
        "Clients",
        ("client", "tenant", "leases", "reserved", "sending"),
        tuple(
            (
                printable(each.client),
                _name(each.tenant),
                f"{each.leases:,}",
                format_size(each.reserved_bytes),
                format_size(each.sending_bytes),
            )
            for each in clients[:_MOST_ROWS]
        ),
        "No client is connected.",
        left=2,
        note=_more(len(clients)),
    )


def _more(rows: int) -> str:
    return f"and {rows - _MOST_ROWS:,} more" if rows > _MOST_ROWS else ""


def _name(tenant: str) -> str:
    return printable(tenant) or "–"


def _quantile(latency: LatencyStats, share: float) -> str:
    bound = latency.quantile(share)
    if bound is None:
        return "–"
    return "more" if math.isinf(bound) else f"{1000 * bound:g} ms"
