"""Which pages of a prompt are looked at at all.

Looking at the key of every page of a long prompt takes longer than all the rest. So far from its start, pages
are taken together, by fives, fifteens and so on, and the key of the middle one stands for all. Where a prompt
parts from another, or ends, inside such a group, that is as often too much as too little; exactly so, because
all sizes are odd.

::

    pages    0 … 31    32 … 126    127 … 501    502 …
    groups   of 1      of 5        of 15        of 63

Under load one in five of the groups has to do, and stands for its *cell*: for itself and two groups before
and behind it (three or four in the last cell of a range, so that there, too, the size is odd). Prompts that
all end in the same part of a cell would be too long or too short by the same share; what they are is known,
and made good (``asked.py``).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.keys import KEY_BYTES, PageKey

Groups: TypeAlias = Sequence[PageKey]
"""One key for each group of pages of a prompt, from its start."""

ALL: Final = 1 << 64
"""What every key is below, read as a number from its first 8 bytes: the border of a sample that has all."""

T = TypeVar("T")

_SINGLE = 32
# From, up to: pages in a group.
_RANGES = ((0, _SINGLE, 1), (_SINGLE, 127, 5), (127, 502, 15), (502, 1 << 30, 63))
_NEAR, _FAR, _FARTHER, _REST = (slice(start + size // 2, stop, size) for start, stop, size in _RANGES)


def groups(pages_of: Sequence[T]) -> Sequence[T]:
    """What stands for each group of a prompt's pages, out of ``pages_of`` (keys, or pages). Where these are
    few, they are themselves: a short prompt is looked up so fast that a copy would show."""
    if len(pages_of) <= _SINGLE:
        return pages_of
    return [*pages_of[_NEAR], *pages_of[_FAR], *pages_of[_FARTHER], *pages_of[_REST]]


def groups_behind(known: int, pages_of: Sequence[T]) -> Sequence[T]:
    """The same of pages that follow ``known`` others in a prompt."""
    found: list[T] = []
    for start, stop, size in _RANGES:
        middle = start + size // 2
        begin = middle + -(-max(known - middle, 0) // size) * size
        if begin < stop:
            found += pages_of[begin - known : max(stop - known, 0) : size]
    return found


def group_counts(pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many groups have their middle among the first ``pages`` pages, for each of these numbers."""
    counts = np.zeros(len(pages), np.int64)
    for start, stop, size in _RANGES:
        counts += np.maximum(-(-(np.minimum(pages, stop) - start - size // 2) // size), 0)
    return counts


def group_sizes(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many pages the groups of these numbers have."""
    return _SIZES[np.searchsorted(_STARTS, numbers, side="right") - 1]


_STARTS = group_counts(np.array([start for start, _, _ in _RANGES]))
_SIZES = np.array([size for _, _, size in _RANGES])


def _group_end(count: int) -> int:
    """Up to which page the first ``count`` groups go."""
    end = 0
    for start, stop, size in _RANGES:
        there = min(count, (stop - start) // size)
        end = start + there * size if there else end
        count -= there
    return end


def _halves_of_octaves() -> Iterator[int]:
    yield from (1, 2, 3)
    for octave in itertools.count(2):
        yield from (1 << octave, 3 << (octave - 1))


STRETCH_GROUPS: tuple[int, ...] = tuple(
    group_counts(
        np.array(list(itertools.takewhile(lambda pages: pages <= 1 << 16, _halves_of_octaves())))
    ).tolist()
)
"""Where the stretches of a prompt end, in groups: about at pages 1, 2, 3, 4, 6, 8, 12, 16 …"""

STRETCHES: tuple[int, ...] = tuple(map(_group_end, STRETCH_GROUPS))
"""The same in pages."""


@dataclass(frozen=True, slots=True)
class _Cell:
    group: int  # that stands for it
    page: int  # whose key that has
    groups: int  # it has


_CELL = 5
_MOST_PAGES = 1 << 16  # of a prompt: what follows is in no cell


def _cells() -> Iterator[_Cell]:
    for first, (start, stop, size) in zip(_STARTS.tolist(), _RANGES, strict=True):
        groups = (min(stop, _MOST_PAGES) - start) // size
        at = 0
        while at < groups:
            wide = _CELL if groups - at >= 2 * _CELL else groups - at
            middle = at + wide // 2
            yield _Cell(first + middle, start + middle * size + size // 2, wide)
            at += wide


_CELLS = tuple(_cells())
CELL_GROUPS: Final = tuple(cell.group for cell in _CELLS)
"""The groups that stand for cells, by their numbers."""
CELL_PAGES: Final = tuple(cell.page for cell in _CELLS)
"""The pages that stand for these."""
_STANDS_FOR_A_CELL: Final = frozenset(CELL_PAGES)
_AND_NO_MORE: Final = (*CELL_PAGES, 1 << 62)
ABOVE_ALL: Final = b"\xff" * (KEY_BYTES + 1)
"""No key is above it."""


def least_key(least: bytes, number: int, key: PageKey) -> bytes:
    """The smallest of the keys that stand for the cells of a prompt that goes on with page ``number``,
    where ``least`` is that of the pages before it. Kept with each page of the index, so that a lookup of a
    prompt that is all there compares one key and not all of them."""
    return key if key < least and number in _STANDS_FOR_A_CELL else least


def some_cell_below(border: bytes, keys: Sequence[PageKey], first: int, end: int) -> bool:
    """Whether some page from ``first`` up to ``end`` stands for a cell and has a key below ``border``."""
    at = bisect_left(CELL_PAGES, first)
    while (page := _AND_NO_MORE[at]) < end:
        if keys[page] < border:
            return True
        at += 1
    return False


_CELL_SIZES = np.zeros(CELL_GROUPS[-1] + 2, np.int64)  # the last one is of those that are in none
_CELL_SIZES[list(CELL_GROUPS)] = [cell.groups for cell in _CELLS]


def cell_groups(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many groups each of these groups stands for under load: 0 for those that stand for none."""
    return _CELL_SIZES[np.minimum(numbers, len(_CELL_SIZES) - 1)]


def covered_pages(groups: npt.NDArray[np.int64], *, in_cells: bool) -> npt.NDArray[np.int64]:
    """How many pages the first so many groups of a prompt stand for: themselves, or their cells."""
    covered = _COVERED_IN_CELLS if in_cells else _COVERED
    return covered[np.minimum(groups, len(covered) - 1)]


_ALL_SIZES = group_sizes(np.arange(len(_CELL_SIZES)))
_COVERED = np.concatenate([[0], np.cumsum(_ALL_SIZES)])
_COVERED_IN_CELLS = np.concatenate([[0], np.cumsum(_ALL_SIZES * _CELL_SIZES)])
