"""Sessions (conversations, runs of an agent): the pages that only one session has used, and its hints.

A page belongs to the session that saved it first, until another session saves it or a page behind it. After
that the page belongs to no session, and the end of a session does not evict it. So a shared system prompt
stays after most conversations that begin with it have ended.

A session remembers its last saved pages; their parents lead to the earlier pages. Named pages have no
parents, so the session remembers each of them. Unloaded pages are not remembered, so the end of a session may
miss some pages. Forgetting a session must not miss any: it searches all pages for the session's number
(:meth:`Sessions.forget`). When a session begins, sessions without activity for an hour are dropped, and at
the limit of sessions also the least recently active one. A restart drops all sessions. This module holds no
pages.

A "likely" hint applies to the saved pages and to all earlier pages that belong to the same session. An
"unlikely" hint applies only to saved pages that no other session has used, because saves by other sessions
are stronger evidence than one caller's hint.
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
_MOST_ENDS = 8  # last pages remembered of one session, which may continue in several directions at once
_MOST_NAMED = 4096
_FORGOTTEN_S = 3600.0


class _Conversation:
    __slots__ = ("ends", "last_s", "named", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.ends: list[Page] = []  # last pages of the session's saves, in the order of the saves
        self.named: dict[Page, None] = {}  # named pages, in the order of the saves
        self.last_s = 0.0


class Sessions:
    """All sessions of a store. The caller holds the store's lock. ``give_hint`` passes a hint about pages to
    the policy."""

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
        return self._numbers > 0

    def number(self, tenant: str, name: str | None, now_s: float) -> int:
        """Return the number of the session that saves now; 0 if the save names no session."""
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
        """Record that a save continues behind ``page``: ``page`` and the pages before it no longer belong to
        another session alone."""
        # All ancestors of a session's own page belong to the same session.
        while page is not None and page.session != number:
            page.session = NO_SESSION
            page = page.parent

    def saved(self, tenant: str, name: str | None, page: Page | None) -> None:
        """Record ``page`` as the last page of a session's save."""
        session = self._sessions.get((tenant, name)) if name is not None else None
        if session is None or page is None or page.parent is None:
            return
        ends = [end for end in map(_held, session.ends) if end is not page and not _is_before(end, page)]
        session.ends = [*ends[-_MOST_ENDS + 1 :], page]

    def saved_named(self, tenant: str, name: str | None, pages: Sequence[Page]) -> None:
        session = self._sessions.get((tenant, name)) if name is not None else None
        if session is not None:
            for page in pages:
                session.named.pop(page, None)
                session.named[page] = None
            while len(session.named) > _MOST_NAMED:
                del session.named[next(iter(session.named))]

    def finish(self, tenant: str, name: str) -> int:
        """End a session and forget it. The pages that no other session has used are evicted first from now
        on. Return the number of these pages. Raise :class:`~tierstore.errors.UsageError` for an invalid
        name."""
        checked_session(text("a session's name", name))
        session = self._sessions.pop((tenant, name), None)
        if session is None:
            return 0
        own = self._own(session)
        self.give_hint(own, PageHint(Reuse.DONE))
        return len(own)

    def forget(self, tenant: str, name: str) -> int:
        """Forget a session. Return its number (``Page.session`` of the pages that only it has used); 0 for an
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
    """Return ``page`` and the pages before it, as far as they belong to session ``number`` alone."""
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
    above: Page | None = other
    while above is not None and above.depth > page.depth:
        above = above.parent
    return above is page


class HintTracker:
    """Follows one save and applies its hint. The caller holds the store's lock. ``tenant`` separates the
    session names of tenants. ``key_session`` becomes :attr:`Page.key_session` of each page that this save is
    the first to store."""

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
        """Start a save whose pages follow ``parent``."""
        sessions = self._sessions
        self._number = sessions.number(self._tenant, self._session, sessions.clock())
        self._parent = parent
        if self._number != NO_SESSION or sessions.any:
            sessions.share(parent, self._number)

    def hinted_alike(self, pages: Sequence[Page]) -> list[Page]:
        """Return those of ``pages`` that have the hint of this save and were not used since they received it.
        Such pages are usually earlier batches of this save, which the save is about to use again."""
        if self._hint is None:
            return []
        hint = self._hint.facts(self._sessions.clock())
        return [page for page in pages if page.last_use <= page.hinted and page.hint[:2] == hint[:2]]

    def hint_again(self, pages: Sequence[Page]) -> None:
        """Apply the hint again to pages that :meth:`hinted_alike` has returned, after their use was
        recorded."""
        if pages and self._hint is not None:
            self._sessions.give_hint(pages, self._hint.facts(self._sessions.clock()))

    def comes_to(self, page: Page) -> None:
        """Record ``page`` as the next page of the save, before the save changes it."""
        if all(copy is None or copy.damaged for copy in page.copies):
            page.key_session = self._key_session
        if not any(page.copies):
            page.session = self._number
            if self._hint is not None:
                self._new.add(page)
        elif page.session != self._number:
            page.session = NO_SESSION

    def saved(self, pages: Sequence[Page]) -> None:
        """Record that these pages, a part of one chain, are stored or about to be stored. The use of these
        pages must have been recorded before."""
        last = pages[-1] if pages else self._parent
        if self._named:
            self._sessions.saved_named(self._tenant, self._session, pages)
        elif self._number != NO_SESSION and last is not None:
            self._sessions.saved(self._tenant, self._session, last)
        self.about(pages)
        self._new.clear()
        self._parent = last

    def about(self, pages: Sequence[Page]) -> None:
        """Apply the hint to pages that this save does not store."""
        if self._hint is not None:
            hint = self._hint.facts(self._sessions.clock())
            self._sessions.give_hint(self._about(pages, hint), hint)

    def _about(self, pages: Sequence[Page], hint: PageHint) -> list[Page]:
        if hint.reuse < Reuse.UNKNOWN:
            own = self._number
            return [page for page in pages if page in self._new or page.session == own != NO_SESSION]
        about = list(pages)
        if self._number != NO_SESSION:
            above = pages[0].parent if pages else self._parent
            for page in own_pages(above, self._number):
                if page.last_use <= page.hinted and page.hint[:2] == hint[:2]:
                    break  # this page received the same hint before, and so did the pages before it
                about.append(page)
        return about
