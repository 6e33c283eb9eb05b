"""The embedded store: it owns the parts, checks arguments, and hands the work on."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tierstore.errors import UsageError
from tierstore.index import Page, Tier
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.mover import Mover
from tierstore.policy import POLICIES
from tierstore.spec import KVSpec
from tierstore.store.base import Hit, Store, checked_prompt
from tierstore.store.endpoints import Buffers, PageSource
from tierstore.store.find import find
from tierstore.store.health import Condition
from tierstore.store.hit import EmbeddedHit
from tierstore.store.load import Loaded, Loader
from tierstore.store.save import HbmPages, SaveJob
from tierstore.store.state import StoreState
from tierstore.store.stats import StoreStats
from tierstore.store.write_behind import WriteBehind
from tierstore.tiers.disk import DiskTier, FileIO
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier
from tierstore.transfer import Transfer
from tierstore.units import format_size

_log = logging.getLogger(__name__)

_EVICTED_AT_ONCE = 512  # pages; then others get the lock
_QUEUE_FRACTION = 1 / 2  # of the host tier, that may wait to be written to disk


class EmbeddedStore(Store):
    """A store whose tiers are this process's own: one index, one mover, one policy."""

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

    def __repr__(self) -> str:
        return (
            f"Store({', '.join(f'{name}: {tier.pages} pages' for name, tier in self.stats().tiers.items())})"
        )

    # -- finding and loading -------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds) -> Prompt:
        return Prompt(self.identity, tokens, chunk_tokens=self.spec.chunk_tokens)

    def lookup(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> EmbeddedHit:
        prompt = checked_prompt(self, self._layout, prompt)
        limit = len(prompt) if max_tokens is None else min(max_tokens, len(prompt))
        state = self._state
        state.lookout.look()
        with find(state, prompt, limit, self.spec.page_bytes) as found:
            match = state.reachable(found, self.spec.chunk_tokens)
            lease = state.use(match, limit, self._lease_s)
            hit = EmbeddedHit(state, self._loader, match, lease, self.spec.chunk_tokens)
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
        if not isinstance(hit, EmbeddedHit):
            raise UsageError("the hit is of another store")
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
        source = Buffers(pages, self.spec.page_bytes, writable=False)
        return self._save(checked_prompt(self, self._layout, prompt), source, first, len(pages))

    def save_hbm(self, prompt: Prompt, hbm_pages: Sequence[int], *, first: int = 0) -> Transfer[int]:
        assert self.pool is not None, "save_hbm needs a pool"
        source = HbmPages(self.pool, hbm_pages)
        return self._save(checked_prompt(self, self._layout, prompt), source, first, len(hbm_pages))

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
        state = self._state
        pending = self._write_behind

        def flushed() -> bool:
            return not state.pending_saves and (pending is None or not pending.pending)

        return state.lookout.wait_for(flushed, timeout)

    # -- room in HBM (for the engine that owns the pool) -----------------------------------------------

    def allocate_hbm(self, count: int) -> list[int] | None:
        with self._state.lock:
            return self._state.hbm_pages(count)

    def release_hbm(self, hbm_pages: Sequence[int]) -> None:
        with self._state.lock:
            self._state.release_hbm(hbm_pages)

    def available_hbm(self) -> int:
        with self._state.lock:
            return self._state.available_hbm()

    # -- keeping and dropping ------------------------------------------------------------------------

    def evict(self, tier: str, pages: int | None = None) -> int:
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
        with self._whole_pages(prompt) as pages:
            for page in pages:
                self._state.index.pin(page)
        return len(pages) * self.spec.chunk_tokens

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        with self._whole_pages(prompt) as pages:
            pinned = [page for page in pages if page.pins]
            for page in pinned:
                self._state.index.unpin(page)
        return len(pinned) * self.spec.chunk_tokens

    @contextmanager
    def _whole_pages(self, prompt: Prompt | TokenIds) -> Iterator[tuple[Page, ...]]:
        """The held whole chunks of a prompt, under the lock."""
        prompt = checked_prompt(self, self._layout, prompt)
        whole = len(prompt.keys) * self.spec.chunk_tokens
        with find(self._state, prompt, whole, self.spec.page_bytes) as match:
            yield match.pages[: match.tokens // self.spec.chunk_tokens]

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
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
        if self._host is not None:
            self._host.wait_populated()

    @property
    def closed(self) -> bool:
        return self._state.closed

    def close(self) -> None:
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


def open_embedded(
    path: str | Path | None,
    spec: KVSpec,
    *,
    identity: Identity | None,
    pool: PagePool | None,
    host_bytes: int,
    disk_bytes: int,
    inline_bytes: int,
    policy: str,
    lease_s: float,
    mover_threads: int,
    stall_s: float,
    io: FileIO | None,
    clock: Callable[[], float],
) -> EmbeddedStore:
    """What :meth:`Store.open` does."""
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
    return EmbeddedStore(
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
