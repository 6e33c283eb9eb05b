"""Which token comes next: the parameters of a request, and the choice from one row of logits.

The choice is made by inverting the cumulative distribution at one uniform number per token. A request draws
those from its own generator, so its tokens depend on its seed and its logits, never on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tierstore_engine.errors import RequestError
from tierstore_engine.outputs import StepLogprobs, TokenLogprob


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Raises :class:`RequestError` for values that cannot work.

    ``temperature`` 0 is greedy and ignores the filters. ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are off;
    they apply in that order, after the temperature. ``stop`` ends the text before the first of its strings;
    ``stop_token_ids`` end it like the model's own end-of-sequence ids, which ``ignore_eos`` switches off.
    ``logprobs`` asks for that many most likely tokens beside the chosen one, from the model's own
    distribution (before temperature and filters). ``keep_logits`` keeps each step's float32 logits.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    keep_logits: bool = False

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        _require(0 <= self.temperature < float("inf"), f"temperature cannot be {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must lie in (0, 1], not {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must lie in [0, 1], not {self.min_p}")
        _require(self.logprobs is None or self.logprobs >= 0, f"logprobs cannot be {self.logprobs}")
        _require(all(self.stop), "a stop string must not be empty")


def choose(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """The next token from ``logits`` (float32 ``[vocab_size]``) and a number in [0, 1) drawn for it."""
    if params.temperature == 0:
        return int(logits.argmax())
    tokens, probabilities = candidates(logits, params)
    cumulative = probabilities.cumsum(0)
    rank = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(tokens[min(rank, len(tokens) - 1)])


def candidates(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may come next, likeliest first, and their probabilities (float64, summing to 1)."""
    scaled = (logits.double() - logits.max()) / params.temperature
    count = min(params.top_k, len(logits)) or len(logits)
    ranked = scaled.sort(descending=True, stable=True)
    tokens, probabilities = ranked.indices[:count], ranked.values[:count].softmax(0)
    # A token stays while those before it have not filled top_p: the likeliest always does.
    before = probabilities.cumsum(0) - probabilities
    kept = (before < params.top_p) & (probabilities >= params.min_p * probabilities[0])
    kept[0] = True
    return tokens[kept], probabilities[kept] / probabilities[kept].sum()


def logprobs_of(logits: torch.Tensor, chosen: int, top: int) -> StepLogprobs:
    """The log probabilities of ``chosen`` and of the ``top`` likeliest tokens under the raw ``logits``."""
    logs = logits.log_softmax(-1)
    best = logs.topk(min(top, len(logs)))
    return StepLogprobs(
        chosen=TokenLogprob(chosen, float(logs[chosen])),
        top=tuple(map(TokenLogprob, best.indices.tolist(), best.values.tolist())),
    )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
