"""Speculative decoding: a cheaper drafter guesses the next tokens, and the model checks them.

In one step, the model computes a sequence's newest token and a *draft* of k tokens after it, like a short
prefill. This takes little longer than one token. The model makes its own choice at each of the k + 1 places,
with the logits and the random number that it would have there without a draft. Drafted tokens are accepted as
long as they equal these choices. The rest of the draft is dropped. The keys and values of dropped tokens are
overwritten and never saved. Recurrent states are stored as they were before the draft, and the next step
computes the accepted tokens again, together with the newest token (:mod:`tierstore_engine.states`).

A draft therefore changes how many tokens a step yields, but not which tokens. Greedy output is the same, and
sampled output is the same token by token for a seed, so it has the same distribution. (This holds up to the
model's arithmetic: logits of several rows may differ in their last bits from logits of one row.) Rejection
sampling would accept no more tokens, because a draft has one certain token at each place. A draft model uses
the same random numbers as the model, so that both tend to choose the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ints
from typing import Protocol

from tierstore.errors import UsageError
from tierstore.keys import TOKEN_BYTES, encode_tokens
from tierstore_engine.batch import Work
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Sequence


class Drafter(Protocol):
    """An interface to guess tokens. Called by the engine's thread only."""

    def propose(self, sequences: Ints[Sequence]) -> Mapping[RequestId, Ints[int]]:
        """Return guesses of the tokens that follow each of these decoding sequences. A guess may be shorter
        than usual, or empty."""

    def follow(self, work: Ints[Work]) -> None:
        """Record that the model has computed this work. No page of this work has been saved yet."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended. The sequence may never have had a draft."""

    def close(self) -> None:
        """Release everything."""


class PromptLookupDrafter:
    """Draft the tokens that followed an earlier occurrence of the sequence's last tokens. This suits text
    that repeats itself or quotes its prompt. It needs no model, and only searches the bytes of the sequence's
    tokens.

    At most ``tokens`` tokens are drafted. The last ``longest`` tokens are searched first, then fewer, down to
    ``shortest``. The latest occurrence counts.
    """

    def __init__(self, *, tokens: int = 5, longest: int = 4, shortest: int = 2) -> None:
        if tokens < 1 or not 1 <= shortest <= longest:
            raise UsageError("a draft needs at least one token, and must satisfy 1 ≤ shortest ≤ longest")
        self._tokens = tokens
        self._lengths = range(longest, shortest - 1, -1)
        self._seen: dict[RequestId, bytearray] = {}  # all tokens as bytes, because a search in bytes is fast

    def propose(self, sequences: Ints[Sequence]) -> Mapping[RequestId, Ints[int]]:
        return {sequence.request_id: self._draft(sequence) for sequence in sequences}

    def follow(self, work: Ints[Work]) -> None:
        """Do nothing: drafts depend on tokens only."""

    def forget(self, sequence: Sequence) -> None:
        self._seen.pop(sequence.request_id, None)

    def close(self) -> None:
        self._seen.clear()

    def _draft(self, sequence: Sequence) -> Ints[int]:
        seen = self._seen.setdefault(sequence.request_id, bytearray())
        seen += encode_tokens(sequence.tokens[len(seen) // TOKEN_BYTES :])
        for length in self._lengths:
            place = _earlier(seen, length)
            if place is not None:
                return sequence.tokens[place + length : place + length + self._tokens]
        return ()


def _earlier(seen: bytearray, length: int) -> int | None:
    """Return where, in tokens, the last ``length`` tokens of ``seen`` occurred before."""
    if len(seen) <= length * TOKEN_BYTES:
        return None
    pattern = seen[-length * TOKEN_BYTES :]
    # the match may overlap the last tokens, but must not be the last tokens themselves
    stop = len(seen) - TOKEN_BYTES
    while (found := seen.rfind(pattern, 0, stop)) >= 0:
        if found % TOKEN_BYTES == 0:
            return found // TOKEN_BYTES
        stop = found + len(pattern) - 1  # the match begins in the middle of a token's bytes
    return None
