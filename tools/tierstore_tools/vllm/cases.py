"""The experiment. Prompts are asked cold with and without the connector, then from host memory by a new
engine, then from disk after a restart of the daemon. Answers are compared by their log-probabilities. The
cost of the connector is in ``overhead.py``.

Each engine is one process. A separate front-end process would add the same time to all cases, and more noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tierstore_tools.report import Phases
from tierstore_tools.vllm import models, slow_disk
from tierstore_tools.vllm.asks import Ask, VllmAnswer, greatest_difference, prompt
from tierstore_tools.vllm.daemon import ServeProcess
from tierstore_tools.vllm.engine import VllmEngine, connector_options, workers
from tierstore_tools.vllm.overhead import Overhead, OverheadExperiment
from tierstore_tools.vllm.settings import (
    ANSWER_TOKENS,
    MAX_LOGPROB_DIFF,
    THROUGHPUT_ANSWER_TOKENS,
    VllmBench,
)

_WARM_UP = 3
_WARM_UP_SEED = 1 << 20  # the seed of prompts that warm engines up; measured prompts have lower seeds


@dataclass(frozen=True)
class VllmRow:
    """One case: medians over ``rounds`` prompts. ``hit_tokens`` came from the store, by vLLM's own count.
    ``speedup`` is over the cold TTFT of the same prompts with the connector. ``identical`` says whether the
    greedy tokens are those without a connector and, for float32, log-probabilities differ by at most 1e-4.
    ``max_logprob_diff`` is None if the tokens differ."""

    case: str
    rounds: int
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float
    speedup: float
    identical: bool
    max_logprob_diff: float | None


@dataclass(frozen=True)
class VllmResult:
    """All results. ``skipped`` names the skipped cases and the reasons."""

    rows: tuple[VllmRow, ...]
    overhead: Overhead | None
    slow_disk: slow_disk.SlowDisk | None
    skipped: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "overhead": None if self.overhead is None else asdict(self.overhead),
            "slow_disk": None if self.slow_disk is None else asdict(self.slow_disk),
            "skipped": list(self.skipped),
        }


def run(settings: VllmBench, phases: Phases) -> VllmResult:
    """Run all cases. Raises :class:`~tierstore.errors.TierStoreError` if an engine or the daemon fails."""
    with ExitStack() as stack:
        with phases.phase("the model", measurable=False):
            model = _model(settings)
        daemon = None
        if settings.store is None:
            daemon = stack.enter_context(
                ServeProcess(
                    settings.directory, host_bytes=settings.host_bytes, disk_bytes=settings.disk_bytes
                )
            )
        url = settings.store if daemon is None else daemon.url
        assert url is not None
        return _VllmExperiment(settings, model, url, daemon, phases).run()


def _model(settings: VllmBench) -> Path:
    if settings.model in models.KINDS:
        return models.make(settings.model, settings.directory / f"tierstore-{settings.model}")
    return Path(settings.model)


class _VllmExperiment:
    """The cases of one run, and the answers by the seed of their prompt."""

    def __init__(
        self, settings: VllmBench, model: Path, url: str, daemon: ServeProcess | None, phases: Phases
    ) -> None:
        self._settings = settings
        self._model = model
        self._url = url
        self._daemon = daemon
        self._phases = phases
        self._dtype = settings.dtype or ("float32" if settings.model in models.KINDS else "auto")
        self._kept = range(settings.rounds)
        # a name of its own, so that no prompt hits pages of an earlier run
        self._namespace = f"tierstore-bench {time.time_ns()}"
        self._without: dict[int, VllmAnswer] = {}
        self._with_it: dict[int, VllmAnswer] = {}

    def run(self) -> VllmResult:
        skipped = []
        rows: list[VllmRow] = []
        if self._settings.rounds:
            rows = self._cold()
            rows.append(self._warm("host", "a new engine"))
            if self._daemon is None:
                skipped.append("disk: --store names a running daemon, which is not restarted")
            else:
                with self._phases.phase("restarting the daemon", measurable=False):
                    self._daemon.restart()
                rows.append(self._warm("disk", "a new engine after a restart of the daemon"))
        else:
            skipped.append("cold, host and disk: 0 rounds")
        overhead = None
        if not self._settings.starts:
            skipped.append("overhead: 0 starts")
        elif workers(self._settings.options) > 1:
            skipped.append("overhead: only an engine in one process can switch its connector off")
        else:
            connector = connector_options(self._url, namespace=self._namespace)
            overhead = OverheadExperiment(
                self._settings, self._engine, self._daemon, connector, self._phases
            ).run()
        slow = None
        if self._settings.disk_bytes_per_s is not None:
            slow = slow_disk.measure(self._settings, self._engine, self._phases)
        return VllmResult(tuple(rows), overhead, slow, tuple(skipped))

    # -- cold ----------------------------------------------------------------------------------------

    def _cold(self) -> list[VllmRow]:
        connector = connector_options(self._url, namespace=self._namespace)
        with ExitStack() as stack:
            without = stack.enter_context(self._engine("an engine without the connector", None))
            with_it = stack.enter_context(self._engine("an engine with it", connector))
            answers: dict[VllmEngine, dict[int, VllmAnswer]] = {without: {}, with_it: {}}
            with self._phases.phase("prompts, with and without") as phase:
                for seed in self._kept:
                    for engine, answered in answers.items():
                        ask = Ask(prompt(self._settings.tokens, seed=seed), ANSWER_TOKENS)
                        answered[seed] = engine.ask(ask).answers[0]
                    phase.update((seed + 1) / len(self._kept))
        if self._daemon is not None:
            self._daemon.wait_written()
        self._without, self._with_it = answers[without], answers[with_it]
        return [
            self._row("no_connector", self._without, self._without, 0),
            self._row("cold", self._with_it, self._without, 0),
        ]

    # -- warm ----------------------------------------------------------------------------------------

    def _warm(self, case: str, where: str) -> VllmRow:
        """Ask each prompt once, with an engine that has not seen it."""
        connector = connector_options(self._url, namespace=self._namespace)
        answers, found = {}, []
        with self._engine(f"{case}: {where}", connector) as engine:
            for seed in self._kept:
                answered = engine.ask(Ask(prompt(self._settings.tokens, seed=seed), ANSWER_TOKENS))
                answers[seed] = answered.answers[0]
                found.append(answered.external_hit_tokens)
        return self._row(case, answers, self._with_it, int(statistics.median(found)))

    @contextmanager
    def _engine(self, what: str, connector: Mapping[str, Any] | None) -> Iterator[VllmEngine]:
        """Start an engine and warm it up, so the measured requests are not the first ones."""
        settings = self._settings
        longest = max(
            settings.tokens + ANSWER_TOKENS,
            settings.overhead_tokens + THROUGHPUT_ANSWER_TOKENS,
        )
        options = {"max_model_len": longest + 64, "max_num_batched_tokens": None, **settings.options}
        with self._phases.phase(what, measurable=False):
            engine = VllmEngine(self._model, connector=connector, dtype=self._dtype, **options)
        with engine:
            for number in range(_WARM_UP):
                engine.ask(Ask(prompt(settings.tokens, seed=_WARM_UP_SEED + number), ANSWER_TOKENS))
                engine.reset_prefix_cache()
            yield engine

    def _row(
        self,
        case: str,
        answers: dict[int, VllmAnswer],
        cold: dict[int, VllmAnswer],
        hit_tokens: int,
    ) -> VllmRow:
        """Return a row. ``speedup`` is over ``cold``; answers are compared with those without a connector."""
        kept, reference = self._kept, self._without
        diff = max(greatest_difference(reference[seed], answers[seed]) for seed in kept)
        exact = self._dtype == "float32"
        ttft = statistics.median(answers[seed].ttft_s for seed in kept)
        return VllmRow(
            case=case,
            rounds=len(kept),
            prompt_tokens=self._settings.tokens,
            hit_tokens=hit_tokens,
            ttft_s=ttft,
            speedup=statistics.median(cold[seed].ttft_s / answers[seed].ttft_s for seed in kept),
            identical=diff <= MAX_LOGPROB_DIFF if exact else _same_tokens(answers, reference),
            max_logprob_diff=diff if math.isfinite(diff) else None,
        )


def _same_tokens(answers: dict[int, VllmAnswer], reference: dict[int, VllmAnswer]) -> bool:
    return all(answers[seed].tokens == answer.tokens for seed, answer in reference.items())
