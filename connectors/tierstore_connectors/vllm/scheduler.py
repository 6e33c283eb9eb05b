"""The scheduler half of vLLM's connector: it decides what is loaded and saved, and handles no bytes.

The scheduler half runs on the scheduler's one thread in every step of the engine, so it must be fast. Other
threads wait for the daemon's answers (``lookup.py``), and an answer is kept until vLLM schedules the request.

**Failed loads cannot loop.** vLLM schedules a request again after a failed load. So a request gets one load,
and one more after each preemption. Chunks whose load failed are not loaded for any request for 30 seconds.

**Unnecessary lookups and saves are avoided.** A prompt that is complete in vLLM's own cache is not looked up,
and is saved at most once a minute. Prompts that arrive together are looked up together.

**Time of a save.** A chunk is saved after the step that completes its blocks, when vLLM has hashed and
computed all of its tokens. Draft tokens of speculative decoding may be rejected, so they are never saved. A
recurrent state is saved when vLLM reports the block that holds it, or when vLLM continues from a state that
the store may lack (``groups.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierstore.core.clients import MOST_IDENTITIES
from tierstore.errors import UsageError
from tierstore.explanation import Miss, MissReason
from tierstore.groups import Past
from tierstore.keys import PageKey, encode_tokens
from tierstore.types import Promise
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.explaining import MissReporter
from tierstore_connectors.common.guard import ErrorLog, RecentKeys
from tierstore_connectors.vllm.config import RequestOptions, VllmSettings
from tierstore_connectors.vllm.groups import (
    BlockTable,
    BlockTables,
    Groups,
    blocks_to_load,
    blocks_to_save,
    state_blocks,
    writable_blocks,
)
from tierstore_connectors.vllm.identity import (
    AdapterVersions,
    MediaContents,
    Secret,
    chunk_keys,
    request_salt,
)
from tierstore_connectors.vllm.layout import UnsupportedError
from tierstore_connectors.vllm.lookup import PromptLookup, VllmLookups
from tierstore_connectors.vllm.orders import (
    NULL_BLOCK,
    GroupBlocks,
    LoadOrder,
    LoadReport,
    PromptUpdate,
    SaveOrder,
    Shard,
    StepWork,
)

_log = logging.getLogger("vllm.tierstore")
_ANSWER_S = 20.0  # a prompt is looked up again after this time: the daemon's lease ends after a minute
_REFUSED_S, _MOST_REFUSED = 30.0, 4096
_STORED_S, _MOST_STORED = 60.0, 65_536


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The state of one request, from the request's arrival to its end.

    - ``answer``: loadable tokens according to the lookup, or None; ``answered_at``: the lookup's end.
    - ``held``: tokens in the store, according to the lookup. ``local``: tokens in vLLM's own cache.
    - ``known``: leading chunks whose keys the workers have. ``saved``: leading chunks that need no save.
    - ``loads``: the number of loads promised to vLLM.
    - ``resumable``, for models with recurrent states: the number of leading chunks at whose end the store
      has, or will have, all states. States at earlier chunks are not saved.
    - ``stale``: True if part of the request's KV was computed before
      :meth:`SchedulerHalf.forget_everything`. The request's chunks are then not saved.
    - ``uncached``: True if the request's adapter or image is unknown. The request's chunks are then neither
      loaded nor saved.
    - ``promise``: the promise of another engine; None after the wait for it.
    - ``explained``: True after the reasons of missed tokens were requested.
    """

    request: Any  # vLLM's ``Request``
    options: RequestOptions
    secret: Secret
    media: int
    keys: list[PageKey] = field(default_factory=list)
    lookup: PromptLookup | None = None
    looked_up: bool = False
    answer: int | None = None
    answered_at: float = 0.0
    held: int = 0
    local: int = 0
    known: int = 0
    saved: int = 0
    resumable: int = 0
    loads: int = 0
    stale: bool = False
    uncached: bool = False
    loading: tuple[int, int] | None = None  # first chunk, end (exclusive)
    promise: Promise | None = None
    explained: bool = False

    @classmethod
    def of(
        cls,
        request: Any,
        adapters: AdapterVersions,
        media: MediaContents,
        hash_tokens: int,
        settings: VllmSettings,
    ) -> tuple[TrackedRequest, Sequence[str]]:
        """Return the tracked request, and log messages about problems."""
        options, problem = RequestOptions.parse(
            request.kv_transfer_params, prompt_tokens=request.num_prompt_tokens
        )
        problems = [problem] if problem else []
        lora, uncached = request.lora_request, False
        adapter: tuple[str, ...] = ()
        features = request.mm_features or ()
        contents: Sequence[tuple[int, str]] = ()
        try:
            if lora is not None:
                adapter = (lora.lora_name, lora.lora_path, adapters.version(lora))
            contents = media.digests(features, hash_tokens)
            if settings.share_engines:
                _require_tokens(request)
        except UnsupportedError as error:
            problems.append(str(error))
            uncached = True
        secret = request_salt(adapter, request.cache_salt, contents)
        tracked = cls(request, options, secret, len(features), uncached=uncached, promise=options.promise)
        return tracked, problems

    def update_keys(self, groups: Groups) -> int:
        """Compute the keys of all chunks that vLLM has hashed. Return their number."""
        per_chunk = groups.chunk_tokens // groups.hash_tokens
        hashes = self.request.block_hashes
        if len(self.request.mm_features or ()) != self.media:
            self.uncached = True  # a streaming session has received more images
        if len(hashes) // per_chunk > len(self.keys):
            self.keys += chunk_keys(hashes, self.secret, per_chunk, len(self.keys))
        return len(self.keys)

    def has_expired(self, now: float) -> bool:
        """Return whether the lease on the lookup's pages may end soon, so that a new lookup is necessary."""
        if self.answer is not None:
            return now - self.answered_at > _ANSWER_S
        lookup = self.lookup  # may be older than vLLM's first call about the request
        return lookup is not None and lookup.first_polled is None and now - lookup.asked_at > _ANSWER_S

    def release(self) -> None:
        """Drop the lookup and the lease on its pages."""
        if self.lookup is not None:
            self.lookup.release()
        self.lookup = None
        self.looked_up = False
        self.answer = None


def _require_tokens(request: Any) -> None:
    """Raise :class:`UnsupportedError` for a request whose KV depends on more than its tokens, because the
    keys of pages that engines share are made from tokens only."""
    more = {
        "an adapter": request.lora_request,
        "a cache_salt": request.cache_salt,
        "images or other media": request.mm_features or None,
        "prompt_embeds": vars(request).get("prompt_embeds"),
    }
    if given := [name for name, value in more.items() if value is not None]:
        raise UnsupportedError(
            f"share_engines: requests with {' or '.join(given)} bypass the cache, because pages that "
            "engines share are found by tokens only"
        )


@dataclass(slots=True)
class _TimedPrefill:
    """A prompt that is computed without other requests since ``began``: ``tokens`` tokens so far, from
    position ``behind`` on."""

    request: str
    behind: int
    tokens: int
    began: float
    decodes: int = 0


def _computed_before(output: Any) -> dict[str, int]:
    """Return for each request of a step the number of its tokens computed before the step."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed


class SchedulerHalf:
    """The scheduler half; see the module. No page is found before :meth:`connect`. ``loads`` and ``saves``
    say whether this engine may load from the store and save to it."""

    def __init__(
        self,
        settings: VllmSettings,
        groups: Groups,
        errors: ErrorLog,
        counters: ConnectorCounters,
        *,
        loads: bool = True,
        saves: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = groups
        self.lookups = VllmLookups(settings, errors, clock)
        self.counters = counters
        self.errors = errors
        self.misses = MissReporter(_log, counters, errors) if settings.explain else None
        # ``refused`` has chunks whose load failed recently, so that failures do not loop. ``stored`` has the
        # last stored chunk of each prompt that was found or saved recently.
        self.refused = RecentKeys(_REFUSED_S, _MOST_REFUSED)
        self.stored = RecentKeys(_STORED_S, _MOST_STORED)
        self.epoch = ""
        self._settings = settings
        self._clock = clock
        self._may_load, self._may_save = loads, saves
        self._adapters = AdapterVersions()
        self._media = MediaContents()
        self._unasked: dict[str, TrackedRequest] = {}  # new requests that were not looked up yet
        self._ahead: set[str] = set()  # looked-up requests without blocks from vLLM yet
        self._tracked: dict[str, TrackedRequest] = {}
        self._promised: dict[str, TrackedRequest] = {}  # requests whose load vLLM waits for
        self._loads: list[LoadOrder] = []
        self._grown: list[PromptUpdate] = []
        self._lost: list[str] = []  # requests whose promised load could not be ordered
        self._forget: list[str] = []
        self._pin: list[str] = []
        self._tables = BlockTables()
        self._steps = 0
        self._timed: _TimedPrefill | None = None  # the prompt that is computed alone now, if any
        self._patient = True  # whether this step may still wait for a lookup
        self._idle = True  # whether the last step computed nothing

    def connect(self, shards: Sequence[Shard]) -> None:
        """Connect to the daemon, for pages of the workers ``shards``. Raise
        :class:`~tierstore.errors.UsageError` for an invalid address or too many identities."""
        identities = sum(len(shard.groups) for shard in shards)
        if identities > MOST_IDENTITIES:
            raise UsageError(
                f"{len(shards)} workers with their KV cache groups have {identities} identities, but the "
                f"daemon accepts at most {MOST_IDENTITIES} per client connection"
            )
        self.lookups.connect(shards)

    def close(self) -> None:
        for tracked in self._tracked.values():
            tracked.release()
        self._tracked.clear()
        self._adapters.close()
        if self.misses is not None:
            self.misses.close()
        self.lookups.close()

    def forget_everything(self, epoch: str) -> None:
        """Use a new identity for pages from now on, so that earlier pages are not found.

        Running requests continue with their earlier KV, and are not saved unless vLLM recomputes them.
        """
        self.epoch = epoch
        self.stored.clear()
        for tracked in self._tracked.values():
            tracked.release()
            tracked.held = tracked.saved = tracked.resumable = 0
            tracked.stale = tracked.request.num_computed_tokens > 0
        self.lookups.renew(epoch)

    def adapter_loads(self, adapter: Any) -> None:
        """Record the adapter's current files, which vLLM is about to load."""
        try:
            self._adapters.version(adapter)
        except UnsupportedError as error:
            self.errors.warn("an adapter", str(error))

    # -- finding -------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """Record a new request, which is looked up when vLLM calls :meth:`matched`, or in the next step if
        vLLM cannot schedule it yet."""
        self._unasked[request.request_id] = self._track(request)

    def matched(self, request: Any, local: int) -> int | None:
        """Return how many tokens after the first ``local`` tokens can be loaded; None asks vLLM to call again
        in the next step. vLLM calls this in every step while a request waits for free blocks."""
        tracked = self._track(request)
        tracked.local = local
        if not self._may_load or tracked.uncached or tracked.loads > request.num_preemptions:
            return 0
        if local >= self._most_chunks(tracked) * self.groups.chunk_tokens:
            self._unasked.pop(request.request_id, None)
            return 0  # vLLM's own cache has the whole prompt
        now = self._clock()
        if tracked.has_expired(now):
            tracked.release()
        if tracked.answer is None:
            self._look_up(tracked)
            answer = self._poll(tracked.lookup) if tracked.lookup is not None else 0
            if answer is None:
                return None
            self._answered(tracked, answer, now)
        limited = self._limited(tracked, now)
        if self.misses is not None and not tracked.explained:
            tracked.explained = True
            self._explain(self.misses, tracked, max(limited, local))
        return max(limited - local, 0)

    def _most_chunks(self, tracked: TrackedRequest) -> int:
        """Return how many chunks may be loaded, so that vLLM computes at least one token."""
        return int((tracked.request.num_tokens - 1) // self.groups.chunk_tokens)

    def _poll(self, lookup: PromptLookup) -> int | None:
        # Waiting for another engine's pages must not delay other requests.
        patient = self._patient and (self._idle or lookup.promise is None)
        self._patient = self._patient and not patient
        answer = self.lookups.poll(lookup, patient=patient)
        if answer is not None and lookup.late:
            self.counters.add("late_lookups")
        return answer

    def _answered(self, tracked: TrackedRequest, answer: int, now: float) -> None:
        chunk_tokens = self.groups.chunk_tokens
        tracked.answer = tracked.held = answer
        tracked.answered_at = now
        if answer:
            self.stored.add(tracked.keys[answer // chunk_tokens - 1], now)
        self.counters.add("lookups")
        self.counters.add("lookup_tokens", len(tracked.keys) * chunk_tokens)
        self.counters.add("found_tokens", answer)
        if tracked.promise is not None:
            expected = min(tracked.promise.tokens // chunk_tokens, self._most_chunks(tracked)) * chunk_tokens
            self.counters.add("expected_tokens", expected)
            self.counters.add("missing_tokens", max(expected - answer, 0))
            tracked.promise = None
        declined = tracked.lookup.declined if tracked.lookup is not None else 0
        if declined:
            self.counters.add("declined_tokens", declined)
        _log.debug(
            "tierstore: request %s: %d of %d tokens are stored, %d declined because computing is faster%s",
            tracked.request.request_id,
            answer,
            len(tracked.keys) * chunk_tokens,
            declined,
            "; the daemon's answer was late" if tracked.lookup is not None and tracked.lookup.late else "",
        )

    def _explain(self, misses: MissReporter, tracked: TrackedRequest, reused: int) -> None:
        """Report why the tokens after the ``reused`` ones are missed. Another thread asks the store."""
        name, tokens = tracked.request.request_id, tracked.request.num_tokens
        chunks = self._most_chunks(tracked) * self.groups.chunk_tokens
        lookup = tracked.lookup
        if reused >= chunks:
            misses.report(name, tokens, reused, [])
        elif lookup is None:
            away = Miss(MissReason.LATE, reused, chunks - reused, why="the daemon is not connected")
            misses.report(name, tokens, reused, [away])
        else:
            misses.explain(name, tokens, reused, self.lookups.explanation(lookup))

    def _limited(self, tracked: TrackedRequest, now: float) -> int:
        """Return the number of tokens that may be promised, which excludes chunks whose load failed
        recently."""
        chunk_tokens = self.groups.chunk_tokens
        answer = tracked.answer or 0
        held = min(answer // chunk_tokens, self._most_chunks(tracked))
        limited = self.refused.before_first(tracked.keys[:held], now) * chunk_tokens
        return 0 if limited < answer and self.groups.with_names else limited

    def _look_up(self, first: TrackedRequest) -> None:
        """Start to look up this request and other waiting ones, if the daemon can be asked."""
        if first.looked_up:
            return
        first.looked_up = True
        self._unasked.pop(first.request.request_id, None)
        if self._has_chunks(first) and self.lookups.may_ask():
            self._ask([first, *self._next_unasked()])

    def _look_up_waiting(self) -> None:
        """Start to look up requests that vLLM cannot schedule yet."""
        if self._unasked and len(self._ahead) < self._settings.ahead and self.lookups.may_ask():
            self._ask(self._next_unasked())

    def _next_unasked(self) -> list[TrackedRequest]:
        """Take the waiting requests that may be looked up before vLLM schedules them (setting ``ahead``)."""
        count = min(self._settings.ahead - len(self._ahead), len(self._unasked))
        waiting = [self._unasked.pop(next(iter(self._unasked))) for _ in range(count)]
        return [each for each in waiting if self._has_chunks(each)]

    def _has_chunks(self, tracked: TrackedRequest) -> bool:
        return bool(not tracked.uncached and tracked.update_keys(self.groups) and self._most_chunks(tracked))

    def _ask(self, several: Sequence[TrackedRequest]) -> None:
        for tracked in several:
            tracked.looked_up = True
            request = tracked.request
            chunks = min(len(tracked.keys), self._most_chunks(tracked))
            tokens = request.all_token_ids[: chunks * self.groups.chunk_tokens]
            encode = partial(encode_tokens, tokens)
            tracked.lookup = PromptLookup(tracked.keys[:chunks], encode, self.groups.chunk_tokens)
            tracked.lookup.promise = tracked.promise
            self._ahead.add(request.request_id)
        if lookups := [each.lookup for each in several if each.lookup is not None]:
            self.lookups.ask(lookups)

    def _track(self, request: Any) -> TrackedRequest:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked, problems = TrackedRequest.of(
                request, self._adapters, self._media, self.groups.hash_tokens, self._settings
            )
            for problem in problems:
                self.errors.warn("a request", problem)
            self._tracked[request.request_id] = tracked
        return tracked

    # -- loading -------------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: BlockTable, external: int) -> None:
        """Order the load of ``external`` tokens of a request, to which vLLM has just given blocks."""
        tracked = self._track(request)
        self._unasked.pop(request.request_id, None)
        self._ahead.discard(request.request_id)
        chunk_tokens = self.groups.chunk_tokens
        size = tracked.lookup.size if tracked.lookup is not None else 0
        # Pages of another size are not the parents of this engine's pages, which are saved from chunk 0 on.
        stored = 0 if size else tracked.held // chunk_tokens
        if tracked.answer is None and not tracked.options.hands_over:  # not looked up
            tracked.update_keys(self.groups)
            stored = self.stored.to_last(tracked.keys[: tracked.local // chunk_tokens], self._clock())
        tracked.saved = max(tracked.saved, stored)
        tracked.resumable = max(tracked.resumable, stored)
        if not external:
            if request.request_id not in self._promised:
                tracked.release()
            return
        tracked.loads += 1
        self._promised[request.request_id] = tracked
        self._lost.append(request.request_id)  # until the load is ordered
        end = tracked.local + external
        assert end == tracked.answer or not self.groups.with_states, (
            "a load with recurrent states must have the length of the hit"
        )
        chunks = -(-end // chunk_tokens)
        groups = [
            blocks_to_load(self.groups, group, tables, tracked.local, end) for group in self.groups.groups
        ]
        self._grow(tracked, chunks)
        wanted = tuple(each for each in groups if each.chunks)
        self._loads.append(LoadOrder(request.request_id, chunks, wanted, size))
        self._lost.remove(request.request_id)
        tracked.loading = (tracked.local // chunk_tokens, chunks)
        self.counters.add("promised_tokens", external)

    def reported(self, finished: Sequence[str], report: LoadReport | None) -> None:
        """Process the results of loads."""
        failed = report.failed if report is not None else {}
        now = self._clock()
        for request, chunk in failed.items():
            tracked = self._promised.get(request)
            if tracked is None or tracked.loading is None:
                continue
            at = min(max(chunk, tracked.loading[0]), tracked.loading[1] - 1)
            if at < len(tracked.keys):
                self.refused.add(tracked.keys[at], now)
                self.stored.discard(tracked.keys[at:])
            tracked.held = tracked.saved = tracked.resumable = 0  # the store may have lost the pages
            self.counters.add("failed_loads")
        for request in finished:
            tracked = self._promised.pop(request, None)
            if tracked is not None:
                tracked.loading = None
                tracked.release()

    def from_disk(self, request_id: str) -> int:
        """Return how many of a request's loaded tokens were on disk."""
        tracked = self._tracked.get(request_id)
        return tracked.lookup.on_disk if tracked is not None and tracked.lookup is not None else 0

    # -- the orders of a step --------------------------------------------------------------------------

    def work(self, output: Any) -> StepWork:
        """Return the orders for a step. ``output`` is vLLM's ``SchedulerOutput``."""
        self._steps += 1
        self._patient = True
        self._preempted(output.preempted_req_ids or ())
        if self._may_load:
            self._look_up_waiting()
        self._idle = not output.total_num_scheduled_tokens
        work = StepWork(self._steps, self.epoch, idle=self._idle)
        self._tables.take(output)
        work.fresh = writable_blocks(self.groups, output)
        work.saves = self._saves(output)
        self._time_prefill(output)
        work.grown, self._grown = self._grown, []
        work.loads, self._loads = self._loads, []
        work.refused, self._lost = self._lost, []
        work.forget, self._forget = self._forget, []
        work.pin, self._pin = self._pin, []
        return work

    def no_work(self) -> StepWork:
        """Return the orders for a step in which :meth:`work` raised: refuse loads that were not ordered, and
        end all saves, because the step may overwrite their blocks."""
        lost = [order.request for order in self._loads] + self._lost
        self._loads, self._lost, self._grown = [], [], []
        for tracked in self._tracked.values():
            tracked.known = tracked.saved = tracked.resumable = 0  # the workers may have missed updates
        work = StepWork(self._steps, self.epoch, refused=lost, forget=[*self._forget, *self._tracked])
        work.all_fresh = True
        self._forget, self._pin = [], []
        return work

    def lose(self, request_id: str) -> None:
        """Refuse a load that vLLM waits for, because an error occurred before the load was ordered."""
        tracked = self._tracked.get(request_id)
        if tracked is not None and request_id not in self._promised:
            self._promised[request_id] = tracked
            tracked.loads += 1
        if request_id not in self._lost and all(order.request != request_id for order in self._loads):
            self._lost.append(request_id)

    def _preempted(self, requests: Sequence[str]) -> None:
        for request in requests:
            tracked = self._tracked.get(request)
            if tracked is not None:
                tracked.release()
                tracked.stale = False

    def _time_prefill(self, output: Any) -> None:
        """Measure for the planner how long prefill takes for a prompt that is computed alone. The measured
        time ends when the second decode step is scheduled, because with asynchronous scheduling the first
        decode step is scheduled before prefill has ended."""
        scheduled = output.num_scheduled_tokens
        timed, self._timed = self._timed, None
        if len(scheduled) != 1:
            return
        [(request, tokens)] = scheduled.items()
        if timed is None or timed.request != request:
            if tokens > 1:
                behind = _computed_before(output)[request]
                self._timed = _TimedPrefill(request, behind, tokens, self._clock())
        elif tokens > 1:
            timed.tokens += tokens
            self._timed = timed
        elif not timed.decodes:
            timed.decodes += 1
            self._timed = timed
        else:
            self._tell_prefill(timed)

    def _tell_prefill(self, timed: _TimedPrefill) -> None:
        self.lookups.planner.computed(timed.tokens, timed.behind, self._clock() - timed.began)

    def _saves(self, output: Any) -> list[SaveOrder]:
        computed = _computed_before(output)
        begun = {new.req_id for new in output.scheduled_new_reqs}
        orders: list[SaveOrder] = []
        if not self._may_save or not self.lookups.connected:
            return orders
        for request, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request)
            if tracked is None or tracked.options.no_save or tracked.stale or tracked.uncached:
                continue
            table = partial(self._tables.of, request)
            end, resumed = computed[request] + tokens, computed[request] if request in begun else 0
            states = self._states(tracked, resumed, end, table) if self.groups.with_states else []
            order = self._save(tracked, end, table, states)
            if order is not None and self._has_its_adapter(tracked):
                orders.append(order)
        return orders

    def _has_its_adapter(self, tracked: TrackedRequest) -> bool:
        """Return whether a request's adapter, if any, has the same files as when the request arrived. vLLM
        may load the files after that."""
        if tracked.request.lora_request is not None:
            try:
                self._adapters.version(tracked.request.lora_request)
            except UnsupportedError as error:
                self.errors.warn("a request", str(error))
                tracked.uncached = True
        return not tracked.uncached

    def _states(
        self, tracked: TrackedRequest, resumed: int, computed: int, table: Callable[[], BlockTable]
    ) -> list[GroupBlocks]:
        """Return the recurrent states to save after a step. ``computed`` tokens of the request are computed
        then. ``resumed`` is the number of reused tokens if this is the request's first step, otherwise 0."""
        chunk_tokens = self.groups.chunk_tokens
        found = list(self._tables.states(tracked.request.request_id))
        if resumed // chunk_tokens > tracked.saved:
            found += [
                (group.number, table()[group.number][resumed // group.block_tokens - 1], resumed)
                for group in self.groups.groups
                if group.rule.past is Past.STATE
            ]
        known = min(computed // chunk_tokens, tracked.update_keys(self.groups))
        saved = [
            state_blocks(self.groups, group, block, tokens)
            for group, block, tokens in found
            if not tokens % chunk_tokens
            and tracked.resumable < tokens // chunk_tokens <= known
            and block != NULL_BLOCK
        ]
        in_prompt = tracked.request.num_prompt_tokens // chunk_tokens
        ends = [blocks.end for blocks in saved if blocks.end <= in_prompt]
        tracked.resumable = max([tracked.resumable, *ends])
        return saved

    def _save(
        self,
        tracked: TrackedRequest,
        computed: int,
        table: Callable[[], BlockTable],
        states: Sequence[GroupBlocks],
    ) -> SaveOrder | None:
        end = min(computed // self.groups.chunk_tokens, tracked.update_keys(self.groups))
        first = tracked.saved
        groups = list(states)
        if end > first:
            tracked.saved = end
            tables = table()
            groups += [
                blocks_to_save(self.groups, group, tables, first, end)
                for group in self.groups.groups
                if group.rule.past is not Past.STATE
            ]
        saved = tuple(each for each in groups if each.chunks)
        if not saved:
            return None
        self._grow(tracked, max(each.end for each in saved))
        if end > first and self.lookups.reachable:
            self.stored.add(tracked.keys[end - 1], self._clock())
        options = tracked.options
        return SaveOrder(
            tracked.request.request_id, saved, options.ttl_s, options.priority, options.hands_over
        )

    def _grow(self, tracked: TrackedRequest, chunks: int) -> None:
        """Send the keys and tokens of a prompt's first ``chunks`` chunks to the workers."""
        known = tracked.known
        if chunks <= known:
            return
        chunk_tokens = self.groups.chunk_tokens
        tokens = tracked.request.all_token_ids[known * chunk_tokens : chunks * chunk_tokens]
        keys = tuple(tracked.keys[known:chunks])
        self._grown.append(PromptUpdate(tracked.request.request_id, known, keys, encode_tokens(tokens)))
        tracked.known = chunks

    # -- ending --------------------------------------------------------------------------------------

    def handed_over(self, request_id: str) -> Promise | None:
        """Return the promise for the engine that continues this prompt, or None if no engine does.

        The workers have received the save orders of the promised pages in earlier steps. No block is held
        back for the other engine. Call this method before :meth:`finished`.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or not tracked.options.hands_over:
            return None
        tokens = 0
        if self.lookups.reachable and not tracked.stale and not tracked.uncached:
            saved = tracked.resumable if self.groups.with_states else tracked.saved
            chunks = min(saved, tracked.request.num_prompt_tokens // self.groups.chunk_tokens)
            tokens = chunks * self.groups.chunk_tokens
        self.counters.add("handed_over_tokens", tokens)
        return Promise(tokens, self._settings.handover_s)

    def finished(self, request_id: str) -> None:
        """Forget a request that has ended or was aborted."""
        self._tables.forget(request_id)
        if self._timed is not None and self._timed.request == request_id:
            timed, self._timed = self._timed, None
            self._tell_prefill(timed)
        self._unasked.pop(request_id, None)
        self._ahead.discard(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        if request_id not in self._promised:
            tracked.release()
        if tracked.known:
            if tracked.options.pin:
                self._pin.append(request_id)
            self._forget.append(request_id)

    @property
    def requests(self) -> Mapping[str, TrackedRequest]:
        """Return the unfinished requests by id, for tests."""
        return self._tracked
