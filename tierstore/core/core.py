"""The parts below HBM put together: tiers, state, mover and write-behind, and how they end.

Clients come to it through a :class:`~tierstore.core.backend.LocalBackend` each: one in this process, or one
for each session of a daemon.
"""

from __future__ import annotations

import logging
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
from tierstore.core.health import Condition
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

_QUEUE_FRACTION = 1 / 2  # of the host tier, that may wait to be written to disk
MOST_TENANT_IDENTITIES = 4096  # with a client or with pages in memory
_SPARE_IDENTITIES = 1024  # that have come since the last look for those that may go
_THREADS = 4  # that look on disk, and decide what takes long


class Core:
    """Owns the tiers it is given, and closes them. ``shared``: its clients are in other processes, so what
    they hold ends by itself, what they may hold is bounded, and work that takes long is done on threads of
    its own (else on the caller's). ``defer`` runs what an answer need not wait for; None: it is done before
    the answer."""

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
        clock: Callable[[], float] = time.monotonic,
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
        )
        self.arrivals = Arrivals(self.state.lock)
        self.quotas = Quotas(self.state, quotas or {})
        if reserve_bytes is None:
            reserve_bytes = host.capacity_bytes if host is not None else 0
        self.reserve_bytes = reserve_bytes  # that one client may hold in reservations
        self.pins = Pins(self.state, self.quotas)
        self.clients: dict[int, Client] = {}
        self.registered: dict[bytes, Identity] = {}  # by digest
        self._registrations: Counter[bytes] = Counter()  # clients that have registered it, by digest
        self._swept = 0  # how many were registered after the last sweep
        self._forgotten_bytes = 0  # of the index, when clients were last told to let go of such pages
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
        self.before_giving_back: Callable[[], None] | None = None  # the host tier's memory
        self.curve.start()

    def write_worth(self, tenant: str) -> WriteWorth:
        """Whether what a tenant saves is worth writing to disk. Under the lock."""
        worth = self._write_worth.get(tenant)
        if worth is None:
            worth = self._write_worth[tenant] = WriteWorth(self.state.clock)
        return worth

    @property
    def arena_address(self) -> int:
        """Where the host tier begins; 0 without one."""
        return self.host.address(0) if self.host is not None else 0

    # -- identities ----------------------------------------------------------------------------------

    def know(self, tenant: str, registration: Registration) -> None:
        """Pages are going to be spoken of under an identity. Raises
        :class:`~tierstore.errors.UsageError` when there are others of another size."""
        with self.state.lock:
            self._know(tenant, registration)

    def _know(self, tenant: str, registration: Registration) -> None:
        identity = registration.identity
        root = self.state.index.tree.root(identity.digest, registration.page_bytes)
        if root.nbytes != registration.page_bytes:
            raise UsageError(
                f"pages of this identity have {root.nbytes} bytes, not {registration.page_bytes}"
            )
        if registration.model_name:
            self.state.names[identity.digest] = registration.model_name
        self.quotas.register(tenant, identity.digest)
        self.state.residency.register(registration)

    def register(self, client: Client, registration: Registration) -> int:
        """:meth:`know`, for as long as ``client`` lasts or there are pages. Its number among the client's.
        Raises :class:`Refusal`, too."""
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
        """Forget its identities, as far as no other client has them and there are no pages of them. Under the
        state's lock."""
        self.clients.pop(client.number, None)
        for digest in {each.identity.digest for each in client.identities}:
            self._registrations[digest] -= 1
            self._forget(digest)

    def _require_room(self, tenant: str, digest: bytes) -> None:
        """For one identity more. Raises :class:`Refusal`."""
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
                raise Refusal("busy", f"there are {MOST_TENANT_IDENTITIES} identities already")

    def _forget(self, digest: bytes) -> None:
        """Forget an identity without clients and without pages in the tree."""
        if self._registrations[digest] <= 0:
            del self._registrations[digest]
            if self.state.index.tree.forget_root(digest):
                self.registered.pop(digest, None)
                self.state.identities.pop(digest, None)
                self.state.names.pop(digest, None)
                self.quotas.forget(digest)

    def forget_gone(self) -> None:
        """Let clients forget pages that have left the tree: now and then, all at once. Under the state's
        lock."""
        forgotten = self.state.index.forgotten_bytes
        if forgotten - self._forgotten_bytes > GONE_BYTES:
            self._forgotten_bytes = forgotten
            self.state.leases.expire()
            for client in self.clients.values():
                client.forget_gone()

    # -- seeing and ending ---------------------------------------------------------------------------

    def _capacities(self) -> dict[str, int]:
        """Bytes by tier, fastest first."""
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
        """Wait until everything saved so far is on disk, or was given up (``disk_dropped_pages``); False when
        ``timeout`` seconds pass first, or when the disk does not answer."""
        state = self.state
        pending = self.write_behind

        def flushed() -> bool:
            return pending is None or pending.idle

        return state.stall_detector.wait_for(flushed, timeout)

    def stats(self) -> StoreStats:
        """A snapshot. From any thread."""
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
            )

    def busiest(self, count: int) -> list[BusyPrefix]:
        """The prefixes that are found most often. From any thread; takes some milliseconds."""
        return busiest(self.state, self.registered, count)

    def check(self) -> None:
        """Assert that index, arena and disk agree. For tests and idle moments."""
        if self.disk is not None:
            self.disk.wait_scanned()
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
            self.mover.close()
            if self.write_behind is not None:
                self.write_behind.close()
            if self.disk is not None:
                self.disk.close()
        except OSError as error:  # nothing that was durable depends on it
            _log.warning("disk tier: could not be closed in order: %s", error)
        finally:
            if self.before_giving_back is not None:
                self.before_giving_back()
            if self.host is not None:
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
