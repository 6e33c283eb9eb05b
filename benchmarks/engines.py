"""Measure decode steps and prefill of the bundled engine on the CPU beside vLLM's CPU build.

    python benchmarks/engines.py --model ./smollm2 --vllm-python .venv-vllm/bin/python --threads 1

Both engines stay in memory, each in a process of its own, and take turns. Without prefix caches, each
computes ``--batch`` prompts of ``--past`` random tokens twice: once for one new token, and once for
``--steps`` more. The difference of the times is that of the decode steps, the shorter time is prefill. The
result is the median of ``--rounds`` rounds, and the median of the ratios.
"""

from __future__ import annotations

import json as json_module
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

_READY = "ready"

Generate: TypeAlias = Callable[[list[list[int]], int], object]
"""Computes prompts and this many new tokens for each."""


@dataclass(frozen=True)
class EngineRow:
    """Times in seconds: of a decode step, and of computing all prompts. The ratios are ours over vLLM's."""

    batch: int
    decode_s: float
    vllm_decode_s: float
    decode_ratio: float
    prefill_s: float
    vllm_prefill_s: float
    prefill_ratio: float


def main(
    model: Annotated[str, typer.Option()],
    vllm_python: Annotated[Path, typer.Option()],
    dtype: str = "float32",
    threads: int = 1,
    batches: str = "1,4,16",
    past: int = 300,
    steps: int = 32,
    rounds: int = 5,
    json: str | None = None,
) -> None:
    """Measure BATCHES sequences with PAST tokens each."""
    from tierstore_tools import machine, report

    report.require_targets(json)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    with ExitStack() as stack:
        children = [
            stack.enter_context(BenchedEngine(python, name, model, dtype, threads, environment))
            for name, python in (("tierstore", Path(sys.executable)), ("vllm", vllm_python))
        ]
        rows = []
        for batch in map(int, batches.split(",")):
            taken = [
                [child.measure(batch, past, steps, seed) for child in children] for seed in range(rounds)
            ]
            rows.append(_row(batch, taken))
    for row in rows:
        report.stdout.print(row)
    document = {"machine": machine.describe("cpu"), "model": model, "dtype": dtype, "threads": threads}
    report.write_json({**document, "past": past, "rows": [asdict(row) for row in rows]}, json)


def _row(batch: int, taken: list[list[tuple[float, float]]]) -> EngineRow:
    median = statistics.median
    columns = []
    for at in range(2):
        ours, theirs = [one[at] for one, _ in taken], [other[at] for _, other in taken]
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        columns += [median(ours), median(theirs), median(ratios)]
    return EngineRow(batch, *columns)


class BenchedEngine:
    """An engine in a process of its own."""

    def __init__(
        self, python: Path, name: str, model: str, dtype: str, threads: int, environment: dict[str, str]
    ) -> None:
        command = [str(python), __file__, "worker", name, model, dtype, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        while self._line() != _READY:
            pass

    def __enter__(self) -> BenchedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate("", timeout=60)

    def measure(self, batch: int, past: int, steps: int, seed: int) -> tuple[float, float]:
        """Return the seconds of a decode step and of prefill."""
        assert self._process.stdin is not None
        self._process.stdin.write(json_module.dumps([batch, past, steps, seed]) + "\n")
        self._process.stdin.flush()
        while not (line := self._line()).startswith("["):
            pass
        decode_s, prefill_s = json_module.loads(line)
        return decode_s, prefill_s

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("an engine has ended: its error is above")
        return line.strip()


# -- in the engine's process -------------------------------------------------------------------------------


def work(name: str, model: str, dtype: str, threads: int) -> None:
    """Answer requests on stdin until it ends."""
    generate = (_ours if name == "tierstore" else _vllm)(model, dtype, threads)
    generate([[1] * 20], 2)
    _say(_READY)
    for line in sys.stdin:
        batch, past, steps, seed = json_module.loads(line)
        numbers = random.Random(seed)
        prompts = [[numbers.randrange(10, 4000) for _ in range(past)] for _ in range(batch)]
        prefill_s = _seconds(generate, prompts, 1)
        whole_s = _seconds(generate, prompts, 1 + steps)
        _say(json_module.dumps([(whole_s - prefill_s) / steps, prefill_s]))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _seconds(generate: Generate, prompts: list[list[int]], tokens: int) -> float:
    begun = time.perf_counter()
    generate(prompts, tokens)
    return time.perf_counter() - begun


def _ours(model: str, dtype: str, threads: int) -> Generate:
    import torch

    from tierstore_engine.build import build_engine, load_model
    from tierstore_engine.sampling import SamplingParams

    torch.set_num_threads(threads)
    loaded = load_model(model, device="cpu", dtype=dtype)
    engine = build_engine(loaded, pool_pages=400, prefix_cache=False)

    def generate(prompts: list[list[int]], tokens: int) -> object:
        return engine.generate(prompts, SamplingParams(max_new_tokens=tokens, ignore_eos=True))

    return generate


def _vllm(model: str, dtype: str, threads: int) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    engine: Any = LLM(model, dtype=dtype, max_model_len=1024, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], tokens: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return engine.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)

    return generate


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        _, _, engine, path, numbers, cores = sys.argv
        work(engine, path, numbers, int(cores))
    else:
        from tierstore.command_line import one_line_errors

        with one_line_errors("engines"):
            typer.run(main)
