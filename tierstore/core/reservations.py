"""Reservations while they are built: which pages of a save are new, and which slots they get. Reservations
are built in steps, so that a long prompt does not delay other clients.

A slot under a reservation stays reserved until the client commits the reservation, aborts it, or is dead.
If a slot were freed earlier, a client could still be writing to it when it has another client's page.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.backend import SaveHints
from tierstore.core.clients import Client, LocalReservation
from tierstore.core.departures import Cause
from tierstore.core.prompts import PromptView
from tierstore.core.quotas import Quotas
from tierstore.core.state import StoreState
from tierstore.index import Page, Tier
from tierstore.index.sessions import HintTracker
from tierstore.keys import PageKey
from tierstore.tiers.slabs import slot_bytes

_NOTED_AT_ONCE = 64


def being_written(page: Page) -> bool:
    """Return whether the page is in no tier but under a reservation, which may still be aborted."""
    copy = page.copies[Tier.HOST]
    filling = copy is not None and not copy.ready and not copy.damaged
    return filling and page.copies[Tier.DISK] is None


class _Branch:
    """The path of pages that a save follows, in steps. Between two steps, other threads may take the lock."""

    def __init__(self, state: StoreState, hints: SaveHints, tenant: str, *, named: bool) -> None:
        self._state = state
        self._named = named  # if true, the parent of each page is the root
        self._depths: dict[Page, int] = {}  # depths of the pages of this step, if they are named
        self._tracker = HintTracker(
            state.sessions,
            hints.hint,
            hints.session,
            tenant,
            named=named,
            key_session=state.disk.session_keys.hash(tenant, hints.session)
            if state.disk is not None
            else b"",
        )
        self._end: Page | None = None
        self._held: Page | None = None  # page held between steps, so that the next step finds it in the tree
        self._step: list[Page] = []

    def begin(self, parent: Page | None) -> None:
        """Start a save whose pages follow ``parent``; None if the save has no pages."""
        self._end = parent
        self._tracker.begin(parent)
        self._hold(parent)

    def use_before(self, pages: Sequence[Page]) -> None:
        """Record that the save uses the pages before it. Earlier batches of the same save keep its hint."""
        alike = self._tracker.hinted_alike(pages)
        self._state.access_log.touch(pages, hit=False)
        self._tracker.hint_again(alike)

    def next(self, key: PageKey, tokens: bytes) -> Page | None:
        """Return the next page of the path, found or created. Return None if the page before it has left
        every tier, because the next page could never be found then."""
        if self._end is None or (self._end.parent is not None and not any(self._end.copies)):
            return None
        page = self._state.index.add(self._end, key, tokens)
        self._tracker.comes_to(page)
        return page

    def grow(self, page: Page, depth: int) -> None:
        """Continue the path with ``page``, which is stored or about to be, and has ``depth`` pages before
        it."""
        if self._named:
            self._depths[page] = depth
            return
        self._step.append(page)
        self._end = page

    def end_step(self, *, last: bool) -> None:
        """Record the use of the pages of this step."""
        if self._named:
            self._state.access_log.touch_named(self._depths, hit=False)
            self._step = list(self._depths)
            self._depths = {}
        else:
            self._state.access_log.touch(self._step, hit=False)
        self._tracker.saved(self._step)
        self._step = []
        self._hold(None if last else self._end)
        self._state.forget_gone()

    def about(self, pages: Sequence[Page]) -> None:
        """Apply the hints of a save without pages to these named pages. Pages that the hints declare finished
        are evicted as soon as nothing holds them, because no other pages depend on them."""
        self._tracker.about(pages)
        self._state.eviction.leaving.evict_when_idle(pages)

    def give_up(self) -> None:
        """End the path of a save that does not continue."""
        self._step = []
        self._hold(None)

    def _hold(self, page: Page | None) -> None:
        if page is not None:
            self._state.index.hold(page)
        if self._held is not None:
            self._state.index.unhold(self._held)
        self._held = page


class ReservationBuilder:
    """A reservation while it grows. The client holds it from its first page on, so that its slots are freed
    if the client dies before it is complete. Needs the state's lock."""

    def __init__(
        self,
        state: StoreState,
        quotas: Quotas,
        owner: object,
        client: Client,
        prompt: PromptView,
        chunks: range,
        *,
        reserve_bytes: int,
        hints: SaveHints,
    ) -> None:
        self._state = state
        self._quotas = quotas
        self._client = client
        self._prompt = prompt
        self._chunks = chunks
        self._reserve_bytes = reserve_bytes
        self._before = prompt.first_pages(state, chunks.start)
        self._pages: list[Page] = []
        self._positions: list[int] = []
        self._branch = _Branch(state, hints, client.tenant, named=prompt.named)
        above = self._before[-1] if self._before else prompt.root(state)
        self._branch.begin(above if self._before is not None else None)
        if prompt.named and not chunks:
            found = prompt.find(state, prompt.num_tokens)
            self._branch.about(found.pages if found is not None else ())
        if self._before:
            self._branch.use_before(self._before)
        self._next = 0  # position in ``chunks`` of the next page
        self._offsets: list[int] = []
        self._stored_tokens = 0
        self.reservation = LocalReservation(
            0, self._positions, [], 0, page_bytes=prompt.registration.page_bytes
        )
        self._owner = owner
        self.unfinished = True

    def step(self, pages: int) -> None:
        """Process the next ``pages`` pages of the save."""
        stop = min(self._next + pages, len(self._chunks))
        while self._next < stop:
            page = self._page(following=stop - self._next - 1)
            if page is None:
                self._state.counters.not_stored_pages += len(self._chunks) - self._next
                self._next = len(self._chunks)
                break
            self._branch.grow(page, self._prompt.depth + self._chunks[self._next])
            self._pages.append(page)
            self._stored_tokens += page.num_tokens
            self._next += 1
        self.unfinished = self._next < len(self._chunks)
        self._state.fills.none_follows()
        self._branch.end_step(last=not self.unfinished)
        self._state.unload_idle()

    def give_up(self) -> None:
        """End a reservation after a step has raised an exception."""
        self._state.fills.none_follows()
        self._branch.give_up()

    def result(self, address: int) -> LocalReservation | None:
        """Return the reservation; None if the client has disconnected. The arena begins at ``address``."""
        if self._client.ended:
            return None
        reservation = self.reservation
        reservation.stored_tokens = self._stored_tokens
        whole = self._pages[: self._prompt.whole_chunks - self._chunks.start]
        if whole:
            before = self._before or ()
            reservation.handle = self._prompt.remember_saved(self._owner, self._client, before, whole)
        if reservation.ended or not reservation.pages:
            return LocalReservation(0, [], [], self._stored_tokens, reservation.handle)
        reservation.addresses = [address + offset for offset in self._offsets]
        return reservation

    def _page(self, *, following: int) -> Page | None:
        """Return the next page, which is in the host tier or gets a slot there; None if it is in no tier and
        gets no slot. ``following`` is the number of pages after this page in the same step."""
        state = self._state
        chunk = self._chunks[self._next]
        if chunk >= self._prompt.whole_chunks and self._prompt.registration.identity.whole_pages:
            return None  # a lookup could never find the page
        page = None if self._client.ended else self._branch.next(*self._prompt.chunk(chunk))
        if page is None:
            return None
        copy = page.copies[Tier.HOST]
        if copy is not None and not copy.damaged:
            if being_written(page):
                return None  # another client has begun to write the page since this save's lookup
            state.counters.already_stored_pages += 1
            return page
        place = self._slot(page, following)
        if place is None:
            if any(page.copies):
                return page  # the page is on disk, so it counts as stored
            state.index.prune(page)
            self._note_no_room()
            return None
        self._positions.append(self._next)
        self.reservation.pages.append(page)
        self._offsets.append(place)
        self._client.reserved_bytes += slot_bytes(page.nbytes)
        if not self.reservation.number:
            self.reservation.number = self._client.reserve(self.reservation)
        return page

    def _note_no_room(self) -> None:
        """Record that the next pages found no room, for at most as many pages as one step handles."""
        prompt, departures = self._prompt, self._state.departures
        for chunk in self._chunks[self._next : self._next + _NOTED_AT_ONCE]:
            if chunk < prompt.whole_chunks:
                departures.note(prompt.registration.identity.digest, prompt.chunk(chunk)[0], Cause.NO_ROOM)

    def _slot(self, page: Page, following: int) -> int | None:
        if self._state.host is None:
            return None
        allowed = (self._reserve_bytes - self._client.reserved_bytes) // slot_bytes(page.nbytes)
        if allowed < 1:
            return None
        if not self._quotas.admit(page):
            return None
        # Do not make room for the following pages, because the quota may not admit them.
        if self._quotas.limited(page):
            following = 0
        return self._state.fills.begin(page, following=min(following, allowed - 1))
