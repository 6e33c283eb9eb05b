"""The parts of a store put together: tiers, state, mover and write-behind, and how they end.

The embedded store and the daemon are two faces of this: one is called, the other is sent messages.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from tierstore.curve import HORIZON, CurveStats, ReuseCurve, Worker
from tierstore.errors import UsageError
from tierstore.index import Tier
from tierstore.mover import Mover
from tierstore.policy import POLICIES
from tierstore.store.health import STALL_S, Condition
from tierstore.store.load import Loader
from tierstore.store.state import StoreState
from tierstore.store.stats import StoreStats
from tierstore.store.write_behind import WriteBehind
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier

_log = logging.getLogger(__name__)

_QUEUE_FRACTION = 1 / 2  # of the host tier, that may wait to be written to disk
MOVER_THREADS = 4


class Assembly:
    """Owns the tiers it is given, and closes them."""

    def __init__(
        self,
        *,
        policy: str,
        host: HostTier | None,
        disk: DiskTier | None,
        pool: PagePool | None = None,
        mover_threads: int = MOVER_THREADS,
        stall_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.host = host
        self.disk = disk
        self.state = StoreState(
            [POLICIES[policy]() for _ in Tier],
            host=host,
            pool=pool,
            disk=disk,
            clock=clock,
            stall_s=stall_s,
        )
        self.curve = ReuseCurve(
            horizon_bytes=HORIZON * max(self._capacities().values(), default=0), clock=clock
        )
        self.mover = Mover(mover_threads, disk_threads=mover_threads if disk is not None else 0)
        self.loader = Loader(self.state, self.mover)
        self.write_behind: WriteBehind | None = None
        if disk is not None and host is not None:
            queue_bytes = int(host.capacity_bytes * _QUEUE_FRACTION)
            self.write_behind = WriteBehind(self.state, disk, queue_bytes=queue_bytes)
        self._given_back = False
        if pool is not None and host is not None:
            pool.register(host.address(0), host.capacity_bytes)
        self.curve_worker = Worker(self.curve)

    def _capacities(self) -> dict[str, int]:
        """Bytes by tier, fastest first."""
        pool = self.state.pool
        tiers: dict[Tier, int] = {}
        if pool is not None:
            tiers[Tier.HBM] = pool.num_pages * pool.spec.page_bytes
        if self.host is not None:
            tiers[Tier.HOST] = self.host.capacity_bytes
        if self.disk is not None:
            tiers[Tier.DISK] = self.disk.stats().capacity_bytes
        return {tier.label: nbytes for tier, nbytes in tiers.items()}

    def _curve_stats(self) -> CurveStats:
        with self.state.lock:
            counters = self.state.counters
            hits, asked = sum(counters.hit_tokens.values()), counters.lookup_tokens
        return self.curve.stats(self._capacities(), hits / asked if asked else 0.0)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything saved so far is on disk, or was given up; False when ``timeout`` seconds pass
        first, or when the disk does not answer."""
        state = self.state
        pending = self.write_behind

        def flushed() -> bool:
            return not state.pending_saves and (pending is None or not pending.pending)

        return state.lookout.wait_for(flushed, timeout)

    def stats(self) -> StoreStats:
        """A snapshot. From any thread."""
        state = self.state
        state.lookout.look()
        curve = self._curve_stats()
        with state.lock:
            health = state.health
            state.counters.disk_stalls = health.stalls
            state.counters.disk_read_only_s = health.spent_s(Condition.READ_ONLY)
            state.counters.disk_offline_s = health.spent_s(Condition.OFFLINE)
            return StoreStats(
                tiers=state.tier_stats(),
                pages=state.index.tree.pages,
                key_collisions=state.index.tree.key_collisions,
                open_hits=state.leases.open,
                pending_saves=state.pending_saves,
                pending_writes=self.write_behind.pending if self.write_behind else 0,
                disk_writable=state.disk is not None and health.writable,
                health={Tier.DISK.label: health.snapshot()} if state.disk is not None else {},
                health_line=health.line if state.disk is not None else "",
                failed_tasks=self.mover.failed_tasks,
                counters=asdict(state.counters),
                curve=curve,
            )

    def check(self) -> None:
        """Assert that index, pool, arena and disk agree. For tests and idle moments."""
        if self.disk is not None:
            self.disk.wait_surveyed()
        with self.state.lock:
            self.state.check()
        if self.disk is not None:
            self.disk.check()

    def close(self) -> None:
        """Finish what is under way, write what is queued to disk, give everything back. Repeating it does
        nothing. Returns all the same when the disk does not answer; what was durable stays so."""
        state = self.state
        with state.lock:
            if state.closed:
                return
            state.closed = True
        threading.Thread(target=self._give_back, name="tierstore-close", daemon=True).start()
        surveyed = self.disk is None or self.disk.wait_surveyed(0)
        if not state.lookout.wait_for(lambda: self._given_back, None if surveyed else state.health.stall_s):
            _log.warning("the store was closed while its disk does not answer: the directory stays locked")

    def _give_back(self) -> None:
        self.curve_worker.stop()
        try:
            self.mover.close()
            if self.write_behind is not None:
                self.write_behind.close()
            if self.disk is not None:
                self.disk.close()
        except OSError as error:  # nothing that was durable depends on it
            _log.warning("disk tier: could not be closed in order: %s", error)
        finally:
            if self.host is not None:
                if self.state.pool is not None:
                    self.state.pool.unregister(self.host.address(0))
                self.host.close()
            with self.state.lock:
                self._given_back = True
                self.state.changed.notify_all()


def open_tiers(
    open_disk: Callable[[], DiskTier] | None, open_host: Callable[[], HostTier] | None
) -> tuple[DiskTier | None, HostTier | None]:
    """Both tiers, or neither: where there is no memory for the arena, the directory is not left locked."""
    disk = open_disk() if open_disk is not None else None
    try:
        return disk, open_host() if open_host is not None else None
    except UsageError:
        if disk is not None:
            disk.close()
        raise
