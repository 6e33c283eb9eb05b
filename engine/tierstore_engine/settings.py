"""The engine's settings, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.retention import checkpoint_tokens
from tierstore.spec import KVSpec

PLANS = ("both-ends", "one-way", "load", "compute")
SCHEDULES = ("cache", "fcfs")
PREFILL_BACKENDS = ("auto", "kernels", "library")


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine. Raises :class:`UsageError` for invalid values.

    - ``prefill_chunk``: prompt tokens of one sequence per step. Chunks end at its multiples, so equal prompts
      are cut equally wherever a cached prefix ends.
    - ``max_sequences``: the most sequences that have pages at the same time.
    - ``max_batch_tokens``: tokens of one step at most; all but ``max_sequences - 1`` of them are for prompts.
      0 means one prefill chunk beside decoding.
    - ``plan``: how a hit is used. ``both-ends`` loads it from its back while its front is computed,
      ``one-way`` loads it before the rest is computed; both load only as far as that is faster. ``load`` and
      ``compute`` always do the one or the other.
    - ``schedule``: ``cache`` computes the prompt with the least left to compute first
      (:mod:`tierstore_engine.ordering`), ``fcfs`` the oldest.
    - ``overtake_s``: with ``cache``, how many seconds longer a request may wait than with ``fcfs``
      (docs/serving.md has the exact bound).
    - ``prefill_backend``, on a GPU: ``kernels`` (this package's), ``library`` (torch's), or ``auto``, the one
      that measures faster for the length of the past.
    - ``checkpoint_tokens``: the largest distance of save points in a model with several layer groups, where
      hits may begin. None chooses by size (:func:`tierstore.retention.checkpoint_tokens`); 0 saves only where
      requests end and diverge.
    - ``whole_windows``: save all pages of windows and attention chunks, as SGLang needs them, and not only
      those that hits at save points need.
    """

    prefill_chunk: int = 1024
    max_sequences: int = 32
    max_batch_tokens: int = 0
    plan: str = "both-ends"
    schedule: str = "cache"
    overtake_s: float = 10.0
    prefill_backend: str = "auto"
    checkpoint_tokens: int | None = None
    whole_windows: bool = False

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1 or self.max_sequences < 1:
            raise UsageError("prefill_chunk and max_sequences must be positive")
        if self.plan not in PLANS:
            raise UsageError(f"plan must be one of {', '.join(PLANS)}, got {self.plan!r}")
        if self.checkpoint_tokens is not None and self.checkpoint_tokens < 0:
            raise UsageError(f"checkpoint_tokens must be 0 or more, got {self.checkpoint_tokens}")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if not 0 <= self.overtake_s < math.inf:
            raise UsageError(f"overtake_s must be at least 0 seconds, got {self.overtake_s}")
        if self.prefill_backend not in PREFILL_BACKENDS:
            raise UsageError(
                f"prefill_backend must be one of {', '.join(PREFILL_BACKENDS)}, got {self.prefill_backend!r}"
            )
        if self.max_batch_tokens and self.max_batch_tokens < self._least_batch:
            raise UsageError(
                f"max_batch_tokens must hold a prefill chunk and a token of every other sequence: "
                f"at least {self._least_batch}, got {self.max_batch_tokens}"
            )

    @property
    def batch_tokens(self) -> int:
        """Return the largest number of tokens in one step."""
        return self.max_batch_tokens or self._least_batch

    @property
    def _least_batch(self) -> int:
        return self.prefill_chunk + self.max_sequences - 1

    @property
    def prompt_tokens(self) -> int:
        """Return how many tokens of a step prompts may take. The others are reserved for answers, independent
        of their current number. Decoding therefore never reduces the tokens of a step that prompts may
        take."""
        return self.batch_tokens - self.max_sequences + 1

    def checkpoint_distance(self, spec: KVSpec) -> int:
        """Return the largest distance of save points, in tokens, in a model with the pages of ``spec``."""
        return checkpoint_tokens(spec) if self.checkpoint_tokens is None else self.checkpoint_tokens

    def check_chunk(self, chunk_tokens: int) -> None:
        """Raise :class:`UsageError` unless prefill chunks end where pages end."""
        if self.prefill_chunk % chunk_tokens:
            raise UsageError(
                f"prefill_chunk must be a multiple of the page's {chunk_tokens} tokens, "
                f"got {self.prefill_chunk}"
            )
        if self.checkpoint_tokens is not None and self.checkpoint_tokens % chunk_tokens:
            raise UsageError(
                f"checkpoint_tokens must be a multiple of the page's {chunk_tokens} tokens, "
                f"got {self.checkpoint_tokens}"
            )
