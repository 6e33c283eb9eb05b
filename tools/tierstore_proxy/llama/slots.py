"""Choose the slot for a prompt. This module does no I/O: callers report what has happened to slots."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

_NONE: Tokens = np.empty(0, np.uint32)
_SIMILAR = 0.1  # least part of a prompt that a slot must have to be chosen for it


@dataclass
class KnownSlot:
    """The known state of a slot. It has ``tokens`` unless the server has dropped them, and the store has the
    first ``held`` of these. ``task`` is the server's number of the last request in the slot, None until it is
    known. A slot is ``tainted`` if its KV may not belong to its tokens."""

    number: int
    tokens: Tokens = field(default_factory=lambda: _NONE)
    held: int = 0
    task: int | None = None
    used: int = 0  # the number of the request that used the slot last
    busy: bool = False
    tainted: bool = False


class SlotBook:
    """The slots of one process of llama-server."""

    def __init__(self, count: int) -> None:
        self.slots = [KnownSlot(number) for number in range(count)]
        self._turn = 0

    def choose(self, tokens: Tokens, idle: Collection[int], wanted: int | None = None) -> KnownSlot | None:
        """Return the slot for a prompt, among the ``idle`` ones that no request of the proxy uses. It is
        the slot with the longest common prefix, or else the one that was unused longest. None if all are in
        use."""
        free = [slot for slot in self.slots if slot.number in idle and not slot.busy]
        if wanted is not None:
            return next((slot for slot in free if slot.number == wanted % len(self.slots)), None)
        if not free:
            return None
        best = max(free, key=lambda slot: (common_prefix(slot.tokens, tokens), slot.used))
        if common_prefix(best.tokens, tokens) >= _SIMILAR * len(tokens):
            return best
        return min(free, key=lambda slot: slot.used)

    def take(self, slot: KnownSlot) -> None:
        """Mark a slot as used by a request."""
        self._turn += 1
        slot.busy, slot.used, slot.task = True, self._turn, None

    def compare(self, number: int, task: int | None, count: int) -> None:
        """Forget the tokens of a slot if the server says that it has fewer, or has computed another request.
        ``task`` is the number of its last request, ``count`` how many tokens it has."""
        slot = self.slots[number % len(self.slots)]
        if slot.busy:
            return
        if count < len(slot.tokens) or (slot.task is not None and slot.task != task):
            slot.tokens, slot.held, slot.task = _NONE, 0, None

    def taint(self) -> None:
        """Record that any slot may have KV that does not belong to its tokens."""
        for slot in self.slots:
            slot.tainted, slot.tokens, slot.held = True, _NONE, 0

    @staticmethod
    def emptied(slot: KnownSlot) -> None:
        """Record that a slot is empty, or that nothing is known of it."""
        slot.tokens, slot.held, slot.tainted = _NONE, 0, False

    @staticmethod
    def contains(slot: KnownSlot, tokens: Tokens, held: int) -> None:
        """Record a slot's tokens, and how many of them the store has."""
        slot.tokens, slot.held = tokens, held


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return how many leading tokens are equal.

    >>> common_prefix(np.array([1, 2, 3], np.uint32), np.array([1, 2, 4, 5], np.uint32))
    2
    """
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count
