"""Write pages under a reservation.

A client's reservation says which pages are new and which slots they get. A reservation is never taken away
from a living client; only its size is limited. If another reservation covers one of the pages, the client
waits until that reservation ends, because it may still be aborted. The client holds nothing while it waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tierstore import copying, memory
from tierstore.backend import Reservation, SaveHints
from tierstore.core.arrivals import Waiter
from tierstore.core.clients import Client, LocalReservation, Refusal
from tierstore.core.core import Core
from tierstore.core.departures import Cause
from tierstore.core.lookups import Lookups
from tierstore.core.prompts import PromptView
from tierstore.core.reservations import ReservationBuilder, being_written
from tierstore.errors import StoreClosedError
from tierstore.index import Page, Tier
from tierstore.index.leases import PageLease
from tierstore.mover import Priority
from tierstore.transfer import Transfer, TransferState

_log = logging.getLogger(__name__)

R = TypeVar("R")

_AT_ONCE = 64  # pages handled under one hold of the lock: about a millisecond
_MOST_WAITING = 64  # requests of one client that may wait for other reservations
_INLINE_BYTES = 64 << 10  # smaller frames are copied on the caller's thread


class Writing:
    """The saves of one client of ``core``. Thread-safe. ``owner`` becomes the owner of returned handles."""

    def __init__(self, core: Core, client: Client, lookups: Lookups, owner: object) -> None:
        self.core = core
        self.client = client
        self._lookups = lookups
        self._owner = owner
        self._state = core.state
        self._waiting: dict[Waiter, Transfer[Reservation | None]] = {}  # requests that wait for reservations

    def reserve(
        self,
        view: PromptView,
        first: int,
        count: int,
        *,
        hints: SaveHints,
    ) -> Transfer[Reservation | None]:
        """See :meth:`~tierstore.backend.Backend.reserve`."""
        chunks = range(first, first + count)
        reserved = self._reserve(view, chunks, hints, None)
        return reserved if reserved is not None else self._wait_and_reserve(view, chunks, hints)

    def _wait_and_reserve(
        self, view: PromptView, chunks: range, hints: SaveHints
    ) -> Transfer[Reservation | None]:
        granted: list[Transfer[Reservation | None]] = []

        def settle(_: TransferState) -> Reservation | None:
            with self._state.lock:
                self._waiting.pop(waiter, None)
                self.core.arrivals.forget(waiter)
            return granted.pop().wait() if granted else None

        def look(waiter: Waiter) -> None:
            try:
                reserved = self._reserve(view, chunks, hints, waiter)
            except (StoreClosedError, Refusal) as error:
                _log.debug("a request was refused: %s", error)
                transfer.finish()
                return
            if reserved is not None:
                granted.append(reserved)
                reserved.on_end(transfer.finish)

        waiter = Waiter(look)
        transfer: Transfer[Reservation | None] = Transfer(settle, pages=0, nbytes=0)
        look(waiter)
        with self._state.lock:
            if waiter.page is not None:
                self._waiting[waiter] = transfer
        return transfer

    def _reserve(
        self, view: PromptView, chunks: range, hints: SaveHints, waiter: Waiter | None
    ) -> Transfer[Reservation | None] | None:
        """Reserve pages. If another reservation covers one of the pages, return None, and call ``waiter``
        when the write of that page ends."""
        state = self._state
        with state.lock:
            if state.closed:
                return Transfer.completed(None)
            self.core.forget_gone()
            look = self._lookups.may_be_on_disk(view)
            written = next(filter(being_written, view.in_tree(state, chunks)), None)
            if written is not None and len(self._waiting) < _MOST_WAITING:
                if waiter is not None:
                    self.core.arrivals.wait_for((written.identity, written.key), waiter)
                return None
            if not look and len(chunks) <= _AT_ONCE:
                return Transfer.completed(self._begin(view, chunks, hints).result(self.core.arena_address))
        return self._work(partial(self._reserve_in_steps, view, chunks, hints, look=look), None)

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        """Copy ``frames`` to the slots of the positions from ``first`` on, on the mover's threads. Store the
        checksums of the copied bytes in the reservation."""
        assert isinstance(reservation, LocalReservation), "the reservation is of another backend"
        addresses = reservation.addresses or ()
        copies = [
            (to, memory.address_of(frame, writable=False))
            for to, frame in zip(addresses[first : first + len(frames)], frames, strict=True)
        ]
        reservation.copying += 1

        # ``frames`` is an argument, so that its memory lives until the copy ends.
        def copy(frames: Sequence[memoryview]) -> None:
            checksums = copying.copy_and_hash(copies, reservation.page_bytes)
            with self._state.lock:
                positions = reservation.positions[first : first + len(checksums)]
                reservation.arrived.update(zip(positions, checksums, strict=True))
                reservation.copying -= 1
                if reservation.ended:
                    self._give_up(reservation)
            self.core.arrivals.wake()

        if sum(frame.nbytes for frame in frames) <= _INLINE_BYTES:
            copy(frames)
            return Transfer.completed(True)
        transfer: Transfer[bool] = Transfer(lambda _: True, pages=0, nbytes=0)

        def task() -> None:
            copy(frames)
            transfer.finish()

        self.core.mover.submit(Priority.SAVE, task)
        return transfer

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        assert isinstance(reservation, LocalReservation), "the reservation is of another backend"
        with self._state.lock:
            if self.client.reservations.get(reservation.number) is not reservation:
                return Transfer.completed(0)
            self._end(reservation)
            if not self.client.local:
                # The client may have changed a page after it computed the checksum: compare it with the
                # checksum of the received bytes.
                arrived = reservation.arrived
                intact = {at: known for at, known in checksums.items() if arrived.get(at) == known}
                self._state.counters.torn_pages += len(checksums) - len(intact)
                checksums = intact
            at_once = len(reservation.pages) <= _AT_ONCE
            committed = self._commit(reservation, checksums, 0, _AT_ONCE) if at_once else 0
        if at_once:
            self.core.arrivals.wake()
            return Transfer.completed(committed)
        return self._work(partial(self._commit_in_steps, reservation, checksums), 0)

    def abort(self, reservation: Reservation) -> None:
        with self._state.lock:
            self._abort(reservation)
        self.core.arrivals.wake()

    def _reserve_in_steps(
        self, view: PromptView, chunks: range, hints: SaveHints, *, look: bool
    ) -> Reservation | None:
        state = self._state
        hold = PageLease()
        if look:  # a page that is only on disk must be found, so that it is not stored a second time
            hold = view.disk_look(state, view.num_tokens)()
        try:
            with state.lock:
                if view.head_left:
                    self._lookups.spell_out(view)
                builder = self._begin(view, chunks, hints)
            while builder.unfinished:
                state.yield_lock()
                with state.lock:
                    self._step(builder)
            with state.lock:
                return builder.result(self.core.arena_address)
        finally:
            with state.lock:
                state.leases.release(hold)

    def _begin(self, view: PromptView, chunks: range, hints: SaveHints) -> ReservationBuilder:
        """Find or create the first pages of a reservation, and give slots to new pages. Needs the lock."""
        state = self._state
        registration = view.registration
        state.identities.setdefault(registration.identity.digest, registration.identity)
        builder = ReservationBuilder(
            state,
            self.core.quotas,
            self._owner,
            self.client,
            view,
            chunks,
            reserve_bytes=self.core.reserve_bytes,
            hints=hints,
        )
        tokens = min(chunks.stop, view.whole_chunks) * view.chunk_tokens
        self.core.curve.saved(view.all_keys(), tokens, view.chunk_tokens, registration.page_bytes)
        self._step(builder)
        return builder

    def _step(self, builder: ReservationBuilder) -> None:
        try:
            builder.step(_AT_ONCE)
        except BaseException:  # free everything reserved so far
            builder.give_up()
            self._abort(builder.reservation)
            raise

    def _commit_in_steps(self, reservation: LocalReservation, checksums: dict[int, int]) -> int:
        committed = 0
        for start in range(0, len(reservation.pages), _AT_ONCE):
            with self._state.lock:
                committed += self._commit(reservation, checksums, start, start + _AT_ONCE)
            self.core.arrivals.wake()
            self._state.yield_lock()
        return committed

    def _commit(self, reservation: LocalReservation, checksums: dict[int, int], start: int, stop: int) -> int:
        state = self._state
        committed: list[Page] = []
        given_up: list[Page] = []
        for position, page in zip(
            reservation.positions[start:stop], reservation.pages[start:stop], strict=True
        ):
            if position not in checksums:
                given_up.append(page)
                continue
            page.checksum = checksums[position]
            committed.append(page)
        state.fills.complete(committed)
        self.core.arrivals.ended(committed)
        state.counters.saved_pages += len(committed)
        if self.core.write_behind is not None:
            if self.core.write_worth(self.client.tenant).is_given():
                self.core.write_behind.enqueue(committed)
            else:
                state.counters.disk_declined_pages += len(committed)
                for page in committed:
                    state.departures.note(page.identity, page.key, Cause.WORTH, Tier.HOST)
        self._free(given_up)
        return len(committed)

    def _abort(self, reservation: Reservation) -> None:
        held = self.client.reservations.get(reservation.number)
        if held is not None:
            self._end(held)
            self._give_up(held)

    def _end(self, reservation: LocalReservation) -> None:
        self.client.end_reservation(reservation.number)
        reservation.ended = True

    def _give_up(self, reservation: LocalReservation) -> None:
        """Free the slots of a reservation as soon as no copy writes to them. Needs the lock."""
        if not reservation.copying:
            self._free(reservation.pages)

    def _free(self, pages: Sequence[Page]) -> None:
        self._state.fills.give_up(reversed(pages))
        self.core.arrivals.ended(pages)
        self._state.counters.not_stored_pages += len(pages)

    def _work(self, work: Callable[[], R], otherwise: R) -> Transfer[R]:
        """Run slow work on one of the core's threads, or on the caller's thread if the core has none."""
        if self.core.threads is None:
            return Transfer.completed(work())
        results: list[R] = []
        transfer: Transfer[R] = Transfer(lambda _: results[0] if results else otherwise, pages=0, nbytes=0)

        def task() -> None:
            try:
                results.append(work())
            except (StoreClosedError, Refusal) as error:
                _log.debug("a request was refused: %s", error)
            finally:
                transfer.finish()

        self.core.threads.submit(task).add_done_callback(lambda _: transfer.finish())
        return transfer

    def end(self) -> list[Transfer[Reservation | None]]:
        """End the reservations of a client that has disconnected. Needs the lock. Return the transfers that
        wait for other reservations. The caller must cancel them and call :meth:`Arrivals.wake` after it has
        released the lock."""
        for reservation in list(self.client.reservations.values()):
            self._end(reservation)
            self._give_up(reservation)
        return list(self._waiting.values())
