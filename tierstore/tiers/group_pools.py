"""The pools of a model's layer groups, which share one memory (:mod:`tierstore.tiers.two_level`).

On a CPU, this is ordinary memory. On a device, it is one allocation or, if it may grow, memory that is mapped
in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierstore.errors import UsageError
from tierstore.spec import KVSpec
from tierstore.tiers.device import Device, DeviceMemoryError, Stream
from tierstore.tiers.hbm import HostRegion, PagePool
from tierstore.tiers.large_pages import WholePages
from tierstore.tiers.two_level import books_of, checked_cut, cut
from tierstore.units import format_size


def open_group_pools(
    specs: Sequence[KVSpec],
    nbytes: int,
    *,
    most_bytes: int | None = None,
    device: Device | None = None,
    layered_bytes: int | None = None,
    compute: Stream | None = None,
    shared_parts: int = 0,
) -> tuple[PagePool, ...]:
    """Open pools for these layouts (of one layer group each: :meth:`KVSpec.split`) in one memory of
    ``nbytes`` bytes on ``device`` (None: in this process). :meth:`PagePool.resize` of any of the pools can
    grow the memory to ``most_bytes``. Loads of ``layered_bytes`` or more to a device are copied layer by
    layer (None: the default size). ``compute`` is the stream for computation on a device (None: a new one).
    With ``shared_parts``, other processes can map memory of this process (:func:`attach_group_pools`).

    Raise :class:`UsageError` if ``nbytes`` are too few for one page of each pool, or more than are free.

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
    page_bytes = [spec.page_bytes for spec in specs]
    pages = checked_cut(page_bytes, nbytes)
    present = nbytes // pages.large_bytes
    most = None if most_bytes is None else most_bytes // pages.large_bytes
    if device is None:
        region = HostRegion(pages.large_bytes, present, most=most, shared_parts=shared_parts)
        books = books_of(page_bytes, pages, region.large_pages)
        return tuple(PagePool.within(spec, region, each) for spec, each in zip(specs, books, strict=True))
    from tierstore.tiers.device_pool import LAYERED_BYTES, DevicePool  # import only if there is a device
    from tierstore.tiers.device_region import DeviceRegion

    try:
        on_device = DeviceRegion(device, pages.large_bytes, present, most=most, compute=compute)
    except DeviceMemoryError as error:
        memory = device.memory()
        raise UsageError(
            f"a page pool of {format_size(nbytes)} does not fit {device.name}: {format_size(memory.free)} of "
            f"its {format_size(memory.total)} are free"
        ) from error
    layered = LAYERED_BYTES if layered_bytes is None else layered_bytes
    return tuple(
        DevicePool.within(spec, on_device, each, layered_bytes=layered)
        for spec, each in zip(specs, books_of(page_bytes, pages, on_device.large_pages), strict=True)
    )


def attach_group_pools(
    specs: Sequence[KVSpec], fd: int, large_bytes: int, count: int, *, first: int = 0
) -> list[PagePool]:
    """Return pools for reading and writing pages in the shared memory of another process's pools: in
    ``count`` large pages from ``first`` on. ``fd`` is the shared memory, and is closed later. Page 0 is the
    first page of large page ``first``. Only the other process knows which pages are free. Raise
    :class:`UsageError` if the memory cannot be mapped."""
    region = HostRegion.attach(fd, large_bytes, count, first=first)
    if len(specs) == 1:
        return [PagePool.within(specs[0], region, WholePages(region.large_pages))]
    sizes = [spec.page_bytes for spec in specs]
    books = books_of(sizes, cut(sizes), region.large_pages)
    return [PagePool.within(spec, region, each) for spec, each in zip(specs, books, strict=True)]


def bytes_for(specs: Sequence[KVSpec], counts: Sequence[int]) -> int:
    """Return the bytes of a memory with room for ``counts`` pages of each of these layouts."""
    if len(specs) == 1:
        return specs[0].page_bytes * counts[0]
    pages = cut([spec.page_bytes for spec in specs])
    large = sum(-(-count // per_large) for count, per_large in zip(counts, pages.per_large, strict=True))
    return large * pages.large_bytes


def room_for(
    pools: Sequence[PagePool], counts: Sequence[int], idle: Sequence[int], idle_large: Callable[[int], int]
) -> bool:
    """Return whether ``counts`` more pages of each of a model's pools can be allocated together.

    ``idle`` is the number of cached pages of each pool that may be evicted. ``idle_large(group)`` returns how
    many large pages their eviction would empty. ``idle_large`` is called only if there are too few free large
    pages.

    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> full = LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, 64)
    >>> window = LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 1, 64, window=128)
    >>> pools = open_group_pools(KVSpec((full, window), "float16").split(), 16 << 10)
    >>> [pool.free_pages for pool in pools]
    [1, 1]
    >>> room_for(pools, [1, 0], [0, 0], lambda group: 0), room_for(pools, [1, 1], [0, 0], lambda group: 0)
    (True, False)
    """
    missing: dict[int, int] = {}  # number of needed large pages, by the id of the pools' memory
    free = {id(pool.large_pages): pool.large_pages.free for pool in pools}
    spare = []
    for pool, count, leaving in zip(pools, counts, idle, strict=True):
        books, memory = pool.books, id(pool.large_pages)
        own = books.free_pages - books.large_pages.free * books.per_large + leaving
        missing[memory] = missing.get(memory, 0) - (-max(count - own, 0) // books.per_large)
        spare.append(max(own - count, 0) // books.per_large)
    for group, most in enumerate(spare):
        memory = id(pools[group].large_pages)
        if most and missing[memory] > free[memory]:
            free[memory] += min(most, idle_large(group))
    return all(missing[memory] <= free[memory] for memory in missing)


def fits(pools: Sequence[PagePool], counts: Sequence[int], *, large_pages: int | None = None) -> bool:
    """Return whether ``counts`` pages of each of a model's pools fit into their memory together, if no other
    pages are in use. The memory has its target size, or ``large_pages`` large pages.

    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> spec = KVSpec.uniform(layers=1, kv_heads=1, head_dim=64, dtype="float16")
    >>> pools = open_group_pools([spec], 32 << 10)
    >>> fits(pools, [2]), fits(pools, [3]), fits(pools, [1], large_pages=0)
    (True, False, False)
    """
    large: dict[int, int] = {}
    for pool, count in zip(pools, counts, strict=True):
        memory = id(pool.large_pages)
        large[memory] = large.get(memory, 0) - (-count // pool.books.per_large)
    targets = {id(pool.large_pages): pool.large_pages.target for pool in pools}
    most = {memory: targets[memory] if large_pages is None else large_pages for memory in large}
    return all(count <= most[memory] for memory, count in large.items())
