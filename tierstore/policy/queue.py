"""The copies of one memory tier in line for leaving. The index has one per tier, and so has the replay tool:
what follows from a policy is decided here for both. There, a copy stands for several pages one behind the
other, of which the last is in line: an entry for one that has left is known by its depth.

Only copies that may leave are in line (ready, no lease, no child in the tier). The line is a heap that is
brought up to date lazily: a page's use is not noticed before it stands in front. So using a page costs
nothing here, and leaving costs O(log n).
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, TypeAlias, TypeVar, cast

from msgspec import Struct

from tierstore.policy.base import PageFacts, Policy


class Standing(Struct, kw_only=True, gc=False, eq=False):
    """What is kept of one copy's place in line, besides the facts of its page."""

    arrived: int = 0  # tick at which it came, or was let go round once more
    segment: int = 0
    spent: int = 0  # of its page's hits, those from before it came, or that have bought it another round
    queued: bool = False


S = TypeVar("S", bound=Standing)
_Entry: TypeAlias = "tuple[float, int, int, S]"  # worth, minus its depth, order of coming, copy

_MOST_WAITING = 4096
_LOOKS_AGAIN = 8  # at copies in line, for each that leaves, after the policy has changed its mind


class Accesses:
    """What a policy is to be told of the use of pages, kept until something is decided: a lookup should not
    have to wait while a policy thinks about it. Where nothing is decided for long, the oldest is dropped."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.waiting: deque[list[int]] = deque()
        self._pages = 0

    def add(self, pages: Iterable[int]) -> None:
        """One access to pages with these fingerprints."""
        below = self.policy.watched
        sampled = [page for page in pages if page < below]
        if sampled:
            self.waiting.append(sampled)
            self._pages += len(sampled)
            while self._pages > _MOST_WAITING:
                self._pages -= len(self.waiting.popleft())

    def tell(self, capacity: int) -> None:
        """Let the policy know now. Its tier holds ``capacity`` pages."""
        while self.waiting:
            self.policy.accessed(self.waiting.popleft(), capacity)
        self._pages = 0


class Queue(Generic[S]):
    """Not thread-safe: the index's user locks."""

    _shrinks: ClassVar = False  # whether a copy stands for several pages, of which the last leave first

    def __init__(
        self, policy: Policy, facts: Callable[[S], PageFacts], may_leave: Callable[[S], bool]
    ) -> None:
        self.policy = policy
        self.accesses = Accesses(policy)
        self._facts = facts
        self._may_leave = may_leave
        self._sizes = [0] * policy.segments
        self._heaps: list[list[_Entry[S]]] = [[] for _ in range(policy.segments)]
        self._order = itertools.count()
        self._switches = 0  # of the policy, that have been noticed
        self._doubtful: list[_Entry[S]] = []  # that were in line then

    def __len__(self) -> int:
        """How many copies the tier holds, in line or not."""
        return sum(self._sizes)

    def arrive(self, copy: S, tick: int, hits: int) -> None:
        """A copy came into the tier. ``hits`` are its page's."""
        if self.accesses.waiting:
            self.accesses.tell(len(self))
        copy.arrived = tick
        copy.spent = hits
        if len(self._sizes) > 1:
            copy.segment = self.policy.segment(self._facts(copy))
        self._sizes[copy.segment] += 1

    def leave(self, copy: S) -> None:
        """A copy is gone from the tier."""
        self._sizes[copy.segment] -= 1
        copy.queued = False

    def offer(self, copy: S) -> None:
        """This copy may leave. One whose worth has fallen is offered again."""
        copy.queued = True
        facts = self._facts(copy)
        score = cast(float, self.policy.score(facts))
        entry = (score, -cast(int, facts.depth), next(self._order), copy)
        heapq.heappush(self._heaps[copy.segment], entry)

    def victim(self, tick: int) -> S | None:
        """The copy that leaves next; None when none may. The caller lets it leave."""
        policy = self.policy
        if self.accesses.waiting:
            self.accesses.tell(len(self))
        if self._doubtful or policy.switches != self._switches:
            self._look_again()
        while True:
            segment = 0
            if policy.segments > 1:
                heads = [self._head(each) is not None for each in range(policy.segments)]
                if not any(heads):
                    return None
                segment = policy.turn(self._sizes)
                if not heads[segment]:
                    segment = heads.index(True)
            head = self._head(segment)
            if head is None:
                return None
            score, copy, facts = head
            round_again = policy.spare(facts)
            if round_again is None:
                policy.leaves(facts, score, tick)
                return copy
            heapq.heappop(self._heaps[segment])
            self._goes_round(copy)
            self._sizes[copy.segment] -= 1
            copy.segment, copy.spent = round_again
            self._sizes[copy.segment] += 1
            if policy.spared_go_last:
                copy.arrived = tick
            self.offer(copy)

    def _goes_round(self, copy: S) -> None:
        """This copy is spared: where it stands for several pages, its last one alone."""

    def _is_of_the_past(self, copy: S, depth: int) -> bool:
        """Whether an entry with minus this depth is about a page that a copy no longer stands for."""
        return False

    def _look_again(self) -> None:
        """Where the policy has changed its mind, copies may be worth less than their place in line says. Some
        are offered again each time, so that nobody waits while all are; their old entries are passed over
        later."""
        if self.policy.switches != self._switches:
            self._switches = self.policy.switches
            self._doubtful = [entry for heap in self._heaps for entry in heap]
        for _ in range(min(_LOOKS_AGAIN, len(self._doubtful))):
            score, depth, _, copy = self._doubtful.pop()
            if copy.queued:
                facts = self._facts(copy)
                if cast(float, self.policy.score(facts)) < score and not self._is_of_the_past(copy, depth):
                    self.offer(copy)

    def _head(self, segment: int) -> tuple[float, S, PageFacts] | None:
        heap = self._heaps[segment]
        while heap:
            score, depth, _, copy = heap[0]
            if not copy.queued or copy.segment != segment:
                heapq.heappop(heap)  # gone, or in line elsewhere
            elif self._shrinks and self._is_of_the_past(copy, depth):
                heapq.heappop(heap)
            elif not self._may_leave(copy):
                heapq.heappop(heap)
                copy.queued = False  # it is offered again when what holds it is gone
            else:
                facts = self._facts(copy)
                now = cast(float, self.policy.score(facts))
                if now <= score:
                    return now, copy, facts
                heapq.heapreplace(heap, (now, -cast(int, facts.depth), next(self._order), copy))
        return None

    def queued(self) -> set[int]:
        """The ids of the copies in line (for checks)."""
        return {id(entry[3]) for heap in self._heaps for entry in heap if entry[3].queued}
