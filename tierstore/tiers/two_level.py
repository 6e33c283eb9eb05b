"""Allocation of one memory for pages of several layer groups: large pages are divided into small pages.

A separate pool for each layer group would need room for the most pages that this group can ever have, and
would often be partly empty. Here, the groups share one allocation, which is divided into *large pages* of one
size. A group takes a large page, divides it into small pages of its own size, and returns the large page when
all of its small pages are free. (Jenga, arXiv:2503.18292, has the same two levels, and measured how much
memory a single page size for all groups wastes.) ::

    large   [ A A A A ][ B ][ A A . . ][ (free) ][ B ]        A: pages of a window, B: of full attention
    small     0 1 2 3    0    8 9 ...

A large page has room for at least one page of every group. If its size were the least common multiple of the
page sizes, small pages would fill it completely. But only the owner of a large page can use the free small
pages in it, and small large pages have fewer of these. So :func:`cut` uses the smallest multiple of the
largest page in which no group wastes more than 1/25. Small pages have equal distances, so that a group's
pages are rows of one array. (For Gemma 3 27B, large pages with the bytes of 52 layers waste 5.3 % of all
memory, and large pages of the common multiple, 260 layers, waste 6.5 %.) :mod:`tierstore.tiers.group_pools`
allocates the memory itself, on a CPU or on a device.

The small pages of one sequence are kept together, because they are freed together. An allocation first uses
the large pages in which the sequence already has pages, and then whole large pages. The remaining pages go to
the large page with the fewest free small pages that has enough of them. ``check()`` verifies the bookkeeping.

>>> cut([1024, 3072])
Cut(large_bytes=3072, per_large=(3, 1))
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.tiers.large_pages import LargePages
from tierstore.units import format_size, round_up

_ALIGN = 64  # bytes: alignment of small pages
_MOST_LARGEST = 16  # a large page has room for at most 16 pages of the group with the largest pages
_LITTLE = 0.04  # a smaller unused share of a large page does not count


@dataclass(frozen=True, slots=True)
class Cut:
    """The size of a large page, and for each group the number of its small pages in a large page."""

    large_bytes: int
    per_large: tuple[int, ...]


def cut(page_bytes: Sequence[int]) -> Cut:
    """Return how large pages are divided into small pages of these sizes. A large page is about 1 to 16 times
    as large as the largest small page. A large page has the smallest such size in which every group wastes at
    most 4 %; if there is none, the size in which the worst group wastes least."""
    aligned = [-(-size // _ALIGN) * _ALIGN for size in page_bytes]
    cuts = [_even(max(aligned) * times, aligned) for times in range(1, _MOST_LARGEST + 1)]
    return min(cuts, key=lambda each: (max(_worst(each, aligned), _LITTLE), each.large_bytes))


def _even(large_bytes: int, sizes: Sequence[int]) -> Cut:
    """Return the division of a large page of about ``large_bytes`` into as many small pages as fit. The size
    is rounded up so that the small pages have equal, aligned distances."""
    per_large = tuple(large_bytes // size for size in sizes)
    return Cut(_rounded(large_bytes, per_large), per_large)


def large_bytes_for(page_bytes: Sequence[int], per_large: Sequence[int]) -> int:
    """Return the size of a large page with room for ``per_large`` pages of each of these sizes.

    >>> large_bytes_for([100, 300], (3, 1))
    384
    """
    sizes = zip(page_bytes, per_large, strict=True)
    return _rounded(max(round_up(size, _ALIGN) * count for size, count in sizes), per_large)


def _rounded(large_bytes: int, per_large: Sequence[int]) -> int:
    """Round up to a size that can be divided into each of these numbers of aligned pages."""
    return round_up(large_bytes, _ALIGN * math.lcm(*per_large))


def _worst(each: Cut, sizes: Sequence[int]) -> float:
    used = min(count * size for count, size in zip(each.per_large, sizes, strict=True))
    return 1 - used / each.large_bytes


class SmallPages:
    """Allocation of one group's pages of ``page_bytes`` bytes, in the large pages that the group has taken.
    Page ``p`` is in large page ``p // per_large``. Implements :class:`tierstore.tiers.large_pages.Books`. Not
    thread-safe: the caller must lock."""

    def __init__(self, large_pages: LargePages, per_large: int, page_bytes: int) -> None:
        self.large_pages = large_pages
        self.per_large = per_large
        self.page_bytes = page_bytes
        self.parts: dict[int, list[int]] = {}  # large page → its free small pages
        self._open: set[int] = set()  # large pages with free small pages
        self.free_parts = 0

    @property
    def free_pages(self) -> int:
        """Number of pages that can be allocated, including pages in free large pages."""
        return self.free_parts + self.large_pages.free * self.per_large

    @property
    def used_pages(self) -> int:
        return len(self.parts) * self.per_large - self.free_parts

    @property
    def taken(self) -> int:
        return len(self.parts)

    def allocate(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """Allocate ``count`` pages, or return None if fewer are free. ``near`` are pages that will be freed
        at about the same time, usually those of the same sequence, the newest last. Free pages in their large
        pages are used first, beginning with the newest page's."""
        taken: list[int] = []
        for page in reversed(near) if self._open else ():
            if len(taken) >= count:
                break
            if page // self.per_large in self._open:
                taken += self._take(page // self.per_large, count - len(taken))
        while len(taken) < count:
            chosen = self._choose(count - len(taken))
            if chosen is None:
                self.free(taken)
                return None
            taken += self._take(chosen, count - len(taken))
        return taken

    def _choose(self, count: int) -> int | None:
        """Return a large page from which up to ``count`` pages can be taken; None if no page is free."""
        fresh = self._open_fresh() if count >= self.per_large else None
        if fresh is not None:
            return fresh
        left = {number: len(self.parts[number]) for number in self._open}
        enough = [number for number in left if left[number] >= count]
        if enough:
            return min(enough, key=lambda number: left[number])
        return max(left, key=lambda number: left[number]) if left else self._open_fresh()

    def _open_fresh(self) -> int | None:
        taken = self.large_pages.take()
        if taken is not None:
            [number] = taken
            first = number * self.per_large
            self.parts[number] = list(range(first + self.per_large - 1, first - 1, -1))
            self._open.add(number)
            self.free_parts += self.per_large
            return number
        return None

    def _take(self, number: int, count: int) -> list[int]:
        parts = self.parts[number]
        taken = parts[max(len(parts) - count, 0) :][::-1]
        del parts[len(parts) - len(taken) :]
        self.free_parts -= len(taken)
        if not parts:
            self._open.discard(number)
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Free pages. Large pages that become empty are available to all groups."""
        for page in pages:
            number = page // self.per_large
            parts = self.parts[number]
            parts.append(page)
            self._open.add(number)
            self.free_parts += 1
            if len(parts) == self.per_large:
                del self.parts[number]
                self._open.discard(number)
                self.free_parts -= self.per_large
                self.large_pages.give([number])

    def emptied_by(self, pages: Iterable[int]) -> int:
        """Return how many large pages would become empty if these small pages, which are in use, were freed.
        The result is approximate if other threads free pages at the same time."""
        leaving = Counter(page // self.per_large for page in pages)
        parts = self.parts
        return sum(len(parts.get(number, ())) + count == self.per_large for number, count in leaving.items())


def books_of(page_bytes: Sequence[int], pages: Cut, large_pages: LargePages) -> tuple[SmallPages, ...]:
    """Return the allocators for pages of these sizes in ``large_pages``, which are divided as in
    ``pages``."""
    sizes = zip(page_bytes, pages.per_large, strict=True)
    return tuple(SmallPages(large_pages, per_large, size) for size, per_large in sizes)


def checked_cut(page_bytes: Sequence[int], nbytes: int) -> Cut:
    """Return :func:`cut` for these sizes. Raise :class:`UsageError` if ``nbytes`` are less than one large
    page."""
    pages = cut(page_bytes)
    if nbytes < pages.large_bytes:
        raise UsageError(
            f"a page pool of {format_size(nbytes)} is too small for a page of every layer group: "
            f"give at least {format_size(pages.large_bytes)}"
        )
    return pages


def check(groups: Sequence[SmallPages]) -> None:
    """Assert that each large page is free or has one owner, and that no page is counted twice."""
    owned = [number for group in groups for number in group.parts]
    assert len(set(owned)) == len(owned), "two groups have one large page"
    large = groups[0].large_pages
    large.check()
    assert not set(owned) & large.free_large, "a large page is free and has an owner"
    assert len(owned) + large.free == large.present, "a large page is lost"
    for group in groups:
        assert sum(map(len, group.parts.values())) == group.free_parts
        assert group._open == {number for number, parts in group.parts.items() if parts}
        assert all(len(set(parts)) == len(parts) < group.per_large for parts in group.parts.values())
