"""The store itself: what a connector calls. It owns the parts, checks arguments, and hands the work on."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from tierstore.errors import UsageError
from tierstore.index import Page, Tier
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.mover import Mover
from tierstore.policy import POLICIES
from tierstore.spec import KVSpec
from tierstore.store.endpoints import Buffers, PageSource
from tierstore.store.find import find
from tierstore.store.health import STALL_S, Condition
from tierstore.store.hit import Hit
from tierstore.store.load import Loaded, Loader
from tierstore.store.save import HbmPages, SaveJob
from tierstore.store.state import StoreState
from tierstore.store.stats import StoreStats
from tierstore.store.write_behind import WriteBehind
from tierstore.tiers.disk import DiskTier, FileIO
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier
from tierstore.transfer import Transfer
from tierstore.units import GIB, KIB, format_size

_log = logging.getLogger(__name__)

DEFAULT_HOST_BYTES = 1 * GIB
DEFAULT_DISK_BYTES = 10 * GIB
_EVICTED_AT_ONCE = 512  # pages; then others get the lock
_QUEUE_FRACTION = 1 / 2  # of the host tier, that may wait to be written to disk


class Store:
    """A stack of tiers with one index, one mover and one policy. Thread-safe.

    Open one with :meth:`Store.open`. Pages are found by a :class:`~tierstore.keys.Prompt` (or bare tokens,
    under the store's own identity). Nothing here raises because a tier is full, slow or broken: fewer tokens
    come back, or fewer are stored. :class:`~tierstore.errors.UsageError` and
    :class:`~tierstore.errors.StoreClosedError` are for mistakes of the caller.
    """

    def __init__(
        self,
        spec: KVSpec,
        identity: Identity,
        *,
        pool: PagePool | None,
        host: HostTier | None,
        disk: DiskTier | None,
        policy: str,
        lease_s: float,
        mover_threads: int,
        stall_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.spec = spec
        self.identity = identity
        self.pool = pool
        self._host = host
        self._disk = disk
        self._lease_s = lease_s
        self._layout = spec.describe()  # compared at every lookup
        self._state = StoreState(
            [POLICIES[policy]() for _ in Tier],
            host=host,
            pool=pool,
            disk=disk,
            clock=clock,
            stall_s=stall_s,
        )
        self._mover = Mover(mover_threads, disk_threads=mover_threads if disk is not None else 0)
        self._loader = Loader(self._state, self._mover)
        self._given_back = False
        self._write_behind: WriteBehind | None = None
        if disk is not None and host is not None:
            queue_bytes = int(host.capacity_bytes * _QUEUE_FRACTION)
            self._write_behind = WriteBehind(self._state, disk, queue_bytes=queue_bytes)

    @classmethod
    def open(
        cls,
        path: str | Path | None,
        spec: KVSpec,
        *,
        identity: Identity | None = None,
        pool: PagePool | None = None,
        host_bytes: int = DEFAULT_HOST_BYTES,
        disk_bytes: int = DEFAULT_DISK_BYTES,
        inline_bytes: int = 16 * KIB,
        policy: str = "lru",
        lease_s: float = 60.0,
        mover_threads: int = 4,
        stall_s: float = STALL_S,
        io: FileIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> Store:
        """Open the embedded store.

        ``path`` is the disk tier's directory (made if it is not there; one process at a time), None for none.
        ``pool`` is the engine's HBM page pool, if pages are to be found and kept there too. ``identity``
        stands for tokens given without a prompt; without one only the layout tells pages apart, so give one
        wherever weights, adapters or tenants can differ. ``lease_s`` is how long a hit holds its pages.
        A disk that has not answered a call for ``stall_s`` seconds is not waited for any more, until it does.
        ``io`` and ``clock`` are for tests that make the disk fail.

        Raises :class:`UsageError` for capacities that cannot hold a page and
        :class:`~tierstore.errors.StoreUnavailableError` for a directory that cannot be used.
        """
        if policy not in POLICIES:
            raise UsageError(f"unknown policy {policy!r} (known: {', '.join(POLICIES)})")
        if pool is not None and pool.spec != spec:
            raise UsageError("the page pool was made for another KV spec than the store's")
        if path is not None and not host_bytes:
            raise UsageError("a disk tier needs a host tier: pages pass through it (give host_bytes)")
        _require_room("host_bytes", host_bytes, spec)
        if path is not None:
            _require_room("disk_bytes", disk_bytes, spec)
        disk = None
        if path is not None:
            disk = DiskTier.open(
                Path(path),
                capacity_bytes=disk_bytes,
                page_bytes=spec.page_bytes,
                inline_bytes=inline_bytes,
                io=io,
                clock=clock,
            )
        try:
            host = HostTier(host_bytes) if host_bytes else None
        except UsageError:
            if disk is not None:
                disk.close()
            raise
        return cls(
            spec,
            identity or Identity.of(spec, model="default"),
            pool=pool,
            host=host,
            disk=disk,
            policy=policy,
            lease_s=lease_s,
            mover_threads=mover_threads,
            stall_s=stall_s,
            clock=clock,
        )

    def __repr__(self) -> str:
        return (
            f"Store({', '.join(f'{name}: {tier.pages} pages' for name, tier in self.stats().tiers.items())})"
        )

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- finding and loading -------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds) -> Prompt:
        """``tokens`` under the store's own identity, with their keys."""
        return Prompt(self.identity, tokens, chunk_tokens=self.spec.chunk_tokens)

    def lookup(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """The longest prefix of ``prompt`` (at most ``max_tokens``) that is held in any tier, leased until
        the hit is loaded or released, or the lease ends."""
        prompt = self._as_prompt(prompt)
        limit = len(prompt) if max_tokens is None else min(max_tokens, len(prompt))
        state = self._state
        state.lookout.look()
        with find(state, prompt, limit, self.spec.page_bytes) as found:
            match = state.reachable(found, self.spec.chunk_tokens)
            lease = state.use(match, limit, self._lease_s)
            hit = Hit(state, self._loader, match, lease, self.spec.chunk_tokens)
            for label, tokens in hit.by_tier.items():
                state.counters.hit_tokens[label] += tokens
        return hit

    def load(
        self,
        hit: Hit,
        into: Sequence[bytearray | memoryview] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Transfer[Loaded]:
        """Bring a hit's pages into HBM pages (the default, for a store with a pool) or ``into`` buffers of
        ``page_bytes``, one for each page of the hit.

        The transfer ends with the leading pages that arrived by the deadline; ``cancel()`` gives everything
        back and ends with none. The hit is released when it ends.
        """
        if into is None and self.pool is None:
            raise UsageError("this store has no page pool: say which buffers to load into")
        with self._state.lock:
            self._state.require_open()
            self._state.renew(hit.lease, hit.pages, self._lease_s)
        if into is None:
            return self._loader.to_hbm(hit, deadline_s=deadline_s)
        if len(into) != len(hit.pages):
            raise UsageError(
                f"the hit has {len(hit.pages)} pages, there are {len(into)} buffers to load into"
            )
        buffers = Buffers(into, self.spec.page_bytes, writable=True)
        return self._loader.to_buffers(hit, buffers, deadline_s=deadline_s)

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self,
        prompt: Prompt | TokenIds,
        pages: Sequence[bytes | bytearray | memoryview],
        *,
        first: int = 0,
    ) -> Transfer[int]:
        """Store ``pages`` as chunks ``first, first + 1, …`` of ``prompt``; the last may be its partial tail.

        Each page is a buffer of ``page_bytes`` that must stay as it is until the transfer ends: its bytes
        are then in the host tier, and go to disk behind the caller's back (see :meth:`flush`). The result is
        the number of tokens that are stored; pages that are there already count and are not copied.
        """
        source = Buffers(pages, self.spec.page_bytes, writable=False)
        return self._save(self._as_prompt(prompt), source, first, len(pages))

    def save_hbm(self, prompt: Prompt, hbm_pages: Sequence[int], *, first: int = 0) -> Transfer[int]:
        """Like :meth:`save`, for pages of the pool that the caller owns: they are published where they are,
        become read-only, and are cached after ``release_hbm``."""
        assert self.pool is not None, "save_hbm needs a pool"
        return self._save(self._as_prompt(prompt), HbmPages(self.pool, hbm_pages), first, len(hbm_pages))

    def _save(self, prompt: Prompt, source: PageSource, first: int, count: int) -> Transfer[int]:
        chunks = len(prompt.keys) + bool(prompt.tail)
        if first < 0 or first + count > chunks:
            raise UsageError(
                f"chunks {first} … {first + count} do not lie within a prompt of {chunks} chunks"
            )
        job = SaveJob(self._state, source, self._write_behind, self.spec.page_bytes)
        with find(self._state, prompt, len(prompt), self.spec.page_bytes) as match:
            job.plan(prompt, match, first, count)
        return job.start(self._mover)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything saved so far is on disk (or was given up); False when ``timeout`` seconds
        pass, or when the disk does not answer."""
        state = self._state
        pending = self._write_behind

        def flushed() -> bool:
            return not state.pending_saves and (pending is None or not pending.pending)

        return state.lookout.wait_for(flushed, timeout)

    # -- room in HBM (for the engine that owns the pool) -----------------------------------------------

    def allocate_hbm(self, count: int) -> list[int] | None:
        """``count`` private pages of the pool, evicting cached ones; None when that many cannot be had."""
        with self._state.lock:
            return self._state.hbm_pages(count)

    def release_hbm(self, hbm_pages: Sequence[int]) -> None:
        """The caller is done with these pages (once for each time it came to own one)."""
        with self._state.lock:
            self._state.release_hbm(hbm_pages)

    def available_hbm(self) -> int:
        """Pages that ``allocate_hbm`` could find: free ones and cached ones that may leave."""
        with self._state.lock:
            return self._state.available_hbm()

    # -- keeping and dropping ------------------------------------------------------------------------

    def evict(self, tier: str, pages: int | None = None) -> int:
        """Let up to ``pages`` pages (None: all that may) leave ``tier`` (``hbm``, ``host`` or ``disk``), the
        policy's worst first. Returns how many left; leased and pinned ones stay."""
        name = _tier(tier)
        state = self._state
        if name is Tier.DISK and self._disk is not None:
            self._disk.wait_surveyed()
        wanted = sys.maxsize if pages is None else pages
        evicted = 0
        while evicted < wanted:
            share = min(wanted - evicted, _EVICTED_AT_ONCE)
            with state.lock:
                state.require_open()
                left = state.evict(name, share)
            evicted += left
            if left < share:
                break
        return evicted

    def pin(self, prompt: Prompt | TokenIds) -> int:
        """Keep the held whole chunks of ``prompt`` in the store until :meth:`unpin`; returns their tokens. A
        pinned page may leave fast tiers, but not its last and coldest one."""
        with self._whole_pages(prompt) as pages:
            for page in pages:
                self._state.index.pin(page)
        return len(pages) * self.spec.chunk_tokens

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """Undo one :meth:`pin` of the same prompt; returns the tokens that were pinned."""
        with self._whole_pages(prompt) as pages:
            pinned = [page for page in pages if page.pins]
            for page in pinned:
                self._state.index.unpin(page)
        return len(pinned) * self.spec.chunk_tokens

    @contextmanager
    def _whole_pages(self, prompt: Prompt | TokenIds) -> Iterator[tuple[Page, ...]]:
        """The held whole chunks of a prompt, under the lock."""
        prompt = self._as_prompt(prompt)
        whole = len(prompt.keys) * self.spec.chunk_tokens
        with find(self._state, prompt, whole, self.spec.page_bytes) as match:
            yield match.pages[: match.tokens // self.spec.chunk_tokens]

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """A snapshot of everything that is counted."""
        state = self._state
        state.lookout.look()
        with state.lock:
            health = state.health
            state.counters.disk_stalls = health.stalls
            state.counters.disk_read_only_s = health.spent_s(Condition.READ_ONLY)
            state.counters.disk_offline_s = health.spent_s(Condition.OFFLINE)
            return StoreStats(
                tiers=state.tier_stats(),
                pages=state.index.pages,
                key_collisions=state.index.key_collisions,
                open_hits=state.open_hits,
                pending_saves=state.pending_saves,
                pending_writes=self._write_behind.pending if self._write_behind else 0,
                disk_writable=state.disk is not None and health.writable,
                health={Tier.DISK.label: health.snapshot()} if state.disk is not None else {},
                health_line=health.line if state.disk is not None else "",
                failed_tasks=self._mover.failed_tasks,
                counters=asdict(state.counters),
            )

    def check(self) -> None:
        """Assert that index, pool, arena and disk agree. For tests and idle moments."""
        if self._disk is not None:
            self._disk.wait_surveyed()
        with self._state.lock:
            self._state.check()
        if self._disk is not None:
            self._disk.check()

    def wait_ready(self) -> None:
        """Block until the host arena is backed by memory (it works before that, more slowly)."""
        if self._host is not None:
            self._host.wait_populated()

    @property
    def closed(self) -> bool:
        return self._state.closed

    def close(self) -> None:
        """Finish what is under way, write what is queued to disk, give everything back. Idempotent.

        With a disk that does not answer this returns all the same: threads, memory and the directory's lock
        are given back when it does, or when the process ends. What was durable stays so.
        """
        state = self._state
        with state.lock:
            if state.closed:
                return
            state.closed = True
        threading.Thread(target=self._give_back, name="tierstore-close", daemon=True).start()
        surveyed = self._disk is None or self._disk.wait_surveyed(0)
        if not state.lookout.wait_for(lambda: self._given_back, None if surveyed else state.health.stall_s):
            _log.warning("the store was closed while its disk does not answer: the directory stays locked")

    def _give_back(self) -> None:
        try:
            self._mover.close()
            if self._write_behind is not None:
                self._write_behind.close()
            if self._disk is not None:
                self._disk.close()
        except OSError as error:  # nothing that was durable depends on it
            _log.warning("disk tier: could not be closed in order: %s", error)
        finally:
            if self._host is not None:
                self._host.close()
            with self._state.lock:
                self._given_back = True
                self._state.changed.notify_all()

    def _as_prompt(self, prompt: Prompt | TokenIds) -> Prompt:
        if not isinstance(prompt, Prompt):
            return self.prompt(prompt)
        if prompt.chunk_tokens != self.spec.chunk_tokens or prompt.identity.layout != self._layout:
            raise UsageError("the prompt was made for another page layout than this store's")
        return prompt


def _tier(name: str) -> Tier:
    for tier in Tier:
        if tier.label == name:
            return tier
    raise UsageError(f"unknown tier {name!r} (known: {', '.join(tier.label for tier in Tier)})")


def _require_room(what: str, nbytes: int, spec: KVSpec) -> None:
    if nbytes and nbytes < spec.page_bytes:
        raise UsageError(
            f"{what} is {format_size(nbytes)}, less than one page ({format_size(spec.page_bytes)}): give more"
        )
