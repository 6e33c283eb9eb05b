"""Putting pages in order of leaving. Pure arithmetic over columns of facts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.policy import PageFacts, Policy
from tierstore.tiers.slabs import slot_bytes

_SAMPLE = 1 << 15  # pages are enough to know a share to a hundredth of it
_INLINE_CLASS = 0
_NEAR_SHARE = 1 / 32  # of all bytes: pages among these are as good as the very worst
_NEAR_STEPS = 8  # which share that is is looked at again when an eighth of it has left


class Entry(NamedTuple):
    """A page as it was when it was put in order. One that has been used since has another tick."""

    score: float
    serial: int
    tick: int
    latest: int = 0  # tick of the page that had been used last of all


class Facts(NamedTuple):
    """What the order is made of, one array each."""

    serial: npt.NDArray[np.integer[Any]]
    place: npt.NDArray[np.integer[Any]]
    nbytes: npt.NDArray[np.integer[Any]]
    depth: npt.NDArray[np.integer[Any]]
    tick: npt.NDArray[np.integer[Any]]
    hits: npt.NDArray[np.integer[Any]]
    reuse: npt.NDArray[np.integer[Any]]
    priority: npt.NDArray[np.integer[Any]]

    def scores(self, policy: Policy) -> npt.NDArray[np.float64]:
        facts = PageFacts(
            self.nbytes,
            self.depth,
            self.tick,
            self.hits,
            arrived=self.serial,  # not a tick, but in the same order
            reuse=self.reuse,
            priority=self.priority,
            segment=(self.hits > 0).astype(np.int8),
        )
        return np.broadcast_to(np.asarray(policy.rank(facts), np.float64), self.serial.shape)

    def take(self, rows: npt.NDArray[np.intp]) -> Facts:
        return Facts(*(column[rows] for column in self))


class Order:
    """Pages in the order in which they should leave. None leaves before those below it, and what comes last
    in a prompt was mostly written last: so most of the worst pages have to wait for some that are better."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = deque(entries)
        self._held_up: dict[int, Entry] = {}  # by serial

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def first(self) -> Entry:
        return self._entries[0]

    def take(self) -> None:
        """The first one is being dealt with."""
        self._entries.popleft()

    def hold_up(self, entry: Entry) -> None:
        """There are pages below it."""
        self._held_up[entry.serial] = entry

    def let_go(self, serial: int) -> None:
        """There are none any more: if it was held up it is the first one now."""
        entry = self._held_up.pop(serial, None)
        if entry is not None:
            self._entries.appendleft(entry)


def size_class(place: int, nbytes: int) -> int:
    """What pages have in common that can use each other's room: slot bytes, or being in the index."""
    return _INLINE_CLASS if place < 0 else slot_bytes(nbytes)


def size_classes(facts: Facts) -> npt.NDArray[np.integer[Any]]:
    """:func:`size_class` of each page."""
    unit = slot_bytes(1)
    return np.where(facts.place < 0, _INLINE_CLASS, np.maximum(-(-facts.nbytes // unit), 1) * unit)


def commonest_class(facts: Facts) -> int | None:
    """The size class with the most pages; None when there are none at all."""
    classes, pages = np.unique(size_classes(facts), return_counts=True)
    return int(classes[np.argmax(pages)]) if len(classes) else None


def worst_first(facts: Facts, policy: Policy, count: int) -> list[Entry]:
    """At least ``count`` of the pages (or all), worst first by ``policy``; among equals the deepest first."""
    scores = facts.scores(policy)
    latest = int(facts.tick.max(initial=0))
    if count < len(scores):
        chosen = np.flatnonzero(scores <= np.partition(scores, count)[count])
        facts, scores = facts.take(chosen), scores[chosen]
    order = np.lexsort((-facts.depth, scores))
    columns = (scores[order].tolist(), facts.serial[order].tolist(), facts.tick[order].tolist())
    return [Entry(*entry, latest) for entry in zip(*columns, strict=True)]


def worst_share(facts: Facts, policy: Policy, share: float) -> float:
    """The score up to which the worst pages go that together have this share of all bytes. Of many pages it
    looks at some."""
    step = -(-len(facts.serial) // _SAMPLE) or 1
    some = facts.take(np.arange(0, len(facts.serial), step))
    scores = some.scores(policy)
    if not len(scores):
        return -np.inf
    order = np.argsort(scores, kind="stable")
    within = np.cumsum(some.nbytes[order])
    return float(scores[order][np.searchsorted(within, share * within[-1])])


class NearWorst:
    """Up to which score pages are nearly as bad as the worst: remembered until that has changed."""

    def __init__(self) -> None:
        self._score = -np.inf
        self._bytes = 0  # to leave until it has to be looked at again

    def left(self, nbytes: int) -> None:
        """So much has left."""
        self._bytes -= nbytes

    def score(self, policy: Policy, facts: Callable[[], Facts]) -> float:
        if self._bytes <= 0:
            all_facts = facts()
            self._score = worst_share(all_facts, policy, _NEAR_SHARE)
            self._bytes = int(all_facts.nbytes.sum() * _NEAR_SHARE / _NEAR_STEPS)
        return self._score
