"""Loads: from whatever tier holds a page to HBM pages, to a caller's buffers, or (prefetch) to the host tier.

A load is cut into *pieces* of a few MiB in prefix order, each one task of the mover: decide under the lock,
read from disk into host slots, copy to the destination, report under the lock. A page that another piece is
reading right now is waited for, not read twice. When a page cannot be had (no room, damaged, gone, the disk
failed) the load is *cut* there: later pages would be useless without it.

A piece that begins in memory is a task of the memory lane, and moves to the disk lane when it comes to a page
that is only on disk. So what is in memory arrives, whatever becomes of the rest. When the disk stops
answering, the loads that wait for it are ended by whoever notices (``lookout.py``); the reads that hang keep
their host slots and leases until they return, and are of use to later loads then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from tierstore.index import Page, Tier
from tierstore.mover import Lane, Mover, Priority
from tierstore.store.hit import EmbeddedHit
from tierstore.store.state import StoreState
from tierstore.tiers.disk import PageRead
from tierstore.transfer import Transfer, TransferState

_PIECE_BYTES = 16 << 20
_PIECE_PAGES = 256
_OTHERS_READ_S = 10.0  # how long a page that another load reads is waited for without a deadline of our own

R = TypeVar("R")


@dataclass(slots=True)
class Move:
    """One page on its way to the destination, held by a lease in ``tier``."""

    position: int
    page: Page
    tier: Tier


@dataclass(slots=True)
class _Batch:
    """What a piece does next: copies, reads, pages that other loads are reading; ``stop`` is the first page
    that has to wait."""

    moves: list[Move]
    reads: list[Move]
    others: list[tuple[int, Page]]
    stop: int


class LoadJob(ABC, Generic[R]):
    """What every load has in common; subclasses know their destination."""

    def __init__(self, state: StoreState, hit: EmbeddedHit, deadline_s: float | None) -> None:
        self.state = state
        self.hit = hit
        self.pages = hit.pages
        self.closed = False  # settled: nothing that arrives now will be handed out
        self._arrived = [False] * len(self.pages)
        self._cut = len(self.pages)
        self._pieces = 0
        self._copying = 0
        self._do: Callable[..., None] = _not_started  # gives the mover a task
        self.page_bytes = self.pages[0].nbytes if self.pages else 1
        nbytes = len(self.pages) * self.page_bytes
        self.transfer: Transfer[R] = Transfer(
            self._settle,
            pages=len(self.pages),
            nbytes=nbytes,
            deadline_s=deadline_s,
            clock=state.clock,
            look=state.lookout.look if state.disk is not None else None,
        )

    # -- what a destination decides ------------------------------------------------------------------

    @abstractmethod
    def _present(self, position: int, page: Page) -> bool:
        """Whether nothing has to be moved for this page (then it is taken note of). Under the lock."""

    @abstractmethod
    def _deliver(self, moves: list[Move]) -> int:
        """Copy pages to the destination; how many got there. Ends every move's lease."""

    @abstractmethod
    def _result(self, state: TransferState, pages: int, tokens: int) -> R:
        """The outcome, ``pages`` being the contiguous prefix that arrived. Under the lock."""

    # -- running -------------------------------------------------------------------------------------

    def start(self, mover: Mover, priority: Priority) -> Transfer[R]:
        self._do = partial(mover.submit, priority)
        with self.state.lock:
            missing = self._take_present()
            self._reserve(missing)
            pieces = self._cut_into_pieces(missing[0]) if missing else []
            self._pieces = len(pieces)
            lanes = [self._lane(start) for start, _ in pieces]
        self.transfer.advance(len(self.pages) - len(missing), 0)
        if not pieces:
            self.transfer.finish()
        for (start, stop), lane in zip(pieces, lanes, strict=True):
            self._submit(start, stop, lane)
        return self.transfer

    def _submit(self, start: int, stop: int, lane: Lane) -> None:
        self._do(lambda: self._run(start, stop, lane), lane=lane)

    def _take_present(self) -> list[int]:
        """Take note of the pages that are where they should be. Returns the positions of the others."""
        self._arrived = [self._present(position, page) for position, page in enumerate(self.pages)]
        return [position for position, here in enumerate(self._arrived) if not here]

    def _reserve(self, missing: list[int]) -> None:
        """Take the room that the missing pages will need at the destination, or cut. Under the lock."""

    def _cut_into_pieces(self, first: int) -> list[tuple[int, int]]:
        pages = min(max(_PIECE_BYTES // self.page_bytes, 1), _PIECE_PAGES)
        return [(start, min(start + pages, self._cut)) for start in range(first, self._cut, pages)]

    def _lane(self, position: int) -> Lane:
        """Where to bring a page from here on. Under the lock."""
        if self.pages[position].ready_tier() is not Tier.DISK or not self.state.health.readable:
            return Lane.MEMORY
        self.state.lookout.waiting.add(self.transfer)
        return Lane.DISK

    def _run(self, start: int, stop: int, lane: Lane) -> None:
        if not self.transfer.stopped and start < self._cut:
            moved, start = self._move(start, stop, lane)
            self.transfer.advance(moved, moved * self.page_bytes)
            if start < min(stop, self._cut) and not self.transfer.stopped:
                self._submit(start, stop, Lane.DISK)
                return
        with self.state.lock:
            self._pieces -= 1
            last = self._pieces == 0
        if last:
            self.transfer.finish()

    def _move(self, start: int, stop: int, lane: Lane) -> tuple[int, int]:
        """Bring pages ``start … stop`` as far as possible in this lane: how many were moved, and where that
        ended. A host tier smaller than the piece is passed through in several batches."""
        moved = 0
        while start < min(stop, self._cut) and not self.transfer.stopped:
            batch = self._plan(start, stop, lane)
            if batch.stop == start < self._cut:
                if lane is Lane.MEMORY:
                    break
                if not self._wait_for_room():
                    self._cut_at(start)
            moves = batch.moves + self._read(batch.reads) + self._await_others(batch.others)
            moves.sort(key=lambda move: move.position)
            moved += self._deliver(moves)
            with self.state.lock:
                self.state.fills.in_transit -= len(batch.reads)
                self.state.changed.notify_all()
            start = batch.stop
        return moved, start

    def _plan(self, start: int, stop: int, lane: Lane) -> _Batch:
        """Decide how pages from ``start`` on get here, as far as there is room and the lane goes, and hold
        what that needs."""
        batch = _Batch([], [], [], start)
        with self.state.lock:
            while batch.stop < stop and self._plan_page(batch.stop, batch, lane):
                batch.stop += 1
            self.state.fills.in_transit += len(batch.reads)
        return batch

    def _plan_page(self, position: int, batch: _Batch, lane: Lane) -> bool:
        """One page: present already, to be copied, or to be read first. False when it has to wait, is gone,
        or is for another lane."""
        page = self.pages[position]
        if self.closed:
            self._cut_at(position)
            return False
        if self._present(position, page):
            self._arrived[position] = True
            return True
        tier = page.ready_tier()
        on_host = page.copies[Tier.HOST]
        if tier is None or (tier is Tier.DISK and not self.state.health.readable):
            self._cut_at(position)
            return False
        if tier is not Tier.DISK:
            batch.moves.append(Move(position, page, tier))
        elif lane is Lane.MEMORY:
            self.state.lookout.waiting.add(self.transfer)
            return False
        elif on_host is None:
            if self.state.fills.begin(page) is None:
                return False
            self.state.fills.loading.add(page)
            batch.reads.append(Move(position, page, tier))
        elif page in self.state.fills.loading:
            batch.others.append((position, page))
            return True
        else:
            self._cut_at(position)  # a save is about to bring it: not worth waiting behind write-behind
            return False
        self.state.index.lease(page, tier)
        return True

    def _wait_for_room(self) -> bool:
        """Wait until pages on their way through the host tier leave it. False when there are none."""
        timeout = self.transfer.remaining_s
        with self.state.lock:
            passing = self.state.fills.in_transit
            return passing > 0 and self.state.changed.wait_for(
                lambda: self.state.fills.in_transit < passing or self.state.health.stalled,
                _OTHERS_READ_S if timeout is None else timeout,
            )

    def _read(self, reads: list[Move]) -> list[Move]:
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
        read = state.disk.read(wanted)
        outcomes = list(zip(reads, read.outcomes, strict=True))
        good = [move for move, outcome in outcomes if outcome is PageRead.GOOD]
        bad = [move for move, outcome in outcomes if outcome is not PageRead.GOOD]
        with state.lock:
            state.fills.loading.difference_update([move.page for move in reads])
            state.fills.complete([move.page for move in good], let_go=False)
            state.fills.give_up(move.page for move in bad)
            state.leases.unlease_all([move.page for move in reads], Tier.DISK)
            for move in bad:
                self._cut_at(move.position)
            for move, outcome in outcomes:
                if outcome is PageRead.DAMAGED:
                    state.holdings.damaged_on_disk(move.page)
            state.was_read(read)
        state.lookout.look()
        return [Move(move.position, move.page, Tier.HOST) for move in good]

    def _await_others(self, others: list[tuple[int, Page]]) -> list[Move]:
        """Wait for pages that other loads are reading, and hold them."""
        state = self.state
        moves = []
        for position, page in others:
            timeout = self.transfer.remaining_s
            with state.lock:
                state.changed.wait_for(
                    lambda page=page: page not in state.fills.loading or state.health.stalled,  # type: ignore[misc]
                    _OTHERS_READ_S if timeout is None else timeout,
                )
                copy = page.copies[Tier.HOST]
                if copy is None or not copy.ready:
                    self._cut_at(position)
                    break
                state.index.lease(page, Tier.HOST)
                moves.append(Move(position, page, Tier.HOST))
        return moves

    def _cut_at(self, position: int) -> None:
        self._cut = min(self._cut, position)

    def _unlease(self, moves: Sequence[Move]) -> None:
        """The end of these moves' leases. Under the lock."""
        self.state.leases.unlease_held([(move.page, move.tier) for move in moves])

    def _place(self, move: Move) -> int:
        return self.state.index.copy(move.page, move.tier).place

    # -- ending --------------------------------------------------------------------------------------

    def _settle(self, state: TransferState) -> R:
        with self.state.lock:
            self.closed = True
            self.state.lookout.waiting.discard(self.transfer)
            # Bytes may be on their way into memory that goes back to the caller now.
            self.state.changed.wait_for(lambda: not self._copying)
            pages = 0
            if state is not TransferState.CANCELLED:
                pages = next((i for i, here in enumerate(self._arrived) if not here), len(self.pages))
            tokens = self.hit.tokens if pages == len(self.pages) else pages * self.hit.chunk_tokens
            self.state.counters.loads_cut_short += tokens < self.hit.tokens
            self.state.counters.loaded_pages += pages
            return self._result(state, pages, tokens)


def _not_started(task: Callable[[], None]) -> None:
    raise AssertionError("the load was not started")
