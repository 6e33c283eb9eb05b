"""Make the load of each scenario from a seed, so that every target gets the same requests. Token ids are
printable ASCII, one character each, in the random models of this benchmark."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.errors import UsageError
from tierstore_tools.replay.formats import load
from tierstore_tools.replay.trace import Trace
from tierstore_tools.scenarios.endpoint import ScenarioRequest
from tierstore_tools.vllm.models import PRINTABLE

MOST_REQUESTS = 10_000
MOST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and its time in seconds from the start."""

    at_s: float
    ask: ScenarioRequest


@dataclass(frozen=True, slots=True)
class Readers:
    """Quick readers of streams, and the load ``beside`` them: slow readers, which pause ``pause_s`` after
    each piece, and requests that arrive during the run."""

    quick: Sequence[ScenarioRequest]
    beside: str = "alone"
    slow: Sequence[ScenarioRequest] = ()
    pause_s: float = 0.0
    arrivals: Sequence[Arrival] = ()


def tokens(seed: object, count: int) -> tuple[int, ...]:
    """Return ``count`` token ids, always the same for one ``seed``."""
    return tuple(random.Random(str(seed)).choices(range(PRINTABLE), k=count))


def documents(
    requests: int,
    *,
    documents: int,
    document_tokens: int,
    question_tokens: int,
    answer_tokens: int,
    seed: int,
) -> list[ScenarioRequest]:
    """Return questions about a few documents, shuffled. Half of the answers have half the length."""
    asks = []
    for number in range(requests):
        document = tokens((seed, "document", number % documents), document_tokens)
        question = tokens((seed, "question", number), question_tokens)
        asks.append(
            ScenarioRequest(document + question, answer_tokens if number % 2 else max(answer_tokens // 2, 1))
        )
    random.Random(seed).shuffle(asks)
    return asks


def conversations(
    rate_per_s: float,
    seconds: float,
    *,
    sessions: int,
    system_tokens: int,
    turn_tokens: int,
    answer_tokens: int,
    max_tokens: int,
    seed: object,
) -> list[Arrival]:
    """Return turns of ``sessions`` conversations, by a Poisson process. All conversations begin with one
    system prompt. The prompt of a turn is the conversation so far and new tokens. A conversation that would
    outgrow ``max_tokens`` starts again."""
    draw = random.Random(str(seed))
    system = tokens((seed, "system"), system_tokens)
    said: list[tuple[int, ...]] = [system] * sessions
    arrivals: list[Arrival] = []
    at = 0.0
    while at < seconds and len(arrivals) < MOST_REQUESTS:
        session = draw.randrange(sessions)
        turn = tokens((seed, "turn", len(arrivals)), draw.randint(turn_tokens // 2, turn_tokens * 3 // 2))
        if len(said[session]) + len(turn) + answer_tokens > max_tokens:
            said[session] = system
        said[session] += turn
        arrivals.append(Arrival(at, ScenarioRequest(said[session], answer_tokens)))
        at += draw.expovariate(rate_per_s)
    return arrivals


def from_trace(
    file: Path,
    requests: int,
    rate_per_s: float,
    *,
    block_tokens: int,
    answer_tokens: int,
    max_tokens: int,
    seed: object,
) -> list[Arrival]:
    """Return the trace's first ``requests`` requests, with times scaled to ``rate_per_s`` on average. Each
    block of the trace becomes ``block_tokens`` tokens: shared blocks stay shared. Prompts are cut at
    ``max_tokens`` minus the answer. Raises :class:`UsageError` for a trace without block ids."""
    trace = load(file).trace
    if not isinstance(trace, Trace):
        raise UsageError(f"{file} has lengths and no block ids: take a trace with ids")
    taken = [trace[number] for number in range(min(requests, len(trace)))]
    if not taken:
        raise UsageError(f"{file} has no requests")
    times = _stretched([request.timestamp_s for request in taken], rate_per_s)
    room = max(max_tokens - answer_tokens, 1)
    arrivals = []
    for at, request in zip(times, taken, strict=True):
        prompt: tuple[int, ...] = ()
        for block in request.blocks:
            if len(prompt) >= room:
                break
            prompt += tokens((seed, "block", block), block_tokens)
        arrivals.append(
            Arrival(at, ScenarioRequest(prompt[:room] or tokens((seed, "empty"), 1), answer_tokens))
        )
    return arrivals


def _stretched(times: Sequence[float], rate_per_s: float) -> list[float]:
    first, took = times[0], times[-1] - times[0]
    wanted = len(times) / rate_per_s
    return [(at - first) * (wanted / took if took else 0.0) for at in times]
