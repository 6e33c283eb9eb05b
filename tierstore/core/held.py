"""What a store holds, page by page, while it goes on changing.

It is read in slices, under the store's lock for each slice only. So what is read is right in this sense: a
page that was there all the time is in it, one that never was is not, and whoever takes all changes from the
beginning of the reading on, and applies them after it, knows the truth."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice

from tierstore.core.change_log import Stored, stored
from tierstore.core.state import StoreState
from tierstore.index import Tier
from tierstore.keys import KEY_BYTES
from tierstore.tiers.disk import DiskTier

PAGES_AT_ONCE = 1024  # a few milliseconds

Wanted = Callable[[bytes, bytes], bool]
"""Of an identity's digest and a page's tokens."""


def held(state: StoreState, disk: DiskTier | None, wanted: Wanted) -> Iterator[list[Stored]]:
    """All wanted pages that can be served from host memory or the disk, each after the one before it in its
    prompt. Raises :class:`OSError` for a disk that does."""
    yield from _in_host(state, wanted)
    if disk is not None:
        yield from _on_disk(state, disk, wanted)


def _in_host(state: StoreState, wanted: Wanted) -> Iterator[list[Stored]]:
    walk = state.index.tree.walk()
    while True:
        with state.lock:
            pages = list(islice(walk, PAGES_AT_ONCE))
            found = [
                stored(page, Tier.HOST)
                for page in pages
                if (copy := page.copies[Tier.HOST]) is not None
                and copy.ready
                and wanted(page.identity, page.tokens)
            ]
        if not pages:
            return
        yield found


def _on_disk(state: StoreState, disk: DiskTier, wanted: Wanted) -> Iterator[list[Stored]]:
    """By the index's records, which know their parents by their serials: those are less than their own."""
    roots = disk.root_serials()
    serials, keys = array("Q"), bytearray()  # of the pages so far
    start = 0
    while True:
        records = disk.records_from(start, PAGES_AT_ONCE)
        if not records:
            return
        start = records[-1][0] + 1
        with state.lock:
            page_table = disk.page_table
            there = [page_table is None or serial in page_table for serial, _ in records]
        found = []
        for (serial, record), is_there in zip(records, there, strict=True):
            if record is None or not is_there or not wanted(record.identity, record.tokens):
                continue
            at = bisect_left(serials, record.parent)
            if at < len(serials) and serials[at] == record.parent:
                parent = bytes(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            elif record.parent in roots:
                parent = b""
            else:
                continue  # what comes before it cannot be served
            serials.append(serial)
            keys += record.key
            found.append(Stored(Tier.DISK, record.identity, record.key, parent, record.tokens))
        yield found
