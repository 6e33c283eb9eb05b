"""The queue of a memory tier's evictable copies, in the policy's order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar, cast

from msgspec import Struct

from tierstore.policy.base import PageFacts, Policy


class QueueEntry(Struct, kw_only=True, gc=False, eq=False):
    """The part of a copy that an eviction queue uses."""

    queued: bool = False


E = TypeVar("E", bound=QueueEntry)
_LOOKS_AGAIN = 8  # queued copies that are scored again for each eviction after a policy's revision
_Place: TypeAlias = "tuple[float, int, int, E]"  # (score, negative depth, number of the offer, entry)


class EvictionQueue(Generic[E]):
    """The copies that may leave one memory tier: ready, without a lease, without a child in the tier.

    The heap is updated lazily. A use of a page costs nothing here: its copy is scored again when it reaches
    the front. A use only raises a score, so a copy that stays at the front has the lowest score. A copy whose
    score has *fallen* (a hint, an expired time to live) must be offered again. An eviction costs O(log n).

    ``facts`` returns the facts about a copy, and ``may_leave`` whether it may leave now. Not thread-safe: the
    store's lock guards it.
    """

    def __init__(
        self, policy: Policy, facts: Callable[[E], PageFacts], may_leave: Callable[[E], bool]
    ) -> None:
        self._policy = policy
        self._facts = facts
        self._may_leave = may_leave
        self._heap: list[_Place[E]] = []
        self._order = itertools.count()
        self._revision = policy.revision
        self._outdated: list[_Place[E]] = []  # heap entries from before the policy's revision

    def offer(self, entry: E) -> None:
        """Queue a copy that may leave, or one whose score has fallen."""
        entry.queued = True
        heapq.heappush(self._heap, self._place(entry, self._facts(entry)))

    def _place(self, entry: E, facts: PageFacts) -> _Place[E]:
        score = cast(float, self._policy.score(facts))
        return score, -cast(int, facts.depth), next(self._order), entry

    def victim(self, tick: int) -> E | None:
        """Remove the next copy to leave from the queue and return it; None if no copy may leave. Notify the
        policy. The caller must drop the copy or offer it again."""
        self._look_again()
        heap = self._heap
        while heap:
            score, _, _, entry = heap[0]
            if not entry.queued:
                heapq.heappop(heap)  # the copy is gone
                continue
            if not self._may_leave(entry):
                heapq.heappop(heap)
                entry.queued = False  # the index offers it again when nothing holds it any more
                continue
            facts = self._facts(entry)
            place = self._place(entry, facts)
            if place[0] > score:
                heapq.heapreplace(heap, place)
                continue
            heapq.heappop(heap)
            entry.queued = False
            self._policy.leaves(facts, place[0], tick)
            return entry
        return None

    def _look_again(self) -> None:
        """After a revision, queue some copies again whose scores have fallen. The copies' old heap entries
        are ignored later."""
        if not self._outdated and self._policy.revision != self._revision:
            self._revision = self._policy.revision
            self._outdated = self._heap.copy()
        for score, _, _, entry in self._outdated[-_LOOKS_AGAIN:]:
            if entry.queued:
                place = self._place(entry, self._facts(entry))
                if place[0] < score:
                    heapq.heappush(self._heap, place)
        del self._outdated[-_LOOKS_AGAIN:]

    def queued(self) -> set[int]:
        """Return the ids of the queued copies (for checks)."""
        return {id(place[3]) for place in self._heap if place[3].queued}
