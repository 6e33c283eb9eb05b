"""Which pages only one session has used, and what callers say of their future.

A session is whatever its caller calls one: a conversation, an agent's run. A page belongs to the session that
saved it first, until anybody else saves it or a page behind it; then it belongs to nobody, and no session's
end makes it leave. So a system prompt stays, however many of the conversations below it are over.

Remembered are, of each session, the last pages that it has come to: the pages before them are their parents.
Named pages have no parents, and are remembered one by one.
What is not remembered is not told: pages that have been unloaded (they are old, and on disk), the sessions
that were not heard of for an hour when there are too many, and all of it after a restart. Nothing here holds
a page.

A "likely" hint applies to every page that its session holds of the prompt: those saved now and its own before
them. An "unlikely" one applies to the pages saved now, and only those that nobody else has used: what others
save below a page, or have saved before, says more than one caller's word.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tierstore.arguments import text
from tierstore.index.page import Page
from tierstore.policy import PageHint, Reuse
from tierstore.types import Hint, checked_session

NOBODY = 0
MOST_SESSIONS = 1 << 14
_MOST_ENDS = 8  # of one session: it may go several ways at once
_MOST_NAMED = 4096
_FORGOTTEN_S = 3600.0


class _Conversation:
    __slots__ = ("ends", "last_s", "named", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: list[Page] = []  # the last one saved last
        self.named: dict[Page, None] = {}  # likewise, of pages that follow nothing
        self.last_s = 0.0


class Sessions:
    """All of a store's. Needs the store's lock. ``give_hint`` passes a hint on pages on to the policy."""

    def __init__(
        self, clock: Callable[[], float], give_hint: Callable[[Sequence[Page], PageHint], None]
    ) -> None:
        self.clock = clock
        self.give_hint = give_hint
        self._sessions: OrderedDict[tuple[str, str], _Conversation] = OrderedDict()
        self._numbers = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def any(self) -> bool:
        """Whether there ever was one."""
        return self._numbers > 0

    def number(self, tenant: str, name: str | None, now_s: float) -> int:
        """The number of a session that saves something; 0 for none."""
        if name is None:
            return NOBODY
        session = self._sessions.get((tenant, name))
        if session is None:
            self._forget(now_s)
            self._numbers += 1
            session = self._sessions[tenant, name] = _Conversation(self._numbers)
        session.last_s = now_s
        self._sessions.move_to_end((tenant, name))
        return session.number

    def share(self, page: Page | None, number: int) -> None:
        """Somebody goes on behind ``page``: it, and what is before it, is not another session's alone."""
        # A page of one's own has no page before it that is another's.
        while page is not None and page.session != number:
            page.session = NOBODY
            page = page.parent

    def saved(self, tenant: str, name: str | None, page: Page | None) -> None:
        """A save of a session has come to its last page."""
        session = self._sessions.get((tenant, name)) if name is not None else None
        if session is None or page is None or page.parent is None:
            return
        ends = [end for end in map(_held, session.ends) if end is not page and not _is_before(end, page)]
        session.ends = [*ends[-_MOST_ENDS + 1 :], page]

    def saved_named(self, tenant: str, name: str | None, pages: Sequence[Page]) -> None:
        """A save of a session has come to pages that follow nothing: each is remembered by itself."""
        session = self._sessions.get((tenant, name)) if name is not None else None
        if session is not None:
            for page in pages:
                session.named.pop(page, None)
                session.named[page] = None
            while len(session.named) > _MOST_NAMED:
                del session.named[next(iter(session.named))]

    def finish(self, tenant: str, name: str) -> int:
        """The session is over and forgotten: the pages that nobody else has used leave first. Returns how
        many they are. Raises :class:`~tierstore.errors.UsageError` for a name that is none."""
        checked_session(text("a session's name", name))
        session = self._sessions.pop((tenant, name), None)
        if session is None:
            return 0
        own: dict[Page, None] = {}
        for end in map(_held, session.ends):
            own.update(dict.fromkeys(own_pages(end, session.number)))
        own.update(
            (page, None) for page in session.named if any(page.copies) and page.session == session.number
        )
        self.give_hint(list(own), PageHint(Reuse.DONE))
        return len(own)

    def forget_gone(self) -> None:
        """Let go of pages that have left the tree."""
        for session in self._sessions.values():
            session.ends = list(dict.fromkeys(map(_held, session.ends)))
            session.named = {page: None for page in session.named if any(page.copies)}

    def _forget(self, now_s: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if len(self._sessions) < MOST_SESSIONS and oldest.last_s + _FORGOTTEN_S > now_s:
                return
            self._sessions.popitem(last=False)


def own_pages(page: Page | None, number: int) -> list[Page]:
    """``page`` and those before it, as far as they are session ``number``'s alone."""
    own = []
    while page is not None and page.session == number and page.parent is not None:
        own.append(page)
        page = page.parent
    return own


def _held(page: Page) -> Page:
    """The page, or the last one before it that the tree still holds."""
    while page.parent is not None and not any(page.copies):
        page = page.parent
    return page


def _is_before(page: Page, other: Page) -> bool:
    """Whether ``page`` is one of the pages before ``other``."""
    above: Page | None = other
    while above is not None and above.depth > page.depth:
        above = above.parent
    return above is page


class HintTracker:
    """Goes along with one save. Needs the store's lock. ``tenant`` keeps the names of sessions apart."""

    def __init__(
        self,
        sessions: Sessions,
        hint: Hint | None,
        session: str | None,
        tenant: str = "",
        *,
        named: bool = False,
    ) -> None:
        self._sessions = sessions
        self._named = named
        self._hint = hint if hint is not None and hint.for_policy else None
        self._session = session
        self._tenant = tenant
        self._number = NOBODY
        self._parent: Page | None = None
        self._new: set[Page] = set()

    def begin(self, parent: Page | None) -> None:
        """The save goes on behind ``parent``."""
        sessions = self._sessions
        self._number = sessions.number(self._tenant, self._session, sessions.clock())
        self._parent = parent
        if self._number != NOBODY or sessions.any:
            sessions.share(parent, self._number)

    def comes_to(self, page: Page) -> None:
        """This page is next. Before anything is done with it."""
        if not any(page.copies):
            page.session = self._number
            if self._hint is not None:
                self._new.add(page)
        elif page.session != self._number:
            page.session = NOBODY

    def saved(self, pages: Sequence[Page]) -> None:
        """These pages, one behind the other, are stored or about to be, and have been noted as used."""
        last = pages[-1] if pages else self._parent
        if self._named:
            self._sessions.saved_named(self._tenant, self._session, pages)
        elif self._number != NOBODY and last is not None:
            self._sessions.saved(self._tenant, self._session, last)
        if self._hint is not None:
            hint = self._hint.facts(self._sessions.clock())
            self._sessions.give_hint(self._about(pages, hint), hint)
        self._new.clear()
        self._parent = last

    def about(self, pages: Sequence[Page]) -> None:
        """Pass the hint on to pages that are not saved now."""
        if self._hint is not None:
            hint = self._hint.facts(self._sessions.clock())
            self._sessions.give_hint(self._about(pages, hint), hint)

    def _about(self, pages: Sequence[Page], hint: PageHint) -> list[Page]:
        if hint.reuse < Reuse.UNKNOWN:
            return [page for page in pages if page in self._new or self._is_own(page)]
        about = list(pages)
        if self._number != NOBODY:
            above = pages[0].parent if pages else self._parent
            for page in own_pages(above, self._number):
                if page.last_use <= page.hinted and page.hint[:2] == hint[:2]:
                    break  # the same was said of it before, and of those before it
                about.append(page)
        return about

    def _is_own(self, page: Page) -> bool:
        return page.session == self._number != NOBODY
