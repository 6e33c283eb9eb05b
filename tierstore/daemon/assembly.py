"""The store inside the daemon: tiers, state, mover and write-behind, put together and taken apart again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from tierstore.daemon.settings import Settings
from tierstore.errors import UsageError
from tierstore.index import Tier
from tierstore.mover import Mover
from tierstore.policy import POLICIES
from tierstore.store.health import Condition
from tierstore.store.load import Loader
from tierstore.store.state import StoreState
from tierstore.store.stats import StoreStats
from tierstore.store.write_behind import WriteBehind
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.host import HostTier

_log = logging.getLogger(__name__)

_QUEUE_FRACTION = 1 / 2  # of the host tier, that may wait to be written to disk
_MOVER_THREADS = 4


class Assembly:
    """Opens what the settings say. Raises :class:`UsageError` and
    :class:`~tierstore.errors.StoreUnavailableError` when it cannot."""

    def __init__(self, settings: Settings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._given_back = False
        self.disk: DiskTier | None = None
        if settings.disk is not None:
            self.disk = DiskTier.open(
                settings.disk, capacity_bytes=settings.disk_bytes, page_bytes=settings.page_bytes
            )
        try:
            self.host = HostTier(settings.host_bytes, shared=True)
        except UsageError:
            if self.disk is not None:
                self.disk.close()
            raise
        policies = [POLICIES[settings.policy]() for _ in Tier]
        self.state = StoreState(policies, host=self.host, pool=None, disk=self.disk, clock=clock)
        self.mover = Mover(_MOVER_THREADS, disk_threads=_MOVER_THREADS if self.disk is not None else 0)
        self.loader = Loader(self.state, self.mover)
        self.write_behind: WriteBehind | None = None
        if self.disk is not None:
            queue_bytes = int(settings.host_bytes * _QUEUE_FRACTION)
            self.write_behind = WriteBehind(self.state, self.disk, queue_bytes=queue_bytes)

    @property
    def arena_fd(self) -> int:
        fd = self.host.shared_fd
        assert fd is not None, "the arena is not shared memory"
        return fd

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything committed so far is on disk, or was given up; False when ``timeout`` seconds
        pass first, or when the disk does not answer."""
        pending = self.write_behind
        return self.state.lookout.wait_for(lambda: pending is None or not pending.pending, timeout)

    def stats(self) -> StoreStats:
        """A snapshot. From any thread."""
        state = self.state
        state.lookout.look()
        with state.lock:
            health = state.health
            state.counters.disk_stalls = health.stalls
            state.counters.disk_read_only_s = health.spent_s(Condition.READ_ONLY)
            state.counters.disk_offline_s = health.spent_s(Condition.OFFLINE)
            return StoreStats(
                tiers=state.tier_stats(),
                pages=state.index.pages,
                key_collisions=state.index.key_collisions,
                open_hits=state.open_hits,
                pending_saves=state.pending_saves,
                pending_writes=self.write_behind.pending if self.write_behind else 0,
                disk_writable=state.disk is not None and health.writable,
                health={Tier.DISK.label: health.snapshot()} if state.disk is not None else {},
                health_line=health.line if state.disk is not None else "",
                failed_tasks=self.mover.failed_tasks,
                counters=asdict(state.counters),
            )

    def check(self) -> None:
        """Assert that index, arena and disk agree. For tests and idle moments."""
        if self.disk is not None:
            self.disk.wait_surveyed()
        with self.state.lock:
            self.state.check()
        if self.disk is not None:
            self.disk.check()

    def close(self) -> None:
        """Finish what is under way, write what is queued to disk, give everything back. Idempotent. Returns
        all the same when the disk does not answer: what was durable stays so."""
        state = self.state
        with state.lock:
            if state.closed:
                return
            state.closed = True
        threading.Thread(target=self._give_back, name="tierstore-close", daemon=True).start()
        surveyed = self.disk is None or self.disk.wait_surveyed(0)
        if not state.lookout.wait_for(lambda: self._given_back, None if surveyed else state.health.stall_s):
            _log.warning("the daemon ended while its disk does not answer")

    def _give_back(self) -> None:
        try:
            self.mover.close()
            if self.write_behind is not None:
                self.write_behind.close()
            if self.disk is not None:
                self.disk.close()
        except OSError as error:  # nothing that was durable depends on it
            _log.warning("disk tier: could not be closed in order: %s", error)
        finally:
            self.host.close()
            with self.state.lock:
                self._given_back = True
                self.state.changed.notify_all()
