"""What the connector costs where there is nothing to reuse: fresh prompts, answered with it and without it.

Two questions, because one of them can be answered far better than the other. What is the connector's own
part? One engine answers with its connector switched on and off in turn (``switched.py``). And what does vLLM
do for any connector? The same engine, with the connector switched off, against one without any: two
processes, which are never of quite the same speed, so that only several starts can tell.

Answers that are compared lie within seconds of one another, and each round goes the other way round than the
one before. Before each turn the daemon has written what it was given: nobody computes beside the leftovers of
another.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from tierstore.errors import TierStoreError
from tierstore_tools.report import Phases
from tierstore_tools.together import cpu_seconds
from tierstore_tools.vllm.asks import Answers, Ask, prompt
from tierstore_tools.vllm.daemon import DaemonProcess
from tierstore_tools.vllm.engine import Engine
from tierstore_tools.vllm.paired import Ratio, ratio
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
_SEED = 2 << 20  # from here on: no other prompt of the benchmark has such seeds
_WARM_UP_ROUNDS = 2

StartEngine = Callable[[str, Mapping[str, Any] | None], AbstractContextManager[Engine]]


@dataclass(frozen=True)
class Compared:
    """One way of answering over another. Below 1 is slower for ``throughput_ratio``, above 1 for the others.
    CPU time is that of the engine's process for one prompt and one batch, until the daemon has nothing more
    to do for them."""

    ttft_ratio: Ratio
    throughput_ratio: Ratio
    cpu_ratio: Ratio


@dataclass(frozen=True)
class Overhead:
    """The connector over itself switched off (``connector``), that over an engine without one (``interface``:
    vLLM's own part), and the connector over an engine without one (``both``). The other figures are medians
    of the engine without one; ``daemon_cpu_s`` is the daemon's CPU time for one prompt and one batch, on
    average (None when the daemon is not the benchmark's own)."""

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


@dataclass(slots=True)
class _Figures:
    """Of one engine, round by round."""

    ttft_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


class OverheadExperiment:
    """``start`` makes an engine with a ``kv_transfer_config`` (or none); ``daemon`` is None when it is not
    the benchmark's own, and then its leftovers are not waited for."""

    def __init__(
        self,
        settings: VllmBench,
        start: StartEngine,
        daemon: DaemonProcess | None,
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

    def run(self) -> Overhead:
        """Raises :class:`TierStoreError` when an engine or the daemon does not do its part."""
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
        )

    def _series(self, number: int) -> dict[str, _Figures]:
        with ExitStack() as stack:
            with_it = stack.enter_context(self._start("an engine with the connector", self._connector))
            without = stack.enter_context(self._start("an engine without it", None))
            engines = {ON: with_it, OFF: with_it, NONE: without}
            for _ in range(_WARM_UP_ROUNDS):
                self._play(engines, {name: _Figures() for name in engines})
            figures = {name: _Figures() for name in engines}
            pairs = self._settings.pairs
            before = self._daemon_cpu()
            what = f"start {number + 1}: {pairs} prompts and batches, with it and without"
            with self._phases.phase(what) as phase:
                for at in range(pairs):
                    self._play(engines, figures)
                    phase.update((at + 1) / pairs)
            self._daemon_cpu_s += self._daemon_cpu() - before
            return figures

    def _play(self, engines: Mapping[str, Engine], figures: Mapping[str, _Figures]) -> None:
        """One prompt and one batch for every engine."""
        ways = list(engines) if next(self._rounds) % 2 else list(reversed(list(engines)))
        spent = {}
        for way in ways:
            asks = self._fresh(1, self._settings.overhead_tokens, ANSWER_TOKENS)
            answered, spent[way] = self._turn(engines[way], way, asks)
            figures[way].ttft_s.append(answered.answers[0].ttft_s)
        for way in ways:
            tokens = self._settings.overhead_tokens
            asks = self._fresh(THROUGHPUT_REQUESTS, tokens, THROUGHPUT_ANSWER_TOKENS)
            answered, cpu_s = self._turn(engines[way], way, asks)
            computed = THROUGHPUT_REQUESTS * (tokens + THROUGHPUT_ANSWER_TOKENS)
            figures[way].tokens_per_s.append(computed / answered.wall_s)
            figures[way].cpu_s.append(spent[way] + cpu_s)

    def _fresh(self, requests: int, tokens: int, answer_tokens: int) -> list[Ask]:
        """Prompts that nobody has asked."""
        return [Ask(prompt(tokens, seed=next(self._seeds)), answer_tokens) for _ in range(requests)]

    def _turn(self, engine: Engine, way: str, asks: Sequence[Ask]) -> tuple[Answers, float]:
        """And the engine's CPU time."""
        if way != NONE:
            engine.switch(way == ON)
        before = cpu_seconds(engine.pid)
        answered = engine.ask(*asks)
        if answered.external_hit_tokens or answered.local_hit_tokens:
            raise TierStoreError("a prompt that nobody has asked was found in a cache")
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
    def compared(figure: Figure) -> Ratio:
        return ratio([list(zip(figure(each[one]), figure(each[other]), strict=True)) for each in starts])

    return Compared(
        ttft_ratio=compared(lambda figures: figures.ttft_s),
        throughput_ratio=compared(lambda figures: figures.tokens_per_s),
        cpu_ratio=compared(lambda figures: figures.cpu_s),
    )
