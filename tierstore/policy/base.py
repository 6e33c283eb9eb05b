"""The inputs and outputs of a policy."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Number: TypeAlias = "int | float | npt.NDArray[Any]"

_HINT_STEP = 2.0**40  # greater than any score without hints
_PRIORITIES = 256


class Reuse(enum.IntEnum):
    """An engine's hint about a page's future."""

    DONE = -2  # will not be used again, or its time to live is over
    UNLIKELY = -1
    UNKNOWN = 0
    LIKELY = 1


EXPIRED = -math.inf
"""``PageHint.expires_s`` after the time to live has ended."""


class PageHint(NamedTuple):
    """A hint as the index stores it for a page. The defaults mean that nothing is known.

    ``reuse`` is a :class:`Reuse`. ``priority`` is any small integer; pages with a higher one stay longer. At
    ``expires_s`` (on the store's clock) the page becomes :attr:`Reuse.DONE`, and ``expires_s`` becomes
    :data:`EXPIRED`.
    """

    reuse: int = Reuse.UNKNOWN
    priority: int = 0
    expires_s: float = math.inf


NO_HINT = PageHint()


class PageFacts(NamedTuple):
    """The facts about one page, or about many pages: then each field is an array, all of one length, or one
    number for all pages. (A disk has millions of pages, which are scored at once.)

    Ticks are those of the store's logical clock: one per lookup and one per save.
    """

    nbytes: Number
    depth: Number  # number of pages before this page in its prompt
    last_use: Number  # tick of the last lookup or save that used it
    hits: Number  # number of requests for the page after the first, as far as remembered
    reuse: Number = Reuse.UNKNOWN  # see Reuse
    priority: Number = 0
    worth: Number = 0  # see LayerGroup.worth


class Policy(ABC):
    """Orders the pages of one tier for eviction. A policy holds no pages, reads no clock and does no I/O. It
    is a formula::

        class LeastRecentlyUsed(Policy):
            name = "lru"

            def score(self, facts: PageFacts) -> Number:
                return facts.last_use
    """

    name: str
    revision: int = 0
    """A counter that increases when scores have fallen for a reason other than a use or a hint."""

    @abstractmethod
    def score(self, facts: PageFacts) -> Number:
        """Return the value of keeping a page, or an array of values. The page with the lowest value leaves
        first; among equal values, the deepest in its prompt. A use of a page must not lower its value."""

    def leaves(self, facts: PageFacts, score: float, tick: int) -> None:  # noqa: B027  # few policies need it
        """Update the policy: a page with this score leaves at ``tick`` to make room."""


def hint_score(facts: PageFacts) -> Number:
    """Return the part of a page's score that its hint adds. A hint outweighs all other facts, and in a hint,
    the reuse outweighs the priority."""
    if isinstance(facts.reuse, int) and not facts.reuse and not facts.priority:
        return 0.0  # nearly all pages have no hint
    return (np.multiply(facts.reuse, float(_PRIORITIES)) + facts.priority) * _HINT_STEP
