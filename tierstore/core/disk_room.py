"""Make room on disk for new pages: decide which pages to evict, and which to move.

Pages of one size class share slabs (tiers/slabs.py). Evicting the globally worst page would mostly free a
slot of another class, which is useless until its whole slab happens to be empty. Under traffic of mixed
sizes, a tenth to a fifth of the disk would be idle. So:

* A class with pages **nearly as bad as the worst** of all (among the worst 1/32 of all bytes) evicts its own
  pages: each frees a usable slot at once. This is the usual case, because in steady traffic the ages of all
  classes are alike.
* Otherwise the class has to **grow** at the expense of the classes with the worst pages. Pages of as many
  bytes as the wanted slabs are evicted, wherever they are. Then the emptiest windows are chosen
  (tiers/disk/space.py), and their remaining pages move to the freed slots (disk_moves.py).
* **Idle** space in slabs of classes that are no longer written is collected in the same way, without
  evictions. If the idle space consists of gaps between slabs, too small for new pages, neighbours of the gaps
  move into freed runs, and the gaps are joined.

**Rejected alternatives**:

* Evict the pages of the windows instead of moving them. This is cheaper, but pages that are used all day
  would leave because of their position.
* Use a log with a cleaner instead of slabs. There would be no classes, but each eviction out of order
  leaves a hole. At 95 % full, the cleaner writes each page many times.
"""

from __future__ import annotations

import itertools
import logging
import math
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

_SHARE = 1 / 32  # largest share of the capacity that is freed at once for one class …
_MOST_PAGES = 512  # … and the most pages: the next pages to be written wait for this
_AT_ONCE = 32  # pages evicted under one hold of the lock
_ROUNDS = 2  # rounds of evicting and moving before a class gets no more
_MOST_MOVED = 1.0  # bytes moved for each byte that a class can grow by
_MOST_MOVED_TO_JOIN = 4.0  # bytes moved for each byte that would otherwise be idle
_LEAST_COLLECTED = 1 / 512  # share of the capacity; less idle space is not worth collecting
_TOLERATED_IDLE = 1 / 128  # share of the capacity that may be free but too scattered to use
_INDEX_ROUNDS = 64
_LEAST_INDEX_PAGES = 16  # records in a page of the index tree: fewer evictions free no space


class DiskRoom:
    """Makes room for the store's writer, on the writer's thread. ``commit`` makes pending removals
    durable."""

    def __init__(self, state: StoreState, disk: DiskTier, commit: Callable[[], bool]) -> None:
        self._state = state
        self._disk = disk
        self._space = disk.space
        self._commit = commit
        self._capacity_bytes = disk.stats().capacity_bytes
        self._moves = DiskMoves(state, disk)
        self._idle_bytes = 0  # idle bytes that the last attempt could not collect

    @property
    def moves(self) -> DiskMoves:
        """The moves of pages, with their cost so far."""
        return self._moves

    def make(self, nbytes: int, waiting: Mapping[int, int]) -> bool:
        """Make room for a page of ``nbytes``, and for some of the ``waiting`` pages (page bytes → number of
        pages) that are written after it. Return False when no page may leave, or the disk failed."""
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
        """Evict the worst pages of the class that has the most pages. Each page frees one record."""
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
            # Alternatively, use the slots meant for the other classes, which find new slots more easily.
            if len(wanted) > 1 and self._empty_windows(nbytes, alone):
                return True
            spare = 0
        evicted = self._leave(1, size_class=slot_bytes(nbytes))
        return evicted > 0 and self._commit() and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self._space.shortage(nbytes) is Shortage.NONE

    def _evict(self, page_table: PageTable, nbytes: int, wanted: Counter[int], *, spare: int) -> bool:
        """Evict pages for each class that needs more slots than are free. Return False when no page could
        leave.

        A class with pages nearly as bad as the worst evicts those. Otherwise the worst pages of all classes
        leave, for as many bytes as the class has to grow, less the ``spare`` bytes. One commit covers all.
        """
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
        """Evict pages as :meth:`~.Eviction.evict_from_disk` does, but a few at a time: each page must be
        removed from the tree, and lookups would wait for all of them."""
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
        """Return how many pages may leave at once."""
        return min(max(int(self._capacity_bytes * _SHARE) // nbytes, 1), _MOST_PAGES)

    def _windows_for(self, nbytes: int, pages: int) -> int:
        return -(-pages // max(self._space.slab_slots(nbytes), 1))

    def _collect_idle(self, nbytes: int, wanted: Counter[int]) -> bool:
        """Use idle free space, if there is enough of it to be worthwhile."""
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
        """Return the bytes that are free and not about to be used."""
        free = self._space.free_slots()
        taken = (min(free[slot_bytes(each)], pages) * slot_bytes(each) for each, pages in wanted.items())
        return max(self._space.free_bytes() - sum(taken), 0)

    # -- windows -------------------------------------------------------------------------------------

    def _empty_windows(self, nbytes: int, wanted: Counter[int], *, joining: bool = False) -> bool:
        """Move pages out of the way of pages of ``nbytes``. Return whether there is room now."""
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


# pages under one hold of the lock: one hold for each would pass the lock on thousands of times a second
_AT_ONCE = 32


class DiskPlacement:
    """Assigns places on disk to pages, for the store's writer and on its thread. ``commit`` makes pending
    removals durable."""

    def __init__(
        self, state: StoreState, disk: DiskTier, queue: WriteQueue, commit: Callable[[], bool]
    ) -> None:
        self._state = state
        self._disk = disk
        self._queue = queue
        self.room = DiskRoom(state, disk, commit)
        self._usual: dict[int, int] = {}  # page bytes → the bytes that the last such page took on disk

    def give(self, batch: Sequence[Page], encoded: Mapping[Page, Encoded]) -> list[Page]:
        """Give each page of a batch a place on disk. Return the pages that got one. ``encoded`` has the
        payloads of pages that a codec has made smaller."""
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
                self._state.changed.notify_all()  # some pages may have been given up
        return placed

    def _put_in_place(self, page: Page, place: int | None, encoded: Encoded | None) -> bool:
        # Check only now: making room may have evicted the parent, and the page may have been forgotten.
        in_host = page.copies[Tier.HOST]
        wanted = in_host is not None and in_host.ready
        wanted = wanted and self._disk.session_keys.admits(page.identity, page.key_session)
        if place is not None and wanted and parent_on_disk(page) and page.copies[Tier.DISK] is None:
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
            created_s=page.made_s,
            checksum=0 if encoded is None else encoded.checksum,
            codec=RAW if encoded is None else encoded.codec,
            encoded_bytes=0 if encoded is None else encoded.nbytes,
            seal=self._disk.moment(page.key_session),
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
        """Return a place for one page, making room if the disk is full. Return None if no page may leave."""
        place = self._disk.reserve(nbytes)
        if place is None and self.room.make(nbytes, self._waiting()):
            place = self._disk.reserve(nbytes)
        return place

    def _waiting(self) -> Counter[int]:
        """Return the number of pages that have no place on disk yet, by the bytes that such a page usually
        takes there."""
        with self._state.lock:
            unplaced = self._queue.unplaced()
        rooms: Counter[int] = Counter()
        for nbytes, pages in unplaced.items():
            rooms[self._usual.get(nbytes, nbytes)] += pages
        return rooms


def parent_on_disk(page: Page) -> bool:
    """Whether a page could be found on disk: its parent is there. Needs the lock."""
    assert page.parent is not None
    return page.parent.parent is None or page.parent.copies[Tier.DISK] is not None
