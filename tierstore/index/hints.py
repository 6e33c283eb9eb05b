"""What has been hinted of pages, and the hints that end at a time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from tierstore.index.page import Page
from tierstore.index.queues import EvictionQueues
from tierstore.policy import PageHint, Reuse

_SPARE_HINTS = 1024


class Hints:
    """Not thread-safe: the store locks."""

    def __init__(self, eviction: EvictionQueues) -> None:
        self._eviction = eviction
        self._ending: list[tuple[float, int, Page, PageHint]] = []  # by the time at which they end
        self._order = itertools.count()

    def give(self, pages: Sequence[Page], hint: PageHint, *, tick: int, held: int) -> None:
        """``hint`` is about the next use of these pages. ``held`` are the pages in the tree: what is kept of
        others is forgotten when there is too much of it."""
        for page in pages:
            page.hint = hint
            page.hinted = tick
            if hint.expires_s < math.inf:
                heapq.heappush(self._ending, (hint.expires_s, next(self._order), page, hint))
            self._eviction.offer_again(page)
        if len(self._ending) > 2 * held + _SPARE_HINTS:
            self.forget_gone()

    def forget_gone(self) -> None:
        """Let go of pages that have left the tree, and of hints that are not the last ones of their pages."""
        self._ending = [each for each in self._ending if each[2].hint is each[3] and any(each[2].copies)]
        heapq.heapify(self._ending)

    def expire(self, now_s: float) -> None:
        """The pages whose time to live is over are as good as done."""
        while self._ending and self._ending[0][0] <= now_s:
            _, _, page, hint = heapq.heappop(self._ending)
            if page.hint is hint and page.last_use <= page.hinted:
                page.hint = PageHint(Reuse.DONE, hint.priority)
                self._eviction.offer_again(page)
