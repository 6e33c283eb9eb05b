"""Which pages of a prompt are looked at at all.

Looking at the key of every page of a long prompt takes longer than all the rest. So far from its start, pages
are taken together, by fives, fifteens and so on, and the key of the middle one stands for all. Where a prompt
parts from another, or ends, inside such a group, that is as often too much as too little; exactly so, because
all sizes are odd.

::

    pages    0 … 31    32 … 126    127 … 501    502 …
    groups   of 1      of 5        of 15        of 63
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.keys import PageKey

Groups: TypeAlias = list[PageKey]
"""One key for each group of pages of a prompt, from its start."""

T = TypeVar("T")

_RANGES = ((0, 32, 1), (32, 127, 5), (127, 502, 15), (502, 1 << 30, 63))  # from, up to: pages in a group


def groups(pages_of: Sequence[T], pages: int, known: int = 0) -> list[T]:
    """What stands for each group of a prompt's first ``pages`` pages, out of ``pages_of`` (keys, or pages):
    those of the pages from ``known`` on."""
    found: list[T] = []
    for start, stop, size in _RANGES:
        if start >= pages:
            break
        middle = start + size // 2
        begin = middle + -(-max(known - middle, 0) // size) * size
        end = min(stop, pages)
        if begin < end:
            found += pages_of[begin - known : end - known : size]
    return found


def group_count(pages: int) -> int:
    """How many groups have their middle among the first ``pages`` pages."""
    count = 0
    for start, stop, size in _RANGES:
        if start < pages:
            count += max(-(-(min(pages, stop) - start - size // 2) // size), 0)
    return count


def group_sizes(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many pages the groups of these numbers have."""
    return _SIZES[np.searchsorted(_STARTS, numbers, side="right") - 1]


_STARTS = np.array([group_count(start) for start, _, _ in _RANGES])
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
    group_count(pages) for pages in itertools.takewhile(lambda pages: pages <= 1 << 16, _halves_of_octaves())
)
"""Where the stretches of a prompt end, in groups: about at pages 1, 2, 3, 4, 6, 8, 12, 16 …"""

STRETCHES: tuple[int, ...] = tuple(map(_group_end, STRETCH_GROUPS))
"""The same in pages."""
