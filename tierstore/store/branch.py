"""The pages that a save goes along, one behind the other. In steps: in between, others have the lock."""

from __future__ import annotations

from tierstore.index import Page
from tierstore.keys import PageKey
from tierstore.store.state import StoreState
from tierstore.store.telling import Teller, Told


class Branch:
    """Belongs to one save. Under the state's lock."""

    def __init__(self, state: StoreState, told: Told) -> None:
        self._state = state
        self._teller = Teller(state, told)
        self._end: Page | None = None
        self._pinned: Page | None = None  # between two steps: the next one must find it in the tree
        self._step: list[Page] = []

    def begin(self, parent: Page | None) -> None:
        """The save goes on behind ``parent``; it has no pages when that is None."""
        self._end = parent
        self._pin(parent)
        self._teller.begin(parent)

    def next(self, key: PageKey, tokens: bytes) -> Page | None:
        """The page behind the last one, found or made. None when the last one has left every tier: what is
        behind it could never be found."""
        if self._end is None or (self._end.parent is not None and not any(self._end.copies)):
            return None
        page = self._state.index.add(self._end, key, tokens)
        self._teller.comes_to(page)
        return page

    def grow(self, page: Page) -> None:
        """This page is stored, or about to be. The save goes on behind it."""
        self._step.append(page)
        self._end = page

    def end_step(self, *, last: bool) -> None:
        """Note the use of the pages of this step."""
        self._state.uses.touch(self._step, hit=False)
        self._teller.saved(self._step)
        self._step = []
        self._pin(None if last else self._end)

    def _pin(self, page: Page | None) -> None:
        if page is not None:
            self._state.index.pin(page)
        if self._pinned is not None:
            self._state.index.unpin(self._pinned)
        self._pinned = page
