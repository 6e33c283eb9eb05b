"""List the pages that a store holds while it keeps changing.

The pages are read in batches, and the store's lock is held for one batch at a time. The list has every page
that was stored all the time, and no page that was never stored. To get the exact state, record all changes
from the start of the listing on, and apply them to the finished list.
"""

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

PAGES_AT_ONCE = 1024  # takes a few milliseconds

Wanted = Callable[[bytes, bytes], bool]
"""Return whether a page is wanted, given its identity's digest and its tokens."""


def held(state: StoreState, disk: DiskTier | None, wanted: Wanted) -> Iterator[list[Stored]]:
    """Yield all wanted pages that can be served from host memory or the disk, each after its parent. Raise
    :class:`OSError` if the disk fails."""
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
    """Yield the wanted pages on disk. The pages are read in order of serials, so a parent comes before its
    children."""
    roots = disk.root_serials()
    serials, keys = array("Q"), bytearray()  # serials and keys of the pages yielded so far
    start = 0
    while True:
        records = disk.records_from(start, PAGES_AT_ONCE)
        if not records:
            return
        start = records[-1][0] + 1
        with state.lock:
            page_table = disk.page_table
            present = [page_table is None or serial in page_table for serial, _ in records]
        found = []
        for (serial, record), is_present in zip(records, present, strict=True):
            if record is None or not is_present or not wanted(record.identity, record.tokens):
                continue
            at = bisect_left(serials, record.parent)
            if at < len(serials) and serials[at] == record.parent:
                parent = bytes(keys[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            elif record.parent in roots:
                parent = b""
            else:
                continue  # the page's parent cannot be served
            serials.append(serial)
            keys += record.key
            found.append(Stored(Tier.DISK, record.identity, record.key, parent, record.tokens))
        yield found
