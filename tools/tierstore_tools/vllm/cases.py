"""The experiment: prompts asked cold with and without the connector, then from host memory by a new engine,
then from disk after the daemon was started again; answers compared by their log-probabilities.

Engines run as one process each. What a front end in a process of its own adds is the same in all cases, and
this is quieter to measure.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tierstore.errors import TierStoreError
from tierstore_tools.report import Phases
from tierstore_tools.vllm import models
from tierstore_tools.vllm.asks import Answer, Ask, greatest_difference, prompt
from tierstore_tools.vllm.daemon import DaemonProcess
from tierstore_tools.vllm.engine import Engine, connector_options
from tierstore_tools.vllm.paired import Ratio, ratio
from tierstore_tools.vllm.settings import (
    ANSWER_TOKENS,
    MAX_LOGPROB_DIFF,
    THROUGHPUT_ANSWER_TOKENS,
    THROUGHPUT_PROMPT_TOKENS,
    THROUGHPUT_REQUESTS,
    VllmBench,
)

_WARM_UP = 3
_WARM_UP_SEED = 1 << 20  # seeds that the prompts which are measured do not have
_BATCH_SEED = 2 << 20


@dataclass(frozen=True)
class Row:
    """One case: medians over ``rounds`` prompts. ``hit_tokens`` came from the store, by vLLM's own count;
    ``speedup`` is over the cold TTFT of the same prompts with the connector. ``identical``: equal greedy
    tokens as without a connector, and for float32 log-probabilities within 1e-4. ``max_logprob_diff`` is None
    when the tokens differ."""

    case: str
    rounds: int
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    speedup: float
    identical: bool
    max_logprob_diff: float | None


@dataclass(frozen=True)
class Overhead:
    """With the connector over without, while there is nothing to reuse. Above 1 is slower for ``ttft``, and
    below 1 is slower for ``throughput``. ``cpu`` is the CPU time of the engine's process for the prompts of
    ``ttft``, from arrival to the last token (saving goes on a little longer): it can be told on a machine
    that has other things to do, too."""

    ttft: Ratio
    cpu: Ratio
    throughput: Ratio
    ttft_without_s: float
    tokens_per_s_without: float


@dataclass(frozen=True)
class Result:
    """``skipped`` says which cases were left out, and why."""

    rows: tuple[Row, ...]
    overhead: Overhead
    skipped: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "overhead": asdict(self.overhead),
            "skipped": list(self.skipped),
        }


def run(settings: VllmBench, phases: Phases) -> Result:
    """Everything. Raises :class:`TierStoreError` when an engine or the daemon does not do its part."""
    with ExitStack() as stack:
        with phases.phase("the model", measurable=False):
            model = _model(settings)
        daemon = None
        if settings.store is None:
            daemon = stack.enter_context(
                DaemonProcess(
                    settings.directory, host_bytes=settings.host_bytes, disk_bytes=settings.disk_bytes
                )
            )
        url = settings.store if daemon is None else daemon.url
        assert url is not None
        return _Experiment(settings, model, url, daemon, phases).run()


def _model(settings: VllmBench) -> Path:
    if settings.model in models.KINDS:
        return models.make(settings.model, settings.directory / f"tierstore-{settings.model}")
    return Path(settings.model)


class _Experiment:
    """The cases of one run. Answers are kept by their prompt's seed."""

    def __init__(
        self, settings: VllmBench, model: Path, url: str, daemon: DaemonProcess | None, phases: Phases
    ) -> None:
        self._settings = settings
        self._model = model
        self._url = url
        self._daemon = daemon
        self._phases = phases
        self._dtype = settings.dtype or ("float32" if settings.model in models.KINDS else "auto")
        self._kept = range(settings.rounds)
        self._namespace = f"tierstore-bench {time.time_ns()}"  # nothing of an earlier run is found

    def run(self) -> Result:
        overhead, without, cold = self._cold()
        reference = {seed: without[seed] for seed in self._kept}
        rows = [
            self._row("no_connector", without, without, reference, 0),
            self._row("cold", cold, without, reference, 0),
        ]
        hits, found = self._warm("host: a new engine")
        rows.append(self._row("host", hits, cold, reference, found))
        skipped = []
        if self._daemon is None:
            skipped.append("disk: the daemon is not this benchmark's own, and is not restarted")
        else:
            with self._phases.phase("restarting the daemon", measurable=False):
                self._daemon.restart()
            hits, found = self._warm("disk: a new engine, after the daemon was started again")
            rows.append(self._row("disk", hits, cold, reference, found))
        return Result(tuple(rows), overhead, tuple(skipped))

    # -- cold ----------------------------------------------------------------------------------------

    def _cold(self) -> tuple[Overhead, dict[int, Answer], dict[int, Answer]]:
        """Both engines at once, each pair in turn and the first of a pair in turn: what slows the machine for
        a while slows both."""
        with ExitStack() as stack:
            without = stack.enter_context(self._engine("an engine without the connector", None))
            with_it = stack.enter_context(self._engine("an engine with it", self._url))
            single: dict[Engine, dict[int, Answer]] = {without: {}, with_it: {}}
            cpu: dict[Engine, list[float]] = {without: [], with_it: []}
            pairs = max(self._settings.pairs, self._settings.rounds)
            with self._phases.phase(f"{pairs} prompts, with and without") as phase:
                for seed in range(pairs):
                    for engine in self._in_turn(seed, without, with_it):
                        ask = Ask(prompt(self._settings.tokens, seed=seed), ANSWER_TOKENS)
                        answered = engine.ask(ask)
                        single[engine][seed] = answered.answers[0]
                        cpu[engine].append(answered.cpu_s)
                    phase.update((seed + 1) / pairs)
            rates: dict[Engine, list[float]] = {without: [], with_it: []}
            with self._phases.phase(f"{pairs} batches, with and without") as phase:
                for seed in range(pairs):
                    for engine in self._in_turn(seed, without, with_it):
                        rates[engine].append(_tokens_per_s(engine, seed))
                    phase.update((seed + 1) / pairs)
        if self._daemon is not None:
            self._daemon.wait_written()
        ttfts = [[answer.ttft_s for answer in single[engine].values()] for engine in (with_it, without)]
        overhead = Overhead(
            ratio(ttfts[0], ttfts[1]),
            ratio(cpu[with_it], cpu[without]),
            ratio(rates[with_it], rates[without]),
            statistics.median(ttfts[1]),
            statistics.median(rates[without]),
        )
        return overhead, single[without], single[with_it]

    def _in_turn(self, number: int, one: Engine, other: Engine) -> tuple[Engine, Engine]:
        return (one, other) if number % 2 else (other, one)

    # -- warm ----------------------------------------------------------------------------------------

    def _warm(self, where: str) -> tuple[dict[int, Answer], int]:
        """The kept prompts, asked once each of an engine that has not seen them; the answers and the median
        of the tokens that came from the store."""
        answers, found = {}, []
        with self._engine(where, self._url) as engine:
            for seed in self._kept:
                answered = engine.ask(Ask(prompt(self._settings.tokens, seed=seed), ANSWER_TOKENS))
                answers[seed] = answered.answers[0]
                found.append(answered.external_hit_tokens)
        return answers, int(statistics.median(found))

    @contextmanager
    def _engine(self, what: str, url: str | None) -> Iterator[Engine]:
        """An engine that has computed before, so that nothing measured pays for the first time."""
        settings = self._settings
        longest = max(settings.tokens + ANSWER_TOKENS, THROUGHPUT_PROMPT_TOKENS + THROUGHPUT_ANSWER_TOKENS)
        options = {"max_model_len": longest + 64, "max_num_batched_tokens": None, **settings.options}
        with self._phases.phase(what, measurable=False):
            engine = Engine(
                self._model,
                connector=None if url is None else connector_options(url, namespace=self._namespace),
                dtype=self._dtype,
                **options,
            )
        with engine:
            for number in range(_WARM_UP):
                engine.ask(Ask(prompt(settings.tokens, seed=_WARM_UP_SEED + number), ANSWER_TOKENS))
                engine.reset_prefix_cache()
            yield engine

    def _row(
        self,
        case: str,
        answers: dict[int, Answer],
        cold: dict[int, Answer],
        reference: dict[int, Answer],
        hit_tokens: int,
    ) -> Row:
        kept = list(reference)
        diff = max(greatest_difference(reference[seed], answers[seed]) for seed in kept)
        exact = self._dtype == "float32"
        ttft = statistics.median(answers[seed].ttft_s for seed in kept)
        return Row(
            case=case,
            rounds=len(kept),
            prompt_tokens=self._settings.tokens,
            hit_tokens=hit_tokens,
            ttft_s=ttft,
            speedup=statistics.median(cold[seed].ttft_s / answers[seed].ttft_s for seed in kept),
            identical=diff <= MAX_LOGPROB_DIFF if exact else _same_tokens(answers, reference),
            max_logprob_diff=diff if math.isfinite(diff) else None,
        )


def _same_tokens(answers: dict[int, Answer], reference: dict[int, Answer]) -> bool:
    return all(answers[seed].tokens == answer.tokens for seed, answer in reference.items())


def _tokens_per_s(engine: Engine, number: int) -> float:
    """Of a batch of prompts that nobody has seen, prompt and answer tokens together."""
    first = _BATCH_SEED + number * THROUGHPUT_REQUESTS
    asks = [
        Ask(prompt(THROUGHPUT_PROMPT_TOKENS, seed=first + one), THROUGHPUT_ANSWER_TOKENS)
        for one in range(THROUGHPUT_REQUESTS)
    ]
    answered = engine.ask(*asks)
    if answered.external_hit_tokens or answered.local_hit_tokens:
        raise TierStoreError("a prompt that nobody has asked was found in a cache")
    return THROUGHPUT_REQUESTS * (THROUGHPUT_PROMPT_TOKENS + THROUGHPUT_ANSWER_TOKENS) / answered.wall_s
