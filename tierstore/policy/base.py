"""What a policy is told, and what it answers."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Number: TypeAlias = "int | float | npt.NDArray[Any]"

_HINT_STEP = 2.0**40  # more than any score without hints
_PRIORITIES = 256


class Reuse(enum.IntEnum):
    """What an engine has said of a page's future."""

    DONE = -2  # it is not going to be asked for again, or its time to live is over
    UNLIKELY = -1
    UNKNOWN = 0
    LIKELY = 1


class PageHint(NamedTuple):
    """A hint as the index keeps it for a page. All three say nothing by default.

    ``reuse`` is a :class:`Reuse`; ``priority`` any small integer, higher stays longer; at ``expires_s`` (on
    the store's clock) the page becomes :attr:`Reuse.DONE`."""

    reuse: int = Reuse.UNKNOWN
    priority: int = 0
    expires_s: float = math.inf


NO_HINT = PageHint()


class PageFacts(NamedTuple):
    """What a policy knows of a page, or of many: then each field is an array, all of one length, or one
    number for all. (A disk holds millions of pages, which are scored in one stroke.)

    Ticks are of the store's logical clock: one per lookup and one per save."""

    nbytes: Number
    depth: Number  # pages before it in its prompt
    last_use: Number  # tick of the last lookup or save it was part of
    hits: Number  # times it was asked for after the first, as far as that is remembered
    reuse: Number = Reuse.UNKNOWN  # see Reuse
    priority: Number = 0


class Policy(ABC):
    """Orders the pages of one tier for eviction. Holds no page, reads no clock, does no I/O.

    A policy is a formula::

        class LeastRecentlyUsed(Policy):
            name = "lru"

            def score(self, facts: PageFacts) -> Number:
                return facts.last_use
    """

    name: str
    revision: int = 0
    """Grows when scores have fallen that no use or hint has changed."""

    @abstractmethod
    def score(self, facts: PageFacts) -> Number:
        """Return the worth of keeping a page (of each page): the lowest leaves first, among equals the one
        deepest in its prompt. It may only grow with use."""

    def leaves(self, facts: PageFacts, score: float, tick: int) -> None:  # noqa: B027  # few care
        """Take note that a page with this score leaves at ``tick`` to make room."""


def hint_score(facts: PageFacts) -> Number:
    """Return what a hint adds to a page's score: its reuse decides, then its priority, then the score that
    this is added to."""
    if isinstance(facts.reuse, int) and not facts.reuse and not facts.priority:
        return 0.0  # nothing is known of nearly all pages
    return (np.multiply(facts.reuse, float(_PRIORITIES)) + facts.priority) * _HINT_STEP
