"""The sequences of an engine that have not ended."""

from __future__ import annotations

from collections.abc import Iterator

from tierstore_engine.drafting import Drafter
from tierstore_engine.images import PromptImages
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.limits import Limits
from tierstore_engine.outputs import RequestId
from tierstore_engine.sampling import SamplingParams
from tierstore_engine.scheduler import Scheduler
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.tokenizer import Tokenizer


class Roster:
    """Creates sequences, forks them and drops them.

    A fork is either in the scheduler's queues, or *follows* another sequence: it waits for that sequence's
    next token, to share its pages then.
    """

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
        # the followers, by the sequence with which they will share pages
        self._followers: dict[RequestId, list[Sequence]] = {}
        self._next_id = 0
        self._preemptions = 0  # of ended sequences

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def get(self, request_id: RequestId) -> Sequence | None:
        return self._sequences.get(request_id)

    @property
    def preemptions(self) -> int:
        """Return the number of preemptions, including those of ended sequences."""
        return self._preemptions + sum(sequence.tally.preemptions for sequence in self)

    @property
    def following(self) -> int:
        """Return how many sequences follow others."""
        return sum(map(len, self._followers.values()))

    def followed(self, sequence: Sequence) -> bool:
        return sequence.request_id in self._followers

    def new(
        self,
        tokens: list[int],
        params: SamplingParams,
        added: float,
        adapter: str = "",
        images: PromptImages | None = None,
    ) -> Sequence:
        """Create a sequence for a new request, with the adapter of a digest. It is in no queue yet."""
        config, connector = self._limits.config, self._keeper.connector
        prompt = connector.prompt(tokens if images is None else images.words, adapter=adapter)
        if images is not None and images.inputs:
            prompt.place(images.inputs)
        eos = () if params.ignore_eos else config.eos_ids
        sequence = Sequence(
            self._new_id(),
            prompt,
            tokens,
            params,
            self._tokenizer.detokenizer(tokens),
            max_tokens=self._limits.max_tokens(len(tokens), params.max_new_tokens),
            stop_ids=frozenset((*params.stop_token_ids, *eos)),
            added=added,
        )
        sequence.adapter = adapter
        sequence.images = images
        self._sequences[sequence.request_id] = sequence
        return sequence

    def queue(self, sequence: Sequence) -> None:
        """Add the sequence to the scheduler's queues."""
        self._scheduler.add(sequence)

    def fork(self, parent: Sequence, *, seed: int | None) -> Sequence:
        """Fork ``parent``. The fork has no pages and is in no queue yet."""
        child = parent.fork(self._new_id(), seed=seed)
        self._sequences[child.request_id] = child
        return child

    def follow(self, parent: Sequence, *, seed: int | None) -> Sequence:
        """Fork ``parent``. The fork follows ``parent``, or the sequence that ``parent`` itself follows."""
        child = self.fork(parent, seed=seed)
        leaders = (leader for leader, followers in self._followers.items() if parent in followers)
        self._followers.setdefault(next(leaders, parent.request_id), []).append(child)
        return child

    def share_with_followers(self, sequence: Sequence) -> list[Sequence]:
        """Let the followers of a completely computed ``sequence`` continue, with its pages. Return them."""
        followers = self._followers.pop(sequence.request_id, [])
        for child in followers:
            self.share(sequence, child)
        return followers

    def share(self, parent: Sequence, child: Sequence) -> None:
        """Let a fork continue with its parent's pages, or wait for room like a parked sequence."""
        if self._keeper.share(parent, child):
            self._scheduler.adopt(child)
        else:
            self._scheduler.add(child)

    def drop(self, sequence: Sequence, *, save: bool = True) -> None:
        """Drop a sequence that has ended: save its pages unless ``save`` is False, and release them."""
        del self._sequences[sequence.request_id]
        self._preemptions += sequence.tally.preemptions
        if self._drafter is not None:
            self._drafter.forget(sequence)
        for following in self._followers.values():
            if sequence in following:
                following.remove(sequence)  # a follower has no page yet and is in no queue
                sequence.state = SequenceState.FINISHED
                return
        self._scheduler.remove(sequence, save=save)
        # One follower computes its tokens itself, and the other followers then follow this one.
        followers = self._followers.pop(sequence.request_id, [])
        if followers:
            self._scheduler.add(followers[0])
            self._followers[followers[0].request_id] = followers[1:]

    def _new_id(self) -> RequestId:
        self._next_id += 1
        return RequestId(self._next_id - 1)
