"""Any history of saves, removals, uses and restarts, against a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.tierstore.tiers.disk.shelf import Shelf
from tierstore.units import KIB, MIB

SIZES = st.sampled_from([1, 100, 4 * KIB, 9000, 16 * KIB, 20_000, 64 * KIB, 65_000, 300_000, 1 * MIB])


class TierAgainstDict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.shelf = Shelf(self.root / "store", capacity_bytes=6 * MIB)
        self.used: dict[int, tuple[float, int]] = {}

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=8), chained=st.booleans(), data=st.data())
    def save(self, sizes, chained, data):
        parent = data.draw(st.sampled_from([0, *self.shelf.saved]))
        for record in self.shelf.save(sizes, parent=parent, chained=chained):
            self.used[record.serial] = (record.used_s, record.hits)

    @precondition(lambda self: self.shelf.saved)
    @rule(data=st.data())
    def remove(self, data):
        serials = data.draw(st.lists(st.sampled_from(sorted(self.shelf.saved)), min_size=1, max_size=4))
        self.shelf.remove([self.shelf.saved[serial][0] for serial in serials])

    @precondition(lambda self: self.shelf.saved)
    @rule(data=st.data(), used_s=st.floats(0, 1e10), hits=st.integers(0, 10**6))
    def use(self, data, used_s, hits):
        serial = data.draw(st.sampled_from(sorted(self.shelf.saved)))
        self.shelf.tier.commit([], [], {serial: (used_s, hits)})
        self.used[serial] = (used_s, hits)

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
        seen = {0}
        for record in records:
            assert record.parent in seen
            assert (record.used_s, record.hits) == self.used[record.serial]
            seen.add(record.serial)

    @rule(capacity=st.sampled_from([2 * MIB, 4 * MIB, 6 * MIB]), page=st.sampled_from([8 * KIB, 64 * KIB]))
    def restart_with_another_capacity(self, capacity, page):
        expected = dict(self.shelf.saved)
        records = self.shelf.reopen(capacity_bytes=capacity, page_bytes=page)
        for record in records:
            assert (record.parent or record.serial) in self.shelf.saved
            assert record.serial in expected

    @rule()
    def read(self):
        self.shelf.verify()

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
