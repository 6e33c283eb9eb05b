"""One of several tiers without bytes, block by block. They share what is known of a block.

A replay through a single tier takes a faster one (``strands.py``); the tests see that it does the same.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from tierstore.policy import NO_HINT, PageFacts, PageHint, Policy, Reuse
from tierstore.policy.departed import Departed, fingerprint
from tierstore.policy.hinted import reconciled
from tierstore.policy.queue import Queue, Standing


class Block:
    """A block of the trace and what is known of it while any tier holds it."""

    __slots__ = ("depth", "fingerprint", "hint", "hits", "id", "last_use", "parent", "tiers")

    def __init__(self, block: int, parent: Block | None, page: int, hits: int) -> None:
        self.id = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.fingerprint = page
        self.last_use = 0
        self.hits = hits
        self.hint = NO_HINT
        self.tiers = 0  # that hold it


class Memory:
    """The blocks that some tier holds, those that left, and the logical clock. Tiers of one store share
    it."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.tick = 0
        self.now_s = 0.0
        self._departed = Departed()
        self._expiring: list[tuple[float, int, int, PageHint]] = []
        self._order = itertools.count()

    def block(self, block: int, parent: Block | None) -> Block:
        """The block of this id, made if no tier holds it."""
        known = self.blocks.get(block)
        if known is None:
            page = fingerprint(block)
            hits = self._departed.recall(page)
            known = self.blocks[block] = Block(block, parent, page, 0 if hits is None else hits + 1)
            known.last_use = self.tick
            self._departed.make_room(len(self.blocks))
        return known

    def forget(self, block: Block) -> None:
        """No tier holds this block any more."""
        del self.blocks[block.id]
        self._departed.remember(block.fingerprint, block.hits)

    def use(self, blocks: Sequence[int]) -> None:
        """A lookup found these blocks."""
        self.tick += 1
        for block in blocks:
            known = self.blocks[block]
            known.last_use = self.tick
            known.hits += 1
            known.hint = NO_HINT  # it was about this use

    def saved(self, blocks: Sequence[int]) -> None:
        """A save brought these blocks."""
        self.tick += 1
        for block in blocks:
            self.blocks[block].last_use = self.tick

    def hint(self, blocks: Sequence[int], hints: Sequence[PageHint]) -> None:
        """Each of the hints is about the next use of its block; where they contradict each other, the fewest
        count as wrong."""
        hints = hints[: len(blocks)]
        reuse = [hint.reuse for hint in hints]
        if len(set(reuse)) > 1:
            hints = [hint._replace(reuse=each) for hint, each in zip(hints, reconciled(reuse), strict=True)]
        for block, hint in zip(blocks, hints, strict=True):
            self.blocks[block].hint = hint
            if hint.expires_s < math.inf:
                heapq.heappush(self._expiring, (hint.expires_s, next(self._order), block, hint))

    def expire_hints(self) -> list[int]:
        """Those blocks whose time to live is over are as good as done. Returns them."""
        over = []
        while self._expiring and self._expiring[0][0] <= self.now_s:
            _, _, block, hint = heapq.heappop(self._expiring)
            known = self.blocks.get(block)
            if known is not None and known.hint is hint:
                known.hint = PageHint(Reuse.DONE, hint.priority)
                over.append(block)
        return over


class _Copy(Standing, eq=False):
    block: Block
    children: int = 0
    held: bool = True


class Cache:
    """One tier with room for ``capacity_blocks``. What it holds is closed over prefixes."""

    def __init__(self, policy: Policy, capacity_blocks: int, memory: Memory, *, block_bytes: int = 1) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.memory = memory
        self.evicted_blocks = 0
        self.stored_blocks = 0
        self._block_bytes = block_bytes
        self._copies: dict[int, _Copy] = {}
        self._queue = Queue(policy, self._facts, _may_leave)

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, block: int) -> bool:
        return block in self._copies

    def held(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here."""
        copies = self._copies
        for at, block in enumerate(blocks):
            if block not in copies:
                return at
        return len(blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """These blocks, which are here, cannot leave until :meth:`release`."""
        for block in blocks:
            self._copies[block].held = True

    def release(self, blocks: Sequence[int]) -> None:
        """The running request is done with these blocks."""
        for block in blocks:
            copy = self._copies[block]
            copy.held = False
            if not copy.queued and not copy.children:
                self._queue.offer(copy)

    def worth_less(self, blocks: Sequence[int]) -> None:
        """These blocks may be worth less than they were when they were last offered."""
        for block in blocks:
            copy = self._copies.get(block)
            if copy is not None:
                copy.queued = False
                if _may_leave(copy):
                    self._queue.offer(copy)

    def store(self, blocks: Sequence[int], first: int) -> int:
        """Take in the blocks from ``first`` on, as far as there is room; those before are here. They are
        held. Returns how many leading blocks are here now."""
        memory = self.memory
        copies = self._copies
        parent = copies[blocks[first - 1]] if first else None
        for at in range(first, len(blocks)):
            block = memory.block(blocks[at], parent.block if parent else None)
            if len(copies) >= self.capacity_blocks and not self._evict():
                if not block.tiers:
                    memory.forget(block)
                return at
            block.tiers += 1
            copy = copies[block.id] = _Copy(block)
            self._queue.arrive(copy, memory.tick, block.hits)
            self.stored_blocks += 1
            if parent is not None:
                parent.children += 1
            parent = copy
        return len(blocks)

    def accessed(self, blocks: Sequence[int]) -> None:
        """A lookup found, or a save brought, these blocks: for policies that want to know."""
        if self.policy.watched and blocks:
            known = self.memory.blocks
            self._queue.accesses.add([known[block].fingerprint for block in blocks])

    def _facts(self, copy: _Copy) -> PageFacts:
        block = copy.block
        hint = block.hint
        return PageFacts(
            self._block_bytes,
            block.depth,
            block.last_use,
            block.hits,
            copy.arrived,
            hint.reuse,
            hint.priority,
            copy.segment,
            copy.spent,
        )

    def _evict(self) -> bool:
        copy = self._queue.victim(self.memory.tick)
        if copy is None:
            return False
        block = copy.block
        self._queue.leave(copy)
        del self._copies[block.id]
        self.evicted_blocks += 1
        block.tiers -= 1
        if not block.tiers:
            self.memory.forget(block)
        if block.parent is not None:
            above = self._copies[block.parent.id]
            above.children -= 1
            if not above.queued and _may_leave(above):
                self._queue.offer(above)
        return True


def _may_leave(copy: _Copy) -> bool:
    return not copy.held and not copy.children
