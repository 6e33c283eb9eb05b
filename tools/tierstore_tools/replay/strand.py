"""Blocks that are alike, and their line for leaving (``strands.py`` says what for)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

from tierstore.policy import NO_HINT, PageFacts, PageHint, Policy
from tierstore.policy.queue import Queue, Standing


class Strand(Standing, eq=False):
    """Blocks one behind the other. What a :class:`Standing` says is about the last one."""

    above: Strand | None  # its last block is the one before these
    ids: list[int]
    prints: list[int]  # their fingerprints
    end: int  # the number of blocks up to the last one's
    hits: int
    last_use: int
    hint: PageHint = NO_HINT
    children: int = 0  # strands that begin behind the last block
    held: bool = True

    @classmethod
    def behind(
        cls, above: Strand | None, ids: list[int], prints: list[int], hits: int, last_use: int
    ) -> Strand:
        """These blocks, which come after those of ``above``."""
        return cls(above, ids, prints, len(ids) + (0 if above is None else above.end), hits, last_use)

    def alike(self, blocks: Sequence[int], start: int) -> int:
        """How many of its blocks a prompt goes along, of which the first is at ``start``."""
        ids = self.ids
        if ids == blocks[start : start + len(ids)]:
            return len(ids)
        pairs = zip(ids, blocks[start:], strict=False)
        ends = min(len(ids), len(blocks) - start)
        return next((at for at, (one, other) in enumerate(pairs) if one != other), ends)


class Line(Queue[Strand]):
    """The last blocks of strands in line."""

    _shrinks: ClassVar = True

    def __init__(self, policy: Policy, block_bytes: int, part_last: Callable[[Strand], None]) -> None:
        super().__init__(policy, self._facts_of, may_leave)
        self._block_bytes = block_bytes
        self._part_last = part_last
        self.is_one = policy.segments == 1

    def grow(self, strand: Strand) -> None:
        """One more block came into the tier, which the strand has now."""
        if self.accesses.waiting:
            self.accesses.tell(len(self))
        self._sizes[strand.segment] += 1

    def offer_rest(self, strand: Strand, tick: int) -> bool:
        """The first in line has given up a block, and its rest may leave. Returns whether that is the first
        in line again: then it leaves next, and the policy has been told."""
        policy = self.policy
        facts = self._facts_of(strand)
        score = cast(float, policy.score(facts))
        heap = self._heaps[strand.segment]
        past, entry = heap[0], (score, 1 - strand.end, next(self._order), strand)
        strand.queued = True
        heapq.heappush(heap, entry)
        if not self.is_one or self._doubtful or policy.switches != self._switches:
            return False
        if heap[0] is past:
            heapq.heappop(heap)
        if heap[0] is not entry or policy.spare(facts) is not None:
            return False
        policy.leaves(facts, score, tick)
        return True

    def _goes_round(self, copy: Strand) -> None:
        self._part_last(copy)

    def _is_of_the_past(self, copy: Strand, depth: int) -> bool:
        return copy.end - 1 != -depth

    def _facts_of(self, strand: Strand) -> PageFacts:
        hint = strand.hint
        return PageFacts(
            self._block_bytes,
            strand.end - 1,
            strand.last_use,
            strand.hits,
            strand.arrived,
            hint.reuse,
            hint.priority,
            strand.segment,
            strand.spent,
        )


def may_leave(strand: Strand) -> bool:
    return not strand.held and not strand.children
