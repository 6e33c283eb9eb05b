"""The store of an engine: its own HBM pages over one backend, for all layer groups of a model.

The store manages the pages in HBM itself (``hbm.py``). The backend manages the pages below HBM, in this
process or in a daemon. While a daemon is unavailable, lookups find only pages in HBM, and nothing is stored
below it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tierstore.arguments import optional_seconds, seconds, whole_number
from tierstore.backend import Backend, Registration, SaveHints
from tierstore.errors import UsageError
from tierstore.explanation import Explanation
from tierstore.groups import Group, GroupRule, by_kind, groups_of
from tierstore.index import LABELS, Tier
from tierstore.keys import LEAST_NAMED_TOKENS, Identity, Prompt, PromptInput, TokenIds
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
from tierstore.types import ForgetReceipt, Forgettable, Hint, Loaded, Promise

_CLOSE_S = 5.0  # longest wait for running saves when a store is closed
EXPLAIN_S = 5.0  # longest wait for an explanation
_LOOKUPS_AT_ONCE = 32  # most requests of lookup_all at the same time: each may wait for a disk


def _forget(
    store: Store, *, tenant: str | None = None, model: str | None = None, session: str | None = None
) -> ForgetReceipt | None:
    """Forget all pages of a tenant, of a model, or of a model of a tenant; or the pages that only this
    session has used. :class:`~tierstore.types.Forgettable` has the guarantees and their limits.

    Return the receipt; None if the daemon does not answer: then forget again. Raise :class:`UsageError` for
    any other combination of arguments, and :class:`~tierstore.errors.StoreUnavailableError` if the disk or
    the keyring fails.

    >>> # store.forget(tenant="acme").keys
    """
    store._require_open()
    what = Forgettable(tenant, model, session)
    store._finder.prompts.clear()
    in_pools = store._hbm.forgetting
    before = in_pools.pages
    in_pools.forget(what)
    receipt = store.backend.forget(tenant=tenant, model=model, session=session)
    store._finder.prompts.clear()
    in_pools.forget(what)  # a second time, for pages that loads have added meanwhile
    return None if receipt is None else replace(receipt, hbm_pages=in_pools.pages - before)


class Store:
    """A stack of tiers in which pages are found, loaded and saved. Thread-safe.

    :func:`tierstore.open` makes a store over host memory and a directory, in this process.
    :func:`tierstore.connect` makes a store over a daemon. Pages are found by a
    :class:`~tierstore.keys.Prompt`, or by tokens under the store's own identity.

    A tier that is full, slow, broken or unavailable never causes an exception: lookups and loads return fewer
    tokens, and saves store fewer. :class:`~tierstore.errors.UsageError` and
    :class:`~tierstore.errors.StoreClosedError` are raised for mistakes of the caller.

    Longer operations return a :class:`~tierstore.transfer.Transfer`: poll it, ``wait()`` or ``await`` it.

    In a model with several kinds of layers, each layer group (:mod:`tierstore.groups`) has its own pages.
    Group ``i`` of the spec has the pool ``pools[i]`` and the rule ``rules[i]``. A save has pages of one
    group. Lookups and loads cover all groups:

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
        """Make a store over any ``backend``, which :meth:`close` closes. ``policy`` decides the order in
        which pages leave ``pools``. ``clock`` decides when leases end. For the other arguments, see
        :func:`tierstore.open` and :func:`tierstore.connect`."""
        self.pools = checked_pools(spec, pools)
        self.lookup_s = checked_lookup_s(lookup_s)
        self.spec = spec
        self.identity = identity or Identity.of(spec, model="default")
        self.backend = backend
        self.clock = clock
        self._hbm = HbmTier(self.pools, policy, clock, backend)
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
        """The rules that say which pages of each layer group a hit needs."""
        return self._finder.rules

    @property
    def pool(self) -> PagePool | None:
        """The first group's pool; None for a store without pools."""
        return self.pools[0] if self.pools else None

    @property
    def checkpoint_tokens(self) -> int:
        """The distance in tokens between the save points that are kept of a continued conversation."""
        return self._saver.checkpoint_tokens

    @checkpoint_tokens.setter
    def checkpoint_tokens(self, tokens: int) -> None:
        self._saver.checkpoint_tokens = tokens

    @property
    def planner(self) -> Planner:
        """The planner, which may be replaced by a planner that several stores share."""
        return self._planning.planner

    @planner.setter
    def planner(self, planner: Planner) -> None:
        self._planning.planner = planner

    def register(self, identity: Identity) -> None:
        """Register an identity with the backend before its first save or lookup. Otherwise, that first
        operation waits for the registration, at most ``lookup_s`` seconds. Repeated calls do nothing."""
        self._hbm.require_process()
        for group, each in zip(self.groups, identity.groups, strict=True):
            self.backend.register(Registration(each, group.page_bytes, self.spec.chunk_tokens))

    # -- finding -------------------------------------------------------------------------------------

    def prompt(self, tokens: TokenIds, *, inputs: Sequence[PromptInput] = ()) -> Prompt:
        """Return the prompt of ``tokens`` under the store's own identity. Cross attention reads the
        ``inputs``: see :meth:`Prompt.place`."""
        self._hbm.require_process()
        return self._finder.prompt(tokens, inputs)

    def embedding(self, content: bytes, rows: int) -> Prompt:
        """Return the pages of an input's embedding, for use as a prompt. See :meth:`Prompt.of_input`."""
        return self._finder.embedding(content, rows)

    def lookup(
        self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None, counted: bool = True
    ) -> Hit:
        """Return the longest prefix of ``prompt`` (at most ``max_tokens`` tokens) that all layer groups can
        serve from any tier. The pages are leased until the hit is loaded or released, or the lease ends. Give
        ``counted=False`` for a second lookup for the same request, so that statistics count it once."""
        return lookup_all([(self, prompt)], max_tokens=max_tokens, counted=counted)[0]

    def explain(
        self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None, timeout_s: float = EXPLAIN_S
    ) -> Explanation:
        """Return why a lookup of ``prompt`` would miss tokens now: each token has one reason. Nothing is
        loaded or counted. Wait at most ``timeout_s`` seconds for the disk. For pages that the caller has
        named (:meth:`Prompt.named_pages`), the hit has the stored pages before the first missing one."""
        self._require_open()
        lookup = self._finder.explain(prompt, max_tokens, seconds("timeout_s", timeout_s))
        with lookup.hit() as hit:
            return self._planning.explanation(lookup, hit)

    async def lookup_async(self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None) -> Hit:
        """Do :meth:`lookup` without blocking the event loop. (Loads and saves are awaitable themselves.)"""
        self._require_open()
        lookup = self._finder.begin(prompt, max_tokens=max_tokens, began=time.monotonic())
        try:
            return await lookup.hit_async()
        except BaseException:
            lookup.give_up()
            raise

    def expect(self, prompt: Prompt | TokenIds, promise: Promise) -> Transfer[None]:
        """Wait for pages of ``prompt`` that another client has promised to save. The transfer ends when the
        store has everything that a hit of the promised whole chunks needs, when the connection to the daemon
        is lost, or when the promise expires. Then look up the prompt. A store without a daemon has no
        promises: its transfer ends immediately, or when the promise expires."""
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
        """Load a hit's pages into HBM pages (the default, for a store with pools) or ``into`` buffers: one
        sequence of buffers for each layer group, or only that sequence for a model with one group. A sequence
        has a buffer of ``page_bytes`` for each page of the group that the hit needs, in the order of
        ``hit.chunks(group)``.

        At the deadline, the transfer ends with the longest hit that all groups can serve with the pages that
        have arrived. ``cancel()`` releases everything, and the result is empty. The hit is released when the
        transfer ends. Without ``deadline_s``, the store follows :meth:`plan`: it loads the tokens that are
        faster to load than to compute, and stops when computing them would have ended. If no engine has
        reported how fast it computes, the whole hit is loaded, however long that takes."""
        self._check_hit(hit)
        return self._loader.all_of(hit, into, optional_seconds("deadline_s", deadline_s))

    def load_part(
        self, hit: Hit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        """Load the chunks ``first`` to ``stop - 1`` of a hit into HBM pages. The result has the pages that
        arrived. The result's tokens count from the prompt's start. The load that reaches the end of the hit
        also loads the named pages that the hit needs. If these pages support no hit beyond ``first``, its
        result has no pages. The load with ``last`` releases the hit; otherwise, the caller releases it. Parts
        may be loaded in any order: a part can be found again when all parts before it are published, too."""
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
        """Load ``count`` pages of a hit (None: all) from page ``first`` on into the caller's target. The
        store must have no pools, and the hit one group (:meth:`Prompt.pages_of`). After the transfer has
        ended, nothing is written to the target any more. The tokens of the result count from the hit's start.
        With ``keep``, the hit is not released, so that more of it can be loaded."""
        self._check_hit(hit)
        deadline_s = optional_seconds("deadline_s", deadline_s)
        stop = hit.num_pages if count is None else first + count
        return self._loader.into_target(hit, target, first, stop, deadline_s=deadline_s, keep=keep)

    def _check_hit(self, hit: Hit) -> None:
        self._require_open()
        if not isinstance(hit, Hit) or hit.backend is not self.backend:
            raise UsageError("the hit belongs to another store")

    # -- planning, other hosts --------------------------------------------------------------------------

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """Record the time of a prefill step of ``tokens`` tokens, which follow ``behind`` others."""
        self.planner.computed(tokens, behind, seconds)

    def plan(self, hit: Hit, prompt_tokens: int | None = None, *, block: int = 0) -> Plan:
        """Return how much of a hit to load. :mod:`tierstore.planner` decides from recent loads and prefill
        steps. ``prompt_tokens`` is the length of the whole prompt (None: the hit and one more token). If the
        engine can compute the front of the hit during the load, ``block`` is the number of tokens that it
        computes in one step. For a model with named pages, the plan is all of the hit or nothing. This method
        changes no state and no counter; see :meth:`decline`."""
        return self._planning.plan(hit, prompt_tokens, block=block)

    def meeting_point(self, hit: Hit, front: int, back: int) -> int:
        """Return the token at which an engine that has computed the first ``front`` tokens of a hit would
        meet a load of the tokens before ``back``; see :meth:`~tierstore.planner.Planner.meeting_point`."""
        return self._planning.meeting_point(hit, front, back)

    def decline(self, hit: Hit, planned: Plan) -> None:
        """Count the tokens that a plan does not load. Background reads still measure an unused tier."""
        self._planning.decline(hit, planned)

    @property
    def remote(self) -> bool:
        """Whether other hosts may have pages."""
        return self.backend.remote

    def fetch_remote(
        self, hit: Hit, *, tokens: int | None = None, deadline_s: float | None = None
    ) -> Transfer[int] | None:
        """Fetch the pages after a hit that other hosts have (``hit.remote_tokens``) into the daemon's memory,
        up to ``tokens`` tokens of the prompt (None: all). Return None if there are none, or if the
        measurements say that computing them is faster. The result is the number of pages that arrived in
        time: within ``deadline_s`` seconds, or by default within the time that computing them takes, at most
        2 s. Look up the prompt again to use the pages. The caller still has to release the hit."""
        self._check_hit(hit)
        return self._planning.fetch_remote(hit, tokens, optional_seconds("deadline_s", deadline_s))

    def worth_fetching(self, behind: int, tokens: int, nbytes: int) -> float | None:
        """Return how many seconds to wait for ``nbytes`` of other hosts' pages: the time to compute their
        ``tokens`` tokens after the first ``behind`` ones, at most 2 s; None if computing is faster."""
        return self._planning.worth_fetching(behind, tokens, nbytes)

    def offer(self, hit: Hit) -> None:
        """Report that a hit's pages are in use again, so that the daemon offers their copies below HBM to
        other hosts. (Lookups report it, too, but a daemon sees none if HBM has the whole chain.)"""
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
        """Store ``pages`` of a layer group as the chunks ``first, first + 1, …`` of ``prompt``. The last page
        may be the prompt's partial tail. If the group's pages are chained, the chunks before ``first`` must
        have been saved already. For other groups, save the chunks that a hit needs
        (``store.groups[group].chunks``), in any order.

        Each page is a buffer of ``page_bytes`` that must not change before the transfer ends. After the
        transfer, the bytes are in the host tier, and the store writes them to disk in the background (see
        :meth:`flush`). The result is the number of stored tokens. Pages that were already stored count, but
        are not copied again.

        ``hint`` says what the caller knows about the future use of the pages. ``session`` is any name for
        their conversation (see :mod:`tierstore.types` and :meth:`finish`). Neither changes what is found or
        loaded, only what a full tier evicts first. A save without pages can have a hint and a session, too.
        The end of the last named page is a save point of the session: a position where a hit may end. Save
        points that it supersedes are dropped (:mod:`tierstore.retention`). Save without a session where
        prompts diverge, because such a save point belongs to several conversations."""
        source = Buffers(pages, self._finder.group(group).page_bytes, writable=False)
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
        """Do :meth:`save` for ``count`` pages from a ``source`` instead of buffers. After ``cancel()``, the
        source is not read any more. Pages that were read before are stored."""
        self._require_open()
        hints = SaveHints(hint, session)
        return self._saver.save(prompt, source, count, first, self._finder.group(group), hints)

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
        """Do :meth:`save` for pages of the group's pool that the caller owns. The pages are published without
        being moved, become read-only, and stay cached after ``release_hbm``."""
        self._require_open()
        self._pool(group)
        prompt = prompt if isinstance(prompt, Prompt) else self.prompt(prompt)
        hints = SaveHints(hint, session)
        return self._saver.save_hbm(prompt, hbm_pages, first, self.groups[group], hints)

    def supersede(self, pages: Prompt, session: str) -> None:
        """Declare that named pages of a session will not be requested again. Pages that no other session has
        saved leave every tier: immediately if nothing holds them, otherwise before all other pages."""
        self._require_open()
        self._saver.supersede(pages, session)

    def finish(self, session: str) -> int:
        """End a session. From now on, its pages are evicted first, unless another session, or a save without
        a session, has saved them or continued from them. Return their number; 0 for an unknown session."""
        self._require_open()
        with self._hbm.lock:
            in_hbm = self._hbm.sessions.finish("", session)
        below = self.backend.finish(session)
        return in_hbm if below is None else below

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all saved pages are on disk or given up. Return False after ``timeout`` seconds."""
        self._require_open()
        timeout = optional_seconds("timeout", timeout)
        ends = None if timeout is None else time.monotonic() + timeout
        if not self._hbm.wait_saved(timeout):
            return False
        return self.backend.flush(None if ends is None else max(ends - time.monotonic(), 0.0))

    # -- room in HBM (for the engine that owns the pools) ----------------------------------------------

    def allocate_hbm(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        """Return ``count`` private pages of a group's pool, and evict cached pages if needed; None if there
        are not enough. The pools share one memory: pages are evicted from the group with the most unused
        cached pages. ``near`` are pages of the same sequence, which a pool of two levels keeps together."""
        self._pool(group)
        count = whole_number("count", count, least=0)
        with self._hbm.lock:
            return self._hbm.allocate(count, group, near=near)

    def resize_hbm(self, nbytes: int) -> PoolSize:
        """Change the memory of all groups' pools to ``nbytes``. Growth takes effect immediately, as far as
        there is memory. When the pools shrink, free and cached pages are dropped immediately, and pages in
        use, which never move, when they are released. Raise :class:`UsageError` for an impossible size."""
        self._hbm.require_process()
        pool = self._hbm.pool(0)
        nbytes = whole_number("nbytes", nbytes, least=1)
        with self._hbm.lock:
            pool.resize(nbytes)
            self._hbm.shrink()
        pool.settle(wait=True)
        return pool.large_pages.size

    def release_hbm(self, hbm_pages: Sequence[int], *, group: int = 0) -> None:
        """Release pages that the caller owns. Release a page as many times as the caller has got it."""
        hbm_pages = checked_hbm_pages(self._pool(group), hbm_pages)
        with self._hbm.lock:
            self._hbm.release(hbm_pages, group)

    def lose_hbm(self, hbm_pages: Sequence[int], *, group: int = 0) -> None:
        """Stop serving pages whose content is lost. Such pages stay allocated until nothing holds them."""
        self._hbm.lose(checked_hbm_pages(self._pool(group), hbm_pages), group)

    def available_hbm(self, *, group: int = 0) -> int:
        """Return how many pages ``allocate_hbm`` could return: free pages, evictable cached pages, and whole
        large pages of the other groups."""
        self._pool(group)
        with self._hbm.lock:
            return self._hbm.available(group)

    def has_room_hbm(self, counts: Sequence[int]) -> bool:
        """Return whether ``allocate_hbm`` could return these numbers of pages for all groups together."""
        self._hbm.require_process()
        with self._hbm.lock:
            return self._hbm.has_room(counts)

    # -- keeping and dropping ------------------------------------------------------------------------
    forget = _forget

    def evict(self, tier: str, pages: int | None = None, *, group: int | None = None) -> int:
        """Evict up to ``pages`` pages (None: all that may leave) from ``tier`` (``hbm``, ``host`` or
        ``disk``) in the policy's order. Leased and pinned pages stay. ``group`` selects the pool in HBM
        (None: all); the groups share the other tiers. Return the number of evicted pages. Raise
        :class:`UsageError` for a group with a shared tier."""
        self._require_open()
        if tier not in LABELS:
            raise UsageError(f"unknown tier {tier!r} (known: {', '.join(LABELS)})")
        if group is not None and tier != Tier.HBM.label:
            raise UsageError(f"all layer groups share the tier {tier!r}: leave group out")
        count = None if pages is None else min(whole_number("pages", pages, least=0), sys.maxsize)
        if tier != Tier.HBM.label:
            return self.backend.evict(tier, count)
        groups = range(len(self.pools)) if group is None else [self._finder.group(group).number]
        return self._hbm.evict_from(groups if self.pools else (), count)

    def pin(self, prompt: Prompt | TokenIds) -> int:
        """Keep everything that the longest hit of whole chunks of ``prompt`` needs, in the slowest tier that
        has it, until :meth:`unpin`. Return the tokens of this hit. Copies in faster tiers may be evicted."""
        self._require_open()
        return self._pins.pin(prompt)

    def unpin(self, prompt: Prompt | TokenIds) -> int:
        """Undo the newest :meth:`pin` of exactly this prompt by the same tenant. Return the tokens that this
        pin has kept; 0 if there was none. Pins of other prompts with the same pages stay."""
        self._require_open()
        return self._pins.unpin(prompt)

    # -- seeing and ending ---------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Return a snapshot of HBM and of this store's requests, and of everything below HBM."""
        self._hbm.require_process()
        return self._hbm.stats_over(self.backend.stats(), failed_tasks=self._mover.failed_tasks)

    def check(self) -> None:
        """Assert that all redundant counts agree. (Tests and idle stores call this.)"""
        self._hbm.require_process()
        with self._hbm.lock:
            self._hbm.check()
        self.backend.check()

    def wait_connected(self, timeout: float | None = None) -> bool:
        """Wait until the backend answers. Return False if ``timeout`` seconds pass first. Waiting is
        optional: until a daemon answers, lookups find only pages in HBM."""
        self._hbm.require_process()
        return self.backend.wait_connected(optional_seconds("timeout", timeout))

    @property
    def connected(self) -> bool:
        """Whether the backend exists and answers."""
        self._hbm.require_process()
        return self.backend.connected

    def wait_ready(self) -> None:
        """Block until the store has reached its full speed. (Before that, the store works more slowly.)"""
        self._hbm.require_process()
        self.backend.wait_ready(self.lookup_s)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._hbm.closed

    def close(self) -> None:
        """Finish running operations and release everything. Repeated calls do nothing."""
        if self._hbm.forked:
            return  # a forked child owns none of these objects
        with self._hbm.lock:
            if self._hbm.closed:
                return
            self._hbm.closed = True
        self._hbm.wait_saved(_CLOSE_S)
        self._mover.drain()  # copies continue after their loads, and need the backend's leases
        self.backend.close()
        self._mover.close()

    def _require_open(self) -> None:
        self._hbm.require_process()
        self._hbm.require_open()

    def _pool(self, group: int) -> PagePool:
        """Return a group's pool. Raise :class:`UsageError` for an unknown group or a store without pools."""
        self._hbm.require_process()
        return self._hbm.pool(self._finder.group(group).number)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def checked_lookup_s(lookup_s: float) -> float:
    """Return ``lookup_s``. Raise :class:`UsageError` if it is not positive."""
    lookup_s = seconds("lookup_s", lookup_s)
    if lookup_s <= 0:
        raise UsageError(f"lookup_s must be above 0, got {lookup_s}")
    return lookup_s


def checked_pools(spec: KVSpec, pools: PagePool | Sequence[PagePool] | None) -> tuple[PagePool, ...]:
    """Return the pools as a tuple. Raise :class:`UsageError` if the chunks are too short for a name, or if
    the pools do not match the layer groups. A pool's spec may be without the hash of a hashed layout, because
    an engine knows the tokens."""
    groups = groups_of(spec)
    if by_kind(groups)[1] and spec.chunk_tokens < LEAST_NAMED_TOKENS:
        raise UsageError(
            f"chunk_tokens must be at least {LEAST_NAMED_TOKENS} for models with windows or states, "
            f"got {spec.chunk_tokens}: the names of their pages need as many bytes"
        )
    if pools is None:
        return ()
    pools = (pools,) if isinstance(pools, PagePool) else tuple(pools)
    if len(pools) != len(groups):
        raise UsageError(f"the model has {len(groups)} layer groups: give as many pools, not {len(pools)}")
    for pool, part in zip(pools, spec.split(), strict=True):
        if replace(pool.spec, hashed=part.hashed) != part:
            raise UsageError("the page pool was made for another KV spec than the store's")
    shared = [pool for pool in pools if not pool.own_memory]
    if any(pool.large_pages is not shared[0].large_pages for pool in shared):
        raise UsageError(
            "the pools of a model's layer groups must share one memory: make them with open_pools"
        )
    return pools


def lookup_all(
    wanted: Iterable[tuple[Store, Prompt | TokenIds]],
    *,
    max_tokens: int | None = None,
    gain: int = 0,
    counted: bool = True,
) -> list[Hit]:
    """Look up many prompts, in one store or in several. All requests are sent before the first answer is
    awaited, and ``lookup_s`` (the longest of the stores') limits the time of all lookups together. The hits
    are in the order of ``wanted``.

    ``gain`` is for pages that the caller has named: the number of tokens that need not be computed if the
    missing pages are fetched from other hosts (0: do not search other hosts). ``counted``: see
    :meth:`Store.lookup`. If an error of :meth:`Store.lookup` is raised, nothing stays leased.

    An engine may have a prompt for each pair of worker and KV cache group. Separate round trips for all of
    them could exceed its time limit.
    """
    began = time.monotonic()
    lookups: list[Lookup] = []
    hits: list[Hit] = []
    try:
        for store, prompt in wanted:  # the backend works on the first request while the next one is made
            store._require_open()
            lookup = store._finder.begin(
                prompt, max_tokens=max_tokens, began=began, gain=gain, counted=counted
            )
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
