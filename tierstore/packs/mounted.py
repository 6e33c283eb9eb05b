"""A pack as a source of pages for a store, without taking all of it in.

A mounted pack stands behind a store's backend: what the backend holds of a prompt comes from there, and what
follows in the pack comes from the file. Pages are read when a load wants them, and compared with their
checksums each time. Those that were read are handed to the backend as well, in passing, as far as it has
room: they are in the daemon (or the embedded store's tiers) for the next, and what is saved behind them can
be found.

The file has to stay as it is while it is mounted; one that changes is a miss, never a wrong byte. Only whole
chunks are found. To the planner these pages are on disk.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt

from tierstore import copying
from tierstore.backend import (
    NO_HINTS,
    Backend,
    HitLease,
    HitRequest,
    Lease,
    Located,
    LookupRequest,
    PrefixHandle,
    Registration,
    Reservation,
    SaveHints,
)
from tierstore.errors import UsageError
from tierstore.packs.format import Manifest, table_bytes
from tierstore.packs.hashing import hash_pages
from tierstore.packs.reading import ANYBODY, open_pack
from tierstore.packs.signing import Trust
from tierstore.planner import Way
from tierstore.stats import StoreStats
from tierstore.transfer import Transfer, TransferState

_THREADS = 2


class MountedPack:
    """A pack whose seals have all been checked; its pages are checked when they are read. Thread-safe."""

    def __init__(
        self, fd: int, manifest: Manifest, checksums: Sequence[int], digests: Sequence[bytes]
    ) -> None:
        self.manifest = manifest
        self.checksums = checksums
        self._fd = fd
        self._digests = digests
        self._damaged: set[int] = set()
        self._places = {
            prompt.keys[at * 16 : at * 16 + 16]: (prompt.tokens, at, run.page + at - run.chunk)
            for prompt, run in zip(manifest.prompts, manifest.runs, strict=True)
            for at in range(run.chunk, prompt.chunks)
        }

    @property
    def damaged_pages(self) -> int:
        """Pages that were not what they had been when the pack was made."""
        return len(self._damaged)

    def match(self, request: LookupRequest) -> list[int]:
        """The pages of the leading whole chunks of a prompt. Tokens decide, as everywhere."""
        pages: list[int] = []
        width = request.width
        if request.identity != self.manifest.identity or request.loose:
            return pages
        for at, key in enumerate(request.keys):
            tokens, chunk, page = self._places.get(key, (b"", -1, -1))
            same = chunk == at and tokens[at * width : (at + 1) * width] == request.chunk(at)
            if not same or page in self._damaged:
                break
            pages.append(page)
        return pages

    def read(self, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The leading ones of these pages that are what they were, one in each row. Blocks."""
        manifest = self.manifest
        memory = np.empty((len(pages), manifest.page_bytes), np.uint8)
        for row, page in enumerate(pages):
            view = memory[row].data
            if not self._read(page, view) or hash_pages(view, manifest.page_bytes, manifest.hash) != [
                (self.checksums[page], self._digests[page])
            ]:
                self._damaged.add(page)  # and nothing behind it is found any more
                return memory[:row]
        return memory

    def _read(self, page: int, view: memoryview) -> bool:
        manifest = self.manifest
        block, at = divmod(page, manifest.block_pages)
        start = manifest.block_at(block) + table_bytes(manifest.pages_of(block)) + at * manifest.page_bytes
        done = 0
        with suppress(OSError):
            while done < len(view) and (count := os.preadv(self._fd, [view[done:]], start + done)):
                done += count
        return done == len(view)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def mount(path: Path, trust: Trust = ANYBODY) -> MountedPack:
    """Check all seals of a pack, and none of its pages yet. Raises :class:`PackError` and
    :class:`UsageError` like :func:`~tierstore.packs.reading.open_pack`, and :class:`ModuleNotFoundError`
    where the package of its hash is not installed."""
    with ThreadPoolExecutor(1) as thread:  # the caller's may run an event loop
        return thread.submit(lambda: asyncio.run(_mounted(path, trust))).result()


async def _mounted(path: Path, trust: Trust) -> MountedPack:
    checksums: list[int] = []
    digests: list[bytes] = []
    async with open_pack(path, trust) as reader:
        if reader.manifest.following or any(prompt.loose for prompt in reader.manifest.prompts):
            raise UsageError(f"{path} is of a model of several layer groups: import it, it cannot be mounted")
        reader.manifest.hash.digester()  # a missing package is said now, not by loads
        async with aclosing(reader.blocks(lambda first, count: False)) as blocks:
            async for block in blocks:
                checksums += block.checksums
                digests += block.digests
        return MountedPack(reader.dup(), reader.manifest, checksums, digests)


@dataclass(slots=True, eq=False)
class _PackLease(Lease):
    """``inner`` (None: nothing) holds the first ``whole`` pages; behind them they are ``packed``."""

    inner: Lease | None = None
    whole: int = 0
    packed: Sequence[int] = ()
    request: LookupRequest | None = None
    handed_on: set[int] = field(default_factory=set)


class MountedBackend:
    """A backend, and a pack behind it. It owns both."""

    def __init__(self, inner: Backend, pack: MountedPack) -> None:
        self.page_bytes = pack.manifest.page_bytes
        self._inner = inner
        self._pack = pack
        self._lock = Lock()  # for what leases have handed on
        self._readers = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-pack")

    def __repr__(self) -> str:
        return f"MountedBackend({self._inner!r}, {self._pack.manifest.pages} pages)"

    # -- reading -------------------------------------------------------------------------------------

    def find(
        self, request: LookupRequest, *, patience_s: float, caller_receives: bool = False
    ) -> Transfer[Lease | None]:
        packed = self._pack.match(request)
        if not packed:
            return self._inner.find(request, patience_s=patience_s, caller_receives=caller_receives)
        found = self._inner.find(request, patience_s=patience_s)
        answer: list[Lease] = []

        def settle(state: TransferState) -> Lease | None:
            return answer.pop() if answer else None

        transfer: Transfer[Lease | None] = Transfer(settle, pages=0, nbytes=0)
        transfer.watch(found)

        def joined() -> None:
            answer.append(self._joined(found.wait(), request, packed))
            transfer.finish()
            while answer:  # nobody wanted it any more
                self.release(answer.pop())

        found.on_end(joined)
        return transfer

    def expect(self, request: LookupRequest, *, wait_s: float) -> Transfer[None]:
        return self._inner.expect(request, wait_s=wait_s)

    def _joined(self, inner: Lease | None, request: LookupRequest, packed: Sequence[int]) -> Lease:
        chunk_tokens = request.chunk_tokens
        inner = inner if inner is not None and inner.tokens else None
        whole = inner.tokens // chunk_tokens if inner is not None else 0
        if inner is not None and len(packed) * chunk_tokens <= inner.tokens:
            return inner
        runs: list[tuple[str, int]] = []
        for tier, count in inner.runs if inner is not None else ():
            runs.append((tier, min(count, whole - sum(each for _, each in runs))))
        runs = [run for run in runs if run[1] > 0]
        runs.append(("disk", len(packed) - whole))
        return _PackLease(
            number=inner.number if inner is not None else 0,
            tokens=len(packed) * chunk_tokens,
            pages=len(packed),
            runs=runs,
            ends=inner.ends if inner is not None else math.inf,
            handle=inner.handle if inner is not None else None,
            inner=inner,
            whole=whole,
            packed=packed,
            request=request,
        )

    def window_pages(self, lease: Lease, first: int) -> int:
        if not isinstance(lease, _PackLease):
            return self._inner.window_pages(lease, first)
        if lease.inner is not None and first < lease.whole:
            return min(self._inner.window_pages(lease.inner, first), lease.whole - first)
        return self._pack.manifest.block_pages

    def locate(
        self, lease: Lease, first: int, count: int, *, wait_s: float | None
    ) -> Transfer[Located | None]:
        if not isinstance(lease, _PackLease):
            return self._inner.locate(lease, first, count, wait_s=wait_s)
        if lease.inner is not None and first < lease.whole:
            count = min(count, lease.whole - first)
            return self._inner.locate(lease.inner, first, count, wait_s=wait_s)
        read: list[Located] = []

        def settle(state: TransferState) -> Located | None:
            return read[0] if read else None

        pages = lease.packed[first : first + count]
        transfer: Transfer[Located | None] = Transfer(
            settle, pages=len(pages), nbytes=len(pages) * self.page_bytes, deadline_s=wait_s
        )

        def bring() -> None:
            try:
                memory = self._pack.read(pages) if not transfer.stopped else None
                if memory is not None and len(memory):
                    start = memory.ctypes.data
                    addresses = range(start, start + memory.nbytes, self.page_bytes)
                    read.append(Located(addresses, memory=[memory.reshape(-1).data]))
                    self._hand_on(lease, first, memory)
            finally:
                transfer.finish()

        self._readers.submit(bring)
        return transfer

    def _hand_on(self, lease: _PackLease, first: int, memory: npt.NDArray[np.uint8]) -> None:
        """Have the backend keep pages that were read, if it has room; nobody waits for that."""
        request = lease.request
        with self._lock:
            if request is None or first in lease.handed_on:
                return
            lease.handed_on.add(first)
        inner, count = self._inner, len(memory)
        inner.introduce(request.registration)
        reserving = inner.reserve(request.cut((first + count) * request.chunk_tokens), first, count)

        def reserved() -> None:
            reservation = reserving.wait()
            if reservation is None or not reservation.positions:
                return
            try:  # not on the thread that receives a daemon's answers
                self._readers.submit(write, reservation)
            except RuntimeError:  # closing
                inner.abort(reservation)

        def write(reservation: Reservation) -> None:
            rows = [memory[at] for at in reservation.positions]
            checksums = {at: self._pack.checksums[lease.packed[first + at]] for at in reservation.positions}
            if reservation.addresses is None:
                sent = inner.write(reservation, 0, [row.data for row in rows])
                sent.on_end(partial(_commit, inner, reservation, checksums, sent))
                return
            copies = zip(reservation.addresses, (row.ctypes.data for row in rows), strict=True)
            copying.copy_all(copies, self.page_bytes)
            inner.commit(reservation, checksums)

        reserving.on_end(reserved)

    def prefetch(self, lease: Lease, *, first: int = 0, wait_s: float | None) -> Transfer[int]:
        if not isinstance(lease, _PackLease):
            return self._inner.prefetch(lease, first=first, wait_s=wait_s)
        if lease.inner is not None and first < lease.whole:
            return self._inner.prefetch(lease.inner, first=first, wait_s=wait_s)
        return Transfer.completed(0)

    def suspect(self, lease: Lease, position: int) -> None:
        if not isinstance(lease, _PackLease):
            self._inner.suspect(lease, position)
        elif lease.inner is not None and position < lease.whole:
            self._inner.suspect(lease.inner, position)

    def holds(self, lease: Lease) -> bool:
        if isinstance(lease, _PackLease):
            return lease.inner is None or self._inner.holds(lease.inner)
        return self._inner.holds(lease)

    def release(self, lease: Lease) -> None:
        held = lease.inner if isinstance(lease, _PackLease) else lease
        if held is not None:
            self._inner.release(held)

    # -- all else is the backend's -------------------------------------------------------------------

    @property
    def lease_s(self) -> float:
        return self._inner.lease_s

    @property
    def remote(self) -> bool:
        return self._inner.remote

    def bring(self, request: LookupRequest, first: int, count: int, *, wait_s: float) -> Transfer[int]:
        return self._inner.bring(request, first, count, wait_s=wait_s)

    @property
    def reserve_bytes(self) -> int:
        return self._inner.reserve_bytes

    def ways(self) -> Mapping[str, Way]:
        return self._inner.ways()

    def declined(self, tokens: Mapping[str, int]) -> None:
        self._inner.declined(tokens)

    def reserve(
        self,
        request: LookupRequest,
        first: int,
        count: int,
        *,
        hints: SaveHints = NO_HINTS,
        handle: PrefixHandle | None = None,
    ) -> Transfer[Reservation | None]:
        return self._inner.reserve(request, first, count, hints=hints, handle=handle)

    def write(self, reservation: Reservation, first: int, frames: Sequence[memoryview]) -> Transfer[bool]:
        return self._inner.write(reservation, first, frames)

    def commit(self, reservation: Reservation, checksums: dict[int, int]) -> Transfer[int]:
        return self._inner.commit(reservation, checksums)

    def abort(self, reservation: Reservation) -> None:
        self._inner.abort(reservation)

    def pin(self, request: LookupRequest, *, undo: bool = False) -> Transfer[int]:
        return self._inner.pin(request, undo=undo)

    def evict(self, tier: str, pages: int | None) -> int:
        return self._inner.evict(tier, pages)

    def finish(self, session: str) -> int | None:
        return self._inner.finish(session)

    def flush(self, timeout: float | None) -> bool:
        return self._inner.flush(timeout)

    def stats(self) -> StoreStats:
        return self._inner.stats()

    def check(self) -> None:
        self._inner.check()

    @property
    def connected(self) -> bool:
        return self._inner.connected

    def wait_connected(self, timeout: float | None) -> bool:
        return self._inner.wait_connected(timeout)

    def wait_ready(self, timeout: float) -> None:
        self._inner.wait_ready(timeout)

    def find_hit(self, request: HitRequest, *, patience_s: float) -> Transfer[HitLease | None]:
        return self._inner.find_hit(request, patience_s=patience_s)

    def introduce(self, registration: Registration) -> None:
        self._inner.introduce(registration)

    def close(self) -> None:
        self._readers.shutdown()
        self._inner.close()
        self._pack.close()


def _commit(
    inner: Backend, reservation: Reservation, checksums: dict[int, int], sent: Transfer[bool]
) -> None:
    if sent.wait():
        inner.commit(reservation, checksums)
    else:
        inner.abort(reservation)
