"""What a trace of lengths alone can say of a capacity: how soon newer pages take the place of a page.

If nothing is ever reused, every token of every prompt and answer is a new one, and a tier of C tokens is
written over once in C ÷ (tokens per second). With reuse fewer new pages come in, so a page stays at least so
long in a tier that evicts the oldest. The time between the turns of a conversation has to be below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierstore.spec import KVSpec
from tierstore_tools.replay.capacity import Capacity
from tierstore_tools.replay.formats import LengthsTrace

BLOCK_TOKENS = 64  # the store's default chunk: for capacities that are given in blocks


@dataclass(frozen=True, slots=True)
class SizingRow:
    """One line of the result. ``turnover_s`` is None where the trace has no times, ``capacity_bytes`` where
    no model was named. ``hit_rate`` is always None: nobody knows."""

    capacity_tokens: int
    capacity_bytes: int | None
    turnover_s: float | None
    hit_rate: None = None


def size(trace: LengthsTrace, capacities: Sequence[Capacity], spec: KVSpec | None) -> list[SizingRow]:
    """Raises :class:`UsageError` for shares of unique blocks, which nobody knows either, and for bytes
    without a model."""
    rows = []
    for capacity in capacities:
        blocks = capacity.blocks(block_tokens=BLOCK_TOKENS, unique_blocks=None, spec=spec)
        tokens = blocks * BLOCK_TOKENS
        nbytes = None if spec is None else round(tokens * spec.token_bytes)
        rate = trace.tokens / trace.span_s if trace.span_s and trace.tokens else None
        rows.append(SizingRow(tokens, nbytes, None if rate is None else tokens / rate))
    return rows
