"""Reading pages under a daemon's leases: pages in the mapped arena, pages that arrive as frames, and pages
that the daemon has yet to load into its memory.

A lease ends ``lease_s`` seconds after the daemon granted it. The client counts the same time from its
*request*, so for the client the lease ends earlier. A store reads its clock after each copy. If the lease has
ended, the store discards the copied bytes. The check of the clock needs no message and no shared state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tierstore import memory
from tierstore.backend import Lease, Located, LookupRequest
from tierstore.client.channel import numbers
from tierstore.client.handshake import DaemonLink
from tierstore.client.lookups import RemoteLookups
from tierstore.client.state import RemoteLease, RemoteState, in_full, link_of, pages_of, prompt_part
from tierstore.index import Tier
from tierstore.transfer import Transfer
from tierstore.wire import messages

_BATCH_PAGES = 4096  # for pages in the daemon's arena
_DISK_BYTES = 16 << 20  # for pages that the daemon reads from its disk
_FETCH_BYTES = messages.MAX_FETCH_BYTES // 2  # for frames; two batches may be in flight
_WAIT_S = 10.0  # the daemon's time limit if the caller gives no deadline


class RemoteReading:
    """The part of a client that prefetches, locates and fetches leased pages. Thread-safe."""

    def __init__(self, state: RemoteState, lookups: RemoteLookups) -> None:
        self._state = state
        self._connection = state.connection
        self._lookups = lookups

    def holds(self, lease: Lease) -> bool:
        link = link_of(lease)
        return link is not None and link.current and self._state.clock() < lease.ends

    def batch_pages(self, lease: Lease, first: int) -> int:
        link = link_of(lease)
        if link is not None and link.arena is None:
            return max(_FETCH_BYTES // lease.page_bytes, 1)
        tier, run = lease.run_at(first)
        if tier == Tier.DISK.label:
            return min(run, max(_DISK_BYTES // lease.page_bytes, 1))
        return min(run, _BATCH_PAGES)

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        assert isinstance(lease, RemoteLease), "the lease is of another backend"
        wait_s = _WAIT_S if wait_s is None else min(wait_s, messages.MOST_WAIT_S)
        link = lease.link
        if link is None:
            return Transfer.completed(None)
        if link.arena is None:

            def fetched(answer: messages.Fetched | None, frames: Sequence[memoryview]) -> Located | None:
                return self._fetched(lease, answer, frames, count)

            fetch = messages.Fetch(0, lease.number, first, count, wait_s)
            return self._connection.call(link, fetch, messages.Fetched, fetched, wait_s=wait_s)

        def located(answer: messages.Offsets | None, _: object) -> Located | None:
            return self._located(lease, link, answer, count)

        load = messages.Locate(0, lease.number, first, count, wait_s)
        return self._connection.call(link, load, messages.Offsets, located, wait_s=wait_s)

    def _located(
        self, lease: RemoteLease, link: DaemonLink, answer: messages.Offsets | None, count: int
    ) -> Located | None:
        mapped = link.arena.memory if link.arena is not None else None
        if answer is None or mapped is None:
            return None
        offsets = numbers(answer.offsets, "<u8")[:count]
        # An offset outside of the arena must not become an address.
        good = int(np.argmin(np.append(offsets <= mapped.nbytes - lease.page_bytes, False)))
        if not good:
            return None
        with self._state.lock:
            lease.copies += 1
        addresses = [mapped.address + offset for offset in offsets[:good].tolist()]

        def renew(then: Callable[[float], None]) -> None:
            self._renew(lease, then)

        def copied() -> None:
            with self._state.lock:
                lease.copies -= 1
                unused = lease.released and not lease.copies
            if unused:
                self._state.give_back(lease)

        checksums = numbers(answer.checksums, "<u8")[:good].tolist() if self._state.verify else ()
        return Located(
            addresses,
            lease.ends,
            checksums if len(checksums) == good else (),
            release=copied,
            renew=renew,
            memory=mapped,
        )

    def _fetched(
        self, lease: Lease, answer: messages.Fetched | None, frames: Sequence[memoryview], count: int
    ) -> Located | None:
        pages = [frame for frame in frames[:count] if frame.nbytes == lease.page_bytes]
        checksums = numbers(answer.checksums if answer is not None else b"", "<u8").tolist()
        good = min(len(pages), [*checksums, 0].index(0))
        if not good:
            return None
        addresses = [memory.address_of(frame, writable=False) for frame in pages[:good]]
        return Located(addresses, checksums=checksums[:good], memory=pages)

    def report_damage(self, lease: Lease, position: int) -> None:
        link = link_of(lease)
        if link is not None and link.arena is not None:  # over TCP, the page was damaged in transit
            self._connection.send(link, messages.ReportDamage(lease.number, position))

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        link = link_of(lease)
        if link is None:
            return Transfer.completed(0)
        wait_s = _WAIT_S if wait_s is None else min(wait_s, messages.MOST_WAIT_S)
        message = messages.Prefetch(0, lease.number, wait_s, first)
        return self._connection.call(link, message, messages.Prefetched, pages_of, wait_s=wait_s)

    def _renew(self, lease: RemoteLease, then: Callable[[float], None]) -> None:
        """Look the lease's pages up again, and replace the lease by the new one if that covers them. Call
        ``then`` with the time at which the lease ends now."""
        request = lease.request
        assert request is not None, "the lease has no request"
        patience_s = self._connection.patience_s
        found = self._lookups.ask(request.found(lease), patience_s, caller_receives=False)

        def adopt() -> None:
            newer = found.wait()
            if isinstance(newer, RemoteLease):
                with self._state.lock:
                    if newer.tokens >= lease.tokens and lease.copies:
                        lease.number, newer.number = newer.number, lease.number
                        lease.link, newer.link = newer.link, lease.link
                        lease.ends = newer.ends
                self._state.give_back(newer)
            then(lease.ends)

        found.on_end(adopt)

    def fetch_remote(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        link = self._state.link_for(request.identity)
        if link is None or not link.cluster:
            return Transfer.completed(0)
        wait_s = min(wait_s, messages.MOST_WAIT_S)

        def message() -> messages.FetchRemote:
            prompt = prompt_part(link, request, request.handle_of(link))
            return messages.FetchRemote(0, prompt, first, count, wait_s)

        def fetched(answer: messages.FetchedRemote | None, _: object) -> int:
            return answer.chunks if answer is not None else 0

        return self._connection.call(
            link,
            message(),
            messages.FetchedRemote,
            fetched,
            wait_s=wait_s,
            otherwise=in_full(message, request),
        )
