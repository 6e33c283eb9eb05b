"""What the engine gives back: a piece of text per step, and the whole completion at the end."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import numpy.typing as npt

RequestId = NewType("RequestId", int)


class FinishReason(str, enum.Enum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens, or the model's last position
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """One generated token's log probability, and the likeliest tokens' at that step."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """What one request cost and what the store saved it. Seconds are wall-clock.

    ``reused_by_tier`` counts prompt tokens by the tier that held them, fastest first, and only those that
    arrived. ``loaded_bytes`` and ``load_s`` cover all loads, those after a preemption too (on a GPU only
    until computing could begin, which may be before the last bytes are there); ``ttft_s`` runs from ``add``
    to the first token (0 when there was none), ``itl_s`` has one entry per further token.
    ``recomputed_tokens`` were computed once more because a preemption had lost them. Of ``drafted_tokens``
    (guessed, and computed beside others) ``accepted_tokens`` were what the model chose itself.
    """

    prompt_tokens: int = 0
    generated_tokens: int = 0
    reused_by_tier: Mapping[str, int] = field(default_factory=dict)
    loaded_bytes: int = 0
    load_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: tuple[float, ...] = ()
    preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused_by_tier.values())

    @property
    def tokens_per_s(self) -> float:
        """Decode speed after the first token; 0 when there was no second one."""
        spent = sum(self.itl_s)
        return len(self.itl_s) / spent if spent else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request. ``tokens`` has all generated ids, also those of a stop that ``text`` leaves out.
    ``submitted_tokens`` of the prompt, in whole chunks, are in the store or on their way to it.

    ``logits`` is float32 ``[generated, vocab_size]`` when asked for; ``logprobs`` has one entry per token.
    """

    request_id: RequestId
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: tuple[StepLogprobs, ...] = ()
    logits: npt.NDArray[np.float32] | None = None
    submitted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step added to one request: its tokens (one, or more where a draft was accepted), and the text
    that is certain now (it may be empty, and may hold text of earlier tokens). The last one carries the
    completion."""

    request_id: RequestId
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[StepLogprobs, ...] = ()  # of each token, where they were asked for
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the start, and how many requests are where now.

    Of ``drafted_tokens`` (guessed by a drafter) ``accepted_tokens`` were right. ``shared_pages`` is how many
    pages more there would be without sharing among forked requests. ``late_requests`` were refused because
    of their deadlines. ``longest_overtaken_s`` is for how long a request was overtaken, at most
    (:mod:`tierstore_engine.overtaking`).
    """

    steps: int
    computed_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    waiting: int
    admitted: int
    shared_pages: int
    available_pages: int
    total_pages: int
    late_requests: int
    longest_overtaken_s: float
