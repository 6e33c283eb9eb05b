"""Lookups of prompts in the daemon: threads wait for the answers, and the scheduler polls in every step.

In the store, the pages of one KV cache group on one worker are a layer group (:class:`VllmLookups`). So one
lookup finds the longest hit of a prompt that all groups on all workers support. Waiting prompts are looked up
together (:meth:`VllmLookups.ask`).

Pages on disk are read into memory, with a deadline, before tokens are promised to vLLM. A damaged page then
shortens the hit (to nothing, if the hit needs named pages) instead of failing a load. A lease holds all pages
of the hit.

If another engine has promised pages of the prompt, the lookup first waits for them, at most as long as the
promise says. If other hosts have pages, the pages are fetched if that is faster than computing, and the
prompt is looked up again.

With ``share_engines``, engines of other parallelism may have saved the prompt's pages in other parts
(:class:`LookupSize`). All sizes are looked up together, and the longest hit is used.
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
from tierstore_connectors.vllm.orders import RENEW_S, GroupShard, Shard

_log = logging.getLogger("vllm.tierstore")
_THREADS = 2  # threads that wait for the daemon's answers
_FETCHERS = 4  # threads that wait for other hosts
# The first poll of a lookup waits up to _FIRST_POLL_S, within which the daemon normally answers. Later polls
# wait up to _POLL_S. Without these waits, an idle engine would run empty steps without a pause, and the
# threads that wait for the answer would get the GIL only every 5 ms.
_FIRST_POLL_S = 0.004
_POLL_S = 0.001
_CONNECT_S = 1.0  # how long the engine's start waits for the daemon
_EXPLAIN_S = 2.0  # how long an explanation may wait for the daemon's disk


@dataclass(frozen=True, slots=True)
class LookupSize:
    """The pages that engines of one parallelism save. ``identities`` has the identity of each group on each
    worker.

    ``model`` is the whole model's identity if engines share the pages, or None for keys from block hashes.
    """

    store: Store
    identities: tuple[Identity, ...]
    model: Identity | None = None

    def prompt(self, keys: Sequence[PageKey], tokens: bytes, chunk_tokens: int) -> Prompt:
        """Return the :class:`Prompt` for a lookup of the whole chunks with these ``keys`` and ``tokens``."""
        if self.model is None:
            return EnginePrompt(self.identities, keys, tokens, chunk_tokens)
        return SharedPrompt(self.model, self.identities, tokens, chunk_tokens)


class PromptLookup:
    """The lookup of one prompt. One thread asks the daemon, and the scheduler's thread polls."""

    def __init__(self, keys: Sequence[PageKey], tokens: Callable[[], bytes], chunk_tokens: int) -> None:
        """``tokens`` returns the tokens of the chunks of ``keys``; the asking thread calls it."""
        self.keys = keys
        self.chunk_tokens = chunk_tokens
        self.first_polled: float | None = None  # the time of the first poll
        self.batch = 0  # the number of the ask() call, which the breaker uses
        self.asked_at = 0.0
        self.late = False  # True if the daemon did not answer in time
        self.declined = 0  # tokens found on disk that are computed because that is faster
        self.extra_s = 0.0  # additional time for the answer, while pages of other hosts are fetched
        self.promise: Promise | None = None  # another engine's promise; None after the wait for it
        self.sizes: Sequence[LookupSize] = ()  # set by :meth:`VllmLookups.ask`
        self.size = 0  # the index in ``sizes`` of the pages that the hit has
        self._tokens = tokens
        self._prompts: dict[int, Prompt] = {}  # by size
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._hit: Hit | None = None  # guarded by _lock, like the attributes below
        self._fetched: Transfer[int] | None = None
        self._expected: Transfer[None] | None = None
        self._released = False

    @property
    def answered(self) -> bool:
        """Return whether the lookup has ended, with a hit, a miss or an error."""
        return self._answered.is_set()

    @property
    def hit(self) -> Hit | None:
        """Return the hit; None before the lookup has ended and after :meth:`release`."""
        with self._lock:
            return self._hit

    @property
    def on_disk(self) -> int:
        """Return how many tokens of the hit were on disk."""
        hit = self.hit
        return hit.by_tier.get("disk", 0) if hit is not None else 0

    @property
    def promise_over(self) -> bool:
        """Return whether the promised pages have arrived or can no longer arrive."""
        with self._lock:
            expected = self._expected
        return expected is not None and expected.done

    def wait(self, timeout: float) -> None:
        """Wait for the next event: promised pages, the daemon's answer, or pages from disk."""
        with self._lock:
            pages = self._expected if self.promise is not None else self._fetched
        if pages is not None and not pages.done:
            with suppress(TimeoutError):
                pages.wait(timeout)
        elif self.promise is not None or not self._answered.is_set():
            self._answered.wait(timeout)

    def tokens(self) -> int | None:
        """Return how many leading tokens can be loaded; None while the daemon has not answered or pages are
        being read from disk."""
        if not self._answered.is_set():
            return None
        with self._lock:
            hit, fetched = self._hit, self._fetched
        if hit is None or fetched is None:
            return (
                0 if hit is None else hit.tokens
            )  # a multiple of chunk_tokens, because of _hold_whole_chunks
        if not fetched.done:  # the transfer ends at its deadline
            return None
        came = min(fetched.wait(), hit.tokens)
        leading = sum(part.leading for part in hit.parts)
        if came < hit.tokens and leading < len(self.sizes[self.size].identities):
            return 0  # named pages support the full length of the hit only
        return came // self.chunk_tokens * self.chunk_tokens

    def release(self) -> None:
        """Cancel transfers and release the hit. Repeated calls are harmless."""
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
        """Return whether :meth:`release` was called, so that the answer is no longer needed."""
        return self._released

    def prompt(self, size: int = 0) -> Prompt:
        """Return the prompt to look up among the pages of ``self.sizes[size]``."""
        prompt = self._prompts.get(size)
        if prompt is None:
            prompt = self.sizes[size].prompt(self.keys, self._tokens(), self.chunk_tokens)
            self._prompts[size] = prompt
        return prompt

    def expect(self, expected: Transfer[None]) -> None:
        """Set the transfer that waits for promised pages; cancel it if the lookup was released."""
        with self._lock:
            if not self._released:
                self._expected = expected
                return
        expected.cancel()

    def hold(self, hit: Hit, size: int = 0) -> None:
        """Replace the hit by ``hit``. Release the previous hit, or ``hit`` if the lookup was released."""
        with self._lock:
            unwanted = hit if self._released else self._hit
            if not self._released:
                self._hit, self.size = hit, size
        if unwanted is not None:
            unwanted.release()

    def prefetch(self, within_s: float) -> Transfer[int] | None:
        """Start to read the hit's pages from disk. Return None if no page is on disk or the lookup was
        released."""
        with self._lock:
            if self._hit is not None and self._hit.by_tier.get("disk"):
                self._fetched = self._hit.prefetch(deadline_s=within_s)
            return self._fetched

    def end(self) -> None:
        """Mark the lookup as answered."""
        self._answered.set()


class VllmLookups:
    """Lookups of prompts in the daemon. Only the scheduler's thread calls the methods."""

    def __init__(
        self, settings: VllmSettings, errors: ErrorLog, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.breaker = Breaker()
        self.planner = Planner()  # has measured times of reading pages and computing prompts
        self.store: Store | None = None  # None until the workers are ready
        self._settings = settings
        self._errors = errors
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tierstore-find")
        self._fetchers = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="tierstore-remote")
        self._shards: tuple[Shard, ...] = ()
        self._sizes: tuple[LookupSize, ...] = ()  # the first has the workers' own pages, in ``store``
        self._batches = 0
        self._late = 0  # the last batch with a late answer

    def connect(self, shards: Sequence[Shard]) -> None:
        """Connect to the daemon, to look up the pages of ``shards``. Raise
        :class:`~tierstore.errors.UsageError` for an invalid address."""
        self._shards = tuple(shards)
        self._open("")
        for size in self._sizes:
            size.store.wait_connected(_CONNECT_S)  # until the daemon is connected, lookups miss

    def renew(self, epoch: str) -> None:
        """Use the identities of ``epoch`` from now on. Lookups in flight find nothing.

        The method makes a new connection, because the daemon limits the number of a client's identities, and
        drops them only when the client disconnects.
        """
        if self.store is not None:
            self._close_stores()
            self._open(epoch)
            for size in self._sizes:
                size.store.wait_connected(RENEW_S)

    def _open(self, epoch: str) -> None:
        """Open a store for each size."""
        own = [pages for shard in self._shards for pages in shard.groups]
        others = zip(*(shard.others for shard in self._shards), strict=True)
        sizes = [own, *([pages for shard in size for pages in shard] for size in others)]
        self._sizes = tuple(self._size(pages, epoch) for pages in sizes)
        self.store = self._sizes[0].store

    def _size(self, pages: Sequence[GroupShard], epoch: str) -> LookupSize:
        model = self._shards[0].model
        if model is not None:
            model = under_epoch(model, epoch)
            pages = list(
                {each.identity: each for each in pages}.values()
            )  # ranks with the same heads have equal identities
        identities = tuple(under_epoch(each.identity, epoch) for each in pages)
        groups = [
            Group(number, each.rule, KVSpec.parse(each.identity.layout), named=not each.rule.chained)
            for number, each in enumerate(pages)
        ]
        prompts = identities[0] if model is None else model  # the identity of the prompts, for all groups
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
        """Return whether the daemon is connected and the breaker allows a request. If so, the caller must
        call :meth:`ask`."""
        return self.reachable and self.breaker.allows(self._clock())

    def ask(self, lookups: Sequence[PromptLookup]) -> None:
        """Start to look up ``lookups`` together."""
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
        """Return the number of tokens that a lookup has found; None means that the caller polls again in the
        next step.

        A lookup without an answer after ``lookup_s`` has found nothing. If ``patient``, wait for up to 4 ms.
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
        if lookup.batch > self._late:  # the breaker counts a batch as one request
            self._late = lookup.batch
            self.breaker.failed(self._clock())
        lookup.release()
        return 0

    def explanation(self, lookup: PromptLookup) -> Callable[[], Explanation]:
        """Return a function that explains the missed tokens of a lookup's prompt. The function waits for the
        daemon, so a background thread must call it."""
        store = self.store
        assert store is not None, "explanation() needs connect() first"
        return lambda: store.explain(lookup.prompt(), timeout_s=_EXPLAIN_S)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._close_stores()

    def _close_stores(self) -> None:
        for size in self._sizes:
            size.store.close()

    # -- on background threads
    # -----------------------------------------------------------------------------------

    def _expect(self, store: Store, lookup: PromptLookup, promise: Promise) -> None:
        expected: Transfer[None] = Transfer.completed(None)
        try:
            expected = store.expect(lookup.prompt(), promise)
        except StoreClosedError:
            pass  # the connection was replaced
        except Exception as error:  # noqa: BLE001  # the executor would discard it
            self._errors.caught("waiting for promised pages", error)
        lookup.expect(expected)

    def _ask(self, store: Store, lookups: Sequence[PromptLookup]) -> None:
        try:
            self._find(lookups)
        except StoreClosedError:  # the connection was replaced
            for lookup in lookups:
                lookup.release()
        except Exception as error:  # noqa: BLE001  # the executor would discard it
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
        """Look up ``lookups`` at once, except released ones. Each lookup keeps its longest hit over all
        sizes."""
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
            lookup.late = late and not hit.tokens  # with a timely answer, the store has no page
            self._hold_whole_chunks(lookup, hit, size)

    def _hold_whole_chunks(self, lookup: PromptLookup, hit: Hit, size: int) -> None:
        """Hold a hit. If it ends inside a page, which another engine has saved, first look up the prompt
        again without this page."""
        if beyond := hit.tokens % lookup.chunk_tokens:
            whole = hit.tokens - beyond
            hit.release()
            hit = lookup.sizes[size].store.lookup(lookup.prompt(size), max_tokens=whole, counted=False)
        lookup.hold(hit, size)

    def _prefetch(self, lookup: PromptLookup) -> None:
        """Start to read the hit's pages from disk, without pages that are computed faster. Mark the lookup as
        answered, and measure the time of the reads."""
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
