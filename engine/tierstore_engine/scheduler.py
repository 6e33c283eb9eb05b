"""Decide what the next step computes: continuous batching with chunked prefill, under a token budget.

Decoding comes first, with one token per sequence. Prefill chunks fill the rest of the budget. With ``fcfs``,
the oldest request is first, in decoding and in prefill. With ``cache`` prefills are ordered by what is left
to compute (:mod:`tierstore_engine.ordering`). If waiting requests share a prefix that is not computed yet,
one of them computes the prefix and the others wait for its pages. If decoding runs out of pages, the youngest
admitted sequence is preempted. "Old" and "young" are by priority, and then by age.

**The rule of progress.** Every request that was accepted ends, even if the pool has few pages:

1. A request is admitted only if its pages, and those that the admitted requests still need, are available at
   the same time. While an admitted request waits for pages, no request is admitted.
2. A request that lacks pages for a prefill step waits while others compute. If no request can compute, or if
   a request lacks the page of its next token, the *youngest* admitted request is preempted. The oldest
   admitted request is therefore never preempted for another one, and it ends.
3. A preempted request is admitted again only after an admitted request has ended. If it were admitted
   earlier, it would take the pages for which it was preempted. There are two exceptions: a younger request is
   admitted (the younger one is preempted first), or no admitted request can continue.
4. If the only admitted request lacks pages, cached pages take its room, or its own pages lie in too many
   large pages. This request is preempted, all cached pages leave HBM, and it starts again alone: no other
   request is admitted until it ends. If it lacks pages once more, it starts again without the store, so that
   the pool has no pages except those in use. The engine accepts only requests whose pages fit an empty pool.

The number of preemptions before a request ends is bounded by the number of requests that are admitted for the
first time meanwhile, times the number of waiting requests.

**Admission with** ``cache``. A request is admitted shortly before its turn, and not as soon as there is a
slot. Until then, the order of requests can change, and the request's pages stay evictable. If the pages of a
request do not fit, other requests are admitted as long as they may overtake it. After that, all younger
requests wait, and the youngest admitted one is preempted. When slots or pages run short, every request up to
the youngest overdue one gets slots, pages and turns in arrival order, as with ``fcfs``. These requests form
the *strict prefix*.

**Loads on a GPU.** On a GPU, a sequence takes over a load while its bytes are still being copied, layer by
layer. A sequence whose pages are still *arriving* is computed beside the batch of the others, never in it, so
that the batch does not wait for these pages. Each step takes such a sequence through the layers that have
arrived since the last step (``Sequence.partial`` has its progress and activations). This separate work starts
when the batch leaves room for its tokens, then continues beside any batch, and takes no pages from other
sequences. If no other sequence has work, it is computed as a batch, and the device waits for each layer. When
its pages have arrived and its partial step is done, the sequence is computed in the batch.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.planner import Prefill
from tierstore_engine.batch import StepPlan, Work
from tierstore_engine.keeper import PageKeeper, wait_briefly
from tierstore_engine.look_ahead import LookAhead
from tierstore_engine.ordering import Place
from tierstore_engine.outputs import RequestId, WaitReason
from tierstore_engine.prompts import AnswerLengths, PendingPrompt, PendingPrompts
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings

_LOAD_POLL_S = 0.005
_ROOM_POLL_S = 0.001
_LOADS = 4  # how many admitted requests may be loading, in addition to those that are computed
_LOOKED_AT = 16  # how many waiting requests are considered in a step
Room: TypeAlias = tuple[tuple[int, ...], list[int]]
"""Available pages of each layer group, and pages that the admitted sequences lack."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """When the first token of a request is expected: in ``seconds`` from now. ``alone_s`` is the part for its
    own prompt, ``tokens_per_s`` the speed of prefill."""

    seconds: float
    alone_s: float
    tokens_per_s: float


class Scheduler:
    """Two queues of sequences, both in the order of places. *Waiting* sequences have no pages. *Admitted*
    sequences are loading or running."""

    def __init__(
        self,
        keeper: PageKeeper,
        settings: EngineSettings,
        *,
        prefill: Callable[[], Prefill | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``prefill`` returns the measured speed of prefill. It returns None before the first measurement."""
        self.waiting: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self._keeper = keeper
        self._settings = settings
        self._by_cache = settings.schedule == "cache"
        self._ahead = LookAhead(keeper)
        self._prompts = PendingPrompts(keeper, self._ahead, settings, prefill, clock)
        self._refused_at: Room | None = None  # the room when the oldest waiting request was refused
        # The rule of progress.
        self._short = False  # whether a sequence found no pages in the last step
        self._stuck = False  # whether no request is admitted because cached pages are in the way
        self._preempted: set[RequestId] = set()  # requests preempted since an admitted one ended
        self._only: RequestId | None = None  # the root (the request and its forks) that must run alone
        self._turns: dict[RequestId, int] = {}  # the turns of admitted prompts in the last order
        self._sakes: dict[RequestId, Place] = {}  # the oldest request that needs an admitted prompt
        self._reasons: dict[Place, WaitReason] = {}  # why the last plan did not admit a request
        self._answers = AnswerLengths()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.admitted)

    @property
    def longest_overtaken_s(self) -> float:
        """See :class:`EngineStats <tierstore_engine.outputs.EngineStats>`."""
        return self._prompts.longest_overtaken_s

    def wait_reasons(self) -> Counter[WaitReason]:
        """Return how many requests wait for each reason."""
        return Counter(
            WaitReason.PROMISE if s.promise is not None else self._reasons.get(s.place, WaitReason.TURN)
            for s in self.waiting
        )

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_place)
        self._prompts.add(sequence)

    def adopt(self, sequence: Sequence) -> None:
        """Add a sequence that shares another one's pages. If all slots are taken, release the pages and let
        it wait."""
        if not self._full:
            insort(self.admitted, sequence, key=_place)
        else:
            self._keeper.leave(sequence, save=False)
            self.add(sequence)

    def remove(self, sequence: Sequence, *, save: bool = True) -> None:
        """Remove a sequence for good: save its pages unless ``save`` is False, and release them."""
        self._prompts.forget(sequence)
        self._answers.ended(sequence)
        if sequence in self.admitted:
            self._keeper.leave(sequence, save=save)
            self.admitted.remove(sequence)
            self.room_grew()
        else:
            self.waiting.remove(sequence)
            self._ahead.forget(sequence)
            self._refused_at, self._stuck = None, False
        self._preempted.discard(sequence.request_id)
        if not any(other.root == self._only for other in (*self.admitted, *self.waiting)):
            self._only = None
        sequence.state = SequenceState.FINISHED

    def room_grew(self) -> None:
        """Check again whether waiting requests have room, because a request has ended or the pool has
        grown."""
        self._preempted.clear()
        self._refused_at = None

    def expect(self, sequence: Sequence) -> Expectation | None:
        """Return when a waiting sequence is expected to have its first token, if no other request arrives.
        Return None until prefill has been measured.

        If all slots are taken, answers are expected to be as long as earlier ones.
        """
        if not self._prompts.measured:
            return None
        prompts = self._prompts.listed(self.admitted, self.waiting)
        own = self._prompts.of(sequence)
        if not any(prompt is own for prompt in prompts):
            prompts.append(own)
        for prompt in prompts:
            if prompt.looked_at == -math.inf and prompt.waits and not prompt.promised:
                self._prompts.look_up(prompt)
        speed, seconds, slots = self._prompts.speed(), own.load_s, 0
        waiting = {prompt.entry.place for prompt in prompts if prompt.waits}
        for turn in self._prompts.order(prompts):
            seconds += turn.seconds
            slots += turn.entry.place in waiting
            if turn.entry is own.entry:
                break
        seconds = max(seconds, self._until_free_s(slots, own.entry.place))
        entry = own.entry
        alone_s = own.load_s + speed.seconds(entry.tokens - entry.held, entry.held)
        return Expectation(seconds, alone_s, entry.tokens / speed.seconds(entry.tokens))

    def _until_free_s(self, slots: int, place: Place) -> float:
        """Return when ``slots`` slots will be free for the request at ``place`` and those before it."""
        missing = slots - (self._settings.max_sequences - len(self.admitted))
        answering = [s for s in self.admitted if s not in self._prompts]
        if missing <= 0 or not answering:
            return 0.0
        seconds = self._answers.until(answering, min(missing, len(answering))) * self._prompts.step_s
        later = self.admitted[-1].place > place  # a request with a later place is preempted
        return min(seconds, self._settings.overtake_s) if later and self._by_cache else seconds

    def plan(self) -> StepPlan:
        """Return the next step's work. Every token of this work has a page. This also admits and preempts
        sequences, and takes over loads."""
        self.ended()
        self._settle()
        if self._cleared():
            self._admit_all()
        self._settle()  # loads of pages in HBM have ended already
        self._short = False
        arriving = [s for s in self.admitted if s.partial is not None or self._keeper.arriving(s)]
        plan = StepPlan(self._work([s for s in self.admitted if s not in arriving]), [])
        arriving = [s for s in arriving if s in self.admitted]  # the batch may have parked some
        if plan.batch or any(s.partial is not None for s in arriving):
            plan.beside.extend(self._beside(arriving, sum(item.tokens for item in plan.batch)))
        else:
            plan.batch.extend(self._work(arriving))
        if not plan and self.waiting and self.admitted and all(s.held for s in self.admitted):
            self._preempt()  # the admitted requests wait for one another and for each other's pages
        elif not plan and self._short and not self._keeper.parking and not self._ahead.give_up():
            self._preempt()
        self._prompts.step_begins(plan, self._sakes, min(self._kept_out(), default=None))
        return plan

    def _admit_all(self) -> None:
        if self._by_cache:
            self._prompts.form_line([*self.admitted, *self.waiting])
            self._admit_by_cache()
            # each sequence is preempted once: one that gets its room back keeps it for this step
            parked: set[RequestId] = set()
            while self._relieve(parked):
                self._admit_by_cache()
        else:
            self._admit_by_age()
        self._stuck = not self.admitted and WaitReason.ROOM in self._reasons.values()

    def _cleared(self) -> bool:
        """Return whether sequences may be admitted.

        If there is no room for any request, all cached pages leave HBM before one is admitted. That request
        then loads its own pages again, into adjacent pages.
        """
        if self._stuck and not self.admitted:
            if self._keeper.parking:
                return False  # pages that are being saved cannot leave yet
            self._ahead.give_up()
            self._keeper.evict_idle()
            self._refused_at = None
        self._stuck = False
        return True

    def wait(self) -> None:
        """Wait a short time for a load or for room, because no sequence can be computed now."""
        for sequence in self.admitted:
            load = sequence.loading or sequence.meeting
            if load is not None and load.transfer is not None:
                wait_briefly(load.transfer, _LOAD_POLL_S)
                return
        awaited = self._ahead.awaited()
        if awaited is not None and not self.admitted:
            wait_briefly(awaited, _LOAD_POLL_S)
            return
        self._keeper.wait_for_room(_ROOM_POLL_S)

    def _settle(self) -> None:
        for sequence in [s for s in self.admitted if s.state is SequenceState.LOADING or s.meeting]:
            self._keeper.settle(sequence)
            self._keeper.poll(sequence)
            # a load was incomplete, and there are no pages to compute the rest
            if sequence.state is SequenceState.WAITING:
                alone = len(self.admitted) == 1
                self.requeue(sequence)
                if alone:
                    self._start_over(sequence)

    @property
    def _full(self) -> bool:
        return len(self.admitted) >= self._settings.max_sequences

    def _forbidden(self, sequence: Sequence) -> WaitReason | None:
        """Return why the rule of progress forbids to admit a request now; None if it does not."""
        if self._only is not None:
            return WaitReason.ALONE if sequence.root != self._only else None
        if not self.admitted:
            return None
        if self._short:
            return WaitReason.SHORT
        if sequence.request_id not in self._preempted or self.admitted[-1].place > sequence.place:
            return None
        return None if all(other.held for other in self.admitted) else WaitReason.PREEMPTED

    def _elsewhere(self, sequence: Sequence) -> WaitReason | None:
        """Return the source from which a sequence's pages arrive sooner than they could be computed, or None.
        The sequence is admitted when they have arrived."""
        if self._ahead.promised(sequence):
            return WaitReason.PROMISE
        if self._computing_for(sequence) is not None:
            return WaitReason.PREFIX
        return WaitReason.FETCH if self._ahead.fetching(sequence) else None

    def _admit_by_age(self) -> None:
        """Admit requests by age, up to the first that is blocked."""
        self._reasons.clear()
        place = 0
        while place < len(self.waiting):
            sequence = self.waiting[place]
            reason = self._refusal(sequence)
            if reason is None:
                self._admitted(sequence)
                continue
            self._reasons[sequence.place] = reason
            if reason.blocks and reason is not WaitReason.ALONE:
                break
            place += 1
        self._ahead.look(self.waiting[place:])

    def _refusal(self, sequence: Sequence) -> WaitReason | None:
        """Give the next request by age its pages. Return why it has to wait, or None."""
        if self._full:
            return WaitReason.SLOT
        forbidden = self._forbidden(sequence)
        if forbidden is WaitReason.ALONE:
            return forbidden
        reason = self._elsewhere(sequence) or forbidden
        if reason is not None:
            return reason
        room = self._keeper.room(), self._keeper.lacking(self.admitted)
        if self.admitted and room == self._refused_at:
            return WaitReason.ROOM  # the room has not changed, so the store need not be asked in every step
        hit = self._keeper.look_up(sequence, admitting=True)
        if self._keeper.admit(sequence, hit, beside=self.admitted):
            self._refused_at = None
            return None
        self._refused_at = room
        return WaitReason.ROOM

    def _admitted(self, sequence: Sequence) -> None:
        self._ahead.forget(sequence)
        self.waiting.remove(sequence)
        insort(self.admitted, sequence, key=_place)

    # -- by cache ------------------------------------------------------------------------------------

    def _admit_by_cache(self) -> None:
        """Admit the next requests in order, for about two steps of work."""
        prompts = self._prompts.listed(self.admitted, self.waiting)
        self._prompts.refresh(prompts)
        self._turns.clear()
        self._sakes.clear()
        self._reasons.clear()
        by_place = {prompt.entry.place: prompt for prompt in prompts}
        waiting: list[Sequence] = []
        tokens, refused = 0, False
        for turn in self._prompts.order(prompts):
            prompt = by_place[turn.entry.place]
            place, sequence = prompt.entry.place, prompt.sequence
            if not prompt.waits:
                tokens += self._take_turn(sequence, place)
                continue
            strict = self._prompts.in_strict_prefix(place)
            computing = self._computing_for(sequence)
            if computing is not None:
                tokens += self._take_turn(computing, place)
                self._reasons[place] = WaitReason.PREFIX
            elif strict or (tokens < 2 * self._settings.batch_tokens and self._loads < _LOADS):
                reason = WaitReason.FETCH if self._ahead.fetching(sequence) else self._took_room(prompt)
                if reason is None:
                    tokens += self._take_turn(sequence, place)
                    continue
                self._reasons[place] = reason
                if reason.blocks and strict:
                    refused = True
                    break  # no later request may take the room for which this one waits
            waiting.append(sequence)
            if len(waiting) >= _LOOKED_AT:
                break
        if not refused:
            self._admit_computed(prompts)
        if self._full:
            self._reasons.update((p.entry.place, WaitReason.SLOT) for p in prompts if p.waits)
        self._ahead.look(waiting)

    def _admit_computed(self, prompts: Iterable[PendingPrompt]) -> None:
        """Admit requests with one token left to compute, if there is room for the strict prefix. They are
        decoded beside other work."""
        waiting = sorted((p for p in prompts if p.waits), key=lambda prompt: prompt.entry.place)
        if self._prompts.short_of_room and waiting and self._prompts.in_strict_prefix(waiting[0].entry.place):
            return
        for prompt in waiting:
            if prompt.entry.tokens - prompt.entry.held > 1 or self._elsewhere(prompt.sequence):
                continue
            reason = self._took_room(prompt)
            if reason is not None and reason.blocks:
                self._reasons[prompt.entry.place] = reason
                return

    @property
    def _loads(self) -> int:
        return sum(sequence.state is SequenceState.LOADING for sequence in self.admitted)

    def _take_turn(self, sequence: Sequence, sake: Place) -> int:
        """Record that a sequence's prompt is computed next, for the request at place ``sake``. Return how
        many tokens this needs in two steps, with one chunk in each. A sequence that is being loaded needs
        none, because other sequences are computed meanwhile."""
        if sequence.request_id in self._turns:
            self._sakes[sequence.request_id] = min(sake, self._sakes[sequence.request_id])
            return 0
        self._turns[sequence.request_id] = len(self._turns)
        self._sakes[sequence.request_id] = sake
        if sequence.state is not SequenceState.RUNNING:
            return 0
        return min(sequence.remaining, 2 * self._settings.prefill_chunk)

    def _computing_for(self, sequence: Sequence) -> Sequence | None:
        """Return the admitted sequence that computes or loads the beginning of this one's prompt."""
        if not self._keeper.keeps:
            return None
        for other in self.admitted:
            if not other.no_save and other.prefills:
                common = self._prompts.common(sequence, other)
                if other.computed < common:
                    self._keeper.add_save_point(other, common, parts=True)
                    return other
        return None

    def _took_room(self, prompt: PendingPrompt) -> WaitReason | None:
        """Admit a request if it gets a slot and pages. Return why it has to wait, or None."""
        sequence, entry = prompt.sequence, prompt.entry
        reason = WaitReason.SLOT if self._full else self._forbidden(sequence)
        if reason is not None:
            return reason
        pages = self._keeper.pages_for(entry.tokens) - prompt.shared_pages
        if pages > self._keeper.connector.available():
            return WaitReason.ROOM
        hit = self._keeper.look_up(sequence, admitting=True)
        if self._prompts.look_up(prompt, hit) > self._keeper.chunk_tokens:
            hit.release()
            return WaitReason.TURN  # the request's turn has changed: try again in the next step
        if not self._keeper.admit(sequence, hit, beside=self.admitted):
            return WaitReason.ROOM
        self._admitted(sequence)
        self._reasons.pop(entry.place, None)
        return None

    def _kept_out(self) -> set[Place]:
        """Return the places of the requests without room while a younger one has some."""
        youngest = self.admitted[-1].place if self.admitted else None
        blocked = (place for place, reason in self._reasons.items() if reason.blocks)
        return {place for place in blocked if youngest is not None and place < youngest}

    def _relieve(self, parked: set[RequestId]) -> bool:
        """Preempt the youngest sequence, unless it is in ``parked``, if an older request of the strict prefix
        needs its pages. Return whether a sequence was preempted."""
        if not self.admitted or self._keeper.parking or self.admitted[-1].request_id in parked:
            return False
        kept_out = self._kept_out()
        if not any(
            # A request that waits for pages from other hosts would not be admitted.
            prompt.entry.place in kept_out
            and self._prompts.in_strict_prefix(prompt.entry.place)
            and not self._forbidden(prompt.sequence)
            and not self._elsewhere(prompt.sequence)
            for prompt in self._prompts
        ):
            return False
        parked.add(self._park().request_id)
        return True

    def ended(self) -> None:
        """Record the end of the last step, unless it was recorded before. The step's time counts against
        overtaken requests, and its speed is recorded."""
        self._prompts.step_ended(self.admitted)

    # -- the step's work -----------------------------------------------------------------------------

    def _work(self, sequences: list[Sequence]) -> list[Work]:
        """Return one step's work for ``sequences``, which are in the order of age."""
        decodes = self._decodes(sequences)
        return decodes + self._prefills(sequences, self._settings.prompt_tokens)

    def _beside(self, arriving: list[Sequence], taken: int) -> list[Work]:
        """Return the work beside the batch. Sequences that have begun continue. The oldest others begin, as
        long as the step has room for their tokens."""
        begun = [self._next(s) for s in arriving if s.partial is not None]
        room = self._settings.batch_tokens - taken - sum(item.tokens for item in begun)
        work = []
        for sequence in arriving:
            if sequence.state is not SequenceState.RUNNING or sequence.held:
                continue
            item = self._next(sequence)
            if sequence.partial is None:
                if item.tokens > room:
                    break
                if not sequence.grow(len(sequence.tokens)):
                    continue
                room -= item.tokens
            work.append(item)
        return work

    def _next(self, sequence: Sequence) -> Work:
        """Return the next chunk of a sequence, or its newest token."""
        chunk = self._settings.prefill_chunk
        stop = min((sequence.computed // chunk + 1) * chunk, len(sequence.tokens))
        return Work(sequence, sequence.computed, self._keeper.step_end(sequence, stop))

    def _decodes(self, sequences: list[Sequence]) -> list[Work]:
        work = []
        for sequence in sequences:
            if sequence.decodes and self._make_room(sequence):
                work.append(Work(sequence, sequence.computed, len(sequence.tokens)))
        return work

    def _make_room(self, sequence: Sequence) -> bool:
        """Get a page for the sequence's next token. If no page is available, park the youngest sequences
        until one is.

        Return False if the sequence itself was the youngest, or if pages that are still being saved will soon
        be free. Older sequences keep their pages, so work that is already planned stays valid.
        """
        while not sequence.grow(len(sequence.tokens)):
            if self._keeper.parking:
                self._short = True
                return False
            if not self._ahead.give_up() and self._preempt() is sequence:
                return False
        return True

    def _preempt(self) -> Sequence:
        """Preempt the youngest sequence for lack of pages. If it is the only one admitted, it starts again
        alone."""
        alone = len(self.admitted) == 1
        youngest = self._park()
        if alone:
            self._start_over(youngest)
        return youngest

    def _start_over(self, sequence: Sequence) -> None:
        """Restart the only admitted request, which lacked pages. The second time it also runs without the
        store."""
        self._stuck = True
        if self._only == sequence.root:
            sequence.no_save = sequence.no_load = True
        self._only = sequence.root

    def _park(self) -> Sequence:
        """Take the pages of the youngest sequence, and let it wait."""
        youngest = self.admitted[-1]
        self._keeper.leave(youngest)
        youngest.tally.preemptions += 1
        self.requeue(youngest)
        return youngest

    def _prefills(self, sequences: list[Sequence], budget: int) -> list[Work]:
        work = []
        if self._by_cache:
            last = len(self._turns)
            sequences = sorted(sequences, key=lambda s: self._turns.get(s.request_id, last))
        for sequence in sequences:
            if sequence.state is not SequenceState.RUNNING or not sequence.prefills:
                continue
            item = self._next(sequence)
            if not self._keeper.may_compute(sequence, item.stop):
                continue
            # Compute the whole chunk or none of it: a smaller one would change the last bits of results.
            if item.tokens > budget:
                break
            if not sequence.grow(item.stop):
                self._short = True
                break  # it waits until other sequences release pages, which no younger sequence may take
            work.append(item)
            budget -= item.tokens
        return work

    def requeue(self, sequence: Sequence, *, preempted: bool = True) -> None:
        """Move an admitted sequence without pages to the waiting queue."""
        self.admitted.remove(sequence)
        if preempted:
            self._preempted.add(sequence.request_id)
        self._refused_at = None
        self.add(sequence)


def _place(sequence: Sequence) -> Place:
    return sequence.place
