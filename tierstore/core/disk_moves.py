"""Move pages on disk while the store is in use, to free whole regions of the disk.

A move reads and verifies the payload (as stored, even if a codec has encoded it), writes it to the new place,
changes the record in one transaction, and then frees the old place. After a crash, the page is in one of the
two places.

Pages in use do not move. If a page comes into use before its record is changed, its move is abandoned. If a
page comes into use after that, its old place is kept until its lease ends. If the disk fails, the move is
abandoned, and the next write finds and reports the failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from tierstore.core.state import StoreState
from tierstore.index import Page, Tier
from tierstore.memory import Memory
from tierstore.tiers.disk import DiskTier, PageRecord
from tierstore.tiers.disk.payloads import PageRead
from tierstore.tiers.disk.space import Window
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import MIB

_AT_ONCE = 16 * MIB  # most bytes of pages moved with one commit


@dataclass(frozen=True, slots=True)
class MoveStats:
    """Pages and bytes moved since the store was opened."""

    moved_pages: int
    moved_bytes: int


class DiskMoves:
    """Moves pages for the store's writer, on the writer's thread."""

    def __init__(self, state: StoreState, disk: DiskTier) -> None:
        self._state = state
        self._disk = disk
        self._space = disk.space
        self._memory: Memory | None = None
        self._pages = 0
        self._bytes = 0
        self._leaving: dict[int, Page] = {}  # moved pages whose old place is still read, by that place

    def stats(self) -> MoveStats:
        return MoveStats(self._pages, self._bytes)

    def empty(self, windows: Iterable[Window]) -> None:
        """Move the pages in held windows, as far as they may move. Raise :class:`OSError` if the disk
        fails."""
        records = [record for window in windows for record in self._movable(window)]
        for piece in _pieces(records):
            self._move(piece)

    def _movable(self, window: Window) -> list[PageRecord]:
        """Return the records of the pages in a window; none if any of the pages may not move."""
        page_table = self._state.page_table
        assert page_table is not None
        found = [page for places in self._space.bytes_of(window) for page in page_table.within(places)]
        if len(found) != sum(slab.used_slots for slab in window.slabs):
            return []  # some pages of the window are about to leave
        with self._state.lock:
            if not all(self._may_move(serial) for serial, _, _ in found):
                return []
        records = self._disk.stored_records(serial for serial, _, _ in found)
        good = [
            record
            for record, (_, place, _) in zip(records, found, strict=True)
            if record is not None and record.place == place
        ]
        return good if len(good) == len(found) else []

    def _may_move(self, serial: int) -> bool:
        """Return whether a page's disk copy is not in use. Needs the lock."""
        page = self._state.index.by_serial.get(serial)
        if page is None:
            return True
        copy = page.copies[Tier.DISK]
        return copy is not None and copy.ready and not copy.leases

    def _move(self, records: Sequence[PageRecord]) -> None:
        """Move pages to free slots outside of held windows, as far as there are free slots. Raise
        :class:`OSError` if the disk fails."""
        page_table = self._state.page_table
        assert page_table is not None
        copies: list[tuple[PageRecord, memoryview]] = []
        moved: list[tuple[PageRecord, int]] = []
        try:
            for record, view in self._read(records):
                place = self._space.reserve_outside(record.room)
                if place is not None:
                    copies.append((replace(record, place=place), view))
            checksums = [record.checksum for record, _ in copies]
            self._disk.write(copies, stored=True)
            before = {record.serial: record.place for record in records}
            with self._state.lock:
                for (copy, _), checksum in zip(copies, checksums, strict=True):
                    still = (
                        self._may_move(copy.serial) and page_table.place(copy.serial) == before[copy.serial]
                    )
                    if still and copy.checksum == checksum:
                        moved.append((copy, before[copy.serial]))
            if moved:
                self._disk.relocate(moved)
        except OSError:
            moved = []
            raise
        finally:
            moved_serials = {record.serial for record, _ in moved}
            for record, _ in copies:
                if record.serial not in moved_serials:
                    self._disk.unreserve(record.place, record.room)
        with self._state.lock:
            for record, place in moved:
                self._moved(record, place)
        self._pages += len(moved)
        self._bytes += sum(record.payload_bytes for record, _ in moved)
        self.vacate()

    def _read(self, records: Sequence[PageRecord]) -> Iterator[tuple[PageRecord, memoryview]]:
        """Yield the records and payloads of the intact pages. Drop a damaged page."""
        total = sum(slot_bytes(record.payload_bytes) for record in records)
        if self._memory is None or self._memory.nbytes < total:
            self._memory = Memory(total, shared=False)
        wanted = []
        start = 0
        for record in records:
            wanted.append((record, self._memory.view(start, record.payload_bytes)))
            start += slot_bytes(record.payload_bytes)
        outcomes = self._disk.read(wanted, stored=True).outcomes
        for page, outcome in zip(wanted, outcomes, strict=True):
            if outcome is PageRead.GOOD:
                yield page
            elif outcome is PageRead.DAMAGED:
                self._lose(page[0])

    def _lose(self, record: PageRecord) -> None:
        with self._state.lock:
            page = self._state.index.by_serial.get(record.serial)
            if page is not None and self._may_move(record.serial):
                self._state.residency.damaged_on_disk(page)
            elif page is None and self._state.eviction.leaves_disk(record.serial):
                self._state.counters.damaged_pages += 1
            # A damaged page with other pages below it stays. The next lookup finds the damage.

    def _moved(self, record: PageRecord, before: int) -> None:
        """Record that a page has moved from place ``before``. Needs the lock."""
        state = self._state
        assert state.page_table is not None
        page = state.index.by_serial.get(record.serial)
        if not state.page_table.move(record.serial, record.place):  # removed while it moved
            state.residency.removed = [
                removal._replace(place=record.place) if removal.serial == record.serial else removal
                for removal in state.residency.removed
            ]
        elif page is not None and (copy := page.copies[Tier.DISK]) is not None:
            assert page.record is not None, f"{page} is on disk without a record"
            page.record = replace(page.record, place=record.place)  # ``record`` may be sealed
            copy.place = record.place
            if copy.leases:
                self._leaving[before] = page
                return
        self._space.vacate(before)

    def vacate(self) -> None:
        """Free the old places of moved pages that are no longer being read."""
        with self._state.lock:
            for place, page in list(self._leaving.items()):
                copy = page.copies[Tier.DISK]
                if copy is None or not copy.leases:
                    del self._leaving[place]
                    self._space.vacate(place)


def _pieces(records: Sequence[PageRecord]) -> Iterator[list[PageRecord]]:
    """Split the records into batches of at most ``_AT_ONCE`` bytes, each moved with one commit."""
    piece: list[PageRecord] = []
    nbytes = 0
    for record in records:
        if piece and nbytes + record.payload_bytes > _AT_ONCE:
            yield piece
            piece, nbytes = [], 0
        piece.append(record)
        nbytes += slot_bytes(record.payload_bytes)
    if piece:
        yield piece
