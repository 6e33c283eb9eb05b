"""The core: the tiers below HBM, with their state, mover and write-behind.

Each client uses a core through its own :class:`~tierstore.core.backend.LocalBackend`. A daemon has one
``LocalBackend`` for each client connection.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

from tierstore.backend import Registration
from tierstore.core.arrivals import Arrivals
from tierstore.core.busiest import BusyPrefix, busiest
from tierstore.core.clients import Client, Refusal
from tierstore.core.forgetting import Forgetting
from tierstore.core.health import Condition
from tierstore.core.misses import Misses
from tierstore.core.quotas import Pins, Quotas
from tierstore.core.state import GONE_BYTES, StoreState
from tierstore.core.write_admission import WriteWorth
from tierstore.core.write_behind import WriteBehind
from tierstore.curve import HORIZON, CurveStats, ReuseCurve
from tierstore.defaults import MOVER_THREADS, STALL_S
from tierstore.errors import UsageError
from tierstore.index import Tier
from tierstore.keys import Identity
from tierstore.mover import Mover
from tierstore.policy import POLICIES
from tierstore.stats import StoreStats
from tierstore.tiers.disk import DiskTier
from tierstore.tiers.host import HostTier

_log = logging.getLogger(__name__)

_QUEUE_FRACTION = 1 / 2  # share of the host tier that may wait to be written to disk
MOST_TENANT_IDENTITIES = 4096  # identities of one tenant that have a client or pages in memory
_SPARE_IDENTITIES = 1024  # number of new identities after which unused identities are swept again
# Most departures that are stored when the store is closed: 768 KiB, if the disk tier has at least 256 MiB.
KEPT_DEPARTURES = 1 << 16
_THREADS = 4  # threads for disk lookups and other slow work


class Core:
    """The tiers below HBM and everything that decides about them. A core owns its tiers and closes them.

    ``shared`` means that the clients are in other processes: their leases expire, their leases and
    reservations are limited, and slow work runs on the core's threads instead of the caller's thread.
    ``defer`` schedules work that an answer to a client need not wait for; if it is None, such work is done
    before the answer.
    """

    def __init__(
        self,
        *,
        policy: str,
        host: HostTier | None,
        disk: DiskTier | None,
        mover_threads: int = MOVER_THREADS,
        lease_s: float = 60.0,
        reserve_bytes: int | None = None,
        quotas: Mapping[str, int] | None = None,
        shared: bool = False,
        defer: Callable[[Callable[[], None]], object] | None = None,
        stall_s: float = STALL_S,
        disk_write_budget: int = 0,
        max_age_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.host = host
        self.disk = disk
        self.lease_s = lease_s
        self.shared = shared
        self.defer = defer
        self.state = StoreState(
            [POLICIES[policy]() for _ in Tier],
            host=host,
            disk=disk,
            clock=clock,
            stall_s=stall_s,
            write_bytes_per_day=disk_write_budget,
            max_age_s=max_age_s,
            wall=wall,
        )
        self.arrivals = Arrivals(self.state.lock)
        self.quotas = Quotas(self.state, quotas or {})
        if reserve_bytes is None:
            reserve_bytes = host.capacity_bytes if host is not None else 0
        self.reserve_bytes = reserve_bytes  # bytes that one client may reserve
        self.pins = Pins(self.state, self.quotas)
        self.misses = Misses(self.state, policy)
        self.clients: dict[int, Client] = {}
        self.registered: dict[bytes, Identity] = {}  # by digest
        self.forgetting = Forgetting(self.state, disk, self.registered, self.pins)
        # number of clients that have registered an identity, by digest
        self._registrations: Counter[bytes] = Counter()
        self._swept = 0  # number of registered identities after the last sweep
        self._forgotten_bytes = 0  # ``index.forgotten_bytes`` when clients last dropped removed pages
        self.hit_tokens: Counter[tuple[str, str]] = Counter()  # by (tenant, tier)
        self.lookup_tokens: Counter[str] = Counter()  # by tenant
        self._write_worth: dict[str, WriteWorth] = {}  # by tenant
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-lookup") if shared else None
        self.curve = ReuseCurve(
            horizon_bytes=HORIZON * max(self._capacities().values(), default=0), clock=clock
        )
        self.mover = Mover(mover_threads, disk_threads=mover_threads if disk is not None else 0)
        self.write_behind: WriteBehind | None = None
        if disk is not None and host is not None:
            queue_bytes = int(host.capacity_bytes * _QUEUE_FRACTION)
            self.write_behind = WriteBehind(self.state, disk, queue_bytes=queue_bytes)
        self._given_back = False
        self.before_giving_back: Callable[[], None] | None = None  # runs before the host tier is closed
        self.curve.start()
        self.forgetting.start()

    def write_worth(self, tenant: str) -> WriteWorth:
        """Return the measurement that decides whether a tenant's saves are written to disk. Needs the
        lock."""
        worth = self._write_worth.get(tenant)
        if worth is None:
            worth = self._write_worth[tenant] = WriteWorth(self.state.clock)
        return worth

    @property
    def arena_address(self) -> int:
        """The address of the host tier's memory; 0 without a host tier."""
        return self.host.address(0) if self.host is not None else 0

    # -- identities ----------------------------------------------------------------------------------

    def know(self, tenant: str, registration: Registration) -> None:
        """Prepare the store for pages of an identity. Raise :class:`~tierstore.errors.UsageError` if the
        identity already has pages of another size."""
        with self.state.lock:
            self._know(tenant, registration)

    def _know(self, tenant: str, registration: Registration) -> None:
        identity = registration.identity
        root = self.state.index.tree.root(identity, registration.page_bytes)
        if root.nbytes != registration.page_bytes:
            raise UsageError(
                f"this identity has pages of {root.nbytes} bytes, got {registration.page_bytes} bytes"
            )
        if registration.model_name:
            self.state.names[identity.digest] = registration.model_name
        self.quotas.register(tenant, identity)
        self.state.residency.register(registration)

    def register(self, client: Client, registration: Registration) -> int:
        """Register an identity for ``client`` and return its number for this client. The core keeps the
        identity as long as the client is connected or the identity has pages. Raise :class:`Refusal` at a
        limit, and the errors of :meth:`know`."""
        digest = registration.identity.digest
        with self.state.lock:
            self._require_room(client.tenant, digest)
            self._know(client.tenant, registration)
            identity = self.registered.setdefault(digest, registration.identity)  # all clients share it
            known = any(each.identity.digest == digest for each in client.identities)
            try:
                number = client.register(replace(registration, identity=identity))
            except Refusal:
                self._forget(digest)
                raise
            self._registrations[digest] += not known
            return number

    def client_ended(self, client: Client) -> None:
        """Remove a client. Forget the client's identities that have no other client and no pages. Needs the
        lock."""
        self.clients.pop(client.number, None)
        for digest in {each.identity.digest for each in client.identities}:
            self._registrations[digest] -= 1
            self._forget(digest)

    def _require_room(self, tenant: str, digest: bytes) -> None:
        """Raise :class:`Refusal` if the tenant may not have one more identity."""
        if digest in self.registered:
            return
        if len(self.registered) > 2 * self._swept + _SPARE_IDENTITIES:
            for each in list(self.registered):
                self._forget(each)
            self._swept = len(self.registered)
        if self.quotas.identities(tenant) >= MOST_TENANT_IDENTITIES:
            for each in list(self.registered):
                self._forget(each)
            if self.quotas.identities(tenant) >= MOST_TENANT_IDENTITIES:
                raise Refusal("busy", f"a tenant may have at most {MOST_TENANT_IDENTITIES} identities")

    def _forget(self, digest: bytes) -> None:
        """Forget an identity if it has no clients and no pages in the tree."""
        if self._registrations[digest] <= 0:
            del self._registrations[digest]
            if self.state.index.tree.forget_root(digest):
                self.registered.pop(digest, None)
                self.state.identities.pop(digest, None)
                self.state.names.pop(digest, None)
                self.quotas.forget(digest)

    def forget_gone(self) -> None:
        """If many pages have left the tree, make clients drop their references to them. Needs the lock."""
        forgotten = self.state.index.forgotten_bytes
        if forgotten - self._forgotten_bytes > GONE_BYTES:
            self._forgotten_bytes = forgotten
            self.state.leases.expire()
            for client in self.clients.values():
                client.forget_gone()

    # -- statistics and shutdown ---------------------------------------------------------------------

    def _capacities(self) -> dict[str, int]:
        tiers: dict[Tier, int] = {}
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
        """Wait until everything saved so far is on disk or was given up (``disk_dropped_pages``). Return
        False if ``timeout`` seconds pass first, or if the disk does not answer."""
        state = self.state
        pending = self.write_behind
        return state.stall_detector.wait_for(lambda: pending is None or pending.idle, timeout)

    def stats(self) -> StoreStats:
        """Return a snapshot of the statistics. Thread-safe."""
        state = self.state
        state.stall_detector.poll()
        curve = self._curve_stats()
        with state.lock:
            health = state.health
            state.counters.disk_stalls = health.stalls
            state.counters.expired_leases = state.leases.expired
            state.counters.disk_read_only_s = health.spent_s(Condition.READ_ONLY)
            state.counters.disk_offline_s = health.spent_s(Condition.OFFLINE)
            return StoreStats(
                tiers=state.tier_stats(),
                pages=state.index.tree.pages,
                key_collisions=state.index.tree.key_collisions,
                open_hits=state.leases.open,
                pending_saves=0,
                pending_writes=self.write_behind.pending if self.write_behind else 0,
                disk_writable=state.disk is not None and health.writable,
                health={Tier.DISK.label: health.snapshot()} if state.disk is not None else {},
                health_line=health.line if state.disk is not None else "",
                failed_tasks=self.mover.failed_tasks,
                counters=asdict(state.counters),
                curve=curve,
                missed_last_hour=self.misses.last_hour(),
            )

    def busiest(self, count: int) -> list[BusyPrefix]:
        """Return the prefixes with the most hits. Thread-safe; takes several milliseconds."""
        return busiest(self.state, self.registered, count)

    def check(self) -> None:
        """Assert that index, arena and disk agree. (Tests and idle stores call this.)"""
        if self.disk is not None:
            self.disk.wait_scanned()
            self.forgetting.wait()
        with self.state.lock:
            self.state.check()
        if self.disk is not None:
            self.disk.check()

    def close(self) -> None:
        """Finish running work, write the queue to disk and release everything. Return also if the disk does
        not answer; durable pages stay durable. Repeated calls do nothing."""
        state = self.state
        with state.lock:
            if state.closed:
                return
            state.closed = True
        if self.threads is not None:
            self.threads.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._give_back, name="tierstore-close", daemon=True).start()
        scanned = self.disk is None or self.disk.wait_scanned(0)
        if not state.stall_detector.wait_for(
            lambda: self._given_back, None if scanned else state.health.stall_s
        ):
            _log.warning("the store was closed while its disk does not answer: the directory stays locked")

    def _give_back(self) -> None:
        self.curve.stop()
        try:
            self.forgetting.close()
            self.mover.close()
            if self.write_behind is not None:
                self.write_behind.close()
            if self.disk is not None:
                self._keep_departures(self.disk)
                self.disk.close()
        except OSError as error:  # durable pages stay durable
            _log.warning("disk tier: could not be closed cleanly: %s", error)
        finally:
            if self.before_giving_back is not None:
                self.before_giving_back()
            if self.host is not None:
                self.host.close()
            with self.state.lock:
                self._given_back = True
                self.state.changed.notify_all()

    def _keep_departures(self, disk: DiskTier) -> None:
        dump = self.state.departures.dump(min(disk.stats().capacity_bytes >> 12, KEPT_DEPARTURES))
        try:
            if dump:
                disk.keep_departures(dump)
        except OSError as error:  # after the restart, fewer misses can be explained
            _log.info("disk tier: the memory of evicted pages was not stored: %s", error)


def open_tiers(
    open_disk: Callable[[], DiskTier] | None, open_host: Callable[[], HostTier] | None
) -> tuple[DiskTier | None, HostTier | None]:
    """Open both tiers, or neither. If the host tier cannot be opened for lack of memory, close the disk, so
    that its directory does not stay locked."""
    disk = open_disk() if open_disk is not None else None
    try:
        return disk, open_host() if open_host is not None else None
    except UsageError:
        if disk is not None:
            disk.close()
        raise
