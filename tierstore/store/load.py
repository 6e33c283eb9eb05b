"""Loads: from whatever tier holds a page to HBM pages, to a caller's buffers, or (prefetch) to the host tier.

A load is cut into *pieces* of a few MiB in prefix order, each one task of the mover: decide under the lock,
read from disk into host slots, copy to the destination, report under the lock. A page that another piece is
reading right now is waited for, not read twice. When a page cannot be had (no room, damaged, gone) the load
is *cut* there: later pages would be useless without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierstore.index import Page, Tier
from tierstore.mover import Mover, Priority
from tierstore.store.endpoints import Buffers
from tierstore.store.hit import Hit
from tierstore.store.state import StoreState
from tierstore.transfer import Transfer, TransferState

_PIECE_BYTES = 16 << 20
_PIECE_PAGES = 256
_OTHERS_READ_S = 10.0  # how long a page that another load reads is waited for without a deadline of our own

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought: the first ``tokens`` tokens. ``pages`` are HBM pages, each owned once by the
    caller (none for buffers); ``moved_bytes`` is the payload that had to be copied."""

    tokens: int
    pages: tuple[int, ...] = ()
    moved_bytes: int = 0


@dataclass(slots=True)
class _Move:
    """One page on its way to the destination, held by a lease in ``tier``."""

    position: int
    page: Page
    tier: Tier


@dataclass(slots=True)
class _Batch:
    """What a piece does next: copies, reads, pages that other loads are reading; ``stop`` is the first page
    that has to wait."""

    moves: list[_Move]
    reads: list[_Move]
    others: list[tuple[int, Page]]
    stop: int


class _Load(ABC, Generic[R]):
    """What every load has in common; subclasses know their destination."""

    def __init__(self, state: StoreState, hit: Hit, deadline_s: float | None) -> None:
        self.state = state
        self.hit = hit
        self.pages = hit.pages
        self.closed = False  # settled: nothing that arrives now will be handed out
        self._arrived = [False] * len(self.pages)
        self._cut = len(self.pages)
        self._pieces = 0
        self._copying = 0
        self.page_bytes = self.pages[0].nbytes if self.pages else 1
        nbytes = len(self.pages) * self.page_bytes
        self.transfer: Transfer[R] = Transfer(
            self._settle, pages=len(self.pages), nbytes=nbytes, deadline_s=deadline_s, clock=state.clock
        )

    # -- what a destination decides ------------------------------------------------------------------

    @abstractmethod
    def _present(self, position: int, page: Page) -> bool:
        """Whether nothing has to be moved for this page (then it is taken note of). Under the lock."""

    @abstractmethod
    def _deliver(self, moves: list[_Move]) -> int:
        """Copy pages to the destination; how many got there. Ends every move's lease."""

    @abstractmethod
    def _result(self, state: TransferState, pages: int, tokens: int) -> R:
        """The outcome, ``pages`` being the contiguous prefix that arrived. Under the lock."""

    # -- running -------------------------------------------------------------------------------------

    def start(self, mover: Mover, priority: Priority) -> Transfer[R]:
        with self.state.lock:
            missing = self._take_present()
            self._reserve(missing)
            pieces = self._cut_into_pieces(missing[0]) if missing else []
            self._pieces = len(pieces)
        self.transfer.advance(len(self.pages) - len(missing), 0)
        if not pieces:
            self.transfer.finish()
        for start, stop in pieces:
            mover.submit(priority, lambda start=start, stop=stop: self._run(start, stop))  # type: ignore[misc]
        return self.transfer

    def _take_present(self) -> list[int]:
        """Take note of the pages that are where they should be. Returns the positions of the others."""
        self._arrived = [self._present(position, page) for position, page in enumerate(self.pages)]
        return [position for position, here in enumerate(self._arrived) if not here]

    def _reserve(self, missing: list[int]) -> None:
        """Take the room that the missing pages will need at the destination, or cut. Under the lock."""

    def _cut_into_pieces(self, first: int) -> list[tuple[int, int]]:
        pages = min(max(_PIECE_BYTES // self.page_bytes, 1), _PIECE_PAGES)
        return [(start, min(start + pages, self._cut)) for start in range(first, self._cut, pages)]

    def _run(self, start: int, stop: int) -> None:
        if not self.transfer.stopped and start < self._cut:
            moved = self._move(start, stop)
            self.transfer.advance(moved, moved * self.page_bytes)
        with self.state.lock:
            self._pieces -= 1
            last = self._pieces == 0
        if last:
            self.transfer.finish()

    def _move(self, start: int, stop: int) -> int:
        """Bring pages ``start … stop`` as far as possible; how many were moved. A host tier smaller than the
        piece is passed through in several batches."""
        moved = 0
        while start < min(stop, self._cut) and not self.transfer.stopped:
            batch = self._plan(start, stop)
            if batch.stop == start < self._cut and not self._wait_for_room():
                self._cut_at(start)
            moves = batch.moves + self._read(batch.reads) + self._await_others(batch.others)
            moves.sort(key=lambda move: move.position)
            moved += self._deliver(moves)
            with self.state.lock:
                self.state.in_transit -= len(batch.reads)
                self.state.changed.notify_all()
            start = batch.stop
        return moved

    def _plan(self, start: int, stop: int) -> _Batch:
        """Decide how pages from ``start`` on get here, as far as there is room, and hold what that needs."""
        batch = _Batch([], [], [], start)
        with self.state.lock:
            while batch.stop < stop and self._plan_page(batch.stop, batch):
                batch.stop += 1
            self.state.in_transit += len(batch.reads)
        return batch

    def _plan_page(self, position: int, batch: _Batch) -> bool:
        """One page: present already, to be copied, or to be read first. False when it has to wait or is
        gone."""
        page = self.pages[position]
        if self.closed:
            self._cut_at(position)
            return False
        if self._present(position, page):
            self._arrived[position] = True
            return True
        tier = page.ready_tier()
        on_host = page.copies[Tier.HOST]
        if tier is None:
            self._cut_at(position)
            return False
        if tier is not Tier.DISK:
            batch.moves.append(_Move(position, page, tier))
        elif on_host is None:
            if self.state.begin_host_fill(page) is None:
                return False
            self.state.loading.add(page)
            batch.reads.append(_Move(position, page, tier))
        elif page in self.state.loading:
            batch.others.append((position, page))
            return True
        else:
            self._cut_at(position)  # a save is about to bring it: not worth waiting behind write-behind
            return False
        self.state.index.lease(page, tier)
        return True

    def _wait_for_room(self) -> bool:
        """Wait until pages on their way through the host tier leave it. False when there are none to wait
        for."""
        timeout = self.transfer.remaining_s
        with self.state.lock:
            passing = self.state.in_transit
            return passing > 0 and self.state.changed.wait_for(
                lambda: self.state.in_transit < passing, _OTHERS_READ_S if timeout is None else timeout
            )

    def _read(self, reads: list[_Move]) -> list[_Move]:
        """Fill host slots from disk. Returns the moves that are now held in the host tier."""
        if not reads:
            return []
        state = self.state
        assert state.disk is not None
        assert state.host is not None
        with state.lock:
            wanted = [
                (record, state.host.view(state.index.copy(move.page, Tier.HOST).place, record.nbytes))
                for move in reads
                if (record := move.page.record) is not None
            ]
        good = state.disk.read(wanted)
        with state.lock:
            for move, ok in zip(reads, good, strict=True):
                state.loading.discard(move.page)
                state.end_host_fill(move.page, filled=ok)
                state.unlease(move.page, Tier.DISK)
                if not ok:
                    state.damaged(move.page)
                    self._cut_at(move.position)
            state.counters.disk_read_pages += sum(good)
        return [
            _Move(move.position, move.page, Tier.HOST) for move, ok in zip(reads, good, strict=True) if ok
        ]

    def _await_others(self, others: list[tuple[int, Page]]) -> list[_Move]:
        """Wait for pages that other loads are reading, and hold them."""
        state = self.state
        moves = []
        for position, page in others:
            timeout = self.transfer.remaining_s
            with state.lock:
                state.changed.wait_for(
                    lambda page=page: page not in state.loading,  # type: ignore[misc]
                    _OTHERS_READ_S if timeout is None else timeout,
                )
                copy = page.copies[Tier.HOST]
                if copy is None or not copy.ready:
                    self._cut_at(position)
                    break
                state.index.lease(page, Tier.HOST)
                moves.append(_Move(position, page, Tier.HOST))
        return moves

    def _cut_at(self, position: int) -> None:
        self._cut = min(self._cut, position)

    def _place(self, move: _Move) -> int:
        return self.state.index.copy(move.page, move.tier).place

    # -- ending --------------------------------------------------------------------------------------

    def _settle(self, state: TransferState) -> R:
        with self.state.lock:
            self.closed = True
            # Bytes may be on their way into memory that goes back to the caller now.
            self.state.changed.wait_for(lambda: not self._copying)
            pages = 0
            if state is not TransferState.CANCELLED:
                pages = next((i for i, here in enumerate(self._arrived) if not here), len(self.pages))
            tokens = self.hit.tokens if pages == len(self.pages) else pages * self.hit.chunk_tokens
            self.state.counters.loads_cut_short += tokens < self.hit.tokens
            self.state.counters.loaded_pages += pages
            return self._result(state, pages, tokens)


class _HostLoad(_Load[int]):
    """A prefetch: the destination is the host tier, and the hit's own lease follows the pages there."""

    def _present(self, position: int, page: Page) -> bool:
        tier = page.ready_tier()
        return tier is not None and tier is not Tier.DISK

    def _deliver(self, moves: list[_Move]) -> int:
        with self.state.lock:
            for move in moves:
                if not self.hit.lease.released:
                    self.state.move_lease(self.hit.lease, move.position, move.tier)
                self.state.unlease(move.page, move.tier)
                self._arrived[move.position] = True
        return len(moves)

    def _result(self, state: TransferState, pages: int, tokens: int) -> int:
        return tokens


class _BufferLoad(_Load[Loaded]):
    """Into memory of the caller's."""

    def __init__(self, state: StoreState, hit: Hit, deadline_s: float | None, buffers: Buffers) -> None:
        super().__init__(state, hit, deadline_s)
        self._buffers = buffers

    def _present(self, position: int, page: Page) -> bool:
        return False

    def _deliver(self, moves: list[_Move]) -> int:
        with self.state.lock:
            wanted = [] if self.closed else [(move, self._place(move)) for move in moves]
            self._copying += 1
        addresses = self._buffers.addresses
        copies = [(move.tier, place, addresses[move.position]) for move, place in wanted]
        self.state.copy_to_memory(copies, self.page_bytes)
        with self.state.lock:
            self._copying -= 1
            for move in moves:
                self.state.unlease(move.page, move.tier)
            for move, _ in wanted:
                self._arrived[move.position] = True
            self.state.changed.notify_all()
        return len(wanted)

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        self.state.release(self.hit.lease)
        return Loaded(tokens, (), pages * self.page_bytes)


class _HbmLoad(_Load[Loaded]):
    """Into the engine's page pool. Whole pages become cached copies that the caller shares; a page the hit
    ends inside of is copied to a private page, because the caller is going to write behind the match."""

    def __init__(self, state: StoreState, hit: Hit, deadline_s: float | None) -> None:
        super().__init__(state, hit, deadline_s)
        self._hbm_pages: list[int] = [-1] * len(self.pages)
        self._reserved: dict[int, int] = {}  # position -> page of the pool
        self._moved = 0

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
            self.state.release_hbm([unneeded])
        return True

    def _reserve(self, missing: list[int]) -> None:
        for position in missing:
            pages = self.state.hbm_pages(1)
            if pages is None:
                self._cut_at(position)
                return
            self._reserved[position] = pages[0]

    def _deliver(self, moves: list[_Move]) -> int:
        state = self.state
        with state.lock:
            # Once settled, what was reserved is no longer ours.
            wanted = [] if self.closed else [(move, self._reserved.pop(move.position)) for move in moves]
            copies = [(move.tier, self._place(move), page) for move, page in wanted]
        state.copy_to_hbm(copies)
        with state.lock:
            for move, hbm_page in wanted:
                self._arrive(move, hbm_page)
            for move in moves:
                state.unlease(move.page, move.tier)
        return len(wanted)

    def _arrive(self, move: _Move, hbm_page: int) -> None:
        state = self.state
        assert state.pool is not None
        if not self._private(move.position) and not state.publish(move.page, hbm_page):
            # Another load brought it meanwhile: share that copy.
            state.pool.free([hbm_page])
            state.index.lease(move.page, Tier.HBM)
            hbm_page = state.index.copy(move.page, Tier.HBM).place
        if self.closed:
            state.release_hbm([hbm_page])
            return
        self._hbm_pages[move.position] = hbm_page
        self._arrived[move.position] = True
        self._moved += 1

    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        behind = [page for page in self._hbm_pages[pages:] if page >= 0]
        self.state.release_hbm([*behind, *self._reserved.values()])
        self._reserved.clear()
        self.state.release(self.hit.lease)
        return Loaded(tokens, tuple(self._hbm_pages[:pages]), self._moved * self.page_bytes)


class Loader:
    """Starts loads."""

    def __init__(self, state: StoreState, mover: Mover) -> None:
        self._state = state
        self._mover = mover

    def prefetch(self, hit: Hit, *, deadline_s: float | None) -> Transfer[int]:
        return self._start(Priority.PREFETCH, lambda: _HostLoad(self._state, hit, deadline_s))

    def to_hbm(self, hit: Hit, *, deadline_s: float | None) -> Transfer[Loaded]:
        return self._start(Priority.LOAD, lambda: _HbmLoad(self._state, hit, deadline_s))

    def to_buffers(self, hit: Hit, buffers: Buffers, *, deadline_s: float | None) -> Transfer[Loaded]:
        return self._start(Priority.LOAD, lambda: _BufferLoad(self._state, hit, deadline_s, buffers))

    def _start(self, priority: Priority, make: Callable[[], _Load[R]]) -> Transfer[R]:
        return make().start(self._mover, priority)
