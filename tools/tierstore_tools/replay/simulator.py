"""Simulate tiers without bytes, block by block, with the store's own policies.

A request does the same as an engine: a lookup of its leading blocks, then a save of all blocks behind the
hit. The save evicts blocks in the policy's order. Blocks of the running request cannot leave, and no block
leaves before the blocks behind it. A block without room is not stored. Requests run one after the other.

The **hit rate** is hit blocks over all blocks of all prompts. A partial last block counts as a whole one on
both sides, as in published figures.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierstore.policy import NO_HINT, GhostTable, PageFacts, PageHint, Reuse, fingerprint
from tierstore_tools.replay.hints import Hinter
from tierstore_tools.replay.policies import Entry, queue_of
from tierstore_tools.replay.trace import TraceRequest

_SAVE_STEP = 64  # blocks per tick of the store's clock in a save


class TraceBlock:
    """A block of the trace, and its state while any tier holds it."""

    __slots__ = ("depth", "fingerprint", "hint", "hits", "id", "last_use", "parent", "tiers")

    def __init__(self, block: int, parent: TraceBlock | None, page: int, hits: int) -> None:
        self.id = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.fingerprint = page
        self.last_use = 0
        self.hits = hits
        self.hint = NO_HINT
        self.tiers = 0  # number of tiers that hold it


class SimulatedMemory:
    """The held blocks, the ghosts of evicted ones, and the logical clock. The tiers of a store share it."""

    def __init__(self) -> None:
        self.blocks: dict[int, TraceBlock] = {}
        self.tick = 0
        self.now_s = 0.0
        self._ghosts = GhostTable()
        self._expiring: list[tuple[float, int, int, PageHint]] = []
        self._order = itertools.count()

    def block(self, block: int, parent: TraceBlock | None) -> TraceBlock:
        """Return the block of this id. It is made if no tier holds it."""
        known = self.blocks.get(block)
        if known is None:
            page = fingerprint(block)
            hits = self._ghosts.recall(page)
            known = self.blocks[block] = TraceBlock(block, parent, page, 0 if hits is None else hits + 1)
            known.last_use = self.tick
            self._ghosts.make_room(len(self.blocks))
        return known

    def forget(self, block: TraceBlock) -> None:
        """Remove a block that no tier holds any more. Keep the record of its use (its ghost)."""
        del self.blocks[block.id]
        self._ghosts.remember(block.fingerprint, block.hits)

    def use(self, blocks: Sequence[int]) -> None:
        """Register a lookup that found these blocks."""
        self.tick += 1
        for block in blocks:
            known = self.blocks[block]
            known.last_use = self.tick
            known.hits += 1
            known.hint = NO_HINT  # a hint counts for the next use only

    def saved(self, blocks: Sequence[int]) -> None:
        """Register that these blocks were saved."""
        self.tick += 1
        for block in blocks:
            self.blocks[block].last_use = self.tick

    def hint(self, blocks: Sequence[int], hints: Sequence[PageHint]) -> None:
        """Set a hint about the next use of each block. If hints contradict each other, as few as possible are
        changed."""
        hints = hints[: len(blocks)]
        reuse = [hint.reuse for hint in hints]
        if len(set(reuse)) > 1:
            hints = [hint._replace(reuse=each) for hint, each in zip(hints, reconciled(reuse), strict=True)]
        for block, hint in zip(blocks, hints, strict=True):
            self.blocks[block].hint = hint
            if hint.expires_s < math.inf:
                heapq.heappush(self._expiring, (hint.expires_s, next(self._order), block, hint))

    def expire_hints(self) -> list[int]:
        """Mark the blocks whose time to live is over as done, and return them."""
        over = []
        while self._expiring and self._expiring[0][0] <= self.now_s:
            _, _, block, hint = heapq.heappop(self._expiring)
            known = self.blocks.get(block)
            if known is not None and known.hint is hint:
                known.hint = PageHint(Reuse.DONE, hint.priority)
                over.append(block)
        return over


class _Copy(Entry, eq=False):
    block: TraceBlock
    children: int = 0
    held: bool = True


class Cache:
    """One tier with room for ``capacity_blocks``. Its blocks are closed over prefixes."""

    def __init__(
        self, policy: str, capacity_blocks: int, memory: SimulatedMemory, *, block_bytes: int = 1
    ) -> None:
        """``policy`` is one of :data:`~tierstore_tools.replay.policies.POLICY_NAMES`."""
        self.capacity_blocks = capacity_blocks
        self.memory = memory
        self.evicted_blocks = 0
        self.stored_blocks = 0
        self._block_bytes = block_bytes
        self._copies: dict[int, _Copy] = {}
        self._queue = queue_of(policy, self._facts, _may_leave)

    def __len__(self) -> int:
        return len(self._copies)

    def __contains__(self, block: int) -> bool:
        return block in self._copies

    def held(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks in this tier."""
        copies = self._copies
        for at, block in enumerate(blocks):
            if block not in copies:
                return at
        return len(blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        """Keep these blocks of the tier until :meth:`release`."""
        for block in blocks:
            self._copies[block].held = True

    def release(self, blocks: Sequence[int]) -> None:
        """Let these blocks leave: the running request does not need them any more."""
        for block in blocks:
            copy = self._copies[block]
            copy.held = False
            if not copy.queued and not copy.children:
                self._queue.offer(copy)

    def worth_less(self, blocks: Sequence[int]) -> None:
        """Register that the scores of these blocks may have fallen."""
        for block in blocks:
            copy = self._copies.get(block)
            if copy is not None:
                self._queue.score_fell(copy)
                if not copy.queued and _may_leave(copy):
                    self._queue.offer(copy)

    def store(self, blocks: Sequence[int], first: int) -> int:
        """Store and hold the blocks from ``first`` on, as far as there is room; the tier has those before.
        Return the number of leading blocks in this tier now."""
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

    def _facts(self, copy: _Copy) -> PageFacts:
        block = copy.block
        hint = block.hint
        return PageFacts(
            self._block_bytes, block.depth, block.last_use, block.hits, hint.reuse, hint.priority
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

    def check(self) -> None:
        """Assert that the blocks are closed over prefixes, counted right, and queued if they may leave."""
        assert len(self._copies) <= self.capacity_blocks, "the tier holds more blocks than its capacity"
        children = Counter(copy.block.parent.id for copy in self._copies.values() if copy.block.parent)
        for block, copy in self._copies.items():
            assert copy.children == children[block], f"block {block} has {children[block]} children"
            assert copy.queued or not _may_leave(copy), f"block {block} is not queued"
        assert children.keys() <= self._copies.keys(), "a block whose parent has left"


def _may_leave(copy: _Copy) -> bool:
    return not copy.held and not copy.children


def reconciled(reuse: Sequence[int]) -> list[int]:
    """Remove contradictions from the hints of one prompt's pages. The use of a page is a use of all pages
    before it, so the result keeps leading pages and no page behind them. Their number is the one that
    contradicts the fewest hints. (Without this, one wrong "likely" would keep all pages before its page.)"""
    ahead = most = split = 0
    for position, said in enumerate(reuse, 1):
        ahead += (said > 0) - (said < 0)
        if ahead >= most:
            most, split = ahead, position
    keep = [max(said, Reuse.UNKNOWN) for said in reuse[:split]]
    for position in range(split - 2, -1, -1):
        keep[position] = max(keep[position], keep[position + 1])
    return keep + [min(said, Reuse.UNKNOWN) for said in reuse[split:]]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The result of a replay."""

    requests: int
    blocks: int  # in all prompts together
    hit_blocks: int
    evicted_blocks: int

    @property
    def hit_rate(self) -> float:
        return self.hit_blocks / self.blocks if self.blocks else 0.0


class Simulator:
    """One tier, one policy, one request at a time."""

    def __init__(
        self, policy: str, capacity_blocks: int, *, hints: Hinter | None = None, block_bytes: int = 1
    ) -> None:
        self._memory = SimulatedMemory()
        self.tier = Cache(policy, capacity_blocks, self._memory, block_bytes=block_bytes)
        self._hints = hints
        self._requests = 0
        self._blocks = 0
        self._hit_blocks = 0

    def step(self, request: TraceRequest) -> int:
        """Run a request. Return the number of its leading blocks that were held."""
        tier, blocks = self.tier, request.blocks
        if self._hints is not None:
            self._memory.now_s = request.timestamp_s
            tier.worth_less(self._memory.expire_hints())
        hit = tier.held(blocks)
        self._memory.use(blocks[:hit])
        tier.hold(blocks[:hit])
        kept = self._save(blocks, hit)
        if self._hints is not None:
            said = self._hints.hints(self._requests, request)
            if said is not None:
                self._memory.hint(blocks[:kept], said)
                tier.worth_less(blocks[:kept])
        tier.release(blocks[:kept])
        self._requests += 1
        self._blocks += len(blocks)
        self._hit_blocks += hit
        return hit

    def _save(self, blocks: Sequence[int], hit: int) -> int:
        """Save the blocks behind the hit in steps, as the store does. Return the number of leading blocks
        that are held now."""
        kept = hit
        while True:  # a save without blocks counts as a step, too
            first, stop = kept, min(kept + _SAVE_STEP, len(blocks))
            kept = self.tier.store(blocks[:stop], first)
            self._memory.saved(blocks[first:kept])
            if kept < stop or stop == len(blocks):
                return kept

    @property
    def result(self) -> ReplayResult:
        """The result of all requests so far."""
        return ReplayResult(self._requests, self._blocks, self._hit_blocks, self.tier.evicted_blocks)


def simulate(
    requests: Iterable[TraceRequest], policy: str, capacity_blocks: int, *, hints: Hinter | None = None
) -> ReplayResult:
    """Replay all requests through one tier with the policy of this name."""
    simulator = Simulator(policy, capacity_blocks, hints=hints)
    for request in requests:
        simulator.step(request)
    return simulator.result
