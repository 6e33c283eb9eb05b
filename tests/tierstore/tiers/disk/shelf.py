"""A disk tier with a memory of what it was given: the model that the tests compare it with."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tierstore.keys import Identity
from tierstore.memory import Memory
from tierstore.tiers.disk import DiskTier, PageRead, PageRecord, PageUse
from tierstore.tiers.disk.keyring import Keyring
from tierstore.units import KIB, MIB, round_up

MEMORY_BYTES = 24 * MIB
IDENTITY = Identity("model", "layout")
MASTER_KEY = bytes(range(32))  # of the keyring beside an encrypted shelf


class Shelf:
    """Saves random pages and knows what must come back. One batch at a time, as a store's writer does it."""

    def __init__(self, path: Path, *, encrypted: bool = False, **options: Any) -> None:
        self.path = path
        self.keyring_path = path.with_name(f"{path.name}.ring") if encrypted else None
        self.options = {"capacity_bytes": 64 * MIB, "page_bytes": 64 * KIB, **options}
        self.saved: dict[int, tuple[PageRecord, bytes]] = {}  # serial -> what a commit has acknowledged
        self._memory = Memory(MEMORY_BYTES, shared=False)
        self._random = random.Random(0)
        self.tier = self._open()
        self.tick = self.tier.tick

    def _open(self) -> DiskTier:
        keyring = None
        if self.keyring_path is not None:
            keyring = Keyring.open(self.keyring_path, MASTER_KEY, directory=self.path)
        return DiskTier.open(self.path, keyring=keyring, **self.options)

    def records(self) -> list[PageRecord]:
        """The pages that the tier knows of, parents before children."""
        assert self.tier.page_table is not None
        return [record for serial, record in self.tier.scan() if record and serial in self.tier.page_table]

    def use(self, serial: int) -> PageUse:
        """What the tier knows of a page's use."""
        assert self.tier.page_table is not None
        return self.tier.page_table.use(serial)

    def save(
        self,
        sizes: Sequence[int],
        *,
        parent: int = 0,
        chained: bool = False,
        identity: Identity = IDENTITY,
    ) -> list[PageRecord]:
        """Reserve, write and commit one page per size; those that find no room are left out."""
        batch = []
        for nbytes, view in zip(sizes, self._views(sizes), strict=True):
            place = self.tier.reserve(nbytes)
            if place is None:
                continue
            record = self.record(nbytes, place, parent, identity)
            view[:] = self._random.randbytes(nbytes)
            batch.append((record, view))
            parent = record.serial if chained else parent
        try:
            self.tier.write(batch)
            self.tick += 1
            used = {record.serial: PageUse(self.tick, record.created_s, 0) for record, _ in batch}
            self.tier.commit(batch, [], used, self.tick)
        except OSError:
            for record, _ in batch:
                self.tier.unreserve(record.place, record.nbytes)
            raise
        self.saved.update({record.serial: (record, bytes(view)) for record, view in batch})
        return [record for record, _ in batch]

    def record(self, nbytes: int, place: int, parent: int = 0, identity: Identity = IDENTITY) -> PageRecord:
        parent = parent or self.tier.serials.add_root(identity)  # first: parents have lower serials
        serial = self.tier.serials.new()
        return PageRecord(
            serial=serial,
            parent=parent,
            key=self._random.randbytes(16),
            identity=identity.digest,
            tokens=self._random.randbytes(256),
            nbytes=nbytes,
            place=place,
            created_s=float(serial),
        )

    def remove(self, records: Iterable[PageRecord]) -> None:
        """Remove pages and everything below them."""
        doomed = {record.serial for record in records}
        for serial in sorted(self.saved):
            if self.saved[serial][0].parent in doomed:
                doomed.add(serial)
        assert self.tier.page_table is not None
        gone = [self.tier.page_table.remove(serial) for serial in sorted(doomed, reverse=True)]
        self.tier.commit([], gone, {}, self.tick)
        for serial in doomed:
            del self.saved[serial]

    def read(self, records: Sequence[PageRecord]) -> list[bytes | None]:
        """What the tier serves for each record; None for a miss."""
        views = self._views([record.nbytes for record in records])
        for view in views:
            view[:] = b"\xaa" * view.nbytes
        read = self.tier.read(list(zip(records, views, strict=True)))
        return [
            bytes(view) if outcome is PageRead.GOOD else None
            for view, outcome in zip(views, read.outcomes, strict=True)
        ]

    def verify(self) -> None:
        """Everything that was saved comes back as it was."""
        records = [record for record, _ in self.saved.values()]
        for batch in self._batches(records):
            for record, data in zip(batch, self.read(batch), strict=True):
                assert data == self.saved[record.serial][1], f"page {record.serial} is not what was saved"

    def reopen(self, **options: Any) -> list[PageRecord]:
        """Close, open again, and return the records found. Pages that were dropped are forgotten here too."""
        self.tier.close()
        self.options.update(options)
        self.tier = self._open()
        records = self.records()
        self.saved = {record.serial: (record, self.saved[record.serial][1]) for record in records}
        return records

    def close(self) -> None:
        self.tier.check()
        self.tier.close()

    def _batches(self, records: Sequence[PageRecord]) -> Iterable[list[PageRecord]]:
        batch: list[PageRecord] = []
        used = 0
        for record in records:
            nbytes = round_up(record.nbytes, 4096)
            if used + nbytes > MEMORY_BYTES:
                yield batch
                batch, used = [], 0
            batch.append(record)
            used += nbytes
        yield batch

    def _views(self, sizes: Sequence[int]) -> list[memoryview]:
        views = []
        offset = 0
        for nbytes in sizes:
            views.append(self._memory.view(offset, nbytes))
            offset += round_up(nbytes, 4096)
        assert offset <= MEMORY_BYTES, "the test's batch is too large"
        return views
