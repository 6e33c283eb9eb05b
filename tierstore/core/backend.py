"""What is below HBM, in this process: one client's way into a :class:`~tierstore.core.core.Core`.

Every verb is decided at once under the state's lock when all that it needs is in memory. What has to be
looked for on disk, or takes long to decide, is done on the caller's thread, or on one of the core's where it
is shared by clients in other processes: a daemon has one ``LocalBackend`` for each of its sessions.

**Reading under a lease.** A lease is on the last page of each run in one tier, since those before it cannot
leave that tier first. Pages that were located are held by the same lease in a shared core, since its clients
may die; else by one of their own, which lasts until it is released: an operation in this process always does.

**Writing under a reservation.** All is decided when a client reserves: which pages are new and which slots
they get. A reservation is never taken back from a living client; what it may hold is bounded instead.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path as FilePath
from typing import TypeVar

from tierstore import copying, memory
from tierstore.arguments import seconds, whole_number
from tierstore.backend import (
    NO_HINTS,
    GroupLease,
    HitLease,
    HitRequest,
    Lease,
    Located,
    LookupRequest,
    PrefixHandle,
    Registration,
    Reservation,
    SaveHints,
)
from tierstore.codec import NONE
from tierstore.core.arrivals import Waiter
from tierstore.core.clients import Client, LocalLease, LocalReservation, Path, Refusal
from tierstore.core.core import MOVER_THREADS, Core, open_tiers
from tierstore.core.find import find, wake_loose
from tierstore.core.health import STALL_S
from tierstore.core.hits import HitSearch, HitView
from tierstore.core.loads import HostLoad
from tierstore.core.prompts import Found, PromptView
from tierstore.core.reservations import ReservationBuilder
from tierstore.errors import StoreClosedError, UsageError
from tierstore.index import LABELS, Match, Page, Tier, tier_runs
from tierstore.index.leases import PageLease
from tierstore.keys import Prompt
from tierstore.mover import Priority
from tierstore.planner import Way
from tierstore.policy import DEFAULT_POLICY, POLICIES
from tierstore.stats import StoreStats
from tierstore.tiers.device import DeviceError
from tierstore.tiers.disk import DiskTier, FileIO
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier
from tierstore.transfer import Transfer, TransferState
from tierstore.units import KIB, format_size

_log = logging.getLogger(__name__)

R = TypeVar("R")

_GRACE_S = 30.0  # beyond the end of a wait, during which what was found or brought is held
_WAIT_S = 60.0  # for a disk, where the caller sets no limit
_PIN_LOOK_S = 10.0
_AT_ONCE = 64  # pages decided under one hold of the lock: about a millisecond
_NAMES_AT_ONCE = 512  # pages looked for by name likewise
_EVICTED_AT_ONCE = 256
_WINDOW_PAGES = 4096  # of those in the host tier
_DISK_BYTES = 16 << 20
_WINDOWS_IN_ARENA = 2  # a window that comes up from disk takes this share of the host tier at most
_INLINE_BYTES = 64 << 10  # frames of less are copied on the caller's thread


@dataclass(frozen=True, slots=True)
class Sending:
    """Pages that are about to be sent, with the XXH3-64 of each, and what is to be called when they have
    been."""

    frames: Sequence[memoryview]
    checksums: Sequence[int]
    release: Callable[[], None]


class LocalBackend:
    """One client of ``core``. Thread-safe. ``owns_core``: closing this closes it, too."""

    def __init__(
        self,
        core: Core,
        *,
        client: Client | None = None,
        owns_core: bool = False,
    ) -> None:
        self.core = core
        self.client = client if client is not None else Client()
        self._state = core.state
        self._owns_core = owns_core
        self._registrations: dict[bytes, Registration] = {}
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

    # -- who asks ------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> int:
        """Make an identity known. Its number among this client's. Raises :class:`Refusal`, and
        :class:`~tierstore.errors.UsageError` when there are pages of another size under it."""
        return self.core.register(self.client, registration)

    def introduce(self, registration: Registration) -> None:
        self._known(registration)

    def _known(self, registration: Registration) -> Registration:
        digest = registration.identity.digest
        known = self._registrations.get(digest)
        if known is None or known.page_bytes != registration.page_bytes:
            self.core.know(self.client.tenant, registration)
            known = self._registrations[digest] = registration
        return known

    def _view(self, request: LookupRequest | PromptView, handle: PrefixHandle | None = None) -> PromptView:
        if isinstance(request, PromptView):
            return request
        registration = self._known(request.registration)
        handle = handle or request.handle_of(self)
        path = None
        if handle is not None:
            with self._state.lock:
                path = self.client.paths.get(handle.number)
        if handle is None or path is None:
            tokens = request.tokens_from(0)
            return PromptView(registration, request.keys, tokens, loose=request.loose, depth=request.depth)
        known = min(handle.chunks, len(path.pages), len(request.keys))
        keys, tokens = request.keys[known:], request.tokens_from(known)
        return PromptView(registration, keys, tokens, path=path, path_number=handle.number, known=known)

    # -- finding -------------------------------------------------------------------------------------

    def find(
        self,
        request: LookupRequest | PromptView,
        *,
        patience_s: float,
        caller_receives: bool = False,
        max_tokens: int | None = None,
    ) -> Transfer[Lease | None]:
        state = self._state
        view = self._view(request)
        limit = view.num_tokens if max_tokens is None else min(max_tokens, view.num_tokens)
        if self.core.disk is not None:
            state.stall_detector.poll()
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            self.core.forget_gone()
            if self.core.shared:
                self.client.require_room()
            if view.loose:
                pages = view.loose_pages(state)
                on_disk = view.loose_on_disk(state, pages)
                if not on_disk:
                    return Transfer.completed(self._lease_loose(view, pages))
        if view.loose:
            return self._after_disk(
                partial(self._look_loose, view, on_disk),
                patience_s,
                lambda: self._lease_loose(view, view.loose_pages(state)),
                otherwise=None,
            )
        with state.lock:
            found = self._found(view, limit)
            if not found.look_on_disk:
                return Transfer.completed(self._lease(view, found, limit))

        def after() -> Lease | None:
            return self._lease(view, self._found(view, limit), limit)

        return self._after_disk(self._look_at(view, limit), patience_s, after, otherwise=None)

    def find_hit(self, request: HitRequest | HitView, *, patience_s: float) -> Transfer[HitLease | None]:
        state = self._state
        view = request if isinstance(request, HitView) else self._hit_view(request)
        search = HitSearch(state, view, self._found)
        if self.core.disk is not None:
            state.stall_detector.poll()
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            self.core.forget_gone()
            if self.core.shared:
                self.client.require_room(len(view.chains) + len(view.named))
            if search.go_on(_NAMES_AT_ONCE):
                return Transfer.completed(self._lease_hit(search))
        return self._after_disk(
            partial(self._search, search), patience_s, partial(self._lease_hit, search), otherwise=None
        )

    def _hit_view(self, request: HitRequest) -> HitView:
        for group in request.named:
            self._known(group.registration)
        return HitView(
            request.chunk_tokens,
            request.num_tokens,
            [self._view(chain) for chain in request.chains],
            request.here,
            request.named,
            request.names,
            request.root,
            request.tail,
        )

    def _search(self, search: HitSearch) -> PageLease:
        """Search to the end, without the lock where the disk is read, and hold what the disk had."""
        state = self._state
        found = PageLease()
        while True:
            with state.lock:
                if state.closed or search.go_on(_NAMES_AT_ONCE):
                    return found
            looks: list[Callable[[], PageLease]] = [
                *(self._look_at(chain, search.view.num_tokens) for chain in search.chains_on_disk),
                *(partial(self._look_loose, pages, places) for pages, places in search.named_on_disk),
            ]
            for look in looks:
                hold = look()
                with state.lock:
                    found = state.leases.joined(found, hold)
            state.yield_lock()

    def _lease_hit(self, search: HitSearch) -> HitLease:
        """Lease what the longest hit needs. Under the lock."""
        view = search.view
        tokens = search.conclude()
        self._count_lookup(view.num_tokens)
        chains = []
        for chain, here, found in zip(view.chains, view.here, search.founds, strict=True):
            handle = self._remember(chain, found) if found.match.pages else None
            lease = LocalLease(0, 0, 0, (), 0.0)
            if here < tokens:
                needed = found if found.match.tokens == tokens else self._found(chain, tokens)
                lease = self._lease_found(chain, needed, view.num_tokens)
            lease.handle = handle
            chains.append(GroupLease(lease))
        named = []
        for group in view.named:
            ends = [end for end in group.rule.ends(tokens, view.chunk_tokens) if end not in group.here]
            pages = view.pages(group, ends)
            named.append(GroupLease(self._lease_pages(pages, pages.loose_pages(self._state)), ends))
        first = next((each.lease for each in (*chains, *named) if each.lease.tokens), None)
        if first is not None:
            self._count_hit(first.runs, min(first.tokens, tokens), view.chunk_tokens)
        return HitLease(tokens, search.branch, chains, named)

    def held(self, request: LookupRequest | PromptView, tokens: int) -> int:
        """How many of the first ``tokens`` tokens of a prompt are in the tree. Nothing is leased or counted.
        Raises :class:`Refusal`."""
        view = self._view(request)
        with self._state.lock:
            return self._found(view, min(tokens, view.num_tokens)).match.tokens

    def missing(self, view: PromptView) -> list[int]:
        """Which of these loose chunks are in no tier that answers. Nothing is leased or counted. Raises
        :class:`Refusal`."""
        with self._state.lock:
            return self._missing(view)

    def missing_everywhere(self, view: PromptView, *, patience_s: float) -> Transfer[list[int]]:
        """:meth:`missing`, after a look at the disk."""
        with self._state.lock:
            bring = self._brings_from_disk(view, view.num_tokens)
            if bring is None or self._state.closed:
                return Transfer.completed(self._missing(view))
        return self._after_disk(bring, patience_s, lambda: self._missing(view), otherwise=[])

    def _missing(self, view: PromptView) -> list[int]:
        return [at for at, page in enumerate(view.loose_pages(self._state)) if page is None]

    def expect(
        self, request: LookupRequest | PromptView, *, wait_s: float, tokens: int | None = None
    ) -> Transfer[None]:
        """``tokens`` (None: all) of the prompt have been promised."""
        state, client, arrivals = self._state, self.client, self.core.arrivals
        view = self._view(request)
        chunks = view.whole_chunks if tokens is None else min(tokens // view.chunk_tokens, view.whole_chunks)
        limit = chunks * view.chunk_tokens
        if wait_s <= 0 or not limit:
            return Transfer.completed(None)
        ended = False

        def settle(_: TransferState) -> None:
            nonlocal ended
            with state.lock:
                ended = True
                client.expecting.pop(transfer, None)
                arrivals.forget(waiter)

        def look() -> None:
            with state.lock:
                over = state.closed or client.ended or (not ended and not self._waits(view, limit, waiter))
            if over:
                transfer.finish()

        waiter = Waiter(look)
        transfer: Transfer[None] = Transfer(settle, pages=0, nbytes=0, deadline_s=wait_s)
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            if not client.may_expect(view.num_tokens) or not self._waits(view, limit, waiter):
                return Transfer.completed(None)  # more are not waited for: they are looked up as they are
            client.expecting[transfer] = view.num_tokens
            bring = self._brings_from_disk(view, limit)
        if bring is not None:  # the promise may be about what follows pages that are on disk only
            try:
                looked = self._after_disk(bring, wait_s, lambda: None, otherwise=None)
            except BaseException:
                transfer.cancel()
                raise
            transfer.watch(looked)
            looked.on_end(look)
        return transfer

    def _waits(self, view: PromptView, limit: int, waiter: Waiter) -> bool:
        """Have ``waiter`` wait for the first page that the first ``limit`` tokens lack; False where they lack
        none. Under the lock."""
        try:
            if view.loose:
                missing = self._missing(view)
            else:
                held = self._found(view, limit).match.tokens
                missing = [held // view.chunk_tokens] if held < limit else []
        except Refusal:
            return False
        if missing:
            page = view.registration.identity.digest, view.chunk(missing[0])[0]
            self.core.arrivals.wait_for(page, waiter)
        return bool(missing)

    def _brings_from_disk(self, view: PromptView, limit: int) -> Callable[[], PageLease] | None:
        """What brings pages of a prompt that only the disk may have into the tree. Under the lock."""
        if self.core.disk is None or not self._may_be_on_disk(view):
            return None
        if not view.loose:
            return self._look_at(view, limit)
        on_disk = view.loose_on_disk(self._state, view.loose_pages(self._state))
        return partial(self._look_loose, view, on_disk)

    def _found(self, view: PromptView, limit: int) -> Found:
        """What is in the tree of the first ``limit`` tokens. Under the lock. Forgets a path whose pages have
        left."""
        found = view.find(self._state, limit)
        if found is None:
            self._forget(view)
            found = view.find(self._state, limit)
            assert found is not None, "nothing is remembered of a prompt that is spelled out"
        return found

    def _may_be_on_disk(self, view: PromptView) -> bool:
        """Whether a look at the disk could find more of it. Likewise."""
        if view.loose:
            return bool(view.loose_on_disk(self._state, view.loose_pages(self._state)))
        if view.head_left:
            self._forget(view)
        return view.may_be_on_disk(self._state)

    def _forget(self, view: PromptView) -> None:
        self.client.forget_path(view.path_number)
        view.spell_out()

    def _after_disk(
        self, bring: Callable[[], PageLease], wait_s: float, then: Callable[[], R], *, otherwise: R
    ) -> Transfer[R]:
        """``bring`` into the tree what the disk has of a prompt, then do what is to be done ``then``, under
        the lock. When the look takes longer than ``wait_s`` it goes on, for the sake of the next lookup, and
        then() does with what is in memory. ``otherwise`` is the result when the store is closed meanwhile."""
        state, threads = self._state, self.core.threads
        if threads is None:
            hold = bring()
            with state.lock:
                try:
                    return Transfer.completed(then())
                finally:
                    state.leases.release(hold)
        client = self.client
        with state.lock:
            client.require_patience()
            client.waiting += 1
        holds: list[PageLease] = []
        ended = False

        def settle(outcome: TransferState) -> R:
            nonlocal ended
            with state.lock:
                ended = True
                client.waiting -= 1
                try:
                    unwanted = outcome is TransferState.CANCELLED or state.closed or client.ended
                    return otherwise if unwanted else then()
                except Refusal:
                    return otherwise
                finally:
                    for hold in holds:
                        state.leases.release(hold)

        transfer: Transfer[R] = Transfer(settle, pages=0, nbytes=0, deadline_s=wait_s)

        def look() -> None:
            hold = bring()
            with state.lock:
                if ended:
                    state.leases.release(hold)
                else:
                    holds.append(hold)
            transfer.finish()

        looking = threads.submit(look)
        # Where the disk is slow, what has not begun must not pile up.
        transfer.on_end(partial(_cancel, looking))
        return transfer

    def _look_at(self, view: PromptView, limit: int) -> Callable[[], PageLease]:
        return partial(self._look, view.whole(), limit, view.registration.page_bytes)

    def _look_loose(self, view: PromptView, chunks: Sequence[int]) -> PageLease:
        """Likewise of loose chunks."""
        state = self._state
        with state.lock:
            root = view.root(state)
        wake_loose(state, root, view.registration.identity, [view.chunk(chunk) for chunk in chunks])
        with state.lock:
            if state.closed:
                return PageLease()
            pages = (page for page in view.loose_pages(state) if page is not None)
            held = [(page, tier) for page in pages if (tier := page.ready_tier()) is not None]
            return state.leases.take(held, _GRACE_S)

    def _look(self, prompt: Prompt, limit: int, page_bytes: int) -> PageLease:
        """What the disk has of a prompt comes into the tree, and is held there for a while."""
        try:
            with find(self._state, prompt, limit, page_bytes) as match:
                return self._state.leases.take(_run_ends(match.pages), _GRACE_S)
        except StoreClosedError:
            return PageLease()

    def _count_lookup(self, tokens: int) -> None:
        """Count a lookup of so many tokens. Under the lock, as the one below."""
        self._state.leases.expire()
        self._state.counters.lookups += 1
        self._state.counters.lookup_tokens += tokens
        self.core.lookup_tokens[self.client.tenant] += tokens

    def _count_hit(self, runs: Sequence[tuple[str, int]], tokens: int, chunk_tokens: int) -> None:
        """Count a hit of so many tokens, the pages of which lie in these tiers."""
        for label, pages in runs:
            in_tier = min(pages * chunk_tokens, tokens)
            self._state.counters.hit_tokens[label] += in_tier
            self.core.hit_tokens[self.client.tenant, label] += in_tier
            tokens -= in_tier

    def _lease(self, view: PromptView, found: Found, limit: int) -> LocalLease:
        """Lease what was found, and count it. Under the lock."""
        self._count_lookup(limit)
        lease = self._lease_found(view, found, limit)
        self._count_hit(lease.runs, lease.tokens, view.chunk_tokens)
        if lease.tokens:
            lease.handle = self._remember(view, found)
        return lease

    def _lease_found(self, view: PromptView, found: Found, limit: int) -> LocalLease:
        """Lease what was found of a prompt's first ``limit`` tokens, and note its use. Under the lock."""
        state, core = self._state, self.core
        match = found.match
        if core.defer is None:
            self._note_use(view, limit, match)
        else:
            core.defer(partial(self._note_use_later, view, limit, match))
        if not match.pages or self.client.ended:
            return LocalLease(0, 0, 0, (), 0.0)
        runs = []
        start = 0
        for tier, end in found.runs:
            runs.append((LABELS[tier], end - start))
            start = end
        held = [(match.pages[end - 1], tier) for tier, end in found.runs]
        lease = LocalLease(
            0,
            match.tokens,
            len(match.pages),
            runs,
            state.clock() + core.lease_s,
            tail_tokens=match.tail_tokens,
            held=match.pages,
            hold=state.leases.take(held, core.lease_s),
            page_bytes=view.registration.page_bytes,
            chunk_tokens=view.chunk_tokens,
        )
        return self.client.keep(lease)

    def _lease_loose(self, view: PromptView, pages: Sequence[Page | None]) -> LocalLease:
        """:meth:`_lease` for loose pages: one lease on each of those that are there."""
        self._count_lookup(view.num_tokens)
        lease = self._lease_pages(view, pages)
        self._count_hit(lease.runs, lease.tokens, view.chunk_tokens)
        return lease

    def _lease_pages(self, view: PromptView, pages: Sequence[Page | None]) -> LocalLease:
        """:meth:`_lease_found` for loose pages."""
        state, core = self._state, self.core
        held = [
            (page, tier) for page in pages if page is not None and (tier := page.ready_tier()) is not None
        ]
        there = [page for page, _ in held]
        runs = [
            (LABELS[tier], sum(1 for _ in run)) for tier, run in itertools.groupby(tier for _, tier in held)
        ]
        tokens = len(held) * view.chunk_tokens
        self._measure(view, view.num_tokens, tokens)
        if there:
            depths = {page: view.depth + at for at, page in enumerate(pages) if page is not None}
            state.access_log.touch_loose(depths, hit=True)
        if not held or self.client.ended:
            return LocalLease(0, 0, 0, (), 0.0)
        lease = LocalLease(
            0,
            tokens,
            len(held),
            runs,
            state.clock() + core.lease_s,
            positions=[at for at, page in enumerate(pages) if page is not None],
            tail_tokens=view.chunk_tokens,
            held=there,
            hold=state.leases.take(held, core.lease_s),
            page_bytes=view.registration.page_bytes,
            chunk_tokens=view.chunk_tokens,
        )
        return self.client.keep(lease)

    def _remember(self, view: PromptView, found: Found) -> PrefixHandle | None:
        pages = found.match.pages
        known = len(pages) - (found.match.tail_tokens < view.chunk_tokens)
        if not known:
            return None
        if view.path is not None and known <= len(view.head):
            return PrefixHandle(self, view.path_number, known)
        path = Path(pages[:known], found.runs, self._state.index.changes)
        return PrefixHandle(self, self.client.remember(path), known)

    def _note_use_later(self, view: PromptView, limit: int, match: Match) -> None:
        with self._state.lock:
            if not self._state.closed:
                self._note_use(view, limit, match)

    def _unload_later(self) -> None:
        with self._state.lock:
            if not self._state.closed and self._state.unload_idle() and self.core.defer is not None:
                self.core.defer(self._unload_later)

    def _note_use(self, view: PromptView, limit: int, match: Match) -> None:
        """Take note of a lookup: for the curve, and of the use of what it has found. Under the lock."""
        if match.pages:
            self._state.access_log.touch(match.pages, hit=True)
        self._measure(view, limit, match.tokens)

    def _measure(self, view: PromptView, limit: int, tokens: int) -> None:
        page_bytes = view.registration.page_bytes
        self.core.curve.looked_up(view.all_keys(), limit, tokens, view.chunk_tokens, page_bytes)
        if self._state.unload_idle() and self.core.defer is not None:
            self.core.defer(self._unload_later)

    def holds(self, lease: Lease) -> bool:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        return not self._ended(lease)

    def release(self, lease: Lease) -> None:
        with self._state.lock:
            held = self.client.leases.pop(lease.number, None)
            if held is not None:
                self._state.leases.release(held.hold)

    # -- bringing ------------------------------------------------------------------------------------

    def window_pages(self, lease: Lease, first: int) -> int:
        tier, run = lease.run_at(first)
        if tier != Tier.DISK.label or self.core.host is None:
            return min(run, _WINDOW_PAGES)
        window = min(_DISK_BYTES, self.core.host.capacity_bytes // _WINDOWS_IN_ARENA)
        return min(run, max(window // lease.page_bytes, 1))

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        count = min(count, lease.pages - first)

        def located() -> Located | None:
            return self._located(lease, first, count)

        return self._bring(lease, first, count, wait_s, Priority.LOAD, located)

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        first = min(first, lease.pages)
        count = lease.pages - first

        def held() -> int:
            pages = 0 if self._ended(lease) else count_in_arena(lease.held, first, count)
            self._hold_under(lease, first, pages)
            return pages

        return self._bring(lease, first, count, wait_s, Priority.PREFETCH, held)

    def _bring(
        self,
        lease: LocalLease,
        first: int,
        count: int,
        wait_s: float | None,
        priority: Priority,
        result: Callable[[], R],
    ) -> Transfer[R]:
        """Have pages brought into the host tier, as far as they are not there; ``result`` is made under the
        lock."""
        state = self._state
        pages = lease.held[first : first + count]
        with state.lock:
            there = count_in_arena(lease.held, first, count)
            if there == count or self._ended(lease) or state.closed:
                return Transfer.completed(result())
            held = [(page, tier) for page in pages if (tier := page.ready_tier()) is not None]
            if len(held) < len(pages):
                return Transfer.completed(result())
            self.client.require_patience()
            self.client.waiting += 1
            on_disk = sum(page.num_tokens for page, tier in held if tier is Tier.DISK)
            self.core.write_worth(self.client.tenant).read(on_disk)
            hold = state.leases.take(held, (_WAIT_S if wait_s is None else wait_s) + _GRACE_S)

        def settled() -> R:
            self.client.waiting -= 1
            return result()

        state.stall_detector.poll()
        load = HostLoad(
            state,
            self.core.mover,
            pages,
            hold,
            deadline_s=wait_s,
            priority=priority,
            result=settled,
            let_go=partial(self._let_go, lease),
        )
        return load.start()

    def _located(self, lease: LocalLease, first: int, count: int) -> Located | None:
        """Hold what is in the arena of these pages, and say where it is. Under the lock."""
        state = self._state
        pages = 0 if self._ended(lease) else count_in_arena(lease.held, first, count)
        state.counters.loaded_pages += pages
        if not pages:
            return None
        start = self.core.arena_address
        copy = state.index.copy
        held = lease.held[first : first + pages]
        addresses = [start + copy(page, Tier.HOST).place for page in held]
        if self.core.shared:
            checksums = [page.checksum or 0 for page in held]
            self._hold_under(lease, first, pages)
            lease.located.update(lease.holders(first, pages))
            return Located(addresses, lease.ends, checksums)
        return Located(addresses, release=self._hold_for_copying(lease, first, pages))  # nobody else writes

    def suspect(self, lease: Lease, position: int) -> None:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        page = lease.held[position]
        state = self._state
        with state.lock:
            copy = page.copies[Tier.HOST]
            # One at a time: what a client says costs no more than a page to be hashed.
            if self.client.suspects or copy is None or not copy.ready or page.checksum is None:
                return
            self.client.suspects = True
            hold = state.leases.take([(page, Tier.HOST)], math.inf)
            address, expected = self.core.arena_address + copy.place, page.checksum

        def look() -> None:
            [found] = copying.hash_all([address], page.nbytes)
            with state.lock:
                self.client.suspects = False
                if found != expected and page.checksum == expected:
                    state.residency.damaged_in_host(page)
                state.leases.release(hold)
                state.changed.notify_all()

        self.core.mover.submit(Priority.SAVE, look)

    def _hold_under(self, lease: LocalLease, first: int, count: int) -> None:
        """Pages in the arena (and those before them, which cannot leave before) are held while the lease
        is."""
        if not count:
            return
        known = set(lease.hold.held) if lease.positions else lease.hold.held
        for page in lease.holders(first, count):
            if (page, Tier.HOST) not in known:
                self._state.index.lease(page, Tier.HOST)
                lease.hold.held.append((page, Tier.HOST))

    def _let_go(self, lease: LocalLease) -> bool:
        """Let pages of a hit leave the arena that are on disk, too, but those that a client was told the
        places of: what is copied here is held for as long as that takes. Whether there were any."""
        freed = False
        if not lease.hold.released:
            for position, (page, _) in enumerate(lease.hold.held):
                if page not in lease.located:
                    freed = self._state.leases.hold_on_disk(lease.hold, position) or freed
        return freed

    def _ended(self, lease: LocalLease) -> bool:
        if not self.core.shared:
            return lease.hold.released  # nobody counts the seconds but us
        return lease.hold.released or lease.hold.ends <= self._state.clock()

    def _hold_for_copying(self, lease: LocalLease, first: int, count: int) -> Callable[[], None]:
        """Hold pages in the arena until the function that is returned is called, whatever becomes of the
        lease. Loads that find no room otherwise wait for that, a little. Under the lock."""
        state = self._state
        hold = state.leases.take([(page, Tier.HOST) for page in lease.holders(first, count)], math.inf)
        state.fills.copying += count

        def release() -> None:
            with state.lock:
                state.fills.copying -= 0 if hold.released else count
                state.leases.release(hold)
                state.changed.notify_all()

        return release

    def send(self, lease: LocalLease, first: int, count: int, *, wait_s: float) -> Transfer[Sending]:
        """:meth:`locate`, for a client on another host: the pages themselves, held for as long as it takes to
        send them, whatever becomes of the client's lease."""
        state, host = self._state, self.core.host

        def sending() -> Sending:
            pages = 0 if self._ended(lease) else count_in_arena(lease.held, first, count)
            held = lease.held[first : first + pages]
            state.counters.loaded_pages += pages
            if not held or host is None:
                return Sending((), (), lambda: None)
            release = self._hold_for_copying(lease, first, pages)
            self._hold_under(lease, first, pages)
            frames = [host.view(state.index.copy(page, Tier.HOST).place, page.nbytes) for page in held]
            checksums = [page.checksum or 0 for page in held]
            return Sending(frames, checksums, release)

        return self._bring(lease, first, count, wait_s, Priority.LOAD, sending)

    # -- other hosts -----------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        return False  # what is embedded has none

    def bring(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        return Transfer.completed(0)

    # -- planning ------------------------------------------------------------------------------------

    def ways(self) -> Mapping[str, Way]:
        with self._state.lock:
            return self._state.ways()

    def declined(self, tokens: Mapping[str, int]) -> None:
        with self._state.lock:
            self._state.counters.decline(tokens)
            self.core.write_worth(self.client.tenant).declined(tokens.get(f"{Tier.DISK.label} slower", 0))

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
        state = self._state
        view = self._view(request, handle)
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            self.core.forget_gone()
            look = self._may_be_on_disk(view)
            if not look and count <= _AT_ONCE:
                return Transfer.completed(
                    self._begin(view, first, count, hints).result(self.core.arena_address)
                )
        return self._work(partial(self._reserve_in_steps, view, first, count, hints, look=look), None)

    def _reserve_in_steps(
        self, view: PromptView, first: int, count: int, hints: SaveHints, *, look: bool
    ) -> Reservation | None:
        state = self._state
        hold = PageLease()
        if look:  # what is there and not in the tree must not be stored a second time
            if view.loose:
                hold = self._look_loose(view, range(view.whole_chunks))
            else:
                hold = self._look(view.whole(), view.num_tokens, view.registration.page_bytes)
        try:
            with state.lock:
                if view.head_left:
                    self._forget(view)
                builder = self._begin(view, first, count, hints)
            while builder.unfinished:
                state.yield_lock()
                with state.lock:
                    self._step(builder)
            with state.lock:
                return builder.result(self.core.arena_address)
        finally:
            with state.lock:
                state.leases.release(hold)

    def _begin(self, view: PromptView, first: int, count: int, hints: SaveHints) -> ReservationBuilder:
        """Begin to find or make pages and to give slots to the new ones. Under the lock."""
        state = self._state
        registration = view.registration
        state.identities.setdefault(registration.identity.digest, registration.identity)
        builder = ReservationBuilder(
            state,
            self.core.quotas,
            self,
            self.client,
            view,
            range(first, first + count),
            reserve_bytes=self.core.reserve_bytes,
            hints=hints,
        )
        tokens = min(first + count, view.whole_chunks) * view.chunk_tokens
        self.core.curve.saved(view.all_keys(), tokens, view.chunk_tokens, registration.page_bytes)
        self._step(builder)
        return builder

    def _step(self, builder: ReservationBuilder) -> None:
        try:
            builder.step(_AT_ONCE)
        except BaseException:  # what it has reserved is given back
            builder.give_up()
            self._abort(builder.reservation)
            raise

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        """The bytes of positions ``first …`` have come in ``frames``. They are copied on the mover's threads;
        the checksums are those of what was copied."""
        assert isinstance(reservation, LocalReservation), "the reservation is of another backend"
        addresses = reservation.addresses or ()
        copies = [
            (to, memory.address_of(frame, writable=False))
            for to, frame in zip(addresses[first : first + len(frames)], frames, strict=True)
        ]
        reservation.copying += 1

        def copy(frames: Sequence[memoryview]) -> None:  # an argument: their memory lives as long as this
            checksums = copying.copy_and_hash(copies, reservation.page_bytes)
            with self._state.lock:
                positions = reservation.positions[first : first + len(checksums)]
                reservation.arrived.update(zip(positions, checksums, strict=True))
                reservation.copying -= 1
                if reservation.ended:
                    self._give_up(reservation)

        if sum(frame.nbytes for frame in frames) <= _INLINE_BYTES:
            copy(frames)
            return Transfer.completed(True)
        transfer: Transfer[bool] = Transfer(lambda _: True, pages=0, nbytes=0)

        def task() -> None:
            copy(frames)
            transfer.finish()

        self.core.mover.submit(Priority.SAVE, task)
        return transfer

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        assert isinstance(reservation, LocalReservation), "the reservation is of another backend"
        with self._state.lock:
            if self.client.reservations.get(reservation.number) is not reservation:
                return Transfer.completed(0)
            self._end(reservation)
            if not self.client.local:
                # Its sender may have written over a page before it was sent: what has come decides.
                arrived = reservation.arrived
                intact = {at: known for at, known in checksums.items() if arrived.get(at) == known}
                self._state.counters.torn_pages += len(checksums) - len(intact)
                checksums = intact
            at_once = len(reservation.pages) <= _AT_ONCE
            committed = self._commit(reservation, checksums, 0, _AT_ONCE) if at_once else 0
        if at_once:
            self.core.arrivals.wake()
            return Transfer.completed(committed)
        return self._work(partial(self._commit_in_steps, reservation, checksums), 0)

    def _commit_in_steps(self, reservation: LocalReservation, checksums: dict[int, int]) -> int:
        committed = 0
        for start in range(0, len(reservation.pages), _AT_ONCE):
            with self._state.lock:
                committed += self._commit(reservation, checksums, start, start + _AT_ONCE)
            self.core.arrivals.wake()
            self._state.yield_lock()
        return committed

    def _commit(self, reservation: LocalReservation, checksums: dict[int, int], start: int, stop: int) -> int:
        state = self._state
        committed: list[Page] = []
        given_up: list[Page] = []
        for position, page in zip(
            reservation.positions[start:stop], reservation.pages[start:stop], strict=True
        ):
            if position not in checksums:
                given_up.append(page)
                continue
            page.checksum = checksums[position]
            committed.append(page)
        state.fills.complete(committed)
        self.core.arrivals.committed(committed)
        state.counters.saved_pages += len(committed)
        if self.core.write_behind is not None:
            if self.core.write_worth(self.client.tenant).is_given():
                self.core.write_behind.enqueue(committed)
            else:
                state.counters.disk_declined_pages += len(committed)
        self._free(given_up)
        return len(committed)

    def abort(self, reservation: Reservation) -> None:
        with self._state.lock:
            self._abort(reservation)

    def _abort(self, reservation: Reservation) -> None:
        held = self.client.reservations.get(reservation.number)
        if held is not None:
            self._end(held)
            self._give_up(held)

    def _end(self, reservation: LocalReservation) -> None:
        self.client.end_reservation(reservation.number)
        reservation.ended = True

    def _give_up(self, reservation: LocalReservation) -> None:
        """Give slots back, once nothing of ours writes to them any more. Under the lock."""
        if not reservation.copying:
            self._free(reservation.pages)

    def _free(self, pages: Sequence[Page]) -> None:
        self._state.fills.give_up(reversed(pages))
        self._state.counters.not_stored_pages += len(pages)

    def _work(self, work: Callable[[], R], otherwise: R) -> Transfer[R]:
        """Have something done that takes long: here, or on a thread where others are not to wait for it."""
        if self.core.threads is None:
            return Transfer.completed(work())
        results: list[R] = []
        transfer: Transfer[R] = Transfer(lambda _: results[0] if results else otherwise, pages=0, nbytes=0)

        def task() -> None:
            try:
                results.append(work())
            except (StoreClosedError, Refusal) as error:
                _log.debug("a request could not be done: %s", error)
            finally:
                transfer.finish()

        self.core.threads.submit(task).add_done_callback(lambda _: transfer.finish())
        return transfer

    # -- keeping, dropping, seeing -------------------------------------------------------------------

    def pin(self, request: LookupRequest, *, undo: bool = False) -> Transfer[int]:
        pinned = self.pin_or_refuse(
            self._view(request), undo=undo
        ).wait()  # a store of this process's own waits
        return Transfer.completed(0 if isinstance(pinned, Refusal) else pinned)

    def pin_or_refuse(
        self, request: LookupRequest | PromptView, *, undo: bool = False
    ) -> Transfer[int | Refusal]:
        """:meth:`pin`; the result says why where more may not be pinned."""
        state = self._state
        view = self._view(request)
        limit = view.num_tokens // view.chunk_tokens * view.chunk_tokens
        name = view.name()

        def set_pins() -> int | Refusal:
            last: Sequence[Page]
            if view.loose:
                last = view.pages_in_tree(state)
            else:
                match = self._found(view, limit).match
                whole = match.tokens // view.chunk_tokens  # the last page may match in part only
                last = match.pages[whole - 1 : whole] if whole else ()
            try:
                return self.core.pins.pin(self.client.tenant, name, last) * view.chunk_tokens
            except Refusal as refusal:
                return refusal

        with state.lock:
            state.require_open()
            if undo:
                return Transfer.completed(self.core.pins.unpin(self.client.tenant, name) * view.chunk_tokens)
            if view.loose:
                bring = self._brings_from_disk(view, limit)
            else:
                bring = self._look_at(view, limit) if self._found(view, limit).look_on_disk else None
            if bring is None:
                return Transfer.completed(set_pins())
        return self._after_disk(bring, _PIN_LOOK_S, set_pins, otherwise=0)

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

    def flush(self, timeout: float | None) -> bool:
        return self.core.flush(timeout)

    def stats(self) -> StoreStats:
        return self.core.stats()

    def check(self) -> None:
        self.core.check()

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
        """The client has gone, or is dead: take back what it held. Idempotent."""
        client = self.client
        with self._state.lock:
            if client.ended:
                return
            client.ended = True
            for reservation in list(client.reservations.values()):
                self._end(reservation)
                self._give_up(reservation)
            for lease in client.leases.values():
                self._state.leases.release(lease.hold)
            client.leases.clear()
            client.paths.clear()
            expecting = list(client.expecting)
            self.core.client_ended(client)
        for transfer in expecting:
            transfer.cancel()

    def close(self) -> None:
        self.end()
        if self._owns_core:
            self.core.close()


def count_in_arena(pages: Sequence[Page], first: int, count: int) -> int:
    """How many pages from ``first`` on are complete in the arena, one after the other."""
    for position in range(first, first + count):
        copy = pages[position].copies[Tier.HOST]
        if copy is None or not copy.ready:
            return position - first
    return count


def _cancel(work: Future[None]) -> None:
    work.cancel()


def _run_ends(pages: Sequence[Page]) -> list[tuple[Page, Tier]]:
    """The last page of each run in one tier: a lease on these holds all of them."""
    return [(pages[end - 1], tier) for tier, end in tier_runs(pages)]


def open_core(
    path: str | FilePath | None,
    page_bytes: int,
    *,
    host_bytes: int,
    disk_bytes: int,
    disk_write_budget: int = 0,
    disk_codec: str = NONE,
    inline_bytes: int = 16 * KIB,
    policy: str = DEFAULT_POLICY,
    lease_s: float = 60.0,
    mover_threads: int = MOVER_THREADS,
    stall_s: float = STALL_S,
    pools: Sequence[PagePool | None] = (),
    io: FileIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Core:
    """The core of backends of this process's own, whose pages have up to ``page_bytes``; see
    :func:`tierstore.open`. ``pools`` are those that pages are going to be copied to and from: their devices
    are told of the host tier's memory. ``io`` and ``clock`` are for tests that make the disk fail, or time
    pass.

    Raises :class:`UsageError` for capacities that cannot hold a page and
    :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used."""
    if policy not in POLICIES:
        raise UsageError(f"unknown policy {policy!r} (known: {', '.join(POLICIES)})")
    if path is not None and not host_bytes:
        raise UsageError("a disk tier needs a host tier: pages pass through it (give host_bytes)")
    lease_s = seconds("lease_s", lease_s)
    host_bytes = _checked_room("host_bytes", host_bytes, page_bytes)
    if path is not None:
        disk_bytes = _checked_room("disk_bytes", disk_bytes, page_bytes)
    open_disk = None
    if path is not None:
        open_disk = partial(
            DiskTier.open,
            FilePath(path),
            capacity_bytes=disk_bytes,
            page_bytes=page_bytes,
            inline_bytes=whole_number("inline_bytes", inline_bytes, least=0),
            codec=disk_codec,
            io=io,
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
        clock=clock,
    )
    reached = [pool for pool in pools if pool is not None and host is not None and _reaches(core, host, pool)]
    if reached and host is not None:
        core.before_giving_back = partial(_unregister, reached, host.address(0))
    return core


def _reaches(core: Core, host: HostTier, pool: PagePool) -> bool:
    """Whether a pool's device could be told of the host tier's memory."""
    try:
        pool.register(host.address(0), host.capacity_bytes)
    except DeviceError as error:  # copies take the slower way
        size = format_size(host.capacity_bytes)
        _log.warning("the host tier (%s) cannot be pinned, loads go up slowly: %s", size, error)
        core.state.counters.unpinned_arenas += 1
        return False
    return True


def _unregister(pools: Sequence[PagePool], address: int) -> None:
    for pool in pools:
        pool.unregister(address)


def _checked_room(name: str, nbytes: int, page_bytes: int) -> int:
    """Raises :class:`UsageError` for a capacity that cannot hold a page."""
    nbytes = whole_number(name, nbytes, least=0)
    if nbytes and nbytes < page_bytes:
        raise UsageError(
            f"{name} is {format_size(nbytes)}, less than one page ({format_size(page_bytes)}): give more"
        )
    return nbytes
