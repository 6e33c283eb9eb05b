"""Tiers without bytes, block by block, under the store's own policies.

One request does what an engine does with the store: a lookup (the leading blocks that are held are used and
held), then a save of all that follow, which makes room as the policy says. Blocks of the running request
cannot leave, no block leaves before those after it, and what finds no room is not stored. Requests run one
after the other.

The **hit rate** is hit blocks over all blocks of all prompts, and a partial last block counts as a whole
one, on both sides; that is how the published figures are made.
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

_SAVE_STEP = 64  # blocks; each step of a save is one tick of the store's clock


class TraceBlock:
    """A block of the trace and what is known of it while any tier holds it."""

    __slots__ = ("depth", "fingerprint", "hint", "hits", "id", "last_use", "parent", "tiers")

    def __init__(self, block: int, parent: TraceBlock | None, page: int, hits: int) -> None:
        self.id = block
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.fingerprint = page
        self.last_use = 0
        self.hits = hits
        self.hint = NO_HINT
        self.tiers = 0  # that hold it


class SimulatedMemory:
    """The blocks that some tier holds, those that left, and the logical clock. Tiers of one store share
    it."""

    def __init__(self) -> None:
        self.blocks: dict[int, TraceBlock] = {}
        self.tick = 0
        self.now_s = 0.0
        self._ghosts = GhostTable()
        self._expiring: list[tuple[float, int, int, PageHint]] = []
        self._order = itertools.count()

    def block(self, block: int, parent: TraceBlock | None) -> TraceBlock:
        """The block of this id, made if no tier holds it."""
        known = self.blocks.get(block)
        if known is None:
            page = fingerprint(block)
            hits = self._ghosts.recall(page)
            known = self.blocks[block] = TraceBlock(block, parent, page, 0 if hits is None else hits + 1)
            known.last_use = self.tick
            self._ghosts.make_room(len(self.blocks))
        return known

    def forget(self, block: TraceBlock) -> None:
        """No tier holds this block any more."""
        del self.blocks[block.id]
        self._ghosts.remember(block.fingerprint, block.hits)

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


class _Copy(Entry, eq=False):
    block: TraceBlock
    children: int = 0
    held: bool = True


class Cache:
    """One tier with room for ``capacity_blocks``. What it holds is closed over prefixes."""

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
                self._queue.score_fell(copy)
                if not copy.queued and _may_leave(copy):
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
        """Assert that what is held is closed over prefixes, counted right and queued where it may leave."""
        assert len(self._copies) <= self.capacity_blocks, "more blocks than there is room for"
        children = Counter(copy.block.parent.id for copy in self._copies.values() if copy.block.parent)
        for block, copy in self._copies.items():
            assert copy.children == children[block], f"block {block} has {children[block]} children"
            assert copy.queued or not _may_leave(copy), f"block {block} is not queued"
        assert children.keys() <= self._copies.keys(), "a block whose parent has left"


def _may_leave(copy: _Copy) -> bool:
    return not copy.held and not copy.children


def reconciled(reuse: Sequence[int]) -> list[int]:
    """Free what was said of the pages of one prompt, each on its own, of contradictions: a page that is used
    again brings the use of all before it. So some leading pages are worth keeping and those after them are
    not: as many that fewest of what was said is wrong. (One wrong "likely" would keep all pages before
    it.)"""
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
    """What came of a replay."""

    requests: int
    blocks: int  # of all prompts together
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
        """Run a request. Returns how many of its leading blocks were held."""
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
        """Save what follows the hit, as the store does: step by step. Returns how many leading blocks are
        held now."""
        kept = hit
        while True:  # also a save of nothing is one
            first, stop = kept, min(kept + _SAVE_STEP, len(blocks))
            kept = self.tier.store(blocks[:stop], first)
            self._memory.saved(blocks[first:kept])
            if kept < stop or stop == len(blocks):
                return kept

    @property
    def result(self) -> ReplayResult:
        """Of all requests so far."""
        return ReplayResult(self._requests, self._blocks, self._hit_blocks, self.tier.evicted_blocks)


def simulate(
    requests: Iterable[TraceRequest], policy: str, capacity_blocks: int, *, hints: Hinter | None = None
) -> ReplayResult:
    """Replay all requests through one tier under the policy of this name."""
    simulator = Simulator(policy, capacity_blocks, hints=hints)
    for request in requests:
        simulator.step(request)
    return simulator.result
