"""What is said with a save of the future of its pages, and which pages that is about.

That a prompt is going to be continued is about all that its session has of it: the pages saved now and its
own before them. That it is not is about the pages saved now, and only those that nobody else has used: what
others save below a page, or have saved before, says more than one caller's word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.hints import Hint, checked_session
from tierstore.index import Page
from tierstore.policy import PageHint, Reuse
from tierstore.store.sessions import NOBODY, own_pages
from tierstore.store.state import StoreState


@dataclass(frozen=True, slots=True)
class Told:
    """A hint, and whose save it came with. ``tenant`` keeps the names of sessions apart. Raises
    :class:`~tierstore.errors.UsageError` for a name that is none."""

    hint: Hint | None = None
    session: str | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        checked_session(self.session)

    def __bool__(self) -> bool:
        return self.hint is not None or self.session is not None


NOTHING_TOLD = Told()


class Teller:
    """Goes along with one save. Under the state's lock."""

    def __init__(self, state: StoreState, told: Told) -> None:
        self._state = state
        self._told = told
        self._number = NOBODY
        self._parent: Page | None = None
        self._new: set[Page] = set()

    def begin(self, parent: Page | None) -> None:
        """The save goes on behind ``parent``."""
        told, sessions = self._told, self._state.sessions
        self._number = sessions.number(told.tenant, told.session, self._state.clock())
        self._parent = parent
        if self._number != NOBODY or sessions.any:
            sessions.share(parent, self._number)

    def comes_to(self, page: Page) -> None:
        """This page is next. Before anything is done with it."""
        if not any(page.copies):
            page.session = self._number
            if self._told.hint is not None:
                self._new.add(page)
        elif page.session != self._number:
            page.session = NOBODY

    def saved(self, pages: Sequence[Page]) -> None:
        """These pages, one behind the other, are stored or about to be, and have been noted as used."""
        told, state = self._told, self._state
        last = pages[-1] if pages else self._parent
        if self._number != NOBODY and last is not None:
            state.sessions.saved(told.tenant, told.session, last)
        if told.hint is not None:
            hint = told.hint.facts(state.clock())
            state.uses.hint(self._about(pages, hint), hint)
        self._new.clear()
        self._parent = last

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


def finish(state: StoreState, tenant: str, session: str) -> int:
    """A session is over: the pages that nobody else has used leave first. Returns how many they are."""
    checked_session(session)
    own = state.sessions.finish(tenant, session)
    state.uses.hint(own, PageHint(Reuse.DONE))
    return len(own)
