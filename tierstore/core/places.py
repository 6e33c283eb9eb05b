"""Giving pages their places on disk, with room made for them where there is none."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tierstore.core.disk_room import DiskRoom
from tierstore.core.state import StoreState
from tierstore.core.write_queue import WriteQueue
from tierstore.index import Page, Tier
from tierstore.tiers.disk import DiskTier, PageRecord

_AT_ONCE = 32  # pages: a lock taken for each of them is handed over thousands of times a second


class Places:
    """For the store's writer, on its thread. ``commit`` makes pending removals durable."""

    def __init__(
        self, state: StoreState, disk: DiskTier, queue: WriteQueue, commit: Callable[[], bool]
    ) -> None:
        self._state = state
        self._disk = disk
        self._queue = queue
        self.room = DiskRoom(state, disk, commit)

    def give(self, batch: Sequence[Page]) -> list[Page]:
        """Give each page of a batch its place on disk. Returns those that got one."""
        placed: list[Page] = []
        for start in range(0, len(batch), _AT_ONCE):
            some = batch[start : start + _AT_ONCE]
            places = self._reserve_all(some) if self._state.health.writable else [None] * len(some)
            with self._state.lock:
                for page, place in zip(some, places, strict=True):
                    if self._put_in_place(page, place):
                        placed.append(page)
                self._state.changed.notify_all()  # some may have been given up
        return placed

    def _put_in_place(self, page: Page, place: int | None) -> bool:
        # Only now: making room may have taken the parent.
        if place is not None and parent_on_disk(page) and page.copies[Tier.DISK] is None:
            self._state.index.put_on_disk(page, self._record(page, place), ready=False, leases=1)
            return True
        if place is not None:
            self._disk.unreserve(place, page.nbytes)
        self._queue.give_up(page)
        return False

    def _record(self, page: Page, place: int) -> PageRecord:
        parent = page.parent
        assert parent is not None
        if parent.parent is None and not parent.serial:
            parent.serial = self._disk.serials.add_root(self._state.identities[page.identity])
        return PageRecord(
            serial=page.serial or self._disk.serials.new(),
            parent=parent.serial,
            key=page.key,
            identity=page.identity,
            tokens=page.tokens,
            nbytes=page.nbytes,
            place=place,
            created_s=time.time(),
        )

    def _reserve_all(self, pages: Sequence[Page]) -> list[int | None]:
        places: list[int | None] = []
        for nbytes, alike in itertools.groupby(page.nbytes for page in pages):
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
        """Page bytes → pages that have no place on disk yet."""
        with self._state.lock:
            return self._queue.unplaced()


def parent_on_disk(page: Page) -> bool:
    """Whether a page could be found if it were on disk. Under the lock."""
    assert page.parent is not None
    return page.parent.parent is None or page.parent.copies[Tier.DISK] is not None
