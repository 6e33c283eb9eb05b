"""Measure what ``--deterministic`` costs: prompts and decode steps beside the default, taking turns.

    python benchmarks/deterministic.py --model ./smollm2 --tokens 2048 --dtype bfloat16

A prompt of ``--tokens`` tokens is computed in chunks of 512, and then ``--steps`` tokens one by one. The
result is the median of the ratios.
"""

from __future__ import annotations

import statistics
import time

import torch
import typer

from tierstore.command_line import one_line_errors
from tierstore.errors import UsageError
from tierstore.tiers.hbm import COMPLETED
from tierstore_engine.attention.base import Span
from tierstore_engine.build import load_model, make_runner, open_model, pools_of_one_sequence
from tierstore_engine.loaded import LoadedModel
from tierstore_engine.settings import EngineSettings
from tierstore_engine.step import Step
from tierstore_tools import machine, report

_CHUNK = 512


def main(
    model: str = "deep",
    dtype: str | None = None,
    tokens: int = 2048,
    steps: int = 20,
    rounds: int = 3,
    threads: int = 1,
    json: str | None = None,
) -> None:
    """Measure a prompt of TOKENS tokens and STEPS decode steps, ROUNDS times."""
    report.require_targets(json)
    if min(tokens, steps, rounds, threads) < 1:
        raise UsageError("--tokens, --steps, --rounds and --threads begin at 1")
    torch.set_num_threads(threads)
    ways = [
        load_model(open_model(model, device="cpu", dtype=dtype, deterministic=same)) for same in (False, True)
    ]
    prompts, decodes = [], []
    for _ in range(rounds):
        (plain, plain_step), (same, same_step) = (measured(way, tokens, steps) for way in ways)
        prompts.append(same / plain)
        decodes.append(same_step / plain_step)
        typer.echo(
            f"prompt {plain:.2f} s and {same:.2f} s, step {plain_step:.4f} s and {same_step:.4f} s", err=True
        )
    prompt, step = statistics.median(prompts), statistics.median(decodes)
    typer.echo(
        f"{ways[0].config.dtype}, {tokens} tokens, {threads} threads: --deterministic takes "
        f"{prompt:.2f} × for the prompt, {step:.2f} × for a step",
        err=json == "-",
    )
    facts = {"machine": machine.describe(), "model": model, "dtype": ways[0].config.dtype}
    facts |= {"tokens": tokens, "threads": threads}
    report.write_json({**facts, "prompt_of_default": prompt, "step_of_default": step}, json)


def measured(model: LoadedModel, tokens: int, steps: int) -> tuple[float, float]:
    """Return the seconds of a prompt and of a decode step after it."""
    pools = pools_of_one_sequence(model, tokens + steps)
    runner = make_runner(model, pools, EngineSettings())
    tables = tuple(range(pool.num_pages) for pool in pools)

    def compute(start: int, stop: int) -> float:
        span = Span(tables, start, stop)
        ids = [token % 200 for token in range(start, stop)]
        begun = time.perf_counter()
        runner.compute(Step((span,), ids, [stop - start - 1], COMPLETED, pools[0].spec.chunk_tokens))
        return time.perf_counter() - begun

    prompt = sum(compute(start, min(start + _CHUNK, tokens)) for start in range(0, tokens, _CHUNK))
    return prompt, statistics.median(compute(tokens + step, tokens + step + 1) for step in range(steps))


if __name__ == "__main__":
    with one_line_errors("deterministic"):
        typer.run(main)
