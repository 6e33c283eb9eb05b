"""Prompts that are not computed yet: what is held of each one, how fast prompts are computed, and so whose
turn is next. The scheduler decides who is admitted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from tierstore.planner import Prefill
from tierstore_connectors.base import ConnectorHit
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.look_ahead import LookAhead
from tierstore_engine.ordering import Place, Turn, WaitingEntry, common_chunks, turns
from tierstore_engine.outputs import RequestId
from tierstore_engine.overtaking import Spent, passed
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings

_ORDERED = 128  # requests that are put in order; those behind them wait
_LOOKUPS = 8  # of requests that wait, at a step
_STALE_S = 1.0  # after that one is looked up again
_PACE_STEPS = 64
_ANY_SPEED = Prefill(1e-4)  # as long as none was measured: what counts is the order


@dataclass(slots=True, eq=False)
class PendingPrompt:
    """A sequence whose prompt is not computed yet, and what the last lookup found: a load of ``load_s``
    seconds, and ``shared_pages`` that are in HBM and need no room."""

    sequence: Sequence
    entry: WaitingEntry
    shared_pages: int = 0
    load_s: float = 0.0
    looked_at: float = -math.inf

    @property
    def waits(self) -> bool:
        """Whether it has no page yet."""
        return self.sequence.state is SequenceState.WAITING

    @property
    def promised(self) -> bool:
        """Whether another engine's pages are waited for."""
        return self.sequence.promise is not None


@dataclass(slots=True)
class _PromptStep:
    """The last step: when it was planned, what it computed of prompts (``tokens`` after ``behind`` others),
    and what it was spent on as others see it."""

    at: float
    busy: bool
    tokens: int
    behind: float
    spent: Spent


class PendingPrompts:
    """The prompts of all sequences that wait, or whose prompts are being computed."""

    def __init__(
        self,
        keeper: PageKeeper,
        ahead: LookAhead,
        settings: EngineSettings,
        prefill: Callable[[], Prefill | None],
        clock: Callable[[], float],
    ) -> None:
        self.longest_overtaken_s = 0.0  # of those that have their first token
        self.short_of_room = False  # whether slots or pages do not hold all that waits
        self._keeper = keeper
        self._ahead = ahead
        self._settings = settings
        self._by_cache = settings.schedule == "cache"
        self._prefill = prefill
        self._clock = clock
        self._prompts: dict[RequestId, PendingPrompt] = {}
        self._overdue: frozenset[Place] = frozenset()  # those that may not be overtaken any more
        self._strict_prefix: Place | None = None  # up to here everyone comes by place
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
        """It waits for its prompt to be computed, or to be had again."""
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
        """Its prompt is computed, or it goes. What it has computed is held for the others."""
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
        """Leading tokens that both have, in full chunks."""
        return common_chunks(one.prompt.keys, other.prompt.keys) * self._keeper.chunk_tokens

    # -- what is held --------------------------------------------------------------------------------

    def look_up(self, prompt: PendingPrompt, hit: ConnectorHit | None = None) -> int:
        """Note what is held of a prompt now, by ``hit`` or a lookup of its own. Return how many tokens fewer
        that is than was known."""
        found = self._keeper.look_up(prompt.sequence) if hit is None else hit
        plan = self._keeper.planned(prompt.sequence, found)
        in_hbm = min(found.by_tier.get("hbm", 0), plan.tokens)
        if hit is None:
            found.release()
        gone = prompt.entry.held - plan.tokens
        prompt.entry.held, prompt.load_s = plan.tokens, plan.load_s
        prompt.shared_pages, prompt.looked_at = in_hbm // self._keeper.chunk_tokens, self._clock()
        return gone

    def refresh(self, prompts: Iterable[PendingPrompt]) -> None:
        """Look up those that are new, and those of which it was long ago, a few at a time."""
        now = self._clock()
        stale = [prompt for prompt in prompts if prompt.waits and now - prompt.looked_at > _STALE_S]
        stale.sort(key=lambda prompt: prompt.looked_at)
        for prompt in stale[:_LOOKUPS]:
            self.look_up(prompt)

    # -- whose turn is next --------------------------------------------------------------------------

    def listed(self, admitted: Items[Sequence], waiting: Items[Sequence]) -> list[PendingPrompt]:
        """Those that are looked at: all that are admitted, and the first that wait, for nothing promised."""
        first = [s for s in waiting[:_ORDERED] if not self._ahead.promised(s)]
        prompts = [self.of(s) for s in (*(s for s in admitted if s in self), *first)]
        for prompt in prompts:
            prompt.entry.held = max(prompt.entry.held, prompt.sequence.computed)
        return prompts

    def order(self, prompts: Iterable[PendingPrompt]) -> Iterator[Turn]:
        """Whose turn is next; see :func:`~tierstore_engine.ordering.turns`."""
        return turns(
            [prompt.entry for prompt in prompts],
            self.speed(),
            chunk_tokens=self._keeper.chunk_tokens,
            bound_s=self._settings.overtake_s if self._by_cache else 0.0,
            now_s=self._clock(),
            strict_prefix=self._strict_prefix if self._by_cache else None,
        )

    def form_line(self, sequences: Items[Sequence]) -> None:
        """Say who of all ``sequences`` is in line."""
        pages = sum(self._keeper.pages_for(sequence.max_tokens) for sequence in sequences)
        self.short_of_room = (
            len(sequences) > self._settings.max_sequences or pages > self._keeper.connector.pool.target
        )
        bound_s = self._settings.overtake_s
        overdue = [prompt.entry.place for prompt in self if prompt.entry.overtaken_s >= bound_s]
        self._overdue = frozenset(overdue)
        self._strict_prefix = max(overdue, default=None) if self.short_of_room else None

    def in_strict_prefix(self, place: Place) -> bool:
        """Whether the request at ``place`` is served by its place."""
        return place in self._overdue or (self._strict_prefix is not None and place <= self._strict_prefix)

    # -- time ----------------------------------------------------------------------------------------

    def step_begins(self, spent: Spent, behind: float, *, busy: bool) -> None:
        """A step is about to be computed. ``behind`` is the sum, over its prompt tokens, of those before
        them; ``busy``: it computes anything."""
        spent.first = min((prompt.entry.place for prompt in self if not prompt.promised), default=None)
        tokens = sum(spent.prompts.values())
        self._step = _PromptStep(self._clock(), busy, tokens, behind / max(tokens, 1), spent)

    def step_ended(self, admitted: Iterable[Sequence]) -> None:
        """The last step has ended, if that was not said before."""
        step, self._step = self._step, None
        if step is None:
            return
        for sequence in admitted:
            if sequence.remaining <= 1:
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
        """Whether it is known how fast prompts are computed."""
        return bool(self._pace)

    @property
    def step_s(self) -> float:
        """How long a step takes; 0 as long as none was measured."""
        return sum(self._steps_s) / max(len(self._steps_s), 1)

    def speed(self) -> Prefill:
        """How fast prompts are computed beside everything else: the shape is measured on lone steps, the pace
        on all."""
        shape = self._prefill() or _ANY_SPEED
        expected_s = sum(shape.seconds(tokens, behind) for tokens, behind, _ in self._pace)
        if not expected_s:
            return shape
        pace = sum(took_s for _, _, took_s in self._pace) / expected_s
        return Prefill(shape.token_s * pace, shape.pair_s * pace)
