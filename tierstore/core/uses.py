"""What lookups, saves and hints say of pages on disk: passed on to the page table, and to the next commit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from tierstore.index import Index, Page, Tier
from tierstore.policy import NO_HINT, PageHint
from tierstore.tiers.disk import DiskTier, PageTable, PageUse


class Uses:
    """All of it needs the state's lock."""

    def __init__(self, index: Index, disk: DiskTier | None) -> None:
        self._index = index
        self._disk = disk
        self._used: set[Page] = set()  # pages on disk, since note()
        self._noted: dict[int, PageUse] = {}  # by serial, for the next commit

    @property
    def page_table(self) -> PageTable | None:
        """What is on disk; None without a disk, and until it has been scanned."""
        return self._disk.page_table if self._disk is not None else None

    def touch(self, pages: Sequence[Page], *, hit: bool) -> None:
        """These pages are in use now."""
        self._index.touch(pages, hit=hit)
        if self._disk is not None:
            self._used.update([page for page in pages if page.copies[Tier.DISK] is not None])

    def hint(self, pages: Sequence[Page], hint: PageHint) -> None:
        """``hint`` is about the next use of these pages, in every tier."""
        self._index.hint(pages, hint)
        for page in pages:
            self.pass_hint_on(page)

    def pass_hint_on(self, page: Page) -> None:
        """Let the disk tier know what is hinted of a page, if it is there and was not used since."""
        page_table = self.page_table
        copy = page.copies[Tier.DISK]
        if page_table is not None and copy is not None and copy.ready and page.last_use <= page.hinted:
            page_table.hint(page.serial, page.hint)

    def note(self) -> None:
        """Pass on what has been said of pages on disk: to the page table, and to the next commit."""
        now = time.time()
        noted = {page.serial: PageUse(page.last_use, now, page.hits) for page in self._used if page.serial}
        page_table = self.page_table
        if page_table is not None:
            page_table.touch(noted)
            for page in self._used:
                if page.hint is not NO_HINT:
                    self.pass_hint_on(page)
        self._used.clear()
        self._noted.update(noted)

    def note_before_sleep(self, page: Page) -> None:
        """Nobody will know ``page`` any more: what was said of it is passed on now."""
        if page in self._used:
            self.note()

    # -- for a commit --------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the next commit has uses to write."""
        return bool(self._used or self._noted)

    def take(self, added: Iterable[Page]) -> dict[int, PageUse]:
        """The uses by serial that a commit is to write, those of the pages it adds among them."""
        self._used.update(added)
        self.note()
        taken, self._noted = self._noted, {}
        return taken

    def put_back(self, taken: dict[int, PageUse]) -> None:
        """The commit failed."""
        self._noted = taken | self._noted

    def forget(self, page: Page) -> None:
        """``page`` leaves the disk."""
        self._used.discard(page)

    def forget_serial(self, serial: int) -> None:
        self._noted.pop(serial, None)
