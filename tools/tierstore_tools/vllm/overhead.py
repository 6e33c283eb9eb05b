"""Measure the cost of the connector for fresh prompts, which it cannot reuse.

The connector's own part is measured in one engine, with its connector switched on and off in turn
(``switched.py``). vLLM's part for any connector is that engine, switched off,
beside an engine without one. Two processes never have quite the same speed, so this part needs several
starts.

Compared answers lie within seconds of one another, and every round reverses the order. Before each turn the
daemon has written all pages, so no turn runs beside the writes of another.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import TierStoreError
from tierstore_tools.processes import cpu_seconds
from tierstore_tools.report import Phases
from tierstore_tools.vllm.asks import Answers, Ask, prompt
from tierstore_tools.vllm.daemon import ServeProcess
from tierstore_tools.vllm.engine import VllmEngine
from tierstore_tools.vllm.paired import PairedRatio, ratio
from tierstore_tools.vllm.settings import (
    ANSWER_TOKENS,
    THROUGHPUT_ANSWER_TOKENS,
    THROUGHPUT_REQUESTS,
    VllmBench,
)

ON, OFF, NONE = "switched on", "switched off", "no connector"
_SWITCHED = {
    "kv_connector": "SwitchedConnector",
    "kv_connector_module_path": "tierstore_tools.vllm.switched",
}
_SEED = 2 << 20  # seeds from here on belong to this part of the benchmark only
_WARM_UP_ROUNDS = 2

StartEngine = Callable[[str, Mapping[str, Any] | None], AbstractContextManager[VllmEngine]]


@dataclass(frozen=True)
class Compared:
    """One variant over another. Below 1 is slower for ``throughput_ratio``, above 1 for the others. CPU time
    is that of the engine's process for one prompt and one batch, until the daemon has finished their
    pages."""

    ttft_ratio: PairedRatio
    throughput_ratio: PairedRatio
    cpu_ratio: PairedRatio


@dataclass(frozen=True)
class Added:
    """Seconds that the connector adds to a request: medians of switched on minus switched off.

    ``one_s`` is added to the first token of a single request. ``batch_s`` is added to each request of a
    batch, until all are answered. ``cached_s`` is the same for a batch in vLLM's own cache. ``…_cpu_s`` is
    CPU time of the engine's process (means, because it is counted in steps of 10 ms)."""

    one_s: float
    batch_s: float
    cached_s: float
    one_cpu_s: float
    batch_cpu_s: float
    cached_cpu_s: float


@dataclass(frozen=True)
class Overhead:
    """All comparisons. ``connector`` is switched on over switched off, ``interface`` is switched off over no
    connector (vLLM's own part), and ``both`` is switched on over no connector. ``added`` is the cost of
    ``connector`` as time per request. The other figures are medians without a connector. ``daemon_cpu_s`` is
    the daemon's mean CPU time for one prompt and one batch twice; None for a running daemon."""

    prompt_tokens: int
    batch_requests: int
    batch_prompt_tokens: int
    batch_answer_tokens: int
    ttft_s: float
    throughput_tokens_per_s: float
    cpu_s: float
    daemon_cpu_s: float | None
    connector: Compared
    interface: Compared
    both: Compared
    added: Added


@dataclass(slots=True)
class _Figures:
    """Figures of one variant, round by round. A repeated batch (``cached_…``) comes from vLLM's own cache."""

    batch_tokens: int
    ttft_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    cached_s: list[float] = field(default_factory=list)
    one_cpu_s: list[float] = field(default_factory=list)
    batch_cpu_s: list[float] = field(default_factory=list)
    cached_cpu_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> list[float]:
        """Prompt and answer tokens of a batch per second."""
        return [self.batch_tokens / each for each in self.batch_s]

    @property
    def cpu_s(self) -> list[float]:
        """CPU time of one prompt and one batch."""
        return [one + batch for one, batch in zip(self.one_cpu_s, self.batch_cpu_s, strict=True)]


class OverheadExperiment:
    """The experiment. ``start`` makes an engine with a ``kv_transfer_config`` (or none). ``daemon`` is None
    for a running daemon, whose writes are not waited for."""

    def __init__(
        self,
        settings: VllmBench,
        start: StartEngine,
        daemon: ServeProcess | None,
        connector: Mapping[str, Any],
        phases: Phases,
    ) -> None:
        self._settings = settings
        self._start = start
        self._daemon = daemon
        self._connector = {**connector, **_SWITCHED}
        self._phases = phases
        self._rounds, self._seeds = itertools.count(), itertools.count(_SEED)
        self._daemon_cpu_s = 0.0
        self._batch_tokens = THROUGHPUT_REQUESTS * (settings.overhead_tokens + THROUGHPUT_ANSWER_TOKENS)

    def run(self) -> Overhead:
        """Run all starts. Raises :class:`TierStoreError` if an engine or the daemon fails."""
        starts = [self._series(number) for number in range(self._settings.starts)]
        rounds = self._settings.starts * self._settings.pairs
        return Overhead(
            prompt_tokens=self._settings.overhead_tokens,
            batch_requests=THROUGHPUT_REQUESTS,
            batch_prompt_tokens=self._settings.overhead_tokens,
            batch_answer_tokens=THROUGHPUT_ANSWER_TOKENS,
            ttft_s=_median(starts, lambda figures: figures.ttft_s),
            throughput_tokens_per_s=_median(starts, lambda figures: figures.tokens_per_s),
            cpu_s=_median(starts, lambda figures: figures.cpu_s),
            daemon_cpu_s=None if self._daemon is None else self._daemon_cpu_s / rounds,
            connector=_compared(starts, ON, OFF),
            interface=_compared(starts, OFF, NONE),
            both=_compared(starts, ON, NONE),
            added=_added(starts),
        )

    def _series(self, number: int) -> dict[str, _Figures]:
        with ExitStack() as stack:
            with_it = stack.enter_context(self._start("an engine with the connector", self._connector))
            without = stack.enter_context(self._start("an engine without it", None))
            engines = {ON: with_it, OFF: with_it, NONE: without}
            for _ in range(_WARM_UP_ROUNDS):
                self._play(engines, {name: _Figures(self._batch_tokens) for name in engines})
            figures = {name: _Figures(self._batch_tokens) for name in engines}
            pairs = self._settings.pairs
            before = self._daemon_cpu()
            what = f"start {number + 1}: {pairs} prompts and batches, with it and without"
            with self._phases.phase(what) as phase:
                for at in range(pairs):
                    self._play(engines, figures)
                    phase.update((at + 1) / pairs)
            self._daemon_cpu_s += self._daemon_cpu() - before
            return figures

    def _play(self, engines: Mapping[str, VllmEngine], figures: Mapping[str, _Figures]) -> None:
        """Send one prompt and one batch to every variant."""
        ways = list(engines) if next(self._rounds) % 2 else list(reversed(list(engines)))
        tokens = self._settings.overhead_tokens
        for way in ways:
            found = figures[way]
            answered, cpu_s = self._turn(engines[way], way, self._fresh(1, tokens, ANSWER_TOKENS))
            found.ttft_s.append(answered.answers[0].ttft_s)
            found.one_cpu_s.append(cpu_s)
        for way in ways:
            found = figures[way]
            asks = self._fresh(THROUGHPUT_REQUESTS, tokens, THROUGHPUT_ANSWER_TOKENS)
            answered, cpu_s = self._turn(engines[way], way, asks)
            found.batch_s.append(answered.wall_s)
            found.batch_cpu_s.append(cpu_s)
            answered, cpu_s = self._turn(engines[way], way, asks, cached=True)
            found.cached_s.append(answered.wall_s)
            found.cached_cpu_s.append(cpu_s)

    def _fresh(self, requests: int, tokens: int, answer_tokens: int) -> list[Ask]:
        """Return prompts that were never asked before."""
        return [Ask(prompt(tokens, seed=next(self._seeds)), answer_tokens) for _ in range(requests)]

    def _turn(
        self, engine: VllmEngine, way: str, asks: Sequence[Ask], *, cached: bool = False
    ) -> tuple[Answers, float]:
        """Send prompts. Return the answers and the CPU time of the engine's process. If ``cached``, vLLM's
        own cache may have the prompts."""
        if way != NONE:
            engine.switch(way == ON)
        before = cpu_seconds(engine.pid)
        answered = engine.ask(*asks)
        if answered.external_hit_tokens or (answered.local_hit_tokens and not cached):
            raise TierStoreError("a fresh prompt was found in a cache")
        if self._daemon is not None:
            self._daemon.wait_written()
        return answered, cpu_seconds(engine.pid) - before

    def _daemon_cpu(self) -> float:
        if self._daemon is None or self._daemon.process is None:
            return 0.0
        return cpu_seconds(self._daemon.process.pid)


Figure = Callable[[_Figures], list[float]]


def _median(starts: Sequence[Mapping[str, _Figures]], figure: Figure) -> float:
    return statistics.median(value for each in starts for value in figure(each[NONE]))


def _compared(starts: Sequence[Mapping[str, _Figures]], one: str, other: str) -> Compared:
    def compared(figure: Figure) -> PairedRatio:
        return ratio([list(zip(figure(each[one]), figure(each[other]), strict=True)) for each in starts])

    return Compared(
        ttft_ratio=compared(lambda figures: figures.ttft_s),
        throughput_ratio=compared(lambda figures: figures.tokens_per_s),
        cpu_ratio=compared(lambda figures: figures.cpu_s),
    )


def _added(starts: Sequence[Mapping[str, _Figures]]) -> Added:
    def differences(figure: Figure, requests: int = 1) -> list[float]:
        pairs = [zip(figure(each[ON]), figure(each[OFF]), strict=True) for each in starts]
        return [(on - off) / requests for each in pairs for on, off in each]

    batch = THROUGHPUT_REQUESTS
    return Added(
        one_s=statistics.median(differences(lambda figures: figures.ttft_s)),
        batch_s=statistics.median(differences(lambda figures: figures.batch_s, batch)),
        cached_s=statistics.median(differences(lambda figures: figures.cached_s, batch)),
        one_cpu_s=statistics.mean(differences(lambda figures: figures.one_cpu_s)),
        batch_cpu_s=statistics.mean(differences(lambda figures: figures.batch_cpu_s, batch)),
        cached_cpu_s=statistics.mean(differences(lambda figures: figures.cached_cpu_s, batch)),
    )
