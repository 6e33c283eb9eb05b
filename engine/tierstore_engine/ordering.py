"""Decide whose prompt is computed next. This module does no I/O: it reads no clock, moves no page, and asks
no store.

With first come, first served a question of 50 tokens waits behind a document of 100,000. The mean time to the
first token is smallest if the quickest request comes first. How quick a request is depends on the cache.
Prompts are therefore ordered by **the tokens that are left to compute**, and not by the held tokens: a prompt
with a long hit may have many tokens left.

A prefix that several waiting prompts share counts in full for each of them. The first prompt computes the
prefix, and then it is held for the others. An order that counts it once (W. A. Horn, 1972) was not faster on
a trace of real conversations (docs/benchmarks.md).

**Ageing.** A request is *overtaken* while another request is computed that "first come, first served" would
compute later. The scheduler reports what each step was spent on (:class:`Spent`), and the seconds are
counted. Work that takes longer than the remaining part of a request's ``bound_s`` may not overtake this
request. No request therefore waits more than ``bound_s`` longer than with "first come, first served", except
for more urgent requests that arrive meanwhile. A deadline reduces the remaining part. This guarantee holds
while there is room for all waiting requests. Without room, a request can begin only when earlier requests
end. Then all requests up to the last one whose time is used up are served strictly in order of their places.

While there is room for all waiting requests, only the work for later requests counts. If slots or pages are
short, a request also waits for those before it to end, and these wait for one another. In that case, all work
in another order counts against every request without room. A step in which a later request has room that an
earlier one needs counts, too. The count is not exact if several prompts share a step, or if answers run out
of pages. First come, first served could then have ended earlier, by up to the time of the longest request.

**Priorities** are classes: a lower number comes first, and "first come" is by class and then by age.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias

from tierstore.keys import PageKey
from tierstore.planner import Prefill

Place: TypeAlias = tuple[int, int, int]
"""The position of a request in the order "first come, first served": its priority, its age, and its
number."""


@dataclass(slots=True)
class WaitingEntry:
    """A prompt that is not computed yet. ``keys`` has a key for each full chunk (empty if others cannot use
    its pages). The first ``held`` tokens need no computing. ``deadline_s`` is when its first token is due."""

    place: Place
    keys: list[PageKey]
    tokens: int
    held: int = 0
    deadline_s: float = math.inf
    overtaken_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn: ``entry`` is computed next, which takes ``seconds``."""

    entry: WaitingEntry
    seconds: float


@dataclass(slots=True)
class Spent:
    """The work of one step, by the requests that it is done for.

    ``prompts`` maps a request to the number of tokens that the step computed for it. ``short`` is true if
    slots or pages do not hold all waiting requests. ``first`` is the earliest request whose
    prompt is not computed. ``kept_out`` is the earliest request without room while a later one has some.
    """

    prompts: dict[Place, int] = field(default_factory=dict)
    short: bool = False
    first: Place | None = None
    kept_out: Place | None = None

    def overtakes(self, place: Place, *, admitted: bool = True) -> float:
        """Return the share of the step that counts against the request at ``place``.

        >>> Spent({(0, 1, 1): 40}).overtakes((0, 0, 0))
        1.0
        >>> Spent({(0, 0, 0): 30, (0, 1, 1): 10}).overtakes((0, 0, 0))
        0.25
        """
        later = sum(tokens for other, tokens in self.prompts.items() if other > place)
        if later and place not in self.prompts:
            return 1.0  # this request could have used that room
        if not admitted:
            out_of_turn = self.first is not None and any(other > self.first for other in self.prompts)
            if self.short and out_of_turn:
                return 1.0
            if self.kept_out is not None and self.kept_out <= place:
                return 1.0
        return later / sum(self.prompts.values()) if later else 0.0


def passed(entries: Iterable[WaitingEntry], spent: Spent, seconds: float, *, admitted: bool = True) -> None:
    """Count the time of a step of ``seconds`` against ``entries``. Either all of these requests have slots
    and pages, or none has."""
    for entry in entries:
        entry.overtaken_s += seconds * spent.overtakes(entry.place, admitted=admitted)


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

    The order is computed as it is consumed: the first turn costs a sort, and each turn a pass over the
    remaining entries.

    >>> short, long = WaitingEntry((0, 1, 1), [], 100), WaitingEntry((0, 0, 0), [], 9000)
    >>> order = turns([long, short], Prefill(0.001), chunk_tokens=64, bound_s=1.0, now_s=0.0)
    >>> [turn.entry.tokens for turn in order]
    [100, 9000]
    """
    waiting = sorted(entries, key=attrgetter("place"))
    rest = _Rest(prefill, chunk_tokens)
    ranked = sorted(waiting, key=lambda entry: (entry.place[0], rest.seconds(entry), entry.place))
    slack = _slack(waiting, _Rest(prefill, chunk_tokens), bound_s, now_s)
    if strict_prefix is not None:
        # Requests without work may not overtake either: they would still take a slot.
        slack.update((place, -math.inf) for place in slack if place <= strict_prefix)
    while ranked:
        # The longest turn that may overtake all requests before a place, in the order of places.
        least, limits = math.inf, {}
        for entry in waiting:
            limits[entry.place] = least
            least = min(least, slack[entry.place])
        turn = next(
            Turn(entry, seconds)
            for entry in ranked  # the first request in the order of places may always be next
            if (seconds := rest.seconds(entry)) <= limits[entry.place]
        )
        ranked.remove(turn.entry)
        waiting.remove(turn.entry)
        rest.computed.update(turn.entry.keys)
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


@dataclass(slots=True)
class _Rest:
    """The part of each prompt after the chunks with the keys ``computed``."""

    prefill: Prefill
    chunk_tokens: int
    computed: set[PageKey] = field(default_factory=set)

    def seconds(self, entry: WaitingEntry) -> float:
        """Return how long computing the rest of ``entry`` takes."""
        shared = bisect_left(entry.keys, True, key=lambda key: key not in self.computed)
        start = min(max(entry.held, shared * self.chunk_tokens), entry.tokens)
        return self.prefill.seconds(entry.tokens - start, start)


def _slack(waiting: Sequence[WaitingEntry], rest: _Rest, bound_s: float, now_s: float) -> dict[Place, float]:
    """Return how long each request may still be overtaken. Ignore a deadline that "first come, first served"
    would also miss."""
    slack = {entry.place: bound_s - entry.overtaken_s for entry in waiting}
    if any(entry.deadline_s < math.inf for entry in waiting):
        at = now_s
        for entry in waiting:
            at += rest.seconds(entry)
            rest.computed.update(entry.keys)
            if at <= entry.deadline_s:
                slack[entry.place] = min(slack[entry.place], entry.deadline_s - at)
    return slack
