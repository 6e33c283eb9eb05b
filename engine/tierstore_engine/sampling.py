"""Sampling: the parameters of a request, and the choice of tokens from a step's logits.

A choice inverts the cumulative distribution at one uniform number per token. Each request draws these numbers
from its own generator. Its tokens therefore depend on its seed and its logits, and never on other requests of
the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tierstore_engine.errors import RequestError
from tierstore_engine.moving import to_device, to_host
from tierstore_engine.outputs import StepLogprobs, TokenLogprob

_ROWS_AT_ONCE = 16
"""Rows sampled together. The most rows that are sampled at a time. Each row temporarily needs about 50 bytes
per token of the vocabulary."""


@dataclass(frozen=True)
class SamplingParams:
    """The parameters of one request. Raises :class:`RequestError` for invalid values.

    ``temperature`` 0 is greedy and ignores the filters. The filters ``top_k``, ``top_p`` and ``min_p`` are
    applied in this order, after the temperature. The values 0, 1 and 0 turn them off. ``stop`` ends the text
    before the first of its strings. ``stop_token_ids`` end the text like the model's own end-of-sequence ids.
    ``ignore_eos`` switches the model's ids off. ``logprobs`` asks for this many most likely tokens beside the
    chosen one, from the model's own distribution (before penalties, temperature and filters). ``keep_logits``
    keeps each step's float32 logits.

    These parameters change the logits before a token is chosen, in this order:

    - ``repetition_penalty`` (1 is off) applies to every token of prompt and answer: positive logits are
      divided by it, negative ones multiplied by it, as in transformers.
    - ``logit_bias`` is added.
    - ``presence_penalty`` is subtracted for every token of the answer, ``frequency_penalty`` for each of its
      occurrences there.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        _require(
            0 <= self.temperature < float("inf"),
            f"temperature must be 0 or more and finite, got {self.temperature}",
        )
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, got {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        _require(
            self.logprobs is None or self.logprobs >= 0, f"logprobs must be 0 or more, got {self.logprobs}"
        )
        _require(all(self.stop), "a stop string must not be empty")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), f"{name} must be finite, got {getattr(self, name)}")
        _require(
            0 < self.repetition_penalty < float("inf"),
            f"repetition_penalty must be more than 0 (1 is off), got {self.repetition_penalty}",
        )
        _require(
            all(map(math.isfinite, self.logit_bias.values())),
            "the values of logit_bias must be finite numbers",
        )

    @property
    def biased(self) -> bool:
        """Return whether logits are changed before a choice."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        return bool(penalties or self.logit_bias)

    def bias(self, counts: Mapping[int, int]) -> dict[int, float]:
        """Return the values to add to logits, by token, after the generated tokens in ``counts``."""
        bias = dict(self.logit_bias)
        for token, count in counts.items():
            penalty = self.presence_penalty + self.frequency_penalty * count
            if penalty:
                bias[token] = bias.get(token, 0.0) - penalty
        return bias


@dataclass(frozen=True, slots=True)
class Draw:
    """The input of one sequence's next choice.

    ``uniform`` is a random number in [0, 1). ``repeated`` are the token ids (int64, in host memory,
    duplicates allowed) that ``params.repetition_penalty`` applies to, None if it is off. After the penalty,
    ``bias`` is added to the logits of its tokens.
    """

    params: SamplingParams
    uniform: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    repeated: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence's next token. ``logits`` (float32 ``[vocab_size]``, in host memory) is a copy."""

    token: int
    logprobs: StepLogprobs | None = None
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The choices of one step, as tensors.

    ``tokens`` (int64) has all rows. ``logprobs`` has, for rows that asked, the log probability of the chosen
    token (float32 ``[1]``), the likeliest tokens and their log probabilities. ``logits`` has rows of logits.
    """

    tokens: torch.Tensor
    logprobs: Mapping[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    logits: Mapping[int, torch.Tensor]

    def to_host(self) -> Sampled:
        """Copy the choices to host memory without waiting. The caller must wait before it reads them."""
        return Sampled(
            to_host(self.tokens),
            {row: (to_host(a), to_host(b), to_host(c)) for row, (a, b, c) in self.logprobs.items()},
            {row: to_host(logits) for row, logits in self.logits.items()},
        )

    def choices(self) -> list[Choice]:
        """Return the choices by row. All copies must have arrived."""
        kept = {row: logits.clone() for row, logits in self.logits.items()}
        tokens = enumerate(self.tokens.tolist())
        return [Choice(token, self._logprobs(row, token), kept.get(row)) for row, token in tokens]

    def _logprobs(self, row: int, token: int) -> StepLogprobs | None:
        if row not in self.logprobs:
            return None
        of_chosen, best, of_best = self.logprobs[row]
        top = tuple(map(TokenLogprob, best.tolist(), of_best.tolist()))
        return StepLogprobs(TokenLogprob(token, float(of_chosen)), top)


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw], rows: Sequence[int] | None = None) -> Sampled:
    """Choose a token for each draw from ``logits`` (float32 ``[rows, vocab_size]``), on their device.

    Each draw uses the row that ``rows`` names for it. None means the first draw from the first row, and so
    on. The host waits for no operation, because it reads no number from the device: shapes do not depend on
    logits, and filtered tokens get weight 0 instead of being removed. A row's choice depends on that row
    alone.
    """
    if rows is not None and list(rows) != list(range(len(logits))):
        logits = logits[to_device(torch.tensor(rows), logits.device)]
    biased = _biased(penalized(logits, draws), draws)
    tokens = biased.argmax(-1)
    random = [row for row, draw in enumerate(draws) if draw.params.temperature > 0]
    for start in range(0, len(random), _ROWS_AT_ONCE):
        some = random[start : start + _ROWS_AT_ONCE]
        where = to_device(torch.tensor(some), logits.device)
        ranked = weights(biased[where], [draws[row].params for row in some])
        tokens[where] = _invert(*ranked, [draws[row].uniform for row in some])
    wanted = {row: draw.params.logprobs for row, draw in enumerate(draws)}
    return Sampled(
        tokens,
        {row: _logprobs(logits[row], tokens[row], top) for row, top in wanted.items() if top is not None},
        {row: logits[row] for row, draw in enumerate(draws) if draw.params.keep_logits},
    )


def weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each row of logits, the tokens by falling probability, and their probabilities (float64).

    The probabilities sum to 1 after the temperature and ``top_k``. Tokens that the other filters remove have
    the probability 0.
    """
    vocab_size = logits.shape[1]
    numbers = [(p.temperature, p.top_k or vocab_size, p.top_p, p.min_p) for p in params]
    on_device = to_device(torch.tensor(numbers, dtype=torch.float64), logits.device)
    temperature, top_k, top_p, min_p = torch.split(on_device, 1, dim=1)
    # Tokens are sorted by their logits, because different logits may become equal when the largest one is
    # subtracted.
    ranked = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (ranked.values.double() - ranked.values[:, :1]) / temperature
    among = torch.arange(vocab_size, device=logits.device) < top_k
    probabilities = scaled.masked_fill(~among, -torch.inf).softmax(-1)
    # A token stays if the tokens before it sum to less than top_p. The likeliest token always stays.
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    kept[:, 0] = True
    return ranked.indices, probabilities * kept


def _invert(tokens: torch.Tensor, weights: torch.Tensor, uniforms: Sequence[float]) -> torch.Tensor:
    """Return, for each row, the first token at which the cumulative weight exceeds the row's share of its
    total weight."""
    shares = to_device(torch.tensor(uniforms, dtype=torch.float64), tokens.device).unsqueeze(1)
    cumulative = weights.cumsum(-1)
    rank = (cumulative <= shares * cumulative[:, -1:]).sum(-1, keepdim=True)
    # A share close to 1 may be rounded to 1, which is after the last token with a weight.
    places = torch.arange(weights.shape[1], device=weights.device)
    last = (places * (weights > 0)).amax(-1, keepdim=True)
    return tokens.gather(1, torch.minimum(rank, last)).squeeze(1)


def penalized(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return ``logits`` after the repetition penalties; the same tensor if no draw has one."""
    repeated = [
        (row, draw.repeated, draw.params.repetition_penalty)
        for row, draw in enumerate(draws)
        if draw.repeated is not None
    ]
    if not repeated:
        return logits
    rows, given, penalties = zip(*repeated, strict=True)
    tokens = [
        each[each < logits.shape[1]] for each in given
    ]  # a prompt may have ids beyond the vocabulary, such as those of images
    counts = torch.tensor([len(each) for each in tokens])
    where = to_device(
        torch.stack((torch.tensor(rows).repeat_interleave(counts), torch.cat(tokens))), logits.device
    )
    factors = to_device(torch.tensor(penalties, dtype=logits.dtype).repeat_interleave(counts), logits.device)
    found = logits[where[0], where[1]]
    # A tiny penalty must not make logits infinite: the difference of two infinite logits is not a number.
    most = torch.finfo(logits.dtype).max
    changed = torch.where(found > 0, found / factors, found * factors).clamp(-most, most)
    return logits.index_put((where[0], where[1]), changed)


def _biased(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Return ``logits`` with each draw's bias added; the same tensor if no draw has one."""
    added = [(row, token, value) for row, draw in enumerate(draws) for token, value in draw.bias.items()]
    if not added:
        return logits
    rows, tokens, values = zip(*added, strict=True)
    where = to_device(torch.tensor([rows, tokens]), logits.device)
    amounts = to_device(torch.tensor(values, dtype=logits.dtype), logits.device)
    return logits.index_put((where[0], where[1]), amounts, accumulate=True)


def _logprobs(
    logits: torch.Tensor, token: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log probability of ``token``, the ``top`` likeliest tokens and their log probabilities, from
    the raw ``logits``."""
    logs = logits.log_softmax(-1)
    best = logs.topk(min(top, len(logs)))
    return logs.gather(0, token.unsqueeze(0)), best.indices, best.values


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise RequestError(message)
