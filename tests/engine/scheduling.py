"""A scheduler over a real pool, stepped without a model: tokens come from nowhere, and time from what a step
computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass

from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.base import Connector
from tierstore_connectors.bundled import NoStore
from tierstore_engine.batch import Work, finishing
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import RequestId
from tierstore_engine.sampling import Choice, SamplingParams
from tierstore_engine.scheduler import Scheduler
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import EngineSettings
from tierstore_engine.tokenizer import ByteTokenizer

CHUNK = 4
POOL_PAGES = 24
SPEC = KVSpec.uniform(layers=1, kv_heads=1, head_dim=1, dtype="float32", chunk_tokens=CHUNK)
IDENTITY = Identity.of(SPEC, model="none")
NEXT = Choice(token=1)
MOST_STEPS = 20_000


@dataclass(frozen=True)
class Arrival:
    """A request that comes at ``at`` seconds."""

    at: float
    prompt: int
    answer: int
    priority: int = 0


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: its own, and of each token of a prompt or of an answer."""

    step: float = 0.0
    prompt: float = 1.0
    answer: float = 1.0


@dataclass(frozen=True)
class Step:
    """What was computed from ``at`` on: ``answers`` by their requests, ``again`` tokens a second time."""

    at: float
    seconds: float
    answers: tuple[RequestId, ...]
    again: int


class Bench:
    """``now_s`` goes on by ``cost``. Each step is checked, and kept in ``steps``."""

    def __init__(
        self,
        settings: EngineSettings,
        *,
        pool_pages: int = POOL_PAGES,
        cost: Cost | None = None,
        connector: Connector | None = None,
    ) -> None:
        """``connector`` None: over ``pool_pages`` pages (of a pool that could have more), without a store."""
        self.connector = connector or NoStore(PagePool(SPEC, pool_pages, most=4 * pool_pages), IDENTITY)
        self.settings = settings
        self.keeper = PageKeeper(self.connector, settings)
        self.cost = cost or Cost()
        self.now_s = 0.0
        self.scheduler = Scheduler(self.keeper, settings, clock=lambda: self.now_s)
        self.sequences: list[Sequence] = []
        self.steps: list[Step] = []
        self.began_s: dict[RequestId, float] = {}
        self.first_token_s: dict[RequestId, float] = {}
        self.ended_s: dict[RequestId, float] = {}

    def add(self, prompt_tokens: int, new_tokens: int, *, priority: int = 0, token: int = 0) -> Sequence:
        """``token`` is what its prompt consists of."""
        tokens = [token] * prompt_tokens
        sequence = Sequence(
            RequestId(len(self.sequences)),
            self.connector.prompt(tokens),
            tokens,
            SamplingParams(max_new_tokens=new_tokens),
            ByteTokenizer().detokenizer(),
            max_tokens=prompt_tokens + new_tokens,
            stop_ids=frozenset(),
            added=0.0,
        )
        sequence.priority = priority
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def serve(self, arrivals: Items[Arrival]) -> None:
        """Until all have ended, which they have to."""
        coming = deque(arrivals)
        while coming or self.scheduler.has_work:
            if not self.scheduler.has_work:
                self.now_s = max(self.now_s, coming[0].at)
            while coming and coming[0].at <= self.now_s:
                arrival = coming.popleft()
                self.add(arrival.prompt, arrival.answer, priority=arrival.priority)
            assert self.step(), "nothing is loading, so there is always something to compute"
            assert len(self.steps) < MOST_STEPS

    def step(self) -> list[Work]:
        plan = self.scheduler.plan()
        assert not plan.beside  # copies in this pool are done when the call returns
        work = plan.batch
        self.check(work)
        ending = finishing(work)
        answers = [item.sequence.request_id for item in work if item.stop > item.sequence.prompt_tokens]
        again = sum(item.sequence.repeats(item.stop) for item in work)
        tokens = sum(item.tokens for item in work)
        decoded = sum(item.tokens == 1 and item.start >= item.sequence.prompt_tokens for item in work)
        for item in work:
            self.began_s.setdefault(item.sequence.request_id, self.now_s)
            item.sequence.advance(item.stop)
            self.keeper.save(item.sequence)
        cost = self.cost
        seconds = cost.step + cost.answer * decoded + cost.prompt * (tokens - decoded)
        self.steps.append(Step(self.now_s, seconds, tuple(answers), again))
        self.now_s += seconds
        self.scheduler.ended()
        for item in ending:
            self.first_token_s.setdefault(item.sequence.request_id, self.now_s)
            item.sequence.append(NEXT)
            if item.sequence.finish_reason is not None:
                self.ended_s[item.sequence.request_id] = self.now_s
                self.scheduler.remove(item.sequence)
        return work

    def check(self, work: list[Work]) -> None:
        if not self.connector.keeps:  # else pages are shared, and kept
            held = [page for sequence in self.sequences for table in sequence.tables for page in table.pages]
            assert len(set(held)) == len(held)
            assert len(held) + self.connector.available() == self.connector.pool.capacity
        assert len(self.scheduler.admitted) <= self.settings.max_sequences
        assert sum(item.tokens for item in work) <= self.settings.batch_tokens
        assert len({item.sequence.request_id for item in work}) == len(work)
        for item in work:
            sequence = item.sequence
            assert sequence.state is SequenceState.RUNNING
            assert item.start == sequence.computed < item.stop <= len(sequence.tokens)
            assert item.stop <= len(sequence.tables[0].pages) * CHUNK
            # A chunk ends at a multiple of its size or at the end, wherever it began.
            assert item.stop % self.settings.prefill_chunk == 0 or item.stop == len(sequence.tokens)
        for sequence in self.scheduler.waiting:
            assert not sequence.tables
            assert sequence.computed == 0
