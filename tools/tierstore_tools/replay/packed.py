"""A whole trace in little memory: a tree of runs instead of lists of ids.

Prompts of one trace share their beginnings, so nearly all of a list of ids has been written down before. A
*run* is the part of a prompt that was new when it came: blocks that follow one another without a branch.
Blocks are numbered densely in the order they appear, so a run is (first number, number of the block before
it), and a prompt is its last block alone::

    prompt 1:  0 1 2 3 4         run 0: starts at 0, after nothing        leaf 4
    prompt 2:  0 1 2 5 6         run 1: starts at 5, after 2              leaf 6
    prompt 3:  0 1 2 5 6 7       run 2: starts at 7, after 6              leaf 7

A trace of 100K agent requests with a thousand blocks each is a few MiB so, and its prompts are put together
from ranges at C speed in every pass. It also makes sure of what the simulator relies on: a block has one
predecessor. Ids of published traces are chained over the prefix and keep it; where a trace uses one id after
two different blocks (hashes of a block's content alone), those become two blocks.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import overload

from tierstore_tools.replay.trace import Extent, Request

_NOTHING = -1  # the block before the first


@dataclass(frozen=True, slots=True)
class RawRequest:
    """One request as a file has it. ``ids`` are unique within ``scope``, and a scope that another one
    followed does not come back; ``timestamp_s`` and ``input_tokens`` are None where the file has none (then
    the prompt has whole blocks). ``stop`` is why the answer ended, in the file's own word (``tool_use``,
    ``end_turn``, …)."""

    timestamp_s: float | None
    ids: Sequence[int | str]
    input_tokens: int | None
    output_tokens: int
    session: str | None = None
    scope: str = ""
    stop: str = ""


@dataclass(frozen=True, slots=True)
class PackedRequest(Request):
    """A request with what only some traces know. ``stop`` as in :class:`RawRequest`."""

    stop: str = ""


@dataclass(slots=True)
class _Scope:
    """Ids of one name space → their blocks. ``known`` has the first block of each id, ``moved`` those that
    came after another block than the first one did."""

    known: dict[int | str, int] = field(default_factory=dict)
    moved: dict[tuple[int, int | str], int] = field(default_factory=dict)
    last_ids: Sequence[int | str] = ()
    last_leaf: int = _NOTHING


class PackedTrace(Sequence[PackedRequest]):
    """Fill with :meth:`append`, then :meth:`close`; from then on it is a
    :class:`~tierstore_tools.replay.trace.Trace`."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.untimed = 0  # requests without a timestamp: they have the time of the one before them
        self.reordered = False  # the file was not in order of time
        self.misfits = 0  # requests whose number of blocks does not go with their tokens
        self._starts = array("q")  # of each run, ascending
        self._before = array("q")  # the block before each run
        self._heads: dict[int, int] = {}  # run start → block before it; for all others it is the number below
        self._blocks = 0
        self._scope_name = ""
        self._scope = _Scope()
        self._leaves = array("q")
        self._lengths = array("q")
        self._timestamps = array("d")
        self._inputs = array("q")
        self._outputs = array("q")
        self._sessions = array("q")
        self._stops = array("q")
        self._session_numbers: dict[str | None, int] = {None: 0}
        self._stop_numbers: dict[str, int] = {"": 0}
        self._session_names: Sequence[str | None] = ()
        self._stop_names: Sequence[str] = ()
        self._order: Sequence[int] = ()

    # -- filling -------------------------------------------------------------------------------------

    def append(self, raw: RawRequest) -> None:
        """Take one more request, in the order of the file."""
        if raw.scope != self._scope_name:
            self._scope_name, self._scope = raw.scope, _Scope()
        self._leaves.append(self._place(self._scope, raw.ids))
        self._lengths.append(len(raw.ids))
        self._timestamps.append(self._time_of(raw))
        tokens = len(raw.ids) * self.block_tokens if raw.input_tokens is None else raw.input_tokens
        self._inputs.append(tokens)
        self._outputs.append(raw.output_tokens)
        self._sessions.append(self._session_numbers.setdefault(raw.session, len(self._session_numbers)))
        self._stops.append(self._stop_numbers.setdefault(raw.stop, len(self._stop_numbers)))
        whole = tokens // self.block_tokens
        self.misfits += not whole <= len(raw.ids) <= whole + 1

    def close(self) -> None:
        """No more requests come: put them in order of time (equal times stay as they were) and forget the
        ids of the file."""
        self._scope = _Scope()
        self._heads.clear()
        self._session_names, self._stop_names = list(self._session_numbers), list(self._stop_numbers)
        times = self._timestamps
        self._order = range(len(times))
        if any(later < earlier for earlier, later in pairwise(times)):
            self.reordered = True
            self._order = array("q", sorted(self._order, key=times.__getitem__))

    def _time_of(self, raw: RawRequest) -> float:
        if raw.timestamp_s is not None:
            return raw.timestamp_s
        self.untimed += 1
        return self._timestamps[-1] if self._timestamps else 0.0

    def _place(self, scope: _Scope, ids: Sequence[int | str]) -> int:
        """The block of the last id. New ones are numbered and become a run."""
        at, leaf = self._match(scope, ids)
        if at < len(ids):
            if not self._starts or leaf != self._blocks - 1:  # else the latest run simply goes on
                self._starts.append(self._blocks)
                self._before.append(leaf)
                self._heads[self._blocks] = leaf
            for raw in ids[at:]:
                if scope.known.setdefault(raw, self._blocks) != self._blocks:
                    scope.moved[leaf, raw] = self._blocks
                leaf = self._blocks
                self._blocks += 1
        scope.last_ids, scope.last_leaf = ids, leaf
        return leaf

    def _match(self, scope: _Scope, ids: Sequence[int | str]) -> tuple[int, int]:
        """How many of ``ids`` lead along known blocks, and the last of these."""
        known, moved, heads = scope.known, scope.moved, self._heads
        first, node = 0, _NOTHING
        last = len(scope.last_ids)
        if last and ids[:last] == scope.last_ids:  # the next turn of an agent: thousands of blocks at once
            first, node = last, scope.last_leaf
        for at in range(first, len(ids)):
            child = known.get(ids[at])
            if child is None or heads.get(child, child - 1) != node:
                child = moved.get((node, ids[at])) if moved else None
                if child is None:
                    return at, node
            node = child
        return len(ids), node

    # -- reading -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._leaves)

    @overload
    def __getitem__(self, number: int) -> PackedRequest: ...

    @overload
    def __getitem__(self, number: slice) -> list[PackedRequest]: ...

    def __getitem__(self, number: int | slice) -> PackedRequest | list[PackedRequest]:
        """Request ``number``, from 0, in order of time."""
        if isinstance(number, slice):
            return [self[each] for each in range(len(self))[number]]
        at = self._order[number]
        return PackedRequest(
            self._timestamps[at],
            self._path(self._leaves[at]),
            self._inputs[at],
            self._outputs[at],
            self._session_names[self._sessions[at]],
            self._stop_names[self._stops[at]],
        )

    def __iter__(self) -> Iterator[PackedRequest]:
        """Requests in order of time."""
        for number in range(len(self)):
            yield self[number]

    @property
    def blocks(self) -> int:
        """Of all prompts together."""
        return sum(self._lengths)

    @property
    def timed(self) -> bool:
        """Whether the trace says when its requests came."""
        return self.untimed < len(self)

    @property
    def has_stops(self) -> bool:
        """Whether the trace says why answers ended."""
        return len(self._stop_numbers) > 1

    def extent(self) -> Extent:
        """What :func:`~tierstore_tools.replay.trace.extent` says of this trace, counted in runs: what has
        been seen of a run is always its beginning."""
        seen = array("q", self._starts)  # of each run, the first block that was not seen yet
        hits = 0
        for at in self._order:
            held = 0
            for run, stop in self._runs(self._leaves[at]):
                known = min(seen[run], stop) - self._starts[run]
                held += known
                if known < stop - self._starts[run]:
                    seen[run] = stop
            hits += held
        return Extent(len(self), self.blocks, self._blocks, hits / self.blocks if hits else 0.0)

    def _runs(self, leaf: int) -> list[tuple[int, int]]:
        """The runs from a prompt's start to ``leaf``, each with the number after its last block there."""
        runs = []
        while leaf != _NOTHING:
            run = bisect_right(self._starts, leaf) - 1
            runs.append((run, leaf + 1))
            leaf = self._before[run]
        runs.reverse()
        return runs

    def _path(self, leaf: int) -> list[int]:
        blocks: list[int] = []
        for run, stop in self._runs(leaf):
            blocks.extend(range(self._starts[run], stop))
        return blocks
