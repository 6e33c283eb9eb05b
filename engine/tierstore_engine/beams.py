"""Beam search: find the likeliest whole continuations instead of the likeliest next tokens.

The search has ``width`` *beams*: sequences that share the pages of their common beginning and continue at the
same time. In each step, the likeliest next tokens of every beam are candidates. The candidates with the best
sums of log probabilities become the next beams. One beam may therefore be continued twice (it is forked), and
another not at all (it is dropped). A continuation that ends is a *hypothesis*, scored by::

    sum of log probabilities / generated tokens ** length_penalty

The rules (how many candidates are considered, which of them may end, when the search is done) are those of
Hugging Face transformers, so that results can be compared.

:class:`BeamSearch` decides, without pages, sequences or a model. :class:`BeamGroup` maps beams to sequences
of an engine. :class:`Beams` forks and drops the sequences.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tierstore.tiers.beyond import OverflowFailedError
from tierstore.types import checked_session
from tierstore_engine.errors import RequestError
from tierstore_engine.limits import Limits
from tierstore_engine.outputs import RequestId, TokenLogprob
from tierstore_engine.roster import Roster
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.sequence import Sequence
from tierstore_engine.tokenizer import Tokenizer

EarlyStopping: TypeAlias = Literal["never"] | bool


@dataclass(frozen=True, slots=True)
class BeamParams:
    """The parameters of a beam search. Raises :class:`RequestError` for invalid values.

    ``length_penalty`` above 0 favors long hypotheses, below 0 short ones. ``early_stopping`` True ends the
    search with the first ``width`` hypotheses. False ends it when no beam would have a better score if it
    ended now. ``"never"`` ends it when no beam can reach a better score at any length. Unless ``ignore_eos``
    is set, an end-of-sequence id of the model ends a hypothesis, and is its last token.
    """

    width: int = 4
    max_new_tokens: int = 128
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.width < 1:
            raise RequestError(f"the width of a beam search must be at least 1, got {self.width}")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.early_stopping not in (True, False, "never"):
            raise RequestError(f"early_stopping must be true, false or 'never', got {self.early_stopping!r}")


@dataclass(frozen=True, slots=True)
class BeamHypothesis:
    """One result: the generated tokens (including an end-of-sequence token), their text and score."""

    text: str
    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """A next beam: beam ``parent`` (its number before the step), continued with ``token``."""

    parent: int
    token: int


@dataclass(frozen=True, slots=True)
class _Beam:
    tokens: tuple[int, ...]
    logprob: float  # the sum of the log probabilities of its tokens


class BeamSearch:
    """The state of one search, which begins with one beam, the prompt itself. Pure.

    ``max_tokens`` is the largest number of tokens of a hypothesis.
    """

    def __init__(self, params: BeamParams, *, eos_ids: Ints[int], max_tokens: int) -> None:
        self._params = params
        self._eos_ids = frozenset(() if params.ignore_eos else eos_ids)
        self._max_tokens = max_tokens
        self._beams = [_Beam((), 0.0)]
        self._ended: list[tuple[float, tuple[int, ...]]] = []  # best first
        self.done = False

    @property
    def width(self) -> int:
        return self._params.width

    @property
    def candidates(self) -> int:
        """Return how many next tokens each beam must offer, so that ``width`` candidates can continue even if
        all other candidates end."""
        return max(2, 1 + len(self._eos_ids)) * self._params.width

    @property
    def hypotheses(self) -> list[tuple[float, tuple[int, ...]]]:
        """Return the scores and tokens of the hypotheses, best first. They are complete when ``done`` is
        set."""
        return list(self._ended)

    def advance(self, offers: Ints[Ints[TokenLogprob]]) -> list[Continuation]:
        """Do one step with the likeliest tokens of each beam, likeliest first. Return the next beams, best
        first.

        If no better hypothesis can follow, set ``done`` and return no beams.
        """
        ranked = sorted(
            (
                (beam.logprob + offer.logprob, parent, offer.token)
                for parent, (beam, offered) in enumerate(zip(self._beams, offers, strict=True))
                for offer in offered
            ),
            key=lambda candidate: -candidate[0],
        )[: self.candidates]
        width, length = self._params.width, len(self._beams[0].tokens) + 1
        going_on: list[tuple[Continuation, _Beam]] = []
        for rank, (logprob, parent, token) in enumerate(ranked):
            tokens = (*self._beams[parent].tokens, token)
            if token not in self._eos_ids and length < self._max_tokens:
                going_on.append((Continuation(parent, token), _Beam(tokens, logprob)))
            elif rank < width:
                self._ended.append((self._score(logprob, length), tokens))
        self._ended = sorted(self._ended, key=lambda hypothesis: -hypothesis[0])[:width]
        del going_on[width:]
        self.done = not going_on or self._settled(going_on[0][1])
        if self.done:
            return []
        self._beams = [beam for _, beam in going_on]
        return [continuation for continuation, _ in going_on]

    def _score(self, logprob: float, tokens: int) -> float:
        penalty: float = float(tokens) ** self._params.length_penalty
        return logprob / penalty

    def _settled(self, best: _Beam) -> bool:
        """Return whether there are enough hypotheses, and ``best`` cannot improve on them."""
        params = self._params
        if len(self._ended) < params.width:
            return False
        if params.early_stopping is True:
            return True
        patient = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if patient else len(best.tokens)
        return self._score(best.logprob, length) <= self._ended[-1][0]


@dataclass(slots=True)
class BeamGroup:
    """A search, with the sequence of each beam. ``offers`` has the candidates of the current step. The group
    advances when all of its sequences have candidates, and ends as a whole if one sequence cannot
    continue."""

    search: BeamSearch
    members: list[Sequence]
    offers: dict[RequestId, tuple[TokenLogprob, ...]] = field(default_factory=dict)
    error: str | None = None  # why the search has ended without a result

    @property
    def complete(self) -> bool:
        return all(member.request_id in self.offers for member in self.members)

    def advance(self) -> list[Continuation]:
        """Return the next beams; see :class:`BeamSearch`."""
        moves = self.search.advance([self.offers[member.request_id] for member in self.members])
        self.offers.clear()
        return moves


class Beams:
    """The running beam searches of an engine."""

    def __init__(self, roster: Roster, limits: Limits, max_sequences: int) -> None:
        self._roster = roster
        self._limits = limits
        self._max_sequences = max_sequences
        self._groups: dict[RequestId, BeamGroup] = {}  # the group of each sequence

    def of(self, sequence: Sequence) -> BeamGroup | None:
        """Return the search that has ``sequence`` as a beam, or None."""
        return self._groups.get(sequence.request_id)

    def begin(self, tokens: list[int], params: BeamParams, session: str | None) -> BeamGroup:
        """Queue the first beam of a search. Raises :class:`RequestError` without room for it."""
        started = time.monotonic()
        limits, new_tokens = self._limits, params.max_new_tokens
        most = limits.max_tokens(len(tokens), new_tokens) - len(tokens)
        search = BeamSearch(params, eos_ids=limits.config.eos_ids, max_tokens=most)
        of_beam = SamplingParams(max_new_tokens=new_tokens, logprobs=search.candidates, ignore_eos=True)
        limits.check_prompt(tokens, of_beam)
        limits.check_beams(len(tokens), new_tokens, width=params.width, max_sequences=self._max_sequences)
        session = checked_session(session)
        first = self._roster.new(tokens, of_beam, started)
        first.session = session
        group = self._groups[first.request_id] = BeamGroup(search, [first])
        self._roster.queue(first)
        return group

    def advance(self) -> None:
        """Advance each search if all of its beams have candidates."""
        for group in {id(group): group for group in self._groups.values()}.values():
            if group.complete:
                self._advance(group)

    def end(self, group: BeamGroup) -> None:
        for beam in group.members:
            self._drop(beam)
        group.members = []

    def fail(self, sequence: Sequence, why: str) -> None:
        """End the search that has ``sequence`` as a beam, if there is one, without a result."""
        group = self.of(sequence)
        if group is not None:
            group.error = why
            self.end(group)

    def hypotheses(self, group: BeamGroup, tokenizer: Tokenizer) -> list[BeamHypothesis]:
        """Return the result of a search that is done. Raises :class:`OverflowFailedError` if it failed."""
        if group.error is not None:
            raise OverflowFailedError(f"the beam search has ended: {group.error}")
        eos = self._limits.config.eos_ids
        return [
            BeamHypothesis(tokenizer.decode(each[:-1] if each[-1] in eos else each), each, score)
            for score, each in group.search.hypotheses
        ]

    def end_all(self) -> None:
        for group in list(self._groups.values()):
            self.end(group)

    def _advance(self, group: BeamGroup) -> None:
        parents, moves = group.members, group.advance()
        going_on = {move.parent for move in moves}
        group.members = []
        for place, parent in enumerate(parents):
            if place not in going_on:
                self._drop(parent)
        for move in moves:
            beam = parents[move.parent]
            if beam in group.members:  # this beam is continued by two candidates
                beam = self._fork(beam, group)
            group.members.append(beam)
        for beam, move in zip(group.members, moves, strict=True):
            beam.extend(move.token)

    def _fork(self, parent: Sequence, group: BeamGroup) -> Sequence:
        child = self._roster.fork(parent, seed=None)
        self._groups[child.request_id] = group
        if parent.held:
            self._roster.share(parent, child)
        else:
            self._roster.queue(child)  # the parent was parked meanwhile, so the child waits, too
        return child

    def _drop(self, beam: Sequence) -> None:
        del self._groups[beam.request_id]
        self._roster.drop(beam, save=False)
