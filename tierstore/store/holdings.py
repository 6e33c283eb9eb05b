"""What the tiers hold, and how it leaves them: dropped to make room, found damaged, or never made durable."""

from __future__ import annotations

import threading
from collections import Counter

from tierstore.index import Index, Page, Tier
from tierstore.store.feed import Feed
from tierstore.store.hbm_cache import HbmCache
from tierstore.store.stats import Counters
from tierstore.store.uses import Uses
from tierstore.tiers.disk import Removal
from tierstore.tiers.host import HostTier


class Holdings:
    """Needs the state's lock."""

    def __init__(
        self,
        index: Index,
        *,
        hbm: HbmCache,
        host: HostTier | None,
        uses: Uses,
        counters: Counters,
        changed: threading.Condition,
    ) -> None:
        self._index = index
        self._hbm = hbm
        self._host = host
        self._uses = uses
        self._counters = counters
        self._changed = changed
        self.host_bytes: Counter[bytes] = Counter()  # in the host tier, by identity digest
        self.removed: list[Removal] = []  # pages to delete from disk with the next commit
        self.feed: Feed | None = None  # told of what comes into the tiers below HBM and leaves them

    def drop(self, page: Page, tier: Tier) -> None:
        """Forget an unleased copy and give its place back (disk: with the next commit)."""
        if tier is Tier.DISK:
            self._drop_from_disk(page)
            return
        above = page.parent
        copy = self._index.copy(page, tier)
        served = copy.ready or copy.damaged
        place = self._index.drop_copy(page, tier)
        if tier is Tier.HBM:
            self._hbm.unpublish(place)
        else:
            assert self._host is not None
            self._host.free(place, page.nbytes)
            self.host_bytes[page.identity] -= page.nbytes
            if served and self.feed is not None:
                self.feed.removed(tier, page.identity, page.key, page.tokens)
        kept = above.copies[tier] if above is not None else None
        if above is not None and kept is not None and kept.damaged:
            self.drop_damaged(above, tier)

    def _drop_from_disk(self, page: Page) -> None:
        ledger = self._uses.ledger
        assert ledger is not None, f"{page} leaves a disk that is not known yet"
        serial = page.serial
        self._uses.forget(page)
        page.hole = ledger.children(serial) > 0
        self._index.drop_copy(page, Tier.DISK)
        if serial in ledger:  # else it was found before the survey said that it cannot be
            self.remove(serial)

    def remove(self, serial: int) -> None:
        """A page that is not in the tree leaves the disk, with the next commit."""
        ledger = self._uses.ledger
        assert ledger is not None
        removal = ledger.remove(serial)
        self._uses.forget_serial(serial)
        self.removed.append(removal)
        above = self._index.by_serial.get(removal.parent)
        if above is not None and above.hole and not ledger.children(removal.parent):
            self._index.fill_hole(above)
        self._changed.notify_all()

    def unwrite(self, page: Page) -> int:
        """Take a disk copy back that did not become durable. Returns the place it had."""
        ledger = self._uses.ledger
        assert ledger is not None
        page.hole = ledger.children(page.serial) > 0
        return self._index.drop_copy(page, Tier.DISK)

    # -- damage --------------------------------------------------------------------------------------

    def damaged_on_disk(self, page: Page) -> None:
        """The disk copy did not read back as it was saved: never serve it, free its place."""
        if page.copies[Tier.DISK] is None:
            return
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.DISK)
        self.drop_damaged(page, Tier.DISK)

    def damaged_in_host(self, page: Page) -> None:
        """The host copy is not what its writer said it is: never serve it, free its place."""
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.HOST)
        self.drop_damaged(page, Tier.HOST)

    def drop_damaged(self, page: Page, tier: Tier) -> None:
        """Drop a damaged copy, if it can go now. (If not, it goes with what holds it.)"""
        copy = self._index.copy(page, tier)
        if copy.leases:
            return
        if tier is Tier.DISK:
            # While the disk is still being surveyed, the copy just stays where nobody is served from it.
            if self._uses.ledger is not None:
                self.drop(page, tier)
        elif not copy.children:  # whoever holds a page below reads this one too, under the same lease
            self.drop(page, tier)
