"""A cache of entries that do not depend on each other, over a queue of the replay; and requests for it."""

from __future__ import annotations

import random

from tierstore.policy import PageFacts
from tierstore_tools.replay import policies


class Entry(policies.Entry, eq=False):
    name: int
    hits: int = 0
    last_use: int = 0


class PlainCache:
    """``capacity`` entries. What has left is forgotten, but for the last ``ghosts`` names."""

    def __init__(self, policy: str, capacity: int, *, ghosts: int = 0) -> None:
        self.entries: dict[int, Entry] = {}
        self.tick = 0
        self._capacity = capacity
        self._ghosts: dict[int, None] = {}
        self._most_ghosts = ghosts
        self._queue = policies.queue_of(policy, _facts, lambda _: True)

    def ask(self, name: int) -> bool:
        """Whether the entry was there; it is afterwards."""
        self.tick += 1
        entry = self.entries.get(name)
        if entry is not None:
            entry.hits += 1
            entry.last_use = self.tick
            return True
        if len(self.entries) == self._capacity:
            victim = self._queue.victim(self.tick)
            assert victim is not None
            self._queue.leave(victim)
            del self.entries[victim.name]
            self._ghosts[victim.name] = None
            while len(self._ghosts) > self._most_ghosts:
                del self._ghosts[next(iter(self._ghosts))]
        entry = self.entries[name] = Entry(name)
        entry.last_use = self.tick
        entry.hits = int(name in self._ghosts)
        self._ghosts.pop(name, None)
        self._queue.arrive(entry, self.tick, entry.hits)
        self._queue.offer(entry)
        return False


def _facts(entry: Entry) -> PageFacts:
    return PageFacts(1 << 20, 0, entry.last_use, entry.hits)


def requests(count: int, *, names: int, seed: int) -> list[int]:
    """Names by a skewed distribution, with a scan now and then."""
    generator = random.Random(seed)
    made: list[int] = []
    while len(made) < count:
        if generator.random() < 0.01:
            made += [names + len(made) + at for at in range(names // 4)]
        made.append(int(generator.paretovariate(0.8)) % names)
    return made[:count]
