"""Where a connected store's loads end: in a caller's buffers or another target of his, or in pages of the
engine's pool."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore import copying
from tierstore.daemon.connected_hit import ConnectedHit
from tierstore.daemon.connected_load import ConnectedLoad, LocalPage, leading_equal
from tierstore.daemon.remote import Remote
from tierstore.index import Page, Tier
from tierstore.mover import Mover
from tierstore.store.endpoints import Buffers, PageTarget
from tierstore.store.load import Loaded
from tierstore.store.state import StoreState
from tierstore.tiers.hbm import HERE, Filling
from tierstore.transfer import TransferState


class BufferLoad(ConnectedLoad):
    """Into memory of the caller's."""

    def __init__(
        self,
        state: StoreState,
        remote: Remote,
        mover: Mover,
        hit: ConnectedHit,
        deadline_s: float | None,
        buffers: Buffers,
    ) -> None:
        super().__init__(state, remote, mover, hit, deadline_s)
        self._buffers = buffers  # keeps them alive: a caller may let go of what he has given

    def _take_local(self) -> list[LocalPage]:
        local = []
        for position, page in enumerate(self.hit.local):
            if page.copies[Tier.HBM] is None:
                break  # the lease has ended, and it has gone since
            self.state.index.lease(page, Tier.HBM)
            local.append(LocalPage(position, page))
        return local

    def _targets(self, first: int, count: int) -> Sequence[int]:
        return self._buffers.addresses[first : first + count]

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> Filling:
        copying.copy_all(zip(targets, addresses, strict=True), self.page_bytes)
        return HERE

    def _fill_checked(
        self, targets: Sequence[int], addresses: Sequence[int], checksums: Sequence[int]
    ) -> int:
        found = copying.copy_and_hash(zip(targets, addresses, strict=True), self.page_bytes)
        return leading_equal(found, checksums)  # whatever else was copied has not been loaded

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        assert self.state.pool is not None
        self.state.pool.read_pages(zip(places, targets, strict=True))

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        return Loaded(tokens, (), pages * self.page_bytes)


class TargetLoad(ConnectedLoad):
    """Pages ``first …`` of a hit, into whatever takes them."""

    def __init__(
        self,
        state: StoreState,
        remote: Remote,
        mover: Mover,
        hit: ConnectedHit,
        deadline_s: float | None,
        target: PageTarget,
        first: int,
    ) -> None:
        super().__init__(state, remote, mover, hit, deadline_s)
        self._target = target
        self._first = first
        self._arrived[:first] = [True] * first  # not wanted

    def _take_local(self) -> list[LocalPage]:
        assert self.state.pool is None, "pages of a pool are loaded into the pool"
        return []

    def _targets(self, first: int, count: int) -> Sequence[int]:
        return range(first, first + count)

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> Filling:
        self._target.write(list(zip(targets, addresses, strict=True)))
        return HERE

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        raise AssertionError("there is no pool")

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        return Loaded(tokens, (), max(pages - self._first, 0) * self.page_bytes)


class HbmLoad(ConnectedLoad):
    """Into the engine's page pool. Whole pages become cached copies that the caller shares; a page the hit
    ends inside of is copied to a private page, because the caller is going to write behind the match."""

    def __init__(
        self, state: StoreState, remote: Remote, mover: Mover, hit: ConnectedHit, deadline_s: float | None
    ) -> None:
        super().__init__(state, remote, mover, hit, deadline_s)
        self._hbm_pages = [-1] * self.pages
        self._reserved: dict[int, int] = {}  # position -> page of the pool
        self._chain: list[Page] = []  # the whole pages; the last is pinned: all stay in the tree
        self._moved = 0

    def _take_local(self) -> list[LocalPage]:
        state, question = self.state, self.hit.question
        page = state.root(question.identity, self.page_bytes)
        for position, key in enumerate(question.keys):
            page = state.index.add(page, key, question.chunk(position))
            self._chain.append(page)
            self._arrived[position] = self._share(position)
        if self._chain:
            state.index.pin(self._chain[-1])
        local = []
        tail = self.pages - 1
        if len(question.keys) < self.pages == len(self.hit.local):
            page = self.hit.local[tail]
            if page.copies[Tier.HBM] is not None:
                state.index.lease(page, Tier.HBM)
                local.append(LocalPage(tail, page))
        self._reserve()
        return local

    def _share(self, position: int) -> bool:
        """Take the HBM copy there is, if there is one."""
        page = self._chain[position]
        copy = page.copies[Tier.HBM]
        if copy is None or not copy.ready:
            return False
        self.state.index.lease(page, Tier.HBM)
        self._hbm_pages[position] = copy.place
        return True

    def _reserve(self) -> None:
        for position, here in enumerate(self._arrived):
            if not here:
                pages = self.state.room.hbm_pages(1)
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
        assert self.state.pool is not None
        self.state.pool.free(targets[good:])
        for position, hbm_page in enumerate(targets[:good], first):
            self._hbm_pages[position] = hbm_page
            self._arrived[position] = True
            self._moved += 1
            whole = position < len(self._chain)
            if whole and not self.state.hbm.publish(self._chain[position], hbm_page):
                self.state.pool.free([hbm_page])
                self._share(position)  # another load brought it meanwhile

    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> Filling:
        assert self.state.pool is not None
        return self.state.pool.start_writing(list(zip(targets, addresses, strict=True)))

    def _in_one_go(self, address: int) -> bool:
        assert self.state.pool is not None
        return self.state.pool.reaches(address)  # layer by layer: layer 0 of all pages is to come first

    def _came_late(self, pages: int) -> None:
        assert self.state.pool is not None
        self.state.pool.distrust(
            f"{pages} pages may be others': the daemon's lease ended while they were copied"
        )

    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        assert self.state.pool is not None
        self.state.pool.copy_pages(zip(targets, places, strict=True))

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        behind = [page for page in self._hbm_pages[pages:] if page >= 0]
        self.state.hbm.release([*behind, *self._reserved.values()])
        self._reserved.clear()
        if self._chain:
            self.state.index.unpin(self._chain[-1])
        return Loaded(tokens, tuple(self._hbm_pages[:pages]), self._moved * self.page_bytes)
