"""How a directory's byte capacity is shared out between the index, the extents and everything else in it.

The cap is hard: LMDB's map and the extent space are sized once, at open, so that together with a fixed
allowance for the rest they cannot exceed it, whatever is written later. Nothing is measured while running.
"""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.memory import ALIGNMENT
from tierstore.tiers.slabs import slot_bytes
from tierstore.units import GIB, KIB, MIB, format_size

_ALLOWANCE = 40 * KIB  # two directories, the lock file, LMDB's lock file
_BLOCK_MAP_FRACTION = 256  # the file system's own map of the extent files: 1/330 at its very worst on ext4
_LEAST_INDEX = 256 * KIB
_RECORD_BYTES = 704  # per page: a 64-token record, facts and link in B-tree leaves; 540 to 600 were measured
_LEAST_RECORDS_FRACTION = 64  # of the cap: other models may have smaller pages
_MOST_TREE_HEADROOM = 2 * MIB  # what LMDB needs to rewrite tree pages; see space.py
_SLACK_FRACTION = 512  # of the cap, for inline payloads beside larger pages
_MOST_SLACK = 64 * MIB
_INLINE_FRACTION = 31 / 32  # of the cap, when pages are small enough to live in the index
_LEAST_FILE = 1 * GIB
_MOST_FILES = 256
_UNITS = 1024  # and up to twice as many: fine enough for slabs that waste little
_LEAST_UNITS = 16
_MOST_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class Layout:
    """``index_bytes`` + ``extent_bytes`` + what the file system needs for them ≤ ``capacity_bytes``."""

    capacity_bytes: int
    index_bytes: int  # LMDB's map size: its file never grows beyond
    payload_bytes: int  # of these, what inline payloads may take: the rest is for the records
    extent_bytes: int


def split(capacity_bytes: int, *, page_bytes: int, inline_bytes: int) -> Layout:
    """Share out a cap for a life that mostly writes pages of ``page_bytes``.

    Raises :class:`UsageError` when not even one such page would fit.
    """
    if page_bytes < 1 or inline_bytes < 0:
        raise UsageError(
            f"page_bytes must be positive and inline_bytes not negative: {page_bytes}, {inline_bytes}"
        )
    room = capacity_bytes - _ALLOWANCE
    if page_bytes <= inline_bytes:
        index = payload = int(room * _INLINE_FRACTION)
        least = _LEAST_INDEX + 2 * page_bytes
    else:
        pages = room // slot_bytes(page_bytes)
        records = max(pages * _RECORD_BYTES, room // _LEAST_RECORDS_FRACTION)
        payload = min(room // _SLACK_FRACTION, _MOST_SLACK)
        index = min(records + min(records, _MOST_TREE_HEADROOM) + payload, room // 2)
        least = _LEAST_INDEX
    index = _round_down(max(index, least))
    extents = _round_down((room - index) * _BLOCK_MAP_FRACTION // (_BLOCK_MAP_FRACTION + 1))
    extents = max(extents, 0)
    if index > room or (page_bytes > inline_bytes and extents < slot_bytes(page_bytes)):
        needed = _ALLOWANCE + least + 2 * slot_bytes(page_bytes)
        raise UsageError(
            f"a disk capacity of {format_size(capacity_bytes)} cannot hold a page of "
            f"{format_size(page_bytes)}: give at least {format_size(needed)}"
        )
    return Layout(capacity_bytes, index, payload, extents)


def unit_bytes(extent_bytes: int, before: int | None) -> int:
    """The slab unit for an extent space. The one used ``before`` is kept while it is bearable, since slots
    only keep their positions under the same unit."""
    if before and _LEAST_UNITS <= extent_bytes // before <= _MOST_UNITS:
        return before
    wanted = extent_bytes // _UNITS
    return min(max(1 << (wanted.bit_length() - 1) if wanted else 0, ALIGNMENT), 4 * MIB)


def file_bytes(extent_bytes: int) -> int:
    """The size of one extent file: 1 GiB, more where that would make too many files."""
    size = _LEAST_FILE
    while extent_bytes > size * _MOST_FILES:
        size *= 2
    return size


def _round_down(nbytes: int) -> int:
    return nbytes // ALIGNMENT * ALIGNMENT
