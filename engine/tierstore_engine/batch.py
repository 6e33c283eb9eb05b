"""From planned work to the tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from tierstore_engine.attention.base import BatchLayout, Span, positions_of
from tierstore_engine.model import StepInput
from tierstore_engine.scheduler import Work


def finishing(work: Sequence[Work]) -> list[Work]:
    """The work that ends at its sequence's newest token, and so yields the next one."""
    return [item for item in work if item.stop == len(item.sequence.tokens)]


def build_step(work: Sequence[Work], *, chunk_tokens: int, device: str) -> StepInput:
    """The batch of ``work`` (not empty), flattened in its order; logits for each of :func:`finishing`."""
    spans = [Span(item.sequence.pages, item.start, item.stop) for item in work]
    tokens = [token for item in work for token in item.sequence.tokens[item.start : item.stop]]
    ends = accumulate(item.tokens for item in work)
    rows = [end - 1 for item, end in zip(work, ends, strict=True) if item.stop == len(item.sequence.tokens)]
    return StepInput(
        tokens=torch.tensor(tokens, dtype=torch.int64, device=device),
        positions=positions_of(spans, device=device),
        layout=BatchLayout.of(spans, chunk_tokens=chunk_tokens, device=device),
        logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
    )
