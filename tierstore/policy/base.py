"""What a policy is told, and what it answers."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

Number: TypeAlias = "int | float | npt.NDArray[Any]"


class Reuse(enum.IntEnum):
    """What somebody who may know has said of a page's future."""

    DONE = -2  # nobody is going to ask for it again, or its time to live is over
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
    """What a policy may know of a page, or of many: then each field is an array, all of one length, or one
    number for all. (A disk holds millions of pages, which are scored in one stroke.)

    Ticks are of the store's logical clock: one per lookup and one per save."""

    nbytes: Number
    depth: Number  # pages before it in its prompt
    last_use: Number  # tick of the last lookup or save it was part of
    hits: Number  # times it was asked for after the first, as far as that is remembered
    arrived: Number = 0  # tick at which it came into this tier, or was spared
    reuse: Number = Reuse.UNKNOWN  # see Reuse
    priority: Number = 0
    segment: Number = 0  # the line it stands in, for policies with more than one
    spent: Number = 0  # of its hits, those before it came into this tier, or was spared


class Policy(ABC):
    """Orders the pages of one tier for eviction and may refuse newcomers."""

    name: str
    segments: int = 1  # lines that pages stand in; facts of a page in line 1 have segment = 1
    spared_go_last: bool = False  # whether a page that is spared goes to the end of its line
    switches: int = 0  # how often it has changed its mind, so that pages may be worth less than they were
    watched: int = 0  # pages with a fingerprint below this (MOST_WATCHED at most) are reported to accessed()

    def admit(self, facts: PageFacts) -> bool:
        """Whether a page is worth a place in this tier at all."""
        return True

    @abstractmethod
    def score(self, facts: PageFacts) -> Number:
        """The worth of keeping a page (of each page): the lowest leaves first. It may only grow with use."""

    def rank(self, facts: PageFacts) -> Number:
        """The same where nobody stands in line: all pages of a disk at once, in arrays of one length.
        ``arrived``
        is then just some number that ascends in order of arrival, ``spent`` is 0, and a page is in segment 1
        if it has any hits."""
        return self.score(facts)

    # -- lines (memory tiers) ------------------------------------------------------------------------

    def segment(self, facts: PageFacts) -> int:
        """The line for a page that comes into the tier."""
        return 0

    def turn(self, sizes: Sequence[int]) -> int:
        """The line whose first page leaves next; ``sizes`` are all pages of the tier, by line. Where nobody
        in
        that line may leave, the other gives."""
        return 0

    def spare(self, facts: PageFacts) -> tuple[int, int] | None:
        """Whether the first in line is let go round once more: its new segment, and how many of its hits are
        spent on that. None lets it leave."""
        return None

    # -- what happens --------------------------------------------------------------------------------

    def leaves(self, facts: PageFacts, score: float, tick: int) -> None:  # noqa: B027  # few care
        """A page with this score leaves to make room."""

    def accessed(self, pages: Sequence[int], capacity: int) -> None:  # noqa: B027
        """One lookup found, or one save brought, these pages, of those that are :attr:`watched`:
        fingerprints,
        in the order of the prompt. The tier holds ``capacity`` pages."""
