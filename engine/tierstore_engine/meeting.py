"""A sequence from both ends: the engine computes the front of a hit while its later pages are loaded.

KV of later tokens does not depend on whether earlier KV was computed or loaded; attention of the chunk that
is computed needs all that is before it, and nothing behind. So blocks of a hit are loaded from its end
towards its front, chunk after chunk is computed towards its end, and where they meet the sequence has all of
it.

::

    pages  [ HBM ][ computed ──▶        ◀── block │ block │ block )[ computed afterwards ]
           0      │          front          back                 end

A block ends where a prefill chunk does, so the shapes that are computed are those of every other plan. Each
step the planner says anew where both will meet, by what was measured until then: an estimate that was wrong
costs a block, not a request."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from tierstore.planner import Plan
from tierstore.transfer import Transfer
from tierstore.types import Loaded
from tierstore_connectors.base import Connector, ConnectorHit
from tierstore_engine.tables import GroupTable

_BLOCKS = 2  # on their way at a time, to begin with: one is read while the other is copied
_MOST_BLOCKS = 64


@dataclass(slots=True)
class _Block:
    """Pages ``first … stop`` on their way."""

    first: int
    stop: int
    transfer: Transfer[Loaded]


class Meeting:
    """Loads a hit from its back, into a sequence's full table, all of whose pages it owns. Belongs to the
    engine's thread.

    The table's list of pages is replaced, never changed in place, as blocks come. Pages that are on their way
    belong to their load: the table has page 0 there, which nothing computes with, and *expects* them.
    """

    def __init__(
        self, connector: Connector, hit: ConnectorHit, plan: Plan, table: GroupTable, *, chunk: int
    ) -> None:
        """``chunk`` is the tokens of a prefill chunk, whose ends are the blocks' ends."""
        self._connector = connector
        self._hit = hit
        self._page_tokens = connector.pool.spec.chunk_tokens
        self._block = chunk // self._page_tokens
        self.tokens = plan.tokens
        self.end = -(-plan.tokens // self._page_tokens)
        self.back = self.end  # all pages from here on have come
        self._table = table
        self.loaded_bytes = 0
        self.by_tier: dict[str, int] = {}  # of the hit, where it counts for the request's metrics
        self.began = time.monotonic()
        self._ends = self.began + (plan.deadline_s or 0.0)
        self._on_their_way: deque[_Block] = deque()
        self._at_once = _BLOCKS
        self._asked = self.end  # all from here on have been asked for
        self._over = False  # no more is loaded

    @property
    def transfer(self) -> Transfer[Loaded] | None:
        """What to wait for; None when nothing is on its way."""
        return self._on_their_way[0].transfer if self._on_their_way else None

    @property
    def lacking(self) -> int:
        """Return how many pages the loads under way may still take from the pool."""
        return sum(block.stop - block.first for block in self._on_their_way if not block.transfer.done)

    def poll(self, front: int) -> bool:
        """Take over what has come, and ask for more, in view of ``front`` tokens that are computed. False
        when pages that did not come cannot be had for computing."""
        dry = self._on_their_way and self._on_their_way[-1].transfer.done
        if dry:  # a step takes longer than these did: more of them fit beside the next
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
        """Whether the chunk ``front … stop`` is to be computed now; else it is waited for."""
        if self._over:
            return True
        if self._asked < self.end and stop > self._asked * self._page_tokens:
            return False  # its pages are on their way
        return self._meeting_point(front) >= (front + min(stop, self.tokens)) // 2

    def met(self, front: int) -> bool:
        """Whether all is there."""
        return front >= self.back * self._page_tokens

    def stop(self) -> bool:
        """Load no more. False when pages that did not come cannot be had."""
        self._over = True
        for block in self._on_their_way:
            block.transfer.cancel()
        had = True
        while self._on_their_way:
            had = self._take(self._on_their_way.popleft()) and had
        self._hit.release()
        return had

    def _meeting_point(self, front: int) -> int:
        """Where computing and loading would meet, by the latest figures."""
        return self._connector.meeting_point(
            self._hit, front, min(self.back * self._page_tokens, self.tokens)
        )

    def _ask(self, first: int) -> None:
        stop, self._asked = self._asked, first
        self._connector.release(self._table.pages[first:stop])  # the load takes its own, at once
        self._table.expected += stop - first
        self._put(first, [0] * (stop - first))
        transfer = self._connector.load_part(self._hit, first, stop, deadline_s=None)
        self._on_their_way.append(_Block(first, stop, transfer))

    def _take(self, block: _Block) -> bool:
        loaded = block.transfer.wait()
        count = block.stop - block.first
        self._table.expected -= count
        if len(loaded.pages) == count and block.stop == self.back:
            self._put(block.first, list(loaded.pages))
            self.loaded_bytes += loaded.moved_bytes
            self.back = block.first
            return True
        # It did not come, or one behind it did not: its pages are computed.
        self._over = True
        self._connector.release(loaded.pages)
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
