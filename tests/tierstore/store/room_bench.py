"""A store's state over a disk, without the threads that usually drive it."""

from __future__ import annotations

import itertools

import numpy as np

from tierstore.core.disk_room import DiskRoom
from tierstore.core.state import StoreState
from tierstore.index import Tier
from tierstore.keys import Identity, Prompt
from tierstore.policy import LRU
from tierstore.tiers.disk import DiskTier, PageRecord, PageUse
from tierstore.tiers.disk.space import Shortage
from tierstore.tiers.host import HostTier
from tierstore.units import KIB, MIB

SMALL, LARGE = 64 * KIB, 1 * MIB
CAPACITY = 16 * MIB


class Bench:
    """Saves pages one by one, or many with one commit."""

    def __init__(self, path):
        self.disk = DiskTier.open(path, capacity_bytes=CAPACITY, page_bytes=SMALL)
        self.host = HostTier(2 * MIB)
        self.state = StoreState([LRU(), LRU(), LRU()], host=self.host, disk=self.disk)
        self.state.scanned()
        self.room = DiskRoom(self.state, self.disk, self.commit)
        self.after_relocation = None
        self._relocate, self.disk.relocate = self.disk.relocate, self.relocate
        self._serials = itertools.count()
        self.bytes = {}  # serial -> what was saved

    def commit(self):
        removed, self.state.residency.removed = self.state.residency.removed, []
        self.disk.commit([], removed, {}, self.state.index.tick)
        return True

    def relocate(self, moved):
        self._relocate(moved)
        if self.after_relocation is not None:
            self.after_relocation(moved)

    def save(self, nbytes):
        """A page of its own prompt on disk; its record, or None when there was no room."""
        records = self.save_all(nbytes, 1)
        return records[0] if records else None

    def save_all(self, nbytes, count):
        records = []
        for _ in range(count):
            place = self.disk.reserve(nbytes)
            if place is None and self.room.make(nbytes, {nbytes: 1}):
                place = self.disk.reserve(nbytes)
            if place is not None:
                records.append(self._write(nbytes, place))
        uses = {}
        for record in records:
            self.state.index.tick += 1
            uses[record.serial] = PageUse(self.state.index.tick, 0.0, 0)
        payloads = [(record, memoryview(self.bytes[record.serial] * (nbytes // 16))) for record in records]
        self.disk.commit(payloads, [], uses, self.state.index.tick)
        for record in records:
            self.wake(record)
        return records

    def _write(self, nbytes, place):
        identity = Identity(f"pages of {nbytes}", "layout")
        number = next(self._serials)
        prompt = Prompt(identity, np.full(16, number, np.uint32), chunk_tokens=16)
        parent = self.disk.serials.add_root(identity)
        record = PageRecord(
            serial=self.disk.serials.new(),
            parent=parent,
            key=prompt.keys[0],
            identity=identity.digest,
            tokens=prompt.token_bytes,
            nbytes=nbytes,
            place=place,
        )
        self.bytes[record.serial] = bytes([number % 251]) * 16
        self.disk.write([(record, memoryview(self.bytes[record.serial] * (nbytes // 16)))])
        return record

    def wake(self, record):
        root = self.state.root(Identity(f"pages of {record.nbytes}", "layout"), record.nbytes)
        return self.state.reload(root, [record])

    def page(self, record):
        return self.state.index.by_serial[record.serial]

    def fill(self, nbytes):
        """Save as many pages as there is room for without anybody leaving."""
        records = []
        space = self.disk.space
        while space.shortage(nbytes) is Shortage.NONE:
            free = space.free_bytes() // (2 * nbytes)
            records += self.save_all(nbytes, min(max(free, 1), 32))
        return records

    def records(self):
        return {serial: record for serial, record in self.disk.scan() if serial in self.disk.page_table}

    def verify(self):
        """Every page that is held is as it was saved, and everybody agrees on where."""
        for serial, record in self.records().items():
            view = memoryview(bytearray(record.nbytes))
            assert self.disk.read([(record, view)]).all_good
            assert bytes(view[:16]) == self.bytes[serial]
            assert self.disk.page_table.place(serial) == record.place
            page = self.state.index.by_serial.get(serial)
            assert page is None or page.record.place == page.copies[Tier.DISK].place == record.place
        self.state.check()
        self.disk.check()
