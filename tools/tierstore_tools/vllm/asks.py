"""Requests to an engine process and its answers. Both cross a pipe as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHOWN_LOGPROBS = 5


@dataclass(frozen=True)
class Ask:
    """One request: greedy, with no early end. ``params`` are vLLM's ``kv_transfer_params``, ``adapter`` is a
    LoRA adapter's directory. The request is aborted after ``abort_after`` tokens (0: before the first step).
    ``prompt_logprobs``: vLLM also computes log-probabilities of the prompt; the answer does not have them."""

    tokens: list[int]
    max_tokens: int = 8
    salt: str | None = None
    params: dict[str, Any] | None = None
    adapter: str | None = None
    abort_after: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class VllmAnswer:
    """The answer to one request. ``logprobs[i]`` maps the likeliest tokens at the i-th place to their natural
    log-probabilities. ``cached_tokens`` are the prompt tokens that vLLM reports as not computed, from its own
    cache or from the connector. Times are seconds from the request's arrival, measured outside the engine.
    For an aborted request ``finish`` is ``"aborted"`` and the other fields have the state at the abort."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    ttft_s: float
    total_s: float
    finish: str
    params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Batch:
    """Requests that run in the engine at the same time."""

    asks: list[Ask]


@dataclass(frozen=True)
class Answers:
    """The answers to a batch, in its order. ``external_hit_tokens`` came from the connector and
    ``local_hit_tokens`` from vLLM's own cache, over all requests. ``steps`` are the engine's. ``cpu_s`` is
    the CPU time of the asking process (with one process: of the whole engine)."""

    answers: list[VllmAnswer]
    external_hit_tokens: int
    local_hit_tokens: int
    wall_s: float
    cpu_s: float
    steps: int


@dataclass(frozen=True)
class EngineJob:
    """The engine to make. ``options`` are keyword arguments of ``vllm.LLM``."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)


def prompt(tokens: int, *, seed: int = 0) -> list[int]:
    """Return ``tokens`` token ids below 250, which every vocabulary has. Prompts of one seed are prefixes of
    one another. Prompts of two seeds differ from the first token on (up to 250 seeds)."""
    state, made = 2 * seed + 1, [seed % 250]
    while len(made) < tokens:
        state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        made.append((state >> 33) % 250)
    return made[:tokens]


def greatest_difference(one: VllmAnswer, other: VllmAnswer) -> float:
    """Return the greatest difference between the log-probabilities of two answers. It is infinite if their
    tokens differ, or if the lists of likeliest tokens differ by more than a tie at the end of the list
    explains."""
    if one.tokens != other.tokens or len(one.logprobs) != len(other.logprobs):
        return float("inf")
    greatest = 0.0
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        shared = mine.keys() & theirs.keys()
        if len(shared) < min(len(mine), len(theirs)) - 1:
            return float("inf")
        greatest = max(greatest, *(abs(mine[token] - theirs[token]) for token in shared))
    return greatest
