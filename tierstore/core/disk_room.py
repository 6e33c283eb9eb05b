"""Make room on disk for new pages: decide which pages to evict, and which to move.

Pages of one size class share slabs (tiers/slabs.py). The globally worst page mostly lies in a slab of another
class, and its slot is useless to this class until the whole slab is empty. If only the worst pages were
evicted, a tenth to a fifth of the disk would be idle under traffic of mixed sizes. So:

* A class that has pages among the worst 1/32 of all bytes evicts those pages: each frees a usable slot at
  once. Evicting pages of the same class is the usual case, because in steady traffic the pages of all classes
  have similar ages.
* Any other class has to **grow** at the expense of the classes with the worst pages. A growing class evicts
  the worst pages of all classes, with as many bytes as the slabs that it needs. Then pages are moved from the
  emptiest windows (tiers/disk/space.py) to the freed slots (disk_moves.py).
* **Idle** space in slabs of classes that are no longer written is collected by moving pages, without
  evictions. If the idle space consists of gaps between slabs, too small for new pages, pages next to the gaps
  move away, and the gaps are joined.

**Rejected alternatives**:

* Evict the pages of the windows instead of moving them. Evicting is cheaper than moving, but would evict
  frequently used pages because of their position.
* Use a log with a cleaner instead of slabs. A log needs no size classes, but each eviction out of order
  leaves a hole, and on a disk that is 95 % full the cleaner would rewrite each page many times.
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

_SHARE = 1 / 32  # largest share of the capacity that is freed at once for one class
_MOST_PAGES = 512  # most pages evicted at once, because the next pages to be written wait for it
_AT_ONCE = 32  # pages handled under one hold of the lock: passing the lock on for each page costs too much
_ROUNDS = 2  # rounds of evicting and moving, before only a single page is evicted
_MOST_MOVED = 1.0  # most bytes moved for each byte that a class can grow by
_MOST_MOVED_TO_JOIN = 4.0  # most bytes moved for each byte that would otherwise be idle
_LEAST_COLLECTED = 1 / 512  # share of the capacity; a smaller amount of idle space is not collected
_TOLERATED_IDLE = 1 / 128  # share of the capacity that may be free but too scattered to use
_INDEX_ROUNDS = 64
_LEAST_INDEX_PAGES = 16  # records in a page of the LMDB index: fewer evictions free no space in it


class DiskRoom:
    """Makes room for the store's writer, on the writer's thread. ``commit`` makes pending removals durable.
    ``moves`` counts the pages that were moved to make room."""

    def __init__(self, state: StoreState, disk: DiskTier, commit: Callable[[], bool]) -> None:
        self._state = state
        self._disk = disk
        self._space = disk.space
        self._commit = commit
        self._capacity_bytes = disk.stats().capacity_bytes
        self.moves = DiskMoves(state, disk)
        self._idle_bytes = 0  # bytes of idle space that the last attempt could not collect

    def make(self, nbytes: int, waiting: Mapping[int, int]) -> bool:
        """Make room for a page of ``nbytes``, and for some of the ``waiting`` pages that are written after it
        (number of pages by page bytes). Return False if no page may leave, or the disk failed."""
        page_table = self._state.page_table
        if page_table is None:
            return False
        self.moves.vacate()
        shortage = self._space.shortage(nbytes)
        if shortage is Shortage.INDEX:
            return self._make_index_room(page_table, nbytes, waiting)
        if shortage is Shortage.NONE:
            return True
        wanted = Counter({nbytes: 1}) | Counter(waiting)
        return self._collect_idle(nbytes, wanted) or self._make_slots(page_table, nbytes, wanted)

    # -- the index -----------------------------------------------------------------------------------

    def _make_index_room(self, page_table: PageTable, nbytes: int, waiting: Mapping[int, int]) -> bool:
        """Evict the worst pages of the class that has the most pages, because each page frees one record."""
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
            # Otherwise make room only for this class, because the other classes find slots more easily.
            if len(wanted) > 1 and self._empty_windows(nbytes, alone):
                return True
            spare = 0
        evicted = self._leave(1, size_class=slot_bytes(nbytes))
        return evicted > 0 and self._commit() and self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        return self._space.shortage(nbytes) is Shortage.NONE

    def _evict(self, page_table: PageTable, nbytes: int, wanted: Counter[int], *, spare: int) -> bool:
        """Evict pages for each class that needs more slots than are free, and commit once. Return False if no
        page could leave.

        A class evicts its own pages if some of them are among the worst pages on disk. For a class without
        such pages, the worst pages of all classes leave, with as many bytes as the class has to grow by,
        minus ``spare``.
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
        """Evict pages as :meth:`~.Eviction.evict_from_disk` does, but a few at a time, so that lookups need
        not wait until all of them are removed from the tree."""
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
        return min(max(int(self._capacity_bytes * _SHARE) // nbytes, 1), _MOST_PAGES)

    def _windows_for(self, nbytes: int, pages: int) -> int:
        return -(-pages // max(self._space.slab_slots(nbytes), 1))

    def _collect_idle(self, nbytes: int, wanted: Counter[int]) -> bool:
        """Move pages to make idle free space usable, if there is enough of it. Return whether there is room
        for a page of ``nbytes`` now."""
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
        """Return the number of bytes that are free and that the ``wanted`` pages will not use."""
        free = self._space.free_slots()
        taken = (min(free[slot_bytes(each)], pages) * slot_bytes(each) for each, pages in wanted.items())
        return max(self._space.free_bytes() - sum(taken), 0)

    # -- windows -------------------------------------------------------------------------------------

    def _empty_windows(self, nbytes: int, wanted: Counter[int], *, joining: bool = False) -> bool:
        """Move pages away to make whole slabs free for pages of ``nbytes``. Return whether there is room for
        a page of ``nbytes`` now."""
        others = Counter({slot_bytes(each): pages for each, pages in wanted.items() if each != nbytes})
        count = self._windows_for(nbytes, min(wanted[nbytes], self._most_pages(nbytes)))
        most = _MOST_MOVED_TO_JOIN if joining else _MOST_MOVED
        windows = self._space.hold(nbytes, count, wanted=others, most_moved=most, joining=joining)
        try:
            self.moves.empty(windows)
        except OSError as error:
            _log.warning("disk tier: pages could not be moved: %s", error)
        finally:
            self._space.unhold(windows)
        return self._has_room(nbytes)


class DiskPlacement:
    """Assigns places on disk to pages, on the writer's thread. ``commit`` makes pending removals durable."""

    def __init__(
        self, state: StoreState, disk: DiskTier, queue: WriteQueue, commit: Callable[[], bool]
    ) -> None:
        self._state = state
        self._disk = disk
        self._queue = queue
        self.room = DiskRoom(state, disk, commit)
        self._usual: dict[int, int] = {}  # bytes that the last page of a size took on disk, by page bytes

    def give(self, batch: Sequence[Page], encoded: Mapping[Page, Encoded]) -> list[Page]:
        """Give each page of a batch a place on disk. Return the pages that got a place. ``encoded`` has the
        payloads of pages that a codec has compressed."""
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
                self._state.changed.notify_all()  # the queue may have given up some pages
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
        """Return a place for one page, and make room if the disk is full. Return None if no page may
        leave."""
        place = self._disk.reserve(nbytes)
        if place is None and self.room.make(nbytes, self._waiting()):
            place = self._disk.reserve(nbytes)
        return place

    def _waiting(self) -> Counter[int]:
        """Return the number of pages that have no place on disk yet, by the bytes that such pages usually
        take on disk."""
        with self._state.lock:
            unplaced = self._queue.unplaced()
        rooms: Counter[int] = Counter()
        for nbytes, pages in unplaced.items():
            rooms[self._usual.get(nbytes, nbytes)] += pages
        return rooms


def parent_on_disk(page: Page) -> bool:
    """Return whether a page could be found on disk, because its parent is on disk. Needs the lock."""
    assert page.parent is not None
    return page.parent.parent is None or page.parent.copies[Tier.DISK] is not None
