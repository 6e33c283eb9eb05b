"""What one Reserve leads to: which pages are new, and which slots they get. Decided in steps, so that a long
prompt does not hold up everybody else.
"""

from __future__ import annotations

import array

from tierstore.daemon import protocol as p
from tierstore.daemon.prompts import AskedPrompt
from tierstore.daemon.quotas import Quotas
from tierstore.daemon.session import NEVER, Path, Reservation, Session
from tierstore.index import Page, Tier
from tierstore.store.branch import Branch
from tierstore.store.state import StoreState
from tierstore.store.telling import Told


class Plan:
    """A reservation while it grows. The session holds it from the first page on, so that nothing is lost
    should the client die in the middle. Under the state's lock."""

    def __init__(
        self,
        state: StoreState,
        quotas: Quotas,
        session: Session,
        prompt: AskedPrompt,
        chunks: range,
        *,
        reserve_bytes: int,
        told: Told,
    ) -> None:
        self._state = state
        self._quotas = quotas
        self._session = session
        self._prompt = prompt
        self._chunks = chunks
        self._reserve_bytes = reserve_bytes
        self._before = prompt.first_pages(state, chunks.start)
        self._pages: list[Page] = []
        self._branch = Branch(state, told)
        above = self._before[-1] if self._before else prompt.root(state)
        self._branch.begin(above if self._before is not None else None)
        self._next = 0  # position
        self._offsets: list[int] = []
        self._stored_tokens = 0
        self._reservation = Reservation([], [], prompt.registration.page_bytes)
        self._number = 0
        self.unfinished = True

    def step(self, pages: int) -> None:
        """Go on with the next ``pages`` pages."""
        stop = min(self._next + pages, len(self._chunks))
        while self._next < stop:
            page = self._page(following=stop - self._next - 1)
            if page is None:
                self._state.counters.not_stored_pages += len(self._chunks) - self._next
                self._next = len(self._chunks)
                break
            self._branch.grow(page)
            self._pages.append(page)
            self._stored_tokens += page.num_tokens
            self._next += 1
        self.unfinished = self._next < len(self._chunks)
        self._state.fills.none_follows()
        self._branch.end_step(last=not self.unfinished)
        self._state.let_sleep()

    def result(self, number: int) -> p.Reserved:
        """The answer to request ``number``."""
        reservation = self._reservation
        if self._session.ended:
            return p.Reserved(number, 0, b"", b"", 0)
        path, known = self._remember()
        if reservation.ended or not reservation.pages:
            return p.Reserved(number, 0, b"", b"", self._stored_tokens, path, known)
        positions = array.array("I", reservation.positions).tobytes()
        offsets = array.array("Q", self._offsets).tobytes()
        return p.Reserved(number, self._number, positions, offsets, self._stored_tokens, path, known)

    def _remember(self) -> tuple[int, int]:
        """What the client may refer to when it saves what follows: a long prompt must not be sent and matched
        once more with every piece of it."""
        whole = self._pages[: self._prompt.whole_chunks - self._chunks.start]
        if not whole:
            return 0, 0
        assert self._before is not None, "there are pages behind a page that is not there"
        path = Path((*self._before, *whole), (), NEVER)
        number = self._prompt.lengthens(self._session)
        if number:
            self._session.lengthen(number, path)
        else:
            number = self._session.remember(path)
        return number, len(path.pages)

    def _page(self, *, following: int) -> Page | None:
        """The next page, in the host tier or about to be filled, which ``following`` pages come after in this
        step. None when it is in no tier and cannot be put in one."""
        state = self._state
        chunk = self._chunks[self._next]
        page = None if self._session.ended else self._branch.next(*self._prompt.chunk(chunk))
        if page is None:
            return None
        copy = page.copies[Tier.HOST]
        if copy is not None:
            state.counters.already_stored_pages += not copy.damaged
            return None if copy.damaged else page
        place = self._slot(page, following)
        if place is None:
            if any(page.copies):
                return page  # on disk, which is stored
            state.index.prune(page)
            return None
        self._reservation.positions.append(self._next)
        self._reservation.pages.append(page)
        self._offsets.append(place)
        self._session.reserved_bytes += page.nbytes
        if not self._number:
            self._number = self._session.reserve(self._reservation)
        return page

    def _slot(self, page: Page, following: int) -> int | None:
        allowed = (self._reserve_bytes - self._session.reserved_bytes) // page.nbytes
        if allowed < 1:
            return None
        if not self._quotas.admit(self._session.tenant, page):
            return None
        if self._session.tenant in self._quotas.quotas:  # nobody makes room for what may not be admitted
            following = 0
        return self._state.fills.begin(page, following=min(following, allowed - 1))
