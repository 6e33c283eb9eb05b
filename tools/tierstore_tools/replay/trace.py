"""A trace of requests, independent of its file format.

A trace is cut into *blocks* of ``block_tokens`` tokens. A block stands for all tokens from the prompt's start
to its end. Equal blocks are equal prefixes, so the block before a block is always the same one. The last
block of a prompt may be partial, and counts as a whole one.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, overload

_NOTHING = -1  # the number that stands for the block before the first block of a prompt


@dataclass(frozen=True, slots=True)
class RawRequest:
    """One request as in the file. ``ids`` are unique within ``scope``, and the requests of a scope are
    consecutive. ``timestamp_s`` and ``input_tokens`` are None if the file has none (then the prompt has whole
    blocks). ``stop`` is the reason of the answer's end, in the file's own word (``tool_use``, ``end_turn``,
    …)."""

    timestamp_s: float | None
    ids: Sequence[int | str]
    input_tokens: int | None
    output_tokens: int
    session: str | None = None
    scope: str = ""
    stop: str = ""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt. ``blocks`` are the numbers of its blocks in order. ``input_tokens`` and ``output_tokens``
    are its lengths in the trace. ``session`` is its conversation and ``stop`` the reason of its answer's end,
    if the trace has them."""

    timestamp_s: float
    blocks: Sequence[int]
    input_tokens: int
    output_tokens: int = 0
    session: str | None = None
    stop: str = ""


class _Packed(NamedTuple):
    """A request, stored with its last block only (``leaf``). The blocks before it follow from the tree, in
    which each block refers to the block before it."""

    timestamp_s: float
    leaf: int
    input_tokens: int
    output_tokens: int
    session: str | None
    stop: str


class Trace(Sequence[TraceRequest]):
    """A whole trace in little memory: a tree of blocks, and the last block of each prompt.

    Prompts share their beginnings, so most ids of a new prompt are in the tree already. Blocks are numbered
    in order of appearance, and each keeps the number of the block before it. If a trace uses one id after two
    different blocks (hashes of a block's content only), these become two blocks.

    Fill it with :meth:`append`, then call :meth:`close`, which sorts the requests by time."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks = 0  # in all prompts together
        self.untimed = 0  # requests without a timestamp, which get the one of the request before them
        self.reordered = False  # whether the file was not sorted by time
        self.misfits = 0  # requests whose number of blocks does not match their tokens
        self.has_stops = False  # whether the trace says why answers ended
        self._before = array("q")  # the block before each block
        self._requests: list[_Packed] = []
        self._scope = ""
        self._first: dict[int | str, int] = {}  # id → the first block with this id in the scope
        # (block before, id) → block, for further blocks of an id
        self._others: dict[tuple[int, int | str], int] = {}

    def append(self, raw: RawRequest) -> None:
        """Add the next request of the file."""
        if raw.scope != self._scope:
            self._scope, self._first, self._others = raw.scope, {}, {}
        time_s = raw.timestamp_s
        if time_s is None:
            self.untimed += 1
            time_s = self._requests[-1].timestamp_s if self._requests else 0.0
        count = len(raw.ids)
        tokens = count * self.block_tokens if raw.input_tokens is None else raw.input_tokens
        self.misfits += not tokens // self.block_tokens <= count <= tokens // self.block_tokens + 1
        self.blocks += count
        self.has_stops |= bool(raw.stop)
        session = None if raw.session is None else sys.intern(raw.session)
        leaf = self._leaf(raw.ids)
        self._requests.append(_Packed(time_s, leaf, tokens, raw.output_tokens, session, sys.intern(raw.stop)))

    def _leaf(self, ids: Sequence[int | str]) -> int:
        """Return the last block of a prompt. New blocks get numbers."""
        before, first, others = self._before, self._first, self._others
        leaf = _NOTHING
        for raw in ids:
            block = first.get(raw)
            if block is None or before[block] != leaf:
                block = others.get((leaf, raw)) if others else None
                if block is None:
                    block = len(before)
                    before.append(leaf)
                    if first.setdefault(raw, block) != block:
                        others[leaf, raw] = block
            leaf = block
        return leaf

    def close(self) -> None:
        """Complete the trace and sort it by time."""
        self._first, self._others = {}, {}
        if any(later.timestamp_s < earlier.timestamp_s for earlier, later in pairwise(self._requests)):
            self.reordered = True
            self._requests.sort(key=lambda request: request.timestamp_s)

    @property
    def timed(self) -> bool:
        """Whether the trace has times."""
        return self.untimed < len(self)

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, number: int) -> TraceRequest: ...

    @overload
    def __getitem__(self, number: slice) -> list[TraceRequest]: ...

    def __getitem__(self, number: int | slice) -> TraceRequest | list[TraceRequest]:
        """Return request ``number``, from 0, in order of time."""
        if isinstance(number, slice):
            return [self._unpacked(packed) for packed in self._requests[number]]
        return self._unpacked(self._requests[number])

    def _unpacked(self, packed: _Packed) -> TraceRequest:
        blocks: list[int] = []
        block = packed.leaf
        while block != _NOTHING:
            blocks.append(block)
            block = self._before[block]
        blocks.reverse()
        return TraceRequest(packed.timestamp_s, blocks, *packed[2:])


@dataclass(frozen=True, slots=True)
class TraceExtent:
    """The size of a trace, and its highest possible hit rate."""

    requests: int
    blocks: int  # in all prompts together
    unique_blocks: int
    ideal: float  # the hit rate of a cache without a limit


def extent(requests: Iterable[TraceRequest]) -> TraceExtent:
    """Read a trace once and return its size. The first new block ends a prompt's hit."""
    seen: set[int] = set()
    count = total = hits = 0
    for request in requests:
        blocks = request.blocks
        count += 1
        total += len(blocks)
        held = next((at for at, block in enumerate(blocks) if block not in seen), len(blocks))
        hits += held
        seen.update(blocks[held:])
    return TraceExtent(count, total, len(seen), hits / total if total else 0.0)
