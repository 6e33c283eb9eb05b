"""A table of pages that have left all tiers, and of pages that were computed but not stored.

An entry takes 12 bytes in a table of fixed size: a fingerprint of the page with the cause, and the time.
Entries lie in rows of eight. A new entry replaces the oldest entry in its row, so the table forgets pages in
about the order in which they left. The table has one entry for each 64 KiB of the tiers, at least 16,384 and
at most 4 million (48 MiB). After 10 million departures, the table knows the last 4 million. Entries that were
never written take no memory.

The fingerprint is a keyed hash of the page's key and identity (which includes the tenant). An engine may
choose its pages' keys. Without a secret, it could choose a key whose fingerprint equals that of another
tenant's page, and would learn that this page was stored.
"""

from __future__ import annotations

import enum
import secrets
import time
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from tierstore.index import Tier

_LEAST_ENTRIES = 1 << 14
_MOST_ENTRIES = 1 << 22
_BYTES_PER_ENTRY = 64 << 10  # capacity of all tiers
_ROW = 8
_MOST_VOLUMES = 1 << 12
_CAUSE_BITS = 6
_TIER_BITS = 2
_FACT_BITS = _CAUSE_BITS + _TIER_BITS
_FACTS = (1 << _FACT_BITS) - 1
_SECRET_BYTES = 16
_ROW_SHIFT = 40  # the bits of a fingerprint from this one on choose its row


class Cause(enum.IntEnum):
    """Why a page left, or was not kept. The numbers are stored: never change one."""

    EVICTED = 1
    BY_REQUEST = 2  # evicted by a command or an API call
    EXPIRED = 3
    SUPERSEDED = 4
    LET_GO = 5
    DAMAGED = 6
    BUDGET = 7  # the write budget was used up
    QUEUE = 8  # the write queue was full
    WORTH = 9  # the tenant's engines compute such pages faster than the disk loads them
    READ_ONLY = 10  # the disk could not be written
    NO_ROOM = 11  # the host tier had no free slot


NOT_WRITTEN = frozenset({Cause.BUDGET, Cause.QUEUE, Cause.WORTH, Cause.READ_ONLY})
_NO_TIER = 3


class Departure(NamedTuple):
    """Why and when a page left its last tier, and which tier that was (None if it was in no tier)."""

    cause: Cause
    tier: Tier | None
    at_s: int
    """Seconds since 1970, as all times of this module."""


class Departures:
    """The table of departures. Needs the store's lock."""

    def __init__(self, capacity_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """Make an empty table for tiers that have ``capacity_bytes`` together."""
        wanted = min(max(capacity_bytes // _BYTES_PER_ENTRY, _LEAST_ENTRIES), _MOST_ENTRIES)
        rows = 1 << (wanted // _ROW - 1).bit_length()
        # numpy's untouched zeros take no memory; a memoryview accesses an entry 20 times faster than numpy
        # does
        self._marks = np.zeros(rows * _ROW, np.uint64).data
        self._times = np.zeros(rows * _ROW, np.uint32).data
        self._row_mask = rows - 1
        self._clock = clock
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._left_bytes = 0
        self._volumes: list[tuple[int, int]] = []  # (second, bytes that had left before it), newest last

    @property
    def nbytes(self) -> int:
        """The most memory that the table takes, in bytes."""
        return self._marks.nbytes + self._times.nbytes

    def note(
        self, identity: bytes, key: bytes, cause: Cause, tier: Tier | None = None, nbytes: int = 0
    ) -> None:
        """Record that a page of ``nbytes`` has left its last tier, or was not stored. If the page is evicted
        from the host tier after it could not be written to disk, the reason for that stays its cause."""
        now_s = int(self._clock())
        mark, first = self._place(identity, key)
        place = self._find(mark, first)
        if place is None:
            place = min(range(first, first + _ROW), key=self._times.__getitem__)
        elif cause is Cause.EVICTED and tier is Tier.HOST and self._cause(place) in NOT_WRITTEN:
            cause = self._cause(place)
        self._marks[place] = mark | cause << _TIER_BITS | (_NO_TIER if tier is None else tier)
        self._times[place] = now_s
        self._left_bytes += nbytes
        if not self._volumes or self._volumes[-1][0] != now_s:
            if len(self._volumes) == _MOST_VOLUMES:
                del self._volumes[: _MOST_VOLUMES // 2 : 2]
            self._volumes.append((now_s, self._left_bytes - nbytes))

    def now_s(self) -> int:
        return int(self._clock())

    def left_since(self, at_s: int) -> int:
        """Return the number of bytes that have left since ``at_s``. If the tiers were larger by about this
        number, a page that left at ``at_s`` would still be stored."""
        first = bisect_left(self._volumes, (at_s, 0))
        return self._left_bytes - self._volumes[first][1] if first < len(self._volumes) else 0

    def of(self, identity: bytes, key: bytes) -> Departure | None:
        """Return the departure of a page; None if it was never seen or is forgotten."""
        place = self._find(*self._place(identity, key))
        if place is None:
            return None
        tier = self._marks[place] & _NO_TIER
        return Departure(self._cause(place), None if tier == _NO_TIER else Tier(tier), self._times[place])

    def _place(self, identity: bytes, key: bytes) -> tuple[int, int]:
        """Return a page's fingerprint (its bits for cause and tier are 0), and the first place of its row."""
        hashed = blake2b(identity + key, digest_size=8, key=self._secret).digest()
        mark = int.from_bytes(hashed, "little") & ~_FACTS
        return mark, (mark >> _ROW_SHIFT & self._row_mask) * _ROW

    def _find(self, mark: int, first: int) -> int | None:
        """Return the place of a fingerprint in its row; None if the row does not have it."""
        for place in range(first, first + _ROW):
            if self._marks[place] & ~_FACTS == mark:
                return place
        return None

    def _cause(self, place: int) -> Cause:
        return Cause((self._marks[place] & _FACTS) >> _TIER_BITS)

    # -- over a restart ------------------------------------------------------------------------------

    def dump(self, most: int = _MOST_ENTRIES) -> bytes:
        """Return the ``most`` newest entries and the secret of their fingerprints for :meth:`load`; empty if
        there are no entries."""
        marks, times = np.asarray(self._marks), np.asarray(self._times)
        used = np.flatnonzero(marks)
        if not len(used):
            return b""
        if len(used) > most:
            used = used[np.argsort(times[used], kind="stable")[-most:]]
        entries = np.empty(len(used), _ENTRY)
        entries["mark"], entries["at_s"] = marks[used], times[used]
        return self._secret + entries.tobytes()

    def load(self, dump: bytes) -> None:
        """Fill an empty table with a dump, which may be from a table of another size. Skip entries with an
        unknown cause."""
        whole = (len(dump) - _SECRET_BYTES) // _ENTRY.itemsize
        if whole <= 0:
            return
        self._secret = dump[:_SECRET_BYTES]
        entries = np.frombuffer(dump, _ENTRY, whole, _SECRET_BYTES)
        causes = (entries["mark"] & _FACTS) >> _TIER_BITS
        entries = np.sort(entries[np.isin(causes, list(Cause))], order="at_s")
        rows = (entries["mark"] >> np.uint64(_ROW_SHIFT)).astype(np.int64) & self._row_mask
        order = np.argsort(rows, kind="stable")  # sorted by row, and within a row by time
        newer = np.searchsorted(rows[order], rows[order], side="right") - 1 - np.arange(len(order))
        kept = newer < _ROW
        places = rows[order][kept] * _ROW + newer[kept]
        np.asarray(self._marks)[places] = entries["mark"][order][kept]
        np.asarray(self._times)[places] = entries["at_s"][order][kept]


_ENTRY = np.dtype([("mark", "<u8"), ("at_s", "<u4")])
