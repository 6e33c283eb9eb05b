"""The embedded store: it owns the parts, checks arguments, and hands the work on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tierstore.curve.groups import ABOVE_ALL, groups
from tierstore.curve.notes import MOST_WHOLE
from tierstore.errors import UsageError
from tierstore.hints import Hint
from tierstore.index import Page, Tier
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.policy import POLICIES
from tierstore.spec import KVSpec
from tierstore.store.assembly import Assembly, open_tiers
from tierstore.store.base import Hit, Store, check_chunks, checked_prompt, checked_tier
from tierstore.store.endpoints import Buffers, PageSource
from tierstore.store.find import find
from tierstore.store.hit import EmbeddedHit
from tierstore.store.load import Loaded
from tierstore.store.save import HbmPages, SaveJob
from tierstore.store.stats import StoreStats
from tierstore.store.telling import Told, finish
from tierstore.tiers.disk import DiskTier, FileIO
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.host import HostTier
from tierstore.transfer import Transfer
from tierstore.units import format_size

_EVICTED_AT_ONCE = 512  # pages; then others get the lock


class EmbeddedStore(Store):
    """A store whose tiers are this process's own: one index, one mover, one policy."""

    def __init__(
        self,
        spec: KVSpec,
        identity: Identity,
        assembly: Assembly,
        *,
        pool: PagePool | None,
        lease_s: float,
    ) -> None:
        self.spec = spec
        self.identity = identity
        self.pool = pool
        self._assembly = assembly
        self._state = assembly.state
        self._disk = assembly.disk
        self._mover = assembly.mover
        self._loader = assembly.loader
        self._write_behind = assembly.write_behind
        self._notes = assembly.curve.notes
        self._lease_s = lease_s
        self._page_bytes = spec.page_bytes
        self._layout = spec.describe()  # compared at every lookup

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
        hit = self._look_up(prompt, limit)
        # See Notes for why this is not a call.
        notes, keys, match, page_tokens = self._notes, prompt.keys, hit.match, prompt.chunk_tokens
        if notes.unseen > 0 and len(keys) <= MOST_WHOLE:
            notes.unseen -= 1
            notes.add((keys, True, limit, match.tokens, page_tokens, self._page_bytes, False, 1))
            return hit
        least = match.pages[-1].least if match.pages else ABOVE_ALL
        if notes.passes > 0 and least >= notes.border and match.tokens // page_tokens == limit // page_tokens:
            notes.passes -= 1
            return hit
        notes.prompt_looked_up(keys, limit, match.tokens, page_tokens, self._page_bytes, least)
        return hit

    def _look_up(self, prompt: Prompt, limit: int) -> EmbeddedHit:
        """All of a lookup but the note for the curve."""
        state = self._state
        state.lookout.look()
        with find(state, prompt, limit, self._page_bytes) as found:
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
            self._state.leases.renew(hit.lease, hit.pages, self._lease_s)
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
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        source = Buffers(pages, self.spec.page_bytes, writable=False)
        prompt = checked_prompt(self, self._layout, prompt)
        return self._save(prompt, source, first, len(pages), Told(hint, session))

    def save_hbm(
        self,
        prompt: Prompt,
        hbm_pages: Sequence[int],
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        assert self.pool is not None, "save_hbm needs a pool"
        source = HbmPages(self.pool, hbm_pages)
        prompt = checked_prompt(self, self._layout, prompt)
        return self._save(prompt, source, first, len(hbm_pages), Told(hint, session))

    def _save(self, prompt: Prompt, source: PageSource, first: int, count: int, told: Told) -> Transfer[int]:
        check_chunks(first, count, len(prompt.keys) + bool(prompt.tail))
        page_bytes = self.spec.page_bytes
        wanted = range(first, first + count)
        job = SaveJob(self._state, source, self._write_behind, prompt, wanted, page_bytes, told)
        saved = min(first + count, len(prompt.keys)) * prompt.chunk_tokens
        self._notes.saved(groups(prompt.keys), saved, prompt.chunk_tokens, page_bytes)
        with find(self._state, prompt, len(prompt), page_bytes) as match:
            job.begin(match)
        return job.run(self._mover)

    def finish(self, session: str) -> int:
        with self._state.lock:
            self._state.require_open()
            return finish(self._state, "", session)

    def flush(self, timeout: float | None = None) -> bool:
        return self._assembly.flush(timeout)

    # -- room in HBM (for the engine that owns the pool) -----------------------------------------------

    def allocate_hbm(self, count: int) -> list[int] | None:
        with self._state.lock:
            return self._state.room.hbm_pages(count)

    def release_hbm(self, hbm_pages: Sequence[int]) -> None:
        with self._state.lock:
            self._state.hbm.release(hbm_pages)

    def available_hbm(self) -> int:
        with self._state.lock:
            return self._state.available_hbm()

    # -- keeping and dropping ------------------------------------------------------------------------

    def evict(self, tier: str, pages: int | None = None) -> int:
        name = checked_tier(tier)
        state = self._state
        if name is Tier.DISK and self._disk is not None:
            self._disk.wait_surveyed()
        wanted = sys.maxsize if pages is None else pages
        evicted = 0
        while evicted < wanted:
            share = min(wanted - evicted, _EVICTED_AT_ONCE)
            with state.lock:
                state.require_open()
                left = state.room.evict(name, share)
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
        return self._assembly.stats()

    def check(self) -> None:
        """Assert that index, pool, arena and disk agree. For tests and idle moments."""
        self._assembly.check()

    def wait_ready(self) -> None:
        if self._assembly.host is not None:
            self._assembly.host.wait_populated()

    @property
    def closed(self) -> bool:
        return self._state.closed

    def close(self) -> None:
        self._assembly.close()


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
    open_disk = None
    if path is not None:
        open_disk = partial(
            DiskTier.open,
            Path(path),
            capacity_bytes=disk_bytes,
            page_bytes=spec.page_bytes,
            inline_bytes=inline_bytes,
            io=io,
            clock=clock,
        )
    disk, host = open_tiers(open_disk, partial(HostTier, host_bytes) if host_bytes else None)
    assembly = Assembly(
        policy=policy,
        host=host,
        disk=disk,
        pool=pool,
        mover_threads=mover_threads,
        stall_s=stall_s,
        clock=clock,
    )
    return EmbeddedStore(
        spec, identity or Identity.of(spec, model="default"), assembly, pool=pool, lease_s=lease_s
    )


def _require_room(what: str, nbytes: int, spec: KVSpec) -> None:
    if nbytes and nbytes < spec.page_bytes:
        raise UsageError(
            f"{what} is {format_size(nbytes)}, less than one page ({format_size(spec.page_bytes)}): give more"
        )
