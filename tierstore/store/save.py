"""Saves: copy HBM pages or a caller's buffers into slots that the backend reserves.

A save works in batches, in prefix order: reserve, copy, commit. The first batches are small, so that copying
begins early. The next batch is reserved while the last one is copied. A save has only one request for a
reservation at a time, because a daemon may answer a short request before a longer one that was sent earlier.
All saves of a store together stay within the store's limit for reservations; a batch that would exceed the
limit waits. Pages that get no slot are not stored, and the save does not wait for a slot.

Every page is hashed during its copy, so that the checksum covers exactly the copied bytes. Pages for a daemon
on another host are sent from the caller's memory, without a copy.

``save_hbm`` publishes pages in HBM immediately, without moving them. Published pages are held until they have
been copied, or the backend has answered that it needs no copy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.backend import Backend, LookupRequest, PrefixHandle, Reservation, SaveHints
from tierstore.index import Page
from tierstore.mover import Mover, Priority
from tierstore.store.buffers import PageSource
from tierstore.store.hbm import HbmTier
from tierstore.store.prompts import PromptCache
from tierstore.tiers.slabs import slot_bytes
from tierstore.transfer import Transfer, TransferState

_FIRST_BATCH_BYTES = 4 << 20  # size of a save's first batch; each further batch is twice as large
_BATCH_BYTES = 32 << 20  # largest batch
_BATCHES_AT_ONCE = 4  # a batch takes at most this fraction (1/4) of the client's limit for reservations
_COPY_BYTES = 4 << 20  # size of one task of the mover
_WRITE_BYTES = 8 << 20  # size of one message with pages
_WRITES = 2  # messages of one batch that are sent at the same time


@dataclass(slots=True, eq=False)
class _SaveBatch:
    """The ``count`` pages of a save from page ``first`` on. ``done`` has the checksums of the written pages,
    by their positions within the batch."""

    first: int
    count: int
    nbytes: int
    reservation: Reservation | None = None
    stored_tokens: int = 0
    positions: Sequence[int] = ()
    done: dict[int, int] = field(default_factory=dict)
    runs: deque[tuple[int, int]] = field(default_factory=deque)  # (first, stop) of positions still to write
    tasks: int = 0


class SaveBudget:
    """Keeps all saves of a store within the limit for reservations, and serves them in the order of
    requests."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._waiting: deque[Save] = deque()
        self._reserved_bytes = 0
        self._pumping = False

    def request(self, save: Save) -> None:
        """Let ``save`` reserve its next batch as soon as the limit permits."""
        with self._lock:
            self._waiting.append(save)
        self._pump()

    def batch_ended(self, nbytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= nbytes
        self._pump()

    def _pump(self) -> None:
        with self._lock:
            if self._pumping:
                return  # the running pump reads the queue again
            self._pumping = True
        try:
            while (turn := self._next_turn()) is not None:
                save, batch = turn
                save.reserve(batch)
        except BaseException:
            with self._lock:
                self._pumping = False  # so that the next call of _pump continues
            raise

    def _next_turn(self) -> tuple[Save, _SaveBatch] | None:
        with self._lock:
            if self._waiting:
                save = self._waiting[0]
                room = self._backend.reserve_bytes
                batch = save.next_batch(room)
                if not self._reserved_bytes or self._reserved_bytes + batch.nbytes <= room:
                    self._waiting.popleft()
                    self._reserved_bytes += batch.nbytes
                    return save, batch
            self._pumping = False
            return None


class Save:
    """A save of ``count`` pages, the chunks of a prompt from ``first`` on. ``held`` has the pages in HBM by
    position, each under a lease. The last named page may have ``lacking`` tokens fewer than a chunk. The
    store's lock guards the mutable state."""

    def __init__(
        self,
        hbm: HbmTier,
        backend: Backend,
        mover: Mover,
        budget: SaveBudget,
        prompts: PromptCache,
        request: LookupRequest,
        source: PageSource,
        held: dict[int, Page],
        first: int,
        count: int,
        hints: SaveHints,
        lacking: int = 0,
    ) -> None:
        self._hbm = hbm
        self._backend = backend
        self._mover = mover
        self._budget = budget
        self._prompts = prompts
        self._request = request
        self._source = source
        self._held = held
        self._first = first
        self._count = count
        self._hints = hints
        self._lacking = lacking
        self._page_bytes = request.page_bytes
        self._next = 0
        self._batch_bytes = _FIRST_BATCH_BYTES
        self._windows = 0  # batches that have begun to be reserved and have not ended
        self._closed = False
        self._copying = 0
        self._stored_tokens = 0
        self._handle: PrefixHandle | None = None  # the reserved pages, which need not be sent again
        self.transfer: Transfer[int] = Transfer(
            self._settle, pages=count, nbytes=count * self._page_bytes, clock=hbm.clock
        )
        with hbm.lock:
            hbm.pending_saves += count

    def start(self) -> Transfer[int]:
        if self._count:
            self._budget.request(self)
        else:
            self.transfer.finish()
        return self.transfer

    # -- reserve -------------------------------------------------------------------------------------

    def next_batch(self, room: int) -> _SaveBatch:
        """Return the next batch to reserve, of at most ``room`` bytes. If ``room`` is 0, the batch has all
        remaining pages and 0 bytes, and is not stored."""
        count = self._count - self._next
        if not room or self._closed:
            return _SaveBatch(self._next, count, 0)
        limit = min(self._batch_bytes, room // _BATCHES_AT_ONCE)
        slot = slot_bytes(self._page_bytes)
        count = min(count, max(limit // slot, 1))
        return _SaveBatch(self._next, count, count * slot)

    def reserve(self, batch: _SaveBatch) -> None:
        nowhere = not batch.nbytes
        with self._hbm.lock:
            self._next += batch.count
            self._windows += 1
            self._batch_bytes = min(2 * self._batch_bytes, _BATCH_BYTES)
            self._hbm.counters.not_stored_pages += batch.count * nowhere
        if nowhere:
            self._end(batch)
            return
        prompt, first = self._request.slice(self._first + batch.first, batch.count)
        try:
            answer = self._backend.reserve(prompt, first, batch.count, hints=self._hints, handle=self._handle)
        except BaseException:  # an unknown error: other saves continue without this one
            with self._hbm.lock:
                self._hbm.counters.not_stored_pages += self._count - batch.first
                self._skip_the_rest()
            self._end(batch)
            raise
        answer.on_end(lambda: self._reserved(batch, answer.wait()))

    def _reserved(self, batch: _SaveBatch, reservation: Reservation | None) -> None:
        if reservation is not None:
            batch.reservation = reservation
            batch.positions = reservation.positions
            batch.stored_tokens = min(reservation.stored_tokens, self._tokens(batch.first, batch.count))
            self._handle = reservation.handle
            self._give_back(batch, keep=set(batch.positions))
            self.transfer.advance(batch.count - len(batch.positions), 0)
        with self._hbm.lock:
            counters = self._hbm.counters
            if batch.stored_tokens >= self._tokens(batch.first, batch.count):
                counters.already_stored_pages += batch.count - len(batch.positions)
            else:
                counters.not_stored_pages += self._count - batch.first - len(batch.positions)
                self._skip_the_rest()  # pages behind a missing page could never be found
            more = self._next < self._count
        if more:
            self._budget.request(self)
        self._write(batch)

    def _skip_the_rest(self) -> None:
        for position in range(self._next, self._count):
            self._unhold(position)
        self._hbm.pending_saves -= self._count - self._next
        self._next = self._count

    # -- write ---------------------------------------------------------------------------------------

    def _write(self, batch: _SaveBatch) -> None:
        reservation = batch.reservation
        sent = reservation is not None and reservation.addresses is None
        step = max((_WRITE_BYTES if sent else _COPY_BYTES) // self._page_bytes, 1)
        total = len(batch.positions)
        runs = [(start, min(start + step, total)) for start in range(0, total, step)]
        if reservation is None or not runs:
            self._commit(batch)
            return
        batch.tasks = len(runs)
        at_once = _WRITES if sent else len(runs)
        batch.runs.extend(runs[at_once:])
        for run in runs[:at_once]:
            self._submit(batch, reservation, run)

    def _submit(self, batch: _SaveBatch, reservation: Reservation, run: tuple[int, int]) -> None:
        self._mover.submit(Priority.SAVE, lambda: self._copy(batch, reservation, run))

    def _copy(self, batch: _SaveBatch, reservation: Reservation, run: tuple[int, int]) -> None:
        with self._hbm.lock:
            stopped = self._closed or not reservation.usable()
            self._copying += not stopped
        if stopped:
            self._run_ended(batch, reservation, {})
            return
        positions = batch.positions[slice(*run)]
        pages = [batch.first + position for position in positions]
        addresses = reservation.addresses
        frames: list[memoryview] = []
        done: dict[int, int] = {}
        copied = False
        try:
            checksums: Sequence[int | None]
            if addresses is not None:
                targets = list(zip(pages, addresses[slice(*run)], strict=True))
                checksums = self._source.copy(targets, self._page_bytes)
            else:
                frames, checksums = self._source.frames(pages, self._page_bytes)
            for position, checksum in zip(positions, checksums, strict=True):
                if checksum is not None:
                    done[position] = checksum
            copied = True
        finally:  # after an error of a device, too: callers wait until these copies have ended
            with self._hbm.lock:
                self._copying -= 1
                self._hbm.changed.notify_all()
            if addresses is not None or not copied:
                self._run_ended(batch, reservation, done)
        if addresses is None:
            self._send(batch, reservation, run, frames, done)

    def _send(
        self,
        batch: _SaveBatch,
        reservation: Reservation,
        run: tuple[int, int],
        frames: Sequence[memoryview],
        done: dict[int, int],
    ) -> None:
        """Send pages from the caller's memory. A caller that cancels the save may overwrite pages before they
        are sent, so the daemon compares checksums."""
        sent = self._backend.write(reservation, run[0], frames)
        sent.on_end(lambda: self._run_ended(batch, reservation, done if sent.wait() else {}))

    def _run_ended(self, batch: _SaveBatch, reservation: Reservation, done: dict[int, int]) -> None:
        with self._hbm.lock:
            batch.done.update(done)
            batch.tasks -= 1
            last = batch.tasks == 0
            following = batch.runs.popleft() if batch.runs else None
        self.transfer.advance(len(done), len(done) * self._page_bytes)
        if following is not None:
            self._submit(batch, reservation, following)
        if last:
            self._commit(batch)

    # -- commit --------------------------------------------------------------------------------------

    def _commit(self, batch: _SaveBatch) -> None:
        reservation = batch.reservation
        if reservation is None or not batch.positions or not batch.done:
            if reservation is not None and batch.positions:
                self._backend.abort(reservation)
            self._committed(batch, 0)
            return
        # If the backend does not answer, the pages may or may not be stored. Such pages are not counted as
        # stored, and a later save may store them.
        committed = self._backend.commit(reservation, batch.done)
        committed.on_end(lambda: self._committed(batch, committed.wait()))

    def _committed(self, batch: _SaveBatch, pages: int) -> None:
        stored = sorted(batch.done)[:pages]
        given_up = set(batch.positions).difference(stored)
        missing = sum(self._tokens(batch.first + position, 1) for position in given_up)
        with self._hbm.lock:
            self._stored_tokens += max(batch.stored_tokens - missing, 0)
            self._hbm.counters.saved_pages += len(stored)
            self._hbm.counters.not_stored_pages += len(given_up)
        self._end(batch)

    def _end(self, batch: _SaveBatch) -> None:
        self._give_back(batch, keep=set())
        with self._hbm.lock:
            self._windows -= 1
            self._hbm.pending_saves -= batch.count
            last = not self._windows and self._next == self._count
            self._hbm.changed.notify_all()
        self._budget.batch_ended(batch.nbytes)
        if last:
            if self._handle is not None:  # the next save usually continues this prompt
                self._prompts.remember(self._request, self._handle)
            self.transfer.finish()

    # -- used by several of these steps ----------------------------------------------------------------

    def _tokens(self, position: int, count: int) -> int:
        """Return the number of tokens in ``count`` chunks from ``position`` on. The last chunk may be
        partial."""
        chunk_tokens = self._request.chunk_tokens
        start = (self._first + position) * chunk_tokens
        tokens = min(start + count * chunk_tokens, self._request.num_tokens) - start
        return tokens - self._lacking * (0 < count == self._count - position)

    def _give_back(self, batch: _SaveBatch, *, keep: set[int]) -> None:
        """Release the leases on HBM pages of a batch, except for the positions ``keep`` that are still
        copied."""
        with self._hbm.lock:
            for position in range(batch.count):
                if position not in keep:
                    self._unhold(batch.first + position)
            self._hbm.changed.notify_all()

    def _unhold(self, position: int) -> None:
        page = self._held.pop(position, None)
        if page is not None:
            self._hbm.release_copy(page)

    def _settle(self, _: TransferState) -> int:
        with self._hbm.lock:
            self._closed = True
            # The caller may reuse its pages as soon as this method returns.
            self._hbm.changed.wait_for(lambda: not self._copying)
            return self._stored_tokens
