"""``tierstore stats``: show the counters of a daemon."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions, Operator
from tierstore.command_line import with_options
from tierstore.units import format_size

if TYPE_CHECKING:
    from tierstore.curve import CurveStats
    from tierstore.daemon.stats import DaemonStats, LatencyStats, ServiceStats
    from tierstore.stats import StoreStats

_MOST_SLOWEST = 4
MISSED_COLUMNS = ("missed tokens by reason, last hour", "tokens", "of missed")
NOTHING_MISSED = "no tokens were missed in the last hour"
_FEW_SAMPLED = 500  # with fewer sampled pages, the estimated hit rates are rough


@with_options
def command(
    where: ConnectOptions,
    json: Annotated[bool, typer.Option("--json", help="Write one JSON document")] = False,
    curve: Annotated[
        bool, typer.Option("--curve", help="Show the hit rates that other capacities would have instead")
    ] = False,
) -> None:
    """Show a daemon's tiers, clients and counters.

    Counters count from the daemon's start. --json also has the counters that are zero.
    """
    with where.operator() as operator:
        document = operator.stats_json()
        view = msgspec.json.decode(document, type=dict[str, Any])
        if curve:
            estimates = operator.parse(document).store.curve
            if json:
                show.write_json(msgspec.to_builtins(estimates))
            else:
                _print_curve(estimates)
        elif json:
            show.write_json(view)
        elif "store" not in view:
            _print_tenant(operator, view)
        else:
            _print(operator, operator.parse(document))


# -- text output ---------------------------------------------------------------------------------------


def quantile(latency: LatencyStats, share: float) -> str:
    """Return a time that ``share`` of the requests did not exceed, such as "≤ 1 ms"; "–" without requests."""
    from tierstore.daemon.stats import BOUNDS_S

    bound = latency.quantile(share)
    if bound is None:
        return "–"
    return f"> {1000 * BOUNDS_S[-1]:g} ms" if math.isinf(bound) else f"≤ {1000 * bound:g} ms"


def slowest(service: ServiceStats) -> str:
    """Return a line with the slowest recent requests."""
    some = itertools.islice(service.slowest_s.items(), _MOST_SLOWEST)
    told = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in some)
    return f"slowest in the last minute: {told or '–'}"


def health(stats: DaemonStats) -> str:
    return stats.store.health_line or "no tier that can fail"


def counted(stats: DaemonStats) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each counter that is not zero and is not shown in another table."""
    store, service, server = stats.store, stats.service, stats.server
    groups: dict[str, Mapping[str, Any]] = {
        "": {name: value for name, value in store.counters.items() if name != "hit_tokens"},
        "store ": {"key_collisions": store.key_collisions, "failed_tasks": store.failed_tasks},
        "cluster ": stats.cluster.counts if stats.cluster is not None else {},
        "requests ": service.requests,
        "refused ": service.refused,
        "service ": {
            "failed_requests": service.failed_requests,
            "quota_evicted_pages": service.quota_evicted_pages,
            "promised_lookups": service.promised_lookups,
            "broken_promises": service.broken_promises,
            "clients_ended": service.clients_ended,
        },
        "server ": {
            name: getattr(server, name) for name in ("malformed", "unsent", "silent_clients", "denied")
        },
    }
    for group, values in groups.items():
        for name, value in values.items():
            parts = value if isinstance(value, Mapping) else {"": value}
            for part, number in parts.items():
                if number:
                    label = f"{group}{name} {part}".strip().replace("_", " ")
                    yield label, f"{number:,.1f}" if isinstance(number, float) else f"{number:,}"


def _print_tenant(operator: Operator, view: Mapping[str, Any]) -> None:
    """Print the statistics that a client with a tenant gets."""
    show.line(f"tierstore {view['version']} at {operator.url}")
    show.table(
        ("tenant", "asked tokens", "hit tokens", "of asked", "host", "quota", "pinned"),
        [
            (
                name,
                f"{each['lookup_tokens']:,}",
                f"{sum(each['hit_tokens'].values()):,}",
                show.percent(sum(each["hit_tokens"].values()), each["lookup_tokens"]),
                format_size(each["host_bytes"]),
                "–" if each["quota_bytes"] is None else format_size(each["quota_bytes"]),
                format_size(each["pinned_bytes"]),
            )
            for name, each in view["service"]["tenants"].items()
        ],
    )


def _print(operator: Operator, stats: DaemonStats) -> None:
    state = "ready" if stats.ready else "not ready"
    started = show.age(time.time() - stats.uptime_s)
    show.line(f"tierstore {stats.version} at {operator.url}: {state}, pid {stats.pid}, up {started}")
    show.line(f"health: {health(stats)}")
    if stats.cluster is not None:
        counts = stats.cluster.counts
        fetched, published, damaged = (
            f"{name} {counts.get(f'{name}_pages', 0):,}" for name in ("fetched", "published", "damaged")
        )
        rate = format_size(stats.cluster.bytes_per_s)
        show.line(f"{stats.cluster.line}; pages {fetched} (lately {rate}/s), {published}, {damaged}")
    show.line("")
    _print_tiers(stats.store)
    show.line("")
    _print_clients(operator, stats)
    show.line("")
    show.table(
        ("requests", "number", "p50", "p99"),
        [
            (name, f"{sum(each.counts):,}", quantile(each, 0.5), quantile(each, 0.99))
            for name, each in stats.service.latency.items()
        ],
    )
    show.line(slowest(stats.service))
    show.line("")
    if stats.store.missed_rows:
        show.table(MISSED_COLUMNS, stats.store.missed_rows)
    else:
        show.line(NOTHING_MISSED)
    show.line("")
    show.table(("counter", "since the start"), list(counted(stats)))


def _print_tiers(store: StoreStats) -> None:
    hits: Any = store.counters["hit_tokens"]
    asked: Any = store.counters["lookup_tokens"]
    show.table(
        ("tier", "capacity", "used", "full", "pages", "leased", "hit tokens", "of asked"),
        [
            (
                name,
                format_size(tier.capacity_bytes),
                format_size(tier.used_bytes),
                show.percent(tier.used_bytes, tier.capacity_bytes),
                f"{tier.pages:,}",
                f"{tier.leased_pages:,}",
                f"{hits.get(name, 0):,}",
                show.percent(hits.get(name, 0), asked),
            )
            for name, tier in store.tiers.items()
        ],
    )
    show.line(f"hit rate {show.percent(sum(hits.values()), asked)} of {asked:,} requested tokens")


def _print_clients(operator: Operator, stats: DaemonStats) -> None:
    """Print the leases and reservations of clients, and those tables of models, pins and clients that are not
    empty."""
    store, service = stats.store, stats.service
    show.line(
        f"clients {service.connections - 1:,}, leases {service.leases:,}, "
        f"reservations {service.reservations:,} ({format_size(service.reserved_bytes)}), "
        f"pages {store.pages:,}, on their way to disk {store.pending_writes:,}"
    )
    if len({each.layers for each in service.layers}) > 1:
        show.table(
            ("model", "layers", "in the host tier"),
            [(each.model, each.layers, format_size(each.host_bytes)) for each in service.layers],
            left=2,
        )
    pins = {name: tenant for name, tenant in service.tenants.items() if tenant.pinned_pages}
    if pins:
        show.table(
            ("pinned by tenant", "pages", "bytes", "quota"),
            [
                (
                    name or "–",
                    f"{each.pinned_pages:,}",
                    format_size(each.pinned_bytes),
                    "–" if each.quota_bytes is None else format_size(each.quota_bytes),
                )
                for name, each in pins.items()
            ],
        )
    clients = [client for client in service.clients if client.number != operator.connection]
    if clients:
        show.table(
            ("client", "tenant", "leases", "reserved"),
            [(c.client, c.tenant or "–", f"{c.leases:,}", format_size(c.reserved_bytes)) for c in clients],
            left=2,
        )


def _print_curve(curve: CurveStats) -> None:
    """Print the store's estimates of the hit rates that other capacities would have."""
    if not curve.asked_tokens:
        show.line("no estimate yet: there were no lookups")
        return
    most = format_size(curve.horizon_bytes) if curve.horizon_bytes else "unlimited memory"
    show.line(
        f"hit rate {_percent(curve.measured_hit_rate)} since the start; at best {_percent(curve.ceiling)}, "
        f"with {most}"
    )
    rough = " (few: a rough estimate)" if curve.sampled < _FEW_SAMPLED else ""
    show.line(
        f"estimated from {curve.asked_tokens:,} recently requested tokens and a sample of {curve.sampled:,} "
        f"pages{rough}"
    )
    if curve.left_out:
        show.line(
            f"{curve.left_out:,} lookups and saves arrived too fast and were left out. If these are many, "
            "the hit rates of large capacities are too low"
        )
    show.line("")
    here = {tier.capacity_bytes: name for name, tier in curve.tiers.items()}
    show.table(
        ("least recently used, with", "hit rate", "today"),
        [
            (format_size(point.capacity_bytes), _percent(point.hit_rate), here.get(point.capacity_bytes, ""))
            for point in curve.points
        ],
    )
    rows = [
        (
            name,
            format_size(tier.capacity_bytes),
            _percent(tier.hit_rate),
            f"+{format_size(more.added_bytes)}",
            f"+{100 * more.added_hit_rate:.1f}",
        )
        for name, tier in curve.tiers.items()
        for more in tier.more
    ]
    show.line("")
    show.table(("down to", "capacity", "hit rate", "with", "points more"), rows)


def _percent(rate: float) -> str:
    return f"{100 * rate:.1f} %"
