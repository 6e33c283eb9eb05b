"""Loads of a connected store: leading pages are in HBM already, the others come from the daemon.

The daemon is asked where pages are in windows (everything that it has in its arena at once, what is on its
disk in pieces), and asked for the next window while the last one is being copied. Copies are tasks of the
mover. Over TCP the pages come themselves, as frames of a message, and are copied and verified likewise.

From memory that a pool's device reaches, all pages of a window are copied by it in one go, layer by layer,
and the load ends when that has begun. What holds their source lasts until it has ended
(``daemon/copying.py``).

When a page cannot be had the load is *cut* there. Bytes copied from the arena count only if the lease had not
ended when the copy had: after that, the slot may have been somebody else's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tierstore import copying, memory
from tierstore.daemon import protocol
from tierstore.daemon.call import Call, numbers
from tierstore.daemon.connected_hit import ConnectedHit
from tierstore.daemon.copying import LEAST_S, Copying
from tierstore.daemon.remote import Remote, RemoteLease
from tierstore.index import Page, Tier
from tierstore.memory import Memory
from tierstore.mover import Mover, Priority
from tierstore.store.load import Loaded
from tierstore.store.state import StoreState
from tierstore.tiers.hbm import Filling
from tierstore.transfer import Transfer, TransferState

_WINDOW_PAGES = 4096  # of those in the daemon's arena
_DISK_BYTES = 16 << 20
_COPY_BYTES = 4 << 20  # one task of the mover
_WINDOWS = 2  # asked for at once
_FETCH_BYTES = protocol.MAX_FETCH_BYTES // 2  # the daemon bounds what is on its way to one client
_FETCHES = 3
_WAIT_S = 5.0  # for a window, where there is no deadline


@dataclass(frozen=True, slots=True)
class LocalPage:
    """A page to be copied out of HBM, under a lease of ours."""

    position: int
    page: Page


@dataclass(frozen=True, slots=True)
class _Until:
    """Bytes of the arena may be copied until the lease ends. Keeps it mapped. ``in_one_go``: all together,
    and beside whoever has the pages by then."""

    ends: float
    mapped: Memory | None
    in_one_go: bool


class ConnectedLoad(ABC):
    """What all destinations have in common. The state's lock guards ``_cut``, ``_arrived`` and the counts."""

    def __init__(
        self, state: StoreState, remote: Remote, mover: Mover, hit: ConnectedHit, deadline_s: float | None
    ) -> None:
        self.state = state
        self.remote = remote
        self.mover = mover
        self.hit = hit
        self.pages = hit.num_pages
        self.page_bytes = remote.page_bytes
        self.closed = False  # settled: nothing that arrives now will be handed out
        self._arrived = [False] * self.pages
        self._cut = self.pages
        self._copying = 0
        self._under_way = 1  # calls and tasks, and start() itself
        self._windows = 0
        self._next = 0  # the first page not asked for yet
        self._lease: RemoteLease | None = None
        self.transfer: Transfer[Loaded] = Transfer(
            self._settle, pages=self.pages, nbytes=self.pages * self.page_bytes, deadline_s=deadline_s
        )

    # -- what a destination decides ------------------------------------------------------------------

    @abstractmethod
    def _take_local(self) -> list[LocalPage]:
        """Take note of the pages that need no copy, and lease those to be copied within this process. Under
        the lock, as are the two below."""

    @abstractmethod
    def _targets(self, first: int, count: int) -> Sequence[int]:
        """Where the leading pages among ``first … first + count`` go."""

    def _land(self, first: int, targets: Sequence[int], *, good: int) -> None:
        """The first ``good`` of these have arrived, the others have not."""
        self._arrived[first : first + good] = [True] * good

    @abstractmethod
    def _fill(self, targets: Sequence[int], addresses: Sequence[int]) -> Filling:
        """Copy pages from host memory. While that goes on the targets may be handed out."""

    def _fill_checked(
        self, targets: Sequence[int], addresses: Sequence[int], checksums: Sequence[int]
    ) -> int:
        """Copy pages that have come by TCP, and return how many leading ones are what their sender had."""
        found = copying.hash_all(addresses, self.page_bytes)
        good = leading_equal(found, checksums)
        self._fill(targets[:good], addresses[:good]).wait()
        return good

    def _in_one_go(self, address: int) -> bool:
        """Whether pages of the arena that is mapped at ``address`` are best copied together."""
        return False

    def _came_late(self, pages: int) -> None:
        """Pages that were handed out were copied from what may have been somebody else's by then."""
        raise AssertionError("copies to host memory have ended when pages are handed out")

    @abstractmethod
    def _fill_from_hbm(self, targets: Sequence[int], places: Sequence[int]) -> None:
        """Copy pages of the pool."""

    @abstractmethod
    def _result(self, state: TransferState, pages: int, tokens: int) -> Loaded:
        """The outcome, ``pages`` being the contiguous prefix that arrived. Under the lock."""

    # -- running -------------------------------------------------------------------------------------

    def start(self) -> Transfer[Loaded]:
        with self.state.lock:
            local = self._take_local()
            here = sum(self._arrived)
            held = {each.position for each in local}
            wanted = (i for i, there in enumerate(self._arrived) if not there and i not in held)
            self._next = next(wanted, self.pages)
            self._under_way += bool(local) + (self._next < self.pages)
        self.transfer.advance(here, 0)
        if local:
            self.mover.submit(Priority.LOAD, lambda: self._copy_local(local))
        if self._next < self.pages:
            self.hit.with_lease(self._leased)
        self._step_done()
        return self.transfer

    def _leased(self, lease: RemoteLease | None) -> None:
        self._lease = lease
        if lease is None:
            self._cut_at(self._next)
        elif lease.tokens < self.hit.tokens:
            self._cut_at(max(lease.tokens // self.hit.chunk_tokens, self._next))
        self._ask_for_more()
        self._step_done()

    def _ask_for_more(self) -> None:
        lease = self._lease
        if lease is None:
            return
        limit = _FETCHES if lease.session.arena is None else _WINDOWS
        while not self.transfer.stopped:
            with self.state.lock:
                start = self._next
                count = min(self._window(lease, start), self._cut - start)
                if count <= 0 or self._windows >= limit:
                    return
                self._next += count
                self._windows += 1
                self._under_way += 1
            self._ask(lease, start, count)

    def _window(self, lease: RemoteLease, start: int) -> int:
        if lease.session.arena is None:
            return max(_FETCH_BYTES // self.page_bytes, 1)
        tier, run = lease.run_at(start)
        if tier == Tier.DISK.label:
            return min(run, max(_DISK_BYTES // self.page_bytes, 1))
        return min(run, _WINDOW_PAGES)

    def _ask(self, lease: RemoteLease, start: int, count: int) -> None:
        remaining = self.transfer.remaining_s
        wait_s = _WAIT_S if remaining is None else min(remaining, _WAIT_S)
        connection = self.remote.connection
        if lease.session.arena is None:
            fetch = protocol.Fetch(0, lease.number, start, count, wait_s)
            fetched = connection.call(lease.session, fetch, protocol.Fetched, wait_s=wait_s)
            fetched.on_end(lambda: self._fetched(fetched, start, count))
        else:
            load = protocol.Load(0, lease.number, start, count, wait_s)
            located = connection.call(lease.session, load, protocol.Located, wait_s=wait_s)
            located.on_end(lambda: self._located(lease, located, start, count))

    def _located(self, lease: RemoteLease, call: Call[protocol.Located], start: int, count: int) -> None:
        answer = call.wait()
        arena = lease.session.arena
        mapped = arena.memory if arena is not None else None
        addresses: list[int] = []
        if answer is not None and mapped is not None:
            offsets = numbers(answer.offsets, "<u8")[:count]
            # A wrong offset must not become a wrong address.
            good = int(np.argmin(np.append(offsets <= mapped.nbytes - self.page_bytes, False)))
            addresses = [mapped.address + offset for offset in offsets[:good].tolist()]
        if len(addresses) < count:
            self._cut_at(start + len(addresses))
        in_memory = lease.run_at(start)[0] == Tier.HOST.label
        in_one_go = in_memory and mapped is not None and self._in_one_go(mapped.address)
        self._copy_in_tasks(start, addresses, until=_Until(lease.ends, mapped, in_one_go))

    def _fetched(self, call: Call[protocol.Fetched], start: int, count: int) -> None:
        answer = call.wait()
        frames = [frame for frame in call.frames[:count] if frame.nbytes == self.page_bytes]
        checksums = numbers(answer.checksums if answer is not None else b"", "<u8").tolist()
        good = min(len(frames), len(checksums))
        if good < count:
            self._cut_at(start + good)
        self._copy_in_tasks(start, frames[:good], checksums=checksums)

    def _copy_in_tasks(
        self,
        start: int,
        sources: Sequence[int] | Sequence[memoryview],
        *,
        until: _Until | None = None,
        checksums: Sequence[int] = (),
    ) -> None:
        step = max(_COPY_BYTES // self.page_bytes, 1)
        if until is not None and until.in_one_go:
            step = max(len(sources), 1)
        with self.state.lock:
            self._windows -= 1
            self._under_way += -(-len(sources) // step)
        for at in range(0, len(sources), step):
            piece = sources[at : at + step]
            task = partial(self._copy, start + at, piece, until, checksums[at : at + step])
            self.mover.submit(Priority.LOAD, task)
        self._ask_for_more()
        self._step_done()

    def _copy(
        self,
        first: int,
        sources: Sequence[int] | Sequence[memoryview],
        until: _Until | None,
        checksums: Sequence[int],
    ) -> None:
        with self.state.lock:
            targets = () if self.closed else self._targets(first, len(sources))
            self._copying += 1
        good = len(targets)
        addresses = [_address(source) for source in sources[:good]]
        under_way = None
        if until is None:
            good = self._fill_checked(targets, addresses, checksums[:good])
        else:
            under_way = self._leave_alone(self._fill(targets, addresses), until)
        in_time = until is None or self.remote.clock() < until.ends
        with self.state.lock:
            self._copying -= 1
            if not in_time:
                self.state.counters.expired_leases += 1
                good = 0
            self._land(first, targets, good=good)
            if good < len(sources):
                self._cut = min(self._cut, first + good)
            self.state.changed.notify_all()
        if under_way is not None:
            self.mover.submit(Priority.LOAD, partial(self._await_copies, under_way, good))
        self.transfer.advance(good, good * self.page_bytes)
        self._step_done()

    def _leave_alone(self, filling: Filling, until: _Until) -> Copying | None:
        """Wait for copies, unless they can go on by themselves."""
        beside = until.in_one_go and not filling.done
        if not beside or self.hit.lease_left_s < LEAST_S or not self.hit.hold():
            filling.wait()
            return None
        return Copying(self.hit, filling, until.mapped)

    def _await_copies(self, copying: Copying, pages: int) -> None:
        if not copying.wait():
            with self.state.lock:
                self.state.counters.expired_leases += 1
            self._came_late(pages)

    def _copy_local(self, local: Sequence[LocalPage]) -> None:
        state = self.state
        with state.lock:
            wanted = [] if self.closed else local
            targets = [target for each in wanted for target in self._targets(each.position, 1)]
            places = [state.index.copy(each.page, Tier.HBM).place for each in wanted[: len(targets)]]
            self._copying += 1
        self._fill_from_hbm(targets, places)
        with state.lock:
            self._copying -= 1
            for each, target in zip(wanted, targets, strict=False):
                self._land(each.position, [target], good=1)
            for each in local:
                state.leases.unlease(each.page, Tier.HBM)
            state.changed.notify_all()
        self.transfer.advance(len(targets), len(targets) * self.page_bytes)
        self._step_done()

    def _cut_at(self, position: int) -> None:
        with self.state.lock:
            self._cut = min(self._cut, position)

    def _step_done(self) -> None:
        with self.state.lock:
            self._under_way -= 1
            last = self._under_way == 0
        if last:
            self.transfer.finish()

    # -- ending --------------------------------------------------------------------------------------

    def _settle(self, state: TransferState) -> Loaded:
        with self.state.lock:
            self.closed = True
            # Bytes may be on their way into memory that goes back to the caller now.
            self.state.changed.wait_for(lambda: not self._copying)
            pages = 0
            if state is not TransferState.CANCELLED:
                pages = next((i for i, here in enumerate(self._arrived) if not here), self.pages)
            tokens = self.hit.tokens if pages == self.pages else pages * self.hit.chunk_tokens
            self.state.counters.loads_cut_short += tokens < self.hit.tokens
            self.state.counters.loaded_pages += pages
            loaded = self._result(state, pages, tokens)
        self.hit.release()
        return loaded


def _address(source: int | memoryview) -> int:
    return source if isinstance(source, int) else memory.address_of(source, writable=False)


def leading_equal(found: Sequence[int], expected: Sequence[int]) -> int:
    """How many of them are equal before the first that are not."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((position for position, (one, other) in pairs if one != other), len(found))
