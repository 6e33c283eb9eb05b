"""The line of the copies that may leave, where its policy is not always of one mind."""

from __future__ import annotations

from tests.tierstore.policy.caches import PlainCache
from tierstore.policy import Number, PageFacts, Policy

CAPACITY = 400


class Fickle(Policy):
    """Keeps what was used again for ever, until it no longer does."""

    name = "fickle"
    kept = True

    def score(self, facts: PageFacts) -> Number:
        return facts.last_use + 10**6 * facts.hits * self.kept


def test_what_is_worth_less_after_a_change_of_mind_does_not_stay_for_its_old_worth():
    policy = Fickle()
    cache = PlainCache(policy, CAPACITY)
    for name in [*range(200), *range(200), *range(1000, 2000)]:
        cache.ask(name)
    assert all(name in cache.entries for name in range(200))
    policy.kept = False
    policy.switches += 1
    for name in range(2000, 2250):
        cache.ask(name)
    # Eight are looked at for each that leaves: all, before an eighth of them has left.
    assert sum(name in cache.entries for name in range(200)) <= 50
    for name in range(3000, 3000 + CAPACITY):
        cache.ask(name)
    assert set(cache.entries) == set(range(3000, 3000 + CAPACITY))
