"""The bundled engine: requests in, text out, over paged KV that a connector keeps.

One step computes one mixed batch. Everything that changes a sequence happens in :meth:`Engine.step`, on the
caller's thread; nothing in it waits for the store while there is something to compute.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Ints
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeAlias

import torch

from tierstore.errors import TierStoreError, UsageError
from tierstore.groups import Past
from tierstore.retention import checkpoint_tokens
from tierstore.tiers.frames import PoolSize
from tierstore.tiers.group_pools import fits
from tierstore.types import Hint, Promise, checked_session
from tierstore.units import format_size
from tierstore_connectors.base import Connector
from tierstore_engine.batch import build_step, finishing
from tierstore_engine.beams import BeamGroup, BeamHypothesis, BeamParams, BeamSearch
from tierstore_engine.drafting import Drafter
from tierstore_engine.errors import DeadlineError, RequestError
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import (
    Completion,
    EngineStats,
    FinishReason,
    RequestId,
    StepLogprobs,
    StepOutput,
)
from tierstore_engine.prefill_timer import PrefillTimer
from tierstore_engine.sampling import Choice, SamplingParams
from tierstore_engine.scheduler import Scheduler, Work
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import PartialStep, Runner
from tierstore_engine.stepping import EngineThread
from tierstore_engine.tokenizer import Tokenizer

PromptInput: TypeAlias = str | Ints[int]
"""Text, or token ids as they are (nothing is prepended)."""

_STALLED_S = 60.0


class EngineStalledError(TierStoreError):
    """Nothing could be computed for a long time: pages that the engine needs are held by somebody else."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """Whose next token is due: its choice is made from this row of the logits, and from those behind it for
    each token of the draft."""

    sequence: Sequence
    row: int
    draft: tuple[int, ...] = ()


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
        *,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock`` is what requests are scheduled by; deadlines count from what it says in :meth:`add`."""
        self.model = model
        self.tokenizer = tokenizer
        self.connector = connector
        self.settings = settings or EngineSettings()
        self._keeper = PageKeeper(
            connector,
            plan=self.settings.plan,
            prefill_chunk=self.settings.prefill_chunk,
            checkpoint_tokens=self._checkpoint_tokens(),
        )
        if drafter is not None and any(rule.past is Past.STATE for rule in connector.rules):
            raise UsageError("a model with recurrent states cannot go back to before a draft: use no drafter")
        self._prefills = PrefillTimer(connector)
        self.settings.check_chunk(self._keeper.chunk_tokens)
        self._clock = clock
        self._scheduler = Scheduler(
            self._keeper, self.settings, prefill=lambda: self._prefills.prefill, clock=clock
        )
        self._drafter = drafter
        self._sequences: dict[RequestId, Sequence] = {}
        self._followers: dict[RequestId, list[Sequence]] = {}  # by what they are going to share with
        self._groups: dict[RequestId, BeamGroup] = {}  # by each of their members
        self._mailboxes: dict[RequestId, deque[StepOutput]] = {}
        self._cancelled: list[StepOutput] = []
        self._next_id = 0
        self._steps = self._computed_tokens = self._generated_tokens = self._preemptions = 0
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
    ) -> RequestId:
        """Queue a request. ``session`` is any name of the conversation that it is part of, see
        :meth:`finish`; ``hint`` is what is known of its future; without ``save`` its pages are not kept.
        Lower priorities come first. ``promise``: another engine has computed the prompt, and its pages are
        waited for. Raises :class:`RequestError` when it can never be served, and
        :class:`DeadlineError` when its first token cannot be there within ``ttft_slo_s`` seconds, by what
        waits, what of it is held, and how fast prompts are computed."""
        started = time.monotonic()
        params = params or SamplingParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        self.check_prompt(tokens, params)
        sequence = self._sequence(tokens, params, started)
        sequence.session = checked_session(session)
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
        """Another continuation of a request: a new one that has its prompt and its generated tokens, shares
        their pages, and from the next token on draws for itself, from ``seed``.

        Nothing is computed twice: the new request waits until the old one's next token is due and then goes
        on beside it. Its completion has the tokens and the text from before the fork, too, and its outputs
        those from then on. Raises :class:`RequestError` for a request that has ended.

            >>> first = engine.add("Two ways to say it:", SamplingParams(temperature=1, seed=0))
            >>> others = [engine.fork(first, seed=seed) for seed in (1, 2, 3)]
        """
        parent = self._sequences.get(request_id)
        if parent is None or request_id in self._groups:
            raise RequestError(f"request {request_id} has ended: there is nothing to fork")
        child = parent.fork(self._new_id(), seed=seed)
        self._sequences[child.request_id] = child
        followed = next((leader for leader, all_ in self._followers.items() if parent in all_), request_id)
        self._followers.setdefault(followed, []).append(child)
        return child.request_id

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

    def pool_size(self) -> PoolSize:
        """How much memory the pages have."""
        pool = self.connector.pool
        pool.settle()
        return pool.frames.size

    def resize_pool(self, nbytes: int) -> PoolSize:
        """Have ``nbytes`` of memory for pages from now on, such as to make room for another model, or to take
        it back. More is had at once; less as pages become free: those that are cached leave now, those of
        requests when they end or give way. Every request goes on. Raises :class:`UsageError` for a size that
        cannot be, or that one of the requests might not fit."""
        frames = nbytes // self.connector.pool.frames.large_bytes
        sequences = [(sequence, 1) for sequence in self._sequences.values()]
        sequences += [(group.members[0], group.search.width) for group in self._groups.values()]
        for sequence, count in sequences:
            counts = [count * each for each in self._counts(sequence.max_tokens - 1)]
            if not fits(self.connector.pools, counts, frames=frames):
                raise UsageError(
                    f"request {sequence.request_id} may come to {sequence.max_tokens} tokens, and a pool of "
                    f"{format_size(nbytes)} has no room for them: cancel it first, or wait for its end"
                )
        size = self.connector.resize(nbytes)
        self._scheduler.room_grew()  # or not: then they wait on
        return size

    def check_bias(self, params: SamplingParams) -> None:
        """Raises :class:`RequestError` for a bias on tokens that the model does not have."""
        unknown = [token for token in params.logit_bias if not 0 <= token < self.model.config.vocab_size]
        if unknown:
            raise RequestError(
                f"logit_bias names token {unknown[0]}, but the model's ids lie between 0 and "
                f"{self.model.config.vocab_size - 1}"
            )

    def discard(self, *request_ids: RequestId) -> None:
        """End requests that nobody listens to any more, as far as they have not. No step tells of it."""
        cancelled = {request_id for request_id in request_ids if self.cancel(request_id)}
        self._cancelled = [output for output in self._cancelled if output.request_id not in cancelled]

    def cancel_all(self) -> None:
        """End every request now, and every beam search."""
        for group in list(self._groups.values()):
            self._end_beams(group)
        for request_id in list(self._sequences):
            self.cancel(request_id)

    def computed_tokens(self, request_id: RequestId) -> int:
        """How many of a request's tokens have their KV in pages, loaded or computed; 0 once it has ended."""
        sequence = self._sequences.get(request_id)
        return sequence.computed if sequence is not None else 0

    def check_prompt(self, tokens: Ints[int], params: SamplingParams) -> None:
        """Raises :class:`RequestError` for a prompt that this model or this pool can never serve."""
        check_tokens(tokens, vocab_size=self.model.config.vocab_size, limit=self.model.config.max_positions)
        self.check_bias(params)
        pool = self.connector.pool
        # The newest token's KV is not computed before it has a successor.
        pages = self._keeper.pages_for(self._max_tokens(len(tokens), params.max_new_tokens) - 1)
        if pages > pool.target:
            raise RequestError(
                f"the prompt's {len(tokens)} tokens and up to {params.max_new_tokens} new ones need {pages} "
                f"pages of {pool.spec.chunk_tokens} tokens, but the pool has {pool.target}"
            )
        self._check_sides(self._max_tokens(len(tokens), params.max_new_tokens) - 1)

    def _check_deadline(self, sequence: Sequence, slo_s: float) -> None:
        """Take a request out again that would be late. Raises :class:`DeadlineError`."""
        expected = self._scheduler.expect(sequence)
        if expected is None or expected.seconds <= slo_s:
            return
        self._drop(sequence)
        self._late_requests += 1
        about = f"its first token is wanted within {slo_s:g} s"
        if expected.alone_s > slo_s:
            raise DeadlineError(
                f"{about}, but at {expected.tokens_per_s:.0f} tokens/s the prompt alone takes "
                f"{expected.alone_s:.3g} s: ask with a longer deadline or a shorter prompt",
                None,
            )
        raise DeadlineError(
            f"{about}, but with what waits before it, it is to be expected in {expected.seconds:.3g} s: try "
            "again later",
            expected.seconds - slo_s,
        )

    # -- stepping ------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._cancelled)

    def step(self) -> list[StepOutput]:
        """Compute one batch and return what it added to each request. When everything waits for loads it
        waits for them a few milliseconds and returns nothing."""
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
        """The completions of ``prompts``, in their order, computed together."""
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
        """``n`` completions of one prompt, which is computed and kept once. With a seed they take it, the
        next one, and so on."""
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
        """The likeliest continuations of ``prompt``, best first; steps the engine, others' requests go on.

        Each beam may have to be brought back by itself when pages run out, so the pool must hold them all
        unshared. Raises :class:`RequestError` when it does not, and for more beams than ``max_sequences``.
        """
        params = params or BeamParams()
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        group = self._begin_beams(tokens, params, session)
        try:
            while not group.search.done:
                self.step()
        finally:
            self._end_beams(group)
        return [
            BeamHypothesis(self._text_of(tokens), tokens, score) for score, tokens in group.search.hypotheses
        ]

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Iterator[StepOutput]:
        """Add a request and yield its outputs, stepping the engine as needed. Closing it early cancels."""
        request_id = self.add(prompt, params)
        mailbox = self._mailboxes[request_id] = deque()
        return self._outputs(request_id, mailbox)

    def astream(self, prompt: PromptInput, params: SamplingParams | None = None) -> AsyncIterator[StepOutput]:
        """The same for asyncio: any number at a time; the steps run on one thread beside the event loop."""
        if self._thread is None:
            self._thread = EngineThread(self)
        return self._thread.stream(lambda engine: engine.add(prompt, params))

    # -- state ---------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        admitted = self._scheduler.admitted
        return EngineStats(
            steps=self._steps,
            computed_tokens=self._computed_tokens,
            generated_tokens=self._generated_tokens,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            preemptions=self._preemptions + sum(s.tally.preemptions for s in self._sequences.values()),
            waiting=len(self._scheduler.waiting) + sum(map(len, self._followers.values())),
            admitted=len(admitted),
            shared_pages=self._keeper.shared_pages,
            available_pages=self.connector.available(),
            total_pages=self.connector.pool.capacity,
            late_requests=self._late_requests,
            longest_overtaken_s=self._scheduler.longest_overtaken_s,
        )

    def close(self) -> None:
        """Cancel what is under way and close the connector."""
        if self._thread is not None:
            self._thread.close()
        self.cancel_all()
        if self._drafter is not None:
            self._drafter.close()
        self.connector.close()

    # -- inside --------------------------------------------------------------------------------------

    def _new_id(self) -> RequestId:
        self._next_id += 1
        return RequestId(self._next_id - 1)

    def _sequence(self, tokens: list[int], params: SamplingParams, added: float) -> Sequence:
        eos = () if params.ignore_eos else self.model.config.eos_ids
        sequence = Sequence(
            self._new_id(),
            self.connector.prompt(tokens),
            tokens,
            params,
            self.tokenizer.detokenizer(tokens),
            max_tokens=self._max_tokens(len(tokens), params.max_new_tokens),
            stop_ids=frozenset((*params.stop_token_ids, *eos)),
            added=added,
        )
        self._sequences[sequence.request_id] = sequence
        return sequence

    def _finish(self, ids: list[RequestId]) -> list[Completion]:
        """Step until all of these have ended."""
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
        return self._computed(work, self.model.compute(build_step(work, self.connector.pools)))

    def _advance(self, item: Work, *, wait: bool) -> list[StepOutput]:
        """Take a sequence whose pages are arriving through the layers that are there, or with ``wait``
        through all, each when it is."""
        self._prefills.forget()
        sequence, layers = item.sequence, self.model.config.layers
        partial = sequence.partial
        if partial is None:
            partial = sequence.partial = PartialStep(build_step([item], self.connector.pools))
        stop = layers if wait else partial.arrived(layers)
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
        """What the end of a step changes: pages are saved, and tokens chosen."""
        self._steps += 1
        self._computed_tokens += sum(item.tokens for item in work)
        self._last_progress = time.monotonic()
        for item in work:
            item.sequence.advance(item.stop)
            self._keeper.save(item.sequence)
        picks = self._picks(finishing(work))
        if not picks:
            self._prefills.queued()
            return []  # and no need to wait
        draws = [pick.sequence.draws(pick.draft) for pick in picks]
        rows = [pick.row + place for pick in picks for place in range(len(pick.draft) + 1)]
        choices = iter(self.model.sample(logits, [draw for some in draws for draw in some], rows))
        self._prefills.ended()
        outputs: list[StepOutput] = []
        for pick, some in zip(picks, draws, strict=True):
            chosen = list(islice(choices, len(some)))
            group = self._groups.get(pick.sequence.request_id)
            if group is None:
                outputs.append(self._accept(pick, chosen))
            elif chosen[0].logprobs is not None:
                group.offers[pick.sequence.request_id] = chosen[0].logprobs.top
        for group in {id(group): group for group in self._groups.values()}.values():
            if group.complete:
                self._advance_beams(group)
        return outputs

    def _with_drafts(self, work: list[Work]) -> list[Work]:
        """``work`` with guesses behind the newest tokens, as far as the step's budget and the pages go."""
        if self._drafter is None:
            return work
        budget = self.settings.batch_tokens - sum(item.tokens for item in work)
        wanted = [item.sequence for item in work if self._may_draft(item)]
        drafts = self._drafter.propose(wanted)
        drafted = []
        for item in work:
            room = min(budget, item.sequence.max_tokens - len(item.sequence.tokens) - 1)
            draft = tuple(drafts.get(item.sequence.request_id, ())[: max(room, 0)])
            if draft and self._keeper.grow(item.sequence, draft_tokens=len(draft)):
                budget -= len(draft)
                drafted.append(replace(item, draft=draft))
            else:
                drafted.append(item)
        return drafted

    def _may_draft(self, item: Work) -> bool:
        request_id = item.sequence.request_id
        decodes = item.tokens == 1 and item.stop == len(item.sequence.tokens)
        return decodes and request_id not in self._followers and request_id not in self._groups

    def _picks(self, ending: list[Work]) -> list[_Pick]:
        """Whose next token is due, and from which row of the logits. Who follows one of these shares its
        pages from here on, and chooses from the same row."""
        picks, row = [], 0
        for item in ending:
            sequence = item.sequence
            picks.append(_Pick(sequence, row, item.draft))
            for child in self._followers.pop(sequence.request_id, ()):
                self._share(sequence, child)
                picks.append(_Pick(child, row))
            row += 1 + len(item.draft)
        return picks

    def _share(self, parent: Sequence, child: Sequence) -> None:
        if self._keeper.share(parent, child):
            self._scheduler.adopt(child)
        else:
            self._scheduler.add(child)  # it comes back when there is room, like one that was parked

    def _accept(self, pick: _Pick, choices: list[Choice]) -> StepOutput:
        """Append what was chosen, as long as the draft had foreseen it."""
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
            sequence.advance(sequence.computed + len(newest) - 1)
            self._keeper.trim(sequence)
        self._generated_tokens += len(newest)
        logprobs = tuple(c.logprobs for c in choices[: len(newest)] if c.logprobs is not None)
        if sequence.finish_reason is None:
            return StepOutput(sequence.request_id, text, tuple(newest), logprobs)
        return self._retire(sequence, text, tuple(newest), logprobs)

    def _retire(
        self, sequence: Sequence, text: str, tokens: tuple[int, ...], logprobs: tuple[StepLogprobs, ...] = ()
    ) -> StepOutput:
        self._drop(sequence)
        return StepOutput(sequence.request_id, text, tokens, logprobs, sequence.completion())

    def _drop(self, sequence: Sequence, *, save: bool = True) -> None:
        del self._sequences[sequence.request_id]
        self._preemptions += sequence.tally.preemptions
        if self._drafter is not None:
            self._drafter.forget(sequence)
        for following in self._followers.values():
            if sequence in following:
                following.remove(sequence)  # it had no page yet, and no place in a queue
                sequence.state = SequenceState.FINISHED
                return
        self._scheduler.remove(sequence, save=save)
        # Who waited for its pages computes by itself, and the others wait for that one.
        followers = self._followers.pop(sequence.request_id, [])
        if followers:
            self._scheduler.add(followers[0])
            self._followers[followers[0].request_id] = followers[1:]

    # -- beams ---------------------------------------------------------------------------------------

    def _begin_beams(self, tokens: list[int], params: BeamParams, session: str | None) -> BeamGroup:
        started = time.monotonic()
        config, settings = self.model.config, self.settings
        search = BeamSearch(
            params,
            eos_ids=config.eos_ids,
            max_tokens=self._max_tokens(len(tokens), params.max_new_tokens) - len(tokens),
        )
        of_beam = SamplingParams(
            max_new_tokens=params.max_new_tokens, logprobs=search.candidates, ignore_eos=True
        )
        self.check_prompt(tokens, of_beam)
        if params.width > settings.max_sequences:
            raise RequestError(
                f"a beam search of width {params.width} needs as many sequences at a time, but max_sequences "
                f"is {settings.max_sequences}"
            )
        pages = params.width * self._keeper.pages_for(self._max_tokens(len(tokens), params.max_new_tokens))
        if pages > self.connector.pool.target:
            raise RequestError(
                f"a beam search of width {params.width} over {len(tokens)} tokens and up to "
                f"{params.max_new_tokens} new ones may need {pages} pages, but the pool has "
                f"{self.connector.pool.target}"
            )
        self._check_sides(self._max_tokens(len(tokens), params.max_new_tokens), sequences=params.width)
        first = self._sequence(tokens, of_beam, started)
        first.session = checked_session(session)
        group = BeamGroup(search, [first])
        self._groups[first.request_id] = group
        self._scheduler.add(first)
        self._last_progress = time.monotonic()
        return group

    def _advance_beams(self, group: BeamGroup) -> None:
        parents, moves = group.members, group.advance()
        going_on = {move.parent for move in moves}
        group.members = []
        for place, parent in enumerate(parents):
            if place not in going_on:
                self._drop_beam(parent)
        for move in moves:
            beam = parents[move.parent]
            if beam in group.members:  # it goes on in two ways
                beam = self._fork_beam(parents[move.parent], group)
            group.members.append(beam)
        for beam, move in zip(group.members, moves, strict=True):
            beam.extend(move.token)

    def _fork_beam(self, parent: Sequence, group: BeamGroup) -> Sequence:
        child = parent.fork(self._new_id(), seed=None)
        self._sequences[child.request_id] = child
        self._groups[child.request_id] = group
        if parent.held:
            self._share(parent, child)
        else:
            self._scheduler.add(child)  # its parent has been parked since: it comes back like that one
        return child

    def _drop_beam(self, beam: Sequence) -> None:
        del self._groups[beam.request_id]
        self._drop(beam, save=False)

    def _end_beams(self, group: BeamGroup) -> None:
        for beam in group.members:
            self._drop_beam(beam)
        group.members = []

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        eos = self.model.config.eos_ids
        return self.tokenizer.decode(tokens[:-1] if tokens[-1] in eos else tokens)

    # -- the rest ------------------------------------------------------------------------------------

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
            self.discard(request_id)

    def _checkpoint_tokens(self) -> int:
        chunk_tokens = self.connector.pool.spec.chunk_tokens
        if self.settings.checkpoint_tokens is not None:
            return self.settings.checkpoint_tokens
        return checkpoint_tokens(self.model.config.kv_spec(chunk_tokens=chunk_tokens))

    def _check_sides(self, tokens: int, *, sequences: int = 1) -> None:
        """Raises :class:`RequestError` where the pools have no room for so many, in all layer groups."""
        counts = self._counts(tokens)
        if len(counts) > 1 and not fits(self.connector.pools, [sequences * count for count in counts]):
            kinds = [pool.spec.groups[0].kind.value for pool in self.connector.pools]
            needed = ", ".join(f"{sequences * n} of {kind}" for n, kind in zip(counts, kinds, strict=True))
            raise RequestError(
                f"{tokens} tokens need pages of every kind at a time ({needed}), and the pool has no "
                "room for them"
            )

    def _counts(self, tokens: int) -> list[int]:
        """By layer group: the most pages that a sequence of ``tokens`` tokens has at a time."""
        return [self._keeper.pages_for(tokens), *self._keeper.side_peaks(tokens)]

    def _max_tokens(self, prompt_tokens: int, new_tokens: int) -> int:
        return min(prompt_tokens + new_tokens, self.model.config.max_positions)


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
