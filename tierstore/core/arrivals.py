"""Who waits for pages that somebody writes, or has promised to save. The end of the write wakes it, no clock.

A prompt is saved batch by batch, in steps that overtake one another. So a waiter names the first page that
it lacks, is called when that one's write has ended, looks at how far its prompt goes by then, and names the
next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

from tierstore.index import Page
from tierstore.keys import PageKey

PageName: TypeAlias = "tuple[bytes, PageKey]"
"""A page by its identity's digest and its key."""


@dataclass(slots=True, eq=False)
class Waiter:
    """``look`` is called with it, holding no lock, when the write of its page has ended, well or not."""

    look: Callable[[Waiter], None]
    page: PageName | None = None


class Arrivals:
    """Guarded by the store's lock, which all but :meth:`wake` want held."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._waiting: dict[PageName, list[Waiter]] = {}
        self._due: list[Waiter] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait_for(self, page: PageName, waiter: Waiter) -> None:
        """Have ``waiter`` called, once, when a write of ``page`` has ended."""
        self.forget(waiter)
        waiter.page = page
        self._waiting.setdefault(page, []).append(waiter)

    def forget(self, waiter: Waiter) -> None:
        """It does not wait any more."""
        page, waiter.page = waiter.page, None
        others = self._waiting.get(page, []) if page is not None else []
        if waiter in others:
            others.remove(waiter)
            if page is not None and not others:
                del self._waiting[page]

    def ended(self, pages: Iterable[Page]) -> None:
        """Writes of these have ended. :meth:`wake` is to be called as soon as the lock is free."""
        if self._waiting:
            for page in pages:
                self._due += self._waiting.pop((page.identity, page.key), ())

    def wake(self) -> None:
        """Call those whose page's write has ended."""
        if not self._due:  # whoever adds to it comes here afterwards
            return
        with self._lock:
            due, self._due = self._due, []
        for waiter in due:
            waiter.look(waiter)
