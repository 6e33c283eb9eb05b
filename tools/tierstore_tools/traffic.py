"""Generated traffic of several models whose shares drift: prompts, some new, some seen before.

The same seed makes the same prompts. Each model has pages of one size. Its share of the bytes rises and falls
over the day like a tide, with another phase for each model.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tierstore.keys import Identity, Prompt

CHUNK_TOKENS = 64
_TIDES = 2 / 0.9  # per day: so the first and the last tenth have the same shares
_LOWEST = 0.02  # share at low tide, as a fraction of the mean
_REMEMBERED = 4096  # prompts per model that may repeat
_MOST_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class ChurnRequest:
    """A prompt that an engine computes or loads."""

    page_bytes: int
    prompt: Prompt

    @property
    def nbytes(self) -> int:
        return len(self.prompt.keys) * self.page_bytes


class ChurnTraffic:
    """Prompts of one model per page size. ``reuse`` is the share of prompts that repeat an earlier one, some
    of them longer. The typical distance to the earlier one is ``recent_bytes``, over all models.
    ``prompt_bytes`` is the approximate size of a prompt's pages.
    """

    def __init__(
        self,
        page_sizes: Sequence[int],
        *,
        seed: int = 0,
        reuse: float = 0.4,
        recent_bytes: int,
        prompt_bytes: int,
    ) -> None:
        self._sizes = list(page_sizes)
        self._identities = [Identity(f"model {nbytes}", "layout") for nbytes in page_sizes]
        self._random = random.Random(seed)
        self._reuse = reuse
        self._recent = max(recent_bytes // prompt_bytes // len(self._sizes), 1)
        self._prompt_bytes = prompt_bytes
        self._past: list[deque[tuple[int, int]]] = [deque(maxlen=_REMEMBERED) for _ in page_sizes]
        self._next_seed = seed << 32

    def next(self, time_of_day: float) -> ChurnRequest:
        """Return the next prompt. ``time_of_day`` is from 0 to 1, and below 0 on the evening before."""
        model = self._model(time_of_day)
        seed, chunks = self._remembered(model) or self._made_up(model)
        self._past[model].append((seed, chunks))
        tokens = np.random.default_rng(seed).integers(
            0, 1 << 17, _MOST_CHUNKS * CHUNK_TOKENS, dtype=np.uint32
        )
        prompt = Prompt(self._identities[model], tokens[: chunks * CHUNK_TOKENS], chunk_tokens=CHUNK_TOKENS)
        return ChurnRequest(self._sizes[model], prompt)

    def _model(self, time_of_day: float) -> int:
        shares = []
        for model, nbytes in enumerate(self._sizes):
            phase = model / len(self._sizes)
            tide = 1 + math.cos(2 * math.pi * (_TIDES * time_of_day + phase))
            # Shares count bytes: a model with smaller prompts has more of them.
            shares.append((tide + _LOWEST) / min(self._prompt_bytes, _MOST_CHUNKS * nbytes))
        return self._random.choices(range(len(self._sizes)), shares)[0]

    def _remembered(self, model: int) -> tuple[int, int] | None:
        past = self._past[model]
        if not past or self._random.random() >= self._reuse:
            return None
        ago = min(int(self._random.expovariate(1 / self._recent)), len(past) - 1)
        seed, chunks = past[-1 - ago]
        grown = self._random.randint(1, max(chunks // 4, 1)) if self._random.random() < 0.3 else 0
        return seed, min(chunks + grown, _MOST_CHUNKS)

    def _made_up(self, model: int) -> tuple[int, int]:
        self._next_seed += 1
        mean = self._prompt_bytes / self._sizes[model]
        chunks = max(round(self._random.uniform(0.5, 1.5) * mean), 1)
        return self._next_seed, min(chunks, _MOST_CHUNKS)
