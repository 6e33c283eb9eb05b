"""Which pages only one session has used, and the hints that callers give about their future.

A session has any name that its caller gives: a conversation, an agent's run. A page belongs to the session
that saved it first, until another session saves it or a page behind it. After that it belongs to none, and
the end of a session does not evict it. So a system prompt stays, although most conversations below it have
ended.

For each session, its last saved pages are remembered. The pages before them are their parents. Named pages
have no parents and are remembered one by one. Unloaded pages (old, and on disk) are not remembered. So the
end of a session may miss some of its pages. A forget must miss none: it searches all pages for the session's
number (:meth:`Sessions.forget`). Sessions without activity for an hour are forgotten when there are too many,
and all sessions after a restart. This module holds no pages.

A "likely" hint applies to all pages of the prompt that belong to its session: those saved now and earlier
ones. An "unlikely" hint applies to the pages saved now, and only to those that no other session has used:
other sessions' saves are stronger evidence than one caller's hint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from tierstore.arguments import text
from tierstore.index.page import Page
from tierstore.policy import PageHint, Reuse
from tierstore.types import Hint, checked_session

NO_SESSION = 0
MOST_SESSIONS = 1 << 14
_MOST_ENDS = 8  # of one session, which may continue in several directions at once
_MOST_NAMED = 4096
_FORGOTTEN_S = 3600.0


class _Conversation:
    __slots__ = ("ends", "last_s", "named", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: list[Page] = []  # the last one saved last
        self.named: dict[Page, None] = {}  # the last one saved last, for named pages
        self.last_s = 0.0


class Sessions:
    """All sessions of a store. Needs the store's lock. ``give_hint`` passes a hint about pages to the
    policy."""

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
        """Whether there ever was a session."""
        return self._numbers > 0

    def number(self, tenant: str, name: str | None, now_s: float) -> int:
        """Return the number of a session that saves; 0 without a session."""
        if name is None:
            return NO_SESSION
        session = self._sessions.get((tenant, name))
        if session is None:
            self._forget(now_s)
            self._numbers += 1
            session = self._sessions[tenant, name] = _Conversation(self._numbers)
        session.last_s = now_s
        self._sessions.move_to_end((tenant, name))
        return session.number

    def share(self, page: Page | None, number: int) -> None:
        """Record that a save continues behind ``page``: this page and those before it no longer belong to
        another session alone."""
        # All ancestors of a session's own page belong to the same session.
        while page is not None and page.session != number:
            page.session = NO_SESSION
            page = page.parent

    def saved(self, tenant: str, name: str | None, page: Page | None) -> None:
        """Record the last page of a session's save."""
        session = self._sessions.get((tenant, name)) if name is not None else None
        if session is None or page is None or page.parent is None:
            return
        ends = [end for end in map(_held, session.ends) if end is not page and not _is_before(end, page)]
        session.ends = [*ends[-_MOST_ENDS + 1 :], page]

    def saved_named(self, tenant: str, name: str | None, pages: Sequence[Page]) -> None:
        """Note named pages of a session's save. Each is remembered by itself."""
        session = self._sessions.get((tenant, name)) if name is not None else None
        if session is not None:
            for page in pages:
                session.named.pop(page, None)
                session.named[page] = None
            while len(session.named) > _MOST_NAMED:
                del session.named[next(iter(session.named))]

    def finish(self, tenant: str, name: str) -> int:
        """End a session and forget it: the pages that no other session has used leave first. Return their
        number. Raise :class:`~tierstore.errors.UsageError` for an invalid name."""
        checked_session(text("a session's name", name))
        session = self._sessions.pop((tenant, name), None)
        if session is None:
            return 0
        own = self._own(session)
        self.give_hint(own, PageHint(Reuse.DONE))
        return len(own)

    def forget(self, tenant: str, name: str) -> int:
        """Forget a session. Return its number, which the pages have that no other session has used; 0 for an
        unknown session. Raise :class:`~tierstore.errors.UsageError` for an invalid name."""
        checked_session(text("a session's name", name))
        session = self._sessions.pop((tenant, name), None)
        return session.number if session is not None else NO_SESSION

    def _own(self, session: _Conversation) -> list[Page]:
        own: dict[Page, None] = {}
        for end in map(_held, session.ends):
            own.update(dict.fromkeys(own_pages(end, session.number)))
        own.update(
            (page, None) for page in session.named if any(page.copies) and page.session == session.number
        )
        return list(own)

    def forget_gone(self) -> None:
        """Drop references to pages that have left the tree."""
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
    """Return ``page`` and those before it, as far as they belong to session ``number`` alone."""
    own = []
    while page is not None and page.session == number and page.parent is not None:
        own.append(page)
        page = page.parent
    return own


def _held(page: Page) -> Page:
    """Return the page, or its last ancestor that the tree still holds."""
    while page.parent is not None and not any(page.copies):
        page = page.parent
    return page


def _is_before(page: Page, other: Page) -> bool:
    """Return whether ``page`` is one of the pages before ``other``."""
    above: Page | None = other
    while above is not None and above.depth > page.depth:
        above = above.parent
    return above is page


class HintTracker:
    """Follows one save and applies its hint. Needs the store's lock. ``tenant`` separates the session names
    of tenants. ``key_session`` is the :attr:`Page.key_session` of pages that this save is the first to
    save."""

    def __init__(
        self,
        sessions: Sessions,
        hint: Hint | None,
        session: str | None,
        tenant: str = "",
        *,
        named: bool = False,
        key_session: bytes = b"",
    ) -> None:
        self._sessions = sessions
        self._key_session = key_session
        self._named = named
        self._hint = hint if hint is not None and hint.for_policy else None
        self._session = session
        self._tenant = tenant
        self._number = NO_SESSION
        self._parent: Page | None = None
        self._new: set[Page] = set()

    def begin(self, parent: Page | None) -> None:
        """Start behind ``parent``."""
        sessions = self._sessions
        self._number = sessions.number(self._tenant, self._session, sessions.clock())
        self._parent = parent
        if self._number != NO_SESSION or sessions.any:
            sessions.share(parent, self._number)

    def hinted_alike(self, pages: Sequence[Page]) -> list[Page]:
        """Return those of these pages before the save that have the same hint and were not used since. They
        are usually earlier batches of this save, and the save uses them once more."""
        if self._hint is None:
            return []
        hint = self._hint.facts(self._sessions.clock())
        return [page for page in pages if page.last_use <= page.hinted and page.hint[:2] == hint[:2]]

    def hint_again(self, pages: Sequence[Page]) -> None:
        """Apply the hint to pages that :meth:`hinted_alike` has returned, after their use was noted."""
        if pages and self._hint is not None:
            self._sessions.give_hint(pages, self._hint.facts(self._sessions.clock()))

    def comes_to(self, page: Page) -> None:
        """Record the next page, before anything is done with it."""
        if all(copy is None or copy.damaged for copy in page.copies):
            page.key_session = self._key_session
        if not any(page.copies):
            page.session = self._number
            if self._hint is not None:
                self._new.add(page)
        elif page.session != self._number:
            page.session = NO_SESSION

    def saved(self, pages: Sequence[Page]) -> None:
        """Record that these pages, one behind the other, are stored or about to be. Their use must have been
        noted."""
        last = pages[-1] if pages else self._parent
        if self._named:
            self._sessions.saved_named(self._tenant, self._session, pages)
        elif self._number != NO_SESSION and last is not None:
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
        if self._number != NO_SESSION:
            above = pages[0].parent if pages else self._parent
            for page in own_pages(above, self._number):
                if page.last_use <= page.hinted and page.hint[:2] == hint[:2]:
                    break  # the same hint was given before, also for earlier pages
                about.append(page)
        return about

    def _is_own(self, page: Page) -> bool:
        return page.session == self._number != NO_SESSION
