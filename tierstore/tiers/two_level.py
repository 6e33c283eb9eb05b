"""One memory for the pages of several layer groups: large pages, which are cut into small ones.

A pool for each layer group would have to be as large as its group may ever get, and be idle when another
group has the work. Here the groups share one allocation. It is cut into *large pages*, all of one size; a
group takes a large page, cuts it into small pages of its own size, and gives it back when all of them are
free. (The two levels are those of Jenga, arXiv:2503.18292, which measured what one page size for all wastes.)

::

    large   [ A A A A ][ B ][ A A . . ][ (free) ][ B ]        A: pages of a window, B: of full attention
    small     0 1 2 3    0    8 9 ...

A large page has room for at least one page of every group. Where the least common multiple of the page sizes
is not too large it is that, and nothing is wasted; otherwise it is the one, of some multiples of the largest
page, in which the worst group wastes least (:func:`cut`), and small pages are a little apart, evenly, so that
a group's pages are rows of one array.

Small pages are taken from the fullest large page of their group, so that the emptier ones become empty.
``check()`` holds the books against one another.

>>> cut([1024, 3072])
Cut(large_bytes=3072, per_large=(3, 1))
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.errors import UsageError
from tierstore.memory import Memory
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import PagePool
from tierstore.units import format_size

_ALIGN = 64  # bytes: where a small page may begin
_MOST_LARGEST = 16  # a large page has room for so many of the largest pages at most


@dataclass(frozen=True, slots=True)
class PoolWaste:
    """Where the bytes of a memory are. ``internal``: in large pages in use, beyond the small pages they are
    cut into. ``external``: small pages that are free, in large pages that others cannot have. The three and
    ``free`` (whole large pages) make up the memory."""

    used_bytes: int
    internal_bytes: int
    external_bytes: int
    free_bytes: int

    @property
    def share(self) -> float:
        """Wasted, of what is taken."""
        taken = self.used_bytes + self.internal_bytes + self.external_bytes
        return (self.internal_bytes + self.external_bytes) / taken if taken else 0.0


@dataclass(frozen=True, slots=True)
class Cut:
    """How large a large page is, and how many small ones of each group it has."""

    large_bytes: int
    per_large: tuple[int, ...]


def cut(page_bytes: Sequence[int]) -> Cut:
    """The large pages for small ones of these sizes: their least common multiple, if that is no more than 16
    of the largest; else about the multiple of the largest in which the worst of them wastes least."""
    aligned = [-(-size // _ALIGN) * _ALIGN for size in page_bytes]
    largest, common = max(aligned), math.lcm(*aligned)
    if common <= _MOST_LARGEST * largest:
        return Cut(common, tuple(common // size for size in aligned))
    cuts = [_even(largest * times, aligned) for times in range(1, _MOST_LARGEST + 1)]
    return min(cuts, key=lambda each: (_worst(each, aligned), each.large_bytes))


def _even(large_bytes: int, sizes: Sequence[int]) -> Cut:
    """So many pages as fit, and a large page that all of these numbers divide."""
    per_large = tuple(large_bytes // size for size in sizes)
    unit = _ALIGN * math.lcm(*per_large)
    return Cut(-(-large_bytes // unit) * unit, per_large)


def _worst(each: Cut, sizes: Sequence[int]) -> float:
    used = min(count * size for count, size in zip(each.per_large, sizes, strict=True))
    return 1 - used / each.large_bytes


class LargePages:
    """``count`` large pages of ``large_bytes`` bytes, and who has each. Not thread-safe by itself: taking and
    giving are single steps on lists, which the pools of several locks may do beside one another."""

    def __init__(self, large_bytes: int, count: int) -> None:
        self.large_bytes = large_bytes
        self.count = count
        self._free = list(range(count - 1, -1, -1))  # popped from the end: page 0 first

    @property
    def nbytes(self) -> int:
        return self.count * self.large_bytes

    @property
    def free(self) -> int:
        """Large pages that nobody has."""
        return len(self._free)

    def take(self) -> int | None:
        """One of them."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def give(self, page: int) -> None:
        """It is empty again."""
        self._free.append(page)


class SmallPages:
    """The books of one group: which pages of ``page_bytes`` bytes are free in the large pages that it has.
    Page ``p`` is in large page ``p // per_large``. Not thread-safe: its owner locks."""

    def __init__(self, large: LargePages, per_large: int, page_bytes: int) -> None:
        self.large = large
        self.per_large = per_large
        self.page_bytes = page_bytes
        self.parts: dict[int, list[int]] = {}  # by large page, its free small pages
        self._open: set[int] = set()  # large pages that have any
        self.free_parts = 0

    @property
    def free_pages(self) -> int:
        """Pages that could be had, those of large pages that nobody has included."""
        return self.free_parts + self.large.free * self.per_large

    @property
    def used_pages(self) -> int:
        return len(self.parts) * self.per_large - self.free_parts

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, from the fullest of its large pages first, or None if fewer are free."""
        taken: list[int] = []
        while self._open and len(taken) < count:
            number = min(self._open, key=lambda each: len(self.parts[each]))
            parts = self.parts[number]
            while parts and len(taken) < count:
                taken.append(parts.pop())
            if not parts:
                self._open.discard(number)
        self.free_parts -= len(taken)
        while len(taken) < count:
            fresh_large = self.large.take()
            if fresh_large is None:
                self.free(taken)
                return None
            first = fresh_large * self.per_large
            parts = list(range(first + self.per_large - 1, first - 1, -1))
            fresh = parts[max(len(parts) - (count - len(taken)), 0) :][::-1]
            del parts[len(parts) - len(fresh) :]
            self.parts[fresh_large] = parts
            self.free_parts += len(parts)
            if parts:
                self._open.add(fresh_large)
            taken += fresh
        return taken

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; large pages that are empty then are everybody's."""
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
                self.large.give(number)

    def emptied_by(self, pages: Iterable[int]) -> int:
        """How many large pages would be empty without these small ones, all of which are in use."""
        leaving = Counter(page // self.per_large for page in pages)
        return sum(len(self.parts[number]) + count == self.per_large for number, count in leaving.items())


def small_pages(page_bytes: Sequence[int], nbytes: int) -> tuple[SmallPages, ...]:
    """The books for pages of these sizes in ``nbytes`` bytes. Raises :class:`UsageError` where that is too
    little for a page of each."""
    pages = cut(page_bytes)
    if nbytes < pages.large_bytes:
        raise UsageError(
            f"a page pool of {format_size(nbytes)} has no room for a page of every layer group: "
            f"{format_size(pages.large_bytes)}"
        )
    large = LargePages(pages.large_bytes, nbytes // pages.large_bytes)
    sizes = zip(page_bytes, pages.per_large, strict=True)
    return tuple(SmallPages(large, per_large, size) for size, per_large in sizes)


class GroupPool(PagePool):
    """The pool of one layer group in a memory that others share. ``num_pages`` is how many there would be if
    it had all of it, ``free_pages`` how many it could have now."""

    def __init__(self, spec: KVSpec, small: SmallPages, memory: Memory) -> None:
        self.spec = spec
        self.device = "cpu"
        self.small = small
        large = small.large
        self.stride = large.large_bytes // small.per_large
        self.num_pages = large.count * small.per_large
        self._memory = memory
        self._start = memory.address
        rows = np.frombuffer(memory.view(0, large.nbytes), np.uint8)
        self.array = rows.reshape(self.num_pages, self.stride)[:, : spec.page_bytes]

    @property
    def free_pages(self) -> int:
        return self.small.free_pages

    @property
    def used_pages(self) -> int:
        return self.small.used_pages

    def allocate(self, count: int) -> list[int] | None:
        return self.small.allocate(count)

    def free(self, pages: Sequence[int]) -> None:
        self.small.free(pages)

    def _address(self, page: int) -> int:
        return self._start + page * self.stride


def fits(pools: Sequence[PagePool], counts: Sequence[int]) -> bool:
    """Whether so many pages of each group could be had at a time, if nothing else were held."""
    shared = [(pool.small, count) for pool, count in _shared(pools, counts)]
    large = sum(-(-count // small.per_large) for small, count in shared)
    most = max((small.large.count for small, _ in shared), default=0)
    return large <= most and all(count <= pool.num_pages for pool, count in zip(pools, counts, strict=True))


def _shared(pools: Sequence[PagePool], counts: Sequence[int]) -> list[tuple[GroupPool, int]]:
    pairs = zip(pools, counts, strict=True)
    return [(pool, count) for pool, count in pairs if isinstance(pool, GroupPool)]


def bytes_for(specs: Sequence[KVSpec], counts: Sequence[int]) -> int:
    """The memory in which so many pages of each of these layouts find room at a time."""
    pages = cut([spec.page_bytes for spec in specs])
    large = sum(-(-count // per_large) for count, per_large in zip(counts, pages.per_large, strict=True))
    return large * pages.large_bytes


def open_group_pools(specs: Sequence[KVSpec], nbytes: int) -> tuple[GroupPool, ...]:
    """Pools for these layouts (of one page each: :meth:`KVSpec.split`) in one memory of ``nbytes`` bytes,
    ordinary memory of this process. Raises :class:`UsageError` where that is too little for a page.

    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> full = LayerGroup(LayerKind.FULL_ATTENTION, (0, 1, 2), 1, 64)
    >>> window = LayerGroup(LayerKind.SLIDING_WINDOW, (3,), 1, 64, window=128)
    >>> first, second = open_group_pools(KVSpec((full, window), "float16").split(), 1 << 20)
    >>> first.num_pages, second.num_pages
    (21, 63)
    >>> pages = second.allocate(4)
    >>> first.free_pages, second.free_pages
    (19, 59)
    """
    small = small_pages([spec.page_bytes for spec in specs], nbytes)
    memory = Memory(small[0].large.nbytes, shared=False)
    memory.populate()
    return tuple(GroupPool(spec, each, memory) for spec, each in zip(specs, small, strict=True))


def waste(groups: Sequence[SmallPages]) -> PoolWaste:
    """Of the memory that these groups, all there are, share."""
    large = groups[0].large
    used = sum(group.used_pages * group.page_bytes for group in groups)
    external = sum(group.free_parts * group.page_bytes for group in groups)
    taken = sum(len(group.parts) for group in groups) * large.large_bytes
    return PoolWaste(used, taken - used - external, external, large.free * large.large_bytes)


def check(groups: Sequence[SmallPages]) -> None:
    """Assert that each large page is free or has one owner, and that no page is counted twice."""
    owned = [number for group in groups for number in group.parts]
    assert len(set(owned)) == len(owned), "two groups have one large page"
    assert not set(owned) & set(groups[0].large._free), "a large page is free and has an owner"
    assert len(owned) + groups[0].large.free == groups[0].large.count, "a large page is lost"
    for group in groups:
        assert sum(map(len, group.parts.values())) == group.free_parts
        assert group._open == {number for number, parts in group.parts.items() if parts}
        assert all(len(set(parts)) == len(parts) < group.per_large for parts in group.parts.values())
