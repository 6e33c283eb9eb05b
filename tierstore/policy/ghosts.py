"""A table of evicted pages' hit counts, for pages that return."""

from __future__ import annotations

from array import array

_HITS_BITS = 8
_MOST_HITS = (1 << _HITS_BITS) - 1
_LEAST_SLOTS = 1 << 10
_SLOTS_PER_PAGE = 4
_MIX = 0x9E3779B97F4A7C15
_NOT_ZERO = 0x632BE59BD9B4E019  # makes a fingerprint of 0 unlikely, because 0 marks an empty slot
_MASK = (1 << 64) - 1


def fingerprint(number: int) -> int:
    """Return a 60-bit fingerprint of a page, from 64 bits of its key (or a block id of a trace)."""
    mixed = (number ^ _NOT_ZERO) * _MIX & _MASK
    return ((mixed ^ mixed >> 29) * _MIX & _MASK) >> 4


class GhostTable:
    """The hits of evicted pages, by fingerprint.

    The table has 8-byte slots, four to eight for each page in the tree. A new entry replaces the old entry of
    its slot. Most pages that left within a few turnovers of the store are known. Two pages that share 52 bits
    are confused, which costs at most a hit. The table has the role of the ghost queue in S3-FIFO, 2Q and ARC,
    for all tiers of a store at once.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _LEAST_SLOTS))
        self._mask = _LEAST_SLOTS - 1

    def __len__(self) -> int:
        """Return the number of slots."""
        return len(self._slots)

    def remember(self, page: int, hits: int) -> None:
        """Store the hits of an evicted page. ``page`` is its fingerprint."""
        known = hits if hits < _MOST_HITS else _MOST_HITS
        self._slots[(page >> _HITS_BITS) & self._mask] = page & ~_MOST_HITS | known

    def recall(self, page: int) -> int | None:
        """Return the hits of a returning page; None if it is not known."""
        slot = self._slots[(page >> _HITS_BITS) & self._mask]
        return slot & _MOST_HITS if slot and slot >> _HITS_BITS == page >> _HITS_BITS else None

    def make_room(self, pages: int) -> None:
        """Grow the table if the tree has ``pages`` pages."""
        while len(self._slots) < _SLOTS_PER_PAGE * pages:
            known = [slot for slot in self._slots if slot]
            self._slots = array("Q", bytes(16 * len(self._slots)))
            self._mask = len(self._slots) - 1
            for slot in known:
                self._slots[(slot >> _HITS_BITS) & self._mask] = slot
