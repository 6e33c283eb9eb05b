"""Engines for these tests: those of the benchmark, with one thread each.

On a small or busy machine vLLM's threads wait for one another longer than they compute; the results are the
same.

>>> run_engine(model, [Ask(prompt(900))], connector=connector_options(daemon.url)).external_hit_tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierstore_tools.vllm import engine as engines
from tierstore_tools.vllm.asks import Answers, Ask, VllmAnswer, greatest_difference
from tierstore_tools.vllm.engine import EngineDiedError, EngineRun, connector_options

__all__ = [
    "Answers",
    "Ask",
    "Engine",
    "EngineDiedError",
    "EngineRun",
    "VllmAnswer",
    "connector_options",
    "greatest_difference",
    "run_engine",
]

ONE_THREAD = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
_BLOCK = 32  # the smallest vLLM has on a CPU


class Engine(engines.VllmEngine):
    """See there. ``blocks`` is the number of KV blocks of ``block_size`` tokens that vLLM has."""

    def __init__(
        self,
        model: str | Path,
        *,
        environment: Mapping[str, str] | None = None,
        blocks: int = 1024,
        **options: Any,
    ) -> None:
        ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
        environment = {**({} if ranks > 1 else ONE_THREAD), **(environment or {})}
        options = {"block_size": _BLOCK, "num_gpu_blocks_override": blocks, **options}
        super().__init__(model, environment=environment, **options)


def run_engine(
    model: str | Path, asks: Sequence[Ask], *, together: bool = False, **options: Any
) -> EngineRun:
    """Start an engine, ask (one after the other, or all ``together``), end it. ``options``: ``connector``,
    ``processes``, ``environment``, ``blocks``, and every argument of ``vllm.LLM``."""
    return engines.run_engine(model, asks, together=together, make=Engine, **options)
