"""Destinations of a load: the engine's pools, the caller's buffers, or the caller's own target."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore import copying
from tierstore.index import Page, Tier
from tierstore.store.buffers import Buffers, PageTarget
from tierstore.store.hit import HitPart
from tierstore.store.load import HbmCopy, Load, PartLoad, leading_equal
from tierstore.tiers.hbm import COMPLETED, PendingCopy


class IntoBuffers(PartLoad):
    """A load of one part into the caller's buffers."""

    def __init__(self, load: Load, part: HitPart, positions: range, buffers: Buffers) -> None:
        super().__init__(load, part, positions)
        self._buffers = buffers  # keeps the buffers alive, because the caller may drop its references
        self._place = _places(part)

    def _take_local(self) -> list[HbmCopy]:
        local = []
        for position, page in enumerate(self.part.local[: self.pages]):
            if page.copies[Tier.HBM] is None:
                break  # the lease has ended, and the page was evicted since then
            self.hbm.index.lease(page, Tier.HBM)
            local.append(HbmCopy(position, page))
        return local

    def _targets(self, first: int, count: int) -> Sequence[int]:
        if self._place is None:
            return self._buffers.addresses[first : first + count]
        return [self._buffers.addresses[self._place[at]] for at in range(first, first + count)]

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        copying.copy_all(zip(targets, addresses, strict=True), self.page_bytes)
        return COMPLETED

    def _fill_checked(
        self, targets: Sequence[int], addresses: Sequence[int], checksums: Sequence[int]
    ) -> int:
        found = copying.copy_and_hash(zip(targets, addresses, strict=True), self.page_bytes)
        return leading_equal(found, checksums)  # pages after a damaged page do not count as loaded

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        self.hbm.pool(self.part.group).read_pages(zip(places, targets, strict=True))

    def result(self, kept: Sequence[int]) -> tuple[int, ...]:
        return ()


def _places(part: HitPart) -> list[int] | None:
    """Return the number of the buffer for each page; None if pages and buffers have the same order. Buffers
    are in the order of the prompt's chunks, but the part's named pages in HBM come first."""
    if part.leading:
        return None
    order = sorted(range(part.num_pages), key=part.ends.__getitem__)
    places = [0] * len(order)
    for place, position in enumerate(order):
        places[position] = place
    return places


class IntoTarget(PartLoad):
    """A load of one part into the caller's own target."""

    def __init__(self, load: Load, part: HitPart, positions: range, target: PageTarget) -> None:
        super().__init__(load, part, positions)
        self._target = target

    def _take_local(self) -> list[HbmCopy]:
        assert not self.hbm.pools, "pages of a pool are loaded into the pool"
        return []

    def _targets(self, first: int, count: int) -> Sequence[int]:
        return range(first, first + count)

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        self._target.write(list(zip(targets, addresses, strict=True)))
        return COMPLETED

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        raise AssertionError("there is no pool")

    def result(self, kept: Sequence[int]) -> tuple[int, ...]:
        return ()


class IntoHbm(PartLoad):
    """A load of one part into the group's page pool. Whole pages become cached copies that the caller shares.
    If the hit ends inside a chained page, that page is copied to a private page, because the caller will
    write to the rest of it."""

    def __init__(self, load: Load, part: HitPart, positions: range) -> None:
        super().__init__(load, part, positions)
        self._group = part.group
        self._pool = self.hbm.pool(part.group)
        self._hbm_pages = [-1] * self.pages
        self._reserved: dict[int, int] = {}  # page of the pool for each missing page, by position
        self._pages_of: list[Page] = []  # the part's whole pages
        self._kept: list[Page] = []  # pages that are held, so that none of ``_pages_of`` leaves the tree
        self._moved = 0
        self._forgets = 0  # value of ``hbm.forgetting.times`` when this load began

    def _take_local(self) -> list[HbmCopy]:
        self._forgets = self.hbm.forgetting.times
        hbm, request = self.hbm, self.part.request
        root = page = hbm.root(request, self._group)
        for position, key in enumerate(request.keys[: self.pages]):
            page = hbm.index.add(request.parent(root, page), key, request.chunk(position))
            self._pages_of.append(page)
            if position >= self.first:
                self._arrived[position] = self._share(position)
        self._kept = request.holding(self._pages_of)
        for page in self._kept:
            hbm.index.hold(page)
        local = []
        tail = self.pages - 1
        if len(request.keys) < self.pages == len(self.part.local):
            page = self.part.local[tail]
            if page.copies[Tier.HBM] is not None:
                hbm.index.lease(page, Tier.HBM)
                local.append(HbmCopy(tail, page))
        self._reserve()
        return local

    def _share(self, position: int) -> bool:
        """Use the existing HBM copy of a page. Return False if there is none."""
        page = self._pages_of[position]
        copy = page.copies[Tier.HBM]
        if copy is None or not copy.ready:
            return False
        self.hbm.index.lease(page, Tier.HBM)
        self._hbm_pages[position] = copy.place
        return True

    def _reserve(self) -> None:
        missing = [position for position, here in enumerate(self._arrived) if not here]
        self.hbm.make_room(len(missing), self._group)
        for position in missing:
            pages = self.hbm.allocate_own(1, self._group, near=list(self._reserved.values())[-1:])
            if pages is None:
                self._cut = min(self._cut, position)
                return
            self._reserved[position] = pages[0]

    def _targets(self, first: int, count: int) -> Sequence[int]:
        targets = []
        for position in range(first, first + count):
            if position not in self._reserved:
                break
            targets.append(self._reserved.pop(position))
        return targets

    def _land(self, first: int, targets: Sequence[int], *, good: int) -> None:
        self._pool.free(targets[good:])
        for position, hbm_page in enumerate(targets[:good], first):
            self._hbm_pages[position] = hbm_page
            self._arrived[position] = True
            self._moved += 1
            # A page that may have been forgotten meanwhile stays private.
            if position < len(self._pages_of) and self.hbm.forgetting.times == self._forgets:
                self._publish(position, hbm_page)

    def _publish(self, position: int, hbm_page: int) -> None:
        """Publish a page that has arrived. If another load has published the page meanwhile, use that copy.
        The page stays private while something still holds a lost or forgotten copy of it."""
        if not self.hbm.publish(self._pages_of[position], hbm_page) and self._share(position):
            self._pool.free([hbm_page])

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> PendingCopy:
        return self._pool.start_writing(list(zip(targets, addresses, strict=True)))

    def _in_one_go(self, address: int) -> bool:
        # One copy of the whole batch runs layer by layer: the engine needs layer 0 of all pages first.
        return self._pool.overlaps and self._pool.reaches(address)

    def _came_late(self, pages: int) -> None:
        self._pool.invalidate(
            f"the lease ended during the copy of {pages} pages: they may have wrong content"
        )

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        self._pool.copy_pages(zip(targets, places, strict=True))

    def result(self, kept: Sequence[int]) -> tuple[int, ...]:
        if isinstance(kept, range):  # leading pages; the pages before the range are not part of this load
            pages = tuple(self._hbm_pages[kept.start : kept.stop])
            left = self._hbm_pages[kept.stop :]
        else:
            pages = tuple(self._hbm_pages[position] for position in kept)
            handed_out = set(kept)
            left = [page for at, page in enumerate(self._hbm_pages) if at not in handed_out]
        others = [page for page in left if page >= 0]
        self.hbm.release([*others, *self._reserved.values()], self._group)
        self._reserved.clear()
        for page in self._kept:
            self.hbm.index.unhold(page)
        return pages

    def moved_bytes(self, kept: Sequence[int]) -> int:
        return self._moved * self.page_bytes
