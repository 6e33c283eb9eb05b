"""The queue of pages to copy from the host tier to disk. The queue decides; the writer's thread acts.

All methods need the store's lock. A page in the queue, or in a batch taken from the queue, is leased in the
host tier, which keeps its bytes there.

The queue is bounded in bytes. The queue is empty while the disk is not writable, because queued pages would
keep half of the host tier leased until the disk works again. A page is *owed* if it did not fit, or if it was
refused or given up because of the disk. An owed page has no lease. When the queue has room and the disk
works, an owed page is queued again, if the host tier still has it. If the host tier has evicted it, the page
is *dropped* and counted.

A page is written only after its parent, because a page without its parent could not be found. Pages that were
dropped are written by a later save of the same prefix.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from tierstore.core.departures import NOT_WRITTEN, Cause
from tierstore.core.state import StoreState
from tierstore.index import Page, Tier

# Most owed pages. Beyond this number, new pages are dropped, because they depend on older ones.
_MOST_OWED = 1 << 14
_OWED_AT_ONCE = 256  # pages that are queued again under one hold of the lock
_OWED_LOOKED_AT = 2  # oldest owed pages that are checked for each new one: has the host tier evicted them?


class WriteQueue:
    """Pages to write, in order: parents before children."""

    def __init__(self, state: StoreState, *, most_bytes: int) -> None:
        self._state = state
        self._most_bytes = most_bytes
        self._waiting: deque[Page] = deque()
        self.waiting_bytes = 0  # bytes of waiting pages
        self._pending: set[Page] = set()  # pages that are waiting or in a batch
        self._pending_bytes = 0
        self._owed: dict[Page, bool] = {}  # whether the page was already counted as dropped, by page
        self._catching_up = False

    def __len__(self) -> int:
        """Return the number of waiting pages."""
        return len(self._waiting)

    def __contains__(self, page: Page) -> bool:
        """Return whether a page is waiting or being written."""
        return page in self._pending

    @property
    def pending(self) -> int:
        """Number of pages that are waiting or being written."""
        return len(self._pending)

    @property
    def owes(self) -> bool:
        """Whether owed pages can be queued again now: nothing is pending and the disk works."""
        return self.late and not self._pending

    @property
    def late(self) -> bool:
        """Whether there are owed pages and the disk works, so that they will be queued again."""
        return bool(self._owed) and self._state.health.writable

    def unplaced(self) -> Counter[int]:
        """Return the number of pages that have no place on disk yet, by page bytes."""
        return Counter(page.nbytes for page in self._pending if page.copies[Tier.DISK] is None)

    # -- in ------------------------------------------------------------------------------------------

    def put(self, pages: Iterable[Page]) -> None:
        """Queue these pages of the host tier. Ancestors that the disk lacks are queued first. Descendants
        that were completed earlier are queued, too, because copies end in no particular order."""
        # Pages that an ancestor blocks, and whether they are blocked for good. The dictionary avoids walking
        # up the same long path for each page.
        stuck: dict[Page, bool] = {}
        causes: dict[Page, Cause] = {}  # why refused pages are not written
        for page in pages:
            if page in self._pending:
                continue  # the page was queued together with an earlier page
            if page.parent in stuck:
                stuck[page] = stuck[page.parent]
                self._state.counters.disk_dropped_pages += stuck[page]
                if page.parent in causes:
                    causes[page] = causes[page.parent]
                    self._note(page, causes[page])
                if page.parent in self._owed:
                    self._refuse_from(page, causes.get(page, Cause.QUEUE), later=True)
                continue
            missing, obstacle = self._missing(page)
            if obstacle is not None:
                stuck[page] = obstacle.copies[Tier.HOST] is None
                self._state.counters.disk_dropped_pages += stuck[page]
                known = self._state.departures.of(obstacle.identity, obstacle.key)
                if known is not None and known.cause in NOT_WRITTEN:
                    causes[page] = known.cause
                    self._note(page, known.cause)
            elif (refused := self._refused(missing)) is not None:
                failed, causes[page] = refused
                stuck[page] = failed not in self._owed
                self._refuse_from(page, causes[page], later=not stuck[page])
            elif missing and page.children:
                self._append_below(page)

    def _refused(self, pages: Sequence[Page]) -> tuple[Page, Cause] | None:
        """Queue these pages, up to the first page that is refused. Return that page and the cause."""
        for page in pages:
            cause = self._append(page)
            if cause is not None:
                self._note(page, cause)
                return page, cause
        return None

    def put_owed(self) -> None:
        """Queue some of the owed pages again. Pages that still do not fit stay owed."""
        pages = list(itertools.islice(self._owed, _OWED_AT_ONCE))
        counted = [self._owed.pop(page) for page in pages]
        self._catching_up = True
        self.put(page for page in pages if self._unwritten(page))
        self._catching_up = False
        for page, known in zip(pages, counted, strict=True):
            if page in self._owed:
                self._owed[page] = known
            elif not known:
                self._count_lost(page)

    def _append_below(self, page: Page) -> None:
        waiting = [page]
        while waiting:
            for child in waiting.pop().all_children():
                if not self._unwritten(child):
                    continue
                cause = self._append(child)
                if cause is None:
                    waiting.append(child)
                    continue
                self._refuse_from(child, cause, later=child in self._owed)

    def _refuse_from(self, page: Page, cause: Cause, *, later: bool) -> None:
        """Record why a page and its unwritten descendants, which were completed earlier, are not written.
        With ``later``, they become owed, because the page or an ancestor is owed."""
        waiting = [page]
        while waiting:
            page = waiting.pop()
            if self._unwritten(page):
                self._note(page, cause)
                if later and page not in self._owed:
                    self._put_off(page)
            waiting += [child for child in page.all_children() if child not in self._owed]

    def _append(self, page: Page) -> Cause | None:
        """Queue a page. Return the cause if the page is refused."""
        if not self._state.health.writable:
            self._drop(page)
            return Cause.READ_ONLY
        if self._pending and self._pending_bytes + page.nbytes > self._most_bytes:
            self._put_off(page)
            return Cause.QUEUE
        if not self._state.write_budget.take(page.nbytes):
            self._state.counters.disk_declined_pages += 1
            return Cause.BUDGET
        self._state.index.lease(page, Tier.HOST)
        self._waiting.append(page)
        self.waiting_bytes += page.nbytes
        self._pending.add(page)
        self._pending_bytes += page.nbytes
        return None

    def _unwritten(self, page: Page) -> bool:
        """Return whether a page is ready in the host tier but neither on disk nor pending."""
        on_host = page.copies[Tier.HOST]
        written = page.copies[Tier.DISK] is not None or page in self._pending
        return on_host is not None and on_host.ready and not written

    def _missing(self, page: Page) -> tuple[list[Page], Page | None]:
        """Return ``page`` and its ancestors that must be written first, top down. If an ancestor cannot be
        written, return no pages and that ancestor. The ancestor is lost, or is still being filled; in the
        second case, ``page`` is queued later, together with the ancestor."""
        missing: list[Page] = []
        node: Page | None = page
        while node is not None and node.parent is not None:
            if node.copies[Tier.DISK] is not None or node in self._pending:
                break
            if not self._unwritten(node):
                return [], node
            missing.append(node)
            node = node.parent
        return missing[::-1], None

    # -- out -----------------------------------------------------------------------------------------

    def take(self, most_bytes: int) -> list[Page]:
        """Take the next pages to write: up to ``most_bytes``, or a single larger page. The caller must finish
        or give up each of them. Skip pages that were forgotten or are about to leave."""
        batch: list[Page] = []
        while self._waiting and (not batch or self._waiting[0].nbytes <= most_bytes):
            page = self._pop()
            in_host = page.copies[Tier.HOST]
            forgotten = in_host is None or not in_host.ready
            if forgotten or page in self._state.eviction.leaving:
                self.finish([page])
                continue
            batch.append(page)
            most_bytes -= page.nbytes
        return batch

    def finish(self, pages: Sequence[Page]) -> None:
        """Remove pages from the queue that are on disk or will not be written. The caller must notify
        ``StoreState.changed``."""
        for page in pages:
            if page in self._pending:
                self._pending.remove(page)
                self._pending_bytes -= page.nbytes
        self._state.leases.release_all(pages, Tier.HOST)

    def give_up(self, page: Page) -> None:
        """Give up writing a page. If the disk cannot be written, the page becomes owed; otherwise it is
        dropped."""
        self._drop(page)
        self.finish([page])

    def give_up_all(self) -> None:
        while self._waiting:
            self.give_up(self._pop())

    def _pop(self) -> Page:
        page = self._waiting.popleft()
        self.waiting_bytes -= page.nbytes
        return page

    def _drop(self, page: Page) -> None:
        self._state.counters.disk_dropped_pages += not self._catching_up
        missed = self._catching_up or not self._state.health.writable
        if missed and len(self._owed) < _MOST_OWED:
            self._owed[page] = True

    def _put_off(self, page: Page) -> None:
        """Owe a page because the queue is full. Also forget the oldest owed pages that the host tier has
        evicted, because a disk that is always too slow would never write them."""
        for _ in range(_OWED_LOOKED_AT):
            oldest = next(iter(self._owed), None)
            if oldest is None or self._unwritten(oldest):
                break
            if not self._owed.pop(oldest):
                self._count_lost(oldest)
        if len(self._owed) < _MOST_OWED:
            self._owed.setdefault(page, self._catching_up)
        else:
            self._state.counters.disk_dropped_pages += 1

    def _note(self, page: Page, cause: Cause) -> None:
        self._state.departures.note(page.identity, page.key, cause, Tier.HOST)

    def _count_lost(self, page: Page) -> None:
        on_its_way = page in self._pending or page.copies[Tier.DISK] is not None
        self._state.counters.disk_dropped_pages += not on_its_way and not self._unwritten(page)
