"""The queue of pages on their way from the host tier to disk. Decides; the writer's thread acts.

All methods need the store's lock. A page in the queue, or in a batch taken from it, is leased in the host
tier, where its bytes are.

The queue is bounded in bytes, and while the disk is not writable nothing waits here: half of the host tier
would be leased for as long as it takes. What does not fit, or was refused or given up for that reason, is
*owed*: remembered without a lease, and queued when there is room and the disk is back, as far as it is still
in the host tier then. What is not is *dropped*, and counted. A page is only written after its parent, since
nothing could find it otherwise; a later save of the same prefix makes up for gaps.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from tierstore.core.state import StoreState
from tierstore.index import Page, Tier

_MOST_OWED = 1 << 14  # pages; the latest are forgotten: those before them are what they need
_OWED_AT_ONCE = 256  # pages queued again while the store is locked
_OWED_LOOKED_AT = 2  # for each that is owed: whether the oldest have left


class WriteQueue:
    """Pages to write, in order: parents before children."""

    def __init__(self, state: StoreState, *, most_bytes: int) -> None:
        self._state = state
        self._most_bytes = most_bytes
        self._waiting: deque[Page] = deque()
        self.waiting_bytes = 0  # of those that wait
        self._pending: set[Page] = set()  # waiting, or in a batch
        self._pending_bytes = 0
        self._owed: dict[Page, bool] = {}  # and whether it was counted as dropped when that happened
        self._catching_up = False

    def __len__(self) -> int:
        """Pages that wait."""
        return len(self._waiting)

    def __contains__(self, page: Page) -> bool:
        """Whether a page waits or is being written."""
        return page in self._pending

    @property
    def pending(self) -> int:
        """Pages that wait or are being written."""
        return len(self._pending)

    @property
    def owes(self) -> bool:
        """Whether there are pages to queue again, with room, and the disk is there."""
        return self.late and not self._pending

    @property
    def late(self) -> bool:
        """Whether there are pages that did not fit, and are going to be queued again."""
        return bool(self._owed) and self._state.health.writable

    def unplaced(self) -> Counter[int]:
        """Page bytes → pages that have no place on disk yet."""
        return Counter(page.nbytes for page in self._pending if page.copies[Tier.DISK] is None)

    # -- in ------------------------------------------------------------------------------------------

    def put(self, pages: Iterable[Page]) -> None:
        """Queue these pages, which are in the host tier, with any ancestors the disk has lost or never got,
        and any descendants that came before them (copies end in no particular order)."""
        # Pages that one before them holds up, and whether that is for good. (Looked up, since one by one each
        # would find out by going up the same long path.)
        stuck: dict[Page, bool] = {}
        for page in pages:
            if page in self._pending:
                continue  # it came with one before it
            if page.parent in stuck:
                stuck[page] = stuck[page.parent]
                self._state.counters.disk_dropped_pages += stuck[page]
                if page.parent in self._owed:
                    self._put_off_from(page)
                continue
            missing, obstacle = self._missing(page)
            if obstacle is not None:
                stuck[page] = obstacle.copies[Tier.HOST] is None
                self._state.counters.disk_dropped_pages += stuck[page]
            elif (failed := next((each for each in missing if not self._append(each)), None)) is not None:
                stuck[page] = failed not in self._owed
                if not stuck[page]:
                    self._put_off_from(page)
            elif missing and page.children:
                self._append_below(page)

    def put_owed(self) -> None:
        """Queue some of what is owed; what does not fit now stays owed."""
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
                if self._append(child):
                    waiting.append(child)
                elif child in self._owed:
                    self._put_off_from(child)

    def _put_off_from(self, page: Page) -> None:
        """One at or above ``page`` was put off: so are this one and those below it that are here already."""
        waiting = [page]
        while waiting:
            page = waiting.pop()
            if page not in self._owed and self._unwritten(page):
                self._put_off(page)
            waiting += [child for child in page.all_children() if child not in self._owed]

    def _append(self, page: Page) -> bool:
        if not self._state.health.writable:
            self._drop(page)
            return False
        if self._pending and self._pending_bytes + page.nbytes > self._most_bytes:
            self._put_off(page)
            return False
        if not self._state.write_budget.take(page.nbytes):
            self._state.counters.disk_declined_pages += 1
            return False
        self._state.index.lease(page, Tier.HOST)
        self._waiting.append(page)
        self.waiting_bytes += page.nbytes
        self._pending.add(page)
        self._pending_bytes += page.nbytes
        return True

    def _unwritten(self, page: Page) -> bool:
        """Whether a page could be written, and has not been."""
        on_host = page.copies[Tier.HOST]
        written = page.copies[Tier.DISK] is not None or page in self._pending
        return on_host is not None and on_host.ready and not written

    def _missing(self, page: Page) -> tuple[list[Page], Page | None]:
        """``page`` and those of its ancestors that have to be written first, top down; and the one that
        cannot be, if there is one: it is on its way, and will bring this page along, or it is lost."""
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
        """The next pages to write, each to be finished or given up: ``most_bytes``, or one that is larger.
        Those that somebody has let go of meanwhile are not."""
        batch: list[Page] = []
        while self._waiting and (not batch or self._waiting[0].nbytes <= most_bytes):
            page = self._pop()
            if page in self._state.eviction.leaving:
                self.finish([page])
                continue
            batch.append(page)
            most_bytes -= page.nbytes
        return batch

    def finish(self, pages: Sequence[Page]) -> None:
        """The pages are on disk, or will not be. (Who waits for the queue is told by the caller.)"""
        for page in pages:
            if page in self._pending:
                self._pending.remove(page)
                self._pending_bytes -= page.nbytes
        self._state.leases.release_all(pages, Tier.HOST)

    def give_up(self, page: Page) -> None:
        """The page is not written."""
        self._drop(page)
        self.finish([page])

    def give_up_all(self) -> None:
        """None of those that wait is written."""
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
        """There is no room for it now. Those that have left the host tier since they were put off are looked
        for here as well: a disk that is always behind never comes to them."""
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

    def _count_lost(self, page: Page) -> None:
        on_its_way = page in self._pending or page.copies[Tier.DISK] is not None
        self._state.counters.disk_dropped_pages += not on_its_way and not self._unwritten(page)
