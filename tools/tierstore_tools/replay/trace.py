"""What a trace of requests is, whatever file it came from.

A trace is cut into *blocks* of ``block_tokens`` tokens. A block's id stands for all tokens from the prompt's
start to the block's end (ids are chained over the prefix, as in the published traces): equal ids are equal
prefixes, and the block before it is always the same one. The last block of a prompt may be partial; it
counts as a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. ``blocks`` are the ids of its blocks in order, ``input_tokens`` and ``output_tokens`` what
    the trace says of its length, ``session`` the conversation it belongs to where the trace knows that."""

    timestamp_s: float
    blocks: Sequence[int]
    input_tokens: int
    output_tokens: int = 0
    session: str | None = None


class Trace(Protocol):
    """Requests in order of time, which can be read any number of times."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a whole block."""
        ...

    def __iter__(self) -> Iterator[Request]: ...


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace in memory."""

    requests: Sequence[Request]
    block_tokens: int

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a trace is, and the most that any cache could find in it."""

    requests: int
    blocks: int  # of all prompts together
    unique_blocks: int
    ideal: float  # hit rate of a cache that never forgets


def extent(requests: Iterable[Request]) -> Extent:
    """One pass over a trace. The first block that was never seen ends a prompt's hit."""
    seen: set[int] = set()
    count = total = hits = 0
    for request in requests:
        blocks = request.blocks
        count += 1
        total += len(blocks)
        held = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        hits += held
        seen.update(blocks[held:])
    return Extent(count, total, len(seen), hits / total if total else 0.0)
