"""The scheduler's half: what can be loaded, what is to be loaded, what is to be saved. It handles no bytes.

Everything runs on the scheduler's one thread, in every step of the engine, so it has to be quick: the
questions to the daemon are asked by threads (``probe.py``), and a request's answer is kept until it is used.

**A load cannot go in circles.** vLLM asks again after a load has failed. A request is promised a load once,
and once more each time vLLM has preempted it; what failed is not promised to others for a while either.

**What is saved** are chunks whose blocks are complete after a step: their tokens are known (vLLM has hashed
them) and computed. So the drafts of speculative decoding, which may be rejected, are never saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tierstore.daemon.session import MOST_IDENTITIES
from tierstore.errors import UsageError
from tierstore.keys import Identity, encode_tokens
from tierstore_connectors.vllm import blocks
from tierstore_connectors.vllm.breaker import RefusedKeys
from tierstore_connectors.vllm.finder import Finder
from tierstore_connectors.vllm.groups import Groups
from tierstore_connectors.vllm.guard import Faults
from tierstore_connectors.vllm.probe import Probe
from tierstore_connectors.vllm.settings import Settings
from tierstore_connectors.vllm.stats import Counts
from tierstore_connectors.vllm.tables import Tables
from tierstore_connectors.vllm.tracked import Tracked
from tierstore_connectors.vllm.work import (
    LoadOrder,
    LoadReport,
    PromptGrows,
    SaveOrder,
    Shard,
    StepWork,
    under_epoch,
)

_ANSWER_S = 20.0  # an answer that is older is asked for again: the daemon holds pages for a minute


class SchedulerHalf:
    """See the module. ``connect`` has to be called before anything is found."""

    def __init__(
        self,
        settings: Settings,
        groups: Groups,
        faults: Faults,
        counts: Counts,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = groups
        self.finder = Finder(settings, faults, clock)
        self.counts = counts
        self.faults = faults
        self.refused = RefusedKeys()
        self.epoch = ""
        self._settings = settings
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._promised: dict[str, Tracked] = {}  # vLLM waits for these loads
        self._loads: list[LoadOrder] = []
        self._grown: list[PromptGrows] = []
        self._lost: list[str] = []  # promised, and something went wrong before they were ordered
        self._forget: list[str] = []
        self._pin: list[str] = []
        self._tables = Tables()
        self._steps = 0
        self._patient = True  # once a step

    def connect(self, shards: Sequence[Shard]) -> None:
        """The workers are ready. Raises :class:`~tierstore.errors.UsageError`."""
        identities = sum(len(shard.groups) for shard in shards)
        if identities >= MOST_IDENTITIES:  # one more is what a session begins with
            raise UsageError(
                f"{len(shards)} workers with their KV cache groups make {identities} identities; the daemon "
                f"takes {MOST_IDENTITIES} of a client"
            )
        self.finder.connect(shards)

    def close(self) -> None:
        for tracked in self._tracked.values():
            tracked.release()
        self._tracked.clear()
        self.finder.close()

    def forget_everything(self, epoch: str) -> None:
        """From now on pages are kept under another identity, which nobody has used before. A request that is
        being computed goes on with KV from before: it is not saved, unless vLLM begins it anew."""
        self.epoch = epoch
        for tracked in self._tracked.values():
            tracked.release()
            tracked.held = tracked.saved = 0
            tracked.stale = tracked.request.num_computed_tokens > 0
        self.finder.renew()

    # -- finding -------------------------------------------------------------------------------------

    def arrived(self, request: Any) -> None:
        """A request has come, and may have to wait before vLLM asks about it: look it up meanwhile."""
        tracked = self._track(request)
        ahead = sum(each.probe is not None for each in self._tracked.values())
        if ahead < self._settings.ahead:
            self._probe(tracked)

    def matched(self, request: Any, local: int) -> int | None:
        """How many tokens after the ``local`` ones can be loaded; None: ask again in the next step. Called
        hundreds of times for a request that waits for room."""
        tracked = self._track(request)
        tracked.local = local
        if tracked.loads > request.num_preemptions:
            return 0
        now = self._clock()
        if tracked.answer is not None and now - tracked.answered_at > _ANSWER_S:
            tracked.release()
        if tracked.answer is None:
            self._probe(tracked)
            answer = self._look(tracked.probe) if tracked.probe is not None else 0
            if answer is None:
                return None
            self._answered(tracked, answer, now)
        return max(self._limited(tracked, now) - local, 0)

    def _look(self, probe: Probe) -> int | None:
        patient, self._patient = self._patient, False
        answer = self.finder.look(probe, patient=patient)
        if answer is not None and not probe.answered:
            self.counts.add("late_lookups")
        return answer

    def _answered(self, tracked: Tracked, answer: int, now: float) -> None:
        tracked.answer = tracked.held = answer
        tracked.answered_at = now
        self.counts.add("lookups")
        self.counts.add("lookup_tokens", len(tracked.keys) * self.groups.chunk_tokens)
        self.counts.add("found_tokens", answer)

    def _limited(self, tracked: Tracked, now: float) -> int:
        """What is promised of what is held: vLLM has to compute one token at least."""
        chunk_tokens = self.groups.chunk_tokens
        held = min(tracked.answer or 0, tracked.request.num_tokens - 1) // chunk_tokens
        return self.refused.allowed(tracked.keys[:held], now) * chunk_tokens

    def _probe(self, tracked: Tracked) -> None:
        if tracked.probed:
            return
        tracked.probed = True
        request = tracked.request
        chunks = min(tracked.update_keys(self.groups), (request.num_tokens - 1) // self.groups.chunk_tokens)
        keys = tracked.keys[:chunks]
        tokens = request.all_token_ids[: chunks * self.groups.chunk_tokens]
        tracked.probe = self.finder.begin(keys, partial(encode_tokens, tokens), self._under)

    def _under(self, identity: Identity) -> Identity:
        return under_epoch(identity, self.epoch)

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked, problem = Tracked.of(request)
            if problem:
                self.faults.say("kv_transfer_params", problem)
            self._tracked[request.request_id] = tracked
        return tracked

    # -- loading -------------------------------------------------------------------------------------

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external: int) -> None:
        """vLLM has given a request its blocks; ``external`` tokens of them are to be loaded."""
        tracked = self._track(request)
        chunk_tokens = self.groups.chunk_tokens
        tracked.saved = max(tracked.saved, tracked.held // chunk_tokens)
        if not external:
            if request.request_id not in self._promised:
                tracked.release()
            return
        tracked.loads += 1
        self._promised[request.request_id] = tracked
        self._lost.append(request.request_id)  # until it is ordered
        end = tracked.local + external
        chunks = -(-end // chunk_tokens)
        groups = [
            blocks.to_load(self.groups, group, tables[group.number], tracked.local, end)
            for group in self.groups.groups
        ]
        self._grow(tracked, chunks)
        wanted = tuple(each for each in groups if each.chunks)
        self._loads.append(LoadOrder(request.request_id, chunks, wanted))
        self._lost.remove(request.request_id)
        tracked.loading = (tracked.local // chunk_tokens, chunks)
        self.counts.add("promised_tokens", external)

    def reported(self, finished: Sequence[str], report: LoadReport | None) -> None:
        """What has become of loads."""
        failed = report.failed if report is not None else {}
        now = self._clock()
        for request, chunk in failed.items():
            tracked = self._promised.get(request)
            if tracked is None or tracked.loading is None:
                continue
            at = min(max(chunk, tracked.loading[0]), tracked.loading[1] - 1)
            if at < len(tracked.keys):
                self.refused.add(tracked.keys[at], now)
            tracked.held = tracked.saved = 0  # it may not be there any more
            self.counts.add("failed_loads")
        for request in finished:
            tracked = self._promised.pop(request, None)
            if tracked is not None:
                tracked.loading = None
                tracked.release()

    def from_disk(self, request_id: str) -> int:
        """How many of the tokens that are to be loaded came from disk."""
        tracked = self._tracked.get(request_id)
        return tracked.probe.on_disk if tracked is not None and tracked.probe is not None else 0

    # -- the orders of a step --------------------------------------------------------------------------

    def work(self, output: Any) -> StepWork:
        """The orders that go with a step. ``output`` is vLLM's ``SchedulerOutput``, and is left as it is."""
        self._steps += 1
        self._patient = True
        self._preempted(output.preempted_req_ids or ())
        work = StepWork(self._steps, self.epoch, idle=not output.total_num_scheduled_tokens)
        self._tables.take(output)
        work.fresh = blocks.fresh(self.groups, output)
        work.saves = self._saves(output)
        work.grown, self._grown = self._grown, []
        work.loads, self._loads = self._loads, []
        work.refused, self._lost = self._lost, []
        work.forget, self._forget = self._forget, []
        work.pin, self._pin = self._pin, []
        return work

    def no_work(self) -> StepWork:
        """When :meth:`work` has failed: at least nobody waits for loads that are not ordered, and no save
        goes on that might read what the step writes."""
        lost = [order.request for order in self._loads] + self._lost
        self._loads, self._lost, self._grown = [], [], []
        for tracked in self._tracked.values():
            tracked.known = tracked.saved = 0  # what the workers know is not certain any more
        work = StepWork(self._steps, self.epoch, refused=lost, forget=[*self._forget, *self._tracked])
        work.all_fresh = True
        self._forget, self._pin = [], []
        return work

    def lose(self, request_id: str) -> None:
        """Something went wrong with a load that vLLM is waiting for, and it has not been ordered."""
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

    def _saves(self, output: Any) -> list[SaveOrder]:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        orders = []
        for request, tokens in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request)
            if tracked is None or tracked.wishes.no_save or tracked.stale or not self.finder.connected:
                continue
            order = self._save(tracked, computed[request] + tokens, partial(self._tables.of, request))
            if order is not None:
                orders.append(order)
        return orders

    def _save(
        self, tracked: Tracked, computed: int, table: Callable[[], Sequence[Sequence[int]]]
    ) -> SaveOrder | None:
        if computed // self.groups.chunk_tokens <= tracked.saved:
            return None
        end = min(computed // self.groups.chunk_tokens, tracked.update_keys(self.groups))
        first = tracked.saved
        if end <= first:
            return None
        tracked.saved = end
        tables = table()
        saved = [
            blocks.to_save(self.groups, group, tables[group.number], first, end)
            for group in self.groups.groups
        ]
        groups = tuple(each for each in saved if each.chunks)
        if not groups:
            return None
        self._grow(tracked, end)
        wishes = tracked.wishes
        return SaveOrder(tracked.request.request_id, groups, wishes.ttl_s, wishes.priority)

    def _grow(self, tracked: Tracked, chunks: int) -> None:
        """Have the workers know the first ``chunks`` chunks of a prompt."""
        known = tracked.known
        if chunks <= known:
            return
        chunk_tokens = self.groups.chunk_tokens
        tokens = tracked.request.all_token_ids[known * chunk_tokens : chunks * chunk_tokens]
        keys = tuple(tracked.keys[known:chunks])
        self._grown.append(PromptGrows(tracked.request.request_id, known, keys, encode_tokens(tokens)))
        tracked.known = chunks

    # -- ending --------------------------------------------------------------------------------------

    def finished(self, request_id: str) -> None:
        """A request has ended, one way or another."""
        self._tables.forget(request_id)
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return
        if request_id not in self._promised:
            tracked.release()
        if tracked.known:
            if tracked.wishes.pin:
                self._pin.append(request_id)
            self._forget.append(request_id)

    @property
    def requests(self) -> Mapping[str, Tracked]:
        """Those that have not finished. For tests."""
        return self._tracked
