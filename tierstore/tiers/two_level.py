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
from collections.abc import Sequence
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


class GroupPool(PagePool):
    """The pool of one layer group in a memory that others share. ``num_pages`` is how many there would be if
    it had all of it, ``free_pages`` how many it could have now. Page ``p`` is in large page
    ``p // per_large``."""

    def __init__(self, spec: KVSpec, large: LargePages, per_large: int, memory: Memory) -> None:
        self.spec = spec
        self.device = "cpu"
        self.large = large
        self.per_large = per_large
        self.stride = large.large_bytes // per_large
        self.num_pages = large.count * per_large
        self._memory = memory
        self._start = memory.address
        rows = np.frombuffer(memory.view(0, large.count * large.large_bytes), np.uint8)
        self.array = rows.reshape(self.num_pages, self.stride)[:, : spec.page_bytes]
        self._parts: dict[int, list[int]] = {}  # by large page of this group, its free small pages
        self._free_parts = 0

    @property
    def free_pages(self) -> int:
        return self._free_parts + self.large.free * self.per_large

    @property
    def own_free_pages(self) -> int:
        """Free pages in large pages that it has already."""
        return self._free_parts

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages, from the fullest of its large pages first, or None if fewer are free."""
        taken: list[int] = []
        for number in sorted(self._parts, key=lambda each: len(self._parts[each])):
            if len(taken) == count:
                break
            parts = self._parts[number]
            while parts and len(taken) < count:
                taken.append(parts.pop())
        self._free_parts -= len(taken)
        while len(taken) < count:
            fresh_large = self.large.take()
            if fresh_large is None:
                self.free(taken)
                return None
            first = fresh_large * self.per_large
            parts = list(range(first + self.per_large - 1, first - 1, -1))
            fresh = parts[max(len(parts) - (count - len(taken)), 0) :][::-1]
            del parts[len(parts) - len(fresh) :]
            self._parts[fresh_large] = parts
            self._free_parts += len(parts)
            taken += fresh
        return taken

    def free(self, pages: Sequence[int]) -> None:
        for page in pages:
            number = page // self.per_large
            parts = self._parts[number]
            parts.append(page)
            self._free_parts += 1
            if len(parts) == self.per_large:
                del self._parts[number]
                self._free_parts -= self.per_large
                self.large.give(number)

    def _address(self, page: int) -> int:
        return self._start + page * self.stride

    @property
    def large_pages(self) -> int:
        """Large pages that it has."""
        return len(self._parts)

    @property
    def used_pages(self) -> int:
        """Pages that are allocated."""
        return len(self._parts) * self.per_large - self._free_parts


def fits(pools: Sequence[PagePool], counts: Sequence[int]) -> bool:
    """Whether so many pages of each group could be had at a time, if nothing else were held."""
    large = sum(-(-count // pool.per_large) for pool, count in _shared(pools, counts))
    most = max((pool.large.count for pool, _ in _shared(pools, counts)), default=0)
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
    pages = cut([spec.page_bytes for spec in specs])
    if nbytes < pages.large_bytes:
        raise UsageError(
            f"a page pool of {format_size(nbytes)} has no room for a page of every layer group: "
            f"{format_size(pages.large_bytes)}"
        )
    large = LargePages(pages.large_bytes, nbytes // pages.large_bytes)
    memory = Memory(large.count * large.large_bytes, shared=False)
    memory.populate()
    counts = zip(specs, pages.per_large, strict=True)
    return tuple(GroupPool(spec, large, per_large, memory) for spec, per_large in counts)


def waste(pools: Sequence[GroupPool]) -> PoolWaste:
    """Of the memory that these pools, all there are, share."""
    large = pools[0].large
    used = sum(pool.used_pages * pool.spec.page_bytes for pool in pools)
    external = sum(pool.own_free_pages * pool.spec.page_bytes for pool in pools)
    taken = sum(pool.large_pages for pool in pools) * large.large_bytes
    return PoolWaste(used, taken - used - external, external, large.free * large.large_bytes)


def check(pools: Sequence[GroupPool]) -> None:
    """Assert that each large page is free or has one owner, and that no page is counted twice."""
    owned = [number for pool in pools for number in pool._parts]
    assert len(set(owned)) == len(owned), "two groups have one large page"
    assert not set(owned) & set(pools[0].large._free), "a large page is free and has an owner"
    assert len(owned) + pools[0].large.free == pools[0].large.count, "a large page is lost"
    for pool in pools:
        assert sum(map(len, pool._parts.values())) == pool._free_parts
        assert all(len(set(parts)) == len(parts) < pool.per_large for parts in pool._parts.values())
