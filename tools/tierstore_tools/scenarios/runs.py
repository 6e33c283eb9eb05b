"""The four scenarios. Each function for a scenario sends its load to one endpoint and returns a row of
figures.

A scenario is bounded by the number of requests in its load, and by ``request_s`` for each of them.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tierstore.errors import TierStoreError
from tierstore_tools.processes import core_seconds, memory_bytes, private_bytes
from tierstore_tools.scenarios.endpoint import OpenAiEndpoint, Reply, ScenarioRequest, connected
from tierstore_tools.scenarios.load import Arrival, Readers, tokens
from tierstore_tools.scenarios.targets import Left, Target, reserved_tokens

Progress = Callable[[float], None]
_SAMPLE_S = 0.1
_WARM_UP_TOKENS = 128
_WARM_UP_ANSWER = 4


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The batch scenario. ``kv_peak_tokens`` is the peak of the server's reserved KV. ``kv_used`` is the KV
    that the requests being answered needed, over the reserved KV (above 1 if they share pages). Both are None
    if the server does not report it. ``peak_memory_bytes`` and ``core_s`` count its processes and its daemon;
    None for a running server. ``same_answers`` is the share of answers equal to the first target's."""

    target: str
    requests: int
    failed: int
    seconds_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    hit_rate: float
    kv_peak_tokens: float | None
    kv_used: float | None
    peak_memory_bytes: int | None
    core_s: float | None
    same_answers: float


@dataclass(frozen=True, slots=True)
class LongRow:
    """The longctx scenario: medians over ``rounds`` prompts. ``found`` is the tier that the server
    reports."""

    target: str
    case: str
    prompt_tokens: int
    cached_tokens: int
    found: str
    rounds: int
    ttft_s: float
    slowest_ttft_s: float
    speedup: float
    same_answers: float


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits of a good request: time to first token, and mean time between later tokens."""

    ttft_s: float
    itl_s: float

    def met(self, reply: Reply) -> bool:
        """Return whether a reply is complete and within both limits."""
        return reply.error is None and reply.ttft_s <= self.ttft_s and reply.itl_s <= self.itl_s


@dataclass(frozen=True, slots=True)
class OnlineRow:
    """The online scenario. ``goodput_per_s`` is how many requests per second met the SLO. ITL figures are
    over all gaps between tokens."""

    target: str
    arrivals: str
    rate_per_s: float
    requests: int
    failed: int
    seconds_s: float
    goodput_per_s: float
    slo_met: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    hit_rate: float


@dataclass(frozen=True, slots=True)
class StreamRow:
    """The stream scenario: gaps of the quick readers in one round, by the load beside them. ``jitter_s`` is
    the gaps' standard deviation. ``memory_bytes`` is the target's memory at the end; None for a running
    server."""

    target: str
    round: int
    quick_readers: int
    beside: str
    failed: int
    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    jitter_s: float
    memory_bytes: int | None


@dataclass(slots=True)
class ScenarioResult:
    """All rows. ``left_out`` targets are not available here, ``failed`` targets broke during the run."""

    batch: list[BatchRow] = field(default_factory=list)
    longctx: list[LongRow] = field(default_factory=list)
    online: list[OnlineRow] = field(default_factory=list)
    stream: list[StreamRow] = field(default_factory=list)
    left_out: list[Left] = field(default_factory=list)
    failed: list[Left] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NamedArrivals:
    """The requests of one online run with their times, the name of their source, and their mean rate."""

    name: str
    rate_per_s: float
    arrivals: Sequence[Arrival]


class Agreement:
    """The first target's answer to each request, with which the answers of the other targets are compared.
    Targets that serve one model should give equal answers."""

    def __init__(self) -> None:
        self._first: dict[ScenarioRequest, str] = {}

    def share(self, replies: Sequence[Reply]) -> float:
        """Return the share of complete answers that equal the first answer to their request."""
        whole = [reply for reply in replies if reply.error is None]
        same = [self._first.setdefault(reply.ask, reply.text) == reply.text for reply in whole]
        return statistics.fmean(same) if same else 0.0


async def batch(
    target: Target,
    *,
    asks: Sequence[ScenarioRequest],
    request_s: float,
    agreement: Agreement,
    progress: Progress,
) -> BatchRow:
    """Send all requests at once. Raises :class:`TierStoreError` if none is answered."""
    async with _warm(target, request_s) as endpoint, _watched(target, endpoint) as watch:
        begun, cores = time.perf_counter(), core_seconds(target.pids())
        replies = await _all([endpoint.ask(ask) for ask in asks], progress)
        seconds, cores = time.perf_counter() - begun, core_seconds(target.pids()) - cores
    whole = _whole(target, replies)
    return BatchRow(
        target.name,
        len(replies),
        len(replies) - len(whole),
        seconds,
        sum(reply.generated_tokens for reply in whole) / seconds,
        sum(reply.prompt_tokens for reply in whole) / seconds,
        _hit_rate(whole),
        watch.kv_peak_tokens,
        watch.kv_used,
        watch.peak_memory_bytes,
        cores if target.pids() else None,
        agreement.share(replies),
    )


async def longctx(
    target: Target,
    *,
    prompts: Sequence[ScenarioRequest],
    request_s: float,
    agreement: Agreement,
    progress: Progress,
) -> list[LongRow]:
    """Ask each prompt cold and again. With a daemon, ask it also after a restart of the server, and after a
    restart of both. Raises :class:`TierStoreError` if an answer is missing."""
    rows: list[LongRow] = []
    cases = ["cold", "again", *(["server restarted", "both restarted"] if target.restartable else [])]
    for number, case in enumerate(cases):
        if "restarted" in case:
            await asyncio.to_thread(target.restart, daemon=case.startswith("both"))
        async with _warm(target, request_s) as endpoint:
            replies = [await endpoint.ask(ask) for ask in prompts]
        failed = next((reply.error for reply in replies if reply.error), None)
        if failed is not None:
            raise TierStoreError(f"{target.name}: a prompt was not answered ({case}): {failed}")
        rows.append(_long_row(target, case, replies, rows[0].ttft_s if rows else None, agreement))
        progress((number + 1) / len(cases))
    return rows


async def online(
    target: Target, *, traffic: NamedArrivals, slo: Slo, request_s: float, progress: Progress
) -> OnlineRow:
    """Send each request at its time, without waiting for others. Raises :class:`TierStoreError` if none is
    answered."""
    async with _warm(target, request_s) as endpoint:
        begun = time.perf_counter()
        asking = [_when_due(endpoint, arrival, begun) for arrival in traffic.arrivals]
        replies = await _all(asking, progress)
        seconds = time.perf_counter() - begun
    whole = _whole(target, replies)
    good = sum(slo.met(reply) for reply in replies)
    ttft = [reply.ttft_s for reply in whole]
    gaps = [gap for reply in whole for gap in reply.gaps_s] or [0.0]
    return OnlineRow(
        target.name,
        traffic.name,
        traffic.rate_per_s,
        len(replies),
        len(replies) - len(whole),
        seconds,
        good / seconds,
        good / len(replies),
        float(np.percentile(ttft, 50)),
        float(np.percentile(ttft, 99)),
        float(np.percentile(gaps, 50)),
        float(np.percentile(gaps, 99)),
        _hit_rate(whole),
    )


async def stream(
    target: Target, *, round: int, readers: Readers, request_s: float, progress: Progress
) -> StreamRow:
    """Let quick readers read beside slow readers or new requests. Slow readers may use the rest of their
    ``request_s`` after the quick ones are done. Metrics and memory are not read meanwhile. Raises
    :class:`TierStoreError` if no quick reader gets an answer."""
    async with _warm(target, request_s) as endpoint:
        others = [endpoint.ask(ask, pause_s=readers.pause_s) for ask in readers.slow]
        others += [_when_due(endpoint, arrival, time.perf_counter()) for arrival in readers.arrivals]
        beside = [asyncio.create_task(each) for each in others]
        replies = await _all([endpoint.ask(ask) for ask in readers.quick], progress)
        other_replies = await asyncio.gather(*beside)
    whole = _whole(target, replies)
    gaps = [gap for reply in whole for gap in reply.gaps_s] or [0.0]
    return StreamRow(
        target.name,
        round,
        len(readers.quick),
        readers.beside,
        len(readers.quick) - len(whole) + sum(reply.error is not None for reply in other_replies),
        float(np.percentile(gaps, 50)),
        float(np.percentile(gaps, 99)),
        max(gaps),
        statistics.pstdev(gaps),
        memory_bytes(target.pids()) if target.pids() else None,
    )


@dataclass(slots=True)
class _Watch:
    """Samples of a busy server: its reserved KV, the KV that its current answers need, its private memory.
    ``shared_bytes`` is the server's shared memory at the end."""

    reserved: list[float] = field(default_factory=list)
    needed: list[float] = field(default_factory=list)
    private: list[int] = field(default_factory=list)
    shared_bytes: int = 0

    @property
    def kv_peak_tokens(self) -> float | None:
        return max(self.reserved, default=None)

    @property
    def kv_used(self) -> float | None:
        held = [(need, have) for need, have in zip(self.needed, self.reserved, strict=True) if need and have]
        return sum(need for need, _ in held) / sum(have for _, have in held) if held else None

    @property
    def peak_memory_bytes(self) -> int | None:
        return max(self.private) + self.shared_bytes if self.private else None


@asynccontextmanager
async def _watched(target: Target, endpoint: OpenAiEndpoint) -> AsyncIterator[_Watch]:
    watch = _Watch()

    async def look() -> None:
        while True:
            needed = endpoint.answering_tokens()
            reserved = reserved_tokens(await endpoint.metrics())
            if reserved is not None:
                watch.reserved.append(reserved)
                watch.needed.append(needed)
            if target.pids():
                watch.private.append(private_bytes(target.pids()))
            await asyncio.sleep(_SAMPLE_S)

    looking = asyncio.create_task(look())
    try:
        yield watch
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        watch.shared_bytes = memory_bytes(target.pids()) - private_bytes(target.pids())


@asynccontextmanager
async def _warm(target: Target, request_s: float) -> AsyncIterator[OpenAiEndpoint]:
    async with connected(target.url, request_s=request_s) as endpoint:
        await endpoint.warm_up(ScenarioRequest(tokens(time.time_ns(), _WARM_UP_TOKENS), _WARM_UP_ANSWER))
        yield endpoint


async def _when_due(endpoint: OpenAiEndpoint, arrival: Arrival, begun: float) -> Reply:
    await asyncio.sleep(begun + arrival.at_s - time.perf_counter())
    return await endpoint.ask(arrival.ask)


async def _all(asking: Sequence[Coroutine[Any, Any, Reply]], progress: Progress) -> list[Reply]:
    done = 0

    async def one(coroutine: Coroutine[Any, Any, Reply]) -> Reply:
        nonlocal done
        reply = await coroutine
        done += 1
        progress(done / len(asking))
        return reply

    return await asyncio.gather(*map(one, asking))


def _whole(target: Target, replies: Sequence[Reply]) -> list[Reply]:
    whole = [reply for reply in replies if reply.error is None]
    if not whole:
        raise TierStoreError(f"{target.name}: no request was answered: {replies[0].error}")
    return whole


def _long_row(
    target: Target, case: str, replies: Sequence[Reply], cold_s: float | None, agreement: Agreement
) -> LongRow:
    times = [reply.ttft_s for reply in replies]
    tiers = Counter[str]()
    for reply in replies:
        tiers.update(reply.cached_by_tier)
    ttft = statistics.median(times)
    cached = int(statistics.median(reply.cached_tokens for reply in replies))
    found = tiers.most_common(1)[0][0] if tiers else ("cache" if cached else "nowhere")
    return LongRow(
        target.name,
        case,
        replies[0].prompt_tokens,
        cached,
        found,
        len(replies),
        ttft,
        max(times),
        (cold_s or ttft) / ttft,
        agreement.share(replies),
    )


def _hit_rate(replies: Sequence[Reply]) -> float:
    return sum(reply.cached_tokens for reply in replies) / sum(reply.prompt_tokens for reply in replies)
