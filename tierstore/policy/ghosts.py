"""What is remembered of evicted pages, so that one that comes back is known."""

from __future__ import annotations

from array import array

_HITS_BITS = 8
_MOST_HITS = (1 << _HITS_BITS) - 1
_LEAST_SLOTS = 1 << 10
_SLOTS_PER_PAGE = 4
_MIX = 0x9E3779B97F4A7C15
_NOT_ZERO = 0x632BE59BD9B4E019  # an empty slot is 0, so no page should be
_MASK = (1 << 64) - 1


def fingerprint(number: int) -> int:
    """Return 60 bits that stand for a page, from any 64 bits of its key (or the id of a block of a trace)."""
    mixed = (number ^ _NOT_ZERO) * _MIX & _MASK
    return ((mixed ^ mixed >> 29) * _MIX & _MASK) >> 4


class GhostTable:
    """Fingerprint → hits of pages that are gone.

    A table of 8-byte slots, four to eight for each page there is, in which the newer takes the older's slot:
    of pages that left within a few turnovers of the store, most are known. A wrong answer (two pages that
    share 52 bits) costs a hit at worst. What S3-FIFO, 2Q and ARC call a ghost queue is this one table, for
    all tiers of a store."""

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 * _LEAST_SLOTS))
        self._mask = _LEAST_SLOTS - 1

    def __len__(self) -> int:
        """How many slots there are."""
        return len(self._slots)

    def remember(self, page: int, hits: int) -> None:
        """Remember the hits of a page (a fingerprint) that leaves."""
        known = hits if hits < _MOST_HITS else _MOST_HITS
        self._slots[(page >> _HITS_BITS) & self._mask] = page & ~_MOST_HITS | known

    def recall(self, page: int) -> int | None:
        """Return the hits of a page that comes back; None when nothing is known of it."""
        slot = self._slots[(page >> _HITS_BITS) & self._mask]
        return slot & _MOST_HITS if slot and slot >> _HITS_BITS == page >> _HITS_BITS else None

    def make_room(self, pages: int) -> None:
        """There are ``pages`` now: remember as many times more."""
        while len(self._slots) < _SLOTS_PER_PAGE * pages:
            known = [slot for slot in self._slots if slot]
            self._slots = array("Q", bytes(16 * len(self._slots)))
            self._mask = len(self._slots) - 1
            for slot in known:
                self._slots[(slot >> _HITS_BITS) & self._mask] = slot
