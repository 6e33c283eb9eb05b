"""``--hints``: where the hints of a replay come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierstore.errors import UsageError
from tierstore.hints import inferred
from tierstore.policy import PageHint
from tierstore_tools.replay.oracle import NextUses, OracleHints
from tierstore_tools.replay.packed import PackedRequest
from tierstore_tools.replay.simulator import Hinter
from tierstore_tools.replay.trace import Request

_ORACLE = re.compile(r"oracle:(\d+(?:\.\d+)?|\.\d+)")
# What traces call a reason that the engines have another word for.
_REASONS = {
    "tool_use": "tool_calls",
    "function_call": "tool_calls",
    "end_turn": "stop",
    "max_tokens": "length",
}


@dataclass(frozen=True, slots=True)
class HintSource:
    """``none``, ``inferred``, or ``oracle:P`` (right with a probability of P)."""

    name: str = "none"
    accuracy: float | None = None  # of an oracle

    def hinter(self, uses: Callable[[], NextUses]) -> Hinter | None:
        """One for a single pass over a trace, whose future ``uses`` tells."""
        if self.accuracy is not None:
            return OracleHints(uses(), self.accuracy)
        return Inferred() if self.name == "inferred" else None


def parse_hints(text: str) -> HintSource:
    """Raises :class:`UsageError` for anything else."""
    if text in ("none", "inferred"):
        return HintSource(text)
    match = _ORACLE.fullmatch(text)
    if match is not None and float(match.group(1)) <= 1:
        return HintSource(text, float(match.group(1)))
    raise UsageError(f"--hints is none, oracle:P (such as oracle:0.9) or inferred, not {text!r}")


class Inferred:
    """What an engine says without being told, by the reason that an answer ended
    (:func:`tierstore.hints.inferred`)."""

    def hints(self, number: int, request: Request) -> Sequence[PageHint] | None:
        """The same for all blocks of the prompt."""
        if not isinstance(request, PackedRequest):
            return None
        hint = inferred(_REASONS.get(request.stop, request.stop))
        return None if hint is None else [hint.facts(request.timestamp_s)] * len(request.blocks)
