"""Saves of a connected store: from HBM pages or a caller's buffers into slots that the daemon reserves.

A save goes by windows, in prefix order: reserve, copy, commit. The first ones are small, so that copying
begins soon. The next window is reserved while the last one is copied (one at a time: the daemon may decide a
short one before a long one that came earlier), and all saves together keep within what a client may hold in
reservations (those that would not, wait their turn; nobody waits for them). Every page is hashed as it is
copied, so that its checksum is that of the very bytes the engine had. Over TCP pages are not copied but sent
from where they are.

Pages in HBM are published where they are when ``save_hbm`` is called, and held until it is known that they
need not be copied, or they have been.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tierstore.daemon import protocol
from tierstore.daemon.budget import Budget, Window
from tierstore.daemon.call import Call, numbers
from tierstore.daemon.greeting import Session
from tierstore.daemon.remembered import Name, Question
from tierstore.daemon.remote import Remote
from tierstore.daemon.sources import Source
from tierstore.daemon.told import hint_part
from tierstore.index import Page, Tier
from tierstore.mover import Mover, Priority
from tierstore.store.state import StoreState
from tierstore.store.telling import Told
from tierstore.transfer import Transfer, TransferState

_FIRST_WINDOW_BYTES = 4 << 20  # each is twice as large as the one before …
_WINDOW_BYTES = 32 << 20  # … up to this
_WINDOWS_AT_ONCE = 4  # what a client may hold in reservations is shared by that many windows
_COPY_BYTES = 4 << 20  # one task of the mover
_WRITE_BYTES = 8 << 20  # one message with pages
_WRITES = 2  # of them under way in a window


class SaveJob:
    """One save. Everything that changes is guarded by the state's lock."""

    def __init__(
        self,
        budget: Budget,
        remote: Remote,
        mover: Mover,
        state: StoreState,
        question: Question,
        source: Source,
        held: dict[int, Page],
        first: int,
        count: int,
        told: Told,
    ) -> None:
        self._told = told
        self._budget = budget
        self._state = state
        self._remote = remote
        self._mover = mover
        self._connection = remote.connection
        self._page_bytes = remote.page_bytes
        self._question = question
        self._source = source
        self._held = held
        self._first = first
        self._count = count
        self._next = 0
        self._window_bytes = _FIRST_WINDOW_BYTES
        self._windows = 0  # reserved, and not ended yet
        self._closed = False
        self._copying = 0
        self._stored_tokens = 0
        self._name: Name | None = None  # of what has been reserved: the daemon need not be sent it once more
        self.transfer: Transfer[int] = Transfer(self._settle, pages=count, nbytes=count * self._page_bytes)
        with self._state.lock:
            self._state.pending_saves += count

    def start(self) -> Transfer[int]:
        if self._count:
            self._budget.request(self)
        else:
            self.transfer.finish()
        return self.transfer

    # -- reserve -------------------------------------------------------------------------------------

    def next_window(self) -> Window:
        """What is to be reserved next: all that is left where there is nowhere to put it."""
        session = self._remote.session_for(self._question)
        count = self._count - self._next
        if session is None or self._closed:
            return Window(self._next, count, 0, session)
        limit = min(self._window_bytes, session.reserve_bytes // _WINDOWS_AT_ONCE)
        count = min(count, max(limit // self._page_bytes, 1))
        return Window(self._next, count, count * self._page_bytes, session)

    def reserve(self, window: Window) -> None:
        """The next window's turn has come."""
        session = window.session
        nowhere = session is None or not window.nbytes
        with self._state.lock:
            self._next += window.count
            self._windows += 1
            self._window_bytes = min(2 * self._window_bytes, _WINDOW_BYTES)
            self._state.counters.not_stored_pages += window.count * nowhere
        if session is None or nowhere:
            self._end(window)
            return
        first = self._first + window.first
        prompt = self._question.cut((first + window.count) * self._question.chunk_tokens)

        def message() -> protocol.Reserve:
            # What is to be saved is spelled out, even where it begins like something the daemon knows.
            part = prompt.part(session, refer_to=first, name=self._name)
            name = self._told.session or ""
            return protocol.Reserve(0, part, first, window.count, hint_part(self._told), name)

        def whole() -> protocol.Reserve:
            prompt.forgotten()
            self._name = None
            return message()

        call = self._connection.call(session, message(), protocol.Reserved, otherwise=whole)
        call.on_end(lambda: self._reserved(window, session, call))

    def _reserved(self, window: Window, session: Session, call: Call[protocol.Reserved]) -> None:
        answer = call.wait()
        if answer is not None:
            window.reservation = answer.reservation
            window.positions = numbers(answer.positions, "<u4").tolist()
            window.offsets = numbers(answer.offsets, "<u8").tolist()
        sound = answer is not None and self._sound(window, session)
        if answer is not None and sound:
            self._name = Name.of(session, answer)
            window.stored_tokens = min(answer.stored_tokens, self._tokens(window.first, window.count))
            self._give_back(window, keep=set(window.positions))
            self.transfer.advance(window.count - len(window.positions), 0)
        else:
            window.positions.clear()
        with self._state.lock:
            counters = self._state.counters
            if window.stored_tokens >= self._tokens(window.first, window.count):
                counters.already_stored_pages += window.count - len(window.positions)
            else:
                counters.not_stored_pages += self._count - window.first - len(window.positions)
                self._skip_the_rest()  # what follows a page that is not there could never be found
            more = self._next < self._count
        if more:
            self._budget.request(self)
        self._write(window, session)

    def _sound(self, window: Window, session: Session) -> bool:
        """Whether positions and offsets are such that writing there harms nobody."""
        positions = set(window.positions)
        if not len(positions) == len(window.positions) == len(window.offsets):
            return False
        if bool(positions) != bool(window.reservation):
            return False
        if any(position >= window.count for position in window.positions):
            return False
        if session.arena is None:
            return True
        mapped = session.arena.memory
        if mapped is None:
            return False
        return all(offset <= mapped.nbytes - self._page_bytes for offset in window.offsets)

    def _skip_the_rest(self) -> None:
        for position in range(self._next, self._count):
            self._unhold(position)
        self._state.pending_saves -= self._count - self._next
        self._next = self._count

    # -- write ---------------------------------------------------------------------------------------

    def _write(self, window: Window, session: Session) -> None:
        if session.arena is None:
            step = max(min(_WRITE_BYTES, protocol.MAX_FETCH_BYTES) // self._page_bytes, 1)
        else:
            step = max(_COPY_BYTES // self._page_bytes, 1)
        total = len(window.positions)
        groups = [(start, min(start + step, total)) for start in range(0, total, step)]
        if not groups:
            self._commit(window, session)
            return
        window.tasks = len(groups)
        at_once = len(groups) if session.arena is not None else _WRITES
        window.groups.extend(groups[at_once:])
        for group in groups[:at_once]:
            self._submit(window, session, group)

    def _submit(self, window: Window, session: Session, group: tuple[int, int]) -> None:
        self._mover.submit(Priority.SAVE, lambda: self._copy(window, session, group))

    def _copy(self, window: Window, session: Session, group: tuple[int, int]) -> None:
        arena = session.arena
        mapped = arena.memory if arena is not None else None
        with self._state.lock:
            stopped = self._closed or (mapped is None if arena is not None else not session.current)
            self._copying += not stopped
        if stopped:
            self._group_ended(window, session, group, {})
            return
        positions = window.positions[slice(*group)]
        pages = [window.first + position for position in positions]
        frames: list[memoryview] = []
        done: dict[int, int] = {}
        copied = False
        try:
            checksums: Sequence[int | None]
            if mapped is not None:
                addresses = [mapped.address + offset for offset in window.offsets[slice(*group)]]
                targets = list(zip(pages, addresses, strict=True))
                checksums = self._source.copy(targets, self._page_bytes)
            else:
                frames, checksums = self._source.frames(pages, self._page_bytes)
            for position, checksum in zip(positions, checksums, strict=True):
                if checksum is not None:
                    done[position] = checksum
            copied = True
        finally:  # whatever a driver raises: somebody waits for these copies to end
            with self._state.lock:
                self._copying -= 1
                self._state.changed.notify_all()
            if arena is not None or not copied:
                self._group_ended(window, session, group, done)
        if arena is None:
            self._send(window, session, group, frames, done)

    def _send(
        self,
        window: Window,
        session: Session,
        group: tuple[int, int],
        frames: Sequence[memoryview],
        done: dict[int, int],
    ) -> None:
        """Send pages from where they are. A caller who cancels the save may write over them before they are
        sent: the daemon compares checksums."""
        write = protocol.Write(0, window.reservation, group[0])
        call = self._connection.call(session, write, protocol.Written, wait_s=1.0, frames=frames)
        call.on_end(
            lambda: self._group_ended(window, session, group, done if call.wait() is not None else {})
        )

    def _group_ended(
        self, window: Window, session: Session, group: tuple[int, int], done: dict[int, int]
    ) -> None:
        with self._state.lock:
            window.done.update(done)
            window.tasks -= 1
            last = window.tasks == 0
            following = window.groups.popleft() if window.groups else None
        self.transfer.advance(len(done), len(done) * self._page_bytes)
        if following is not None:
            self._submit(window, session, following)
        if last:
            self._commit(window, session)

    # -- commit --------------------------------------------------------------------------------------

    def _commit(self, window: Window, session: Session) -> None:
        if not window.reservation or not window.done:
            if window.reservation:
                self._connection.abort(session, window.reservation)
            self._committed(window, 0)
            return
        positions = np.array(list(window.done), "<u4").tobytes()
        checksums = np.array(list(window.done.values()), "<u8").tobytes()
        commit = protocol.Commit(0, window.reservation, positions, checksums)
        call = self._connection.call(session, commit, protocol.Committed)

        def note() -> None:
            answer = call.wait()
            # Without an answer they may be there or not: they are not counted, and saved again some day.
            self._committed(window, answer.pages if answer is not None else 0)

        call.on_end(note)

    def _committed(self, window: Window, pages: int) -> None:
        there = sorted(window.done)[:pages]
        given_up = set(window.positions).difference(there)
        missing = sum(self._tokens(window.first + position, 1) for position in given_up)
        with self._state.lock:
            self._stored_tokens += max(window.stored_tokens - missing, 0)
            self._state.counters.saved_pages += len(there)
            self._state.counters.not_stored_pages += len(given_up)
        self._end(window)

    def _end(self, window: Window) -> None:
        self._give_back(window, keep=set())
        with self._state.lock:
            self._windows -= 1
            self._state.pending_saves -= window.count
            last = not self._windows and self._next == self._count
            self._state.changed.notify_all()
        self._budget.window_ended(window)
        if last:
            if self._name is not None:  # an engine saves as it computes: what comes next goes on from here
                self._remote.remembered.remember(self._question, self._name)
            self.transfer.finish()

    # -- what both need ------------------------------------------------------------------------------

    def _tokens(self, position: int, count: int) -> int:
        """Tokens in chunks of the prompt, its partial tail included."""
        chunk_tokens = self._question.chunk_tokens
        start = (self._first + position) * chunk_tokens
        return min(start + count * chunk_tokens, self._question.num_tokens) - start

    def _give_back(self, window: Window, *, keep: set[int]) -> None:
        """Give the leases on HBM pages back that need no copy (any more)."""
        with self._state.lock:
            for position in range(window.count):
                if position not in keep:
                    self._unhold(window.first + position)
            self._state.changed.notify_all()

    def _unhold(self, position: int) -> None:
        page = self._held.pop(position, None)
        if page is not None:
            self._state.leases.unlease(page, Tier.HBM)

    def _settle(self, _: TransferState) -> int:
        with self._state.lock:
            self._closed = True
            # The caller may reuse its pages from now on.
            self._state.changed.wait_for(lambda: not self._copying)
            return self._stored_tokens
