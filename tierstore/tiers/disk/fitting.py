"""Fit a directory's pages into an extent space of another size, at open.

With another capacity, there are other slots: their number and their positions change. The policy evicts pages
until the remaining pages fit. Pages that are already in slots of the new space stay where they are. All other
pages move to free slots. Then the extent files are truncated.

**After a crash**, each page is in its old or its new place. A move copies the payload to bytes that no record
refers to, syncs them, and then changes the record. The next opening, with any capacity, starts again from the
state of the index. So a page may move only to a place without pages that have yet to move
(:class:`_Schedule`).

**Rejected alternatives**:

* Drop the pages beyond the new end. The oldest pages are at the front of the space, so this would drop the
  newest and most used pages. Without a parent, all pages below it would be lost too.
* Move pages to new slots only when they are next written. The space would have two layouts indefinitely.
"""

from __future__ import annotations

import errno
import itertools
import logging
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tierstore.memory import Memory
from tierstore.policy import Policy
from tierstore.tiers.disk.extents import ExtentFiles
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.page_table import PageTable, parent_rows, reachable
from tierstore.tiers.disk.payloads import PageRead, Payloads
from tierstore.tiers.disk.records import INLINE, PageRecord, Removal
from tierstore.tiers.disk.space import index_cost
from tierstore.tiers.slabs import SlabAllocator, slot_bytes
from tierstore.units import MIB

_log = logging.getLogger(__name__)

_AT_ONCE = 16 * MIB  # bytes moved per commit
_EVICTED_AT_ONCE = 4096  # pages


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of opening a directory with another capacity."""

    evicted_pages: int = 0  # pages that the policy evicted, or that are larger than the space
    moved_pages: int = 0
    lost_pages: int = 0  # pages that could not be read or moved, and all pages below them


class _FittingPage(NamedTuple):
    """A page in the extents, as recorded in the index."""

    place: int
    nbytes: int
    serial: int

    @property
    def size(self) -> int:
        return slot_bytes(self.nbytes)


def fit(
    index_db: IndexDB,
    facts: npt.NDArray[np.void],
    worths: Mapping[int, int],
    extents: ExtentFiles,
    payloads: Payloads,
    space: SlabAllocator | None,
    policy: Policy,
) -> Fitted:
    """Evict and move pages until all remaining pages are in slots of ``space``, which has no pages yet (None:
    there are no slots). ``facts`` has the facts of all reachable pages, and ``worths`` the worths of the
    roots. This function does not truncate the extent files.

    Raise :class:`OSError` if the disk fails. No page is lost then, and the next opening continues.
    """
    kept = _kept(facts, worths, space, policy)
    evicted = facts["serial"][~kept].tolist()
    index_db.forget(evicted)
    if space is None:
        return Fitted(evicted_pages=len(evicted))
    pages, overlapping = _in_order(facts[kept])
    index_db.forget(overlapping)
    schedule = _arrange(space, pages)
    if schedule.pages:
        _log.info("disk tier: %d pages are being moved within %s", schedule.pages, index_db.path.parent)
    moved = _Mover(index_db, extents, payloads).move(schedule)
    return Fitted(evicted_pages=len(evicted), moved_pages=moved)


# -- eviction ----------------------------------------------------------------------------------------


def _kept(
    facts: npt.NDArray[np.void], worths: Mapping[int, int], space: SlabAllocator | None, policy: Policy
) -> npt.NDArray[np.bool_]:
    """Return which pages stay. The other pages are too large for a slot of ``space``, are evicted by the
    policy, or are below such pages."""
    parents = parent_rows(facts)
    inline = facts["place"] == INLINE
    sizes = np.unique(facts["nbytes"][~inline])
    fitting = [size for size in sizes.tolist() if space is not None and space.shape(size)[1]]
    kept = reachable(parents, inline | np.isin(facts["nbytes"], fitting))
    if space is not None:
        # Choose only among pages in the extents, because evicting an inline page frees no slot.
        evicted = _evict(PageTable(facts[kept & ~inline], worths), space, policy)
        kept = reachable(parents, kept & ~np.isin(facts["serial"].astype(np.int64), evicted))
    return kept


def _evict(page_table: PageTable, space: SlabAllocator, policy: Policy) -> list[int]:
    """Remove pages from the table until the remaining pages fit into ``space``, which has no pages. Return
    the serials of the removed pages."""
    sizes = Counter(slot_bytes(nbytes) for _, nbytes in page_table.places().values())

    def leaves(removal: Removal) -> None:
        sizes[slot_bytes(removal.nbytes)] -= 1

    return _evict_while(page_table, policy, partial(_lacking_bytes, sizes, space), leaves)


def evict_down_to(most: int, total: int, page_table: PageTable, policy: Policy) -> int:
    """Remove pages from the table until the sum of :func:`~tierstore.tiers.disk.space.index_cost` of the
    remaining pages is at most ``most``. The sum is ``total`` before. Return the sum afterwards."""

    def leaves(removal: Removal) -> None:
        nonlocal total
        total -= index_cost(removal.nbytes, removal.place)

    _evict_while(page_table, policy, lambda: total - most, leaves)
    return total


def _evict_while(
    page_table: PageTable, policy: Policy, lacking: Callable[[], int], leaves: Callable[[Removal], None]
) -> list[int]:
    """Remove pages from the table, the policy's worst first, while ``lacking()`` returns a positive number of
    missing bytes. Call ``leaves`` for each removed page. Return the serials of the removed pages."""
    evicted: list[int] = []
    ends = 0  # how often in a row next_to_leave has returned no pages
    while (nbytes := lacking()) > 0 and ends < 2:
        # A quarter at a time, because evicting the last page of a slab frees more than the page's bytes.
        serials = page_table.next_to_leave(policy, _EVICTED_AT_ONCE, nbytes=max(nbytes // 4, 1))
        ends = 0 if serials else ends + 1
        for serial in serials:
            assert not page_table.children(serial), f"page {serial} is evicted before its children"
            leaves(page_table.remove(serial))
        evicted += serials
    return evicted


def _lacking_bytes(sizes: Mapping[int, int], space: SlabAllocator) -> int:
    """Return by how many bytes ``space`` is too small for these pages; zero or less if they fit. ``sizes``
    has the number of pages by slot bytes."""
    units = 0
    for size, pages in sizes.items():
        slab_units, slots = space.shape(size)
        units += -(-pages // slots) * slab_units
    return (units - space.units) * space.unit_bytes


def _in_order(facts: npt.NDArray[np.void]) -> tuple[list[_FittingPage], list[int]]:
    """Return the pages in the extents in order of their places, and the serials of damaged pages, which
    overlap the page before them."""
    pages: list[_FittingPage] = []
    overlapping: list[int] = []
    end = 0
    columns = (facts[name][facts["place"] != INLINE].tolist() for name in ("place", "nbytes", "serial"))
    for page in sorted(itertools.starmap(_FittingPage, zip(*columns, strict=True))):
        if page.place >= end:
            pages.append(page)
            end = page.place + page.size
        else:
            overlapping.append(page.serial)
    return pages, overlapping


# -- target places -----------------------------------------------------------------------------------


def _arrange(space: SlabAllocator, pages: Sequence[_FittingPage]) -> _Schedule:
    """Find slots in ``space`` for ``pages`` (in order of their places). Pages that are in a slot stay there.
    If that leaves too little room for slabs of the moving pages, the pages of the emptier half of the slabs
    move too. This step is repeated with half of the remaining slabs until all pages have slots."""
    by_slab: dict[int, list[_FittingPage]] = defaultdict(list)  # first unit of a slab → pages in it
    for page in pages:
        if space.claim(page.place, page.nbytes):
            slab = space.slab_of(page.place // space.unit_bytes)
            assert slab is not None
            by_slab[slab.start].append(page)
    fullest = sorted(by_slab.values(), key=lambda inside: -sum(page.size for page in inside))
    keeping = len(fullest)
    while True:
        space = SlabAllocator(space.capacity_bytes, unit_bytes=space.unit_bytes)
        staying = {page for inside in fullest[:keeping] for page in inside}
        for page in staying:
            claimed = space.claim(page.place, page.nbytes)
            assert claimed, f"page {page.serial} has lost its slot"
        moving = [page for page in pages if page not in staying]
        wanted = Counter(page.size for page in moving)
        by_need = sorted(
            wanted, key=lambda size: -space.shape(size)[0]
        )  # large slabs first: they fit no gaps
        targets = {size: space.allocate_many(size, wanted[size]) for size in by_need}
        if not keeping or all(len(targets[size]) == wanted[size] for size in wanted):
            return _Schedule(moving, targets, space)
        keeping //= 2


class _Schedule:
    """Decides when a page may move, and to which slot. A slot is *ready* when it does not overlap the old
    place of any page that has yet to move."""

    def __init__(
        self, moving: Sequence[_FittingPage], targets: Mapping[int, Sequence[int]], space: SlabAllocator
    ) -> None:
        """``moving`` are the pages that have to move, in order of their places. ``targets`` are slots for
        them, by slot bytes. In ``space``, these slots and those of all other pages are allocated."""
        self._space = space
        self._blocked: dict[_FittingPage, list[int]] = defaultdict(list)  # page → targets that it overlaps
        self._blockers: dict[int, int] = {}  # target → number of pages that overlap it
        self._sizes: dict[int, int] = {}  # target that is not ready → its slot bytes
        self._ready: dict[int, deque[int]] = defaultdict(deque)  # slot bytes → ready targets
        self._left: dict[int, deque[_FittingPage]] = defaultdict(deque)  # slot bytes → pages yet to move
        self._moving = moving
        self._starts = [page.place for page in self._moving]
        self._ends = [page.place + page.size for page in self._moving]
        self._gone: set[_FittingPage] = set()  # pages that have left their old places
        for size, slots in targets.items():
            self._offer(size, slots)
        for page in self._moving:
            in_the_way = page in self._blocked
            left = self._left[page.size]
            (left.appendleft if in_the_way else left.append)(page)

    @property
    def pages(self) -> int:
        return len(self._moving)

    def batch(self) -> list[tuple[_FittingPage, int]]:
        """Return pages to move now, with their targets. An empty list means that all pages have moved, or
        that the remaining pages block each other."""
        batch: list[tuple[_FittingPage, int]] = []
        nbytes = 0
        for size, left in self._left.items():
            ready = self._ready[size]
            if left and not ready:
                # No target is ready: use other free slots, which unblocks the targets of other pages.
                self._offer(size, self._space.allocate_many(size, len(left)))
            while left and ready and (not batch or nbytes + size <= _AT_ONCE):
                batch.append((left.popleft(), ready.popleft()))
                nbytes += size
        return batch

    def drop_one(self) -> _FittingPage | None:
        """Give up a page that blocks other pages, and return it; None if no page is left to move."""
        return next((left.popleft() for left in self._left.values() if left), None)

    def has_left(self, page: _FittingPage) -> None:
        """Record that a page's old place is durably free."""
        for target in self._blocked.pop(page, ()):
            self._blockers[target] -= 1
            if not self._blockers[target]:
                self._ready[self._sizes.pop(target)].append(target)
        self._gone.add(page)

    def _offer(self, size: int, targets: Sequence[int]) -> None:
        for target in targets:
            inside = self._moving[bisect_right(self._ends, target) : bisect_left(self._starts, target + size)]
            blocking = [page for page in inside if page not in self._gone]
            for page in blocking:
                self._blocked[page].append(target)
            if blocking:
                self._blockers[target] = len(blocking)
                self._sizes[target] = size
            else:
                self._ready[size].append(target)


# -- moving --------------------------------------------------------------------------------------------


class _Mover:
    """Moves pages: copies their payloads and changes their records."""

    def __init__(self, index_db: IndexDB, extents: ExtentFiles, payloads: Payloads) -> None:
        self._index_db = index_db
        self._extents = extents
        self._payloads = payloads
        self._memory: Memory | None = None

    def move(self, schedule: _Schedule) -> int:
        """Move all pages, and return how many were moved. Pages that cannot be read or moved are removed from
        the index. Raise :class:`OSError` if the disk fails."""
        moved = 0
        while True:
            batch = schedule.batch()
            if batch:
                moved += self._move(batch)
            elif (page := schedule.drop_one()) is not None:
                self._index_db.forget([page.serial])
                batch = [(page, INLINE)]
            else:
                return moved
            for page, _ in batch:
                schedule.has_left(page)

    def _move(self, batch: Sequence[tuple[_FittingPage, int]]) -> int:
        copies: list[tuple[PageRecord, memoryview]] = []
        moved: list[tuple[PageRecord, int]] = []
        for (page, target), (record, view) in self._read(batch):
            copies.append((replace(record, place=target), view))
            moved.append((copies[-1][0], page.place))
        checksums = [record.checksum for record, _ in copies]
        self._payloads.write(copies)
        self._extents.sync()
        good = [
            (record, before)
            for (record, before), checksum in zip(moved, checksums, strict=True)
            if record.checksum == checksum
        ]
        there = {record.serial for record, _ in good}
        self._index_db.forget([page.serial for page, _ in batch if page.serial not in there])
        self._index_db.relocate(good)
        return len(good)

    def _read(
        self, batch: Sequence[tuple[_FittingPage, int]]
    ) -> Iterator[tuple[tuple[_FittingPage, int], tuple[PageRecord, memoryview]]]:
        """Read the pages, and yield those that match their checksums. Raise :class:`OSError` if the disk
        fails and no page could be read."""
        total = sum(page.size for page, _ in batch)
        if self._memory is None or self._memory.nbytes < total:
            self._memory = Memory(total, shared=False)
        known: list[tuple[_FittingPage, int]] = []
        wanted: list[tuple[PageRecord, memoryview]] = []
        start = 0
        records = self._index_db.records(page.serial for page, _ in batch)
        for (page, target), record in zip(batch, records, strict=True):
            if record is not None and (record.place, record.room) == (page.place, page.nbytes):
                known.append((page, target))
                wanted.append((record, self._memory.view(start, record.payload_bytes)))
                start += page.size
        read = self._payloads.read(wanted, encoded=True)
        if read.error is not None and not read.good and read.error.errno != errno.ENOENT:
            raise read.error  # the disk fails; with ENOENT, only the extent file is missing
        for pair, found, outcome in zip(known, wanted, read.outcomes, strict=True):
            if outcome is PageRead.GOOD:
                yield pair, found
