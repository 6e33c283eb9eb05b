"""Read pages under a lease: locate them in host memory, and load them into host memory first if necessary.

A lease holds the last page of each run of pages in one tier, because the pages before it cannot leave that
tier earlier. In a shared core, the same lease holds located pages, because clients may die. In a core of this
process only, a separate lease holds located pages until the caller releases them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tierstore import copying
from tierstore.backend import Lease, Located
from tierstore.core.clients import Client, LocalLease
from tierstore.core.core import Core
from tierstore.core.loads import HostLoad
from tierstore.core.prompts import HOLD_S
from tierstore.index import Page, Tier
from tierstore.mover import Priority
from tierstore.transfer import Transfer

R = TypeVar("R")

_WAIT_S = 60.0  # longest wait for a disk if the caller sets no limit
_WINDOW_PAGES = 4096  # largest batch from the host tier
_DISK_BYTES = 16 << 20  # largest batch from the disk
_BATCHES_IN_ARENA = 2  # a batch from disk takes at most 1/2 of the host tier


@dataclass(frozen=True, slots=True)
class Sending:
    """Pages to send, the XXH3-64 of each page, and a function to call after they were sent."""

    frames: Sequence[memoryview]
    checksums: Sequence[int]
    release: Callable[[], None]


class Reading:
    """The operations on the leases of one client of ``core``. Thread-safe."""

    def __init__(self, core: Core, client: Client) -> None:
        self.core = core
        self.client = client
        self._state = core.state

    def holds(self, lease: Lease) -> bool:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        return not self._ended(lease)

    def release(self, lease: Lease) -> None:
        with self._state.lock:
            held = self.client.leases.pop(lease.number, None)
            if held is not None:
                self._state.leases.release(held.hold)

    def batch_pages(self, lease: Lease, first: int) -> int:
        tier, run = lease.run_at(first)
        if tier != Tier.DISK.label or self.core.host is None:
            return min(run, _WINDOW_PAGES)
        batch = min(_DISK_BYTES, self.core.host.capacity_bytes // _BATCHES_IN_ARENA)
        return min(run, max(batch // lease.page_bytes, 1))

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        count = max(min(count, lease.pages - first), 0)

        def located() -> Located | None:
            return self._located(lease, first, count)

        return self._bring(lease, first, count, wait_s, Priority.LOAD, located)

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        first = min(first, lease.pages)
        count = lease.pages - first

        def held() -> int:
            pages = 0 if self._ended(lease) else count_in_arena(lease.held, first, count)
            self._hold_under(lease, first, pages)
            return pages

        return self._bring(lease, first, count, wait_s, Priority.PREFETCH, held)

    def send(self, lease: LocalLease, first: int, count: int, *, wait_s: float) -> Transfer[Sending]:
        """Locate pages for a client on another host, as :meth:`locate` does. The pages are held until they
        were sent, even if the client's lease ends before that."""
        state, host = self._state, self.core.host

        def sending() -> Sending:
            pages = 0 if self._ended(lease) else count_in_arena(lease.held, first, count)
            held = lease.held[first : first + pages]
            state.counters.loaded_pages += pages
            if not held or host is None:
                return Sending((), (), lambda: None)
            release = self._hold_for_copying(lease, first, pages)
            self._hold_under(lease, first, pages)
            frames = [host.view(state.index.copy(page, Tier.HOST).place, page.nbytes) for page in held]
            checksums = [page.checksum or 0 for page in held]
            return Sending(frames, checksums, release)

        return self._bring(lease, first, count, wait_s, Priority.LOAD, sending)

    def report_damage(self, lease: Lease, position: int) -> None:
        assert isinstance(lease, LocalLease), "the lease is of another backend"
        page = lease.held[position]
        state = self._state
        with state.lock:
            copy = page.copies[Tier.HOST]
            # One check at a time, so that a client's reports cost no more time than hashing one page takes.
            if self.client.suspects or copy is None or not copy.ready or page.checksum is None:
                return
            self.client.suspects = True
            hold = state.leases.take([(page, Tier.HOST)], math.inf)
            address, expected = self.core.arena_address + copy.place, page.checksum

        def look() -> None:
            [found] = copying.hash_all([address], page.nbytes)
            with state.lock:
                self.client.suspects = False
                if found != expected and page.checksum == expected:
                    state.residency.damaged_in_host(page)
                state.leases.release(hold)
                state.changed.notify_all()

        self.core.mover.submit(Priority.SAVE, look)

    def _bring(
        self,
        lease: LocalLease,
        first: int,
        count: int,
        wait_s: float | None,
        priority: Priority,
        result: Callable[[], R],
    ) -> Transfer[R]:
        """Load the missing pages into the host tier. ``result`` is called at the end, under the lock."""
        state = self._state
        pages = lease.held[first : first + count]
        with state.lock:
            there = count_in_arena(lease.held, first, count)
            if there == count or self._ended(lease) or state.closed:
                return Transfer.completed(result())
            held = [(page, tier) for page in pages if (tier := page.ready_tier()) is not None]
            if len(held) < len(pages):
                return Transfer.completed(result())
            self.client.require_patience()
            self.client.waiting += 1
            on_disk = sum(page.num_tokens for page, tier in held if tier is Tier.DISK)
            self.core.write_worth(self.client.tenant).read(on_disk)
            hold = state.leases.take(held, (_WAIT_S if wait_s is None else wait_s) + HOLD_S)

        def settled() -> R:
            self.client.waiting -= 1
            return result()

        state.stall_detector.poll()
        load = HostLoad(
            state,
            self.core.mover,
            pages,
            hold,
            deadline_s=wait_s,
            priority=priority,
            result=settled,
            release_holds=partial(self._release_holds, lease),
        )
        return load.start()

    def _located(self, lease: LocalLease, first: int, count: int) -> Located | None:
        """Hold the pages that are in the arena, and return their addresses. Needs the lock."""
        state = self._state
        pages = 0 if self._ended(lease) else count_in_arena(lease.held, first, count)
        state.counters.loaded_pages += pages
        if not pages:
            return None
        start = self.core.arena_address
        copy = state.index.copy
        held = lease.held[first : first + pages]
        addresses = [start + copy(page, Tier.HOST).place for page in held]
        if self.core.shared:
            checksums = [page.checksum or 0 for page in held]
            self._hold_under(lease, first, pages)
            lease.located.update(lease.holders(first, pages))
            return Located(addresses, lease.ends, checksums)
        # Checksums are not needed, because no other process writes to the arena.
        return Located(addresses, release=self._hold_for_copying(lease, first, pages))

    def _hold_under(self, lease: LocalLease, first: int, count: int) -> None:
        """Extend the lease to these pages in the arena. Needs the lock."""
        if not count:
            return
        known = set(lease.hold.held) if lease.positions else lease.hold.held
        for page in lease.holders(first, count):
            if (page, Tier.HOST) not in known:
                self._state.index.lease(page, Tier.HOST)
                lease.hold.held.append((page, Tier.HOST))

    def _release_holds(self, lease: LocalLease) -> bool:
        """Release holds on a hit's pages in the arena that are also on disk, except for pages whose address a
        client has. (A separate hold keeps pages that are being copied.) Return whether any were released."""
        freed = False
        if not lease.hold.released:
            for position, (page, _) in enumerate(lease.hold.held):
                if page not in lease.located:
                    freed = self._state.leases.hold_on_disk(lease.hold, position) or freed
        return freed

    def _ended(self, lease: LocalLease) -> bool:
        if not self.core.shared:
            return lease.hold.released  # the end time matters only to clients in other processes
        return lease.hold.released or lease.hold.ends <= self._state.clock()

    def _hold_for_copying(self, lease: LocalLease, first: int, count: int) -> Callable[[], None]:
        """Hold pages in the arena until the returned function is called, even if the lease ends before that.
        A load that finds no room waits briefly for such holds. Needs the lock."""
        state = self._state
        hold = state.leases.take([(page, Tier.HOST) for page in lease.holders(first, count)], math.inf)
        state.fills.copying += count

        def release() -> None:
            with state.lock:
                state.fills.copying -= 0 if hold.released else count
                state.leases.release(hold)
                state.changed.notify_all()

        return release


def count_in_arena(pages: Sequence[Page], first: int, count: int) -> int:
    """Return how many consecutive pages from ``first`` on are complete in the arena."""
    for position in range(first, first + count):
        copy = pages[position].copies[Tier.HOST]
        if copy is None or not copy.ready:
            return position - first
    return count
