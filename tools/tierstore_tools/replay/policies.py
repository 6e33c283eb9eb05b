"""The policies that can be replayed: the live store's, those from papers to compare with, and the ceiling.

The store's own order an :class:`~tierstore.policy.EvictionQueue` here as they do there. FIFO, LFU, S3-FIFO,
SIEVE and 2Q need to know when a block came into the tier, and the last three have two queues. They were made
for caches whose entries do not depend on each other. Here a block can only leave after those behind it in its
prompts. So the first of a queue is the first *that may leave*: blocks with others behind them keep their
place and are first once nothing is behind them.
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

_TICKS = 2.0**40  # more than there will ever be
_MIB = float(1 << 20)


class Entry(QueueEntry, kw_only=True, eq=False):
    """What is kept with each copy of a block in a tier."""

    arrived: int = 0  # tick at which it came, or was spared
    spent: int = 0  # of its block's hits, those from before it came, or that have spared it once
    segment: int = 0  # of S3-FIFO, SIEVE and 2Q


E = TypeVar("E", bound=Entry)
Facts = Callable[[E], PageFacts]
MayLeave = Callable[[E], bool]


class BlockQueue(Generic[E]):
    """The copies of one tier that may leave, in the order of ``policy``."""

    def __init__(self, policy: Policy, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        self._queue = EvictionQueue(policy, facts, may_leave)

    def arrive(self, copy: E, tick: int, hits: int) -> None:
        """A copy came into the tier. ``hits`` are its block's."""
        copy.arrived = tick
        copy.spent = hits

    def leave(self, copy: E) -> None:
        """A copy is gone from the tier."""
        copy.queued = False

    def offer(self, copy: E) -> None:
        """This copy may leave."""
        self._queue.offer(copy)

    def score_fell(self, copy: E) -> None:
        """Take a copy out of the queue: it has to be offered again for its new score."""
        copy.queued = False

    def victim(self, tick: int) -> E | None:
        """Take the copy that leaves next out of the queue; None when none may leave."""
        return self._queue.victim(tick)


# -- one queue -------------------------------------------------------------------------------------------


class FIFO(BlockQueue[E]):
    """First in, first out. A page before another in a prompt came before it and still stays longer."""

    name = "fifo"

    def __init__(self, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        super().__init__(LRU(), _by_arrival(facts), may_leave)


class LFU(BlockQueue[E]):
    """Least frequently used leaves first, among equals the least recently used. Uses count from when the page
    came into the tier, as in the textbook."""

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
    """LRU that listens to hints: what is done leaves first, then what is unlikely to be used, and what is
    likely to be used last."""

    name = "hinted"

    def score(self, facts: PageFacts) -> Number:
        return hint_score(facts) + facts.last_use


class PriorityPolicy(Policy):
    """LRU within priorities, the lowest first. What is done, or has lived its time, leaves before all; what
    is likely or not does not count."""

    name = "priority"

    def score(self, facts: PageFacts) -> Number:
        over = np.equal(facts.reuse, Reuse.DONE)
        return (facts.priority - over * 256.0) * _TICKS + facts.last_use


class GDSF(Policy):
    """Greedy-dual size frequency: a page's score is the clock at its last use plus uses × cost of computing
    it ÷ bytes; the clock is the score of what last left, so what is not used becomes worthless in time.

    Cost is the time to compute a page with all before it at hand: constant for the weights, and growing with
    depth for attention, which costs as much as the rest after ``doubling_depth`` pages (for 64-token pages of
    an 8-billion-parameter model, half a thousand)."""

    name = "gdsf"

    def __init__(self, doubling_depth: float = 512.0) -> None:
        self._doubling_depth = doubling_depth
        # The clock over time, so that nothing has to be kept for each page: the clock from each tick on.
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
    """The page that is needed last leaves first (Belady, 1966). It has to be told the next uses as priorities
    (:class:`~tierstore_tools.replay.hints.BeladyHints`).

    It is the ceiling of policies that take in every page, as the store's do. One that may refuse a page that
    is not needed soon finds a little more."""

    name = "belady"

    def score(self, facts: PageFacts) -> Number:
        return facts.priority


# -- two queues ------------------------------------------------------------------------------------------


class TwoQueues(BlockQueue[E]):
    """Copies stand in two queues, one for each segment."""

    main_by_use: ClassVar = False  # whether the second queue is LRU, and not FIFO

    def __init__(self, facts: Facts[E], may_leave: MayLeave[E]) -> None:
        main = facts if self.main_by_use else _by_arrival(facts)
        self._queues = [EvictionQueue(LRU(), each, may_leave) for each in (_by_arrival(facts), main)]
        self._sizes = [0, 0]
        self._facts = facts

    @abstractmethod
    def segment(self, hits: int) -> int:
        """The segment of a page that comes into the tier with so many hits."""

    @abstractmethod
    def turn(self, sizes: list[int]) -> int:
        """The segment whose first page leaves next, by how many pages each has. If none of it may, the other
        gives one."""

    def spare(self, copy: E, hits: int) -> bool:
        """Whether the first of a queue stays: then it has a new place."""
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
        """Nothing: these policies do not listen to hints."""

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
        """A spared copy goes to the end of its queue."""
        copy.arrived = tick


class S3FIFO(TwoQueues[E]):
    """A tenth of the tier for pages on trial. At its end a page that was used twice moves to the main queue,
    in which every use lets a page go round once more (three at most)."""

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
    """A quarter of the tier for pages on trial, however often they are used there. A page that comes back
    after its trial is kept as long as it is among the most recently used."""

    name = "2q"
    main_by_use = True

    def segment(self, hits: int) -> int:
        return int(hits > 0)

    def turn(self, sizes: list[int]) -> int:
        return int(sizes[0] <= 0.25 * sum(sizes))


class Sieve(TwoQueues[E]):
    """A hand goes over the pages in the order of their arrival; a page that was used since it last came by
    stays where it is, any other leaves. The two segments are the pages that the hand has before it in this
    round, and those that it has passed."""

    name = "sieve"
    _round = 0

    def segment(self, hits: int) -> int:
        return self._round

    def turn(self, sizes: list[int]) -> int:
        return self._round

    def spare(self, copy: E, hits: int) -> bool:
        self._round = copy.segment  # the other one, when none was left in this round's
        if hits <= copy.spent:
            return False
        copy.segment, copy.spent = 1 - self._round, hits
        return True

    def _came(self, copy: E, tick: int) -> None:
        """A spared copy keeps its place."""


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
    """An empty queue under the policy of this name."""
    if policy in _SCORES:
        return BlockQueue(_SCORES[policy](), facts, may_leave)
    return _QUEUES[policy](facts, may_leave)


def parse_policies(text: str) -> tuple[str, ...]:
    """The names in a list, each once. Raises :class:`UsageError` for one that is not known."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in POLICY_NAMES:
            raise UsageError(f"no policy {name!r} (there are: {', '.join(POLICY_NAMES)})")
    return names
