"""``LocalBackend``: the backend in this process, for one client of a :class:`~tierstore.core.core.Core`.

A daemon has one ``LocalBackend`` for each of its clients. A ``LocalBackend`` turns requests into views and
passes the views to the modules that decide: :mod:`tierstore.core.lookups`, :mod:`tierstore.core.reading` and
:mod:`tierstore.core.writing`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path as FilePath

from tierstore.arguments import max_age_s, seconds, whole_number
from tierstore.backend import (
    NO_HINTS,
    ForgottenPages,
    HitLease,
    HitRequest,
    Lease,
    LookupRequest,
    PrefixHandle,
    Registration,
    Reservation,
    SaveHints,
)
from tierstore.codec import NONE
from tierstore.core.clients import Client, Refusal
from tierstore.core.core import Core, open_tiers
from tierstore.core.hits import HitView
from tierstore.core.lookups import Lookups
from tierstore.core.prompts import ChainView, NamedView, PromptView
from tierstore.core.reading import Reading
from tierstore.core.writing import Writing
from tierstore.defaults import MOVER_THREADS, STALL_S
from tierstore.errors import UsageError
from tierstore.index import LABELS, Tier
from tierstore.keys import nested_tenant
from tierstore.planner import TierRate
from tierstore.policy import DEFAULT_POLICY, POLICIES
from tierstore.tiers.device import DeviceError
from tierstore.tiers.disk import DiskTier, FileIO
from tierstore.tiers.disk.keyring import open_keyring
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier
from tierstore.transfer import Transfer
from tierstore.types import ForgetReceipt, Forgettable
from tierstore.units import KIB, format_size

_log = logging.getLogger(__name__)

_EVICTED_AT_ONCE = 256


class LocalBackend:
    """One client of ``core``. Thread-safe. With ``owns_core``, :meth:`close` also closes the core. A daemon
    passes views that it has made itself instead of requests."""

    def __init__(
        self,
        core: Core,
        *,
        client: Client | None = None,
        owns_core: bool = False,
        model_name: str = "",
    ) -> None:
        self.core = core
        self._model_name = model_name  # model name for registrations that have none
        self.client = client if client is not None else Client()
        self.lookups = Lookups(core, self.client, self)
        self.reading = Reading(core, self.client)
        self.writing = Writing(core, self.client, self.lookups, self)
        # Bound methods of the parts, as in RemoteBackend.
        reading, writing = self.reading, self.writing
        self.batch_pages, self.locate, self.prefetch = reading.batch_pages, reading.locate, reading.prefetch
        self.report_damage, self.holds, self.release = reading.report_damage, reading.holds, reading.release
        self.write, self.commit, self.abort = writing.write, writing.commit, writing.abort
        self.flush, self.stats, self.check = core.flush, core.stats, core.check
        self._state = core.state
        self._owns_core = owns_core
        self._registrations: dict[bytes, Registration] = {}
        self._followers: list[Callable[[ForgottenPages], None]] = []
        with self._state.lock:
            core.clients[self.client.number] = self.client

    def __repr__(self) -> str:
        return f"LocalBackend({self.client.name or 'client'} {self.client.number})"

    @property
    def lease_s(self) -> float:
        return self.core.lease_s

    @property
    def reserve_bytes(self) -> int:
        return self.core.reserve_bytes

    # -- identities and views ------------------------------------------------------------------------

    def assign_number(self, registration: Registration) -> int:
        """Register an identity and return its number for this client. Raise :class:`Refusal` at a limit, and
        :class:`~tierstore.errors.UsageError` if the identity is registered with another page size."""
        return self.core.register(self.client, registration)

    def register(self, registration: Registration) -> None:
        self._known(registration)

    def _known(self, registration: Registration) -> Registration:
        digest = registration.identity.digest
        known = self._registrations.get(digest)
        if known is None or known.page_bytes != registration.page_bytes:
            self.core.know(self.client.tenant, registration.named(self._model_name))
            known = self._registrations[digest] = registration
        return known

    def _view(self, request: LookupRequest | PromptView, handle: PrefixHandle | None = None) -> PromptView:
        if isinstance(request, PromptView):
            return request
        registration = self._known(request.registration)
        if request.named:
            return NamedView(registration, request.keys, request.tokens_from(0), depth=request.depth)
        return self._chain(registration, request, handle or request.handle_of(self))

    def _chain(
        self, registration: Registration, request: LookupRequest, handle: PrefixHandle | None
    ) -> ChainView:
        path = None
        if handle is not None:
            with self._state.lock:
                path = self.client.paths.get(handle.number)
        if handle is None or path is None:
            return ChainView(registration, request.keys, request.tokens_from(0))
        known = min(handle.chunks, len(path.pages), len(request.keys))
        keys, tokens = request.keys[known:], request.tokens_from(known)
        return ChainView(registration, keys, tokens, path=path, path_number=handle.number, known=known)

    def _hit_view(self, request: HitRequest) -> HitView:
        for group in request.named:
            self._known(group.registration)
        chains = [
            self._chain(self._known(each.registration), each, each.handle_of(self)) for each in request.chains
        ]
        return HitView(
            request.chunk_tokens,
            request.num_tokens,
            chains,
            request.here,
            request.named,
            request.names,
            request.root,
            request.tail,
            request.counted,
            request.explain,
        )

    # -- reading -------------------------------------------------------------------------------------

    def find(
        self,
        request: LookupRequest | PromptView,
        *,
        patience_s: float,
        caller_receives: bool = False,
        max_tokens: int | None = None,
        counted: bool = True,
    ) -> Transfer[Lease | None]:
        view = self._view(request)
        limit = view.num_tokens if max_tokens is None else min(max_tokens, view.num_tokens)
        counted = counted and (isinstance(request, PromptView) or request.counted)
        return self.lookups.find(view, limit, patience_s=patience_s, counted=counted)

    def find_hit(
        self, request: HitRequest | HitView, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[HitLease | None]:
        view = request if isinstance(request, HitView) else self._hit_view(request)
        return self.lookups.find_hit(view, patience_s=patience_s)

    def expect(
        self, request: LookupRequest | PromptView, *, wait_s: float, tokens: int | None = None
    ) -> Transfer[None]:
        """Wait for other clients to save their promised pages of the prompt's first ``tokens`` tokens (None:
        all tokens)."""
        view = self._view(request)
        chunks = view.whole_chunks if tokens is None else min(tokens // view.chunk_tokens, view.whole_chunks)
        if wait_s <= 0 or not chunks:
            return Transfer.completed(None)
        return self.lookups.expect(view, chunks * view.chunk_tokens, wait_s=wait_s)

    # -- other hosts -----------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        return False  # an embedded store fetches nothing from other hosts

    def fetch_remote(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        return Transfer.completed(0)

    # -- planning ------------------------------------------------------------------------------------

    def rates(self) -> Mapping[str, TierRate]:
        with self._state.lock:
            return self._state.rates()

    def declined(self, tokens: Mapping[str, int]) -> None:
        with self._state.lock:
            self._state.counters.decline(tokens)
            self.core.write_worth(self.client.tenant).declined(tokens.get(f"{Tier.DISK.label} slower", 0))
            slower = sum(count for why, count in tokens.items() if why.endswith(" slower"))
            self.core.misses.declined(slower)

    # -- writing -------------------------------------------------------------------------------------

    def reserve(
        self,
        request: LookupRequest | PromptView,
        first: int,
        count: int,
        *,
        hints: SaveHints = NO_HINTS,
        handle: PrefixHandle | None = None,
    ) -> Transfer[Reservation | None]:
        return self.writing.reserve(self._view(request, handle), first, count, hints=hints)

    # -- pins, eviction, statistics ------------------------------------------------------------------

    def pin(
        self, request: LookupRequest, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int]:
        view = self._view(request)
        pinned = self.lookups.pin(view, undo=undo, max_tokens=max_tokens).wait()  # an embedded store waits
        return Transfer.completed(0 if isinstance(pinned, Refusal) else pinned)

    def evict(self, tier: str, pages: int | None) -> int:
        name = Tier(LABELS.index(tier))
        if name is Tier.DISK and self.core.disk is not None:
            self.core.disk.wait_scanned()
        wanted = sys.maxsize if pages is None else pages
        evicted = 0
        while evicted < wanted:
            share = min(wanted - evicted, _EVICTED_AT_ONCE)
            with self._state.lock:
                self._state.require_open()
                left = self._state.eviction.evict(name, share)
            evicted += left
            if left < share:
                break
            self._state.yield_lock()
        return evicted

    def finish(self, session: str) -> int:
        with self._state.lock:
            self._state.require_open()
            return self._state.sessions.finish(self.client.tenant, session)

    def forget(
        self, *, tenant: str | None = None, model: str | None = None, session: str | None = None
    ) -> ForgetReceipt:
        return self.core.forgetting.forget(self.forgettable(tenant=tenant, model=model, session=session))

    def forgettable(self, *, tenant: str | None, model: str | None, session: str | None) -> Forgettable:
        """Return what a client's request to forget covers. A forget never covers other tenants."""
        own = self.client.tenant
        if own and session is None:  # ``tenant`` is a tenant below the client's tenant
            tenant = own if tenant is None else nested_tenant(own, tenant)
        elif own:
            tenant = own
        return Forgettable(tenant, model, session)

    def follow_forgets(
        self, follower: Callable[[ForgottenPages], None], limit_age: Callable[[float], None]
    ) -> None:
        limit_age(self._state.ages.most_s)
        self._followers.append(follower)
        self.core.forgetting.followers.append(follower)

    @property
    def connected(self) -> bool:
        return True

    def wait_connected(self, timeout: float | None) -> bool:
        return True

    def wait_ready(self, timeout: float) -> None:
        if self.core.host is not None:
            self.core.host.wait_populated()

    # -- ending --------------------------------------------------------------------------------------

    def end(self) -> None:
        """Release everything that the client held. The daemon calls this when the client has disconnected or
        died. Repeated calls do nothing."""
        client = self.client
        with self._state.lock:
            if client.ended:
                return
            client.ended = True
            waiting = self.writing.end()
            for lease in client.leases.values():
                self._state.leases.release(lease.hold)
            client.leases.clear()
            client.paths.clear()
            expecting = list(client.expecting)
            self.core.client_ended(client)
        for expected in expecting:
            expected.cancel()
        for reserved in waiting:
            reserved.cancel()
        while self._followers:
            self.core.forgetting.followers.remove(self._followers.pop())
        self.core.arrivals.wake()

    def close(self) -> None:
        self.end()
        if self._owns_core:
            self.core.close()


def open_core(
    path: str | FilePath | None,
    page_bytes: int,
    *,
    host_bytes: int,
    disk_bytes: int,
    disk_write_budget: int = 0,
    disk_codec: str = NONE,
    disk_key: str = "",
    disk_keyring: str | FilePath | None = None,
    session_keys: bool = False,
    inline_bytes: int = 16 * KIB,
    policy: str = DEFAULT_POLICY,
    lease_s: float = 60.0,
    mover_threads: int = MOVER_THREADS,
    stall_s: float = STALL_S,
    max_age_days: float = 0.0,
    pools: Sequence[PagePool | None] = (),
    io: FileIO | None = None,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Core:
    """Open a core for backends of this process, with pages of up to ``page_bytes``; see
    :func:`tierstore.open`. ``pools`` are the HBM pools that copy to and from the host tier, whose memory is
    registered with their devices. ``io``, ``clock`` and ``wall`` let tests make the disk fail or time pass.

    Raise :class:`UsageError` for a capacity that cannot hold a page, and
    :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
    """
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r} (known: {', '.join(POLICIES)})")
    if path is not None and not host_bytes:
        raise UsageError("a disk tier needs a host tier: pages pass through it (give host_bytes)")
    lease_s = seconds("lease_s", lease_s)
    most_age_s = max_age_s(max_age_days)
    host_bytes = _checked_room("host_bytes", host_bytes, page_bytes)
    if path is not None:
        disk_bytes = _checked_room("disk_bytes", disk_bytes, page_bytes)
    inline_bytes = whole_number("inline_bytes", inline_bytes, least=0)
    directory = FilePath(path) if path is not None else None
    keyring = open_keyring(
        disk_key,
        FilePath(disk_keyring) if disk_keyring is not None else None,
        directory,
        session_keys=session_keys,
    )
    open_disk = None
    if directory is not None:
        open_disk = partial(
            DiskTier.open,
            directory,
            capacity_bytes=disk_bytes,
            page_bytes=page_bytes,
            inline_bytes=inline_bytes,
            codec=disk_codec,
            policy=policy,
            io=io,
            keyring=keyring,
            clock=clock,
        )
    disk, host = open_tiers(open_disk, partial(HostTier, host_bytes) if host_bytes else None)
    core = Core(
        policy=policy,
        host=host,
        disk=disk,
        mover_threads=whole_number("mover_threads", mover_threads, least=1),
        lease_s=lease_s,
        stall_s=seconds("stall_s", stall_s),
        disk_write_budget=whole_number("disk_write_budget", disk_write_budget, least=0),
        max_age_s=most_age_s,
        clock=clock,
        wall=wall,
    )
    reached = [pool for pool in pools if pool is not None and host is not None and _reaches(core, host, pool)]
    if reached and host is not None:
        core.before_giving_back = partial(_unregister, reached, host.address(0))
    return core


def _reaches(core: Core, host: HostTier, pool: PagePool) -> bool:
    """Register the host tier's memory with a pool's device. Return False if the device refuses."""
    try:
        pool.register(host.address(0), host.capacity_bytes)
    except DeviceError as error:  # copies still work, but slower
        size = format_size(host.capacity_bytes)
        _log.warning(
            "the host tier (%s) cannot be pinned, so loads to the device are slower: %s", size, error
        )
        core.state.counters.unpinned_arenas += 1
        return False
    return True


def _unregister(pools: Sequence[PagePool], address: int) -> None:
    for pool in pools:
        pool.unregister(address)


def _checked_room(name: str, nbytes: int, page_bytes: int) -> int:
    """Return a capacity in bytes. Raise :class:`UsageError` if it cannot hold a page."""
    nbytes = whole_number(name, nbytes, least=0)
    if nbytes and nbytes < page_bytes:
        raise UsageError(
            f"{name} is {format_size(nbytes)}, less than one page ({format_size(page_bytes)}): give more"
        )
    return nbytes
