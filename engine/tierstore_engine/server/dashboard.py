"""The engine's data for the dashboard: queue, batch, latencies, drafts and cache, once per second.

Latencies and cached tokens are those of requests that ended in the last minute, because they are known only
at a request's end.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tierstore.dashboard import of_store
from tierstore.dashboard.of_store import percent, short
from tierstore.dashboard.view import ConditionRow, Meter, Number, Plot, Sample, Tile, Unit, View, ViewState
from tierstore.printable import printable
from tierstore.stats import StoreStats
from tierstore.units import format_duration
from tierstore_engine.engine import Engine
from tierstore_engine.outputs import Completion, EngineStats
from tierstore_engine.server.admission import Admission
from tierstore_engine.stepping import EngineThread

_LATELY_S = 60.0
_MOST_REQUESTS = 4096  # the most requests of the last minute that are kept
_MOST_GAPS = 16384  # kept gaps between tokens
_LONG_STEP_S = 5.0
_TIERS = ("hbm", "host", "disk")
_PLOTS = (
    Plot("queue", "Requests", Unit.COUNT, ("waiting", "running")),
    Plot("tokens", "Tokens", Unit.PER_SECOND, ("computed", "generated")),
    Plot("ttft", "Time to first token", Unit.SECONDS, ("half within", "99 of 100 within")),
    Plot("itl", "Time between tokens", Unit.SECONDS, ("half within", "99 of 100 within")),
    Plot("cached", "Prompt tokens", Unit.PER_SECOND, ("asked for", *(f"from {tier}" for tier in _TIERS))),
)
_DRAFTS = Plot("drafts", "Drafted tokens accepted", Unit.PERCENT, ("of those drafted",))

Timed: TypeAlias = tuple[float, float]


class Lately:
    """Results of the requests that ended in the last minute, and token counts since the start. Use it on the
    event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prompt_tokens = 0
        self.cached_tokens: Counter[str] = Counter()  # by tier
        self._clock = clock
        self._ttft_s: deque[Timed] = deque(maxlen=_MOST_REQUESTS)
        self._itl_s: deque[Timed] = deque(maxlen=_MOST_GAPS)

    def ended(self, completions: Iterable[Completion]) -> None:
        """Add an ended request, with one continuation of each prompt."""
        now = self._clock()
        for completion in completions:
            metrics = completion.metrics
            self.prompt_tokens += metrics.prompt_tokens
            self.cached_tokens.update(metrics.reused_by_tier)
            if completion.tokens:
                self._ttft_s.append((now, metrics.ttft_s))
            self._itl_s.extend((now, seconds) for seconds in metrics.itl_s)

    def ttft_s(self) -> list[float]:
        return self._since_a_minute(self._ttft_s)

    def itl_s(self) -> list[float]:
        return self._since_a_minute(self._itl_s)

    def _since_a_minute(self, timed: deque[Timed]) -> list[float]:
        after = self._clock() - _LATELY_S
        while timed and timed[0][0] < after:
            timed.popleft()
        return [seconds for _, seconds in timed]


@dataclass(frozen=True, slots=True)
class _ServerMoment:
    at: float
    engine: EngineStats
    store: StoreStats | None
    trouble: ConditionRow | None
    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    ttft_s: Sequence[float]
    itl_s: Sequence[float]


class EngineDashboard:
    """Makes one sample after the other, on the event loop. ``store`` is called on another thread."""

    def __init__(
        self,
        model_name: str,
        version: str,
        engine: EngineThread[Engine],
        store: Callable[[], StoreStats | None],
        admission: Admission,
    ) -> None:
        self.lately = Lately()
        self._model_name = model_name
        self._version = version
        self._engine = engine
        self._store = store
        self._admission = admission
        self._started = time.monotonic()
        self._moments: deque[_ServerMoment] = deque()

    async def look(self) -> Sample:
        """Return the current state. The engine's part is its state before the current step."""
        store = await asyncio.to_thread(self._store)
        lately = self.lately
        now = _ServerMoment(
            time.monotonic(),
            self._engine.stats,
            store,
            self._trouble(),
            lately.prompt_tokens,
            dict(lately.cached_tokens),
            lately.ttft_s(),
            lately.itl_s(),
        )
        before = self._moments[-1] if self._moments else None
        self._moments.append(now)
        while len(self._moments) > 1 and self._moments[1].at <= now.at - _LATELY_S:
            self._moments.popleft()
        return await asyncio.to_thread(self._sample, now, before, self._moments[0])

    def _trouble(self) -> ConditionRow | None:
        """Return a problem of the engine, or None."""
        if self._engine.failed is not None:
            return ConditionRow("engine", ViewState.BAD, "has failed: restart the server")
        since = self._engine.stepping_since
        if since is not None and time.monotonic() > since + _LONG_STEP_S:
            text = f"its current step takes more than {_LONG_STEP_S:g} s"
            return ConditionRow("engine", ViewState.WARNING, text)
        return None

    def _sample(self, now: _ServerMoment, before: _ServerMoment | None, minute_ago: _ServerMoment) -> Sample:
        drafts = (_DRAFTS,) if now.engine.drafted_tokens else ()
        store = now.store
        view = View(
            title="tierstore engine",
            about=f"version {self._version}, serves {printable(self._model_name)}, "
            f"up {format_duration(now.at - self._started)}",
            version=self._version,
            conditions=tuple(self._conditions(now)),
            tiles=self._tiles(now, minute_ago),
            meters=(_pool(now.engine), *(of_store.meters(store) if store is not None else ())),
            plots=(*_PLOTS, *drafts),
            curve=of_store.curve(store.curve) if store is not None and store.curve.tiers else None,
            tables=(of_store.missed(store), of_store.worth(store.curve))
            if store is not None and store.curve.tiers
            else (),
        )
        return Sample(time.time(), view, _values(now, before) if before is not None else {})

    def _conditions(self, now: _ServerMoment) -> list[ConditionRow]:
        found = [now.trouble or ConditionRow("engine", ViewState.GOOD, "serves")]
        if self._admission.draining:
            found.append(ConditionRow("server", ViewState.WARNING, "is shutting down: no new requests"))
        if self._engine.errors:
            text = f"{self._engine.errors:,} steps and their requests failed since the start: see the log"
            found.append(ConditionRow("steps", ViewState.WARNING, text))
        if now.store is None:
            return found
        if not now.store.tiers.keys() - {"hbm"}:
            why = now.store.health_line or "has only the page pool"
            found.append(
                ConditionRow("store", ViewState.WARNING, f"{why}: prompts are not loaded, but computed")
            )
        return [*found, *of_store.conditions(now.store)]

    def _tiles(self, now: _ServerMoment, ago: _ServerMoment) -> tuple[Tile, ...]:
        engine, seconds = now.engine, max(now.at - ago.at, 1e-9)
        steps = engine.steps - ago.engine.steps
        generated = (engine.generated_tokens - ago.engine.generated_tokens) / seconds
        computed = engine.computed_tokens - ago.engine.computed_tokens
        asked = now.prompt_tokens - ago.prompt_tokens
        cached = {tier: now.cached_tokens.get(tier, 0) - ago.cached_tokens.get(tier, 0) for tier in _TIERS}
        parts = ", ".join(f"{tier} {percent(tokens / asked)}" for tier, tokens in cached.items() if tokens)
        return (
            Tile(
                "Waiting / running",
                f"{engine.waiting:,} / {engine.admitted:,}",
                f"{self._admission.tokens:,} prompt tokens, {engine.preemptions:,} preemptions"
                + (f"; waiting for {engine.wait_reasons}" if engine.waiting else ""),
            ),
            Tile("Generated tokens per second", short(generated), f"computed {short(computed / seconds)}"),
            Tile("Tokens a step", short(computed / steps) if steps else "–", f"{engine.steps:,} steps"),
            Tile(
                "Time to first token",
                _time(_quantile(now.ttft_s, 0.5)),
                f"99 of 100 within {_time(_quantile(now.ttft_s, 0.99))}",
            ),
            Tile(
                "Time between tokens",
                _time(_quantile(now.itl_s, 0.5)),
                f"99 of 100 within {_time(_quantile(now.itl_s, 0.99))}",
            ),
            Tile("Prompts from the cache", percent(sum(cached.values()) / asked if asked else None), parts),
            Tile("Drafts accepted", percent(_accepted(now, ago)), f"{engine.drafted_tokens:,} drafted"),
            Tile(
                "Refused",
                f"{self._admission.refused + engine.late_requests:,}",
                f"{engine.late_requests:,} because of their deadline",
            ),
        )


def _pool(engine: EngineStats) -> Meter:
    used = engine.total_pages - engine.available_pages
    share = used / max(engine.total_pages, 1)
    shared = f"{engine.shared_pages:,} saved by sharing"
    text = f"{used:,} of {engine.total_pages:,} pages used by requests, {shared}"
    return Meter(f"batch {percent(share)}", share, text)


def _values(now: _ServerMoment, before: _ServerMoment) -> dict[str, tuple[Number, ...]]:
    seconds = max(now.at - before.at, 1e-9)
    engine, was = now.engine, before.engine
    accepted = _accepted(now, before)
    cached = [now.cached_tokens.get(tier, 0) - before.cached_tokens.get(tier, 0) for tier in _TIERS]
    return {
        "queue": (engine.waiting, engine.admitted),
        "tokens": (
            (engine.computed_tokens - was.computed_tokens) / seconds,
            (engine.generated_tokens - was.generated_tokens) / seconds,
        ),
        "ttft": (_quantile(now.ttft_s, 0.5), _quantile(now.ttft_s, 0.99)),
        "itl": (_quantile(now.itl_s, 0.5), _quantile(now.itl_s, 0.99)),
        "cached": (
            (now.prompt_tokens - before.prompt_tokens) / seconds,
            *(each / seconds for each in cached),
        ),
        "drafts": (None if accepted is None else 100 * accepted,),
    }


def _accepted(now: _ServerMoment, before: _ServerMoment) -> float | None:
    drafted = now.engine.drafted_tokens - before.engine.drafted_tokens
    return (now.engine.accepted_tokens - before.engine.accepted_tokens) / drafted if drafted else None


def _quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of ``values`` that at least the fraction ``share`` of them do not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
