"""Every accepted request ends, however few pages there are, and is computed from the right ones.

The real scheduler runs over real pools and a real store. Only the model is made up: it writes each token and
its position into the pages of every layer group, and a running digest into states. Before each step it checks
all that its tokens would read. Loads, settings and pools are drawn at random, down to the smallest pool that
the engine accepts for the largest request.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.portions import portion
from tierstore.groups import GroupRule, Past
from tierstore.keys import Identity
from tierstore.spec import KVSpec, LayerGroup, LayerKind
from tierstore.tiers.group_pools import fits, open_group_pools
from tierstore.tiers.hbm import PagePool
from tierstore_connectors.base import Connector
from tierstore_connectors.bundled import NoStore, open_connector
from tierstore_engine.batch import Work, finishing
from tierstore_engine.keeper import PageKeeper
from tierstore_engine.outputs import RequestId
from tierstore_engine.sampling import Choice, SamplingParams
from tierstore_engine.scheduler import Scheduler
from tierstore_engine.sequence import Sequence, SequenceState
from tierstore_engine.settings import PLANS, SCHEDULES, EngineSettings
from tierstore_engine.tokenizer import ByteTokenizer

CHUNK = 8
MOST_FRAMES = 400
LOADS = {"no store": 60, "store": 14, "tiny store": 8}  # of each kind and schedule, in the soak
HOST_BYTES = {"store": 8 << 20, "tiny store": 64 << 10}
MOST_IDLE_PLANS = 3_000  # one after the other; each waits a millisecond


def group(kind: LayerKind, layers: tuple[int, ...], *, window: int | None = None) -> LayerGroup:
    if kind is LayerKind.RECURRENT_STATE:
        return LayerGroup(kind, layers, state_bytes=200)
    return LayerGroup(kind, layers, 1, 8, window=window)


FULL = group(LayerKind.FULL_ATTENTION, (0,))
DEEP = group(LayerKind.FULL_ATTENTION, (0, 1, 2))
LATENT = group(LayerKind.MLA_LATENT, (0,))
WINDOW = group(LayerKind.SLIDING_WINDOW, (3,), window=19)
WINDOWS = group(LayerKind.SLIDING_WINDOW, (3, 4, 5), window=32)
CHUNKED = group(LayerKind.CHUNKED_ATTENTION, (6,), window=28)
STATES = group(LayerKind.RECURRENT_STATE, (7, 8))

KINDS: Mapping[str, tuple[LayerGroup, ...]] = {
    "full": (FULL,),
    "latent": (LATENT,),
    "full and window": (DEEP, WINDOW),
    "full and wide window": (FULL, WINDOWS),
    "full and chunked": (DEEP, CHUNKED),
    "full and state": (FULL, STATES),
    "latent and window": (LATENT, WINDOWS),
    "full, window and state": (DEEP, WINDOW, STATES),
    "full, window and chunked": (FULL, WINDOWS, CHUNKED),
}


def spec_of(kind: str) -> KVSpec:
    return KVSpec(KINDS[kind], "float32", CHUNK)


@dataclass(frozen=True)
class Request:
    """A request that comes before plan number ``at``. It is cancelled before plan ``cancelled``, or never if
    that is None."""

    at: int
    tokens: list[int]
    answer: int
    priority: int
    cancelled: int | None


class FakeModel:
    """Writes tokens into pages, and checks those that a step reads."""

    def __init__(self, connector: Connector) -> None:
        self._pools = connector.pools
        self._rules = connector.rules

    def compute(self, work: list[Work]) -> None:
        for item in work:
            for number, (pool, rule) in enumerate(zip(self._pools, self._rules, strict=True)):
                sequence = item.sequence
                pages = sequence.tables[number].pages
                if rule.past is Past.STATE:
                    self._go_on(pool, pages[0], item)
                else:
                    self._check(pool, rule, pages, item)
                    self._write(pool, pages, item)

    def _check(self, pool: PagePool, rule: GroupRule, pages: list[int], item: Work) -> None:
        positions = np.asarray(rule.needed(item.start), np.int64)
        found = self._at(pool, pages, positions)
        right = expected(item.sequence, positions)
        assert np.array_equal(found, right), f"{found} are not {right}"

    def _write(self, pool: PagePool, pages: list[int], item: Work) -> None:
        for position in range(item.start, item.stop):
            row = self._row(pool, pages[position // CHUNK])
            row[position % CHUNK] = item.sequence.tokens[position] * 4096 + position

    def _go_on(self, pool: PagePool, page: int, item: Work) -> None:
        row, tokens = self._row(pool, page), item.sequence.tokens
        if item.start:
            assert row[0] == digest(tokens[: item.start])
        row[0] = digest(tokens[: item.stop])

    def _at(self, pool: PagePool, pages: list[int], positions: np.ndarray) -> np.ndarray:
        if not len(positions):
            return positions
        places = np.asarray(pages)[positions // CHUNK]
        assert (places >= 0).all()
        return pool.array.view(np.int32)[places, positions % CHUNK]

    def _row(self, pool: PagePool, page: int) -> np.ndarray:
        assert page >= 0
        return pool.array[page].view(np.int32)


def expected(sequence: Sequence, positions: np.ndarray) -> np.ndarray:
    return np.asarray(sequence.tokens)[positions] * 4096 + positions


def digest(tokens: list[int]) -> int:
    return hash(tuple(tokens)) & 0x7FFFFFFF


def drawn(chance: random.Random) -> list[Request]:
    stems = [[chance.randrange(3, 90) for _ in range(64)] for _ in range(2)]
    requests = []
    at = 0
    for _ in range(chance.randint(1, 9)):
        at += chance.choice([0, 0, 1, 5, 30])
        stem = stems[chance.randrange(2)][: chance.choice([0, 0, 8, 17, 40, 64])]
        tokens = stem + [chance.randrange(3, 90) for _ in range(chance.choice([1, 4, 9, 30, 60]))]
        cancelled = at + chance.randint(0, 60) if chance.random() < 0.08 else None
        answer = chance.choice([1, 2, 8, 30, 60])
        requests.append(Request(at, tokens, answer, chance.choice([0, 0, 0, -1, 1]), cancelled))
    return requests


class Load:
    """Requests over one connector, until all have ended."""

    def __init__(self, seed: int, chance: random.Random, connector: Connector, schedule: str) -> None:
        self.seed = seed
        self.connector = connector
        self.requests = drawn(chance)
        self.settings = EngineSettings(
            prefill_chunk=chance.choice([8, 16, 32]),
            max_sequences=chance.choice([1, 2, 3, 8]),
            schedule=schedule,
            overtake_s=chance.choice([0.0, 5.0, 60.0]),
            plan=chance.choice(PLANS),
            whole_windows=bool(seed % 2),
        )
        self.keeper = PageKeeper(connector, self.settings, checkpoint_tokens=chance.choice([0, 0, 16]))
        self.now_s = 0.0
        self.scheduler = Scheduler(self.keeper, self.settings, clock=lambda: self.now_s)
        self.model = FakeModel(connector)
        self.sequences: dict[int, Sequence] = {}
        self.ended: set[int] = set()
        self.large_pages = self._least_large() + chance.choice([0, 0, 1, 2, 5, 20, 100])

    def _least_large(self) -> int:
        """The smallest pool in which the engine accepts all of these."""
        tokens = max(len(request.tokens) + request.answer for request in self.requests) - 1
        counts = self.keeper.peaks(tokens)
        return next(n for n in range(1, 1000) if fits(self.connector.pools, counts, large_pages=n))

    def run(self) -> None:
        plans = idle = 0
        while len(self.ended) < len(self.requests):
            for number, request in enumerate(self.requests):
                if request.at <= plans and number not in self.sequences:
                    self._add(number, request)
                if request.cancelled == plans and number not in self.ended:
                    self.scheduler.remove(self.sequences[number])
                    self.ended.add(number)
            if not self.scheduler.has_work:
                plans += 1
                continue
            work = self._step()
            idle = 0 if work else idle + 1
            assert idle < MOST_IDLE_PLANS, f"nothing is computed any more: {self}"
            if not work:
                assert self.connector.keeps, f"without a store there is nothing to wait for: {self}"
                self.scheduler.wait()
                self.now_s += 0.001
            plans += 1
            assert self.preemptions() <= len(self.requests) ** 2 + 2, f"too many preemptions: {self}"

    def preemptions(self) -> int:
        return sum(sequence.tally.preemptions for sequence in self.sequences.values())

    def __repr__(self) -> str:
        scheduler = self.scheduler
        return (
            f"load {self.seed}: {self.large_pages} large pages, {self.preemptions()} preemptions, "
            f"{self.settings}, admitted {scheduler.admitted}, waiting {scheduler.waiting}"
        )

    def _add(self, number: int, request: Request) -> None:
        sequence = Sequence(
            RequestId(number),
            self.connector.prompt(request.tokens),
            request.tokens,
            SamplingParams(max_new_tokens=request.answer),
            ByteTokenizer().detokenizer(),
            max_tokens=len(request.tokens) + request.answer,
            stop_ids=frozenset(),
            added=0.0,
        )
        sequence.priority = request.priority
        self.sequences[number] = sequence
        self.scheduler.add(sequence)

    def _step(self) -> list[Work]:
        plan = self.scheduler.plan()
        work = [*plan.batch, *plan.beside]
        ending = finishing(work)
        self.model.compute(work)
        for item in work:
            item.sequence.advance(item.stop)
            self.keeper.save(item.sequence)
        self.now_s += 1.0 + sum(item.tokens for item in work)
        self.scheduler.ended()
        for item in ending:
            sequence = item.sequence
            sequence.append(Choice(token=3 + digest(sequence.tokens) % 80))
            if sequence.finish_reason is not None:
                self.scheduler.remove(sequence)
                self.ended.add(sequence.request_id)
        return work

    def check(self) -> None:
        for number, request in enumerate(self.requests):
            sequence = self.sequences[number]
            assert sequence.state is SequenceState.FINISHED
            if request.cancelled is None or len(sequence.tokens) == sequence.max_tokens:
                tokens = list(request.tokens)
                for _ in range(request.answer):
                    tokens.append(3 + digest(tokens) % 80)
                assert sequence.tokens == tokens


def pools_of(kind: str, large_pages: int) -> list[PagePool]:
    parts = spec_of(kind).split()
    if len(parts) == 1:
        return [PagePool(parts[0], large_pages)]
    large = open_group_pools(parts, 1 << 20)[0].large_pages.large_bytes
    return list(open_group_pools(parts, large_pages * large))


class Connectors:
    """One connector of each kind, whose pools are resized for each load."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[tuple[str, str], Connector] = {}

    def __call__(self, kind: str, store: str) -> Connector:
        if store == "no store":
            return NoStore(pools_of(kind, MOST_FRAMES), Identity.of(spec_of(kind), model="made up"))
        if (kind, store) not in self._open:
            spec = spec_of(kind)
            pools = pools_of(kind, MOST_FRAMES)
            self._open[kind, store] = open_connector(
                spec,
                Identity.of(spec, model="made up"),
                pool_pages=[pool.num_pages // len(pools) for pool in pools],
                store=str(self._folder / f"{store}-{kind}"),
                host_bytes=HOST_BYTES[store],
                disk_bytes=64 << 20,
            )
        return self._open[kind, store]

    def close(self) -> None:
        for connector in self._open.values():
            connector.close()


@pytest.fixture(scope="module")
def connectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connectors]:
    with closing(Connectors(tmp_path_factory.mktemp("stores"))) as made:
        yield made


@pytest.mark.parametrize("part", portion(14, 1))
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("store", LOADS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_request_ends(kind: str, store: str, schedule: str, part: int, connectors: Connectors) -> None:
    """``part`` is the inverse of how much of the loads is run."""
    for seed in range(-(-LOADS[store] // part)):
        chance = random.Random(f"{kind} {store} {schedule} {seed}")
        connector = connectors(kind, store)
        for number in range(len(connector.pools)):
            connector.evict(connector.pools[number].num_pages, group=number)
        load = Load(seed, chance, connector, schedule)
        connector.resize(load.large_pages * connector.pool.large_pages.large_bytes)
        load.run()
        load.check()
