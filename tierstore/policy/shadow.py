"""A small cache that holds nothing: what a policy would have found."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.policy.base import PageFacts, Policy
from tierstore.policy.departed import Departed
from tierstore.policy.queue import Queue, Standing


class _Shadow(Standing, gc=False, eq=False):
    page: int
    hits: int
    depth: int
    last_use: int


class ShadowCache:
    """The pages that a tier under ``policy`` would hold, of a sample of all pages.

    Closure over prefixes needs no care here if the policy's worth is never larger for a page than for the one
    before it in a prompt, which is so for scores that only grow with ``last_use`` and ``hits``.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pages: dict[int, _Shadow] = {}
        self._departed = Departed()
        self._queue = Queue(policy, _facts, _may_leave)
        self._tick = 0

    def __len__(self) -> int:
        return len(self._pages)

    def access(self, pages: Sequence[int], capacity: float) -> list[bool]:
        """One access to these pages (fingerprints, in order of the prompt), with room for ``capacity`` pages
        afterwards. Returns which of them were there."""
        self._tick += 1
        found = [self._touch(page, depth) for depth, page in enumerate(pages)]
        while len(self._pages) > max(capacity, 1):
            victim = self._queue.victim(self._tick)
            assert victim is not None, "a shadow holds pages that are not in line"
            self._forget(victim)
        return found

    def keep_below(self, limit: int) -> None:
        """The sample has become smaller: only pages with a fingerprint below ``limit`` are in it."""
        for page in [page for page in self._pages if page >= limit]:
            self._queue.leave(self._pages.pop(page))

    def _touch(self, page: int, depth: int) -> bool:
        known = self._pages.get(page)
        if known is not None:
            known.hits += 1
            known.last_use = self._tick
            known.depth = depth
            return True
        hits = self._departed.recall(page)
        known = self._pages[page] = _Shadow(page, 0 if hits is None else hits + 1, depth, self._tick)
        self._departed.make_room(len(self._pages))
        self._queue.arrive(known, self._tick, known.hits)
        self._queue.offer(known)
        return False

    def _forget(self, shadow: _Shadow) -> None:
        self._queue.leave(shadow)
        del self._pages[shadow.page]
        self._departed.remember(shadow.page, shadow.hits)


def _facts(shadow: _Shadow) -> PageFacts:
    return PageFacts(
        1,
        shadow.depth,
        shadow.last_use,
        shadow.hits,
        shadow.arrived,
        segment=shadow.segment,
        spent=shadow.spent,
    )


def _may_leave(shadow: _Shadow) -> bool:
    return True
