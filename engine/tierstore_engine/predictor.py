"""Multi-token prediction: a layer of the checkpoint drafts tokens from the model's outputs.

The input of the layer is the model's output for a token, and the embedding of the next token. The layer
predicts the token after these two (DeepSeek-V3, arXiv:2412.19437, section 2.2). ``hᵢ`` is the output for
token ``tᵢ``, after the final norm. The layer uses the model's embeddings and head::

    h'ᵢ₊₁ = layer(merge · [norm(embedding(tᵢ₊₁)); norm(hᵢ)])        logits of tᵢ₊₂ = head(norm(h'ᵢ₊₁))

A checkpoint has one such layer. For further tokens of a draft, ``norm(h')`` takes the place of ``h``.

The model's pages hold the layer's KV (or latents) as that of one more layer. The KV of ``h'ᵢ₊₁`` is at token
``i + 1``. It depends on no later token, so a page still depends on its own tokens and earlier ones only. Hits
from every tier, parked requests, forks and hand-overs include this KV. Token 0 has no output before it, so no
token attends to it in this layer. After each step, :meth:`PredictorDrafter.follow` writes the KV of the
step's tokens.

Pages do not contain the output that the next token needs. The last token of a hit is therefore computed again
(:class:`~tierstore_engine.keeper.PageKeeper`). A recurrent state cannot be reset for this. In models with
recurrent states, the layer uses zeros in the place of the output. The KV of one token in this layer then
differs, which changes drafts but no answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ints
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from tierstore.errors import UsageError
from tierstore.spec import LayerKind
from tierstore.tiers.hbm import COMPLETED
from tierstore_engine.attention.base import Span
from tierstore_engine.batch import Work, tables_of
from tierstore_engine.config import ModelConfig
from tierstore_engine.drafting import Drafter
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Outputs, Sequence
from tierstore_engine.step import Runner, Step
from tierstore_engine.weight_slots import predictor_names
from tierstore_engine.weights import open_weights


def with_predictor(config: ModelConfig, source: Path | None, device: str) -> ModelConfig:
    """Return the configuration with the layer that drafts tokens. ``source`` is the checkpoint's folder or
    file; None for a preset, whose weights are random.

    Raises :class:`UsageError` for a model without such a layer, and for options that do not fit.
    """
    if device != "cpu":
        raise UsageError("--draft mtp is computed on the CPU only: give --device cpu, or another --draft")
    if config.kv.ranges:
        raise UsageError("--draft mtp has no static scales of KV: leave out --kv-scales, or --draft mtp")
    missing = "layer for it"
    if config.latent is not None or config.delta is not None:
        latent = config.latent is not None
        kind = LayerKind.MLA_LATENT if latent else LayerKind.FULL_ATTENTION
        config = replace(config, predictor="nextn" if latent else "mtp", kinds=(*config.kinds, kind))
        missing = f"{predictor_names(config).merge}.weight"
        if source is None or _has(source, missing):
            return config
    raise UsageError(
        f"--draft mtp is for DeepSeek V3 and Qwen3-Next, and this model has no {missing}: give another "
        "--draft"
    )


def _has(source: Path, name: str) -> bool:
    with open_weights(source) as stored:
        return name in stored


class PredictingRunner(Runner, Protocol):
    """A runner whose model has a predictor: see :class:`~tierstore_engine.model.Model`."""

    outputs: torch.Tensor | None

    def remember(self, step: Step, before: torch.Tensor) -> None: ...

    def predict(self, step: Step, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(slots=True)
class _Draft:
    """The growing draft of a sequence. ``before`` is the model's output before the newest token."""

    sequence: Sequence
    before: torch.Tensor
    tokens: list[int]

    @property
    def place(self) -> int:
        """Return the position of the newest token."""
        return len(self.sequence.tokens) + len(self.tokens) - 1

    @property
    def newest(self) -> int:
        return self.tokens[-1] if self.tokens else self.sequence.tokens[-1]

    def has_room(self) -> bool:
        """Return whether one more token may be drafted, and has a page."""
        return self.place + 2 < self.sequence.max_tokens and self.sequence.grow(self.place + 1)


class PredictorDrafter(Drafter):
    """Draft up to ``tokens`` tokens with the predictor of the engine's own ``model``."""

    def __init__(self, model: PredictingRunner, *, chunk_tokens: int, tokens: int = 5) -> None:
        if tokens < 1:
            raise UsageError(f"a draft needs at least one token, got {tokens}")
        self._model = model
        self._chunk_tokens = chunk_tokens
        self._tokens = tokens

    def propose(self, sequences: Ints[Sequence]) -> Mapping[RequestId, Ints[int]]:
        drafts = list(_begun(sequences))
        growing = drafts
        for _ in range(self._tokens):
            growing = [draft for draft in growing if draft.has_room()]
            if not growing:
                break
            spans = [Span(tables_of(draft.sequence), draft.place, draft.place + 1) for draft in growing]
            step = self._step(spans, [draft.newest for draft in growing])
            outputs, logits = self._model.predict(step, torch.stack([draft.before for draft in growing]))
            # The model will use the same random numbers, so both often choose the same token.
            draws = [draft.sequence.draws(draft.tokens)[-1] for draft in growing]
            choices = self._model.sample(logits, draws, range(len(draws)))
            for draft, output, choice in zip(growing, outputs, choices, strict=True):
                draft.before = output
                draft.tokens.append(choice.token)
        return {draft.sequence.request_id: draft.tokens for draft in drafts}

    def follow(self, work: Ints[Work]) -> None:
        """Write the layer's KV for the tokens of ``work``, and keep the outputs that the next tokens need."""
        outputs = self._model.outputs
        assert outputs is not None, "the model has a predictor"
        spans: list[Span] = []
        tokens: list[int] = []
        before: list[torch.Tensor] = []
        for item, rows in zip(work, torch.split(outputs, [item.tokens for item in work]), strict=True):
            sequence, stop = item.sequence, item.start + item.tokens
            first = max(item.start, sequence.foreseen)  # a hit includes the KV of its last token
            if first < stop:
                known = sequence.output_of(item.start - 1)
                earlier = torch.zeros_like(rows[0]) if known is None else known
                before.append(torch.cat((earlier[None], rows[:-1]))[first - item.start :])
                spans.append(Span(tables_of(sequence), first, stop))
                tokens += [*sequence.tokens[first : item.stop], *item.draft]
            sequence.foreseen = item.stop
            sequence.outputs = Outputs(item.stop - 1, rows[item.stop - 1 - item.start :].clone())
        if spans:
            self._model.remember(self._step(spans, tokens), torch.cat(before))

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: the drafter stores its data in the sequence."""

    def close(self) -> None:
        """Do nothing: the pages belong to the engine."""

    def _step(self, spans: Ints[Span], tokens: Ints[int]) -> Step:
        return Step(tuple(spans), tokens, (), COMPLETED, self._chunk_tokens)


def _begun(sequences: Ints[Sequence]) -> Iterator[_Draft]:
    """Yield an empty draft for each sequence whose last output is known. This output is unknown for one step
    after a fork whose pages had no room."""
    for sequence in sequences:
        before = sequence.output_of(len(sequence.tokens) - 2)
        if before is not None:
            yield _Draft(sequence, before, [])
