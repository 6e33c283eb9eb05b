"""The bundled engine: it turns requests into text, over paged KV that a connector stores.

Each step computes one mixed batch. All changes of a sequence happen in :meth:`Engine.step`, on the caller's
thread. A step does not wait for the store while there is something to compute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Ints
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import torch

from tierstore.errors import TierStoreError
from tierstore.planner import Prefill, PrefillEstimate
from tierstore.tiers.beyond import BeyondPool, LostPagesError, OverflowFailedError
from tierstore.tiers.large_pages import PoolSize
from tierstore.types import Hint, Promise, checked_session
from tierstore_connectors.base import Connector
from tierstore_engine.batch import Work, build_step, finishing
from tierstore_engine.beams import BeamHypothesis, BeamParams, Beams
from tierstore_engine.drafting import Drafter
from tierstore_engine.errors import DeadlineError, RequestError
from tierstore_engine.images import PromptImage
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.limits import Limits
from tierstore_engine.outputs import (
    Completion,
    EngineStats,
    FinishReason,
    RequestId,
    StepLogprobs,
    StepOutput,
    WaitReason,
)
from tierstore_engine.roster import Roster
from tierstore_engine.sampling import Choice, SamplingParams
from tierstore_engine.scheduler import Scheduler
from tierstore_engine.sequence import Sequence
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import PartialStep, Runner
from tierstore_engine.stepping import EngineThread
from tierstore_engine.tokenizer import Tokenizer
from tierstore_engine.vision import Vision

PromptInput: TypeAlias = str | Ints[int]
"""Text, or token ids that are used as they are (nothing is prepended)."""

_STALLED_S = 60.0
_MOST_LOSSES = 3  # after more losses of its pages in the overflow file, a request ends with an error


class EngineStalledError(TierStoreError):
    """No request could be computed for 60 s, because leases or pins outside this engine hold the needed
    pages."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """A sequence whose next token is chosen from ``row`` of the logits. Each token of ``draft`` has one of
    the following rows."""

    sequence: Sequence
    row: int
    draft: tuple[int, ...] = ()


class PrefillTimer:
    """Measure the speed of prefill, only in steps that compute a single sequence.

    On a GPU a step returns when it is queued, and its end is known only when the engine waits for a token. So
    consecutive steps of one sequence are timed together, up to the next wait for a token.
    """

    def __init__(self, connector: Connector) -> None:
        self.prefill: Prefill | None = None  # None before the first measurement
        self._connector = connector
        self._estimate = PrefillEstimate()
        self._waits = connector.pool.overlaps
        self._began = 0.0
        self._first = self._stop = 0  # tokens of the steps in flight
        self._sequence: object = None  # the sequence of the steps in flight; None if these are not timed

    def began(self, work: Ints[Work]) -> None:
        """Record that a step begins."""
        item = work[0]
        alone = len(work) == 1 and not item.sequence.decodes and not item.sequence.arriving
        if not alone:
            self._sequence = None
        elif self._sequence is item.sequence and self._stop == item.start:
            self._stop = item.stop
        else:
            self._sequence, self._first, self._stop = item.sequence, item.start, item.stop
            self._began = time.monotonic()

    def forget(self) -> None:
        """Discard the measurement of the steps in flight."""
        self._sequence = None

    def queued(self) -> None:
        """Record that a step has returned without waiting for the device."""
        if not self._waits:
            self.ended()

    def ended(self) -> None:
        """Record that all queued work has ended."""
        if self._sequence is not None:
            seconds = time.monotonic() - self._began
            self._connector.computed(self._stop - self._first, self._first, seconds)
            self._estimate.computed(self._stop - self._first, self._first, seconds)
            self.prefill = self._estimate.prefill()
            self._sequence = None


class Engine:
    """Continuous batching over one model and one connector. Not thread-safe.

    There are three ways to use an engine:

    - Call ``add``, then ``step`` until ``has_work`` is False.
    - Iterate over ``stream`` or call ``generate``, which call ``step``. They may be mixed and nested.
    - Iterate over ``astream`` from one event loop, and call no other method at the same time.
    """

    def __init__(
        self,
        model: Runner,
        tokenizer: Tokenizer,
        connector: Connector,
        settings: EngineSettings | None = None,
        *,
        drafter: Drafter | None = None,
        adapters: Mapping[str, str] | None = None,
        vision: Vision | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``adapters`` maps adapters' names to their digests. ``vision`` makes the images that :meth:`add`
        gets. Deadlines begin at :meth:`add`, by ``clock``."""
        self.model = model
        self.tokenizer = tokenizer
        self.vision = vision
        self.connector = connector
        self.settings = settings or EngineSettings()
        self.adapters = dict(adapters or {})
        spec = model.config.kv_spec(chunk_tokens=connector.pool.spec.chunk_tokens)
        self._keeper = PageKeeper(
            connector,
            self.settings,
            checkpoint_tokens=self.settings.checkpoint_distance(spec),
            rewinds=bool(model.config.predictor),
        )
        self._prefills = PrefillTimer(connector)
        self.settings.check_chunk(self._keeper.chunk_tokens)
        self._clock = clock
        self._scheduler = Scheduler(
            self._keeper, self.settings, prefill=lambda: self._prefills.prefill, clock=clock
        )
        self._drafter = drafter
        self.limits = Limits(model.config, self._keeper)
        self._roster = Roster(self._keeper, self._scheduler, self.limits, tokenizer, drafter)
        self._beams = Beams(self._roster, self.limits, self.settings.max_sequences)
        self._mailboxes: dict[RequestId, deque[StepOutput]] = {}
        self._cancelled: list[StepOutput] = []
        self._steps = self._computed_tokens = self._generated_tokens = 0
        self._drafted_tokens = self._accepted_tokens = self._late_requests = 0
        self._last_progress = time.monotonic()
        self._thread: EngineThread[Engine] | None = None

    # -- requests ------------------------------------------------------------------------------------

    def add(
        self,
        prompt: PromptInput,
        params: SamplingParams | None = None,
        *,
        session: str | None = None,
        hint: Hint | None = None,
        save: bool = True,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        promise: Promise | None = None,
        adapter: str | None = None,
        images: Ints[PromptImage] = (),
    ) -> RequestId:
        """Queue a request.

        - ``session``: a name of the conversation, see :meth:`finish`.
        - ``hint``: what the caller knows about later uses of the request's pages.
        - ``save``: False stores none of the request's pages.
        - ``priority``: requests with lower values are computed first.
        - ``ttft_slo_s``: the time limit for the request's first token, in seconds.
        - ``promise``: another engine has promised to save the prompt's pages; the request waits for them.
        - ``adapter``: the name of the adapter to apply; None for the model without an adapter.
        - ``images``: images whose embeddings replace tokens of the prompt, in the prompt's order.

        Raises :class:`RequestError` if the request can never be served. Raises :class:`DeadlineError` if its
        first token is not expected within ``ttft_slo_s``, given the waiting requests, the cached part of its
        prompt, and the measured speed.
        """
        started = time.monotonic()
        params = params or SamplingParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self.limits.check_prompt(tokens, params)
        session = checked_session(session)
        digest = "" if adapter is None else self.adapters.get(adapter)
        if digest is None:
            raise RequestError(f"no adapter {adapter!r} (known: {', '.join(self.adapters) or 'none'})")
        placed = self.limits.place_images(tokens, images, self.settings.prefill_chunk, params.max_new_tokens)
        sequence = self._roster.new(tokens, params, started, digest, placed)
        sequence.session = session
        sequence.hint = hint
        sequence.no_save = not save
        sequence.priority = priority
        if ttft_slo_s is not None:
            sequence.deadline_s = self._clock() + ttft_slo_s
        sequence.promise = promise
        self._scheduler.add(sequence)
        if ttft_slo_s is not None:
            self._check_deadline(sequence, ttft_slo_s)
        self._last_progress = time.monotonic()
        return sequence.request_id

    def fork(self, request_id: RequestId, *, seed: int | None = None) -> RequestId:
        """Add another continuation of a request. The new request has the prompt and the generated tokens of
        the old one, shares their pages, and samples its next tokens with ``seed``.

        The new request waits until the old one's next token is due; then both continue. The new request's
        completion includes the tokens and text from before the fork, its outputs do not. Raises
        :class:`RequestError` for a request that has ended.

            >>> first = engine.add("Two ways to say it:", SamplingParams(temperature=1, seed=0))
            >>> others = [engine.fork(first, seed=seed) for seed in (1, 2, 3)]
        """
        parent = self._roster.get(request_id)
        if parent is None or self._beams.of(parent) is not None:
            raise RequestError(f"request {request_id} has ended: there is nothing to fork")
        return self._roster.follow(parent, seed=seed).request_id

    def finish(self, session: str) -> None:
        """End a conversation. Pages that no other conversation uses need not be kept."""
        self.connector.finish(session)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now; the next step returns its completion. Return False if it had already ended."""
        sequence = self._roster.get(request_id)
        if sequence is not None:
            text = sequence.finish(FinishReason.CANCELLED)
            self._cancelled.append(self._retire(sequence, text, ()))
        return sequence is not None

    def pool_size(self) -> PoolSize:
        """Return the size of the page pool."""
        self.connector.pool.settle()
        return self.connector.pool.large_pages.size

    def resize_pool(self, nbytes: int) -> PoolSize:
        """Set the memory for pages to ``nbytes``, for example to make room for another model.

        A larger size takes effect at once. A smaller one evicts cached pages now, and takes the pages of
        requests when these end or are preempted. No request is cancelled. Raises :class:`UsageError` for an
        impossible size, or one that a current request might not fit.
        """
        for sequence in self._roster:
            group = self._beams.of(sequence)
            self.limits.check_resize(nbytes, sequence, group.search.width if group else 1)
        size = self.connector.resize(nbytes)
        self._scheduler.room_grew()  # harmless if the pool has shrunk: waiting requests continue to wait
        return size

    def discard(self, *request_ids: RequestId) -> None:
        """End the given requests that have not ended. No step returns their completions."""
        cancelled = {request_id for request_id in request_ids if self.cancel(request_id)}
        self._cancelled = [output for output in self._cancelled if output.request_id not in cancelled]

    def cancel_all(self) -> None:
        """End all requests and beam searches now."""
        self._beams.end_all()
        for sequence in list(self._roster):
            self.cancel(sequence.request_id)

    def computed_tokens(self, request_id: RequestId) -> int:
        """Return how many of a request's tokens are in pages, loaded or computed; 0 after its end."""
        sequence = self._roster.get(request_id)
        return sequence.computed if sequence is not None else 0

    def _check_deadline(self, sequence: Sequence, slo_s: float) -> None:
        """Drop a new request that would miss its deadline. Raises :class:`DeadlineError`."""
        expected = self._scheduler.expect(sequence)
        if expected is None or expected.seconds <= slo_s:
            return
        self._roster.drop(sequence)
        self._late_requests += 1
        about = f"the first token is due within {slo_s:g} s"
        if expected.alone_s > slo_s:
            raise DeadlineError(
                f"{about}, but at {expected.tokens_per_s:.0f} tokens/s the prompt alone takes "
                f"{expected.alone_s:.3g} s: use a longer deadline or a shorter prompt",
                None,
            )
        raise DeadlineError(
            f"{about}, but with the requests before it, it is expected in {expected.seconds:.3g} s: try "
            "again later",
            expected.seconds - slo_s,
        )

    # -- stepping ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._cancelled)

    def step(self) -> list[StepOutput]:
        """Compute one batch, and return what it added to each request. If everything waits for loads, wait a
        few milliseconds and return nothing."""
        outputs, self._cancelled = self._cancelled, []
        plan = self._scheduler.plan()
        if plan.batch:
            outputs += self._run(plan.batch)
        for item in plan.beside:
            outputs += self._advance(item, wait=not plan.batch)
        if not plan and self._scheduler.has_work:
            self._idle()
        self._scheduler.ended()
        for output in outputs:
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id].append(output)
        return outputs

    def generate(
        self, prompts: Iterable[PromptInput], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Compute ``prompts`` together, and return their completions in the same order."""
        ids: list[RequestId] = []
        try:
            for prompt in prompts:
                ids.append(self.add(prompt, params))
            return self._finish(ids)
        finally:
            self.discard(*ids)

    def sample(
        self, prompt: PromptInput, params: SamplingParams | None = None, *, n: int
    ) -> list[Completion]:
        """Return ``n`` completions of one prompt, which is computed and kept once. With a seed, completion
        ``i`` (from 0) uses ``seed + i``."""
        params = params or SamplingParams()
        ids: list[RequestId] = []
        try:
            ids.append(self.add(prompt, params))
            for number in range(1, n):
                seed = None if params.seed is None else params.seed + number
                ids.append(self.fork(ids[0], seed=seed))
            return self._finish(ids)
        finally:
            self.discard(*ids)

    def beam_search(
        self, prompt: PromptInput, params: BeamParams | None = None, *, session: str | None = None
    ) -> list[BeamHypothesis]:
        """Return the likeliest continuations of ``prompt``, best first. This steps the engine; other requests
        continue.

        If pages run out, each beam may have to be loaded back separately. So the pool must be able to hold
        all beams unshared. Raises :class:`RequestError` if it cannot, and for more beams than
        ``max_sequences``. Raises :class:`~tierstore.tiers.overflow.OverflowFailedError` if an overflow file
        loses a beam's pages too often, or has no room for them.
        """
        params = params or BeamParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        group = self._beams.begin(tokens, params, session)
        self._last_progress = time.monotonic()
        try:
            while not group.search.done and group.error is None:
                self.step()
        finally:
            self._beams.end(group)
        return self._beams.hypotheses(group, self.tokenizer)

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Add a request and yield its outputs, stepping the engine as needed. Closing the iterator early
        cancels the request."""
        request_id = self.add(prompt, params)
        mailbox = self._mailboxes[request_id] = deque()
        return self._outputs(request_id, mailbox)

    def astream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AsyncIterator[StepOutput]:
        """Yield the same outputs as :meth:`stream`, for asyncio. Any number of streams may run at a time. The
        steps run on one thread beside the event loop."""
        if self._thread is None:
            self._thread = EngineThread(self)
        return self._thread.stream(lambda engine: engine.add(prompt, params))

    # -- state ---------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        waiting_for = self._scheduler.wait_reasons()
        waiting_for[WaitReason.FORK] = self._roster.following
        pool, vision = self.connector.pool, self.vision
        return EngineStats(
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            generated_tokens=self._generated_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=self._roster.preemptions,
            waiting_for=+waiting_for,  # "+" removes the reasons with a count of 0
            admitted=len(self._scheduler.admitted),
            shared_pages=self._keeper.shared_pages,
            available_pages=self.connector.available(),
            total_pages=pool.capacity,
            late_requests=self._late_requests,
            longest_overtaken_s=self._scheduler.longest_overtaken_s,
            overflow=pool.stats if isinstance(pool, BeyondPool) else None,
            encoded_images=vision.encoded if vision else 0,
            found_images=vision.found if vision else 0,
        )

    def close(self) -> None:
        """Cancel all requests, end the runner, and close the connector."""
        if self._thread is not None:
            self._thread.close()
        self.cancel_all()
        if self._drafter is not None:
            self._drafter.close()
        self.model.close()
        self.connector.close()

    # -- inside --------------------------------------------------------------------------------------

    def _finish(self, ids: list[RequestId]) -> list[Completion]:
        """Step until these requests have ended."""
        completions: dict[RequestId, Completion] = {}
        while not all(request_id in completions for request_id in ids):
            done = [output.completion for output in self.step() if output.completion]
            completions.update((completion.request_id, completion) for completion in done)
        return [completions[request_id] for request_id in ids]

    def _run(self, planned: list[Work]) -> list[StepOutput]:
        work = self._with_drafts(planned)
        self._prefills.began(work)
        for item in work:
            item.sequence.in_step = True
        try:
            logits = self.model.compute(build_step(work, self.connector.pools))
        except (LostPagesError, OverflowFailedError) as error:
            return self._interrupted([item.sequence for item in work], error)
        return self._computed(work, logits)

    def _interrupted(
        self, sequences: list[Sequence], error: LostPagesError | OverflowFailedError
    ) -> list[StepOutput]:
        """End a step in which the overflow file has failed. A sequence with lost pages starts again, or ends
        with an error after too many losses. If the file has no room, the largest sequence ends with an error.
        Sequences with a recurrent state also start again, because the step may have changed the state."""
        self._prefills.forget()
        if isinstance(error, LostPagesError):
            self.connector.lose(sorted(error.pages))
            affected = [each for each in sequences if not error.pages.isdisjoint(each.tables[0].pages)]
            for sequence in affected:
                sequence.losses += 1
            failed = [sequence for sequence in affected if sequence.losses > _MOST_LOSSES]
        else:
            affected = failed = [max(sequences, key=lambda sequence: sequence.tables[0].held)]
        for sequence in sequences:
            if sequence not in failed and (sequence in affected or self._keeper.stateful):
                self._keeper.leave(sequence, save=sequence not in affected)
                self._scheduler.requeue(sequence, preempted=False)
        return [output for sequence in failed for output in self._failed(sequence, str(error))]

    def _failed(self, sequence: Sequence, why: str) -> list[StepOutput]:
        """End a request with an error, without saving its pages. If it is a beam, its search ends, too."""
        self._beams.fail(sequence, why)
        if self._roster.get(sequence.request_id) is None:  # another beam of the same search has failed before
            return []
        sequence.error = why
        sequence.no_save = True
        return [self._retire(sequence, sequence.finish(FinishReason.ERROR), ())]

    def _advance(self, item: Work, *, wait: bool) -> list[StepOutput]:
        """Compute the next layers of a sequence whose pages are arriving: the layers whose bytes have
        arrived, or all layers with ``wait``."""
        self._prefills.forget()
        sequence, config = item.sequence, self.model.config
        partial = sequence.partial
        if partial is None:
            partial = sequence.partial = PartialStep(build_step([item], self.connector.pools))
        stop = config.layers if wait else partial.arrived(config)
        if stop == partial.layers:
            return []
        sequence.in_step = True
        logits = self.model.advance(partial, range(partial.layers, stop))
        partial.layers = stop
        self._last_progress = time.monotonic()
        if logits is None:
            return []
        sequence.partial = None
        return self._computed([item], logits)

    def _computed(self, work: list[Work], logits: torch.Tensor) -> list[StepOutput]:
        """Save pages and choose tokens, at the end of a step."""
        self._steps += 1
        self._computed_tokens += sum(item.tokens for item in work)
        self._last_progress = time.monotonic()
        if self._drafter is not None:
            self._drafter.follow(work)
        for item in work:
            item.sequence.advance(item.stop)
            self._keeper.save(item.sequence)
        picks = self._picks(finishing(work))
        if not picks:
            self._prefills.queued()
            return []
        draws = [pick.sequence.draws(pick.draft) for pick in picks]
        rows = [pick.row + place for pick in picks for place in range(len(pick.draft) + 1)]
        choices = iter(self.model.sample(logits, [draw for some in draws for draw in some], rows))
        self._prefills.ended()
        outputs: list[StepOutput] = []
        for pick, some in zip(picks, draws, strict=True):
            chosen = list(islice(choices, len(some)))
            group = self._beams.of(pick.sequence)
            if group is None:
                outputs.append(self._accept(pick, chosen))
            elif chosen[0].logprobs is not None:
                group.offers[pick.sequence.request_id] = chosen[0].logprobs.top
        self._beams.advance()
        return outputs

    def _with_drafts(self, work: list[Work]) -> list[Work]:
        """Add drafted tokens after the newest tokens, as far as the step's budget and the pages allow."""
        if self._drafter is None:
            return work
        budget = self.settings.batch_tokens - sum(item.tokens for item in work)
        wanted = [item.sequence for item in work if self._may_draft(item)]
        drafts = self._drafter.propose(wanted)
        drafted = []
        for item in work:
            sequence = item.sequence
            room = max(min(budget, self._keeper.most_drafted(sequence)), 0)
            draft = tuple(drafts.get(sequence.request_id, ())[:room])
            if draft and sequence.grow(len(sequence.tokens) + len(draft)):
                budget -= len(draft)
                drafted.append(replace(item, draft=draft))
            else:
                drafted.append(item)
        return drafted

    def _may_draft(self, item: Work) -> bool:
        sequence = item.sequence
        return sequence.decodes and not self._roster.followed(sequence) and self._beams.of(sequence) is None

    def _picks(self, ending: list[Work]) -> list[_Pick]:
        """Return the sequences whose next token is due, with their rows of the logits. A fork that waits for
        one of these sequences shares its pages from now on, and chooses from the same row."""
        picks, row = [], 0
        for item in ending:
            sequence = item.sequence
            picks.append(_Pick(sequence, row, item.draft))
            picks += [_Pick(child, row) for child in self._roster.share_with_followers(sequence)]
            row += 1 + len(item.draft)
        return picks

    def _accept(self, pick: _Pick, choices: list[Choice]) -> StepOutput:
        """Append the chosen tokens up to and including the first one that the draft did not predict."""
        sequence, draft = pick.sequence, pick.draft
        text, newest = "", []
        for place, choice in enumerate(choices):
            text += sequence.append(choice)
            newest.append(choice.token)
            foreseen = place < len(draft) and choice.token == draft[place]
            if sequence.finish_reason is not None or not foreseen:
                break
        if draft:
            sequence.tally.drafted_tokens += len(draft)
            sequence.tally.accepted_tokens += len(newest) - 1
            self._drafted_tokens += len(draft)
            self._accepted_tokens += len(newest) - 1
            self._keeper.accept(sequence, len(newest) - 1)
        self._generated_tokens += len(newest)
        logprobs = tuple(c.logprobs for c in choices[: len(newest)] if c.logprobs is not None)
        if sequence.finish_reason is None:
            return StepOutput(sequence.request_id, text, tuple(newest), logprobs)
        return self._retire(sequence, text, tuple(newest), logprobs)

    def _retire(
        self, sequence: Sequence, text: str, tokens: tuple[int, ...], logprobs: tuple[StepLogprobs, ...] = ()
    ) -> StepOutput:
        self._roster.drop(sequence)
        return StepOutput(sequence.request_id, text, tokens, logprobs, sequence.completion())

    # -- the rest ------------------------------------------------------------------------------------

    def _idle(self) -> None:
        stalled = not self._scheduler.admitted and time.monotonic() - self._last_progress > _STALLED_S
        if stalled:
            stats = self.stats()
            raise EngineStalledError(
                f"{stats.waiting} requests wait for pages ({stats.wait_reasons}), but only "
                f"{stats.available_pages} of {stats.total_pages} are available: leases or pins outside this "
                "engine hold the others"
            )
        self._scheduler.wait()

    def _outputs(self, request_id: RequestId, mailbox: deque[StepOutput]) -> Iterator[StepOutput]:
        try:
            while True:
                while not mailbox:
                    self.step()
                output = mailbox.popleft()
                yield output
                if output.finished:
                    return
        finally:
            del self._mailboxes[request_id]
            self.discard(request_id)
