"""The engine's settings: few, frozen, checked when made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tierstore.errors import UsageError

PLANS = ("both-ends", "one-way", "load", "compute")
SCHEDULES = ("cache", "fcfs")
PREFILL_BACKENDS = ("auto", "kernels", "library")


@dataclass(frozen=True)
class EngineSettings:
    """``prefill_chunk`` prompt tokens of one sequence are computed per step; chunks end at its multiples, so
    equal prompts are cut equally wherever a cached prefix ends. ``max_sequences`` share the pages at a time;
    ``max_batch_tokens`` (0: one prefill chunk beside decoding) bounds a step, and all but ``max_sequences`` -
    1 of them are for prompts. ``plan`` says what becomes of a hit: it is loaded as far as that is faster than
    computing, from its back while the front is computed (``both-ends``) or before the rest is (``one-way``);
    ``load`` and ``compute`` do the one or the other whatever it takes. ``schedule`` says whose prompt is
    computed first: what has least left to compute (``cache``, :mod:`tierstore_engine.ordering`), but no
    request waits more than ``overtake_s`` seconds longer (docs/serving.md says what else) than by ``fcfs``,
    first come, first served. On a GPU ``prefill_backend`` is ``kernels`` (this package's), ``library``
    (torch's) or ``auto``: what measures faster, by length of the past. ``checkpoint_tokens`` is how far apart
    a model with several layer groups is saved at most, so that hits may begin there (None: by size,
    :func:`tierstore.retention.checkpoint_tokens`; 0: where requests end and part only). Raises
    :class:`UsageError`."""

    prefill_chunk: int = 1024
    max_sequences: int = 32
    max_batch_tokens: int = 0
    plan: str = "both-ends"
    schedule: str = "cache"
    overtake_s: float = 10.0
    prefill_backend: str = "auto"
    checkpoint_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1 or self.max_sequences < 1:
            raise UsageError("prefill_chunk and max_sequences must be positive")
        if self.plan not in PLANS:
            raise UsageError(f"plan must be one of {', '.join(PLANS)}, not {self.plan!r}")
        if self.checkpoint_tokens is not None and self.checkpoint_tokens < 0:
            raise UsageError(f"checkpoint_tokens must be 0 or more, not {self.checkpoint_tokens}")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if not 0 <= self.overtake_s < math.inf:
            raise UsageError(f"overtake_s must be seconds, 0 or more, not {self.overtake_s}")
        if self.prefill_backend not in PREFILL_BACKENDS:
            raise UsageError(
                f"prefill_backend must be one of {', '.join(PREFILL_BACKENDS)}, not {self.prefill_backend!r}"
            )
        if self.max_batch_tokens and self.max_batch_tokens < self._least_batch:
            raise UsageError(
                f"max_batch_tokens must hold a prefill chunk and a token of every other sequence: "
                f"at least {self._least_batch}, not {self.max_batch_tokens}"
            )

    @property
    def batch_tokens(self) -> int:
        """The most tokens of one step."""
        return self.max_batch_tokens or self._least_batch

    @property
    def _least_batch(self) -> int:
        return self.prefill_chunk + self.max_sequences - 1

    @property
    def prompt_tokens(self) -> int:
        """Of a step, those that prompts may take: the others are kept for answers, however many there are
        just now. An answer then takes nothing from a prompt that came before it."""
        return self.batch_tokens - self.max_sequences + 1

    def check_chunk(self, chunk_tokens: int) -> None:
        """Raises :class:`UsageError` unless prefill chunks end where pages end."""
        if self.prefill_chunk % chunk_tokens:
            raise UsageError(
                f"prefill_chunk must be a multiple of the page's {chunk_tokens} tokens, "
                f"not {self.prefill_chunk}"
            )
        if self.checkpoint_tokens is not None and self.checkpoint_tokens % chunk_tokens:
            raise UsageError(
                f"checkpoint_tokens must be a multiple of the page's {chunk_tokens} tokens, "
                f"not {self.checkpoint_tokens}"
            )
