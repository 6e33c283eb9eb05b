"""When the next turn of a conversation is expected, and what is read for it before it comes."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_GAPS_KEPT = 8
_LEAD = 0.5  # of the expected gap, or of the time that a page stays: so long before it, reading begins


@dataclass(slots=True)
class _Conversation:
    """``gaps`` are the latest seconds from one arrival to the next, by how the earlier answer ended."""

    turn: int = 0
    arrived_s: float = 0.0
    stop: str = ""
    blocks: Sequence[int] = ()
    gaps: dict[str, deque[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, order=True)
class _Due:
    at_s: float
    number: int
    name: str = field(compare=False)
    turn: int = field(compare=False)


class Expectations:
    """The conversations, and which of them to prepare for."""

    def __init__(self) -> None:
        self._conversations: dict[str, _Conversation] = {}
        self._due: list[_Due] = []
        self._numbers = itertools.count()

    def arrived(self, name: str, now_s: float, stop: str, blocks: Sequence[int], *, stays_s: float) -> None:
        """A turn has come. ``stop`` says how its answer will end, which the engine knows by the time that
        this matters; ``stays_s`` is how long an unused page stays in the host tier at present."""
        conversation = self._conversations.setdefault(name, _Conversation())
        if conversation.turn:
            gaps = conversation.gaps.setdefault(conversation.stop, deque(maxlen=_GAPS_KEPT))
            gaps.append(now_s - conversation.arrived_s)
        conversation.turn += 1
        conversation.arrived_s, conversation.stop, conversation.blocks = now_s, stop, blocks
        known = conversation.gaps.get(stop)
        if known:
            gap_s = statistics.median(known)
            self._expect(name, conversation.turn, now_s + gap_s - _LEAD * min(gap_s, stays_s))

    def next_due(self, before_s: float) -> tuple[str, Sequence[int], float] | None:
        """The next conversation to prepare for and its latest prompt, if that is before ``before_s``, and
        when. Those whose turn has come meanwhile are left out."""
        while self._due and self._due[0].at_s < before_s:
            due = heapq.heappop(self._due)
            conversation = self._conversations[due.name]
            if conversation.turn == due.turn:
                return due.name, conversation.blocks, due.at_s
        return None

    def postpone(self, name: str, at_s: float) -> None:
        """The rest of this one's prompt is to be read from ``at_s`` on, when the disk is idle again."""
        self._expect(name, self._conversations[name].turn, at_s)

    def _expect(self, name: str, turn: int, at_s: float) -> None:
        heapq.heappush(self._due, _Due(at_s, next(self._numbers), name, turn))
