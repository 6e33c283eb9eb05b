"""Any history of saves, removals, uses and restarts, against a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.tierstore.tiers.disk.shelf import IDENTITY, Shelf
from tierstore.policy import LRU
from tierstore.tiers.disk import PageUse
from tierstore.units import KIB, MIB

SIZES = st.sampled_from([1, 100, 4 * KIB, 9000, 16 * KIB, 20_000, 64 * KIB, 65_000, 300_000, 1 * MIB])


class TierAgainstDict(RuleBasedStateMachine):
    encrypted = False

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.shelf = Shelf(self.root / "store", encrypted=self.encrypted, capacity_bytes=6 * MIB)
        self.used: dict[int, PageUse] = {}

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=8), chained=st.booleans(), data=st.data())
    def save(self, sizes, chained, data):
        parent = data.draw(st.sampled_from([0, *self.shelf.saved]))
        for record in self.shelf.save(sizes, parent=parent, chained=chained):
            self.used[record.serial] = PageUse(self.shelf.tick, record.created_s, 0)

    @precondition(lambda self: self.shelf.saved)
    @rule(data=st.data())
    def remove(self, data):
        serials = data.draw(st.lists(st.sampled_from(sorted(self.shelf.saved)), min_size=1, max_size=4))
        self.shelf.remove([self.shelf.saved[serial][0] for serial in serials])

    @precondition(lambda self: self.shelf.saved)
    @rule(data=st.data(), used_s=st.floats(0, 1e10), hits=st.integers(0, 10**6))
    def use(self, data, used_s, hits):
        serial = data.draw(st.sampled_from(sorted(self.shelf.saved)))
        self.shelf.tick += 1
        self.used[serial] = PageUse(self.shelf.tick, used_s, hits)
        self.shelf.tier.page_table.touch({serial: self.used[serial]})
        self.shelf.tier.commit([], [], {serial: self.used[serial]}, self.shelf.tick)

    @rule()
    def give_a_place_back(self):
        place = self.shelf.tier.reserve(64 * KIB)
        if place is not None:
            self.shelf.tier.unreserve(place, 64 * KIB)

    @rule()
    def restart(self):
        expected = set(self.shelf.saved)
        records = self.shelf.reopen()
        assert {record.serial for record in records} == expected
        assert self.shelf.tier.tick == self.shelf.tick
        seen = {self.shelf.tier.serials.root(IDENTITY.digest)}
        for record in records:
            assert record.parent in seen
            assert self.shelf.use(record.serial) == self.used[record.serial]
            seen.add(record.serial)

    @rule(capacity=st.sampled_from([2 * MIB, 4 * MIB, 6 * MIB]), page=st.sampled_from([8 * KIB, 64 * KIB]))
    def restart_with_another_capacity(self, capacity, page):
        expected = dict(self.shelf.saved)
        records = self.shelf.reopen(capacity_bytes=capacity, page_bytes=page)
        for record in records:
            assert record.parent in {self.shelf.tier.serials.root(IDENTITY.digest), *self.shelf.saved}
            assert record.serial in expected

    @rule()
    def read(self):
        self.shelf.verify()

    @rule()
    def find(self):
        """Every page is found from its root, by its keys and tokens."""
        for record, _ in self.shelf.saved.values():
            path = [record]
            while path[0].parent in self.shelf.saved:
                path.insert(0, self.shelf.saved[path[0].parent][0])
            chunks = [(each.key, each.tokens) for each in path]
            assert self.shelf.tier.find(path[0].parent, IDENTITY.digest, chunks) == path
            wrong = [*chunks[:-1], (record.key, record.tokens[:-1] + bytes([record.tokens[-1] ^ 1]))]
            assert self.shelf.tier.find(path[0].parent, IDENTITY.digest, wrong) == path[:-1]

    @rule()
    def leave_in_order(self):
        """The longest unused first, and children before their parents."""
        page_table = self.shelf.tier.page_table
        while page_table.next_to_leave(LRU(), 5):
            pass
        order = page_table.next_to_leave(LRU(), 3)
        assert set(order) <= set(self.shelf.saved)
        assert len(order) == min(3, len(self.shelf.saved))
        worth = {serial: self.used[serial].tick for serial in self.shelf.saved}
        for serial in sorted(worth, reverse=True):  # a page is worth what the best one below it is
            parent = self.shelf.saved[serial][0].parent
            if parent in worth:
                worth[parent] = max(worth[parent], worth[serial])
        ticks = [worth.pop(serial) for serial in order]
        assert ticks == sorted(ticks)
        assert not worth or not ticks or min(worth.values()) >= ticks[-1]

    @invariant()
    def agrees(self):
        self.shelf.tier.check()
        assert self.shelf.tier.stats().pages == len(self.shelf.saved)

    def teardown(self):
        self.shelf.verify()
        self.shelf.close()
        shutil.rmtree(self.root)


TestTierAgainstDict = TierAgainstDict.TestCase
TestTierAgainstDict.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
