"""``--hints``: the sources of hints in a replay, and the next uses of blocks, which some sources know."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierstore.errors import UsageError
from tierstore.policy import PageHint, Reuse
from tierstore.types import inferred
from tierstore_tools.replay.trace import TraceRequest

_ORACLE = re.compile(r"oracle:(\d+(?:\.\d+)?|\.\d+)")
# The reasons for the end of an answer, as traces name them → as engines name them.
_REASONS = {
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "end_turn": "stop",
    "max_tokens": "length",
}


_LIKELY = PageHint(Reuse.LIKELY)
_DONE = PageHint(Reuse.DONE)


class Hinter(Protocol):
    """A source of hints in a replay."""

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint] | None:
        """Return the hints of request ``number`` (from 0), one per block, given when it is saved; None for no
        hints."""
        ...


class Inferred:
    """Hints that an engine infers from the reason of an answer's end (:func:`tierstore.types.inferred`)."""

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint] | None:
        """Return the same hint for all blocks of the prompt."""
        hint = inferred(_REASONS.get(request.stop, request.stop))
        return None if hint is None else [hint.facts(request.timestamp_s)] * len(request.blocks)


class NextUses:
    """The number of the next request that has the same block, for every block of every request. Computing it
    takes one pass over the trace, and 8 bytes of memory for each block of each prompt."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
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
        """Return the number of the next request for each block of request ``number``: :attr:`never` for
        blocks that no later request has."""
        return self._of[number]


class OracleHints:
    """Hints for each block of every request: whether it is used again. A hint is right with probability
    ``right``. A wrong hint says the opposite. Equal seeds give equal wrong hints."""

    def __init__(self, uses: NextUses, right: float, *, seed: int = 0) -> None:
        self._uses = uses
        self._right = right
        self._random = random.Random(seed)

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint]:
        never, right, draw = self._uses.never, self._right, self._random.random
        return [_LIKELY if (use < never) == (draw() < right) else _DONE for use in self._uses.of(number)]


class BeladyHints:
    """Hints with the exact next use of each block of every request, as a priority: the sooner the next use,
    the higher the priority."""

    def __init__(self, uses: NextUses) -> None:
        self._uses = uses

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint]:
        return [PageHint(Reuse.UNKNOWN, -use) for use in self._uses.of(number)]


@dataclass(frozen=True, slots=True)
class HintSource:
    """``none``, ``inferred``, or ``oracle:P`` (right with a probability of P)."""

    name: str = "none"
    accuracy: float | None = None  # an oracle's

    def hinter(self, uses: Callable[[], NextUses]) -> Hinter | None:
        """Return a source of hints for one pass over a trace. ``uses`` returns the next use of each block."""
        if self.accuracy is not None:
            return OracleHints(uses(), self.accuracy)
        return Inferred() if self.name == "inferred" else None


def parse_hints(text: str) -> HintSource:
    """Parse ``none``, ``inferred`` or ``oracle:P``. Raises :class:`UsageError` for other text."""
    if text in ("none", "inferred"):
        return HintSource(text)
    match = _ORACLE.fullmatch(text)
    if match is not None and float(match.group(1)) <= 1:
        return HintSource(text, float(match.group(1)))
    raise UsageError(f"--hints takes none, oracle:P (such as oracle:0.9) or inferred, got {text!r}")
