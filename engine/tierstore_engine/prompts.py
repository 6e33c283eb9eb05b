"""Prompts that are not computed yet: how many tokens of each are held, how fast prompts are computed, and
whose turn is next. The scheduler decides which of them to admit."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass

from tierstore.planner import Prefill
from tierstore_connectors.base import ConnectorHit
from tierstore_engine.batch import StepPlan
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.look_ahead import LookAhead
from tierstore_engine.ordering import Place, Spent, Turn, WaitingEntry, common_chunks, passed, turns
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings

_ORDERED = 128  # how many requests are ordered; later ones wait
_LOOKUPS = 8  # lookups of waiting requests per step
_STALE_S = 1.0  # results that are older are looked up again
_PACE_STEPS = 64
_ANSWERS = 64  # ended answers
_ANY_SPEED = Prefill(1e-4)  # before the first measurement: only the order matters


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """A sequence whose prompt is not computed yet, with the result of its last lookup: a load takes
    ``load_s`` seconds, and ``shared_pages`` are in HBM and need no room."""

    sequence: Sequence
    entry: WaitingEntry
    shared_pages: int = 0
    load_s: float = 0.0
    looked_at: float = -math.inf

    @property
    def waits(self) -> bool:
        """Return whether the sequence has no page yet."""
        return self.sequence.state is SequenceState.WAITING

    @property
    def promised(self) -> bool:
        """Return whether another engine's pages are awaited."""
        return self.sequence.promise is not None


class AnswerLengths:
    """The lengths of the last answers. Running answers are expected to become as long."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_ANSWERS)

    def ended(self, sequence: Sequence) -> None:
        """Record that a sequence has ended."""
        if len(sequence.tokens) > sequence.prompt_tokens:
            self._lengths.append(len(sequence.tokens) - sequence.prompt_tokens)

    def until(self, answering: Iterable[Sequence], count: int) -> int:
        """Return after how many more tokens ``count`` of the ``answering`` sequences are expected to have
        ended."""
        return sorted(map(self._left, answering))[count - 1]

    def _left(self, sequence: Sequence) -> int:
        most = sequence.max_tokens - len(sequence.tokens)
        if not self._lengths:
            return most
        usual = sum(self._lengths) // len(self._lengths)
        return max(min(most, usual - (len(sequence.tokens) - sequence.prompt_tokens)), 1)


@dataclass(slots=True)
class _PromptStep:
    """The last step: when it was planned, how many prompt ``tokens`` it computed, how many tokens were before
    each of them on average (``behind``), and for which requests."""

    at: float
    busy: bool
    tokens: int
    behind: float
    spent: Spent


class PendingPrompts:
    """The prompts of all sequences that wait or whose prompts are being computed."""

    def __init__(
        self,
        keeper: PageKeeper,
        ahead: LookAhead,
        settings: EngineSettings,
        prefill: Callable[[], Prefill | None],
        clock: Callable[[], float],
    ) -> None:
        self.longest_overtaken_s = 0.0  # the roots of requests that have their first token
        self.short_of_room = False  # whether slots or pages do not hold all waiting requests
        self._keeper = keeper
        self._ahead = ahead
        self._settings = settings
        self._by_cache = settings.schedule == "cache"
        self._prefill = prefill
        self._clock = clock
        self._prompts: dict[RequestId, PendingPrompt] = {}
        self._overdue: frozenset[Place] = frozenset()  # places that may no longer be overtaken
        # requests up to this place are served in the order of places
        self._strict_prefix: Place | None = None
        self._step: _PromptStep | None = None
        self._pace: deque[tuple[int, float, float]] = deque(maxlen=_PACE_STEPS)
        self._steps_s: deque[float] = deque(maxlen=_PACE_STEPS)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._prompts

    def __iter__(self) -> Iterator[PendingPrompt]:
        return iter(self._prompts.values())

    def of(self, sequence: Sequence) -> PendingPrompt:
        return self._prompts[sequence.request_id]

    def add(self, sequence: Sequence) -> None:
        """Record a sequence that waits for its prompt to be computed or loaded again."""
        if sequence in self:
            return
        keys = sequence.prompt.keys if self._keeper.keeps and not sequence.no_save else []
        entry = WaitingEntry(sequence.place, keys, len(sequence.tokens))
        if len(sequence.tokens) == sequence.prompt_tokens:
            entry.deadline_s = sequence.deadline_s
        if sequence.promise is not None:
            entry.held = min(sequence.promise.tokens, entry.tokens - 1)
        self._prompts[sequence.request_id] = PendingPrompt(sequence, entry)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence whose prompt is computed, or that leaves. The pages that it has computed are then
        counted as held for other prompts."""
        prompt = self._prompts.pop(sequence.request_id, None)
        if prompt is None:
            return
        self.longest_overtaken_s = max(self.longest_overtaken_s, prompt.entry.overtaken_s)
        if not self._by_cache or sequence.no_save or not self._keeper.keeps:
            return
        for other in self:
            common = min(self.common(other.sequence, sequence), sequence.computed, other.entry.tokens - 1)
            other.entry.held = max(other.entry.held, common)

    def common(self, one: Sequence, other: Sequence) -> int:
        """Return how many leading tokens both sequences share, in full chunks."""
        return common_chunks(one.prompt.keys, other.prompt.keys) * self._keeper.chunk_tokens

    # -- what is held --------------------------------------------------------------------------------

    def look_up(self, prompt: PendingPrompt, hit: ConnectorHit | None = None) -> int:
        """Record how much of a prompt is held now, from ``hit`` or from a new lookup. Return by how many
        tokens this is fewer than recorded before."""
        found = self._keeper.look_up(prompt.sequence) if hit is None else hit
        plan = self._keeper.planned(prompt.sequence, found)
        in_hbm = min(found.by_tier.get("hbm", 0), plan.tokens)
        if hit is None:
            found.release()
        gone = prompt.entry.held - plan.tokens
        prompt.entry.held, prompt.load_s = plan.tokens, plan.load_s
        prompt.shared_pages = min(found.hbm_pages, in_hbm // self._keeper.chunk_tokens)
        prompt.looked_at = self._clock()
        return gone

    def refresh(self, prompts: Iterable[PendingPrompt]) -> None:
        """Look up prompts that are new or whose last lookup is old, a few at a time."""
        now = self._clock()
        stale = [prompt for prompt in prompts if prompt.waits and now - prompt.looked_at > _STALE_S]
        stale.sort(key=lambda prompt: prompt.looked_at)
        for prompt in stale[:_LOOKUPS]:
            self.look_up(prompt)

    # -- whose turn is next --------------------------------------------------------------------------

    def listed(self, admitted: Items[Sequence], waiting: Items[Sequence]) -> list[PendingPrompt]:
        """Return the prompts to order: all admitted ones, and the first waiting ones that wait for no
        promise."""
        first = [s for s in waiting[:_ORDERED] if not self._ahead.promised(s)]
        prompts = [self.of(s) for s in (*(s for s in admitted if s in self), *first)]
        for prompt in prompts:
            prompt.entry.held = max(prompt.entry.held, prompt.sequence.computed)
        return prompts

    def order(self, prompts: Iterable[PendingPrompt]) -> Iterator[Turn]:
        """Yield whose turn is next; see :func:`~tierstore_engine.ordering.turns`."""
        return turns(
            [prompt.entry for prompt in prompts],
            self.speed(),
            chunk_tokens=self._keeper.chunk_tokens,
            bound_s=self._settings.overtake_s if self._by_cache else 0.0,
            now_s=self._clock(),
            strict_prefix=self._strict_prefix if self._by_cache else None,
        )

    def form_line(self, sequences: Items[Sequence]) -> None:
        """Decide which of all ``sequences`` are in the strict prefix."""
        pages = sum(self._keeper.pages_for(sequence.max_tokens) for sequence in sequences)
        self.short_of_room = (
            len(sequences) > self._settings.max_sequences or pages > self._keeper.connector.pool.target
        )
        bound_s = self._settings.overtake_s
        overdue = [prompt.entry.place for prompt in self if prompt.entry.overtaken_s >= bound_s]
        self._overdue = frozenset(overdue)
        self._strict_prefix = max(overdue, default=None) if self.short_of_room else None

    def in_strict_prefix(self, place: Place) -> bool:
        """Return whether the request at ``place`` is in the strict prefix, and therefore served in the order
        of places."""
        return place in self._overdue or (self._strict_prefix is not None and place <= self._strict_prefix)

    # -- time ----------------------------------------------------------------------------------------

    def step_begins(self, plan: StepPlan, sakes: Mapping[RequestId, Place], kept_out: Place | None) -> None:
        """Record that a step begins, and for which requests. ``sakes`` has, for an admitted prompt, the
        request for which it is computed, if that is another one. ``kept_out`` is as in :class:`Spent`."""
        spent, behind = Spent(short=self.short_of_room, kept_out=kept_out), 0.0
        spent.first = min((prompt.entry.place for prompt in self if not prompt.promised), default=None)
        for item in (*plan.batch, *plan.beside):
            if item.sequence in self:
                place = sakes.get(item.sequence.request_id, item.sequence.place)
                spent.prompts[place] = spent.prompts.get(place, 0) + item.tokens
                behind += item.tokens * item.start
        tokens = sum(spent.prompts.values())
        self._step = _PromptStep(self._clock(), bool(plan), tokens, behind / max(tokens, 1), spent)

    def step_ended(self, admitted: Iterable[Sequence]) -> None:
        """Record the end of the last step, unless it was recorded before."""
        step, self._step = self._step, None
        if step is None:
            return
        for sequence in admitted:
            if not sequence.prefills:
                self.forget(sequence)
        took_s = self._clock() - step.at
        if step.busy:
            self._steps_s.append(took_s)
        if step.tokens:
            self._pace.append((step.tokens, step.behind, took_s))
        if not self._by_cache:
            return
        for waits in (False, True):
            entries = [prompt.entry for prompt in self if prompt.waits is waits]
            passed(entries, step.spent, took_s, admitted=not waits)

    @property
    def measured(self) -> bool:
        """Return whether the speed of prefill was measured."""
        return bool(self._pace)

    @property
    def step_s(self) -> float:
        """Return how long a step takes; 0 before a measurement."""
        return sum(self._steps_s) / max(len(self._steps_s), 1)

    def speed(self) -> Prefill:
        """Return the speed of prefill beside everything else. The dependence on length is measured on steps
        that run alone, and the speed on all steps."""
        shape = self._prefill() or _ANY_SPEED
        expected_s = sum(shape.seconds(tokens, behind) for tokens, behind, _ in self._pace)
        if not expected_s:
            return shape
        pace = sum(took_s for _, _, took_s in self._pace) / expected_s
        return Prefill(shape.token_s * pace, shape.pair_s * pace)
