"""The store that an engine talks to: its own HBM pages over one backend, for all layer groups of a model.

What is in HBM is known here (``hbm.py``). What is below is asked of the backend, which may be in this process
or a daemon. While a daemon is away there is only HBM: lookups find what is there, and nothing is stored below
it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType

from tierstore.arguments import optional_seconds, seconds, whole_number
from tierstore.backend import Backend, Registration, SaveHints
from tierstore.errors import UsageError
from tierstore.groups import Group, GroupRule, by_kind, groups_of
from tierstore.index import LABELS, Tier
from tierstore.keys import LEAST_NAMED_TOKENS, Identity, Prompt, TokenIds
from tierstore.mover import Mover
from tierstore.planner import Plan, Planner
from tierstore.policy import DEFAULT_POLICY
from tierstore.retention import checkpoint_tokens as default_checkpoint
from tierstore.spec import KVSpec
from tierstore.stats import StoreStats
from tierstore.store.buffers import Buffers, PageSource, PageTarget
from tierstore.store.hbm import HbmTier
from tierstore.store.hit import Hit
from tierstore.store.loader import Loader
from tierstore.store.lookup import Finder, Lookup
from tierstore.store.pins import StorePins
from tierstore.store.planning import Planning
from tierstore.store.saver import Saver, checked_hbm_pages
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.large_pages import PoolSize
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, Promise

_CLOSE_S = 5.0  # for saves that are under way
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

    A model whose layers remember the past in different ways has pages of each layer group
    (:mod:`tierstore.groups`). Group ``i`` is the spec's ``i``-th, its pool ``pools[i]``, its rule
    ``rules[i]``. Pages are saved group by group; a lookup is of all of them, and so is a load:

    >>> import tierstore
    >>> from tierstore.spec import LayerGroup, LayerKind
    >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (1,), 1, 64), LayerGroup(
    ...     LayerKind.SLIDING_WINDOW, (0,), 1, 64, window=64
    ... )
    >>> spec = tierstore.KVSpec((full, window), "float16")
    >>> with tierstore.open(None, spec, host_bytes=1 << 20) as store:
    ...     prompt = store.prompt(range(150))
    ...     for group in store.groups:
    ...         chunks = group.chunks(128)
    ...         pages = [bytes(group.page_bytes)] * len(chunks)
    ...         _ = store.save(prompt, pages, first=chunks.start, group=group.number).wait()
    ...     hit = store.lookup(prompt)
    ...     into = [[bytearray(each.page_bytes) for _ in hit.chunks(each.number)] for each in store.groups]
    ...     loaded = store.load(hit, into).wait()
    >>> loaded.tokens, [len(buffers) for buffers in into]
    (128, [2, 1])
    """

    def __init__(
        self,
        backend: Backend,
        spec: KVSpec,
        *,
        identity: Identity | None = None,
        pools: PagePool | Sequence[PagePool] | None = None,
        lookup_s: float = 0.5,
        mover_threads: int = 2,
        policy: str = DEFAULT_POLICY,
        checkpoint_tokens: int | None = None,
        groups: Sequence[Group] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A store over any ``backend``, which it closes. ``policy`` orders the pages of ``pools``; ``clock``
        is what the ends of leases are compared with. See :func:`tierstore.open` and
        :func:`tierstore.connect` for the others."""
        self.pools = checked_pools(spec, pools)
        self.lookup_s = checked_lookup_s(lookup_s)
        self.spec = spec
        self.identity = identity or Identity.of(spec, model="default")
        self.backend = backend
        self.clock = clock
        self._hbm = HbmTier(self.pools, policy, clock)
        self._finder = Finder(self._hbm, backend, spec, self.identity, self.lookup_s, groups)
        self.groups: tuple[Group, ...] = self._finder.groups
        self._planning = Planning(self._hbm, backend, self.groups, spec.chunk_tokens, self.lookup_s)
        self._pins = StorePins(self._finder)
        self._mover = Mover(whole_number("mover_threads", mover_threads, least=1))
        self._loader = Loader(self._finder, self._mover, self._planning)
        distance = default_checkpoint(spec) if checkpoint_tokens is None else checkpoint_tokens
        self._saver = Saver(self._finder, self._mover, distance)

    def __repr__(self) -> str:
        return "Store(of another process)" if self._hbm.forked else f"Store({self.backend!r})"

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        """What hits need of each layer group."""
        return self._finder.rules

    @property
    def pool(self) -> PagePool | None:
        """The first group's pool; None for a store without."""
        return self.pools[0] if self.pools else None

    @property
    def checkpoint_tokens(self) -> int:
        """How far apart the save points of a conversation are kept that it has gone on from."""
        return self._saver.checkpoint_tokens

    @checkpoint_tokens.setter
    def checkpoint_tokens(self, tokens: int) -> None:
        self._saver.checkpoint_tokens = tokens

    @property
    def planner(self) -> Planner:
        """May be replaced by one that several stores share."""
        return self._planning.planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self._planning.planner = planner

    def register(self, identity: Identity) -> None:
        """Have the backend know an identity before its first prompt is saved or looked up, which waits for
        that (``lookup_s`` at most) otherwise. Costs nothing once it does."""
        self._hbm.require_process()
        for group, each in zip(self.groups, identity.groups, strict=True):
            self.backend.register(Registration(each, group.page_bytes, self.spec.chunk_tokens))

    # -- finding -------------------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds) -> Prompt:
        """``tokens`` under the store's own identity, with what finds their pages."""
        self._hbm.require_process()
        return self._finder.prompt(tokens)

    def lookup(
        self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None, counted: bool = True
    ) -> Hit:
        """Return the longest prefix of ``prompt`` (at most ``max_tokens``) that all layer groups can serve
        from any tier, leased until the hit is loaded or released, or the lease ends.

        ``counted`` is False for a second look on behalf of one request: the statistics leave it out."""
        return lookup_all([(self, prompt)], max_tokens=max_tokens, counted=counted)[0]

    async def lookup_async(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """:meth:`lookup` for an event loop, which goes on meanwhile. (Loads and saves are awaitable.)"""
        lookup = self._begin(prompt, max_tokens, time.monotonic())
        try:
            lookup.ask()
            if lookup.answer is not None:
                await lookup.answer
            return lookup.hit()
        except BaseException:
            lookup.give_up()
            raise

    def _begin(
        self,
        prompt: Prompt | TokenIds,
        max_tokens: int | None,
        began: float,
        gain: int = 0,
        *,
        counted: bool = True,
    ) -> Lookup:
        self._require_open()
        return self._finder.begin(prompt, max_tokens=max_tokens, began=began, gain=gain, counted=counted)

    def expect(self, prompt: Prompt | TokenIds, promise: Promise) -> Transfer[None]:
        """Wait for pages of ``prompt`` that somebody has promised to save. Ends when all that a hit of the
        promised whole chunks needs is held, when the daemon goes, or when the promise's time is over; then
        look the prompt up. Where nobody keeps promises (a store of this process alone) that is at once, or
        after that time."""
        self._require_open()
        return self._finder.expect(prompt, promise)

    # -- loading -------------------------------------------------------------------------------------

    def load(
        self,
        hit: Hit,
        into: Sequence[bytearray | memoryview] | Sequence[Sequence[bytearray | memoryview]] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Transfer[Loaded]:
        """Bring a hit's pages into HBM pages (the default, for a store with pools) or ``into`` buffers of
        ``page_bytes``, one for each page that the hit needs: in the order of ``hit.chunks(group)``, for each
        layer group a sequence of them; where the model has one group that sequence itself.

        At the deadline the transfer ends with the longest hit that all groups can serve with the pages that
        have arrived; ``cancel()`` gives everything back and ends with none. The hit is released when it ends.
        Without ``deadline_s`` it is loaded as :meth:`plan` says: as far as that is faster than computing, and
        until computing would be done. Where no engine has said how fast it computes, all is loaded, however
        long it takes.
        """
        self._check_hit(hit)
        return self._loader.all_of(hit, into, optional_seconds("deadline_s", deadline_s))

    def load_part(
        self, hit: Hit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        """Bring chunks ``first … stop`` of a hit into HBM pages, of which the result has those that came; its
        tokens count from the prompt's start. What a hit needs of groups with named pages comes with the part
        that ends it; if that comes short of what any shorter hit needs, its result has no pages. The hit is
        released by its ``last`` load, or by the caller. In whatever order parts are loaded, each is found
        again once all before it are published, too."""
        self._check_hit(hit)
        deadline_s = optional_seconds("deadline_s", deadline_s)
        return self._loader.into_hbm(hit, first, stop, deadline_s=deadline_s, last=last)

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
        a store without pools, and a hit of one group: :meth:`Prompt.pages_of`). When the transfer has ended
        nothing is written to the target any more; the tokens of the result count from the hit's start.
        ``keep``: the hit is not released, so that more of it can be loaded."""
        self._check_hit(hit)
        deadline_s = optional_seconds("deadline_s", deadline_s)
        stop = hit.num_pages if count is None else first + count
        return self._loader.into_target(hit, target, first, stop, deadline_s=deadline_s, keep=keep)

    def _check_hit(self, hit: Hit) -> None:
        self._require_open()
        if not isinstance(hit, Hit) or hit.backend is not self.backend:
            raise UsageError("the hit is of another store")

    # -- planning ------------------------------------------------------------------------------------

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """An engine tells how long a prefill step took: of ``tokens`` tokens of one prompt, after ``behind``
        others. Plans compare loading with it."""
        self.planner.computed(tokens, behind, seconds)

    def plan(self, hit: Hit, prompt_tokens: int | None = None, *, block: int = 0) -> Plan:
        """How much of a hit to load, by what loads and prefill steps have taken lately; see
        :mod:`tierstore.planner`. ``prompt_tokens`` is the whole prompt's length (None: the hit is all of it
        but one token); ``block`` is what an engine that can compute the front meanwhile computes at a time.
        Of a model with named pages it is all of the hit or nothing. Changes nothing, and nothing is counted:
        see :meth:`decline`."""
        return self._planning.plan(hit, prompt_tokens, block=block)

    def meeting_point(self, hit: Hit, front: int, back: int) -> int:
        """Where an engine that has computed the first ``front`` tokens of a hit would meet a load of those
        before ``back``, in groups with chained pages; see
        :meth:`~tierstore.planner.Planner.meeting_point`."""
        return self._planning.meeting_point(hit, front, back)

    def decline(self, hit: Hit, planned: Plan) -> None:
        """Count what a plan does not use. A tier that is declined is measured now and then all the same, by a
        read that nobody waits for."""
        self._planning.decline(hit, planned)

    # -- other hosts ---------------------------------------------------------------------------------

    @property
    def remote(self) -> bool:
        """Whether other hosts may have pages."""
        return self.backend.remote

    def fetch_remote(
        self, hit: Hit, *, tokens: int | None = None, deadline_s: float | None = None
    ) -> Transfer[int] | None:
        """Have pages that other hosts have behind a hit (``hit.remote_tokens``), up to ``tokens`` of its
        prompt (None: all), come into the daemon's memory; None where there are none, or where computing them
        is faster, as far as both were measured. The result is how many pages came in time (None: as long as
        computing takes, 2 s at most); look the prompt up again to have them. The hit is not changed, and
        still to be released."""
        self._check_hit(hit)
        return self._planning.fetch_remote(hit, tokens, optional_seconds("deadline_s", deadline_s))

    def worth_fetching(self, behind: int, tokens: int, nbytes: int) -> float | None:
        """How long ``nbytes`` of other hosts' pages are best waited for, which spare computing ``tokens``
        tokens ``behind`` others: as long as that takes, 2 s at most. None where computing them is faster, as
        far as both were measured."""
        return self._planning.worth_fetching(behind, tokens, nbytes)

    def offer(self, hit: Hit) -> None:
        """The pages of a hit are in use again: where hosts share pages, those that are held below HBM are
        given to others. (That a chain is used again the daemon notices when it is asked for it, and it is not
        where all of it is in HBM.)"""
        self._loader.offer(hit)

    # -- saving --------------------------------------------------------------------------------------

    def save(
        self,
        prompt: Prompt | TokenIds,
        pages: Sequence[bytes | bytearray | memoryview],
        *,
        first: int = 0,
        group: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Store ``pages`` of a layer group as chunks ``first, first + 1, …`` of ``prompt``; the last may be
        its partial tail. Where the group's pages are chained, those before ``first`` must have been saved
        before. Of any other group, any chunks may be saved: those that a hit needs
        (``store.groups[group].chunks``).

        Each page is a buffer of ``page_bytes`` that must stay as it is until the transfer ends: its bytes
        are then in the host tier, and go to disk behind the caller's back (see :meth:`flush`). The result is
        the number of tokens that are stored; pages that are there already count and are not copied.

        ``hint`` is what the caller knows of the pages' future, ``session`` any name of the conversation that
        they are part of (see :mod:`tierstore.types`, and :meth:`finish`). Neither changes what is found or
        loaded, only what leaves first when a tier is full. A save of no pages can carry them, too. Where
        pages are named, the end of the last one is taken for a save point of the session, and what it
        supersedes leaves (:mod:`tierstore.retention`). Where prompts part, save without a session: such a
        place is nobody's turn.
        """
        source = Buffers(pages, self._group(group).page_bytes, writable=False)
        return self.save_from(
            prompt, source, len(source), first=first, group=group, hint=hint, session=session
        )

    def save_from(
        self,
        prompt: Prompt | TokenIds,
        source: PageSource,
        count: int,
        *,
        first: int = 0,
        group: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """:meth:`save` of ``count`` pages that are not buffers of ``page_bytes``. After ``cancel()`` the
        source is not read any more; what it had given by then is stored."""
        self._require_open()
        hints = SaveHints(hint, session)
        return self._saver.save(prompt, source, count, first, self._group(group), hints)

    def save_hbm(
        self,
        prompt: Prompt | TokenIds,
        hbm_pages: Sequence[int],
        *,
        first: int = 0,
        group: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Like :meth:`save`, for pages of the group's pool that the caller owns: they are published where
        they are, become read-only, and are cached after ``release_hbm``."""
        self._require_open()
        self._pool(group)
        prompt = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        hints = SaveHints(hint, session)
        return self._saver.save_hbm(prompt, hbm_pages, first, self.groups[group], hints)

    def supersede(self, pages: Prompt, session: str) -> None:
        """Named pages of a session are not going to be asked for again: those that nobody else has saved
        leave every tier, at once where nothing holds them, first of all otherwise."""
        self._require_open()
        self._saver.supersede(pages, session)

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
        if not self._hbm.wait_saved(timeout):
            return False
        return self.backend.flush(None if ends is None else max(ends - time.monotonic(), 0.0))

    # -- room in HBM (for the engine that owns the pools) ----------------------------------------------

    def allocate_hbm(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` private pages of a group's pool, evicting cached ones; None when that many cannot be had.
        The pools share a memory: those leave of whichever group has most that nobody uses. ``near`` are pages
        of the same sequence: a pool of two levels keeps these together."""
        self._pool(group)
        count = whole_number("count", count, least=0)
        with self._hbm.lock:
            return self._hbm.allocate(count, group, near=near)

    def resize_hbm(self, nbytes: int) -> PoolSize:
        """Have ``nbytes`` of memory for the pools of all groups from now on. More is had at once, as far as
        there is memory. Less: what is free and what is cached goes at once, what is in use when it is
        released. No page in use moves. Raises :class:`UsageError` for a size that cannot be."""
        self._hbm.require_process()
        pool = self._hbm.pool(0)
        nbytes = whole_number("nbytes", nbytes, least=1)
        with self._hbm.lock:
            self._hbm.resize(nbytes)
        pool.settle(wait=True)
        return pool.large_pages.size

    def release_hbm(self, hbm_pages: Sequence[int], *, group: int = 0) -> None:
        """The caller is done with these pages (once for each time it came to own one)."""
        hbm_pages = checked_hbm_pages(self._pool(group), hbm_pages)
        with self._hbm.lock:
            self._hbm.release(hbm_pages, group)

    def available_hbm(self, *, group: int = 0) -> int:
        """Pages that ``allocate_hbm`` could find: free ones and cached ones that may leave, of the other
        groups as far as they make up whole large pages."""
        self._pool(group)
        with self._hbm.lock:
            return self._hbm.available(group)

    def has_room_hbm(self, counts: Sequence[int]) -> bool:
        """Return whether ``allocate_hbm`` could find so many pages of each group together."""
        self._hbm.require_process()
        if len(counts) != len(self.pools):
            raise UsageError(f"there are {len(self.pools)} pools, and numbers of pages for {len(counts)}")
        with self._hbm.lock:
            self._hbm.leases.expire()
            return self._hbm.has_room(counts)

    # -- keeping and dropping ------------------------------------------------------------------------

    def evict(self, tier: str, pages: int | None = None, *, group: int | None = None) -> int:
        """Let up to ``pages`` pages (None: all that may) leave ``tier`` (``hbm``, ``host`` or ``disk``), the
        policy's worst first; ``group`` is which pool they leave in HBM (None: any). Returns how many left;
        leased and pinned ones stay. Raises :class:`UsageError` for a group and a tier that groups share."""
        self._require_open()
        if tier not in LABELS:
            raise UsageError(f"unknown tier {tier!r} (known: {', '.join(LABELS)})")
        if group is not None and tier != Tier.HBM.label:
            raise UsageError(f"the layer groups share the tier {tier!r}: evict from it without a group")
        count = None if pages is None else min(whole_number("pages", pages, least=0), sys.maxsize)
        if tier != Tier.HBM.label:
            return self.backend.evict(tier, count)
        groups = range(len(self.pools)) if group is None else [self._group(group).number]
        return self._hbm.evict_from(groups if self.pools else (), count)

    def pin(self, prompt: Prompt | TokenIds) -> int:
        """Keep what the longest hit of whole chunks of ``prompt`` needs in the store until :meth:`unpin`;
        returns its tokens. A pin keeps the coldest copy of a page. Faster copies may be evicted."""
        self._require_open()
        return self._pins.pin(prompt)

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """Undo the newest :meth:`pin` of exactly this prompt by the same tenant. Returns the tokens that this
        pin has kept, 0 where there was none. Pins of other prompts on the same pages stay."""
        self._require_open()
        return self._pins.unpin(prompt)

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """A snapshot: HBM and what is asked of this store are counted here, everything below HBM by the
        backend."""
        self._hbm.require_process()
        return self._hbm.stats_over(self.backend.stats(), failed_tasks=self._mover.failed_tasks)

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
        with self._hbm.lock:
            if self._hbm.closed:
                return
            self._hbm.closed = True
        self._hbm.wait_saved(_CLOSE_S)
        self._mover.drain()  # copies go on after their load, and need the backend's leases
        self.backend.close()
        self._mover.close()

    def _require_open(self) -> None:
        self._hbm.require_process()
        self._hbm.require_open()

    def _group(self, group: int) -> Group:
        """Raises :class:`UsageError` for a group that the model does not have."""
        group = whole_number("group", group)
        if not 0 <= group < len(self.groups):
            raise UsageError(f"the model has layer groups 0 to {len(self.groups) - 1}, not {group}")
        return self.groups[group]

    def _pool(self, group: int) -> PagePool:
        """Raises :class:`UsageError` likewise, and for a store without pools."""
        self._hbm.require_process()
        return self._hbm.pool(self._group(group).number)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def checked_lookup_s(lookup_s: float) -> float:
    """Raises :class:`UsageError` for no time at all."""
    lookup_s = seconds("lookup_s", lookup_s)
    if lookup_s <= 0:
        raise UsageError("lookup_s must be above 0")
    return lookup_s


def checked_pools(spec: KVSpec, pools: PagePool | Sequence[PagePool] | None) -> tuple[PagePool, ...]:
    """Raises :class:`UsageError` for chunks that are too short for a name, and for pools that are not those
    of the groups. Of a hashed layout the engine's own is the same without the hash: it knows tokens."""
    groups = groups_of(spec)
    if by_kind(groups)[1] and spec.chunk_tokens < LEAST_NAMED_TOKENS:
        raise UsageError(
            f"pages of windows and states are named by {LEAST_NAMED_TOKENS} tokens' worth of bytes: "
            f"chunks of {spec.chunk_tokens} tokens are too short"
        )
    if pools is None:
        return ()
    pools = (pools,) if isinstance(pools, PagePool) else tuple(pools)
    if len(pools) != len(groups):
        raise UsageError(f"the model has {len(groups)} layer groups, and there are {len(pools)} pools")
    for pool, part in zip(pools, spec.split(), strict=True):
        if replace(pool.spec, hashed=part.hashed) != part:
            raise UsageError("the page pool was made for another KV spec than the store's")
    if any(pool.large_pages is not pools[0].large_pages for pool in pools):
        raise UsageError("the pools of a model's layer groups lie in one memory: see open_pools")
    return pools


def lookup_all(
    wanted: Iterable[tuple[Store, Prompt | TokenIds]],
    *,
    max_tokens: int | None = None,
    gain: int = 0,
    counted: bool = True,
) -> list[Hit]:
    """:meth:`Store.lookup` of many prompts, in one store or in several: all are asked before any answer is
    waited for, and ``lookup_s`` (the longest of the stores') is the limit for all together. The hits are in
    the order of ``wanted``. ``gain``: tokens that a prompt need not compute if pages that the caller has
    named, and that are lacking, come from other hosts (0: these are not asked). ``counted``: see
    :meth:`Store.lookup`. Raises what :meth:`Store.lookup` raises; nothing is leased then.

    An engine has as many prompts to ask about as it has workers times KV cache groups: with a round trip for
    each they would come near the end of its patience."""
    began = time.monotonic()
    lookups: list[Lookup] = []
    hits: list[Hit] = []
    try:
        for store, prompt in wanted:  # the backend works on the first while the next is made
            lookup = store._begin(prompt, max_tokens, began, gain, counted=counted)
            before = lookups[-_LOOKUPS_AT_ONCE].answer if len(lookups) >= _LOOKUPS_AT_ONCE else None
            if before is not None:
                before.wait()
            lookups.append(lookup)
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
