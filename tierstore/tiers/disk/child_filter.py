"""A filter in memory that knows which pages are not on disk, so that most useless index lookups are skipped.

A lookup follows the tree in memory as far as possible; the next page may still be on disk. Checking the index
means reading mapped memory on another thread: a few thread switches for every new prompt, and much more time
while pages are being written. So each page's link to its parent is put into a Bloom filter (Bloom,
Communications of the ACM 13(7), 1970), under the page's key and under its first four tokens. The filter
returns True for every page on disk, and for about one in fifty pages that are not on disk.

Entries cannot be removed from a Bloom filter. When the filter has more entries than it was made for, a new
filter is built from the index. Meanwhile, new entries are added to both filters.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tierstore.keys import KEY_BYTES
from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.io import InFlightCalls
from tierstore.tiers.disk.records import PageRecord, child_prefix, link_of

_log = logging.getLogger(__name__)

_BITS = 8  # least bits per entry; with four hashes, a full filter returns True for 2.4 % of absent pages
_HASHES = 4
_ENTRIES = 2  # per page
_LEAST_PAGES = 1 << 16
_STEP = 1 << 14  # links per read of the index, which takes 10 ms
_WORD = (1 << 64) - 1
_LINK = np.dtype([("parent", ">u8"), ("tokens", ">u8", 2), ("key", ">u8", 2), ("serial", ">u8")])

_Words: TypeAlias = "npt.NDArray[np.uint64]"

# The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_GOLDEN = 0x9E3779B97F4A7C15


class BloomFilter:
    """A Bloom filter for the links of ``pages`` pages. The filter may be queried while another thread adds
    entries. Only one thread at a time may add entries."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.added = 0
        size = 1 << (pages * _ENTRIES * _BITS - 1).bit_length()
        self._mask = size - 1
        self._bits = bytearray(size // 8)

    def add(self, links: Sequence[bytes]) -> None:
        """Add links, which are keys of the index's tree ``children``."""
        rows = np.frombuffer(b"".join(links), _LINK)
        hashes = _hashes(rows)
        steps = hashes >> np.uint64(32) | np.uint64(1)
        places = hashes[:, None] + steps[:, None] * np.arange(_HASHES, dtype=np.uint64)
        places &= np.uint64(self._mask)
        bits = np.uint8(1) << (places & np.uint64(7)).astype(np.uint8)
        np.bitwise_or.at(np.frombuffer(self._bits, np.uint8), places >> np.uint64(3), bits)
        self.added += len(rows)

    def may_have(self, parent: int, key: bytes) -> bool:
        """Return whether there may be a page with this key right below ``parent``."""
        return self._has(_mixed(int.from_bytes(key[:8], "big") + parent * _GOLDEN))

    def may_begin(self, parent: int, tokens: bytes) -> bool:
        """Return whether there may be a page right below ``parent`` that begins with the first four of
        ``tokens``, or with all of ``tokens`` if there are fewer."""
        prefix = child_prefix(parent, tokens)
        first, second = (int.from_bytes(prefix[at : at + 8], "big") for at in (8, 16))
        return self._has(_mixed(_mixed(first + parent * _GOLDEN) + second))

    def _has(self, place: int) -> bool:
        step = place >> 32 | 1
        for _ in range(_HASHES):
            at = place & self._mask
            if not self._bits[at >> 3] >> (at & 7) & 1:
                return False
            place += step
        return True


def _mixed(value: int) -> int:
    value &= _WORD
    for shift, factor in _MIX:
        value = (value ^ value >> shift) * factor & _WORD
    return value ^ value >> 31


def _all_mixed(values: _Words) -> _Words:
    """Return :func:`_mixed` of each value."""
    for shift, factor in _MIX:
        values = (values ^ values >> np.uint64(shift)) * np.uint64(factor)
    mixed: _Words = values ^ values >> np.uint64(31)
    return mixed


def _hashes(rows: npt.NDArray[np.void]) -> _Words:
    """Return the hashes of both entries of each link, as used by :meth:`BloomFilter.may_have` and
    :meth:`BloomFilter.may_begin`."""
    parents, tokens, keys = (rows[name].astype(np.uint64) for name in ("parent", "tokens", "key"))
    parents *= np.uint64(_GOLDEN)
    prefixes = _all_mixed(_all_mixed(tokens[:, 0] + parents) + tokens[:, 1])
    return np.concatenate([_all_mixed(keys[:, 0] + parents), prefixes])


class ChildFilter:
    """The filter of an open directory. Thread-safe. After opening, a thread builds it from the index. Until
    that thread has ended, the filter returns True for every page."""

    def __init__(self, index_db: IndexDB, in_flight: InFlightCalls) -> None:
        self._index_db = index_db
        self._in_flight = in_flight
        self._closing = False
        # Guarded by _lock; _filter may be read without it.
        self._lock = threading.Lock()
        self._filter: BloomFilter | None = None
        self._next: BloomFilter | None = None
        self._thread = self._begin_reading()

    def may_lead(self, parent: int, key: bytes | None, beginnings: Iterable[bytes]) -> bool:
        """Return whether there may be a page right below ``parent`` that has this key (None: no page has) or
        one of the ``beginnings``. Key and beginnings are in the form that the index stores."""
        known = self._filter
        if known is None:
            return True
        if key is not None and known.may_have(parent, key):
            return True
        return any(known.may_begin(parent, beginning) for beginning in beginnings)

    def add(self, records: Iterable[PageRecord]) -> None:
        """Add durable pages. Call this before a lookup has to find them."""
        links = [link_of(record) for record in records]
        if not links:
            return
        with self._lock:
            for each in (self._filter, self._next):
                if each is not None:
                    each.add(links)
            outgrown = self._filter is not None and self._filter.added > self._filter.pages
            if outgrown and not self._thread.is_alive() and not self._closing:
                self._thread = self._begin_reading()

    def wait(self) -> None:
        """Wait until no filter is being built."""
        self._thread.join()

    def close(self) -> None:
        """Stop building a filter. The index must stay open until this returns."""
        self._closing = True
        self._thread.join()

    def _begin_reading(self) -> threading.Thread:
        thread = threading.Thread(target=self._read, name="tierstore-links", daemon=True)
        thread.start()
        return thread

    def _read(self) -> None:
        try:
            self._read_all()
        except OSError as error:
            _log.warning(
                "disk tier: the index's links could not be read; lookups read the index instead: %s", error
            )
            with self._lock:
                self._next = None

    def _read_all(self) -> None:
        with self._in_flight.call():
            pages = len(self._index_db)
        fresh = BloomFilter(max(2 * pages, _LEAST_PAGES))
        with self._lock:
            self._next = fresh
        start: bytes | None = b""
        while start is not None and not self._closing:
            with self._in_flight.call():
                links, start = self._index_db.links(start, _STEP)
            with self._lock:
                fresh.add([link for link in links if len(link) == _LINK.itemsize])
        with self._lock:
            self._next = None
            if not self._closing:
                self._filter = fresh


assert _LINK.itemsize == len(child_prefix(0, b"")) + KEY_BYTES + 8
