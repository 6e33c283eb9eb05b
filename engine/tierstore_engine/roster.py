"""The sequences of an engine that have not ended."""

from __future__ import annotations

from collections.abc import Iterator

from tierstore_engine.drafting import Drafter
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.limits import Limits
from tierstore_engine.outputs import RequestId
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.scheduler import Scheduler
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.tokenizer import Tokenizer


class Roster:
    """Makes sequences, forks them and drops them. A fork has a place in the scheduler's queues, or it
    *follows* the sequence whose next token it waits for, to share its pages then."""

    def __init__(
        self,
        keeper: PageKeeper,
        scheduler: Scheduler,
        limits: Limits,
        tokenizer: Tokenizer,
        drafter: Drafter | None,
    ) -> None:
        self._keeper = keeper
        self._scheduler = scheduler
        self._limits = limits
        self._tokenizer = tokenizer
        self._drafter = drafter
        self._sequences: dict[RequestId, Sequence] = {}
        self._followers: dict[RequestId, list[Sequence]] = {}  # by what they are going to share with
        self._next_id = 0
        self._preemptions = 0  # of those that have ended

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    @property
    def preemptions(self) -> int:
        """How often sequences gave way, those that have ended included."""
        return self._preemptions + sum(sequence.tally.preemptions for sequence in self)

    @property
    def following(self) -> int:
        """How many sequences follow others."""
        return sum(map(len, self._followers.values()))

    def followed(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._followers

    def new(self, tokens: list[int], params: SamplingParams, added: float) -> Sequence:
        """A sequence of a new request. It is in no queue yet."""
        config = self._limits.config
        eos = () if params.ignore_eos else config.eos_ids
        sequence = Sequence(
            self._new_id(),
            self._keeper.connector.prompt(tokens),
            tokens,
            params,
            self._tokenizer.detokenizer(tokens),
            max_tokens=self._limits.max_tokens(len(tokens), params.max_new_tokens),
            stop_ids=frozenset((*params.stop_token_ids, *eos)),
            added=added,
        )
        self._sequences[sequence.request_id] = sequence
        return sequence

    def queue(self, sequence: Sequence) -> None:
        """The sequence waits for its turn."""
        self._scheduler.add(sequence)

    def fork(self, parent: Sequence, *, seed: int | None) -> Sequence:
        """A fork of ``parent`` that has neither pages nor a place in a queue yet."""
        child = parent.fork(self._new_id(), seed=seed)
        self._sequences[child.request_id] = child
        return child

    def follow(self, parent: Sequence, *, seed: int | None) -> Sequence:
        """A fork that follows ``parent``, or the one that ``parent`` follows itself."""
        child = self.fork(parent, seed=seed)
        leaders = (leader for leader, followers in self._followers.items() if parent in followers)
        self._followers.setdefault(next(leaders, parent.request_id), []).append(child)
        return child

    def share_with_followers(self, sequence: Sequence) -> list[Sequence]:
        """All of ``sequence`` is computed: its followers go on beside it, with its pages."""
        followers = self._followers.pop(sequence.request_id, [])
        for child in followers:
            self.share(sequence, child)
        return followers

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let a fork go on beside its parent, or wait until there is room, like one that was parked."""
        if self._keeper.share(parent, child):
            self._scheduler.adopt(child)
        else:
            self._scheduler.add(child)

    def drop(self, sequence: Sequence, *, save: bool = True) -> None:
        """A sequence has ended: its pages are saved (or not) and given back."""
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

    def _new_id(self) -> RequestId:
        self._next_id += 1
        return RequestId(self._next_id - 1)
