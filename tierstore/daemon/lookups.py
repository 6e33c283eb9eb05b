"""Lookups: what is found of a prompt, what of it is held, and what the client may refer to later.

What is in the tree is answered in the call. Where the tree ends and the disk may know more, the answer is a
coroutine: a thread looks in the disk's index, and the event loop is free meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager

from tierstore.curve import Notes
from tierstore.daemon import protocol as p
from tierstore.daemon.prompts import AskedPrompt, Found
from tierstore.daemon.session import MOST_LEASES, Held, Path, Refusal, Session, checked_wait, waiting
from tierstore.errors import StoreClosedError
from tierstore.index import Match, Page, Tier, tier_runs
from tierstore.keys import Prompt
from tierstore.store.find import find
from tierstore.store.leases import Lease
from tierstore.store.state import StoreState

_GRACE_S = 30.0  # during which what was found on disk stays in the tree

LABELS = tuple(tier.label for tier in Tier)


class Lookups:
    """The verbs that find pages and let them go. Belongs to the event loop's thread."""

    def __init__(
        self,
        state: StoreState,
        notes: Notes,
        *,
        lease_s: float,
        threads: Executor,
        later: Callable[[Callable[[], None]], object],
    ) -> None:
        """``threads`` look on disk; ``later`` runs what an answer need not wait for."""
        self._state = state
        self._notes = notes
        self._lease_s = lease_s
        self._threads = threads
        self._later = later
        self.hit_tokens: Counter[tuple[str, str]] = Counter()  # by (tenant, tier)
        self.lookup_tokens: Counter[str] = Counter()  # by tenant

    def lookup(self, session: Session, m: p.Lookup) -> p.Found | Awaitable[p.Found]:
        if m.released:
            self.release(session, m.released)
        wait_s = checked_wait(m.wait_s)
        prompt = AskedPrompt(session, m.prompt)
        if m.max_tokens < 0:
            raise Refusal("usage", f"max_tokens is {m.max_tokens}")
        limit = min(m.max_tokens, prompt.num_tokens)
        with self._state.lock:
            found = self.find(session, prompt, limit)
            if not found.look_on_disk:
                return self._found(session, m.id, prompt, found, limit)
        return self._lookup_on_disk(session, m.id, prompt, limit, wait_s)

    def find(self, session: Session, prompt: AskedPrompt, limit: int) -> Found:
        """What is in the tree of the first ``limit`` tokens. Under the lock. Forgets a path whose pages have
        left."""
        with self._forgetting(session, prompt):
            return prompt.find(self._state, limit)

    def may_be_on_disk(self, session: Session, prompt: AskedPrompt) -> bool:
        """Whether a look at the disk could find more of it. Likewise."""
        with self._forgetting(session, prompt):
            return prompt.may_be_on_disk(self._state)

    @contextmanager
    def _forgetting(self, session: Session, prompt: AskedPrompt) -> Iterator[None]:
        self._state.require_open()
        try:
            yield
        except Refusal:
            session.forget_path(prompt.path_number)
            raise

    async def _lookup_on_disk(
        self, session: Session, number: int, prompt: AskedPrompt, limit: int, wait_s: float
    ) -> p.Found:
        lease = await self.look_on_disk(session, prompt, limit, wait_s)
        with self._state.lock:
            try:
                found = self.find(session, prompt, limit)
                return self._found(session, number, prompt, found, limit)
            finally:
                self._state.leases.release(lease)

    async def look_on_disk(self, session: Session, prompt: AskedPrompt, limit: int, wait_s: float) -> Lease:
        """Bring into the tree what the disk has of a prompt, and hold it there. The lease is an empty one
        when that took too long; what was found then is in the tree for the next lookup."""
        self._state.lookout.look()
        whole = prompt.whole()
        looking = self._threads.submit(self._look, whole, limit, prompt.registration.page_bytes)
        looked = asyncio.wrap_future(looking)
        with waiting(session):
            await asyncio.wait({looked}, timeout=wait_s)
        if looked.done():
            return looked.result()
        # Where the disk is slow, what has not begun must not pile up.
        if not looking.cancel():
            looking.add_done_callback(self._release_late)
        return Lease()

    def _look(self, prompt: Prompt, limit: int, page_bytes: int) -> Lease:
        try:
            with find(self._state, prompt, limit, page_bytes) as match:
                return self._state.leases.take(run_ends(match.pages), _GRACE_S)
        except StoreClosedError:
            return Lease()

    def _release_late(self, looked: Future[Lease]) -> None:
        with self._state.lock:
            self._state.leases.release(looked.result())

    def _found(self, session: Session, number: int, prompt: AskedPrompt, found: Found, limit: int) -> p.Found:
        """Lease what was found and describe it. Under the lock."""
        state = self._state
        state.leases.expire()
        state.counters.lookups += 1
        state.counters.lookup_tokens += limit
        self.lookup_tokens[session.tenant] += limit
        match = found.match
        self._later(lambda: self._follow_up(prompt, limit, match))
        if not match.pages or session.ended:
            return p.Found(number, 0, 0, 0, [], 0, 0)
        self._require_room(session)
        held = [(match.pages[end - 1], tier) for tier, end in found.runs]
        lease = session.keep(Held(match.pages, state.leases.take(held, self._lease_s), prompt.registration))
        self._count(session.tenant, prompt.chunk_tokens, match, found.runs)
        path, known = self._remember(session, prompt, found)
        tiers = []
        start = 0
        for tier, end in found.runs:
            tiers.append((LABELS[tier], end - start))
            start = end
        return p.Found(number, match.tokens, match.tail_tokens, lease, tiers, path, known)

    def _require_room(self, session: Session) -> None:
        session.forget_ended_leases()
        if len(session.leases) >= MOST_LEASES:
            raise Refusal("busy", f"a session may hold {MOST_LEASES} leases: release some")

    def _remember(self, session: Session, prompt: AskedPrompt, found: Found) -> tuple[int, int]:
        pages = found.match.pages
        known = len(pages) - (found.match.tail_tokens < prompt.chunk_tokens)
        if not known:
            return 0, 0
        if prompt.path is not None and known <= len(prompt.head):
            return prompt.path_number, known
        path = Path(pages[:known], found.runs, self._state.index.changes)
        return session.remember(path), known

    def _count(self, tenant: str, chunk_tokens: int, match: Match, runs: Sequence[tuple[Tier, int]]) -> None:
        start = 0
        for tier, end in runs:
            tokens = (end - start) * chunk_tokens
            if end == len(match.pages):
                tokens += match.tail_tokens - chunk_tokens
            self._state.counters.hit_tokens[LABELS[tier]] += tokens
            self.hit_tokens[tenant, LABELS[tier]] += tokens
            start = end

    def _follow_up(self, prompt: AskedPrompt, limit: int, match: Match) -> None:
        """Take note of a lookup: for the curve, and of the use of what it has found."""
        self._notes.looked_up(
            prompt.groups(),
            limit,
            match.tokens,
            prompt.chunk_tokens,
            prompt.registration.page_bytes,
        )
        if match.pages:
            with self._state.lock:
                if not self._state.closed:
                    self._state.uses.touch(match.pages, hit=True)
                    self._state.let_sleep()

    def release(self, session: Session, leases: Sequence[int]) -> None:
        """Those that are not the session's are passed over."""
        with self._state.lock:
            for number in leases:
                held = session.leases.pop(number, None)
                if held is not None:
                    self._state.leases.release(held.lease)


def run_ends(pages: Sequence[Page]) -> list[tuple[Page, Tier]]:
    """The last page of each run in one tier: a lease on these holds all of them."""
    return [(pages[end - 1], tier) for tier, end in tier_runs(pages)]
