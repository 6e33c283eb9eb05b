"""Who computes what in the next step: continuous batching with chunked prefill, under a token budget.

Decoding comes first, one token per sequence, then prefill chunks as far as the budget goes, oldest request
first in both. Of requests with a common beginning that nobody has computed yet, one computes it and the
others wait for its pages. When decoding runs out of pages the youngest admitted sequence gives way.

On a GPU a load is taken over while its bytes are on their way, layer by layer. A sequence whose pages are
still *arriving* is computed beside the batch of the others, never in it, so nobody waits for its pages: each
step takes it through those layers that have arrived since the last one (``Sequence.partial`` is how far it
has come, and its activations). It begins where the batch leaves room for its tokens, and goes on whatever the
batch is; it never takes pages from others. Where nobody else has anything to compute it is a batch, too, and
the device waits for each layer. Once its pages are there and no partial step is left it is like the others.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from tierstore_engine.keeper import PageKeeper, wait_briefly
from tierstore_engine.look_ahead import LookAhead
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings

_LOAD_POLL_S = 0.005
_ROOM_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Work:
    """Compute the tokens ``start … stop`` of ``sequence``, and behind its newest one those of ``draft``: a
    guess at what follows, of which as much counts as the model would have chosen itself."""

    sequence: Sequence
    start: int
    stop: int
    draft: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Rows of the batch that this takes."""
        return self.stop - self.start + len(self.draft)


@dataclass(frozen=True, slots=True)
class Plan:
    """A step: one ``batch``, and ``beside`` it the work of each sequence whose pages are arriving, by itself
    and as far as their layers are there. Without a batch all layers of it."""

    batch: list[Work]
    beside: list[Work]

    def __bool__(self) -> bool:
        return bool(self.batch or self.beside)


class Scheduler:
    """Two queues, both by age: *waiting* sequences hold no pages, *admitted* ones are loading or running."""

    def __init__(self, keeper: PageKeeper, settings: EngineSettings) -> None:
        self.waiting: list[Sequence] = []
        self.admitted: list[Sequence] = []
        self._keeper = keeper
        self._settings = settings
        self._ahead = LookAhead(keeper.connector)
        self._refused_at: int | None = None  # pages available when the oldest waiting one was refused

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.admitted)

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_age)

    def adopt(self, sequence: Sequence) -> None:
        """Take in a sequence that shares another one's pages. Where all places are taken it gives them back
        and waits."""
        if len(self.admitted) < self._settings.max_sequences:
            insort(self.admitted, sequence, key=_age)
        else:
            self._keeper.leave(sequence, save=False)
            self.add(sequence)

    def remove(self, sequence: Sequence, *, save: bool = True) -> None:
        """Take a sequence out for good, saving what it has (or not) and giving its pages back."""
        if sequence in self.admitted:
            self._keeper.leave(sequence, save=save)
            self.admitted.remove(sequence)
            self._refused_at = None
        else:
            self.waiting.remove(sequence)
            self._ahead.forget(sequence)
        sequence.state = SequenceState.FINISHED

    def plan(self) -> Plan:
        """The next step's work; every token of it has a page. Admits, settles loads and parks on the way."""
        self._settle()
        self._admit()
        self._settle()  # what was in HBM has loaded at once
        arriving = [s for s in self.admitted if s.partial is not None or self._keeper.arriving(s)]
        plan = Plan(self._work([s for s in self.admitted if s not in arriving]), [])
        arriving = [s for s in arriving if s in self.admitted]  # the others may have parked some
        if plan.batch or any(s.partial is not None for s in arriving):
            plan.beside.extend(self._beside(arriving, sum(item.tokens for item in plan.batch)))
        else:
            plan.batch.extend(self._work(arriving))
        if not plan and self.waiting and self.admitted and all(s.held for s in self.admitted):
            self._park()  # they wait for one another, and for the pages that they hold
        return plan

    def wait(self) -> None:
        """Nothing can be computed now: wait briefly for a load or for room instead of spinning."""
        for sequence in self.admitted:
            if sequence.loading is not None:
                wait_briefly(sequence.loading.transfer, _LOAD_POLL_S)
                return
            if sequence.meeting is not None and sequence.meeting.transfer is not None:
                wait_briefly(sequence.meeting.transfer, _LOAD_POLL_S)
                return
        self._keeper.wait_for_room(_ROOM_POLL_S)

    def _settle(self) -> None:
        for sequence in [s for s in self.admitted if s.state is SequenceState.LOADING or s.meeting]:
            self._keeper.settle(sequence)
            self._keeper.poll(sequence)
            if sequence.state is SequenceState.WAITING:
                self._requeue(sequence)

    def _admit(self) -> None:
        place = 0
        while place < len(self.waiting) and len(self.admitted) < self._settings.max_sequences:
            sequence = self.waiting[place]
            if self._computed_by_another(sequence) or self._ahead.bringing(sequence):
                place += 1
                continue
            room = self._keeper.available()
            if self.admitted and room == self._refused_at:
                break  # nothing has changed: do not ask the store again at every step
            if not self._keeper.admit(sequence):
                self._refused_at = room
                break
            self._ahead.forget(sequence)
            insort(self.admitted, self.waiting.pop(place), key=_age)
        self._ahead.look(self.waiting[place:])

    def _computed_by_another(self, sequence: Sequence) -> bool:
        """Whether somebody is just computing, or loading, how this one's prompt begins: it is admitted when
        it can have those pages, and takes no part in the same work until then."""
        if not self._keeper.keeps:
            return False
        return any(
            not other.no_save
            and other.remaining > 1
            and other.computed < _common_chunks(sequence, other) * self._keeper.chunk_tokens
            for other in self.admitted
        )

    def _work(self, sequences: list[Sequence]) -> list[Work]:
        """One step of ``sequences``, by age."""
        decodes = self._decodes(sequences)
        return decodes + self._prefills(sequences, self._settings.batch_tokens - len(decodes))

    def _beside(self, arriving: list[Sequence], taken: int) -> list[Work]:
        """What has begun goes on, and the oldest others begin while the step has room for their tokens."""
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
                if not self._keeper.grow(sequence):
                    continue
                room -= item.tokens
            work.append(item)
        return work

    def _next(self, sequence: Sequence) -> Work:
        """The next chunk of a sequence, or its newest token."""
        chunk = self._settings.prefill_chunk
        stop = min((sequence.computed // chunk + 1) * chunk, len(sequence.tokens))
        return Work(sequence, sequence.computed, stop)

    def _decodes(self, sequences: list[Sequence]) -> list[Work]:
        work = []
        for sequence in sequences:
            decoding = sequence.state is SequenceState.RUNNING and sequence.remaining == 1
            if decoding and self._make_room(sequence):
                work.append(Work(sequence, sequence.computed, sequence.computed + 1))
        return work

    def _make_room(self, sequence: Sequence) -> bool:
        """A page for the sequence's next token, parking the youngest until there is one. False when it was
        itself the youngest, or when pages are still being saved and come free in a moment. Nothing older is
        touched, so work planned before stays valid."""
        while not self._keeper.grow(sequence):
            if self._keeper.parking:
                return False
            if self._park() is sequence:
                return False
        return True

    def _park(self) -> Sequence:
        """Take its pages from the youngest."""
        youngest = self.admitted[-1]
        self._keeper.leave(youngest)
        youngest.tally.preemptions += 1
        self._requeue(youngest)
        return youngest

    def _prefills(self, sequences: list[Sequence], budget: int) -> list[Work]:
        work = []
        for sequence in sequences:
            if sequence.state is not SequenceState.RUNNING or sequence.remaining <= 1:
                continue
            item = self._next(sequence)
            if not self._keeper.may_compute(sequence, item.stop):
                continue
            # All of the chunk or nothing: a chunk cut to fit would change the shapes, and so the bits.
            if item.tokens > budget:
                break
            work.append(item)
            budget -= item.tokens
        return work

    def _requeue(self, sequence: Sequence) -> None:
        self.admitted.remove(sequence)
        self._refused_at = None
        insort(self.waiting, sequence, key=_age)


def _common_chunks(one: Sequence, other: Sequence) -> int:
    """How many leading chunks have equal keys: a key stands for all tokens up to its end."""
    low, high = 0, min(len(one.prompt.keys), len(other.prompt.keys))
    while low < high:
        middle = (low + high + 1) // 2
        if one.prompt.keys[middle - 1] == other.prompt.keys[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _age(sequence: Sequence) -> tuple[int, int]:
    """What was forked is as old as what it was forked from."""
    return sequence.root, sequence.request_id
