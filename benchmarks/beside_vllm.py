"""Measure the bundled engine on the CPU beside vLLM's CPU build: prompts and decode steps, taking turns.

    python benchmarks/beside_vllm.py --model ./smollm2 --vllm-python .venv-vllm/bin/python --dtype float32

Each engine is a process with ``--threads`` threads. In a turn it generates one token for each prompt of a
batch, and in a second run ``--new-tokens`` more. The first run is the time of the prompts, and the difference
is that of the decode steps. Neither reuses a prefix. The result is the median of the turns' ratios.
"""

from __future__ import annotations

import json as json_format
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer  # in both environments

Generate = Callable[[list[list[int]], int], Any]


def main(
    model: str = "./smollm2",
    vllm_python: str = ".venv-vllm/bin/python",
    dtype: str = "float32",
    batches: str = "1,4,16",
    prompt: int = 300,
    new_tokens: int = 32,
    threads: int = 1,
    turns: int = 3,
    json: str | None = None,
) -> None:
    """Measure MODEL with both engines."""
    from tierstore.errors import UsageError
    from tierstore_tools import machine, report

    report.require_targets(json)
    counts = [int(count) for count in batches.split(",") if count.isdecimal()]
    if not counts or min(*counts, prompt, new_tokens, threads, turns) < 1:
        raise UsageError("--batches are numbers such as 1,4,16, and all numbers are at least 1")
    size = [model, dtype, str(prompt), str(new_tokens), str(threads), str(max(counts))]
    engines = [
        EngineProcess(python, name, size)
        for python, name in ((sys.executable, "tierstore"), (str(Path(vllm_python).absolute()), "vllm"))
    ]
    rows = []
    try:
        for count in counts:
            taken = [[engine.measure(count) for engine in engines] for _ in range(turns + 1)][1:]
            row: dict[str, Any] = {"batch": count}
            for part, name in enumerate(("prompt", "step")):
                ours, theirs = ([turn[engine][part] for turn in taken] for engine in range(2))
                row[f"{name}_s"] = statistics.median(ours)
                row[f"vllm_{name}_s"] = statistics.median(theirs)
                ratios = (one / other for one, other in zip(ours, theirs, strict=True))
                row[f"{name}_of_vllm"] = statistics.median(ratios)
            rows.append(row)
            typer.echo(json_format.dumps(row), err=json == "-")
    finally:
        for engine in engines:
            engine.close()
    facts = {"machine": machine.describe(), "model": Path(model).name, "dtype": dtype, "prompt": prompt}
    report.write_json({**facts, "threads": threads, "rows": rows}, json)


class EngineProcess:
    """One engine in a process of its own, which computes when it is asked to."""

    def __init__(self, python: str, name: str, size: Sequence[str]) -> None:
        threads = size[4]
        cores = ",".join(map(str, range(int(threads))))
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": cores}
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [python, __file__, "--engine", name, *size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            start_new_session=True,
        )

    def measure(self, batch: int) -> tuple[float, float]:
        """Return the seconds of ``batch`` prompts, and of a decode step after them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batch}\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("seconds "):
                prompt, step = map(float, line.split()[1:])
                return prompt, step
        raise SystemExit("an engine has ended: its error is above")

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # vLLM's workers, too
        self._process.wait()


def serve(name: str, model: str, dtype: str, prompt: str, new_tokens: str, threads: str, most: str) -> None:
    """Measure each batch that is asked for, until the input ends."""
    length, more = int(prompt), int(new_tokens)
    opened = _tierstore if name == "tierstore" else _vllm
    generate = opened(model, dtype, int(threads), int(most), length + more + 1)
    for line in sys.stdin:
        prompts = [[(7 * token + 13 * row) % 20_000 for token in range(length)] for row in range(int(line))]
        times = []
        for count in (1, 1 + more):
            begun = time.perf_counter()
            generate(prompts, count)
            times.append(time.perf_counter() - begun)
        print(f"seconds {times[0]} {(times[1] - times[0]) / more}", flush=True)  # noqa: T201


def _tierstore(model: str, dtype: str, threads: int, most: int, tokens: int) -> Generate:
    import torch

    from tierstore_engine.build import build_engine, load_model, open_model
    from tierstore_engine.pool_sizes import pages_for_tokens
    from tierstore_engine.sampling import SamplingParams
    from tierstore_engine.settings import EngineSettings

    torch.set_num_threads(threads)
    loaded = load_model(open_model(model, device="cpu", dtype=dtype))
    pages = most * pages_for_tokens(loaded.kv_spec(), tokens) + most
    settings = EngineSettings(max_sequences=most)
    engine = build_engine(loaded, pool_pages=pages, prefix_cache=False, settings=settings)
    return lambda prompts, count: engine.generate(
        prompts, SamplingParams(max_new_tokens=count, ignore_eos=True)
    )


def _vllm(model: str, dtype: str, threads: int, most: int, tokens: int) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max(tokens, 512),
        max_num_seqs=most,
        enable_prefix_caching=False,
        enforce_eager=False,
    )

    def generate(prompts: list[list[int]], count: int) -> Any:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return llm.generate(given, params, use_tqdm=False)

    return generate


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        serve(*sys.argv[2:])
    else:
        from tierstore.command_line import one_line_errors

        with one_line_errors("beside_vllm"):
            typer.run(main)
