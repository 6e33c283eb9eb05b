"""Lookups: find the stored pages of a prompt and lease them.

If everything that a lookup needs is in memory, it is answered immediately, under the state's lock. A lookup
that needs the disk reads it on the caller's thread, or on the core's threads if clients in other processes
share the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from tierstore.backend import GroupLease, HitLease, Lease
from tierstore.core.arrivals import Waiter
from tierstore.core.clients import Client, LocalLease, Refusal
from tierstore.core.core import Core
from tierstore.core.hits import HitSearch, HitView
from tierstore.core.prompts import FoundPages, PromptView
from tierstore.explanation import Miss
from tierstore.index import LABELS
from tierstore.index.leases import PageLease
from tierstore.transfer import Transfer, TransferState

R = TypeVar("R")

_NAMES_AT_ONCE = 512  # pages looked up by name under one hold of the lock: one or two milliseconds
_PIN_LOOK_S = 10.0


class Lookups:
    """The lookups of one client of ``core``. Thread-safe. ``owner`` becomes the owner of returned handles."""

    def __init__(self, core: Core, client: Client, owner: object) -> None:
        self.core = core
        self.client = client
        self._owner = owner
        self._state = core.state

    # -- requests ------------------------------------------------------------------------------------

    def find(
        self, view: PromptView, limit: int, *, patience_s: float, counted: bool = True
    ) -> Transfer[Lease | None]:
        """Lease the stored pages of the first ``limit`` tokens; see
        :meth:`~tierstore.backend.Backend.find`."""
        state = self._state
        if self.core.disk is not None:
            state.stall_detector.poll()
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            self._begin(leases=1)
            found = self.found(view, limit)
            if not found.look_on_disk:
                return Transfer.completed(self._lease(view, found, limit, counted=counted))

        def after() -> Lease | None:
            return self._lease(view, self.found(view, limit), limit, counted=counted)

        return self._after_disk(view.disk_look(state, limit), patience_s, after, otherwise=None)

    def find_hit(self, view: HitView, *, patience_s: float) -> Transfer[HitLease | None]:
        """See :meth:`~tierstore.backend.Backend.find_hit`."""
        state = self._state
        search = HitSearch(state, view, self.found)
        if self.core.disk is not None:
            state.stall_detector.poll()
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            self._begin(leases=len(view.chains) + len(view.named))
            if not view.explain and search.go_on(_NAMES_AT_ONCE):
                return Transfer.completed(self._lease_hit(search))
        return self._after_disk(
            partial(self._search, search), patience_s, partial(self._lease_hit, search), otherwise=None
        )

    def expect(self, view: PromptView, limit: int, *, wait_s: float) -> Transfer[None]:
        """Wait until other clients have saved their promised pages of the first ``limit`` tokens."""
        state, client, arrivals = self._state, self.client, self.core.arrivals
        ended = False

        def settle(_: TransferState) -> None:
            nonlocal ended
            with state.lock:
                ended = True
                client.expecting.pop(transfer, None)
                arrivals.forget(waiter)

        def look(waiter: Waiter) -> None:
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
                return Transfer.completed(None)  # at a limit, do not wait: a lookup returns the pages so far
            client.expecting[transfer] = view.num_tokens
            on_disk = self.core.disk is not None and self.may_be_on_disk(view)
        if on_disk:  # the promised pages may follow pages that are only on disk
            try:
                disk_look = view.disk_look(state, limit)
                looked = self._after_disk(disk_look, wait_s, lambda: None, otherwise=None)
            except BaseException:
                transfer.cancel()
                raise
            transfer.watch(looked)
            looked.on_end(partial(look, waiter))
        return transfer

    def pin(
        self, view: PromptView, *, undo: bool = False, max_tokens: int | None = None
    ) -> Transfer[int | Refusal]:
        """Pin the stored whole chunks of a prompt's first ``max_tokens`` tokens (None: all), or undo one pin.
        The result is the number of their tokens, or the :class:`Refusal` if they may not be pinned."""
        state, pins, tenant = self._state, self.core.pins, self.client.tenant
        limit = view.num_tokens if max_tokens is None else min(max_tokens, view.num_tokens)
        limit -= limit % view.chunk_tokens
        name = view.name()

        def set_pins() -> int | Refusal:
            try:
                return pins.pin(tenant, name, view.pinned(self.found(view, limit))) * view.chunk_tokens
            except Refusal as refusal:
                return refusal

        with state.lock:
            state.require_open()
            if undo:
                return Transfer.completed(pins.unpin(tenant, name) * view.chunk_tokens)
            if not self.found(view, limit).look_on_disk:
                return Transfer.completed(set_pins())
        return self._after_disk(view.disk_look(state, limit), _PIN_LOOK_S, set_pins, otherwise=0)

    def held(self, view: PromptView, tokens: int) -> int:
        """Return how many of the first ``tokens`` tokens of a prompt are in the tree. Take no lease and do
        not count the lookup. Raise :class:`Refusal` as :meth:`PromptView.root` does."""
        with self._state.lock:
            return self.found(view, min(tokens, view.num_tokens)).tokens

    def missing(
        self, view: PromptView, tokens: int | None = None, *, patience_s: float = 0.0
    ) -> Transfer[Sequence[int]]:
        """Return the chunks of the first ``tokens`` tokens (None: all) that no readable tier has. Look at the
        disk for at most ``patience_s`` seconds. Take no lease and do not count the lookup. Raise
        :class:`Refusal` as :meth:`PromptView.root` does."""
        state = self._state
        limit = view.num_tokens if tokens is None else min(tokens, view.num_tokens)

        def missing() -> Sequence[int]:
            return view.missing(self.found(view, limit), limit)

        with state.lock:
            if not patience_s or state.closed or not self.may_be_on_disk(view):
                return Transfer.completed(missing())
        return self._after_disk(view.disk_look(state, limit), patience_s, missing, otherwise=())

    # -- in the tree (under the lock) ------------------------------------------------------------------

    def found(self, view: PromptView, limit: int) -> FoundPages:
        """Return those pages of the first ``limit`` tokens that are in the tree. Forget a remembered path
        whose pages have left the tree."""
        self._state.expire()
        found = view.find(self._state, limit)
        if found is None:
            self.spell_out(view)
            found = view.find(self._state, limit)
            assert found is not None, "a prompt without remembered pages is always found"
        return found

    def may_be_on_disk(self, view: PromptView) -> bool:
        """Return whether a disk lookup could find more pages."""
        if view.head_left:
            self.spell_out(view)
        return view.may_be_on_disk(self._state)

    def spell_out(self, view: PromptView) -> None:
        """Forget the remembered path of a prompt, and use the prompt's keys and tokens instead."""
        self.client.forget_path(view.spell_out())

    def _begin(self, *, leases: int) -> None:
        """Raise :class:`Refusal` if the client may not hold ``leases`` more leases."""
        self.core.forget_gone()
        if self.core.shared:
            self.client.require_room(leases)

    def _waits(self, view: PromptView, limit: int, waiter: Waiter) -> bool:
        """Register ``waiter`` for the first missing page of the first ``limit`` tokens. Return False if no
        page is missing."""
        try:
            missing = view.missing(self.found(view, limit), limit)
        except Refusal:
            return False
        if missing:
            page = view.registration.identity.digest, view.chunk(missing[0])[0]
            self.core.arrivals.wait_for(page, waiter)
        return bool(missing)

    # -- leases (under the lock) -----------------------------------------------------------------------

    def _lease(self, view: PromptView, found: FoundPages, limit: int, *, counted: bool) -> LocalLease:
        """Lease the found pages. Unless ``counted`` is False, count the lookup and its hit."""
        self._state.leases.expire()
        lease = self._lease_found(view, found, limit, counted=counted)
        if not counted:
            return lease
        self._count_lookup(limit)
        self._count_hit(lease.runs, lease.tokens, view.chunk_tokens)
        if lease.tokens < limit:
            self._afterwards(partial(self.core.misses.missed_pages, view, found, limit, self.client))
        return lease

    def _lease_hit(self, search: HitSearch) -> HitLease:
        """Lease the pages of the longest hit. If the request is ``counted``, count the lookup and its hit."""
        view = search.view
        self._state.leases.expire()
        tokens = search.conclude()
        if view.counted:
            self._count_lookup(view.num_tokens)
        chains = []
        for chain, here, found in zip(view.chains, view.here, search.founds, strict=True):
            needed = found if found.tokens <= tokens else self.found(chain, tokens)
            lease = self._lease_found(
                chain, needed, view.num_tokens, known=found, lacking=here < tokens, counted=view.counted
            )
            chains.append(GroupLease(lease))
        misses: Sequence[Miss] = ()
        if view.explain and search.explained is not None and search.explained[0] == tokens:
            misses = search.explained[1]
        elif view.explain:  # the disk was not read in time, or the index has changed
            misses = self.core.misses.count(search, tokens)
        named = []
        for at in range(len(view.named)):
            ends, pages, found = search.needed(at)
            lease = self._lease_found(pages, found, pages.num_tokens, counted=view.counted)
            named.append(GroupLease(lease, ends))
        if view.counted and tokens:
            first = next((each.lease for each in (*chains, *named) if each.lease.tokens), None)
            runs, most = (first.runs, min(first.tokens, tokens)) if first is not None else ((), 0)
            in_hbm = min(*view.here, tokens) if view.chains else 0
            self._count_hit(runs, most, view.chunk_tokens, in_hbm=in_hbm)
        if view.counted and tokens < view.num_tokens:
            self._afterwards(partial(self.core.misses.missed, search, tokens, self.client))
        return HitLease(tokens, search.branch, chains, named, misses=misses)

    def _lease_found(
        self,
        view: PromptView,
        found: FoundPages,
        limit: int,
        *,
        known: FoundPages | None = None,
        lacking: bool = True,
        counted: bool = True,
    ) -> LocalLease:
        """Lease the found pages of a prompt's first ``limit`` tokens, and record their use. Later requests of
        the client may refer to ``known`` (None: ``found``). If ``lacking`` is False, the client already has
        the pages, and the lease is empty."""
        state, core = self._state, self.core
        self._afterwards(partial(self._note_use, view, limit, found, counted=counted))
        if not found.pages or self.client.ended:
            return LocalLease(0, 0, 0, (), 0.0)
        handle = view.remember(self._owner, self.client, known or found, state.index.changes)
        if not lacking:
            return LocalLease(0, 0, 0, (), 0.0, handle)
        runs = []
        start = 0
        for tier, end in found.runs:
            runs.append((LABELS[tier], end - start))
            start = end
        lease = LocalLease(
            0,
            found.tokens,
            len(found.pages),
            runs,
            state.clock() + core.lease_s,
            handle,
            found.positions,
            page_bytes=view.registration.page_bytes,
            tail_tokens=found.tail_tokens,
            held=found.pages,
            hold=state.leases.take(view.held(found), core.lease_s),
            chunk_tokens=view.chunk_tokens,
        )
        return self.client.keep(lease)

    def _count_lookup(self, tokens: int) -> None:
        self._state.counters.lookups += 1
        self._state.counters.lookup_tokens += tokens
        self.core.lookup_tokens[self.client.tenant] += tokens

    def _count_hit(
        self, runs: Sequence[tuple[str, int]], tokens: int, chunk_tokens: int, *, in_hbm: int = 0
    ) -> None:
        """Count a hit by the tiers that serve it: the leading ``in_hbm`` tokens by the client's pool, and the
        remaining ones of ``tokens`` by the tiers of ``runs``."""
        self._count_hit_tokens("hbm", in_hbm)
        for label, pages in runs:
            in_tier = min(pages * chunk_tokens, tokens)
            tokens -= in_tier
            self._count_hit_tokens(label, max(in_tier - in_hbm, 0))
            in_hbm = max(in_hbm - in_tier, 0)

    def _afterwards(self, work: Callable[[], None]) -> None:
        """Do work that the answer to the client does not depend on: with ``core.defer`` after the answer,
        otherwise now. The work runs under the lock in both cases."""
        if self.core.defer is None:
            work()
        else:
            self.core.defer(partial(self._locked, work))

    def _locked(self, work: Callable[[], None]) -> None:
        with self._state.lock:
            if not self._state.closed:
                work()

    def _count_hit_tokens(self, label: str, tokens: int) -> None:
        if tokens:
            self._state.counters.hit_tokens[label] += tokens
            self.core.hit_tokens[self.client.tenant, label] += tokens

    def _note_use(self, view: PromptView, limit: int, found: FoundPages, *, counted: bool = True) -> None:
        """Record the use of the found pages. If ``counted``, add the lookup to the reuse curve."""
        view.touch(self._state.access_log, found)
        if counted:
            page_bytes = view.registration.page_bytes
            self.core.curve.looked_up(view.all_keys(), limit, found.tokens, view.chunk_tokens, page_bytes)
        self._unload_idle()

    def _unload_idle(self) -> None:
        if self._state.unload_idle() and self.core.defer is not None:
            self._afterwards(self._unload_idle)

    # -- disk lookups --------------------------------------------------------------------------------

    def _search(self, search: HitSearch) -> PageLease:
        """Continue the search to its end and read the disk without the lock. Return a lease on the pages that
        were loaded from disk."""
        state = self._state
        hold = PageLease()
        while True:
            for disk_look in search.looks:
                fetched = disk_look()
                with state.lock:
                    hold = state.leases.joined(hold, fetched)
            state.yield_lock()
            with state.lock:
                if not state.closed and not search.go_on(_NAMES_AT_ONCE):
                    continue
                if state.closed or not search.view.explain:
                    return hold
                tokens = search.conclude()
            search.explained = tokens, self.core.misses.explain(search, tokens)
            return hold

    def _after_disk(
        self, disk_look: Callable[[], PageLease], wait_s: float, then: Callable[[], R], *, otherwise: R
    ) -> Transfer[R]:
        """Run ``disk_look``, which loads pages from disk into the tree, then call ``then`` under the lock.

        If the disk lookup takes longer than ``wait_s`` seconds, ``then`` is called with the pages in memory.
        The disk lookup continues, which helps the next lookup. The result is ``otherwise`` if the store is
        closed meanwhile.
        """
        state, threads = self._state, self.core.threads
        if threads is None:
            hold = disk_look()
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
            hold = disk_look()
            with state.lock:
                if ended:
                    state.leases.release(hold)
                else:
                    holds.append(hold)
            transfer.finish()

        looking = threads.submit(look)
        # Disk lookups that nothing waits for any more must not pile up on a slow disk.
        transfer.on_end(partial(_cancel, looking))
        return transfer


def _cancel(work: Future[None]) -> None:
    work.cancel()
