"""The bundled engine: requests in, text out, over paged KV that a connector keeps.

One step computes one mixed batch. Everything that changes a sequence happens in :meth:`Engine.step`, on the
caller's thread; nothing in it waits for the store while there is something to compute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from collections.abc import Sequence as Ints
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.errors import TierStoreError
from tierstore.hints import checked_session
from tierstore_connectors.base import Connector
from tierstore_engine.batch import build_step, finishing
from tierstore_engine.errors import RequestError
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import Completion, FinishReason, RequestId, StepOutput
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.scheduler import Scheduler, Work
from tierstore_engine.sequence import Sequence
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Runner
from tierstore_engine.stepping import StepThread
from tierstore_engine.tokenizer import Tokenizer

PromptInput: TypeAlias = str | Ints[int]
"""Text, or token ids as they are (nothing is prepended)."""

_STALLED_S = 60.0


class EngineStalledError(TierStoreError):
    """Nothing could be computed for a long time: pages that the engine needs are held by somebody else."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and how many requests are where now."""

    steps: int
    computed_tokens: int
    preemptions: int
    waiting: int
    admitted: int
    available_pages: int
    total_pages: int


class Engine:
    """Continuous batching over one model and one connector. Not thread-safe.

    Either step it yourself (``add``, then ``step`` until ``has_work`` is false), or iterate ``stream`` or
    ``generate``, which step it for you, and may be mixed and nested; or use ``astream`` from one event loop,
    and then nothing else at the same time.
    """

    def __init__(
        self,
        model: Runner,
        tokenizer: Tokenizer,
        connector: Connector,
        settings: EngineSettings | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.connector = connector
        self.settings = settings or EngineSettings()
        self._keeper = PageKeeper(connector, load_deadline_s=self.settings.load_deadline_s)
        self.settings.check_chunk(self._keeper.chunk_tokens)
        self._scheduler = Scheduler(self._keeper, self.settings)
        self._sequences: dict[RequestId, Sequence] = {}
        self._mailboxes: dict[RequestId, deque[StepOutput]] = {}
        self._cancelled: list[StepOutput] = []
        self._next_id = 0
        self._steps = self._computed_tokens = self._preemptions = 0
        self._last_progress = time.monotonic()
        self._step_thread: StepThread | None = None

    # -- requests ------------------------------------------------------------------------------------

    def add(
        self, prompt: PromptInput, params: SamplingParams | None = None, *, session: str | None = None
    ) -> RequestId:
        """Queue a request. ``session`` is any name of the conversation that it is part of, see
        :meth:`finish`. Raises :class:`RequestError` when it can never be served."""
        started = time.monotonic()
        params = params or SamplingParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self.check_prompt(tokens, params)
        request_id = RequestId(self._next_id)
        self._next_id += 1
        eos = () if params.ignore_eos else self.model.config.eos_ids
        sequence = Sequence(
            request_id,
            self.connector.prompt(tokens),
            tokens,
            params,
            self.tokenizer.detokenizer(),
            max_tokens=self._max_tokens(len(tokens), params),
            stop_ids=frozenset((*params.stop_token_ids, *eos)),
            added=started,
        )
        sequence.session = checked_session(session)
        self._sequences[request_id] = sequence
        self._scheduler.add(sequence)
        self._last_progress = time.monotonic()
        return request_id

    def finish(self, session: str) -> None:
        """This conversation is over: its pages that no other one uses need not be kept."""
        self.connector.finish(session)

    def cancel(self, request_id: RequestId) -> bool:
        """End a request now; the next step returns its completion. False when it had already ended."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        text = sequence.finish(FinishReason.CANCELLED)
        self._cancelled.append(self._retire(sequence, text, ()))
        return True

    def computed_tokens(self, request_id: RequestId) -> int:
        """How many of a request's tokens have their KV in pages, loaded or computed; 0 once it has ended."""
        sequence = self._sequences.get(request_id)
        return sequence.computed if sequence is not None else 0

    def check_prompt(self, tokens: Ints[int], params: SamplingParams) -> None:
        """Raises :class:`RequestError` for a prompt that this model or this pool can never serve."""
        check_tokens(tokens, vocab_size=self.model.config.vocab_size, limit=self.model.config.max_positions)
        pool = self.connector.pool
        # The newest token's KV is not computed before it has a successor.
        pages = self._keeper.pages_for(self._max_tokens(len(tokens), params) - 1)
        if pages > pool.num_pages:
            raise RequestError(
                f"the prompt's {len(tokens)} tokens and up to {params.max_new_tokens} new ones need {pages} "
                f"pages of {pool.spec.chunk_tokens} tokens, but the pool has {pool.num_pages}"
            )

    # -- stepping ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._cancelled)

    def step(self) -> list[StepOutput]:
        """Compute one batch and return what it added to each request. When everything waits for loads it
        waits for them a few milliseconds and returns nothing."""
        outputs, self._cancelled = self._cancelled, []
        work = self._scheduler.plan()
        if work:
            outputs += self._run(work)
        elif self._scheduler.has_work:
            self._idle()
        for output in outputs:
            if output.request_id in self._mailboxes:
                self._mailboxes[output.request_id].append(output)
        return outputs

    def generate(
        self, prompts: Iterable[PromptInput], params: SamplingParams | None = None
    ) -> list[Completion]:
        """The completions of ``prompts``, in their order, computed together."""
        ids: list[RequestId] = []
        completions: dict[RequestId, Completion] = {}
        try:
            for prompt in prompts:
                ids.append(self.add(prompt, params))
            while not all(request_id in completions for request_id in ids):
                done = [output.completion for output in self.step() if output.completion]
                completions.update((completion.request_id, completion) for completion in done)
        finally:
            for request_id in ids:
                self._discard(request_id)
        return [completions[request_id] for request_id in ids]

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Add a request and yield its outputs, stepping the engine as needed. Closing it early cancels."""
        request_id = self.add(prompt, params)
        mailbox = self._mailboxes[request_id] = deque()
        return self._outputs(request_id, mailbox)

    def astream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AsyncIterator[StepOutput]:
        """The same for asyncio: any number at a time; the steps run on one thread beside the event loop."""
        if self._step_thread is None:
            self._step_thread = StepThread(self)
        return self._step_thread.stream(prompt, params)

    # -- state ---------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        admitted = self._scheduler.admitted
        return EngineStats(
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            preemptions=self._preemptions + sum(s.tally.preemptions for s in self._sequences.values()),
            waiting=len(self._scheduler.waiting),
            admitted=len(admitted),
            available_pages=self.connector.available(),
            total_pages=self.connector.pool.num_pages,
        )

    def close(self) -> None:
        """Cancel what is under way and close the connector."""
        if self._step_thread is not None:
            self._step_thread.close()
        for request_id in list(self._sequences):
            self.cancel(request_id)
        self.connector.close()

    # -- inside --------------------------------------------------------------------------------------

    def _run(self, work: list[Work]) -> list[StepOutput]:
        logits = self.model.compute(build_step(work, self.connector.pool))
        self._steps += 1
        self._computed_tokens += sum(item.tokens for item in work)
        self._last_progress = time.monotonic()
        ending = finishing(work)
        for item in work:
            item.sequence.advance(item.stop)
            self._keeper.save(item.sequence)
        if not ending:
            return []  # and no need to wait
        outputs = []
        choices = self.model.sample(logits, [item.sequence.draw() for item in ending])
        for item, choice in zip(ending, choices, strict=True):
            sequence = item.sequence
            text = sequence.append(choice)
            newest = (sequence.tokens[-1],)
            if sequence.finish_reason is None:
                outputs.append(StepOutput(sequence.request_id, text, newest))
            else:
                outputs.append(self._retire(sequence, text, newest))
        return outputs

    def _retire(self, sequence: Sequence, text: str, tokens: tuple[int, ...]) -> StepOutput:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.request_id]
        self._preemptions += sequence.tally.preemptions
        return StepOutput(sequence.request_id, text, tokens, sequence.completion())

    def _idle(self) -> None:
        stalled = not self._scheduler.admitted and time.monotonic() - self._last_progress > _STALLED_S
        if stalled:
            stats = self.stats()
            raise EngineStalledError(
                f"{stats.waiting} requests wait for pages, but only {stats.available_pages} of "
                f"{stats.total_pages} are available: somebody else holds leases or pins on the rest"
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
            self._discard(request_id)

    def _discard(self, request_id: RequestId) -> None:
        """End a request that nobody listens to any more, if it has not ended."""
        if self.cancel(request_id):
            self._cancelled = [o for o in self._cancelled if o.request_id != request_id]

    def _max_tokens(self, prompt_tokens: int, params: SamplingParams) -> int:
        return min(prompt_tokens + params.max_new_tokens, self.model.config.max_positions)


def check_tokens(tokens: Ints[int], *, vocab_size: int, limit: int) -> None:
    """Raises :class:`RequestError` for an empty prompt, unknown ids, or a prompt that leaves no position."""
    if not tokens:
        raise RequestError("the prompt is empty: it needs at least one token")
    if len(tokens) >= limit:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens, but the model allows {limit} with at least one new one"
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestError(f"token ids must lie between 0 and {vocab_size - 1} for this model")
