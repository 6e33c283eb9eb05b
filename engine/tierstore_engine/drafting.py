"""Speculative decoding: somebody cheaper than the model guesses what follows, and the model checks it.

A *draft* of k tokens is computed behind a sequence's newest token in one step, like a short prefill, which
takes little longer than one token. The model's own choice is made at each of the k + 1 places, with the
logits and the random number that it would have had there without a draft. As long as it is the token that was
drafted, the next place counts as well; from the first other one on the draft is forgotten, and the keys and
values computed for it are overwritten, never saved.

So a draft decides how many tokens a step gives, never which: greedy output is the same, and sampled output is
the same too, token by token for a seed, hence distributed as without. (As far as the model's arithmetic is:
logits of several rows may differ from those of one in their last bits.) The usual rejection sampling has no
more to offer to a draft that is one certain token; a draft model here is asked with the very random numbers
that the model will be, so that both tend to choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ints
from typing import Protocol

from tierstore.errors import UsageError
from tierstore.keys import TOKEN_BYTES, encode_tokens
from tierstore_engine.outputs import RequestId
from tierstore_engine.sequence import Sequence


class Drafter(Protocol):
    """Who guesses. Called by the engine's thread only."""

    def propose(self, sequences: Ints[Sequence]) -> Mapping[RequestId, Ints[int]]:
        """What may follow the newest token of each of these sequences, which are decoding. Fewer tokens than
        usual, or none, where there is nothing to say."""

    def forget(self, sequence: Sequence) -> None:
        """This one has ended (it may never have been proposed for)."""

    def close(self) -> None:
        """Give everything back."""


class PromptLookupDrafter:
    """Drafts what came after the sequence's last tokens where it had them before: for text that repeats
    itself or quotes its prompt. Costs a search of the sequence's token bytes, and no model.

    ``tokens`` are drafted at most. The last ``longest`` tokens are looked for first, then fewer, down to
    ``shortest``; their latest occurrence counts.
    """

    def __init__(self, *, tokens: int = 5, longest: int = 4, shortest: int = 2) -> None:
        if tokens < 1 or not 1 <= shortest <= longest:
            raise UsageError(
                "a draft has at least one token, looked for by at least one: 1 ≤ shortest ≤ longest"
            )
        self._tokens = tokens
        self._lengths = range(longest, shortest - 1, -1)
        self._seen: dict[RequestId, bytearray] = {}  # all tokens, as bytes: those are searched fast

    def propose(self, sequences: Ints[Sequence]) -> Mapping[RequestId, Ints[int]]:
        return {sequence.request_id: self._draft(sequence) for sequence in sequences}

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
    """Where, in tokens, the last ``length`` tokens of ``seen`` were before."""
    if len(seen) <= length * TOKEN_BYTES:
        return None
    pattern = seen[-length * TOKEN_BYTES :]
    stop = len(seen) - TOKEN_BYTES  # it may overlap itself, but not be itself
    while (found := seen.rfind(pattern, 0, stop)) >= 0:
        if found % TOKEN_BYTES == 0:
            return found // TOKEN_BYTES
        stop = found + len(pattern) - 1  # it began inside a token
    return None
