"""Pages on their way into the host tier."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from tierstore.core.holdings import Holdings
from tierstore.core.room import Room
from tierstore.index import Index, Page, Tier
from tierstore.tiers.slabs import slot_bytes


class Fills:
    """Host slots from the moment they are reserved until their bytes are there. Needs the state's lock."""

    def __init__(self, index: Index, holdings: Holdings, room: Room, changed: threading.Condition) -> None:
        self._index = index
        self._holdings = holdings
        self._room = room
        self._changed = changed
        self.loading: set[Page] = set()  # being read from disk by a load that is running
        self.in_transit = 0  # pages that loads are bringing through the host tier
        self._ahead: list[int] = []  # slots taken for pages that are about to begin
        self._ahead_bytes = 0  # of each

    def begin(self, page: Page, *, following: int = 0) -> int | None:
        """Reserve a host slot for ``page`` and lease it to whoever fills it; None when there is no room.

        ``following`` pages of the same size are likely to begin next: room is made for them too, which at one
        stroke is quicker. Who says so calls :meth:`none_follows` before the lock is released. A copy that is
        damaged and cannot leave is filled anew where it is.
        """
        copy = page.copies[Tier.HOST]
        if copy is not None:
            assert copy.damaged, f"{page} is in host memory already"
            copy.damaged = False
            self._index.lease(page, Tier.HOST)
            page.checksum = page.record.checksum if page.record is not None else None
            return copy.place
        if not self._ahead:
            page.holds += 1  # making room may take the last page below a hole, and with it the hole itself
            self._ahead = self._room.host_slots(page.nbytes, 1 + following)
            self._ahead.reverse()  # in order: what lies side by side is copied and written together
            self._ahead_bytes = page.nbytes
            page.holds -= 1
            if not self._ahead:
                return None
        assert page.nbytes == self._ahead_bytes, f"slots of {self._ahead_bytes} bytes were taken ahead"
        place = self._ahead.pop()
        self._index.add_copy(page, Tier.HOST, place, ready=False, leases=1)
        self._holdings.host_bytes[page.identity] += slot_bytes(page.nbytes)
        page.checksum = page.record.checksum if page.record is not None else None
        return place

    def none_follows(self) -> None:
        """Give back the slots that were taken ahead and not needed."""
        for place in self._ahead:
            self._room.give_back(place, self._ahead_bytes)
        self._ahead.clear()

    def complete(self, pages: Sequence[Page], *, let_go: bool = True) -> None:
        """The fillers of these pages are done: the copies are ready. They ``let_go`` of them, or go on
        holding them."""
        self._index.complete(pages, Tier.HOST, let_go=let_go)
        self._holdings.stored(pages, Tier.HOST)
        self._changed.notify_all()

    def give_up(self, pages: Iterable[Page]) -> None:
        """The fillers of these pages have failed: the copies are gone."""
        for page in pages:
            self._index.unlease(page, Tier.HOST)
            copy = self._index.copy(page, Tier.HOST)
            if copy.children or copy.leases:
                copy.damaged = True
            else:
                self._holdings.drop(page, Tier.HOST)
        self._changed.notify_all()
