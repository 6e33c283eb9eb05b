"""What a connected store tells of itself."""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from tierstore.curve import CurveStats
from tierstore.daemon.connection import Connection
from tierstore.daemon.protocol import StatsAnswer
from tierstore.index import Tier
from tierstore.mover import Mover
from tierstore.store.state import StoreState
from tierstore.store.stats import StoreStats


class _DaemonStats(msgspec.Struct):
    """As much of what a daemon says of itself as is of interest here."""

    store: StoreStats | None = None  # not told to a client with a tenant


def client_stats(
    state: StoreState, mover: Mover, connection: Connection, answer: StatsAnswer | None
) -> StoreStats:
    """HBM and the counters are this client's, everything below HBM is the daemon's."""
    below = msgspec.json.decode(answer.json, type=_DaemonStats).store if answer is not None else None
    away = "the daemon is away" if answer is None else ""
    with state.lock:
        tiers = dict(below.tiers) if below is not None else {}
        tiers.pop(Tier.HBM.label, None)
        return StoreStats(
            tiers={**state.tier_stats(), **tiers},
            pages=state.index.tree.pages if below is None else below.pages,
            key_collisions=state.index.tree.key_collisions,
            open_hits=state.leases.open,
            pending_saves=state.pending_saves,
            pending_writes=0 if below is None else below.pending_writes,
            disk_writable=below is not None and below.disk_writable,
            health={} if below is None else below.health,
            health_line=away if below is None else below.health_line,
            failed_tasks=mover.failed_tasks,
            counters={**asdict(state.counters), "connection": asdict(connection.counters)},
            curve=CurveStats() if below is None else below.curve,
        )
