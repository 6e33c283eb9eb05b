"""What the tiers hold, and how it leaves them: dropped to make room, found damaged, or never made durable."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from tierstore.core.feed import Feed
from tierstore.core.uses import Uses
from tierstore.index import Index, Page, Tier
from tierstore.keys import Identity
from tierstore.stats import Counters
from tierstore.tiers.disk import Removal
from tierstore.tiers.host import HostTier
from tierstore.tiers.slabs import slot_bytes


class Holdings:
    """Needs the state's lock."""

    def __init__(
        self,
        index: Index,
        *,
        host: HostTier | None,
        uses: Uses,
        counters: Counters,
        changed: threading.Condition,
    ) -> None:
        self._index = index
        self._host = host
        self._uses = uses
        self._counters = counters
        self._changed = changed
        self.host_bytes: Counter[bytes] = Counter()  # slots of the host tier, by identity digest
        self.removed: list[Removal] = []  # pages to delete from disk with the next commit
        self.followers: list[Feed] = []  # told of what comes into the tiers below HBM and leaves them

    def drop(self, page: Page, tier: Tier) -> None:
        """Forget an unleased copy and give its place back (disk: with the next commit)."""
        if tier is Tier.DISK:
            self._drop_from_disk(page)
            return
        above = page.parent
        copy = self._index.copy(page, tier)
        served = copy.ready or copy.damaged
        place = self._index.drop_copy(page, tier)
        assert self._host is not None
        self._host.free(place, page.nbytes)
        self.host_bytes[page.identity] -= slot_bytes(page.nbytes)
        if served:
            self.left(tier, page.identity, page.key, page.tokens)
        kept = above.copies[tier] if above is not None else None
        if above is not None and kept is not None and kept.damaged:
            self.drop_damaged(above, tier)

    def _drop_from_disk(self, page: Page) -> None:
        page_table = self._uses.page_table
        assert page_table is not None, f"{page} leaves a disk that is not known yet"
        serial = page.serial
        self._uses.forget(page)
        page.hole = page_table.children(serial) > 0
        self._index.drop_copy(page, Tier.DISK)
        if serial in page_table:  # else it was found before the scan said that it cannot be
            self.remove(serial)

    def remove(self, serial: int) -> None:
        """A page that is not in the tree leaves the disk, with the next commit."""
        page_table = self._uses.page_table
        assert page_table is not None
        removal = page_table.remove(serial)
        self._uses.forget_serial(serial)
        self.removed.append(removal)
        above = self._index.by_serial.get(removal.parent)
        if above is not None and above.hole and not page_table.children(removal.parent):
            self._index.fill_hole(above)
        self._changed.notify_all()

    def unwrite(self, page: Page) -> int:
        """Take a disk copy back that did not become durable. Returns the place it had."""
        page_table = self._uses.page_table
        assert page_table is not None
        page.hole = page_table.children(page.serial) > 0
        return self._index.drop_copy(page, Tier.DISK)

    # -- who follows ---------------------------------------------------------------------------------

    def register(self, identity: Identity, chunk_tokens: int) -> None:
        """Pages under this identity are going to come and go."""
        for log in self.followers:
            log.register(identity, chunk_tokens)

    def stored(self, pages: Sequence[Page], tier: Tier) -> None:
        """These pages can be served from a tier now."""
        for log in self.followers:
            for page in pages:
                log.stored(page, tier)

    def left(self, tier: Tier, identity: bytes, key: bytes, tokens: bytes) -> None:
        """A page has left a tier."""
        for log in self.followers:
            log.removed(tier, identity, key, tokens)

    # -- damage --------------------------------------------------------------------------------------

    def damaged_on_disk(self, page: Page) -> None:
        """The disk copy did not read back as it was saved: never serve it, free its place."""
        if page.copies[Tier.DISK] is None:
            return
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.DISK)
        self.drop_damaged(page, Tier.DISK)

    def damaged_in_host(self, page: Page) -> None:
        """The host copy is not what its writer said it is: never serve it, free its place, or have it filled
        anew where pages behind it are held."""
        self._counters.damaged_pages += 1
        self._index.set_damaged(page, Tier.HOST)
        self.drop_damaged(page, Tier.HOST)

    def drop_damaged(self, page: Page, tier: Tier) -> None:
        """Drop a damaged copy, if it can go now. (If not, it goes with what holds it.)"""
        copy = self._index.copy(page, tier)
        if copy.leases:
            return
        if tier is Tier.DISK:
            # While the disk is still being scanned, the copy just stays where nobody is served from it.
            if self._uses.page_table is not None:
                self.drop(page, tier)
        elif not copy.children:  # whoever holds a page below reads this one too, under the same lease
            self.drop(page, tier)
