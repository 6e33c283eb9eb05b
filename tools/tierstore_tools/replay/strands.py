"""A tier whose blocks are taken together where they are alike: a replay in a part of the time.

Block by block, most of a replay goes by in making, linking and dropping objects. But the blocks of one step
of a save came at the same moment and were last used at the same moment. A **strand** is some blocks of one
prompt, one behind the other, of which a policy knows the same but for their depth. A lookup that ends inside
a strand parts it, and so does a hint that is about some of it. Only the last block of one can be in line for
leaving.

The policy is asked about single blocks all the same: in the same order and with the same facts as block by
block (``cache.py``) and in the live store. So hits are the same to the last one.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from tierstore.policy import NO_HINT, PageHint, Policy, Reuse
from tierstore.policy.departed import Departed, fingerprint
from tierstore.policy.hinted import reconciled
from tierstore_tools.replay.strand import Line, Strand, may_leave


class Strands:
    """One tier with room for ``capacity_blocks``. What it holds is closed over prefixes. Blocks of a trace
    have one predecessor each (``trace.py``)."""

    def __init__(self, policy: Policy, capacity_blocks: int, *, block_bytes: int = 1) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.evicted_blocks = 0
        self._tick = 0
        self._blocks = 0
        self._most_blocks = 0
        self._heads: dict[int, Strand] = {}  # by the first block
        self._departed = Departed()
        self._line = Line(policy, block_bytes, self._part_last)
        self._expiring: list[tuple[float, int, Strand, PageHint]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return self._blocks

    def held(self, blocks: Sequence[int]) -> int:
        """How many leading blocks are here."""
        at = 0
        while at < len(blocks) and (strand := self._heads.get(blocks[at])) is not None:
            alike = strand.alike(blocks, at)
            at += alike
            if alike < len(strand.ids):
                break
        return at

    # -- one request ---------------------------------------------------------------------------------

    def take(self, blocks: list[int]) -> list[Strand]:
        """A lookup: the leading blocks that are here are used, and held until :meth:`release`."""
        path: list[Strand] = []
        at = 0
        while at < len(blocks) and (strand := self._heads.get(blocks[at])) is not None:
            alike = strand.alike(blocks, at)
            at += alike
            if alike < len(strand.ids):
                path.append(self._part(strand, alike))
                break
            path.append(strand)
        self._tick += 1
        for strand in path:
            strand.last_use = self._tick
            strand.hits += 1
            strand.hint = NO_HINT  # it was about this use
            strand.held = True
        self._tell_of(path)
        return path

    def save(self, blocks: list[int], path: list[Strand]) -> int:
        """One step of a save behind ``path``, whose strands are held: as many of the blocks as there is room
        for, which are held then and go on the path. Returns how many."""
        came = len(path)
        kept = self._take_in(blocks, path)
        self._tick += 1
        for strand in path[came:]:
            strand.last_use = self._tick
        self._tell_of(path[came:])
        return kept

    def hint(self, path: Sequence[Strand], hints: Sequence[PageHint]) -> list[Strand]:
        """Each of the hints is about the next use of its block of the path; where they contradict each other,
        the fewest count as wrong. Returns the path, of which strands may have been parted."""
        hints = hints[: path[-1].end if path else 0]
        reuse = [hint.reuse for hint in hints]
        if len(set(reuse)) > 1:
            hints = [hint._replace(reuse=each) for hint, each in zip(hints, reconciled(reuse), strict=True)]
        hinted: list[Strand] = []
        for strand in path:
            start = strand.end - len(strand.ids)
            for hint, alike in itertools.groupby(hints[start : strand.end]):
                count = sum(1 for _ in alike)
                part = strand if count == len(strand.ids) else self._part(strand, count)
                self._hint(part, hint)
                hinted.append(part)
        self._worth_less(hinted)
        return hinted

    def release(self, path: Sequence[Strand]) -> None:
        """The running request is done with these."""
        for strand in path:
            strand.held = False
            if not strand.queued and not strand.children:
                self._line.offer(strand)

    def expire_hints(self, now_s: float) -> None:
        """Blocks whose time to live is over are as good as done."""
        over = []
        while self._expiring and self._expiring[0][0] <= now_s:
            _, _, strand, hint = heapq.heappop(self._expiring)
            if strand.ids and strand.hint is hint:
                strand.hint = PageHint(Reuse.DONE, hint.priority)
                over.append(strand)
        self._worth_less(over)

    # -- inside --------------------------------------------------------------------------------------

    def _tell_of(self, path: Sequence[Strand]) -> None:
        """A lookup found, or a save brought, these: for policies that want to know."""
        if self.policy.watched and path:
            self._line.accesses.add(itertools.chain.from_iterable([strand.prints for strand in path]))

    def _take_in(self, blocks: list[int], path: list[Strand]) -> int:
        departed, line, tick = self._departed, self._line, self._tick
        before = self._blocks
        leaving = self._leaving(before + len(blocks) - self.capacity_blocks)
        growing: Strand | None = None
        for at, block in enumerate(blocks):
            page = fingerprint(block)
            known = departed.recall(page)
            hits = 0 if known is None else known + 1
            if before >= self._most_blocks:
                self._most_blocks = before + 1
                departed.make_room(self._most_blocks)
            self._blocks += 1
            if before < self.capacity_blocks:
                before += 1
            elif (left := next(leaving, None)) is not None:
                departed.remember(*left)
            else:
                departed.remember(page, hits)
                self._blocks -= 1
                return at
            if growing is not None and growing.hits == hits and line.is_one:
                line.grow(growing)
            else:
                strand = Strand.behind(path[-1] if path else None, [block], [page], hits, tick)
                line.arrive(strand, tick, hits)
                if growing is None or growing.hits != hits or growing.segment != strand.segment:
                    growing = strand
                    self._begin(strand)
                    path.append(strand)
                    continue
            growing.ids.append(block)
            growing.prints.append(page)
            growing.end += 1
        return len(blocks)

    def _leaving(self, count: int) -> Iterator[tuple[int, int]]:
        """Fingerprints and hits of ``count`` blocks that leave, or of all that may. Where there is one line,
        what comes meanwhile makes no difference to who leaves."""
        if self._line.is_one:
            return iter(self._leave(count) if count > 0 else ())
        return (left for _ in range(count) for left in self._leave(1))

    def _leave(self, count: int) -> list[tuple[int, int]]:
        line, tick = self._line, self._tick
        left: list[tuple[int, int]] = []
        strand = line.victim(tick)
        while strand is not None:
            left.append((strand.prints.pop(), strand.hits))
            block = strand.ids.pop()
            strand.end -= 1
            line.leave(strand)
            goes_on = False
            if strand.ids:
                if len(left) < count:
                    goes_on = line.offer_rest(strand, tick)
                else:
                    line.offer(strand)
            else:
                self._end(strand, block)
            if len(left) == count:
                break
            if not goes_on:
                strand = line.victim(tick)
        self._blocks -= len(left)
        self.evicted_blocks += len(left)
        return left

    def _begin(self, strand: Strand) -> None:
        self._heads[strand.ids[0]] = strand
        if strand.above is not None:
            strand.above.children += 1

    def _end(self, strand: Strand, first: int) -> None:
        """Its first block has left, and with it the strand."""
        del self._heads[first]
        above = strand.above
        if above is not None:
            above.children -= 1
            if not above.queued and may_leave(above):
                self._line.offer(above)

    def _part(self, strand: Strand, count: int) -> Strand:
        """The first ``count`` blocks of a strand become one of their own. It stays what it is to those who
        know it by its last block."""
        front = Strand.behind(
            strand.above, strand.ids[:count], strand.prints[:count], strand.hits, strand.last_use
        )
        del strand.ids[:count], strand.prints[:count]
        front.arrived, front.segment, front.spent = strand.arrived, strand.segment, strand.spent
        front.held = strand.held
        front.children = 1
        strand.above = front
        self._heads[front.ids[0]], self._heads[strand.ids[0]] = front, strand
        self._hint(front, strand.hint)
        return front

    def _part_last(self, strand: Strand) -> None:
        """The last block of a strand stands in line for itself from now on."""
        if len(strand.ids) > 1:
            self._part(strand, len(strand.ids) - 1)

    def _hint(self, strand: Strand, hint: PageHint) -> None:
        strand.hint = hint
        if hint.expires_s < math.inf:
            heapq.heappush(self._expiring, (hint.expires_s, next(self._order), strand, hint))

    def _worth_less(self, strands: Sequence[Strand]) -> None:
        """These may be worth less than they were when they were last offered."""
        for strand in strands:
            strand.queued = False
            if may_leave(strand):
                self._line.offer(strand)

    def check(self) -> None:
        """Assert that what is known twice agrees."""
        children: dict[int, int] = {}
        for first, strand in self._heads.items():
            assert strand.ids[0] == first, "a strand is known by another block"
            assert len(strand.ids) == len(strand.prints), "blocks without fingerprints"
            above = strand.above
            assert strand.end - len(strand.ids) == (above.end if above is not None else 0), "not closed"
            if above is not None:
                assert self._heads.get(above.ids[0]) is above, "what is above has left"
                children[id(above)] = children.get(id(above), 0) + 1
        for strand in self._heads.values():
            assert strand.children == children.get(id(strand), 0), "children are counted wrong"
        assert sum(len(strand.ids) for strand in self._heads.values()) == self._blocks == len(self._line)
        assert self._blocks <= self.capacity_blocks, "too much"
