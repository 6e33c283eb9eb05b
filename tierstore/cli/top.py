"""``tierstore top``: watch a daemon. Rates are differences of counters between two snapshots."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierstore.cli import show
from tierstore.cli.operator import ConnectOptions, Operator
from tierstore.cli.show import percent
from tierstore.cli.stats import MISSED_COLUMNS, NOTHING_MISSED, health, quantile, slowest
from tierstore.command_line import with_options
from tierstore.errors import StoreUnavailableError
from tierstore.stats import StoreRates
from tierstore.tables import table_lines, terminal_width
from tierstore.units import format_size

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

    from tierstore.daemon.stats import DaemonStats, LatencyStats

_REFRESH_S = 1.0
_BAR = 16  # cells
_MOST_CLIENTS = 12
_MOST_REASONS = 6


@with_options
def command(
    where: ConnectOptions,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit")] = False,
) -> None:
    """Watch a daemon: tiers, hit rate, traffic, clients.

    The view changes every second. q or Ctrl-C ends it. Without a terminal, the command prints one snapshot.
    The rates in a first or only snapshot are averages since the daemon started.
    """
    watch = _TopView(where)
    try:
        first = watch.look()
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            from rich.console import Console

            Console().print(first, soft_wrap=True)
        else:
            _live(watch, first)
    except KeyboardInterrupt:
        return
    finally:
        watch.close()


def _live(watch: _TopView, first: Group) -> None:
    from rich.console import Group
    from rich.live import Live

    with _keys() as pressed, Live(first, screen=True, auto_refresh=False) as live:
        while not pressed(_REFRESH_S):
            try:
                live.update(watch.look(), refresh=True)
            except StoreUnavailableError as error:
                watch.close()
                trouble = Group(show.text(str(error)), "", "trying again every second; q ends")
                live.update(trouble, refresh=True)


@contextmanager
def _keys() -> Iterator[Any]:
    """Put the terminal into character mode while the block runs. Yield a function that waits the given
    seconds and returns True as soon as the user types q."""
    import select
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed(seconds: float) -> bool:
        ends = time.monotonic() + seconds
        while select.select([fd], [], [], max(ends - time.monotonic(), 0))[0]:
            typed = os.read(fd, 64)
            if not typed or b"q" in typed.lower():
                return True
        return False

    try:
        tty.setcbreak(fd)
        yield pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    at: float
    stats: DaemonStats


class _TopView:
    """A view of a daemon, which reconnects if the daemon restarts."""

    def __init__(self, where: ConnectOptions) -> None:
        self._where = where
        self._operator: Operator | None = None
        self._before: _Snapshot | None = None

    def look(self) -> Group:
        """Return a new screen. Raise :class:`StoreUnavailableError` if no daemon answers."""
        if self._operator is None:
            self._operator = self._where.operator()
        now = _Snapshot(time.monotonic(), self._operator.stats())
        before, self._before = self._before, now
        return view(
            self._operator, now.stats, before.stats if before else None, now.at - before.at if before else 0
        )

    def close(self) -> None:
        if self._operator is not None:
            self._operator.close()
        self._operator = self._before = None  # a restarted daemon counts from zero


def view(operator: Operator, now: DaemonStats, before: DaemonStats | None, seconds: float) -> Group:
    """Return one screen. Without ``before``, rates are averages since the daemon's start."""
    from rich.console import Group

    rates = _Rates(now, before, seconds if before else max(now.uptime_s, 1e-9))
    store, service = now.store, now.service
    fine = all(tier.condition.value == "online" for tier in store.health.values())
    period = "now" if before else "since the start"
    total = _share(StoreRates(store, None, now.uptime_s).hit_rate)
    lines = (
        show.text(f"tierstore {now.version} at {operator.url}, pid {now.pid}", "bold"),
        show.text(f"health: {health(now)}", "green" if fine else "bold red"),
        "",
        _tiers(now, rates),
        "",
        show.text(f"hit rate {_share(rates.hit_rate)} {period}, {total} in total"),
        show.text(
            f"lookups/s {rates.of('lookups'):,.1f}, pages on their way to disk {store.pending_writes:,}"
        ),
        show.text(
            f"clients {service.connections - 1:,}, leases {service.leases:,}, reservations "
            f"{service.reservations:,} ({format_size(service.reserved_bytes)})"
        ),
        "",
        _requests(now, rates),
        show.text(slowest(service)),
        "",
        *_missed(now),
        *_clients(operator, now),
    )
    return Group(*lines)


class _Rates(StoreRates):
    """Rates between two snapshots, per second."""

    def __init__(self, now: DaemonStats, before: DaemonStats | None, seconds: float) -> None:
        super().__init__(now.store, before.store if before is not None else None, seconds)
        self._latency = now.service.latency
        self._latency_before = before.service.latency if before is not None else {}

    def latency(self, name: str) -> tuple[LatencyStats, float]:
        """Return the latency of the requests between the snapshots, and their number per second."""
        lately = self._latency[name].since(self._latency_before.get(name))
        return lately, sum(lately.counts) / self._seconds


def _share(share: float | None) -> str:
    return percent(share, 1) if share is not None else percent(0, 0)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> Text:
    from rich.text import Text

    return Text("\n".join(table_lines(columns, rows, left=left, width=terminal_width())))


def _tiers(now: DaemonStats, rates: _Rates) -> Text:
    rows = [
        (
            name,
            _bar(tier.used_bytes, tier.capacity_bytes),
            percent(tier.used_bytes, tier.capacity_bytes),
            format_size(tier.used_bytes),
            format_size(tier.capacity_bytes),
            f"{tier.pages:,}",
            f"{tier.leased_pages:,}",
            f"{rates.gb_per_s_in(name):.3f}",
            f"{rates.gb_per_s_out(name):.3f}",
        )
        for name, tier in now.store.tiers.items()
    ]
    columns = ("tier", "", "full", "used", "capacity", "pages", "leased", "GB/s in", "GB/s out")
    return _table(columns, rows, left=2)


def _bar(part: float, whole: float) -> str:
    filled = min(round(_BAR * part / whole), _BAR) if whole else 0
    return "█" * filled + "░" * (_BAR - filled)


def _requests(now: DaemonStats, rates: _Rates) -> Text:
    rows = []
    for name in now.service.latency:
        latency, per_s = rates.latency(name)
        rows.append((name, f"{per_s:,.1f}", quantile(latency, 0.5), quantile(latency, 0.99)))
    return _table(("requests", "per second", "p50", "p99"), rows)


def _missed(now: DaemonStats) -> Iterator[Text]:
    """Yield a table of the most frequent reasons for missed tokens."""
    rows = now.store.missed_rows
    if not rows:
        yield show.text(NOTHING_MISSED)
        return
    yield _table(MISSED_COLUMNS, rows[:_MOST_REASONS])
    if len(rows) > _MOST_REASONS:
        yield show.text(f"… and {len(rows) - _MOST_REASONS:,} more")


def _clients(operator: Operator, now: DaemonStats) -> Iterator[Any]:
    """Yield a table of the clients with the most reserved and unsent bytes."""
    clients = [client for client in now.service.clients if client.number != operator.connection]
    if not clients:
        return
    clients.sort(
        key=lambda client: (client.reserved_bytes + client.sending_bytes, client.leases), reverse=True
    )
    rows = [
        (
            client.client,
            client.tenant or "–",
            f"{client.leases:,}",
            format_size(client.reserved_bytes),
            format_size(client.sending_bytes),
        )
        for client in clients[:_MOST_CLIENTS]
    ]
    yield ""
    yield _table(("client", "tenant", "leases", "reserved", "sending"), rows, left=2)
    if len(clients) > _MOST_CLIENTS:
        yield show.text(f"… and {len(clients) - _MOST_CLIENTS:,} more")
