"""Decide whose prompt is computed next. Pure: nothing here reads a clock, moves a page or asks a store.

With first come, first served a question of 50 tokens waits behind a document of 100,000. The mean time to the
first token is smallest if the quickest request comes first. How quick a request is depends on the cache. So
prompts are ordered by **what is left to compute**, not by how much of them is held: a long match may have a
long rest.

**Groups.** Prompts that share a beginning that is not computed yet share its cost: ten questions about one
document cost one document and ten answers. The waiting prompts form a tree of beginnings. Each node takes
some seconds to compute, and comes after its parent. The order with the smallest mean is known (W. A. Horn,
1972): first the subtree that ends most requests per second, then the best of the rest. A node absorbs its
best child as long as that improves it.

**Ageing.** A request is *overtaken* while something is computed that first come, first served would have put
behind it (:mod:`tierstore_engine.overtaking` counts the seconds). Work that takes longer than the rest of its
``bound_s`` may not overtake it. Everything else computed before it would also come before it with first come,
first served. So no request waits more than ``bound_s`` longer than it would have, except for more urgent
requests that arrive meanwhile. A deadline lowers the rest. This holds while there is room for all waiting
requests. Otherwise a request can begin only when those before it end. Then all requests up to the last one
whose time is used up come strictly by their places.

**Priorities** are classes: a lower number comes first, and "first come" is by class and then by age.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TypeAlias

from tierstore.keys import PageKey
from tierstore.planner import Prefill

Place: TypeAlias = tuple[int, int, int]
"""The position of a request by first come, first served: its priority, its age, and its number."""


@dataclass(slots=True)
class WaitingEntry:
    """A prompt that is not computed yet. ``keys`` are those of its full chunks (empty if others cannot use
    its pages). ``held`` leading tokens need no computing. ``deadline_s`` is when its first token is due."""

    place: Place
    keys: list[PageKey]
    tokens: int
    held: int = 0
    deadline_s: float = math.inf
    overtaken_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """``entry`` is next, and takes ``seconds`` more than the turns before it have computed."""

    entry: WaitingEntry
    seconds: float


@dataclass(slots=True, eq=False)
class _Node:
    """The tokens ``start … stop`` that some prompts share, with absorbed children: ``entries`` end in this
    order within ``seconds``, and ``heap`` has the children that follow."""

    stop: int
    parent: _Node | None
    entries: list[WaitingEntry] = field(default_factory=list)
    held: int = 0
    own_s: float = 0.0
    seconds: float = 0.0
    heap: list[tuple[float, Place, _Node]] = field(default_factory=list)
    done: bool = False

    @property
    def rate(self) -> float:
        """Return how many requests end per second."""
        if self.seconds:
            return len(self.entries) / self.seconds
        return math.inf if self.entries else 0.0

    def offer(self, child: _Node) -> None:
        heapq.heappush(self.heap, (-child.rate, min(entry.place for entry in child.entries), child))

    def absorb(self) -> None:
        """Absorb children as long as that does not lower the rate."""
        while self.heap and -self.heap[0][0] >= self.rate:
            _, _, child = heapq.heappop(self.heap)
            self.entries += child.entries
            self.seconds += child.seconds
            self.heap += child.heap
            heapq.heapify(self.heap)


def turns(
    entries: Iterable[WaitingEntry],
    prefill: Prefill,
    *,
    chunk_tokens: int,
    bound_s: float,
    now_s: float,
    strict_prefix: Place | None = None,
) -> Iterator[Turn]:
    """Yield ``entries`` in the order to compute them; those up to ``strict_prefix`` keep their places.

    This is lazy: the first turn costs a sort, each turn a pass over the rest.

    >>> short, long = WaitingEntry((0, 1, 1), [], 100), WaitingEntry((0, 0, 0), [], 9000)
    >>> order = turns([long, short], Prefill(0.001), chunk_tokens=64, bound_s=1.0, now_s=0.0)
    >>> [turn.entry.tokens for turn in order]
    [100, 9000]
    """
    waiting = sorted(entries, key=attrgetter("place"))
    ranked: list[WaitingEntry] = []
    leaves: dict[Place, _Node] = {}
    for _, some in groupby(waiting, key=lambda entry: entry.place[0]):
        ranked += _ranked(list(some), prefill, chunk_tokens, leaves)
    slack = _slack(waiting, leaves, bound_s, now_s)
    if strict_prefix is not None:
        # Requests without work may not overtake either: they would still take a slot.
        slack.update((place, -math.inf) for place in slack if place <= strict_prefix)
    while ranked:
        # How long a turn may be to overtake the requests before a place, in the order of places.
        least, limits = math.inf, {}
        for entry in waiting:
            limits[entry.place] = least
            least = min(least, slack[entry.place])
        turn = next(
            Turn(entry, seconds)
            for entry in ranked  # the first request by place always passes
            if (seconds := _path_s(leaves[entry.place])) <= limits[entry.place]
        )
        ranked.remove(turn.entry)
        waiting.remove(turn.entry)
        _finish(leaves[turn.entry.place])
        for entry in waiting:
            if entry.place < turn.entry.place:
                slack[entry.place] -= turn.seconds
        yield turn


def common_chunks(one: Sequence[PageKey], other: Sequence[PageKey]) -> int:
    """Return how many leading chunks have equal keys. A key stands for all tokens up to its chunk's end."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _ranked(
    entries: Sequence[WaitingEntry], prefill: Prefill, chunk_tokens: int, leaves: dict[Place, _Node]
) -> list[WaitingEntry]:
    """Return ``entries`` in the order with the smallest mean, and set the node at which each one ends."""
    root, nodes = _tree(entries, chunk_tokens, leaves)
    for node in reversed(nodes):  # children before their parents
        parent = node.parent
        assert parent is not None
        start = max(parent.stop, min(node.held, node.stop))
        node.own_s = node.seconds = prefill.seconds(node.stop - start, start)
        parent.held = max(parent.held, node.held)
    for node in reversed(nodes):
        node.absorb()
        assert node.parent is not None
        node.parent.offer(node)
    ranked = list(root.entries)
    while root.heap:
        _, _, node = heapq.heappop(root.heap)
        ranked += node.entries
        root.heap += node.heap
        heapq.heapify(root.heap)
    return ranked


def _tree(
    entries: Sequence[WaitingEntry], chunk_tokens: int, leaves: dict[Place, _Node]
) -> tuple[_Node, list[_Node]]:
    """Return the tree of shared beginnings: its root, and its other nodes with parents first. Neighbours in
    the order of keys share most, so one stack of open nodes is enough."""
    root = _Node(0, None)
    stack, before, inner = [root], None, []
    for entry in sorted(entries, key=lambda entry: (entry.keys, entry.tokens, entry.place)):
        shared = common_chunks(before.keys, entry.keys) * chunk_tokens if before is not None else 0
        while stack[-1].stop > shared:
            last = stack.pop()
            if stack[-1].stop < shared:
                middle = _Node(shared, stack[-1])
                inner.append(middle)
                last.parent = middle
                stack.append(middle)
        leaf = _Node(entry.tokens, stack[-1], [entry], min(entry.held, entry.tokens))
        leaves[entry.place] = leaf
        stack.append(leaf)
        before = entry
    children: dict[_Node, list[_Node]] = {}
    for node in [*inner, *(leaves[entry.place] for entry in entries)]:
        assert node.parent is not None
        children.setdefault(node.parent, []).append(node)
    nodes, at = list(children.get(root, ())), 0
    while at < len(nodes):
        nodes += children.get(nodes[at], ())
        at += 1
    return root, nodes


def _path_s(leaf: _Node) -> float:
    """Return the seconds that are left to compute up to this node."""
    seconds, node = 0.0, leaf
    while node.parent is not None and not node.done:
        seconds += node.own_s
        node = node.parent
    return seconds


def _finish(leaf: _Node) -> None:
    node = leaf
    while node.parent is not None and not node.done:
        node.done = True
        node = node.parent


def _slack(
    waiting: Sequence[WaitingEntry], leaves: dict[Place, _Node], bound_s: float, now_s: float
) -> dict[Place, float]:
    """Return how long each request may still be overtaken. A deadline that first come, first served would
    also miss is ignored."""
    slack = {entry.place: bound_s - entry.overtaken_s for entry in waiting}
    if any(entry.deadline_s < math.inf for entry in waiting):
        at = now_s
        for entry in waiting:
            at += _path_s(leaves[entry.place])
            _finish(leaves[entry.place])
            if at <= entry.deadline_s:
                slack[entry.place] = min(slack[entry.place], entry.deadline_s - at)
        for leaf in leaves.values():
            node: _Node | None = leaf
            while node is not None and node.done:
                node.done, node = False, node.parent
    return slack
