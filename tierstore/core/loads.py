"""Loads from disk into the host tier. Each page is read once, even if several loads want it.

A load is split into *pieces* of up to 16 MiB in prefix order. Each piece is one task of the mover: it decides
under the lock, reads from disk into host slots, and reports under the lock. If another load already reads a
page, the load waits for it instead of reading the page twice. If a page cannot be loaded (no room, damaged,
evicted, a disk error), the load is *cut* before that page, because the later pages would be useless.

A hit can be larger than the host tier. The host tier may then be full of the hit's later pages, or of pages
that were copied already. The load then releases its holds on pages that are also on disk, because the leading
pages are needed first.

When the disk stops answering, the stall detector (``health.py``) ends the loads that wait for it. Reads that
hang keep their host slots and leases until they return. Pages that such a read has loaded can still be used
by later loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tierstore.core.state import StoreState
from tierstore.index import Page, Tier
from tierstore.index.leases import PageLease
from tierstore.mover import Lane, Mover, Priority
from tierstore.tiers.disk import PageRead
from tierstore.transfer import Transfer, TransferState

_PIECE_BYTES = 16 << 20
_PIECE_PAGES = 256
_OTHERS_READ_S = 10.0  # longest wait of a load without a deadline for a page that another load reads
_COPIED_S = 2.0  # longest wait for clients to copy pages out of the host tier, which takes milliseconds

R = TypeVar("R")


@dataclass(slots=True)
class _DiskMove:
    """One page of a load, held by a lease in ``tier``."""

    position: int
    page: Page
    tier: Tier


@dataclass(slots=True)
class _MoveBatch:
    """The next step of a piece: ``moves`` has pages in host memory, ``reads`` has pages to read, and
    ``others`` has pages that other loads read. ``stop`` is the position of the first page that has to
    wait."""

    moves: list[_DiskMove]
    reads: list[_DiskMove]
    others: list[tuple[int, Page]]
    stop: int


class HostLoad(Generic[R]):
    """A load of ``pages`` into the host tier.

    ``lease`` holds ``pages``, in this order, in their present tiers. The load moves these holds to the host
    tier. ``result`` is called once, at the end, under the state's lock and before the lease is released.
    """

    def __init__(
        self,
        state: StoreState,
        mover: Mover,
        pages: Sequence[Page],
        lease: PageLease,
        *,
        deadline_s: float | None,
        priority: Priority,
        result: Callable[[], R],
        release_holds: Callable[[], bool] = lambda: False,
    ) -> None:
        """``release_holds`` releases other holds on host tier pages, under the lock, and returns whether
        there were any."""
        self._release_holds = release_holds
        self._state = state
        self._mover = mover
        self._pages = pages
        self._lease = lease
        self._priority = priority
        self._result = result
        self._closed = False  # if true, pages that arrive are not held
        self._cut = len(pages)
        self._pieces = 0
        self.page_bytes = pages[0].nbytes if pages else 1
        self.transfer: Transfer[R] = Transfer(
            self._settle,
            pages=len(pages),
            nbytes=len(pages) * self.page_bytes,
            deadline_s=deadline_s,
            clock=state.clock,
            look=state.stall_detector.poll if state.disk is not None else None,
        )

    def start(self) -> Transfer[R]:
        state = self._state
        with state.lock:
            first = next((at for at, page in enumerate(self._pages) if not _in_host(page)), self._cut)
            pages = min(max(_PIECE_BYTES // self.page_bytes, 1), _PIECE_PAGES)
            starts = range(first, self._cut, pages)
            self._pieces = len(starts)
            state.queued_reads += (self._cut - first) * self.page_bytes
            if starts and state.health.readable:
                state.stall_detector.waiting.add(self.transfer)
        self.transfer.advance(first, 0)
        if not starts:
            self.transfer.finish()
        for start in starts:
            self._submit(start, min(start + pages, len(self._pages)))
        return self.transfer

    def _submit(self, start: int, stop: int) -> None:
        self._mover.submit(self._priority, lambda: self._run(start, stop), lane=Lane.DISK)

    def _run(self, start: int, stop: int) -> None:
        if not self.transfer.stopped and start < self._cut:
            moved = self._move(start, stop)
            self.transfer.advance(moved, moved * self.page_bytes)
        with self._state.lock:
            self._state.queued_reads -= (stop - start) * self.page_bytes
            self._pieces -= 1
            last = self._pieces == 0
        if last:
            self.transfer.finish()

    def _move(self, start: int, stop: int) -> int:
        """Load pages ``start`` to ``stop - 1`` as far as possible. Return the number of loaded pages."""
        moved = 0
        while start < min(stop, self._cut) and not self.transfer.stopped:
            batch = self._plan(start, stop)
            if batch.stop == start < self._cut and not self._get_room(start):
                self._cut_at(start)
            moves = batch.moves + self._read(batch.reads) + self._await_others(batch.others)
            self._hold(moves)
            moved += len(moves)
            with self._state.lock:
                self._state.fills.in_transit -= len(batch.reads)
                self._state.changed.notify_all()
            start = batch.stop
        return moved

    def _plan(self, start: int, stop: int) -> _MoveBatch:
        """Decide how the pages from ``start`` on are loaded, as far as there is room. Lease the pages' copies
        and reserve host slots."""
        batch = _MoveBatch([], [], [], start)
        with self._state.lock:
            while batch.stop < stop and self._plan_page(batch.stop, batch):
                batch.stop += 1
            self._state.fills.in_transit += len(batch.reads)
        return batch

    def _plan_page(self, position: int, batch: _MoveBatch) -> bool:
        """Plan how one page is loaded. Return False if the page has to wait or cannot be loaded."""
        state = self._state
        page = self._pages[position]
        tier = page.ready_tier()
        if self._closed or tier is None or (tier is Tier.DISK and not state.health.readable):
            self._cut_at(position)
            return False
        if tier is not Tier.DISK:
            batch.moves.append(_DiskMove(position, page, tier))
        elif _may_fill(page):
            if state.fills.begin(page) is None:
                return False
            state.fills.loading.add(page)
            batch.reads.append(_DiskMove(position, page, tier))
        elif page in state.fills.loading:
            batch.others.append((position, page))
            return True
        else:
            self._cut_at(position)  # a save is about to fill the page's slot, which may take too long
            return False
        state.index.lease(page, tier)
        return True

    def _left_s(self, otherwise: float) -> float:
        left = self.transfer.remaining_s
        return otherwise if left is None else left

    def _get_room(self, start: int) -> bool:
        """Find room for the page at ``start``. Return False if there is no room. As a last resort, wait
        briefly for pages that clients are copying; a client may be slow."""
        fills = self._state.fills
        return (
            self._wait_for_fewer(lambda: fills.in_transit, self._left_s(_OTHERS_READ_S))
            or self._make_room(start)
            or self._wait_for_fewer(lambda: fills.copying, min(self._left_s(_COPIED_S), _COPIED_S))
        )

    def _wait_for_fewer(self, passing: Callable[[], int], most_s: float) -> bool:
        """Wait until ``passing``, a number of pages in temporary use, decreases. Return False if ``passing``
        is 0 or does not decrease within ``most_s`` seconds."""
        with self._state.lock:
            before = passing()
            return before > 0 and self._state.changed.wait_for(
                lambda: passing() < before or self._state.health.stalled, most_s
            )

    def _make_room(self, start: int) -> bool:
        """Release the host tier's pages behind ``start`` that are also on disk, and other holds for this
        load. Return whether anything was released."""
        leases, freed = self._state.leases, False
        with self._state.lock:
            if not self._lease.released:
                for position in range(start + 1, len(self._pages)):
                    freed = leases.hold_on_disk(self._lease, position) or freed
            return self._release_holds() or freed

    def _read(self, reads: list[_DiskMove]) -> list[_DiskMove]:
        """Read pages from disk into host slots. Return the moves whose pages are now held in the host
        tier."""
        if not reads:
            return []
        state = self._state
        assert state.disk is not None
        assert state.host is not None
        with state.lock:
            wanted = [
                (record, state.host.view(state.index.copy(move.page, Tier.HOST).place, record.nbytes))
                for move in reads
                if (record := move.page.record) is not None
            ]
        began = state.clock()
        read = state.disk.read(wanted)
        took_s = state.clock() - began
        outcomes = list(zip(reads, read.outcomes, strict=True))
        with state.lock:
            # A page may have been forgotten while it was read.
            good = [move for move, outcome in outcomes if outcome is PageRead.GOOD and _on_disk(move.page)]
            bad = [move for move in reads if move not in good]
            state.fills.loading.difference_update([move.page for move in reads])
            state.fills.complete([move.page for move in good], release=False)
            state.fills.give_up(move.page for move in bad)
            state.leases.release_all([move.page for move in reads], Tier.DISK)
            for move in bad:
                self._cut_at(move.position)
            for move, outcome in outcomes:
                if outcome is PageRead.DAMAGED:
                    state.residency.damaged_on_disk(move.page)
            state.was_read(read)
            state.disk_rate.moved(len(good) * self.page_bytes, took_s, state.clock())
        state.stall_detector.poll()
        return [_DiskMove(move.position, move.page, Tier.HOST) for move in good]

    def _await_others(self, others: list[tuple[int, Page]]) -> list[_DiskMove]:
        state = self._state
        moves = []
        for position, page in others:
            with state.lock:
                state.changed.wait_for(
                    lambda page=page: page not in state.fills.loading or state.health.stalled,  # type: ignore[misc]
                    self._left_s(_OTHERS_READ_S),
                )
                copy = page.copies[Tier.HOST]
                if copy is None or not copy.ready:
                    self._cut_at(position)
                    break
                state.index.lease(page, Tier.HOST)
                moves.append(_DiskMove(position, page, Tier.HOST))
        return moves

    def _hold(self, moves: Sequence[_DiskMove]) -> None:
        with self._state.lock:
            for move in moves:
                if not self._lease.released:
                    self._state.leases.move(self._lease, move.position, move.tier)
            self._state.leases.release_held([(move.page, move.tier) for move in moves])

    def _cut_at(self, position: int) -> None:
        self._cut = min(self._cut, position)

    def _settle(self, _: TransferState) -> R:
        with self._state.lock:
            self._closed = True
            self._state.stall_detector.waiting.discard(self.transfer)
            result = self._result()
            self._state.leases.release(self._lease)
            return result


def _may_fill(page: Page) -> bool:
    """Return whether the host tier neither has the page nor is about to receive it."""
    copy = page.copies[Tier.HOST]
    return copy is None or copy.damaged


def _on_disk(page: Page) -> bool:
    copy = page.copies[Tier.DISK]
    return copy is not None and copy.ready


def _in_host(page: Page) -> bool:
    copy = page.copies[Tier.HOST]
    return copy is not None and copy.ready
