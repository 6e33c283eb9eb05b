"""Wait for pages that another client writes or has promised to save, without polling.

A prompt is saved in batches, and another client may wait for it meanwhile. A waiter names the first page that
it lacks. When the write of that page has ended, the waiter is called, checks how much of its prompt is stored
now, and names the next page that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from tierstore.index import Page
from tierstore.keys import PageKey

PageName: TypeAlias = "tuple[bytes, PageKey]"
"""A page, by its identity's digest and its key."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A callback for a page. ``look`` is called with the waiter, without a lock held, when the page's write
    has ended, successfully or not."""

    look: Callable[[Waiter], None]
    page: PageName | None = None


class Arrivals:
    """The waiters for pages. The caller must hold the store's lock, except for :meth:`wake`."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: dict[PageName, list[Waiter]] = {}
        self._due: list[Waiter] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait_for(self, page: PageName, waiter: Waiter) -> None:
        """Call ``waiter`` once, when a write of ``page`` has ended."""
        self.forget(waiter)
        waiter.page = page
        self._waiting.setdefault(page, []).append(waiter)

    def forget(self, waiter: Waiter) -> None:
        """Stop waiting."""
        page, waiter.page = waiter.page, None
        others = self._waiting.get(page, []) if page is not None else []
        if waiter in others:
            others.remove(waiter)
            if page is not None and not others:
                del self._waiting[page]

    def ended(self, pages: Iterable[Page]) -> None:
        """Record that writes of these pages have ended. The caller must call :meth:`wake` after it has
        released the lock."""
        if self._waiting:
            for page in pages:
                self._due += self._waiting.pop((page.identity, page.key), ())

    def wake(self) -> None:
        """Call the waiters whose page's write has ended."""
        if not self._due:  # safe without the lock: a thread that adds to it calls wake() afterwards
            return
        with self._lock:
            due, self._due = self._due, []
        for waiter in due:
            waiter.look(waiter)
