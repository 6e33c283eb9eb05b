"""Compute a sequence's front while the later pages of its hit are loaded.

KV of later tokens does not depend on whether earlier KV was computed or loaded. Attention of a computed chunk
needs everything before it, and nothing after it. Blocks of a hit are therefore loaded from its end towards
its front, while chunks are computed from its front towards its end. When loading and computing meet, the
sequence has the whole hit.

::

    pages  [ HBM ][ computed ──▶        ◀── block │ block │ block )[ computed afterwards ]
           0      │          front          back                 end

A block ends where a prefill chunk ends, so chunks have the same shapes as without this method. In each step,
the planner estimates from the latest measurements where loading and computing will meet. A wrong estimate
therefore costs the time of a block at most.

**Layer groups.** Blocks are pages of the first group, which needs every token. The other groups need pages at
the hit's end only (a window, a state); the first block loads them. Until then, the front is computed with its
own windows and states, from token 0 on. Afterwards the pages for the hit's end replace these.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from tierstore.planner import Plan
from tierstore.transfer import Transfer
from tierstore.types import GroupPages, Loaded
from tierstore_connectors.base import Connector, ConnectorHit
from tierstore_engine.tables import GroupTable

_BLOCKS = 2  # the number of loads at the beginning: one block is read while the other is copied
_MOST_BLOCKS = 64


@dataclass(slots=True)
class _Block:
    """A running load of the pages ``first … stop``."""

    first: int
    stop: int
    transfer: Transfer[Loaded]


class Meeting:
    """Load a hit from its back into a sequence's full table, all of whose pages the table owns, and hold the
    pages that other groups need at its end. Belongs to the engine's thread.

    The table's list of pages is replaced, never changed in place, as blocks arrive. Pages that are being
    loaded belong to their load. Meanwhile the table has page 0 in their places, which no computation reads,
    and counts them as *expected*.
    """

    def __init__(
        self, connector: Connector, hit: ConnectorHit, plan: Plan, table: GroupTable, *, chunk: int
    ) -> None:
        """``chunk`` is the number of tokens of a prefill chunk. Blocks end where chunks end."""
        self._connector = connector
        self._hit = hit
        self._page_tokens = connector.pool.spec.chunk_tokens
        self._block = chunk // self._page_tokens
        self.tokens = plan.tokens
        self.end = -(-plan.tokens // self._page_tokens)
        self.back = self.end  # all pages from this one on have arrived
        self._table = table
        self._named: tuple[GroupPages, ...] = ()  # empty before the first block has arrived
        self.loaded_bytes = 0
        self.by_tier: dict[str, int] = {}  # the hit's tokens, counted in the request's metrics
        self.began = time.monotonic()
        self._ends = self.began + (plan.deadline_s or 0.0)
        self._on_their_way: deque[_Block] = deque()
        self._at_once = _BLOCKS
        self._asked = self.end  # all pages from this one on have been requested
        self._over = False  # whether loading has stopped

    @property
    def transfer(self) -> Transfer[Loaded] | None:
        """Return the transfer to wait for; None if none is in flight."""
        return self._on_their_way[0].transfer if self._on_their_way else None

    @property
    def lacking(self) -> int:
        """Return how many pages the loads in flight may still take from the pool."""
        return sum(block.stop - block.first for block in self._on_their_way if not block.transfer.done)

    def poll(self, front: int) -> bool:
        """Take over the blocks that have arrived, and request more blocks, given that ``front`` tokens are
        computed. Return False if there are no pages to compute a block that did not arrive."""
        dry = self._on_their_way and self._on_their_way[-1].transfer.done
        if dry:  # the step took longer than these loads, so more loads fit beside the next step
            self._at_once = min(2 * self._at_once, _MOST_BLOCKS)
        while self._on_their_way and self._on_their_way[0].transfer.done:
            if not self._take(self._on_their_way.popleft()):
                return False
            if self._over:
                return self.stop()
        if time.monotonic() >= self._ends and front < self.back * self._page_tokens:
            return self.stop()
        while not self._over and len(self._on_their_way) < self._at_once:
            first = max((self._asked - 1) // self._block * self._block, -(-front // self._page_tokens))
            if first >= self._asked or self._meeting_point(front) >= self._asked * self._page_tokens:
                break
            self._ask(first)
        return True

    def may_compute(self, front: int, stop: int) -> bool:
        """Return whether the chunk ``front … stop`` should be computed now instead of waiting for its
        pages."""
        if self._over:
            return True
        if self._asked < self.end and stop > self._asked * self._page_tokens:
            return False  # the pages of the chunk are being loaded
        return self._meeting_point(front) >= (front + min(stop, self.tokens)) // 2

    def met(self, front: int) -> bool:
        """Return whether all pages of the hit are loaded or computed."""
        return front >= self.back * self._page_tokens

    def stop(self) -> bool:
        """Stop loading. Return False if there are no pages to compute a block that did not arrive."""
        self._over = True
        for block in self._on_their_way:
            block.transfer.cancel()
        had = True
        while self._on_their_way:
            had = self._take(self._on_their_way.popleft()) and had
        self._hit.release()
        return had

    def take_named(self) -> tuple[GroupPages, ...]:
        """Return the pages that the other groups need at the hit's end, in the order of the groups, and give
        up their ownership. The caller releases them. Return nothing if no block was loaded, and after the
        first call."""
        named, self._named = self._named, ()
        return named

    def _meeting_point(self, front: int) -> int:
        """Return where computing and loading would meet, by the latest measurements."""
        return self._connector.meeting_point(
            self._hit, front, min(self.back * self._page_tokens, self.tokens)
        )

    def _ask(self, first: int) -> None:
        stop, self._asked = self._asked, first
        # the load takes pages of its own, all at the same time
        self._connector.release(self._table.pages[first:stop])
        self._table.expected += stop - first
        self._put(first, [0] * (stop - first))
        transfer = self._connector.load_part(self._hit, first, stop, deadline_s=None)
        self._on_their_way.append(_Block(first, stop, transfer))

    def _take(self, block: _Block) -> bool:
        loaded = block.transfer.wait()
        count = block.stop - block.first
        self._table.expected -= count
        if len(loaded.pages) == count and block.stop == self.back:
            if block.stop == self.end:
                self._named = loaded.groups[1:]
            self._put(block.first, list(loaded.pages))
            self.loaded_bytes += loaded.moved_bytes
            self.back = block.first
            return True
        # This block, or one after it, did not arrive, so its pages will be computed.
        self._over = True
        self._connector.release(loaded.pages)
        for group, unused in enumerate(loaded.groups[1:], 1):
            self._connector.release(unused.pages, group=group)
        fresh = self._connector.allocate(count, near=self._table.pages)
        if fresh is None:
            self._replace(block.first, block.stop, [])
            return False
        self._put(block.first, fresh)
        return True

    def _put(self, first: int, pages: list[int]) -> None:
        self._replace(first, first + len(pages), pages)

    def _replace(self, first: int, stop: int, pages: list[int]) -> None:
        had = self._table.pages
        self._table.pages = [*had[:first], *pages, *had[stop:]]
