"""What is asked of an engine, and what it answers. Both cross a pipe as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHOWN_LOGPROBS = 5


@dataclass(frozen=True)
class Ask:
    """One request: greedy, never ending early. ``params`` are vLLM's ``kv_transfer_params``, ``adapter`` is a
    LoRA adapter's directory. ``abort_after`` tokens the request is aborted (0: before the first step).
    ``prompt_logprobs``: log-probabilities of the prompt are wanted, too (and left out of the answer)."""

    tokens: list[int]
    max_tokens: int = 8
    salt: str | None = None
    params: dict[str, Any] | None = None
    adapter: str | None = None
    abort_after: int | None = None
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class VllmAnswer:
    """``logprobs[i]`` maps the likeliest tokens at the i-th place to their log-probabilities (natural).
    ``cached_tokens`` is what vLLM says it did not compute, from its own cache or from elsewhere. Times are
    from the request's arrival, in seconds, seen from outside the engine. An aborted request has no answer of
    vLLM's own: ``finish`` is then ``"aborted"`` and the rest what had come by then."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    cached_tokens: int
    ttft_s: float
    total_s: float
    finish: str
    params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Batch:
    """Requests that are in the engine at the same time."""

    asks: list[Ask]


@dataclass(frozen=True)
class Answers:
    """The answers to a batch in its order. ``external_hit_tokens`` and ``local_hit_tokens`` are the prefix
    tokens of all requests that came from the connector and from vLLM's own cache; ``steps`` the engine's.
    ``cpu_s`` is the CPU time of the process that asks (with one process: of the whole engine)."""

    answers: list[VllmAnswer]
    external_hit_tokens: int
    local_hit_tokens: int
    wall_s: float
    cpu_s: float
    steps: int


@dataclass(frozen=True)
class EngineJob:
    """How the engine is made: ``options`` are keyword arguments of ``vllm.LLM``."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)


def prompt(tokens: int, *, seed: int = 0) -> list[int]:
    """``tokens`` token ids below 250, which every vocabulary has. Prompts of one seed are prefixes of one
    another; those of two seeds differ from the first token on (up to 250 of them)."""
    state, made = 2 * seed + 1, [seed % 250]
    while len(made) < tokens:
        state = (state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        made.append((state >> 33) % 250)
    return made[:tokens]


def greatest_difference(one: VllmAnswer, other: VllmAnswer) -> float:
    """Between the log-probabilities of two answers; infinite when their tokens differ, or the tokens shown as
    likeliest do so by more than a tie at the end of the list explains."""
    if one.tokens != other.tokens or len(one.logprobs) != len(other.logprobs):
        return float("inf")
    greatest = 0.0
    for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
        shared = mine.keys() & theirs.keys()
        if len(shared) < min(len(mine), len(theirs)) - 1:
            return float("inf")
        greatest = max(greatest, *(abs(mine[token] - theirs[token]) for token in shared))
    return greatest
