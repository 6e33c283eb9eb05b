"""Lookups: threads ask the daemon what it holds of prompts, and the scheduler polls in every step.

The pages of one KV cache group on one worker are a layer group of the store (:class:`VllmLookups`). So one
lookup finds the longest hit of a prompt that all groups on all workers support. Waiting prompts are looked up
together (:meth:`VllmLookups.ask`).

Pages on disk are read into memory, with a deadline, before tokens are promised to vLLM. A damaged page then
shortens the hit (to nothing, if the hit needs named pages) instead of failing a load. A lease holds all pages
that were found.

If another engine has promised pages, the lookup waits for them first, as long as that engine said. If other
hosts have pages, they are fetched where that is faster than computing, and the prompt is looked up again.

If engines share pages, engines of other sizes may have saved the prompt in other parts
(:class:`LookupSize`). All sizes are asked together, and the longest hit is used.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from tierstore import Hit, Store, Transfer, TransferState, lookup_all
from tierstore.errors import StoreClosedError
from tierstore.explanation import Explanation
from tierstore.groups import Group
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.planner import Planner
from tierstore.spec import KVSpec
from tierstore.types import Promise
from tierstore_connectors.common.facts import under_epoch
from tierstore_connectors.common.guard import Breaker, ErrorLog
from tierstore_connectors.common.sharing import SharedPrompt
from tierstore_connectors.vllm.config import VllmSettings
from tierstore_connectors.vllm.identity import EnginePrompt
from tierstore_connectors.vllm.orders import RENEW_S, GroupShard, Shard, kept_by_name

_log = logging.getLogger("vllm.tierstore")
_THREADS = 2  # threads that wait for answers
_FETCHERS = 4  # threads that wait for other hosts
# The daemon normally answers within _FIRST_POLL_S. An engine that can only wait uses _POLL_S. Without it the
# engine would spin through empty steps, and the threads that wait for the answer would run only every 5 ms.
_FIRST_POLL_S = 0.004
_POLL_S = 0.001
_CONNECT_S = 1.0  # how long the engine's start waits for the daemon
_EXPLAIN_S = 2.0  # how long an explanation may wait for the daemon's disk


@dataclass(frozen=True, slots=True)
class LookupSize:
    """The pages that engines of one size save. ``identities`` has one for each group on each worker.

    ``model`` is the whole model's identity if engines share the pages. Otherwise keys are vLLM's.
    """

    store: Store
    identities: tuple[Identity, ...]
    model: Identity | None = None

    def prompt(self, keys: Sequence[PageKey], tokens: bytes, chunk_tokens: int) -> Prompt:
        """Return a prompt's whole chunks as one lookup."""
        if self.model is None:
            return EnginePrompt(self.identities, keys, tokens, chunk_tokens)
        return SharedPrompt(self.model, self.identities, tokens, chunk_tokens)


class PromptLookup:
    """The lookup of one prompt. One thread asks, another polls."""

    def __init__(self, keys: Sequence[PageKey], tokens: Callable[[], bytes], chunk_tokens: int) -> None:
        """Make a lookup. ``tokens`` returns the tokens of the chunks of ``keys``; the asking thread calls
        it."""
        self.keys = keys
        self.chunk_tokens = chunk_tokens
        self.first_polled: float | None = None  # when vLLM first asked
        self.batch = 0  # lookups with one number were asked together
        self.asked_at = 0.0
        self.late = False  # the daemon did not answer in time
        self.declined = 0  # tokens found on disk that are computed because that is faster
        self.extra_s = 0.0  # additional time for the answer, while pages of other hosts are fetched
        self.promise: Promise | None = None  # of another engine; None once it was waited for
        self.sizes: Sequence[LookupSize] = ()  # set when it is asked
        self.size = 0  # which of them the hit is of
        self._tokens = tokens
        self._prompts: dict[int, Prompt] = {}  # by size
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._hit: Hit | None = None  # guarded by _lock, as is all below
        self._fetched: Transfer[int] | None = None
        self._expected: Transfer[None] | None = None
        self._released = False

    @property
    def answered(self) -> bool:
        """Return whether there is an answer, which may be that the daemon is away."""
        return self._answered.is_set()

    @property
    def hit(self) -> Hit | None:
        """Return the hit; None before the answer and after the release."""
        with self._lock:
            return self._hit

    @property
    def on_disk(self) -> int:
        """Return how many of the found tokens came from disk."""
        hit = self.hit
        return hit.by_tier.get("disk", 0) if hit is not None else 0

    @property
    def promise_over(self) -> bool:
        """Return whether the promised pages have arrived or can no longer arrive."""
        with self._lock:
            expected = self._expected
        return expected is not None and expected.done

    def wait(self, timeout: float) -> None:
        """Wait for the next event: promised pages, the answer, or pages from disk."""
        with self._lock:
            next_of_it = self._expected if self.promise is not None else self._fetched
        if next_of_it is not None and not next_of_it.done:
            with suppress(TimeoutError):
                next_of_it.wait(timeout)
        elif self.promise is not None or not self._answered.is_set():
            self._answered.wait(timeout)

    def tokens(self) -> int | None:
        """Return how many leading tokens can be loaded; None while that is unknown or pages are being read
        from disk."""
        if not self._answered.is_set():
            return None
        with self._lock:
            hit, fetched = self._hit, self._fetched
        if hit is None or fetched is None:
            return 0 if hit is None else hit.tokens  # whole chunks: see VllmLookups._look_up
        if not fetched.done:  # ends at its deadline
            return None
        came = min(fetched.wait(), hit.tokens)
        leading = sum(part.leading for part in hit.parts)
        if came < hit.tokens and leading < len(self.sizes[self.size].identities):
            return 0  # named pages support one length only
        return came // self.chunk_tokens * self.chunk_tokens

    def release(self) -> None:
        """Cancel everything and release the hit. Repeated calls are harmless."""
        with self._lock:
            self._released = True
            hit, self._hit = self._hit, None
            under_way = [each for each in (self._fetched, self._expected) if each is not None]
            self._fetched = self._expected = None
        for transfer in under_way:
            transfer.cancel()
        if hit is not None:
            hit.release()

    # -- for the asking thread -------------------------------------------------------------------------

    @property
    def released(self) -> bool:
        """Return whether the answer is no longer needed."""
        return self._released

    def prompt(self, size: int = 0) -> Prompt:
        """Return the prompt to look up among the pages of a size."""
        prompt = self._prompts.get(size)
        if prompt is None:
            prompt = self.sizes[size].prompt(self.keys, self._tokens(), self.chunk_tokens)
            self._prompts[size] = prompt
        return prompt

    def expect(self, expected: Transfer[None]) -> None:
        """Wait for promised pages through ``expected``; cancel it if the lookup was released."""
        with self._lock:
            if not self._released:
                self._expected = expected
                return
        expected.cancel()

    def hold(self, hit: Hit, size: int = 0) -> None:
        """Take in a hit, in place of the previous one. A released lookup releases it."""
        with self._lock:
            unwanted = hit if self._released else self._hit
            if not self._released:
                self._hit, self.size = hit, size
        if unwanted is not None:
            unwanted.release()

    def prefetch(self, within_s: float) -> Transfer[int] | None:
        """Start to read pages from disk; None if none are on disk or the lookup was released."""
        with self._lock:
            if self._hit is not None and self._hit.by_tier.get("disk"):
                self._fetched = self._hit.prefetch(deadline_s=within_s)
            return self._fetched

    def end(self) -> None:
        """Mark the lookup as answered."""
        self._answered.set()


class VllmLookups:
    """Look up prompts unless the daemon is away or does not answer. Belongs to the scheduler's thread."""

    def __init__(
        self, settings: VllmSettings, errors: ErrorLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breaker = Breaker()
        self.planner = Planner()  # knows the measured times of reading pages and computing prompts
        self.store: Store | None = None  # None until the workers are ready
        self._settings = settings
        self._errors = errors
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-find")
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="tierstore-remote")
        self._shards: tuple[Shard, ...] = ()
        self._sizes: tuple[LookupSize, ...] = ()  # the workers' own first, whose store is ``store``
        self._batches = 0
        self._late = 0  # the last batch whose answers were late

    def connect(self, shards: Sequence[Shard]) -> None:
        """Connect to look up the pages of these workers. Raises :class:`~tierstore.errors.UsageError`."""
        self._shards = tuple(shards)
        self._open("")
        for size in self._sizes:
            size.store.wait_connected(_CONNECT_S)  # without a daemon every lookup misses until it connects

    def renew(self, epoch: str) -> None:
        """Use the identities of ``epoch`` from now on, over a new connection. Lookups in flight find nothing.

        A new connection is needed because the daemon keeps a client's identities until the client
        disconnects, and limits their number.
        """
        if self.store is not None:
            self._close_stores()
            self._open(epoch)
            for size in self._sizes:
                size.store.wait_connected(RENEW_S)

    def _open(self, epoch: str) -> None:
        """Connect a store for each size of pages."""
        own = [pages for shard in self._shards for pages in shard.groups]
        others = zip(*(shard.others for shard in self._shards), strict=True)
        sizes = [own, *([pages for shard in size for pages in shard] for size in others)]
        self._sizes = tuple(self._size(pages, epoch) for pages in sizes)
        self.store = self._sizes[0].store

    def _size(self, pages: Sequence[GroupShard], epoch: str) -> LookupSize:
        model = self._shards[0].model
        if model is not None:
            model = under_epoch(model, epoch)
            pages = list({each.identity: each for each in pages}.values())  # ranks may have the same heads
        identities = tuple(under_epoch(each.identity, epoch) for each in pages)
        groups = [
            Group(number, each.rule, KVSpec.parse(each.identity.layout), named=kept_by_name(each.rule))
            for number, each in enumerate(pages)
        ]
        prompts = identities[0] if model is None else model  # the identity of every prompt
        spec = KVSpec.parse(prompts.layout)
        store = self._settings.connect(identities[0], spec, threads=1, groups=groups, log=_log)
        store.planner = self.planner
        return LookupSize(store, identities, model)

    @property
    def connected(self) -> bool:
        """Return whether :meth:`connect` was called."""
        return self.store is not None

    @property
    def reachable(self) -> bool:
        """Return whether the daemon is connected."""
        return self.store is not None and self.store.connected

    def may_ask(self) -> bool:
        """Return whether the daemon is connected and the breaker allows a question. After True the caller
        must ask."""
        return self.reachable and self.breaker.allows(self._clock())

    def ask(self, lookups: Sequence[PromptLookup]) -> None:
        """Look up all of these prompts soon, together."""
        store = self.store
        assert store is not None, "ask() needs connect() first"
        self._batches += 1
        for lookup in lookups:
            lookup.batch, lookup.asked_at, lookup.sizes = self._batches, self._clock(), self._sizes
            if lookup.promise is not None:
                self._threads.submit(self._expect, store, lookup, lookup.promise)
        unpromised = [each for each in lookups if each.promise is None]
        if unpromised:
            threads = self._fetchers if store.remote else self._threads
            threads.submit(self._ask, store, unpromised)

    def poll(self, lookup: PromptLookup, *, patient: bool) -> int | None:
        """Return the tokens that a lookup has found; None asks the caller to poll in the next step.

        A lookup without an answer after ``lookup_s`` has found nothing. ``patient``: wait for a few
        milliseconds.
        """
        now = self._clock()
        if lookup.promise is not None:
            late = now - lookup.asked_at > lookup.promise.until_s + self._settings.lookup_s
            if not (lookup.promise_over or late):
                if patient:
                    lookup.wait(_POLL_S)
                return None
            lookup.promise = None
            self.ask([lookup])
        if lookup.first_polled is None:
            lookup.first_polled = now
            lookup.wait(_FIRST_POLL_S if patient else 0)
        elif patient:
            lookup.wait(_POLL_S)
        if lookup.answered and not lookup.late:
            self.breaker.succeeded()
            return lookup.tokens()
        patience_s = self._settings.lookup_s + lookup.extra_s
        if not lookup.answered and self._clock() - lookup.first_polled < patience_s:
            return None
        lookup.late = True
        if lookup.batch > self._late:  # for the breaker a batch is one question
            self._late = lookup.batch
            self.breaker.failed(self._clock())
        lookup.release()
        return 0

    def explanation(self, lookup: PromptLookup) -> Callable[[], Explanation]:
        """Return a function that says why tokens of a prompt are missed. It waits for the daemon, so another
        thread calls it."""
        store = self.store
        assert store is not None, "only prompts that were looked up are explained"
        return lambda: store.explain(lookup.prompt(), timeout_s=_EXPLAIN_S)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._close_stores()

    def _close_stores(self) -> None:
        for size in self._sizes:
            size.store.close()

    # -- on a thread -----------------------------------------------------------------------------------

    def _expect(self, store: Store, lookup: PromptLookup, promise: Promise) -> None:
        expected: Transfer[None] = Transfer.completed(None)
        try:
            expected = store.expect(lookup.prompt(), promise)
        except StoreClosedError:
            pass  # the connection was replaced
        except Exception as error:  # noqa: BLE001  # must not be lost on this thread
            self._errors.caught("waiting for promised pages", error)
        lookup.expect(expected)

    def _ask(self, store: Store, lookups: Sequence[PromptLookup]) -> None:
        try:
            self._find(lookups)
        except StoreClosedError:  # the connection was replaced
            for lookup in lookups:
                lookup.release()
        except Exception as error:  # noqa: BLE001  # must not be lost on this thread
            self._errors.caught("looking up a prompt", error)
            for lookup in lookups:
                lookup.release()
        finally:
            for lookup in lookups:
                lookup.end()

    def _find(self, lookups: Sequence[PromptLookup]) -> None:
        self._look_up(lookups)
        fetched = []
        for lookup in lookups:
            hit, within_s = lookup.hit, self._settings.prefetch_s
            store = lookup.sizes[lookup.size].store
            fetching = store.fetch_remote(hit, deadline_s=within_s) if hit is not None else None
            if fetching is None:
                self._prefetch(lookup)
            else:
                lookup.extra_s = within_s
                fetched.append((lookup, fetching))
        for _, fetching in fetched:
            fetching.wait()
        again = [lookup for lookup, _ in fetched]
        self._look_up(again, counted=False)
        for lookup in again:
            self._prefetch(lookup)

    def _look_up(self, lookups: Sequence[PromptLookup], *, counted: bool = True) -> None:
        """Look up all of these prompts at once, except released ones. The longest hit of each is held."""
        asked = [
            (lookup, size) for lookup in lookups for size in range(len(lookup.sizes)) if not lookup.released
        ]
        began = time.monotonic()
        pairs = ((lookup.sizes[size].store, lookup.prompt(size)) for lookup, size in asked)
        hits = lookup_all(pairs, counted=counted)
        late = time.monotonic() - began >= self._settings.lookup_s
        for (lookup, size), hit in zip(asked, hits, strict=True):
            if size and hit.tokens <= (lookup.hit.tokens if lookup.hit is not None else 0):
                hit.release()
                continue
            lookup.late = late and not hit.tokens  # otherwise the daemon said that there is no hit
            self._hold_whole_chunks(lookup, hit, size)

    def _hold_whole_chunks(self, lookup: PromptLookup, hit: Hit, size: int) -> None:
        """Hold a hit. One that ends inside of another engine's page is looked up again without that page."""
        if beyond := hit.tokens % lookup.chunk_tokens:
            whole = hit.tokens - beyond
            hit.release()
            hit = lookup.sizes[size].store.lookup(lookup.prompt(size), max_tokens=whole, counted=False)
        lookup.hold(hit, size)

    def _prefetch(self, lookup: PromptLookup) -> None:
        """Read pages from disk, except those that are computed sooner, and measure the time. The lookup is
        answered then."""
        self._decline(lookup)
        began, fetched, hit = self._clock(), lookup.prefetch(self._settings.prefetch_s), lookup.hit
        lookup.end()
        if fetched is None or hit is None:
            return
        runs = [(part.page_bytes, *run) for part in hit.parts for run in part.page_runs()]
        nbytes = sum(page_bytes * pages for page_bytes, tier, pages in runs if tier == "disk")

        def came() -> None:
            now, complete = self._clock(), fetched.wait() >= hit.tokens
            late = fetched.state is TransferState.EXPIRED
            if late or (complete and fetched.state is TransferState.DONE):
                self.planner.moved("disk", nbytes, now - began, now_s=now)

        fetched.on_end(came)

    def _decline(self, lookup: PromptLookup) -> None:
        """Shorten the hit if computing its end is faster than reading it from disk."""
        hit, size = lookup.hit, lookup.size
        if hit is None or not hit.by_tier.get("disk"):
            return
        store = lookup.sizes[size].store
        planned = store.plan(hit, len(lookup.keys) * lookup.chunk_tokens + 1)
        if planned.declined:
            store.decline(hit, planned)
            used = planned.tokens // lookup.chunk_tokens * lookup.chunk_tokens
            lookup.declined = hit.tokens - used
            lookup.hold(store.lookup(lookup.prompt(size), max_tokens=used, counted=False), size)
