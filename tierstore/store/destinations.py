"""Where loads go: the host tier (a prefetch), a caller's buffers, the engine's HBM pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore import copying
from tierstore.index import Page, Tier
from tierstore.store.endpoints import Buffers
from tierstore.store.hit import EmbeddedHit
from tierstore.store.load_job import LoadJob, Move
from tierstore.store.state import StoreState
from tierstore.tiers.hbm import Filling
from tierstore.transfer import TransferState


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: the first ``tokens`` tokens. ``pages`` are HBM pages, each owned once by the
    caller (none for buffers); ``moved_bytes`` is the payload that had to be copied."""

    tokens: int
    pages: tuple[int, ...] = ()
    moved_bytes: int = 0


class HostLoad(LoadJob[int]):
    """A prefetch: the destination is the host tier, and the hit's own lease follows the pages there."""

    def _present(self, position: int, page: Page) -> bool:
        tier = page.ready_tier()
        return tier is not None and tier is not Tier.DISK

    def _deliver(self, moves: list[Move]) -> int:
        with self.state.lock:
            for move in moves:
                if not self.hit.lease.released:
                    self.state.leases.move(self.hit.lease, move.position, move.tier)
                self._arrived[move.position] = True
            self._unlease(moves)
        return len(moves)

    def _result(self, state: TransferState, pages: int, tokens: int) -> int:
        return tokens


class BufferLoad(LoadJob[Loaded]):
    """Into memory of the caller's."""

    def __init__(
        self, state: StoreState, hit: EmbeddedHit, deadline_s: float | None, buffers: Buffers
    ) -> None:
        super().__init__(state, hit, deadline_s)
        self._buffers = buffers

    def _present(self, position: int, page: Page) -> bool:
        return False

    def _deliver(self, moves: list[Move]) -> int:
        with self.state.lock:
            wanted = [] if self.closed else [(move, self._place(move)) for move in moves]
            self._copying += 1
        addresses = self._buffers.addresses
        copies = [(move.tier, place, addresses[move.position]) for move, place in wanted]
        _copy_to_memory(self.state, copies, self.page_bytes)
        with self.state.lock:
            self._copying -= 1
            self._unlease(moves)
            for move, _ in wanted:
                self._arrived[move.position] = True
            self.state.changed.notify_all()
        return len(wanted)

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        self.state.leases.release(self.hit.lease)
        return Loaded(tokens, (), pages * self.page_bytes)


class HbmLoad(LoadJob[Loaded]):
    """Into the engine's page pool. Whole pages become cached copies that the caller shares; a page the hit
    ends inside of is copied to a private page, because the caller is going to write behind the match."""

    def __init__(self, state: StoreState, hit: EmbeddedHit, deadline_s: float | None) -> None:
        super().__init__(state, hit, deadline_s)
        self._hbm_pages: list[int] = [-1] * len(self.pages)
        self._reserved: dict[int, int] = {}  # position -> page of the pool
        self._moved = 0
        self._at_once = 0  # pages before this position were in memory when the load began

    def _private(self, position: int) -> bool:
        tail_tokens = self.hit.match.tail_tokens
        return position == len(self.pages) - 1 and tail_tokens < self.hit.chunk_tokens

    def _present(self, position: int, page: Page) -> bool:
        copy = page.copies[Tier.HBM]
        if copy is None or not copy.ready or self._private(position):
            return False
        self.state.index.lease(page, Tier.HBM)
        self._hbm_pages[position] = copy.place
        unneeded = self._reserved.pop(position, None)
        if unneeded is not None:
            self.state.hbm.release([unneeded])
        return True

    def _reserve(self, missing: list[int]) -> None:
        for position in missing:
            pages = self.state.room.hbm_pages(1)
            if pages is None:
                self._cut_at(position)
                return
            self._reserved[position] = pages[0]

    def _cut_into_pieces(self, first: int) -> list[tuple[int, int]]:
        """On a device what is in memory is one piece, however large: it goes up layer by layer, and the
        engine begins with the first layer of all of it."""
        assert self.state.pool is not None
        self._at_once = first
        if self.state.pool.overlaps:
            while self._at_once < self._cut and self.pages[self._at_once].ready_tier() is not Tier.DISK:
                self._at_once += 1
        whole = [(first, self._at_once)] if self._at_once > first else []
        return whole + super()._cut_into_pieces(self._at_once)

    def _deliver(self, moves: list[Move]) -> int:
        state = self.state
        with state.lock:
            # Once settled, what was reserved is no longer ours.
            wanted = [] if self.closed else [(move, self._reserved.pop(move.position)) for move in moves]
            copies = [(move.tier, self._place(move), page) for move, page in wanted]
        fillings = _copy_to_hbm(state, copies)
        # Others wait for the host slots that pages from disk pass through.
        if not moves or moves[-1].position >= self._at_once:
            self._let_go(fillings, moves)
            moves = []
        with state.lock:
            for move, hbm_page in wanted:
                self._arrive(move, hbm_page)
        if moves:
            self._do(lambda: self._let_go(fillings, moves))
        return len(wanted)

    def _let_go(self, fillings: list[Filling], moves: list[Move]) -> None:
        """End the moves' leases as soon as nothing is copied from their pages any more."""
        for filling in fillings:
            filling.wait()
        with self.state.lock:
            self._unlease(moves)

    def _arrive(self, move: Move, hbm_page: int) -> None:
        state = self.state
        assert state.pool is not None
        if not self._private(move.position) and not state.hbm.publish(move.page, hbm_page):
            # Another load brought it meanwhile: share that copy.
            state.pool.free([hbm_page])
            state.index.lease(move.page, Tier.HBM)
            hbm_page = state.index.copy(move.page, Tier.HBM).place
        if self.closed:
            state.hbm.release([hbm_page])
            return
        self._hbm_pages[move.position] = hbm_page
        self._arrived[move.position] = True
        self._moved += 1

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        behind = [page for page in self._hbm_pages[pages:] if page >= 0]
        self.state.hbm.release([*behind, *self._reserved.values()])
        self._reserved.clear()
        self.state.leases.release(self.hit.lease)
        return Loaded(tokens, tuple(self._hbm_pages[:pages]), self._moved * self.page_bytes)


# The bytes, without the lock: the caller holds leases.


def _copy_to_memory(state: StoreState, copies: Sequence[tuple[Tier, int, int]], page_bytes: int) -> None:
    """Copy pages of the HBM and host tiers to host memory: (tier, place, address)."""
    if state.pool is not None:
        state.pool.read_pages((place, address) for tier, place, address in copies if tier is Tier.HBM)
    if state.host is not None:
        start = state.host.address(0)
        pairs = ((address, start + place) for tier, place, address in copies if tier is Tier.HOST)
        copying.copy_all(pairs, page_bytes)


def _copy_to_hbm(state: StoreState, copies: Sequence[tuple[Tier, int, int]]) -> list[Filling]:
    """Copy pages of the HBM and host tiers into pages of the pool: (tier, place, HBM page). Where they came
    from must be held until all of the result has been waited for."""
    assert state.pool is not None
    within = [(page, place) for tier, place, page in copies if tier is Tier.HBM]
    fillings = [state.pool.start_copying(within)]
    if state.host is not None:
        start = state.host.address(0)
        up = [(page, start + place) for tier, place, page in copies if tier is Tier.HOST]
        fillings.append(state.pool.start_writing(up))
    return fillings
