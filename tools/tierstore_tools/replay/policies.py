"""The policies of a replay: the live store's, policies from papers, and the ceiling.

The store's own policies order an :class:`~tierstore.policy.EvictionQueue`, as in the store. FIFO, LFU,
S3-FIFO, SIEVE and 2Q need the time at which a block came into the tier, and the last three have two queues.
They were made for caches with independent entries. Here a block leaves only after the blocks behind it in its
prompts. A queue therefore gives its first block *that may leave*. A block that has blocks behind it keeps its
place in the queue.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from tierstore.errors import UsageError
from tierstore.policy import (
    LRU,
    POLICIES,
    EvictionQueue,
    Number,
    PageFacts,
    Policy,
    QueueEntry,
    Reuse,
    hint_score,
)

_TICKS = 2.0**40  # more than any run has
_MIB = float(1 << 20)


class Entry(QueueEntry, kw_only=True, eq=False):
    """The record of a block's copy in a tier."""

    arrived: int = 0  # tick at which it came, or was spared
    spent: int = 0  # hits of its block before it came, and hits that have spared it
    segment: int = 0  # for S3-FIFO, SIEVE and 2Q


E = TypeVar("E", bound=Entry)
Facts = Callable[[E], PageFacts]
MayLeave = Callable[[E], bool]


class BlockQueue(Generic[E]):
    """The copies of one tier that may leave, in the order of ``policy``."""

    def __init__(self, policy: Policy, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        self._queue = EvictionQueue(policy, facts, may_leave)

    def arrive(self, copy: E, tick: int, hits: int) -> None:
        """Register a new copy in the tier. ``hits`` are its block's."""
        copy.arrived = tick
        copy.spent = hits

    def leave(self, copy: E) -> None:
        """Register that a copy has left the tier."""
        copy.queued = False

    def offer(self, copy: E) -> None:
        """Queue a copy that may leave."""
        self._queue.offer(copy)

    def score_fell(self, copy: E) -> None:
        """Take a copy out of the queue; it must be offered again with its new score."""
        copy.queued = False

    def victim(self, tick: int) -> E | None:
        """Take the next copy to leave out of the queue; None if none may leave."""
        return self._queue.victim(tick)


# -- one queue -------------------------------------------------------------------------------------------


class FIFO(BlockQueue[E]):
    """First in, first out. A page still stays longer than the pages behind it in a prompt."""

    name = "fifo"

    def __init__(self, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        super().__init__(LRU(), _by_arrival(facts), may_leave)


class LFU(BlockQueue[E]):
    """The least frequently used page leaves first, and the least recently used one of pages with equally many
    uses. Uses count from the page's arrival in the tier."""

    name = "lfu"

    class _Score(Policy):
        def score(self, facts: PageFacts) -> Number:
            return facts.hits * _TICKS + facts.last_use

    def __init__(self, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        def since_arrival(copy: E) -> PageFacts:
            known = facts(copy)
            return known._replace(hits=known.hits - copy.spent)

        super().__init__(self._Score(), since_arrival, may_leave)


class Hinted(Policy):
    """LRU with hints: pages that are done leave first, then those with an unlikely next use. Likely ones
    leave last."""

    name = "hinted"

    def score(self, facts: PageFacts) -> Number:
        return hint_score(facts) + facts.last_use


class PriorityPolicy(Policy):
    """LRU within priorities, the lowest first. Pages that are done or expired leave before all others. Hints
    about likely uses do not count."""

    name = "priority"

    def score(self, facts: PageFacts) -> Number:
        over = np.equal(facts.reuse, Reuse.DONE)
        return (facts.priority - over * 256.0) * _TICKS + facts.last_use


class GDSF(Policy):
    """Greedy-dual size frequency. A page's score is the clock at its last use plus uses × cost ÷ bytes. The
    clock is the score of the last evicted page, so unused pages lose their value over time.

    Cost is the time to compute a page if all pages before it are held. The time of products with weights is
    the same for each page. The time of attention grows with the page's depth. Both are equal after
    ``doubling_depth`` pages: about 500 for 64-token pages of an 8-billion-parameter model."""

    name = "gdsf"

    def __init__(self, doubling_depth: float = 512.0) -> None:
        self._doubling_depth = doubling_depth
        # The clock over time, from each tick on: so no page has to keep it.
        self._ticks = [0]
        self._clocks = [0.0]

    def score(self, facts: PageFacts) -> Number:
        cost = 1 + facts.depth / self._doubling_depth
        clock = self._clocks[bisect_right(self._ticks, cast(int, facts.last_use)) - 1]
        return clock + (facts.hits + 1) * cost / (facts.nbytes / _MIB)

    def leaves(self, facts: PageFacts, score: float, tick: int) -> None:
        if score > self._clocks[-1]:
            self._ticks.append(tick)
            self._clocks.append(score)


class Belady(Policy):
    """The page that is needed last leaves first (Belady, 1966). Priorities must be the next uses
    (:class:`~tierstore_tools.replay.hints.BeladyHints`).

    No policy that admits every page, as the store's do, has a higher hit rate. A policy that may refuse pages
    can have a slightly higher one."""

    name = "belady"

    def score(self, facts: PageFacts) -> Number:
        return facts.priority


# -- two queues ------------------------------------------------------------------------------------------


class TwoQueues(BlockQueue[E]):
    """Copies in two queues, one per segment."""

    main_by_use: ClassVar = False  # whether the second queue is LRU instead of FIFO

    def __init__(self, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        main = facts if self.main_by_use else _by_arrival(facts)
        self._queues = [EvictionQueue(LRU(), each, may_leave) for each in (_by_arrival(facts), main)]
        self._sizes = [0, 0]
        self._facts = facts

    @abstractmethod
    def segment(self, hits: int) -> int:
        """Return the segment of a page that comes into the tier with this number of hits."""

    @abstractmethod
    def turn(self, sizes: list[int]) -> int:
        """Return the segment whose first page leaves next, from the number of pages in each. If none of its
        pages may leave, the other segment gives one."""

    def spare(self, copy: E, hits: int) -> bool:
        """Return whether the first of a queue stays, at a new place."""
        return False

    def arrive(self, copy: E, tick: int, hits: int) -> None:
        super().arrive(copy, tick, hits)
        copy.segment = self.segment(hits)
        self._sizes[copy.segment] += 1

    def leave(self, copy: E) -> None:
        super().leave(copy)
        self._sizes[copy.segment] -= 1

    def offer(self, copy: E) -> None:
        self._queues[copy.segment].offer(copy)

    def score_fell(self, copy: E) -> None:
        """Do nothing: these policies ignore hints."""

    def victim(self, tick: int) -> E | None:
        while True:
            segment = self.turn(self._sizes)
            copy = self._queues[segment].victim(tick) or self._queues[1 - segment].victim(tick)
            if copy is None:
                return None
            self._sizes[copy.segment] -= 1
            spared = self.spare(copy, cast(int, self._facts(copy).hits))
            self._sizes[copy.segment] += 1
            if not spared:
                return copy
            self._came(copy, tick)
            self.offer(copy)

    def _came(self, copy: E, tick: int) -> None:
        """Move a spared copy to the end of its queue."""
        copy.arrived = tick


class S3FIFO(TwoQueues[E]):
    """New pages have a tenth of the tier. A page that was used twice moves from the end of that part to the
    main queue. At the end of the main queue, a page that was used since is put to the beginning again, at
    most three times."""

    name = "s3fifo"

    def segment(self, hits: int) -> int:
        return int(hits > 0)

    def turn(self, sizes: list[int]) -> int:
        return int(sizes[0] <= 0.1 * sum(sizes))

    def spare(self, copy: E, hits: int) -> bool:
        uses = min(hits - copy.spent, 3)
        if copy.segment:
            copy.spent = hits - uses + 1
            return uses > 0
        copy.segment, copy.spent = int(uses > 1), hits
        return uses > 1


class TwoQ(TwoQueues[E]):
    """New pages have a quarter of the tier, and their uses there do not count. Pages that return after an
    eviction are kept in LRU order in the rest of the tier."""

    name = "2q"
    main_by_use = True

    def segment(self, hits: int) -> int:
        return int(hits > 0)

    def turn(self, sizes: list[int]) -> int:
        return int(sizes[0] <= 0.25 * sum(sizes))


class Sieve(TwoQueues[E]):
    """A hand passes over the pages in order of arrival. A page that was used since the last pass stays at its
    place, any other page leaves. The two segments are the pages before the hand and the pages behind it in
    this pass."""

    name = "sieve"
    _round = 0

    def segment(self, hits: int) -> int:
        return self._round

    def turn(self, sizes: list[int]) -> int:
        return self._round

    def spare(self, copy: E, hits: int) -> bool:
        self._round = copy.segment  # the other segment if the current one is empty
        if hits <= copy.spent:
            return False
        copy.segment, copy.spent = 1 - self._round, hits
        return True

    def _came(self, copy: E, tick: int) -> None:
        """Keep the place of a spared copy."""


def _by_arrival(facts: Facts[E]) -> Facts[E]:
    return lambda copy: facts(copy)._replace(last_use=copy.arrived)


# -- by name ---------------------------------------------------------------------------------------------

_SCORES: dict[str, type[Policy]] = {
    **POLICIES,
    **{policy.name: policy for policy in (GDSF, Hinted, PriorityPolicy, Belady)},
}
_QUEUES: dict[str, Callable[[Facts[Any], MayLeave[Any]], BlockQueue[Any]]] = {
    queue.name: queue for queue in (FIFO, LFU, S3FIFO, Sieve, TwoQ)
}
POLICY_NAMES = ("lru", *(name for name in (*_SCORES, *_QUEUES) if name != "lru"))


def queue_of(policy: str, facts: Facts[E], may_leave: MayLeave[E]) -> BlockQueue[E]:
    """Return an empty queue with the policy of this name."""
    if policy in _SCORES:
        return BlockQueue(_SCORES[policy](), facts, may_leave)
    return _QUEUES[policy](facts, may_leave)


def parse_policies(text: str) -> tuple[str, ...]:
    """Return the names of a list, each once. Raises :class:`UsageError` for an unknown name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICY_NAMES:
            raise UsageError(f"unknown policy {name!r} (known: {', '.join(POLICY_NAMES)})")
    return names
