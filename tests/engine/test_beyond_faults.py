"""A campaign of faults of the overflow file's disk: no token is wrong, and the engine continues to serve.

Each round has an engine with a disk of its own, whose calls are slow, fail, are torn, or lie. Sequences,
samples and a beam search run at the same time. Each result is that of an engine with all pages in memory, or
an error of that request.

The models have no mixture of experts. A recomputation has other shapes, which change the last bits, and a
router with a near tie then chooses other experts. (The tiny qwen3-next has a tie of 7e-8 in this prompt.)
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest

from tests.engine.test_beyond import GREEDY, PROMPT, SETTINGS, engine_beyond, same
from tests.portions import SOAK
from tierstore.testing.faulty_io import Effect, Fail, Fault, FaultyIO, FlipBit, IoCall, Lose, Misdirect, Short
from tierstore.tiers import overflow
from tierstore.tiers.overflow import OverflowFailedError, OverflowPool
from tierstore_engine.beams import BeamHypothesis, BeamParams
from tierstore_engine.build import build_engine
from tierstore_engine.engine import Engine
from tierstore_engine.errors import RequestError
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.outputs import Completion, FinishReason, RequestId

_log = logging.getLogger(__name__)

PROMPTS = [PROMPT, PROMPT[:100], PROMPT[5:500], PROMPT[9:640]]
BEAMS = BeamParams(width=2, max_new_tokens=6, ignore_eos=True)


@dataclass(frozen=True)
class Slow(Effect):
    """The call takes ``seconds`` longer."""

    seconds: float

    def begin(self) -> None:
        time.sleep(self.seconds)


READS: list[Callable[[Random], Effect]] = [
    lambda random: Slow(random.random() / 50),
    lambda random: Fail(errno.EIO),
    lambda random: Short(),
    lambda random: FlipBit(random.randrange(1 << 23)),
    lambda random: Misdirect(4096 * random.randint(-9, 9)),
]
WRITES: list[Callable[[Random], Effect]] = [
    lambda random: Slow(random.random() / 50),
    lambda random: Short(),
    lambda random: FlipBit(random.randrange(1 << 23)),
    lambda random: Lose(),
    lambda random: Misdirect(4096 * random.randint(-9, 9)),
]
FATAL: list[Callable[[Random], Effect]] = [
    lambda random: Fail(errno.EIO),
    lambda random: Fail(errno.ENOSPC),
]


def faults_of(random: Random, often: float) -> list[Fault]:
    """The faults of one round, each with a share of about ``often`` of the calls. One round in four has
    writes that fail, after which the file is not used."""
    often *= random.choice((0.2, 1.0, 5.0))

    def sometimes(kind: str, share: float = 1.0) -> Callable[[IoCall], bool]:
        return lambda call: call.kind == kind and random.random() < often * share

    faults = [Fault(sometimes("preadv"), make(random)) for make in READS]
    faults += [Fault(sometimes("pwritev"), make(random)) for make in WRITES]
    if random.random() < 0.25:
        faults.append(Fault(sometimes("pwritev", 0.1), random.choice(FATAL)(random)))
    return faults


class Expected:
    """The results of an engine with all pages in memory."""

    def __init__(self, model: LoadedModel) -> None:
        engine = build_engine(model, pool_pages=400, chunk_tokens=16, settings=SETTINGS)
        try:
            self.alone = [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
            self.samples = engine.sample(PROMPTS[2], replace(GREEDY, temperature=1.0, seed=3), n=2)
            self.beams = engine.beam_search(PROMPTS[3], BEAMS)
        finally:
            engine.close()


def requests(engine: Engine) -> list[tuple[RequestId, int]]:
    """Add all prompts that the pool still takes, and two samples of one: each with its place in the
    expected results."""
    added = []
    for place, prompt in enumerate(PROMPTS):
        try:
            added.append((engine.add(prompt, GREEDY), place))
        except RequestError:
            assert isinstance(engine.connector.pool, OverflowPool)
            assert engine.connector.pool.failed
    try:
        first = engine.add(PROMPTS[2], replace(GREEDY, temperature=1.0, seed=3))
        added += [(first, len(PROMPTS)), (engine.fork(first, seed=4), len(PROMPTS) + 1)]
    except RequestError:
        assert isinstance(engine.connector.pool, OverflowPool)
        assert engine.connector.pool.failed
    return added


def completions(engine: Engine, ids: Sequence[RequestId]) -> Iterator[Completion]:
    left = set(ids)
    while left:
        for output in engine.step():
            if output.completion is not None:
                left.discard(output.request_id)
                yield output.completion


def searched(engine: Engine) -> list[BeamHypothesis] | None:
    try:
        return engine.beam_search(PROMPTS[3], BEAMS)
    except (RequestError, OverflowFailedError):
        return None


def check_round(
    model: LoadedModel, expected: Expected, folder: Path, io: FaultyIO, faults: Sequence[Fault]
) -> tuple[int, int]:
    """Play one round. Return how many requests had the right result, and how many an error."""
    wanted = [*expected.alone, *expected.samples]
    engine = engine_beyond(model, folder)
    results = errors = 0
    try:
        io.set(*faults)
        for _ in range(2):
            places = dict(requests(engine))
            for found in completions(engine, list(places)):
                if found.finish_reason is FinishReason.ERROR:
                    assert found.error
                    errors += 1
                else:
                    assert same(wanted[places[found.request_id]], found, within=1e-3)
                    results += 1
            beams = searched(engine)
            errors += beams is None
            results += beams is not None
            assert beams is None or [each.tokens for each in beams] == [e.tokens for e in expected.beams]
        io.set()
        [last] = engine.generate([PROMPTS[1]], GREEDY)  # the engine still serves
        assert same(expected.alone[1], last, within=1e-3)
        assert engine.connector.available() == engine.connector.pool.num_pages
    finally:
        engine.close()
    return results, errors


@pytest.mark.parametrize(("name", "often"), [("llama3", 0.001), ("granite-hybrid-dense", 0.005)])
@pytest.mark.parametrize("count", [6, pytest.param(500, marks=[SOAK, pytest.mark.timeout(7200)])])
def test_no_wrong_token(
    name: str,
    often: float,
    count: int,
    loaded: Callable[..., LoadedModel],
    checkpoints: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = loaded(str(checkpoints(name)))
    expected = Expected(model)
    random, hits, rounds, results, errors = Random(name), 0, 0, 0, 0
    while hits < count:
        io = FaultyIO()
        monkeypatch.setattr(overflow, "QueuedIO", lambda io=io: io)
        faults = faults_of(random, often)
        right, failed = check_round(model, expected, tmp_path / str(rounds), io, faults)
        results, errors = results + right, errors + failed
        hits += sum(fault.hits for fault in faults)
        rounds += 1
    _log.info("%s: %d faults in %d rounds, %d results and %d errors", name, hits, rounds, results, errors)
    assert results > errors
