"""The engine's outputs: a piece of text per step, and the whole completion at the end."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

import numpy as np
import numpy.typing as npt

from tierstore.tiers.beyond import OverflowStats

RequestId = NewType("RequestId", int)


class FinishReason(str, enum.Enum):
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_new_tokens, or the model's last position
    CANCELLED = "cancelled"
    ERROR = "error"  # see Completion.error


class WaitReason(str, enum.Enum):
    """Why a request has no pages yet."""

    TURN = "turn"  # other prompts come first
    # the request shares pages with the request that it was forked from, which has to compute its next token
    # first
    FORK = "fork"
    PROMISE = "promise"  # another engine has promised its pages
    FETCH = "fetch"  # the request's pages are being fetched from other hosts
    PREFIX = "prefix"  # an admitted request computes or loads the beginning of its prompt
    ALONE = "alone"  # another request must run alone
    SHORT = "short"  # an admitted request lacks pages
    PREEMPTED = "preempted"  # the request was preempted, and no admitted request has ended since
    SLOT = "slot"  # the largest number of requests is admitted
    # the request's pages, and those that the admitted requests still need, are not available at the same time
    ROOM = "room"

    @property
    def blocks(self) -> bool:
        """Return whether the request waits until admitted requests end or release something."""
        return self in _BLOCKING


_BLOCKING = {WaitReason.ALONE, WaitReason.SHORT, WaitReason.PREEMPTED, WaitReason.SLOT, WaitReason.ROOM}


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """The log probabilities of one generated token and of the likeliest tokens at that step."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The cost of one request, and its savings through the store. Seconds are wall-clock.

    - ``reused_by_tier``: loaded prompt tokens by the tier that held them, fastest first.
    - ``loaded_bytes``, ``load_s``: the bytes and seconds of all loads, including those after preemptions. On
      a GPU ``load_s`` ends when computing can begin, which may be before the last byte has arrived.
    - ``ttft_s``: the time from ``add`` to the first token; 0 if there is no token. ``itl_s``: one entry per
      further token.
    - ``recomputed_tokens``: computed again after preemptions.
    - ``drafted_tokens``: tokens that a drafter guessed and the model checked. ``accepted_tokens``: drafted
      tokens that the model chose, too.
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
        """Return the speed of decoding after the first token; 0 if there is no second token."""
        spent = sum(self.itl_s)
        return len(self.itl_s) / spent if spent else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request.

    ``tokens`` has all generated ids, including those of a stop string that ``text`` leaves out. ``logits`` is
    float32 ``[generated, vocab_size]`` if it was asked for. ``logprobs`` has one entry per token.
    ``submitted_tokens`` of the prompt, in whole chunks, are in the store or being saved. ``error`` says why
    the request could not be served to its end."""

    request_id: RequestId
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    metrics: RequestMetrics
    logprobs: tuple[StepLogprobs, ...] = ()
    logits: npt.NDArray[np.float32] | None = None
    submitted_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of one step for one request.

    ``tokens`` has one token, or more if a draft was accepted. ``text`` is the new text that later tokens
    cannot change. It may be empty, and may include text of earlier tokens. The last output has the
    completion.
    """

    request_id: RequestId
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[StepLogprobs, ...] = ()  # one per token, if the request has asked for log probabilities
    completion: Completion | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and the current state.

    ``waiting_for`` counts the waiting requests by the reason why the last step did not admit them.
    ``accepted_tokens`` is how many of the ``drafted_tokens`` the model accepted. ``shared_pages`` is how many
    pages sharing among forked requests saves. ``late_requests`` is the number of requests that were refused
    because of their deadlines. ``longest_overtaken_s`` is the longest time for which a request was overtaken
    (:mod:`tierstore_engine.ordering`). ``encoded_images`` is how many images the encoder has computed, and
    ``found_images`` how many embeddings of images the store had.
    """

    steps: int
    computed_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    waiting_for: Mapping[WaitReason, int]
    admitted: int
    shared_pages: int
    available_pages: int
    total_pages: int
    late_requests: int
    longest_overtaken_s: float
    overflow: OverflowStats | None = None  # None without an overflow file
    encoded_images: int = 0
    found_images: int = 0

    @property
    def waiting(self) -> int:
        return sum(self.waiting_for.values())

    @property
    def wait_reasons(self) -> str:
        """Return the reasons as one line, the most frequent first: "5 turn, 1 room". Empty if no request
        waits."""
        counts = sorted(self.waiting_for.items(), key=lambda item: -item[1])
        return ", ".join(f"{count:,} {reason.value}" for reason, count in counts)
