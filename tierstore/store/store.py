"""The store that an engine talks to: its own HBM pages over one backend.

What is in HBM is known here (``hbm.py``). What is below is asked of the backend, which may be in this process
or a daemon. While a daemon is away there is only HBM: lookups find what is there, and nothing is stored below
it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

from tierstore.arguments import optional_seconds, seconds, whole_number, whole_numbers
from tierstore.backend import Backend, Lease, LookupRequest, Registration, SaveHints
from tierstore.errors import UsageError
from tierstore.index import LABELS, Page, Tier
from tierstore.keys import Identity, Prompt, TokenIds, encode_tokens
from tierstore.mover import Mover
from tierstore.planner import CLUSTER, Part, Plan, Planner
from tierstore.policy import DEFAULT_POLICY
from tierstore.spec import KVSpec
from tierstore.stats import StoreStats
from tierstore.store.buffers import Buffers, HbmPages, PageSource, PageTarget
from tierstore.store.hbm import NO_MATCH, HbmTier
from tierstore.store.hit import Hit, LooseHit
from tierstore.store.load import BufferLoad, HbmLoad, Range, TargetLoad
from tierstore.store.prompts import PromptCache
from tierstore.store.save import Save, SaveBudget
from tierstore.tiers.frames import PoolSize
from tierstore.tiers.hbm import PagePool
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, Promise

_CLOSE_S = 5.0  # for saves that are under way
_COUNTED_HERE = (
    "lookups",
    "lookup_tokens",
    "hit_tokens",
    "loaded_pages",
    "loads_cut_short",
    "saved_pages",
    "already_stored_pages",
    "not_stored_pages",
    "declined_tokens",
)
_DONE = Hint(reuse="done")
_ELSEWHERE = Hint(elsewhere=True)
_BRING_S = 2.0  # that pages of other hosts are waited for
_PROBE_BYTES = 8 << 20  # of a declined tier, read to see how fast it is by now
_PROBE_WAIT_S = 20.0
_LOOKUPS_AT_ONCE = 32  # on their way to a backend. More gain nothing, and each may have to wait for a disk


class Store:
    """A stack of tiers that pages are found in, loaded from and saved to. Thread-safe.

    Made by :func:`tierstore.open` (host memory and a directory of this process's own) or
    :func:`tierstore.connect` (a daemon's). Pages are found by a :class:`~tierstore.keys.Prompt` (or bare
    tokens, under the store's own identity).

    Nothing here raises because a tier is full, slow, broken or away: fewer tokens come back, or fewer are
    stored. :class:`~tierstore.errors.UsageError` and :class:`~tierstore.errors.StoreClosedError` are for
    mistakes of the caller.

    What takes time is a :class:`~tierstore.transfer.Transfer`: poll it, ``wait()`` for it, or ``await`` it.

    >>> import tierstore
    >>> spec = tierstore.KVSpec.uniform(layers=2, kv_heads=1, head_dim=64, dtype="float16")
    >>> with tierstore.open(None, spec, host_bytes=1 << 20) as store:
    ...     stored = store.save(range(128), [bytes(spec.page_bytes)] * 2).wait()
    ...     hit = store.lookup([*range(100), 5, 6, 7])
    >>> stored, hit.tokens
    (128, 100)
    """

    def __init__(
        self,
        backend: Backend,
        spec: KVSpec,
        *,
        identity: Identity | None = None,
        pool: PagePool | None = None,
        lookup_s: float = 0.5,
        mover_threads: int = 2,
        policy: str = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A store over any ``backend``, which it closes. ``policy`` orders the pages of ``pool``; ``clock``
        is what the ends of leases are compared with. See :func:`tierstore.connect` for the others."""
        check_pool(pool, spec)
        lookup_s = seconds("lookup_s", lookup_s)
        if lookup_s <= 0:
            raise UsageError("lookup_s must be above 0")
        self.spec = spec
        self.identity = identity or Identity.of(spec, model="default")
        self.pool = pool
        self.lookup_s = lookup_s
        self.backend = backend
        self.clock = clock
        self._layout = spec.describe()  # compared at every lookup
        self._hbm = HbmTier(pool, spec.page_bytes, policy, clock)
        self._mover = Mover(whole_number("mover_threads", mover_threads, least=1))
        self._prompts = PromptCache(spec.chunk_tokens, spec.page_bytes)
        self._budget = SaveBudget(backend)
        self.planner = Planner()

    def __repr__(self) -> str:
        return "Store(of another process)" if self._hbm.forked else f"Store({self.backend!r})"

    def introduce(self, identity: Identity) -> None:
        """Have the backend know an identity before its first prompt is saved or looked up, which waits for
        that (``lookup_s`` at most) otherwise. Costs nothing once it does."""
        self._hbm.require_process()
        self.backend.introduce(Registration(identity, self.spec.page_bytes, self.spec.chunk_tokens))

    # -- finding -------------------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds) -> Prompt:
        """``tokens`` under the store's own identity, with their keys."""
        self._hbm.require_process()
        return self._prompts.prompt(self.identity, encode_tokens(tokens))

    def lookup(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """The longest prefix of ``prompt`` (at most ``max_tokens``) that is held in any tier, leased until
        the hit is loaded or released, or the lease ends."""
        return lookup_all([(self, prompt)], max_tokens=max_tokens)[0]

    async def lookup_async(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """:meth:`lookup` for an event loop, which goes on meanwhile. (Loads and saves are awaitable.)"""
        lookup = _Lookup(self, self._request(prompt, max_tokens), time.monotonic())
        try:
            lookup.ask()
            if lookup.answer is not None:
                await lookup.answer
            return lookup.hit()
        except BaseException:
            lookup.give_up()
            raise

    def expect(self, prompt: Prompt | TokenIds, promise: Promise) -> Transfer[None]:
        """Wait for pages of ``prompt`` that somebody has promised to save. Ends when all whole chunks of them
        are held, when the daemon goes, or when the promise's time is over; then look the prompt up. Where
        nobody keeps promises (a store of this process alone) that is at once, or after that time."""
        request = self._request(prompt)
        chunks = min(promise.tokens // self.spec.chunk_tokens, len(request.keys))
        if not request.loose:
            request = request.cut(chunks * self.spec.chunk_tokens)
        if not chunks or self._hbm.match(request).tokens >= request.num_tokens:
            return Transfer.completed(None)
        return self.backend.expect(request, wait_s=promise.until_s)

    def _request(self, prompt: Prompt | TokenIds, max_tokens: int | None = None) -> LookupRequest:
        self._require_open()
        if isinstance(prompt, Prompt):
            if prompt.chunk_tokens != self.spec.chunk_tokens or prompt.identity.layout != self._layout:
                raise UsageError("the prompt was made for another page layout than this store's")
            if prompt.loose:
                return self._loose(prompt)
            request = self._prompts.request(prompt)
        else:
            request = self._prompts.request_of(self.identity, encode_tokens(prompt))
        return request if max_tokens is None else request.cut(max(whole_number("max_tokens", max_tokens), 0))

    def _loose(self, prompt: Prompt) -> LookupRequest:
        data = prompt.token_bytes
        return LookupRequest(
            prompt.identity,
            self.spec.page_bytes,
            prompt.chunk_tokens,
            data,
            len(data),
            list(prompt.keys),
            loose=True,
            depth=prompt.pages_before,
        )

    # -- loading -------------------------------------------------------------------------------------

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
        back and ends with none. The hit is released when it ends. Without ``deadline_s`` it is loaded as
        :meth:`plan` says: as far as that is faster than computing, and until computing would be done. Where
        no engine has said how fast it computes, all is loaded, however long it takes.
        """
        self._check_hit(hit)
        deadline_s = optional_seconds("deadline_s", deadline_s)
        if into is None:
            if self.pool is None:
                raise UsageError("this store has no page pool: say which buffers to load into")
            deadline_s, part = self._planned(hit, deadline_s)
            return HbmLoad(self._hbm, self.backend, self._mover, self.planner, hit, deadline_s, part).start()
        buffers = Buffers(into, self.spec.page_bytes, writable=True)
        if len(buffers) != hit.num_pages:
            raise UsageError(
                f"the hit has {hit.num_pages} pages, there are {len(buffers)} buffers to load into"
            )
        deadline_s, part = self._planned(hit, deadline_s)
        return BufferLoad(
            self._hbm, self.backend, self._mover, self.planner, hit, deadline_s, part, buffers
        ).start()

    def load_part(
        self, hit: Hit, first: int, stop: int, *, deadline_s: float | None, last: bool = False
    ) -> Transfer[Loaded]:
        """Bring pages ``first … stop`` of a hit into HBM pages, of which the result has those that came; its
        tokens count from the prompt's start. The hit is released by its ``last`` load, or by the caller. In
        whatever order parts are loaded, each is found again once all before it are published, too."""
        self._check_hit(hit)
        self.checked_pool()
        if not 0 <= first <= stop <= hit.num_pages:
            raise UsageError(f"a hit of {hit.num_pages} pages has no pages {first} … {stop}")
        deadline_s = optional_seconds("deadline_s", deadline_s)
        part = Range(first, stop, keeps_hit=not last)
        return HbmLoad(self._hbm, self.backend, self._mover, self.planner, hit, deadline_s, part).start()

    def _planned(self, hit: Hit, deadline_s: float | None) -> tuple[float | None, Range]:
        if deadline_s is not None or hit.request.loose or self.planner.prefill() is None:
            return deadline_s, Range()
        planned = self.plan(hit)
        self.decline(hit, planned)
        return planned.deadline_s, Range(0, self.whole_pages(hit, planned.tokens))

    # -- planning ------------------------------------------------------------------------------------

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """An engine tells how long a prefill step took: of ``tokens`` tokens of one prompt, after ``behind``
        others. Plans compare loading with it."""
        self.planner.computed(tokens, behind, seconds)

    def plan(self, hit: Hit, prompt_tokens: int | None = None, *, block: int = 0) -> Plan:
        """How much of a hit to load, by what loads and prefill steps have taken lately; see
        :mod:`tierstore.planner`. ``prompt_tokens`` is the whole prompt's length (None: the hit is all of it
        but one token); ``block`` is what an engine that can compute the front meanwhile computes at a time.
        Changes nothing, and nothing is counted: see :meth:`decline`."""
        now_s = self._hbm.clock()
        for tier, way in self.backend.ways().items():
            self.planner.told(tier, way, now_s=now_s)
        length = hit.tokens + 1 if prompt_tokens is None else prompt_tokens
        return self.planner.plan(self._parts(hit), length, now_s=now_s, block=block)

    def meet(self, hit: Hit, front: int, back: int) -> int:
        """Where an engine that has computed the first ``front`` tokens of a hit would meet a load of those
        before ``back``; see :meth:`~tierstore.planner.Planner.meet`."""
        parts, start = [], 0
        for part in self._parts(hit):
            tokens = min(part.tokens, max(back - start, 0))
            if tokens:
                parts.append(Part(part.tier, tokens, part.nbytes * tokens / part.tokens))
            start += part.tokens
        return self.planner.meet(parts, front, now_s=self._hbm.clock())

    def _parts(self, hit: Hit) -> list[Part]:
        token_bytes = self.spec.page_bytes / hit.chunk_tokens
        return [
            Part(tier, tokens, 0 if tier == Tier.HBM.label else tokens * token_bytes)
            for tier, tokens in hit.by_runs()
        ]

    def decline(self, hit: Hit, planned: Plan) -> None:
        """Count what a plan does not use. A tier that is declined is measured now and then all the same, by a
        read that nobody waits for."""
        declined = {f"{tier} slower": tokens for tier, tokens in planned.declined.items()}
        if declined:
            self._hbm.declined(declined)
            self.backend.declined(declined)
        for tier in planned.declined:
            if tier != Tier.HBM.label and self.planner.take_probe(tier, self._hbm.clock()):
                self._probe(hit, tier)

    def whole_pages(self, hit: Hit, tokens: int) -> int:
        """Pages of a hit that hold its first ``tokens`` tokens."""
        return min(-(-tokens // hit.chunk_tokens), hit.num_pages)

    def _probe(self, hit: Hit, tier: str) -> None:
        """Have the backend bring some pages of a declined tier, and note how long that took."""
        backend, clock = self.backend, self._hbm.clock
        found = backend.find(hit.request, patience_s=self.lookup_s)

        def leased() -> None:
            lease = found.wait()
            if lease is None or not lease.tokens:
                return
            first = 0
            while first < lease.pages and lease.run_at(first)[0] != tier:
                first += lease.run_at(first)[1]
            count = min(lease.pages - first, max(_PROBE_BYTES // self.spec.page_bytes, 1))
            if count <= 0:
                backend.release(lease)
                return
            began = clock()
            brought = backend.locate(lease, first, count, wait_s=_PROBE_WAIT_S)

            def came() -> None:
                located = brought.wait()
                if located is not None:
                    now_s, nbytes = clock(), len(located.addresses) * self.spec.page_bytes
                    self.planner.moved(tier, nbytes, now_s - began, now_s=now_s)
                    located.release()
                backend.release(lease)

            brought.on_end(came)

        found.on_end(leased)

    def bring(
        self, hit: Hit, *, tokens: int | None = None, deadline_s: float | None = None
    ) -> Transfer[int] | None:
        """Have pages that other hosts have behind a hit (``hit.remote_tokens``), up to ``tokens`` of its
        prompt (None: all), come into the daemon's memory; None where there are none, or where computing them
        is faster, as far as both were measured. The result is how many chunks came in time (None: as long as
        computing takes, 2 s at most); look the prompt up again to have them. The hit is not changed, and
        still to be released."""
        self._check_hit(hit)
        remote = hit.remote_tokens if tokens is None else min(hit.remote_tokens, tokens - hit.tokens)
        if remote <= 0:
            return None
        deadline_s = optional_seconds("deadline_s", deadline_s)
        nbytes = remote // self.spec.chunk_tokens * self.spec.page_bytes
        within_s = self.worth_bringing(hit.tokens, remote, nbytes)
        if within_s is None:
            return None
        return hit.bring(within_s if deadline_s is None else deadline_s, tokens=tokens)

    def worth_bringing(self, behind: int, tokens: int, nbytes: int) -> float | None:
        """How long ``nbytes`` of other hosts' pages are best waited for, which spare computing ``tokens``
        tokens ``behind`` others: as long as that takes, 2 s at most. None where computing them is faster, as
        far as both were measured."""
        prefill = self.planner.prefill()
        if prefill is None:
            return _BRING_S
        computing_s = prefill.seconds(tokens, behind)
        way = self.backend.ways().get(CLUSTER)
        slower = way is not None and way.seconds(nbytes) > computing_s
        return None if slower else min(computing_s, _BRING_S)

    def offer(self, hit: Hit) -> None:
        """The pages of a hit are in use again: where hosts share pages, those that are held below HBM are
        given to others. (That a chain is used again the daemon notices when it is asked for it, and it is not
        where all of it is in HBM.)"""
        request = hit.request
        if self.backend.remote and (request.loose or not hit.leased):
            first = 0 if request.loose else len(request.keys)
            self.backend.reserve(request, first, 0, hints=SaveHints(_ELSEWHERE))

    def load_to(
        self,
        hit: Hit,
        target: PageTarget,
        *,
        first: int = 0,
        count: int | None = None,
        keep: bool = False,
        deadline_s: float | None = None,
    ) -> Transfer[Loaded]:
        """Load ``count`` pages of a hit (None: all) from page ``first`` on into a target of the caller's (for
        a store without a pool). When the transfer has ended nothing is written to the target any more; the
        tokens of the result count from the hit's start. ``keep``: the hit is not released, so that more of
        it can be loaded."""
        self._check_hit(hit)
        deadline_s = optional_seconds("deadline_s", deadline_s)
        stop = hit.num_pages if count is None else first + count
        if self.pool is not None or not 0 <= first <= stop <= hit.num_pages:
            raise UsageError(
                f"pages {first} … {stop} of a hit of {hit.num_pages} cannot be loaded into a target"
            )
        part = Range(first, stop, keeps_hit=keep)
        return TargetLoad(
            self._hbm, self.backend, self._mover, self.planner, hit, deadline_s, part, target
        ).start()

    def _check_hit(self, hit: Hit) -> None:
        self._require_open()
        if not isinstance(hit, Hit) or hit.backend is not self.backend:
            raise UsageError("the hit is of another store")

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
        """Store ``pages`` as chunks ``first, first + 1, …`` of ``prompt``; the last may be its partial tail.

        Each page is a buffer of ``page_bytes`` that must stay as it is until the transfer ends: its bytes
        are then in the host tier, and go to disk behind the caller's back (see :meth:`flush`). The result is
        the number of tokens that are stored; pages that are there already count and are not copied.

        ``hint`` is what the caller knows of the pages' future, ``session`` any name of the conversation that
        they are part of (see :mod:`tierstore.types`, and :meth:`finish`). Neither changes what is found or
        loaded, only what leaves first when a tier is full. A save of no pages can carry them, too.
        """
        source = Buffers(pages, self.spec.page_bytes, writable=False)
        return self.save_from(prompt, source, len(source), first=first, hint=hint, session=session)

    def save_from(
        self,
        prompt: Prompt | TokenIds,
        source: PageSource,
        count: int,
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """:meth:`save` of ``count`` pages that are not buffers of ``page_bytes``. After ``cancel()`` the
        source is not read any more; what it had given by then is stored."""
        hints = SaveHints(hint, session)
        request = self._request(prompt)
        first = _checked_first(first, count, request.num_chunks)
        return self._save(request, source, {}, first, count, hints)

    def save_hbm(
        self,
        prompt: Prompt | TokenIds,
        hbm_pages: Sequence[int],
        *,
        first: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Like :meth:`save`, for pages of the pool that the caller owns: they are published where they are,
        become read-only, and are cached after ``release_hbm``."""
        pool = self.checked_pool()
        hbm_pages = _checked_hbm_pages(pool, hbm_pages)
        hints = SaveHints(hint, session)
        prompt = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        request = self._request(prompt)
        first = _checked_first(first, len(hbm_pages), request.num_chunks)
        source = HbmPages(pool, hbm_pages)
        held: dict[int, Page] = {}
        if hbm_pages:
            tail_key = prompt.tail_key() if request.num_chunks > len(request.keys) else None
            held = self._hbm.save(request, tail_key, source, first, hints)
        return self._save(request, source, held, first, len(held), hints)

    def _save(
        self,
        request: LookupRequest,
        source: PageSource,
        held: dict[int, Page],
        first: int,
        count: int,
        hints: SaveHints,
    ) -> Transfer[int]:
        self.backend.introduce(request.registration)
        if hints and not count:
            self.backend.reserve(request.cut(first * request.chunk_tokens), first, 0, hints=hints)
        return Save(
            self._hbm,
            self.backend,
            self._mover,
            self._budget,
            self._prompts,
            request,
            source,
            held,
            first,
            count,
            hints,
        ).start()

    def let_go(self, prompt: Prompt, session: str) -> None:
        """Loose pages of a session are not going to be asked for again: those that nobody else has saved
        leave every tier, at once where nothing holds them, first of all otherwise."""
        hints = SaveHints(_DONE, session)
        request = self._request(prompt)
        if not request.loose:
            raise UsageError("pages of a chain leave from its end, as the policy says: give a hint")
        self._hbm.let_go(request, hints)
        self.backend.reserve(request, 0, 0, hints=hints)

    def finish(self, session: str) -> int:
        """A session is over: those of its pages that no other session, and nobody without one, has saved or
        gone on from leave first from now on. Returns how many pages that is. An unknown session has none."""
        self._require_open()
        with self._hbm.lock:
            in_hbm = self._hbm.sessions.finish("", session)
        below = self.backend.finish(session)
        return in_hbm if below is None else below

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was saved is on disk (or was given up); False when ``timeout`` seconds pass."""
        self._require_open()
        timeout = optional_seconds("timeout", timeout)
        ends = None if timeout is None else time.monotonic() + timeout
        hbm = self._hbm
        with hbm.lock:
            if not hbm.changed.wait_for(lambda: not hbm.pending_saves, timeout):
                return False
        return self.backend.flush(None if ends is None else max(ends - time.monotonic(), 0.0))

    # -- room in HBM (for the engine that owns the pool) -----------------------------------------------

    def allocate_hbm(self, count: int, *, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` private pages of the pool, evicting cached ones; None when that many cannot be had.
        ``near`` are pages of the same sequence: a pool of two levels keeps these together."""
        self._hbm.require_process()
        self.checked_pool()
        count = whole_number("count", count, least=0)
        with self._hbm.lock:
            return self._hbm.allocate(count, near=near)

    def resize_hbm(self, nbytes: int) -> PoolSize:
        """Have a pool of ``nbytes`` from now on. More is had at once, as far as there is memory. Less: what
        is free and what is cached goes at once, what is in use when it is released. No page in use moves.
        Raises :class:`UsageError` for a size that cannot be."""
        self._hbm.require_process()
        pool = self.checked_pool()
        nbytes = whole_number("nbytes", nbytes, least=1)
        with self._hbm.lock:
            pool.resize(nbytes)
            self._hbm.shrink()
        pool.settle(wait=True)
        return pool.frames.size

    def release_hbm(self, hbm_pages: Sequence[int]) -> None:
        """The caller is done with these pages (once for each time it came to own one)."""
        self._hbm.require_process()
        hbm_pages = _checked_hbm_pages(self.checked_pool(), hbm_pages)
        with self._hbm.lock:
            self._hbm.release(hbm_pages)

    def idle_hbm(self) -> list[int]:
        """The cached pages of the pool that nobody uses."""
        self._require_open()
        with self._hbm.lock:
            self._hbm.leases.expire()
            return self._hbm.idle()

    def available_hbm(self) -> int:
        """Pages that ``allocate_hbm`` could find: free ones and cached ones that may leave."""
        self._hbm.require_process()
        self.checked_pool()
        with self._hbm.lock:
            return self._hbm.available()

    # -- keeping and dropping ------------------------------------------------------------------------

    def evict(self, tier: str, pages: int | None = None) -> int:
        """Let up to ``pages`` pages (None: all that may) leave ``tier`` (``hbm``, ``host`` or ``disk``), the
        policy's worst first. Returns how many left; leased and pinned ones stay."""
        self._require_open()
        if tier not in LABELS:
            raise UsageError(f"unknown tier {tier!r} (known: {', '.join(LABELS)})")
        count = None if pages is None else min(whole_number("pages", pages, least=0), sys.maxsize)
        if tier != Tier.HBM.label:
            return self.backend.evict(tier, count)
        with self._hbm.lock:
            room = self.pool.num_pages if self.pool is not None else 0
            return self._hbm.evict(room if count is None else min(count, room))

    def pin(self, prompt: Prompt | TokenIds) -> int:
        """Keep the held whole chunks of ``prompt`` in the store until :meth:`unpin`; returns their tokens. A
        pinned page may leave fast tiers, but not its last and coldest one."""
        return self.backend.pin(self._request(prompt)).wait()

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """Undo the newest :meth:`pin` of exactly this prompt by the same tenant. Returns the tokens that this
        pin has kept, 0 where there was none. Pins of other prompts on the same pages stay."""
        return self.backend.pin(self._request(prompt), undo=True).wait()

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """A snapshot: HBM and what is asked of this store are counted here, everything below HBM by the
        backend."""
        self._hbm.require_process()
        below = self.backend.stats()
        hbm = self._hbm
        with hbm.lock:
            own = asdict(hbm.counters)
            tiers = hbm.tier_stats()
            pages, collisions = hbm.index.tree.pages, hbm.index.tree.key_collisions
            open_leases, expired, pending = hbm.leases.open, hbm.leases.expired, hbm.pending_saves
        counters: dict[str, Any] = {**own, **below.counters, **{name: own[name] for name in _COUNTED_HERE}}
        counters["expired_leases"] = own["expired_leases"] + expired + below.counters.get("expired_leases", 0)
        evicted: Any = below.counters.get("evicted_pages", {})
        counters["evicted_pages"] = {
            tier: own["evicted_pages"][tier] + evicted.get(tier, 0) for tier in LABELS
        }
        return replace(
            below,
            tiers={**tiers, **below.tiers},
            pages=max(pages, below.pages),
            key_collisions=collisions + below.key_collisions,
            open_hits=open_leases + below.open_hits,
            pending_saves=pending,
            failed_tasks=self._mover.failed_tasks + below.failed_tasks,
            counters=counters,
        )

    def check(self) -> None:
        """Assert that everything that is counted twice agrees. For tests and idle moments."""
        self._hbm.require_process()
        with self._hbm.lock:
            self._hbm.check()
        self.backend.check()

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until the backend answers; False when ``timeout`` seconds pass first. Nobody has to: until a
        daemon is there, everything is a miss."""
        self._hbm.require_process()
        return self.backend.wait_connected(optional_seconds("timeout", timeout))

    @property
    def connected(self) -> bool:
        """Whether the backend is there, and answers."""
        self._hbm.require_process()
        return self.backend.connected

    def wait_ready(self) -> None:
        """Block until the store is as fast as it gets (it works before that, more slowly)."""
        self._hbm.require_process()
        self.backend.wait_ready(self.lookup_s)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._hbm.closed

    def close(self) -> None:
        """Finish what is under way and give everything back. Idempotent."""
        if self._hbm.forked:
            return  # nothing here is this process's
        hbm = self._hbm
        with hbm.lock:
            if hbm.closed:
                return
            hbm.closed = True
            hbm.changed.wait_for(lambda: not hbm.pending_saves, _CLOSE_S)
        self._mover.drain()  # copies go on after their load, and need the backend's leases
        self.backend.close()
        self._mover.close()

    def _require_open(self) -> None:
        self._hbm.require_process()
        self._hbm.require_open()

    def checked_pool(self) -> PagePool:
        """The engine's pool. Raises :class:`UsageError` for a store without one."""
        if self.pool is None:
            raise UsageError("this store has no page pool: give it one, or use buffers")
        return self.pool

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_pool(pool: PagePool | None, spec: KVSpec) -> None:
    """Raises :class:`UsageError` for a pool whose pages are not those of ``spec``. Of a hashed layout the
    engine's own is the same without the hash: it knows tokens."""
    if pool is not None and replace(pool.spec, hashed=spec.hashed) != spec:
        raise UsageError("the page pool was made for another KV spec than the store's")


def _checked_hbm_pages(pool: PagePool, hbm_pages: Sequence[int]) -> list[int]:
    """Raises :class:`UsageError` for what are no pages of the pool."""
    numbers = whole_numbers("hbm_pages", hbm_pages)
    if numbers and not 0 <= min(numbers) <= max(numbers) < pool.num_pages:
        raise UsageError(f"hbm_pages lie between 0 and {pool.num_pages - 1}, those of the pool")
    return numbers


def _checked_first(first: int, count: int, chunks: int) -> int:
    """Raises :class:`UsageError` if chunks ``first … first + count`` are not all within ``chunks``."""
    first = whole_number("first", first)
    if first < 0 or first + count > chunks:
        raise UsageError(f"chunks {first} … {first + count} do not lie within a prompt of {chunks} chunks")
    return first


class _Lookup:
    """One lookup, from the moment that it is asked to its answer. Belongs to one thread (or task).

    It has until ``lookup_s`` of its store after ``began`` (by ``time.monotonic()``), whatever comes before
    its own request: lookups that began together end together."""

    def __init__(self, store: Store, request: LookupRequest, began: float, gain: int = 0) -> None:
        self._store = store
        self._request = request
        self._ends = began + store.lookup_s
        self._gain = gain  # of loose pages; see LookupRequest
        self._asked: Sequence[int] = ()  # of loose pages, those that the backend is asked for
        self.answer: Transfer[Lease | None] | None = None

    def ask(self, *, caller_receives: bool = False) -> None:
        """Ask for what is below HBM, if there is something to ask for and still time. ``caller_receives``:
        this thread waits for the answer."""
        request, hbm = self._request, self._store._hbm
        if request.loose:
            here = hbm.match_loose(request)
            self._asked = [at for at in range(request.num_chunks) if at not in here]
            if here and self._asked:
                request = request.part(self._asked)
            request.gain = self._gain
            lacking = bool(self._asked)
        else:
            lacking = hbm.match(request).tokens < request.num_tokens
        patience_s = self._ends - time.monotonic()
        if lacking and patience_s > 0:
            backend = self._store.backend
            self.answer = backend.find(request, patience_s=patience_s, caller_receives=caller_receives)

    def hit(self) -> Hit:
        """What was found; waits for it."""
        store, request = self._store, self._request
        hbm = store._hbm
        lease = self.answer.wait() if self.answer is not None else None
        remote_tokens = lease.remote_tokens if lease is not None else 0
        others = [self._asked[at] for at in lease.remote_positions] if lease is not None else []
        if lease is not None:
            if not request.loose:
                store._prompts.remember(request, lease.handle)
            lease = lease if lease.tokens else None
        # Looked at again, because the answer took its time and nothing was held meanwhile.
        loose = self._loose_hit(others) if request.loose else None
        match = hbm.match(request) if loose is None else NO_MATCH
        with hbm.lock:
            if loose is not None:
                held = hbm.use_loose(loose.here, request, store.backend.lease_s)
            else:
                held = hbm.use(match, request.num_tokens, store.backend.lease_s)
            hit = Hit(hbm, store.backend, request, match, held, lease, store.lookup_s, remote_tokens, loose)
            for label, tokens in hit.by_tier.items():
                hbm.counters.hit_tokens[label] += tokens
        return hit

    def _loose_hit(self, others: Sequence[int]) -> LooseHit:
        asked = set(self._asked)
        here = self._store._hbm.match_loose(self._request)
        return LooseHit({at: page for at, page in here.items() if at not in asked}, self._asked, others)

    def give_up(self) -> None:
        """Nobody wants to know any more: what is held for the answer is given back, now or when it comes."""
        answer = self.answer
        if answer is not None and not answer.cancel():
            lease = answer.wait()
            if lease is not None and lease.tokens:
                self._store.backend.release(lease)


def lookup_all(
    wanted: Iterable[tuple[Store, Prompt | TokenIds]], *, max_tokens: int | None = None, gain: int = 0
) -> list[Hit]:
    """:meth:`Store.lookup` of many prompts, in one store or in several: all are asked before any answer is
    waited for, and ``lookup_s`` (the longest of the stores') is the limit for all together. The hits are in
    the order of ``wanted``. ``gain``: tokens that a prompt need not compute if loose pages that are lacking
    come from other hosts (0: these are not asked). Raises what :meth:`Store.lookup` raises; nothing is leased
    then.

    An engine has as many prompts to ask about as it has workers times KV cache groups: with a round trip for
    each they would come near the end of its patience."""
    began = time.monotonic()
    lookups: list[_Lookup] = []
    hits: list[Hit] = []
    try:
        for store, prompt in wanted:  # the backend works on the first while the next is made
            lookup = _Lookup(store, store._request(prompt, max_tokens), began, gain)
            before = lookups[-_LOOKUPS_AT_ONCE].answer if len(lookups) >= _LOOKUPS_AT_ONCE else None
            lookups.append(lookup)
            if before is not None:
                before.wait()
            lookup.ask(caller_receives=True)
        for lookup in lookups:
            hits.append(lookup.hit())
    except BaseException:
        for hit in hits:
            hit.release()
        for lookup in lookups[len(hits) :]:
            lookup.give_up()
        raise
    return hits
