"""Loads: pages come into the arena, and clients are told where they are, or sent them.

What is in the arena is answered in the call. What has to come from disk is a coroutine; the mover's
threads do the work.
"""

from __future__ import annotations

import array
import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tierstore.daemon import protocol as p
from tierstore.daemon.session import Held, Refusal, Session, checked_wait, waiting
from tierstore.index import Match, Page, Tier
from tierstore.mover import Priority
from tierstore.store.hit import EmbeddedHit
from tierstore.store.load import Loader
from tierstore.store.state import StoreState

_GRACE_S = 30.0  # beyond a load's deadline, during which what it brought is held
_WINDOW_BYTES = 2 * p.MAX_FETCH_BYTES  # of pages on their way to one client over TCP


@dataclass(frozen=True, slots=True)
class PageFrames:
    """An answer that is followed by pages. ``sent`` is to be called once their memory is not needed any
    more, on the event loop."""

    answer: p.Fetched
    frames: Sequence[memoryview]
    sent: Callable[[], None]


class Loads:
    """The verbs that bring pages. Belongs to the event loop's thread."""

    def __init__(self, state: StoreState, loader: Loader) -> None:
        self._state = state
        self._loader = loader

    def prefetch(self, session: Session, m: p.Prefetch) -> p.Prefetched | Awaitable[p.Prefetched]:
        wait_s = checked_wait(m.wait_s)
        held = session.leases.get(m.lease)
        if held is None:
            return p.Prefetched(m.id, 0)
        with self._state.lock:
            pages = self._hold_in_arena(held, 0, len(held.pages))
        if pages == len(held.pages) or self._ended(held):
            return p.Prefetched(m.id, pages)

        async def bring() -> p.Prefetched:
            pages = await self._bring(session, held, 0, len(held.pages), wait_s, Priority.PREFETCH)
            return p.Prefetched(m.id, pages)

        return bring()

    def load(self, session: Session, m: p.Load) -> p.Located | Awaitable[p.Located]:
        wait_s = checked_wait(m.wait_s)
        held, count = self._asked_for(session, m)
        if held is None:
            return p.Located(m.id, b"")
        with self._state.lock:
            pages = self._hold_in_arena(held, m.first, count)
            offsets = self._offsets(held, m.first, pages)
            self._state.counters.loaded_pages += pages
        if pages == count or self._ended(held):
            return p.Located(m.id, offsets)

        async def bring() -> p.Located:
            pages = await self._bring(session, held, m.first, count, wait_s, Priority.LOAD)
            with self._state.lock:
                return p.Located(m.id, self._offsets(held, m.first, pages))

        return bring()

    async def fetch(self, session: Session, m: p.Fetch) -> p.Fetched | PageFrames:
        wait_s = checked_wait(m.wait_s)
        held, count = self._asked_for(session, m)
        if held is None:
            return p.Fetched(m.id, 0, b"")
        page_bytes = held.registration.page_bytes
        if count > 1 and count * page_bytes > p.MAX_FETCH_BYTES:
            raise Refusal("usage", f"{count} pages of {page_bytes} bytes are more than {p.MAX_FETCH_BYTES}")
        ends = self._state.clock() + wait_s
        nbytes = count * page_bytes
        if not await self._window(session, nbytes, wait_s):
            return p.Fetched(m.id, 0, b"")
        session.sending_bytes += nbytes
        pages = 0
        try:
            with self._state.lock:
                pages = self._hold_in_arena(held, m.first, count)
            if pages < count and not self._ended(held):
                left = max(ends - self._state.clock(), 0)
                pages = await self._bring(session, held, m.first, count, left, Priority.LOAD)
        finally:
            _sent(session, nbytes - pages * page_bytes)
        return self._frames(session, m, held, pages)

    async def _window(self, session: Session, nbytes: int, wait_s: float) -> bool:
        """Wait until the client has read enough of what is on its way to it. One that does not read costs no
        more than the window."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        while session.sending_bytes and session.sending_bytes + nbytes > _WINDOW_BYTES:
            sent = loop.create_future()
            session.sent.append(sent)
            with waiting(session):
                await asyncio.wait({sent}, timeout=max(ends - loop.time(), 0))
            if not sent.done():
                session.sent.remove(sent)
                return False
        return not session.ended

    def _asked_for(self, session: Session, m: p.Load | p.Fetch) -> tuple[Held | None, int]:
        """The lease, None when it has ended, and how many of the pages asked for there are."""
        if m.first < 0 or m.count < 0:
            raise Refusal("usage", f"pages {m.first} … {m.first} + {m.count}")
        held = session.leases.get(m.lease)
        if held is None or self._ended(held):
            return None, 0
        return held, max(min(m.count, len(held.pages) - m.first), 0)

    def _ended(self, held: Held) -> bool:
        return held.lease.released or held.lease.ends <= self._state.clock()

    def _hold_in_arena(self, held: Held, first: int, count: int) -> int:
        """How many of the pages from ``first`` on are in the arena now. They stay there while the lease
        lasts: its last page is held (those before it cannot leave before it). Under the lock."""
        lease = held.lease
        if self._ended(held):
            return 0
        pages = count_in_arena(held.pages, first, count)
        if pages:
            last = (held.pages[first + pages - 1], Tier.HOST)
            if last not in lease.held:
                self._state.index.lease(*last)
                lease.held.append(last)
        return pages

    def _offsets(self, held: Held, first: int, count: int) -> bytes:
        copy = self._state.index.copy
        places = [copy(page, Tier.HOST).place for page in held.pages[first : first + count]]
        return array.array("Q", places).tobytes()

    async def _bring(
        self, session: Session, held: Held, first: int, count: int, wait_s: float, priority: Priority
    ) -> int:
        """Have pages brought into the arena; how many of them, from ``first`` on, are there then."""
        state = self._state
        state.lookout.look()
        pages = held.pages[first : first + count]
        with state.lock:
            there = [(page, tier) for page in pages if (tier := page.ready_tier()) is not None]
            lease = state.leases.take(there, wait_s + _GRACE_S)
        try:
            if len(there) == len(pages):
                chunk_tokens = held.registration.chunk_tokens
                match = Match(tuple(pages), len(pages) * chunk_tokens, chunk_tokens)
                hit = EmbeddedHit(state, self._loader, match, lease, chunk_tokens)
                with waiting(session):
                    await self._loader.to_host(hit, deadline_s=wait_s, priority=priority)
            with state.lock:
                return self._hold_in_arena(held, first, count)
        finally:
            with state.lock:
                state.leases.release(lease)

    def _frames(self, session: Session, m: p.Fetch, held: Held, count: int) -> PageFrames | p.Fetched:
        state = self._state
        assert state.host is not None
        nbytes = count * held.registration.page_bytes
        with state.lock:
            pages = held.pages[m.first : m.first + count]
            if not pages or self._ended(held):
                _sent(session, nbytes)
                return p.Fetched(m.id, 0, b"")
            # Held for as long as ZMQ needs them, whatever becomes of the client's lease.
            lease = state.leases.take([(pages[-1], Tier.HOST)], math.inf)
            places = [state.index.copy(page, Tier.HOST).place for page in pages]

        def sent() -> None:
            _sent(session, nbytes)
            with state.lock:
                state.leases.release(lease)

        views = [state.host.view(place, page.nbytes) for place, page in zip(places, pages, strict=True)]
        checksums = array.array("Q", [page.checksum or 0 for page in pages]).tobytes()
        return PageFrames(p.Fetched(m.id, count, checksums), views, sent)


def _sent(session: Session, nbytes: int) -> None:
    """These bytes are not on their way to the client any more: there is room for others."""
    session.sending_bytes -= nbytes
    for waits in session.sent:
        if not waits.done():
            waits.set_result(None)
    session.sent.clear()


def count_in_arena(pages: Sequence[Page], first: int, count: int) -> int:
    """How many pages from ``first`` on are complete in the arena, one after the other."""
    for position in range(first, first + count):
        copy = pages[position].copies[Tier.HOST]
        if copy is None or not copy.ready:
            return position - first
    return count
