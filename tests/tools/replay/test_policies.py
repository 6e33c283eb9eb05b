"""The policies to compare with: some against programs written from their papers."""

from __future__ import annotations

from collections import OrderedDict

import pytest

from tests.tools.replay.caches import PlainCache, requests
from tierstore.policy import PageFacts, Reuse
from tierstore_tools.replay.policies import GDSF, PriorityPolicy
from tierstore_tools.replay.simulator import reconciled

CAPACITY = 50


class S3FifoOfThePaper:
    """Two queues as ordered dictionaries of name → uses, the oldest first."""

    def __init__(self, ghosts):
        self.small, self.main, self.ghosts = OrderedDict(), OrderedDict(), OrderedDict()
        self.most_ghosts = ghosts

    def ask(self, name):
        for line in (self.small, self.main):
            if name in line:
                line[name] += 1
                return True
        if len(self.small) + len(self.main) == CAPACITY:
            self.evict()
        (self.main if self.ghosts.pop(name, False) else self.small)[name] = 0
        return False

    def evict(self):
        while True:
            if self.small and (len(self.small) > 0.1 * CAPACITY or not self.main):
                name, uses = self.small.popitem(last=False)
                if uses > 1:
                    self.main[name] = 0
                    continue
            else:
                name, uses = self.main.popitem(last=False)
                if uses:
                    self.main[name] = min(uses, 3) - 1
                    continue
            self.ghosts[name] = True
            while len(self.ghosts) > self.most_ghosts:
                self.ghosts.popitem(last=False)
            return


class SieveOfThePaper:
    """One queue and a hand, which goes from the oldest to the newest and begins again."""

    def __init__(self):
        self.line = []  # [name, visited], the oldest first
        self.hand = 0

    def ask(self, name):
        for each in self.line:
            if each[0] == name:
                each[1] = True
                return True
        if len(self.line) == CAPACITY:
            while True:
                self.hand %= len(self.line)
                if not self.line[self.hand][1]:
                    break
                self.line[self.hand][1] = False
                self.hand += 1
            del self.line[self.hand]
        self.line.append([name, False])
        return False


class TwoQOfThePaper:
    def __init__(self, ghosts):
        self.trial, self.main, self.ghosts = OrderedDict(), OrderedDict(), OrderedDict()
        self.most_ghosts = ghosts

    def ask(self, name):
        if name in self.main:
            self.main.move_to_end(name)
            return True
        if name in self.trial:
            return True
        if len(self.trial) + len(self.main) == CAPACITY:
            from_trial = self.trial and (len(self.trial) > 0.25 * CAPACITY or not self.main)
            gone, _ = (self.trial if from_trial else self.main).popitem(last=False)
            self.ghosts[gone] = True
            while len(self.ghosts) > self.most_ghosts:
                self.ghosts.popitem(last=False)
        (self.main if self.ghosts.pop(name, False) else self.trial)[name] = True
        return False


class Scored:
    """Drops what ``worst`` says of the entries: lists of [arrived, last use, uses]."""

    def __init__(self, worth):
        self.worth = worth
        self.entries = {}
        self.tick = 0

    def ask(self, name):
        self.tick += 1
        if name in self.entries:
            self.entries[name][1] = self.tick
            self.entries[name][2] += 1
            return True
        if len(self.entries) == CAPACITY:
            del self.entries[min(self.entries, key=lambda each: self.worth(*self.entries[each]))]
        self.entries[name] = [self.tick, self.tick, 0]
        return False


@pytest.mark.parametrize(
    ("policy", "reference", "ghosts"),
    [
        ("s3fifo", lambda: S3FifoOfThePaper(45), 45),
        ("s3fifo", lambda: S3FifoOfThePaper(0), 0),
        ("sieve", SieveOfThePaper, 0),
        ("2q", lambda: TwoQOfThePaper(25), 25),
        ("lru", lambda: Scored(lambda arrived, last_use, uses: last_use), 0),
        ("fifo", lambda: Scored(lambda arrived, last_use, uses: arrived), 0),
        ("lfu", lambda: Scored(lambda arrived, last_use, uses: (uses, last_use)), 0),
    ],
)
def test_independent_entries_are_found_as_in_the_paper(policy, reference, ghosts):
    ours, theirs = PlainCache(policy, CAPACITY, ghosts=ghosts), reference()
    hits = 0
    for at, name in enumerate(requests(3000, names=200, seed=1)):
        hit = ours.ask(name)
        assert hit == theirs.ask(name), f"request {at}"
        hits += hit
    assert 300 < hits < 2700


def test_priority_knows_priorities_and_ends_only():
    policy = PriorityPolicy()
    page = PageFacts(4096, 0, 50, 0)
    assert policy.score(page._replace(reuse=Reuse.LIKELY)) == policy.score(page)
    assert policy.score(page._replace(priority=1, last_use=1)) > policy.score(page)
    assert policy.score(page._replace(reuse=Reuse.DONE, priority=100)) < policy.score(
        page._replace(priority=-100, last_use=0)
    )


def test_gdsf_keeps_what_is_dear_until_the_clock_has_passed_it():
    policy = GDSF(doubling_depth=100)
    cheap, dear = PageFacts(1 << 20, 0, 0, 0), PageFacts(1 << 20, 200, 0, 0)
    assert policy.score(dear) == 3 * policy.score(cheap)
    for tick in range(1, 5001):
        policy.leaves(cheap, tick / 1000, tick)
    new = cheap._replace(last_use=5000)
    assert policy.score(new) == pytest.approx(6.0)
    assert policy.score(dear) == pytest.approx(3.0)
    middle = policy.score(cheap._replace(last_use=2500))
    assert middle == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ([], []),
        ([1, 1, 1], [1, 1, 1]),
        ([-2, -2], [-2, -2]),
        ([1, -2, 1, 1, -2, -2], [1, 1, 1, 1, -2, -2]),
        ([-2, -2, -2, -2, 1, -2], [-2, -2, -2, -2, 0, -2]),
        ([0, 0, 1, 0], [1, 1, 1, 0]),
        ([0, -1, 0], [0, -1, 0]),
    ],
)
def test_hints_of_one_prompt_are_freed_of_contradictions(said, meant):
    assert reconciled(said) == meant
