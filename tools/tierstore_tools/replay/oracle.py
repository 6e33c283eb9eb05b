"""What nobody knows beforehand: the next use of every block. For Belady's ceiling, and for hints that are
right
as often as one likes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tierstore.policy import Number, PageFacts, PageHint, Policy, Reuse
from tierstore_tools.replay.trace import Request

_LIKELY = PageHint(Reuse.LIKELY)
_DONE = PageHint(Reuse.DONE)


class NextUses:
    """For every block of every request, the number of the next request that has it. Takes one pass over the
    trace and 8 bytes for each block of each prompt."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.never = len(requests)
        next_use: dict[int, int] = {}
        backwards = []
        for number in range(len(requests) - 1, -1, -1):
            blocks = requests[number].blocks
            backwards.append([next_use.get(block, self.never) for block in blocks])
            for block in blocks:
                next_use[block] = number
        self._of = backwards[::-1]

    def of(self, number: int) -> Sequence[int]:
        """By block of request ``number``; :attr:`never` for those that are not used again."""
        return self._of[number]


class OracleHints:
    """With every request, for each of its blocks on its own: whether it is used again. True with probability
    ``right``, otherwise the opposite is said. The same seed, the same lies."""

    def __init__(self, uses: NextUses, right: float, *, seed: int = 0) -> None:
        self._uses = uses
        self._right = right
        self._random = random.Random(seed)

    def hints(self, number: int, request: Request) -> Sequence[PageHint]:
        never, right, draw = self._uses.never, self._right, self._random.random
        return [_LIKELY if (use < never) == (draw() < right) else _DONE for use in self._uses.of(number)]


class BeladyHints:
    """With every request, the exact next use of each of its blocks, as a priority: sooner is higher."""

    def __init__(self, uses: NextUses) -> None:
        self._uses = uses

    def hints(self, number: int, request: Request) -> Sequence[PageHint]:
        return [PageHint(Reuse.UNKNOWN, -use) for use in self._uses.of(number)]


class Belady(Policy):
    """The page that is needed last leaves first (Belady, 1966): no policy finds more. It has to be told the
    next uses (:class:`BeladyHints`)."""

    name = "belady"

    def score(self, facts: PageFacts) -> Number:
        return facts.priority
