"""Measure hits from a slow disk, pair by pair with an engine that has no connector.

All prompts are on the disk only. The connector may decline a load that takes longer than computing. It must
not let a request wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from tierstore.cli.operator import Operator
from tierstore.wire import messages
from tierstore_tools.report import Phases
from tierstore_tools.vllm.asks import Ask, greatest_difference, prompt
from tierstore_tools.vllm.daemon import ServeProcess
from tierstore_tools.vllm.engine import VllmEngine, connector_options
from tierstore_tools.vllm.paired import PairedRatio, ratio
from tierstore_tools.vllm.settings import ANSWER_TOKENS, MAX_LOGPROB_DIFF, VllmBench

_SEED = 1 << 21  # seeds from here on belong to this part of the benchmark only


class OpenEngine(Protocol):
    def __call__(
        self, what: str, connector: Mapping[str, Any] | None
    ) -> AbstractContextManager[VllmEngine]: ...


@dataclass(frozen=True)
class SlowDisk:
    """TTFT with the connector over TTFT without, for prompts on a disk of ``bytes_per_s``. ``hit_tokens`` is
    the median of the tokens from the store, ``declined_tokens`` the metric at the end."""

    bytes_per_s: float
    prompt_tokens: int
    ttft_ratio: PairedRatio
    without_s: float
    hit_tokens: int
    declined_tokens: int
    identical: bool


def measure(settings: VllmBench, open_engine: OpenEngine, phases: Phases) -> SlowDisk:
    """Measure ``settings.pairs`` pairs. Raises :class:`~tierstore.errors.TierStoreError`."""
    assert settings.disk_bytes_per_s is not None
    daemon = ServeProcess(
        settings.directory,
        host_bytes=settings.host_bytes,
        disk_bytes=settings.disk_bytes,
        program=("-m", "tierstore_tools.throttled_daemon", str(settings.disk_bytes_per_s)),
    )
    asks = [Ask(prompt(settings.tokens, seed=_SEED + each), ANSWER_TOKENS) for each in range(settings.pairs)]
    with ExitStack() as stack:
        stack.enter_context(daemon)
        without = stack.enter_context(open_engine("slow disk: an engine without the connector", None))
        connector = connector_options(daemon.url)
        with_it = stack.enter_context(open_engine("slow disk: an engine with it", connector))
        with phases.phase("slow disk: saving the prompts") as phase:
            for number, each in enumerate(asks, 1):
                with_it.ask(each)
                phase.update(number / len(asks))
            daemon.wait_written(600.0)
        with phases.phase("slow disk: pairs") as phase:
            pairs, hits, same = [], [], []
            for mine, plain, hit_tokens, equal in _pairs(asks, with_it, without, daemon):
                pairs.append((mine, plain))
                hits.append(hit_tokens)
                same.append(equal)
                phase.update(len(pairs) / len(asks))
        declined = with_it.metrics().get("vllm:tierstore_declined_tokens", 0.0)
    return SlowDisk(
        bytes_per_s=settings.disk_bytes_per_s,
        prompt_tokens=settings.tokens,
        ttft_ratio=ratio([pairs]),
        without_s=statistics.median(plain for _, plain in pairs),
        hit_tokens=int(statistics.median(hits)),
        declined_tokens=int(declined),
        identical=all(same),
    )


def _pairs(
    asks: list[Ask], with_it: VllmEngine, without: VllmEngine, daemon: ServeProcess
) -> Iterator[tuple[float, float, int, bool]]:
    """Yield TTFT with and without the connector, the tokens from the store, and whether the answers agree."""
    with Operator(daemon.url) as operator:
        for number, each in enumerate(asks):
            operator.ask(messages.Evict(0, "host", -1), messages.Evicted, wait_s=60.0)
            for engine in (with_it, without):
                engine.reset_prefix_cache()
            order = (with_it, without) if number % 2 else (without, with_it)
            answered = {engine: engine.ask(each) for engine in order}
            mine, plain = answered[with_it].answers[0], answered[without].answers[0]
            equal = greatest_difference(plain, mine) <= MAX_LOGPROB_DIFF
            yield mine.ttft_s, plain.ttft_s, answered[with_it].external_hit_tokens, equal
