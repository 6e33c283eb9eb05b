"""Making room on disk for pages that find none: which pages leave, and which move out of the way.

Pages of one size class share slabs (tiers/slabs.py). If it was always the worst page of all that left, it
would mostly be one of another class, whose slot is of no use until, by luck, its whole slab is empty: under
traffic of mixed sizes a tenth to a fifth of the disk would lie idle. So:

* A class with pages **nearly as bad as the worst** of all (among the worst thirty-second of all bytes) makes
  room for itself: each page that leaves is a slot at once. This is what mostly happens: in steady traffic the
  ages of all classes are alike.
* Otherwise the class has to **grow**, at the expense of whoever has the worst pages. These leave, wherever
  they are, as many bytes as the slabs that are wanted; then the emptiest windows are chosen
  (tiers/disk/space.py) and the pages that are still in them move to where room has come about
  (disk_moves.py).
* What lies **idle** in slabs of classes that nobody writes any more is collected in the same way, and nothing
  has to leave for it. Where it is gaps between slabs, too small for what is written, neighbours of the gaps
  move into the runs that have just become free, and the gaps are joined.

**Rejected**: evicting what is in the windows instead of moving it (cheaper, but pages in use all day leave
because of where they lie); a log with a cleaner instead of slabs (no classes at all, but every page that
leaves out of order is a hole, and at 95 % full cleaning writes each page many times over).
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from tierstore.codec import RAW
from tierstore.core.disk_moves import DiskMoves
from tierstore.core.state import StoreState
from tierstore.core.write_queue import WriteQueue
from tierstore.index import Page, Tier
from tierstore.tiers.disk import DiskTier, PageRecord, PageTable
from tierstore.tiers.disk.encoding import Encoded
from tierstore.tiers.disk.space import Shortage
from tierstore.tiers.slabs import slot_bytes

_log = logging.getLogger(__name__)

_SHARE = 1 / 32  # of the disk's capacity is freed at once for one class at most …
_MOST_PAGES = 512  # … and no more pages than this: the next ones to be written wait for it
_AT_ONCE = 32  # while the store is locked
_ROUNDS = 2  # of evicting and moving, until a class has to do with what it has
_MOST_MOVED = 1.0  # bytes, for each that a class can grow by
_MOST_MOVED_TO_JOIN = 4.0  # bytes, for each that would lie idle otherwise
_LEAST_COLLECTED = 1 / 512  # of the capacity: less is not worth the look
_TOLERATED_IDLE = 1 / 128  # of the capacity: as much may be free and too scattered to be of use
_INDEX_ROUNDS = 64
_LEAST_INDEX_PAGES = 16  # what a page of a tree holds of records: before they have left, nothing is free


class DiskRoom:
    """Makes room for the store's writer, on its thread. ``commit`` makes pending removals durable."""

    def __init__(self, state: StoreState, disk: DiskTier, commit: Callable[[], bool]) -> None:
        self._state = state
        self._disk = disk
        self._space = disk.space
        self._commit = commit
        self._capacity_bytes = disk.stats().capacity_bytes
        self._moves = DiskMoves(state, disk)
        self._idle_bytes = 0  # that could not be collected when it was last tried

    @property
    def moves(self) -> DiskMoves:
        """Who moves the pages, and knows what that has cost."""
        return self._moves

    def make(self, nbytes: int, waiting: Mapping[int, int]) -> bool:
        """Make room for a page of ``nbytes``, and for some of those that are ``waiting`` (bytes → pages) to
        be written after it. False when nothing may leave, or the disk failed."""
        page_table = self._state.page_table
        if page_table is None:
            return False
        self._moves.vacate()
        shortage = self._space.shortage(nbytes)
        if shortage is Shortage.INDEX:
            return self._make_index_room(page_table, nbytes, waiting)
        if shortage is Shortage.NONE:
            return True
        wanted = Counter({nbytes: 1}) | Counter(waiting)
        return self._collect_idle(nbytes, wanted) or self._make_slots(page_table, nbytes, wanted)

    # -- the index -----------------------------------------------------------------------------------

    def _make_index_room(self, page_table: PageTable, nbytes: int, waiting: Mapping[int, int]) -> bool:
        """The worst pages of the class that has most of them leave: each frees one record, of any size."""
        pages = min(max(sum(waiting.values()), 1), _LEAST_INDEX_PAGES)
        for _ in range(_INDEX_ROUNDS):
            evicted = self._leave(pages, size_class=page_table.commonest_class())
            if not evicted or not self._commit():
                return False
            if self._space.shortage(nbytes) is not Shortage.INDEX:
                return self._has_room(nbytes)
            pages = min(2 * pages, _MOST_PAGES)
        return False

    # -- slots ---------------------------------------------------------------------------------------

    def _make_slots(self, page_table: PageTable, nbytes: int, wanted: Counter[int]) -> bool:
        alone = Counter({nbytes: wanted[nbytes]})
        spare = self._idle(wanted)
        for _ in range(_ROUNDS):
            if not self._evict(page_table, nbytes, wanted, spare=spare):
                break
            if self._idle_bytes > self._capacity_bytes * _TOLERATED_IDLE:
                self._empty_windows(nbytes, wanted, joining=True)
            if self._has_room(nbytes) or self._empty_windows(nbytes, wanted):
                return True
            # The slots that others are about to take will do as well: they find new ones more easily.
            if len(wanted) > 1 and self._empty_windows(nbytes, alone):
                return True
            spare = 0
        evicted = self._leave(1, size_class=slot_bytes(nbytes))
        return evicted > 0 and self._commit() and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self._space.shortage(nbytes) is Shortage.NONE

    def _evict(self, page_table: PageTable, nbytes: int, wanted: Counter[int], *, spare: int) -> bool:
        """For each class of which more is wanted than there are slots: if it has pages nearly as bad as the
        worst, these leave; if not, as much of the worst of all as it has to grow by, less the ``spare``
        bytes. All with one commit. False when nothing could leave that had to."""
        policy = self._state.eviction.disk_policy
        free = self._space.free_slots()
        with self._state.lock:
            until = page_table.near_worst(policy)
        evicted = growth = 0
        for each, pages in wanted.items():
            size = slot_bytes(each)
            lacking = min(pages - free[size], self._most_pages(each))
            if lacking <= 0 or (each != nbytes and self._space.shortage(each) is not Shortage.SLOTS):
                continue
            left = self._leave(lacking, size_class=size, until=until)
            evicted += left
            if not left:
                growth += self._windows_for(each, lacking) * self._space.slab_bytes(each)
        if growth > spare:
            evicted += self._leave(_MOST_PAGES, nbytes=growth - spare)
        return self._commit() if evicted else 0 < growth <= spare

    def _leave(
        self,
        pages: int,
        *,
        nbytes: float = math.inf,
        size_class: int | None = None,
        until: float = math.inf,
    ) -> int:
        """Let pages leave as :meth:`~.Eviction.evict_from_disk` says, a few at a time: each
        of them has to be taken out of the tree, and who looks something up would wait for all of them."""
        evicted = 0
        while evicted < pages and nbytes > 0:
            with self._state.lock:
                left = self._state.eviction.evict_from_disk(
                    min(pages - evicted, _AT_ONCE), nbytes=nbytes, size_class=size_class, until=until
                )
            if not left.pages:
                break
            evicted += left.pages
            nbytes -= left.nbytes
            self._state.yield_lock()
        return evicted

    def _most_pages(self, nbytes: int) -> int:
        """How many pages may leave at once."""
        return min(max(int(self._capacity_bytes * _SHARE) // nbytes, 1), _MOST_PAGES)

    def _windows_for(self, nbytes: int, pages: int) -> int:
        return -(-pages // max(self._space.slab_slots(nbytes), 1))

    def _collect_idle(self, nbytes: int, wanted: Counter[int]) -> bool:
        """Use what is free and of no use to anybody, if there is so much of it."""
        idle = self._idle(wanted)
        self._idle_bytes = min(self._idle_bytes, idle)
        worthwhile = max(self._space.slab_bytes(nbytes), int(self._capacity_bytes * _LEAST_COLLECTED))
        if idle < self._idle_bytes + worthwhile:
            return False
        if self._empty_windows(nbytes, wanted):
            return True
        self._idle_bytes = idle
        return False

    def _idle(self, wanted: Counter[int]) -> int:
        """Bytes that are free and not about to be taken."""
        free = self._space.free_slots()
        taken = (min(free[slot_bytes(each)], pages) * slot_bytes(each) for each, pages in wanted.items())
        return max(self._space.free_bytes() - sum(taken), 0)

    # -- windows -------------------------------------------------------------------------------------

    def _empty_windows(self, nbytes: int, wanted: Counter[int], *, joining: bool = False) -> bool:
        """Move what is in the way of pages of ``nbytes``. Whether there is room now."""
        others = Counter({slot_bytes(each): pages for each, pages in wanted.items() if each != nbytes})
        count = self._windows_for(nbytes, min(wanted[nbytes], self._most_pages(nbytes)))
        most = _MOST_MOVED_TO_JOIN if joining else _MOST_MOVED
        windows = self._space.hold(nbytes, count, wanted=others, most_moved=most, joining=joining)
        try:
            self._moves.empty(windows)
        except OSError as error:
            _log.warning("disk tier: pages could not be moved: %s", error)
        finally:
            self._space.unhold(windows)
        return self._has_room(nbytes)


_AT_ONCE = 32  # pages: a lock taken for each of them is handed over thousands of times a second


class DiskPlacement:
    """For the store's writer, on its thread. ``commit`` makes pending removals durable."""

    def __init__(
        self, state: StoreState, disk: DiskTier, queue: WriteQueue, commit: Callable[[], bool]
    ) -> None:
        self._state = state
        self._disk = disk
        self._queue = queue
        self.room = DiskRoom(state, disk, commit)
        self._usual: dict[int, int] = {}  # page bytes → the room that the last such page took

    def give(self, batch: Sequence[Page], encoded: Mapping[Page, Encoded]) -> list[Page]:
        """Give each page of a batch its place on disk. Returns those that got one. ``encoded``: what is
        written of some of them."""
        placed: list[Page] = []
        for start in range(0, len(batch), _AT_ONCE):
            some = batch[start : start + _AT_ONCE]
            rooms = [encoded[page].room if page in encoded else page.nbytes for page in some]
            self._usual.update(zip((page.nbytes for page in some), rooms, strict=True))
            places = self._reserve_all(rooms) if self._state.health.writable else [None] * len(some)
            with self._state.lock:
                for page, place in zip(some, places, strict=True):
                    if self._put_in_place(page, place, encoded.get(page)):
                        placed.append(page)
                self._state.changed.notify_all()  # some may have been given up
        return placed

    def _put_in_place(self, page: Page, place: int | None, encoded: Encoded | None) -> bool:
        # Only now: making room may have taken the parent.
        if place is not None and parent_on_disk(page) and page.copies[Tier.DISK] is None:
            self._state.index.put_on_disk(page, self._record(page, place, encoded), ready=False, leases=1)
            return True
        if place is not None:
            self._disk.unreserve(place, page.nbytes if encoded is None else encoded.room)
        self._queue.give_up(page)
        return False

    def _record(self, page: Page, place: int, encoded: Encoded | None) -> PageRecord:
        parent = page.parent
        assert parent is not None
        if parent.parent is None and not parent.serial:
            name = self._state.names.get(page.identity, "")
            parent.serial = self._disk.serials.add_root(self._state.identities[page.identity], name)
        return PageRecord(
            serial=page.serial or self._disk.serials.new(),
            parent=parent.serial,
            key=page.key,
            identity=page.identity,
            tokens=page.tokens,
            nbytes=page.nbytes,
            place=place,
            created_s=time.time(),
            checksum=0 if encoded is None else encoded.checksum,
            codec=RAW if encoded is None else encoded.codec,
            encoded_bytes=0 if encoded is None else encoded.nbytes,
        )

    def _reserve_all(self, rooms: Sequence[int]) -> list[int | None]:
        places: list[int | None] = []
        for nbytes, alike in itertools.groupby(rooms):
            count = len(list(alike))
            found = self._disk.reserve_many(nbytes, count)
            places += found
            places += [self._reserve(nbytes) for _ in range(count - len(found))]
        return places

    def _reserve(self, nbytes: int) -> int | None:
        """A place for one page, making room when the disk is full; None when nothing may leave."""
        place = self._disk.reserve(nbytes)
        if place is None and self.room.make(nbytes, self._waiting()):
            place = self._disk.reserve(nbytes)
        return place

    def _waiting(self) -> Counter[int]:
        """Bytes → pages that have no place on disk yet, by what such pages usually take."""
        with self._state.lock:
            unplaced = self._queue.unplaced()
        rooms: Counter[int] = Counter()
        for nbytes, pages in unplaced.items():
            rooms[self._usual.get(nbytes, nbytes)] += pages
        return rooms


def parent_on_disk(page: Page) -> bool:
    """Whether a page could be found if it were on disk. Under the lock."""
    assert page.parent is not None
    return page.parent.parent is None or page.parent.copies[Tier.DISK] is not None
