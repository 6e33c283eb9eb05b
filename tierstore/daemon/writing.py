"""Reservations: room for pages that a client writes, and what becomes of them.

All is decided when a client reserves: which pages are new and which slots they get. A slot under a
reservation is nobody else's until the client commits it, gives it up or is dead: a write that was under
way could otherwise end in somebody else's page."""

from __future__ import annotations

import array
import asyncio
import sys
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor

from tierstore import copying, memory
from tierstore.curve import Notes
from tierstore.daemon import protocol as p
from tierstore.daemon.lookups import Lookups
from tierstore.daemon.plan import Plan
from tierstore.daemon.prompts import AskedPrompt
from tierstore.daemon.quotas import Quotas
from tierstore.daemon.session import Refusal, Reservation, Session
from tierstore.daemon.told import told_with
from tierstore.index import Page, Tier
from tierstore.store.leases import Lease
from tierstore.store.state import StoreState
from tierstore.store.write_behind import WriteBehind

_AT_ONCE = 64  # pages, a few milliseconds beside others; then other requests get their turn
_LOOK_S = 1.0  # on disk, for what is there already
_INLINE_BYTES = 64 << 10  # frames of less are copied on the event loop

assert sys.byteorder == "little", "positions and offsets are sent as they are in memory"


class Writing:
    """The verbs that store pages. Belongs to the event loop's thread."""

    def __init__(
        self,
        state: StoreState,
        lookups: Lookups,
        notes: Notes,
        write_behind: WriteBehind | None,
        quotas: Quotas,
        *,
        reserve_bytes: int,
        threads: Executor,
    ) -> None:
        """``reserve_bytes`` may one client hold in reservations; ``threads`` copy what came by TCP."""
        self._state = state
        self._lookups = lookups
        self._notes = notes
        self._write_behind = write_behind
        self._quotas = quotas
        self._reserve_bytes = reserve_bytes
        self._threads = threads

    # -- reserve -------------------------------------------------------------------------------------

    def reserve(self, session: Session, m: p.Reserve) -> p.Reserved | Awaitable[p.Reserved]:
        prompt = AskedPrompt(session, m.prompt)
        if m.first < 0 or m.count < 0 or m.first + m.count > prompt.num_chunks:
            raise Refusal(
                "usage",
                f"chunks {m.first} … {m.first} + {m.count} do not lie within a prompt of {prompt.num_chunks}",
            )
        with self._state.lock:
            look_on_disk = self._lookups.may_be_on_disk(session, prompt)
            if not look_on_disk and m.count <= _AT_ONCE:
                return self._plan(session, m, prompt).result(m.id)
        return self._reserve_in_steps(session, m, prompt, look_on_disk=look_on_disk)

    async def _reserve_in_steps(
        self, session: Session, m: p.Reserve, prompt: AskedPrompt, *, look_on_disk: bool
    ) -> p.Reserved:
        state = self._state
        lease = Lease()
        if look_on_disk:  # what is there and not in the tree must not be stored a second time
            lease = await self._lookups.look_on_disk(session, prompt, prompt.num_tokens, _LOOK_S)
        try:
            with state.lock:
                if look_on_disk:
                    self._lookups.may_be_on_disk(session, prompt)  # the remembered pages may have left
                plan = self._plan(session, m, prompt)
            while plan.unfinished:
                await asyncio.sleep(0)  # the others get their turn
                with state.lock:
                    plan.step(_AT_ONCE)
        finally:
            with state.lock:
                state.leases.release(lease)
        return plan.result(m.id)

    def _plan(self, session: Session, m: p.Reserve, prompt: AskedPrompt) -> Plan:
        """Begin to find or make pages and to give slots to the new ones. Under the lock."""
        state = self._state
        identity = prompt.registration.identity
        state.identities.setdefault(identity.digest, identity)
        plan = Plan(
            state,
            self._quotas,
            session,
            prompt,
            range(m.first, m.first + m.count),
            reserve_bytes=self._reserve_bytes,
            told=told_with(session, m),
        )
        pages = min(m.first + m.count, prompt.whole_chunks)
        self._notes.saved(
            prompt.groups(),
            pages * prompt.chunk_tokens,
            prompt.chunk_tokens,
            prompt.registration.page_bytes,
        )
        plan.step(_AT_ONCE)
        return plan

    # -- what becomes of it --------------------------------------------------------------------------

    def write(
        self, session: Session, m: p.Write, frames: Sequence[memoryview]
    ) -> p.Written | Awaitable[p.Written]:
        reservation = session.reservation(m.reservation)
        pages = reservation.pages[m.first : m.first + len(frames)] if m.first >= 0 else []
        nbytes = sum(frame.nbytes for frame in frames)
        if not frames or len(pages) != len(frames):
            raise Refusal("usage", f"{len(frames)} frames are not pages {m.first} … of this reservation")
        if any(frame.nbytes != reservation.page_bytes for frame in frames):
            raise Refusal("usage", f"a page of this reservation has {reservation.page_bytes} bytes")
        if len(frames) > 1 and nbytes > p.MAX_FETCH_BYTES:
            raise Refusal("usage", f"{nbytes} bytes are more than the {p.MAX_FETCH_BYTES} of one Write")
        copies = self._copies(pages, frames)
        if nbytes <= _INLINE_BYTES:
            self._note_arrived(reservation, m.first, _copy(copies, reservation.page_bytes, frames))
            return p.Written(m.id)
        return self._write_aside(m, reservation, copies, frames)

    def _note_arrived(self, reservation: Reservation, first: int, checksums: Sequence[int]) -> None:
        positions = reservation.positions[first : first + len(checksums)]
        reservation.arrived.update(zip(positions, checksums, strict=True))

    def _copies(self, pages: Sequence[Page], frames: Sequence[memoryview]) -> list[tuple[int, int]]:
        state = self._state
        assert state.host is not None
        with state.lock:
            places = [state.index.copy(page, Tier.HOST).place for page in pages]
        return [
            (state.host.address(place), memory.address_of(frame, writable=False))
            for place, frame in zip(places, frames, strict=True)
        ]

    async def _write_aside(
        self,
        m: p.Write,
        reservation: Reservation,
        copies: list[tuple[int, int]],
        frames: Sequence[memoryview],
    ) -> p.Written:
        reservation.copying += 1
        try:
            # The frames are an argument so that their memory lives for as long as the copy takes.
            checksums = await asyncio.shield(
                asyncio.get_running_loop().run_in_executor(
                    self._threads, _copy, copies, reservation.page_bytes, frames
                )
            )
            self._note_arrived(reservation, m.first, checksums)
        finally:
            reservation.copying -= 1
            if reservation.ended:
                self._give_up(reservation)
        return p.Written(m.id)

    def commit(self, session: Session, m: p.Commit) -> p.Committed | Awaitable[p.Committed]:
        reservation = session.reservation(m.reservation)
        if len(m.done) % 4 or len(m.checksums) != 2 * len(m.done):
            raise Refusal("usage", f"{len(m.done)} bytes of positions, {len(m.checksums)} of checksums")
        done = dict(zip(array.array("I", m.done), array.array("Q", m.checksums), strict=True))
        unknown = done.keys() - set(reservation.positions)
        if unknown or len(done) != len(m.done) // 4:
            raise Refusal("usage", "positions that were not reserved, or twice")
        if reservation.copying:
            raise Refusal("usage", "pages of this reservation are still being written")
        self._end(session, m.reservation)
        if not session.local:
            done = self._intact(reservation, done)
        if len(reservation.pages) <= _AT_ONCE:
            return p.Committed(m.id, self._commit(reservation, done, 0, _AT_ONCE))
        return self._commit_in_steps(m.id, reservation, done)

    def _intact(self, reservation: Reservation, done: dict[int, int]) -> dict[int, int]:
        """Those of which we have what their sender made the checksum of. He sends pages from where they are,
        and may have written over them before they were sent."""
        arrived = reservation.arrived
        intact = {at: checksum for at, checksum in done.items() if arrived.get(at) == checksum}
        self._state.counters.torn_pages += len(done) - len(intact)
        return intact

    async def _commit_in_steps(
        self, number: int, reservation: Reservation, done: dict[int, int]
    ) -> p.Committed:
        committed = 0
        for start in range(0, len(reservation.pages), _AT_ONCE):
            committed += self._commit(reservation, done, start, start + _AT_ONCE)
            await asyncio.sleep(0)  # the others get their turn
        return p.Committed(number, committed)

    def _commit(self, reservation: Reservation, done: dict[int, int], start: int, stop: int) -> int:
        state = self._state
        committed: list[Page] = []
        given_up: list[Page] = []
        with state.lock:
            for position, page in zip(
                reservation.positions[start:stop], reservation.pages[start:stop], strict=True
            ):
                if position not in done:
                    given_up.append(page)
                    continue
                page.checksum = done[position]
                committed.append(page)
            state.fills.complete(committed)
            state.counters.saved_pages += len(committed)
            if self._write_behind is not None:
                self._write_behind.enqueue(committed)
            self._free(given_up)
        return len(committed)

    def abort(self, session: Session, m: p.Abort) -> None:
        if m.reservation in session.reservations:
            self._give_up(self._end(session, m.reservation))

    def end_all(self, session: Session) -> None:
        """The client is dead, or has gone."""
        for number in list(session.reservations):
            self._give_up(self._end(session, number))

    def _end(self, session: Session, number: int) -> Reservation:
        reservation = session.end_reservation(number)
        reservation.ended = True
        return reservation

    def _give_up(self, reservation: Reservation) -> None:
        """Give slots back, once nothing of ours writes to them any more."""
        if not reservation.copying:
            with self._state.lock:
                self._free(reservation.pages)

    def _free(self, pages: Sequence[Page]) -> None:
        self._state.fills.give_up(reversed(pages))
        self._state.counters.not_stored_pages += len(pages)


def _copy(copies: list[tuple[int, int]], page_bytes: int, frames: Sequence[memoryview]) -> list[int]:
    return copying.copy_and_hash(copies, page_bytes)
