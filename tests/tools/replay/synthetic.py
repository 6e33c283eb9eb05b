"""Made-up traffic of several kinds, to see that nothing in a policy is made for one trace.

Every generator is a pure function of its arguments and a seed, and returns a trace of a few thousand to a few
ten thousand requests in order of time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

from tierstore_tools.replay.trace import TraceRequest

BLOCK_TOKENS = 512


class _Ids:
    """Block ids that are chained over prefixes: (id before, content) → id."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, object], int] = {}

    def extend(self, blocks: Sequence[int], contents: Sequence[object]) -> list[int]:
        """``blocks`` and, after them, the blocks of these contents."""
        extended = list(blocks)
        for content in contents:
            key = (extended[-1] if extended else -1, content)
            extended.append(self._ids.setdefault(key, len(self._ids)))
        return extended


def _request(time_s: float, blocks: Sequence[int], session: str | None = None) -> TraceRequest:
    return TraceRequest(time_s, tuple(blocks), len(blocks) * BLOCK_TOKENS, 128, session)


def _zipf(generator: random.Random, count: int, exponent: float) -> Callable[[], int]:
    weights = [1 / (rank + 1) ** exponent for rank in range(count)]
    total = 0.0
    cumulative = [total := total + weight for weight in weights]
    return lambda: generator.choices(range(count), cum_weights=cumulative)[0]


def documents(
    requests: int = 12000, *, count: int = 3000, exponent: float = 0.9, seed: int = 0
) -> list[TraceRequest]:
    """Questions about shared documents of 4 to 60 blocks, asked for by Zipf; each question is new."""
    generator = random.Random(seed)
    ids = _Ids()
    pick = _zipf(generator, count, exponent)
    lengths = [generator.randint(4, 60) for _ in range(count)]
    made = []
    for at in range(requests):
        document = pick()
        contents = [(document, position) for position in range(lengths[document])]
        blocks = ids.extend((), [*contents, ("question", at)])
        made.append(_request(at * 0.3, blocks))
    return made


def chat(
    requests: int = 12000, *, turns: float = 4.0, think_s: float = 90.0, rate: float = 1.0, seed: int = 0
) -> list[TraceRequest]:
    """Conversations that begin ``rate`` times a second, have ``turns`` turns on average (geometric) and a
    lognormal time to think between them; every turn's prompt is the one before plus a few blocks."""
    generator = random.Random(seed)
    ids = _Ids()
    made: list[TraceRequest] = []
    waiting: list[tuple[float, int, list[int]]] = []
    begins = 0.0
    number = 0
    while len(made) < requests:
        if not waiting or begins < waiting[0][0]:
            number += 1
            system = [("system", generator.randrange(8))]
            first = [(number, at) for at in range(generator.randint(1, 20))]
            now, chat_number, blocks = begins, number, ids.extend((), [*system, *first])
            begins += generator.expovariate(rate)
        else:
            now, chat_number, blocks = heapq.heappop(waiting)
        made.append(_request(now, blocks, f"chat {chat_number}"))
        if generator.random() > 1 / turns:
            after = now + generator.lognormvariate(0, 1) * think_s
            said = [(chat_number, len(blocks) + at) for at in range(generator.randint(1, 6))]
            heapq.heappush(waiting, (after, chat_number, ids.extend(blocks, said)))
    return made


def agents(
    requests: int = 12000, *, sessions: int = 40, steps: int = 25, seed: int = 0
) -> list[TraceRequest]:
    """``sessions`` agents at a time, each with one of few long system prompts, tens of steps with tool calls
    of
    seconds to minutes between them, and a context that is compacted now and then: then all after the
    system prompt is new."""
    generator = random.Random(seed)
    ids = _Ids()
    systems = [[("agent", kind, at) for at in range(generator.randint(8, 40))] for kind in range(5)]
    made: list[TraceRequest] = []
    number = 0
    waiting: list[tuple[float, int, list[int], list[int]]] = []

    def begin(now: float) -> None:
        nonlocal number
        number += 1
        system = ids.extend((), generator.choice(systems))
        heapq.heappush(waiting, (now + generator.expovariate(0.05), number, system, system))

    for _ in range(sessions):
        begin(0.0)
    while len(made) < requests:
        now, session, system, blocks = heapq.heappop(waiting)
        made.append(_request(now, blocks, f"agent {session}"))
        if generator.random() < 1 / steps:
            begin(now)
            continue
        if len(blocks) > len(system) + 150:
            blocks = ids.extend(system, [(session, "compact", len(made), at) for at in range(6)])
        seen = [(session, len(made), at) for at in range(generator.randint(1, 8))]
        pause = generator.choice((2.0, 10.0, 120.0)) * generator.expovariate(1.0)
        heapq.heappush(waiting, (now + pause, session, system, ids.extend(blocks, seen)))
    return made


def scans(requests: int = 12000, *, seed: int = 0) -> list[TraceRequest]:
    """Zipf over documents, and in every fifth stretch of 400 requests nothing but prompts never seen
    again."""
    generator = random.Random(seed)
    ids = _Ids()
    usual = iter(documents(requests, count=800, exponent=0.7, seed=seed + 1))
    made = []
    for at in range(requests):
        if at // 400 % 5 == 4:
            contents: list[object] = [("scan", at, block) for block in range(generator.randint(10, 60))]
            made.append(_request(at * 0.3, ids.extend((), contents)))
        else:
            contents = [("usual", block) for block in next(usual).blocks]
            made.append(_request(at * 0.3, ids.extend((), contents)))
    return made


def loop(requests: int = 12000, *, blocks: int = 6000, length: int = 15, seed: int = 0) -> list[TraceRequest]:
    """The same prompts over and over, ``blocks`` blocks in all: nothing for LRU wherever they do not fit."""
    ids = _Ids()
    prompts = [ids.extend((), [(prompt, at) for at in range(length)]) for prompt in range(blocks // length)]
    return [_request(at * 0.3, prompts[(at + seed) % len(prompts)]) for at in range(requests)]


def phases(requests: int = 12000, *, phase: int = 1500, seed: int = 0) -> list[TraceRequest]:
    """Every ``phase`` requests other documents are asked for, and those of before never again."""
    ids = _Ids()
    made = []
    for start in range(0, requests, phase):
        part = documents(phase, count=400, exponent=0.6, seed=seed + start)
        for at, request in enumerate(part):
            contents = [(start, block) for block in request.blocks]
            made.append(_request((start + at) * 0.3, ids.extend((), contents)))
    return made[:requests]


def drift(
    requests: int = 12000, *, window: int = 60, step: int = 8, repeats: int = 6, seed: int = 0
) -> list[TraceRequest]:
    """Recency and nothing else: prompts from a window that moves on, each asked for about ``repeats`` times
    and then never again. What was used often is what is over."""
    generator = random.Random(seed)
    ids = _Ids()
    made = []
    for at in range(requests):
        newest = at // step * step // repeats + window
        prompt = newest - min(int(generator.expovariate(3 / window)), window)
        contents = [(prompt, block) for block in range(20 + prompt % 11)]
        made.append(_request(at * 0.3, ids.extend((), contents)))
    return made


def mixed(requests: int = 12000, *, seed: int = 0) -> list[TraceRequest]:
    """Chat, agents and documents at the same time."""
    parts = [
        chat(requests // 3, seed=seed),
        agents(requests // 3, seed=seed),
        documents(requests // 3, count=1000, seed=seed),
    ]
    ids = _Ids()

    def marked(kind: int, part: list[TraceRequest]) -> Iterator[tuple[float, int, TraceRequest]]:
        last = max(part[-1].timestamp_s, 1.0)
        for request in part:
            yield request.timestamp_s / last * 3600, kind, request

    streams = [marked(kind, part) for kind, part in enumerate(parts)]
    return [
        _request(time_s, ids.extend((), [(kind, block) for block in request.blocks]))
        for time_s, kind, request in heapq.merge(*streams, key=lambda each: each[:2])
    ]


def endings(conversations: int = 900, *, turns: int = 25, seed: int = 2) -> list[TraceRequest]:
    """Conversations that begin within an hour, of which a few go on and on: at the end there are no others,
    and what was a small part of all hits is nearly all of them."""
    generator = random.Random(seed)
    ids = _Ids()
    made: list[TraceRequest] = []
    for number in range(conversations):
        now = generator.uniform(0, 3600)
        system = min(int(generator.expovariate(1)), 5)
        blocks = ids.extend((), [("system", system, at) for at in range(4 + 6 * system)])
        for turn in range(min(int(generator.paretovariate(1.1)), turns)):
            blocks = ids.extend(blocks, [(number, turn, at) for at in range(generator.randint(8, 100))])
            made.append(_request(now, blocks, f"chat {number}"))
            now += generator.lognormvariate(4, 1.2)
    made.sort(key=lambda request: request.timestamp_s)
    return made


GENERATORS: dict[str, Callable[[], list[TraceRequest]]] = {
    "agents": agents,
    "chat": chat,
    "documents": documents,
    "drift": drift,
    "endings": endings,
    "loop": loop,
    "mixed": mixed,
    "phases": phases,
    "scans": scans,
}
