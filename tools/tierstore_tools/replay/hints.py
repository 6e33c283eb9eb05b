"""``--hints``: where the hints of a replay come from, and the future that some of them know."""

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
# What traces call a reason that the engines have another word for.
_REASONS = {
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "end_turn": "stop",
    "max_tokens": "length",
}


_LIKELY = PageHint(Reuse.LIKELY)
_DONE = PageHint(Reuse.DONE)


class Hinter(Protocol):
    """Where hints come from in a replay."""

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint] | None:
        """What is said with request ``number`` (from 0) of each of its blocks, when it is saved; None when
        nothing is said."""
        ...


class Inferred:
    """What an engine says without being told, by the reason that an answer ended
    (:func:`tierstore.types.inferred`)."""

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint] | None:
        """The same for all blocks of the prompt."""
        hint = inferred(_REASONS.get(request.stop, request.stop))
        return None if hint is None else [hint.facts(request.timestamp_s)] * len(request.blocks)


class NextUses:
    """For every block of every request, the number of the next request that has it. Takes one pass over the
    trace and 8 bytes for each block of each prompt."""

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
        """By block of request ``number``; :attr:`never` for those that are not used again."""
        return self._of[number]


class OracleHints:
    """With every request, for each of its blocks on its own: whether it is used again. True with probability
    ``right``, otherwise the opposite is said. The same seed, the same lies."""

    def __init__(self, uses: NextUses, right: float, *, seed: int = 0) -> None:
        self._uses = uses
        self._right = right
        self._random = random.Random(seed)

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint]:
        never, right, draw = self._uses.never, self._right, self._random.random
        return [_LIKELY if (use < never) == (draw() < right) else _DONE for use in self._uses.of(number)]


class BeladyHints:
    """With every request, the exact next use of each of its blocks, as a priority: sooner is higher."""

    def __init__(self, uses: NextUses) -> None:
        self._uses = uses

    def hints(self, number: int, request: TraceRequest) -> Sequence[PageHint]:
        return [PageHint(Reuse.UNKNOWN, -use) for use in self._uses.of(number)]


@dataclass(frozen=True, slots=True)
class HintSource:
    """``none``, ``inferred``, or ``oracle:P`` (right with a probability of P)."""

    name: str = "none"
    accuracy: float | None = None  # of an oracle

    def hinter(self, uses: Callable[[], NextUses]) -> Hinter | None:
        """One for a single pass over a trace, whose future ``uses`` tells."""
        if self.accuracy is not None:
            return OracleHints(uses(), self.accuracy)
        return Inferred() if self.name == "inferred" else None


def parse_hints(text: str) -> HintSource:
    """Raises :class:`UsageError` for anything else."""
    if text in ("none", "inferred"):
        return HintSource(text)
    match = _ORACLE.fullmatch(text)
    if match is not None and float(match.group(1)) <= 1:
        return HintSource(text, float(match.group(1)))
    raise UsageError(f"--hints is none, oracle:P (such as oracle:0.9) or inferred, not {text!r}")
