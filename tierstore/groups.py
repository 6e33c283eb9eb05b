"""How long a hit can be in a model whose layers remember the past in different ways. Pure.

A *layer group* is the layers that remember alike. A hit of length L says that the engine may go on with token
L (the first one is token 0) as if it had computed all before it. What that takes differs from group to group:

====================  =================================================================================
the group's past      what a hit of length L needs of it
====================  =================================================================================
``Past.ALL``          every token before L: full attention, and latents (MLA)
``Past.WINDOW``       the ``tokens`` tokens before L. In a window of ``w`` each token attends ``w`` tokens,
                      itself included: a hit needs ``w - 1``
``Past.CHUNK``        the tokens before L of L's own attention chunk of ``tokens``: none where L begins one
``Past.STATE``        the snapshot that was taken at exactly L, behind token L - 1
====================  =================================================================================

A hit is the longest L that all groups can serve (:func:`longest_hit`), and of each group it brings what L
needs and nothing else (:meth:`GroupRule.needed`). L = 0 is always served.

What is held of a group is told as ranges of tokens, ascending and disjoint: of the pages one by one, or of
several that follow one another (the leading tokens of a prompt are one range). Of a group with states, the
*stop* of each range is where a snapshot is. Where a part of a page can be told apart by token a range may end
inside of a page, and so may a hit; where it cannot, ``align`` is the chunk.

>>> gemma = [GroupRule.all(), GroupRule.window(1023)]
>>> longest_hit([(gemma[0], [range(0, 4096)]), (gemma[1], [range(0, 64), range(2048, 3200)])], limit=4096)
3200
>>> [rule.needed(3200) for rule in gemma]
[range(0, 3200), range(2177, 3200)]
>>> gemma[1].pages(3200, chunk_tokens=64)
range(34, 50)
>>> gemma[1].ends(1100, chunk_tokens=256)
[256, 512, 768, 1024, 1100]
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

from tierstore.errors import UsageError
from tierstore.spec import KVSpec, LayerGroup, LayerKind

Held: TypeAlias = Sequence[range]
"""Ranges of tokens that are held of a group: ascending, disjoint, none empty."""

Search: TypeAlias = "Generator[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]], int]"
"""See :func:`search`."""

_SCANNED = 64  # chunks that are asked for at first, where a prompt does not go on at an earlier one's end
_LOOKS = 3  # at what has been found, while some of it leaves


class Past(enum.Enum):
    """What the next token needs of those before it."""

    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """What hits need of one layer group; see the module."""

    past: Past
    tokens: int = 0  # of the window, or of an attention chunk

    def __post_init__(self) -> None:
        least = {Past.WINDOW: 0, Past.CHUNK: 1}.get(self.past)
        if (least is None and self.tokens) or (least is not None and self.tokens < least):
            raise UsageError(f"a layer group of the past {self.past.value!r} has no {self.tokens} tokens")

    @classmethod
    def all(cls) -> GroupRule:
        """Full attention and latents."""
        return cls(Past.ALL)

    @classmethod
    def window(cls, tokens: int) -> GroupRule:
        """A window of which a hit needs the last ``tokens``: one less than each token attends with itself."""
        return cls(Past.WINDOW, tokens)

    @classmethod
    def chunked(cls, tokens: int) -> GroupRule:
        """Attention within chunks of ``tokens``."""
        return cls(Past.CHUNK, tokens)

    @classmethod
    def state(cls) -> GroupRule:
        """A recurrent state."""
        return cls(Past.STATE)

    @classmethod
    def of(cls, group: LayerGroup) -> GroupRule:
        """The rule of a spec's layer group. Of opaque pages every one is needed."""
        if group.kind is LayerKind.SLIDING_WINDOW:
            return cls.window(max((group.window or 1) - 1, 0))
        if group.kind is LayerKind.CHUNKED_ATTENTION:
            return cls.chunked(group.window or 1)
        if group.kind is LayerKind.RECURRENT_STATE:
            return cls.state()
        return cls.all()

    @property
    def chained(self) -> bool:
        """Whether pages are found behind their parents: where a hit needs all of them. The pages of any other
        group are found by name, because those before them may not be held."""
        return self.past is Past.ALL

    def needed(self, length: int) -> range:
        """The tokens before ``length`` whose pages a hit of that length needs: of a state the last one, whose
        page has the snapshot behind it."""
        if self.past is Past.ALL:
            return range(length)
        if self.past is Past.WINDOW:
            return range(max(length - self.tokens, 0), length)
        if self.past is Past.CHUNK:
            return range(length - length % self.tokens, length)
        return range(max(length - 1, 0), length)

    def pages(self, length: int, chunk_tokens: int) -> range:
        """The pages of ``chunk_tokens`` tokens each that cover what a hit of ``length`` needs."""
        needed = self.needed(length)
        return range(needed.start // chunk_tokens, -(-needed.stop // chunk_tokens)) if needed else range(0)

    def ends(self, length: int, chunk_tokens: int) -> Sequence[int]:
        """Where those pages end: all of them whole, but the last where the hit ends inside of it."""
        needed, whole = self.needed(length), length - length % chunk_tokens
        if not needed:
            return range(0)
        first = (needed.start // chunk_tokens + 1) * chunk_tokens
        ends = range(first, whole + 1, chunk_tokens)
        return ends if whole == length else [*ends, length]

    def serves(self, held: Held, length: int) -> bool:
        """Whether what is held is enough for a hit of exactly ``length``."""
        return self.longest(held, length) == length

    def longest(self, held: Held, limit: int) -> int:
        """The longest hit of at most ``limit`` that what is held is enough for."""
        return self._longest(held if self.past is Past.STATE else _merged(held), limit)

    def _served(self, held: Held, limit: int) -> Iterator[int]:
        """The lengths from 1 to ``limit`` that what is held is enough for; some of them twice."""
        if self.past is Past.STATE:
            yield from (run.stop for run in held if run.stop <= limit)
            return
        # Where the next token looks at none before it, nothing has to be held.
        if self.past is Past.CHUNK:
            yield from range(self.tokens, limit + 1, self.tokens)
        elif self.past is Past.WINDOW and not self.tokens:
            yield from range(1, limit + 1)
        for run in _merged(held):
            stop = min(run.stop, limit)
            if run.start == 0:
                yield from range(1, stop + 1)
            elif self.past is Past.WINDOW:
                yield from range(run.start + self.tokens, stop + 1)
            elif self.past is Past.CHUNK:
                # Those whose own chunk begins in the run.
                yield from range(run.start + -run.start % self.tokens + 1, stop + 1)

    def _longest(self, runs: Held, limit: int) -> int:
        """``runs`` are merged, unless they are of states."""
        if limit <= 0:
            return 0
        if self.past is Past.STATE:
            at = bisect_right(runs, limit, key=lambda run: run.stop)
            return runs[at - 1].stop if at else 0
        if not self.needed(limit):  # the next token looks at none before it
            return limit
        if self.past is Past.ALL:
            return min(limit, runs[0].stop) if runs and runs[0].start == 0 else 0
        # The run that reaches furthest, of those that are long enough where they end (or where the limit is).
        best = limit - limit % self.tokens if self.past is Past.CHUNK else 0
        for run in reversed(runs[: bisect_right(runs, limit - 1, key=lambda run: run.start)]):
            end = min(limit, run.stop)
            if end <= best:
                break
            if self.needed(end).start >= run.start:
                return end
            if self.past is Past.CHUNK:
                best = max(best, end - end % self.tokens)
        return best


@dataclass(frozen=True, slots=True)
class Group:
    """A layer group of a model, and how its pages are kept: ``spec`` is the layout of one page. Where pages
    are ``named`` a page has its name, 32 bytes of SHA-256, in the place of its tokens."""

    number: int
    rule: GroupRule
    spec: KVSpec
    named: bool

    @property
    def page_bytes(self) -> int:
        return self.spec.page_bytes

    def chunks(self, tokens: int) -> range:
        """The chunks whose pages a hit of ``tokens`` tokens needs."""
        return self.rule.pages(tokens, self.spec.chunk_tokens)


@lru_cache(maxsize=256)
def groups_of(spec: KVSpec) -> tuple[Group, ...]:
    """The layer groups of a model. Pages of a hashed layout are named by the caller, as one group.

    >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (1,), 1, 64), LayerGroup(
    ...     LayerKind.SLIDING_WINDOW, (0,), 1, 64, window=128
    ... )
    >>> [(group.rule.past.value, group.named) for group in groups_of(KVSpec((full, window), "float16"))]
    [('all', False), ('window', True)]
    """
    if spec.hashed:
        return (Group(0, GroupRule.all(), spec, named=False),)
    groups = []
    for number, part in enumerate(spec.split()):
        rule = GroupRule.of(part.groups[0])
        page = part if rule.chained else replace(part, hashed=True)
        groups.append(Group(number, rule, page, named=not rule.chained))
    return tuple(groups)


def by_kind(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """The groups with chained pages, and those with named pages."""
    chained: list[Group] = []
    named: list[Group] = []
    for group in groups:
        (named if group.named else chained).append(group)
    return chained, named


def longest_hit(groups: Sequence[tuple[GroupRule, Held]], limit: int, *, align: int = 1) -> int:
    """The longest hit of at most ``limit`` tokens that every group can serve with what is held of it, a
    multiple of ``align``.

    Each group in turn says how much of the length so far it can serve, until all agree: no longer hit is
    passed by, because a hit that all can serve is never longer than what one of them can.
    """
    runs = [(rule, held if rule.past is Past.STATE else _merged(held)) for rule, held in groups]
    length, agreed = max(limit, 0), False
    while not agreed:
        before = length
        length -= length % align
        for rule, held in runs:
            length = rule._longest(held, length)
        agreed = length == before
    return length


def longest_of_pages(
    groups: Sequence[tuple[GroupRule, AbstractSet[int]]], limit: int, chunk_tokens: int
) -> int:
    """The longest hit of at most ``limit`` tokens that every group can serve with the pages that are held of
    it, told by where they end: a whole number of chunks, or one that ends inside of the limit's own.

    >>> groups = [(GroupRule.all(), {16, 32, 41}), (GroupRule.state(), {32, 39, 41})]
    >>> [longest_of_pages(groups, limit, chunk_tokens=16) for limit in (41, 40)]
    [41, 32]
    """
    whole = limit - limit % chunk_tokens
    for length in range(limit, whole, -1):
        if all(_ends_held(rule, held, length, chunk_tokens) for rule, held in groups):
            return length
    runs = [
        (rule, [range(end - chunk_tokens, end) for end in sorted(held) if end % chunk_tokens == 0])
        for rule, held in groups
    ]
    return longest_hit(runs, whole, align=chunk_tokens)


def _ends_held(rule: GroupRule, held: AbstractSet[int], length: int, chunk_tokens: int) -> bool:
    if not rule.needed(length):
        return True
    return length in held and set(rule.ends(length, chunk_tokens)) <= held


def search(rules: Mapping[int, GroupRule], branch: int, chunk_tokens: int) -> Search:
    """Find the longest hit of at most ``branch`` tokens where only asking tells which pages are held.

    For groups whose pages are found one by one; those of which every token is needed have been asked already,
    and go up to ``branch``. Yields the ends of the pages to ask for, by group, where there are any, and is
    sent those of them that are held. Returns the hit's length, as :func:`longest_of_pages` has it: of the
    last pages that were asked for those that are held are what it needs (of a hit of 0 tokens, nothing).

    What a hit of ``branch`` needs comes first, which mostly is the answer: a prompt goes on where an earlier
    one ended. If it is not, pages are asked for from there towards the front, further each time.

    >>> looking = search({0: GroupRule.state()}, 100, chunk_tokens=16)
    >>> next(looking)
    {0: [100]}
    >>> looking.send({0: []})
    {0: [96, 97, 98, 99]}
    >>> looking.send({0: []})
    {0: range(16, 97, 16)}
    >>> looking.send({0: [32, 64]})
    {0: range(64, 65, 16)}
    >>> looking.send({0: [64]})
    Traceback (most recent call last):
    StopIteration: 64
    """
    whole = branch - branch % chunk_tokens
    held: dict[int, set[int]] = {group: set() for group in rules}

    def needed(length: int) -> dict[int, Sequence[int]]:
        ends = {group: rule.ends(length, chunk_tokens) for group, rule in rules.items()}
        return {group: each for group, each in ends.items() if each}

    def note(asked: Mapping[int, Sequence[int]], answer: Mapping[int, Sequence[int]]) -> bool:
        """Whether all that was asked for is held."""
        for group, ends in asked.items():
            held[group].difference_update(ends)
            held[group].update(answer[group])
        return all(held[group].issuperset(ends) for group, ends in asked.items())

    def longest() -> int:
        return longest_of_pages([(rules[group], ends) for group, ends in held.items()], branch, chunk_tokens)

    wanted = needed(branch)
    if note(wanted, (yield wanted)):
        return branch
    if branch > whole:
        inside = range(whole + 1, branch)  # where others that went on from there may have ended
        wanted = needed(whole)
        both = {group: [*wanted.get(group, ()), *inside] for group in rules}
        asked: dict[int, Sequence[int]] = {group: ends for group, ends in both.items() if ends}
        answer = yield asked
        note(asked, answer)
        found_inside = any(end > whole for ends in answer.values() for end in ends)
        if whole and longest() == whole and not found_inside:
            return whole
    low, step, length = whole // chunk_tokens, _SCANNED, longest()
    # What a longer hit needs begins no earlier, so one that is found behind ``low`` is the longest.
    while low and length < max(low * chunk_tokens, 1):
        first = max(low - step, 0)
        asked = dict.fromkeys(rules, range((first + 1) * chunk_tokens, low * chunk_tokens + 1, chunk_tokens))
        low, step = first, 2 * step
        note(asked, (yield asked))
        length = longest()
    for _ in range(_LOOKS):
        if not length:
            break
        wanted = needed(length)  # maybe nothing, so that the last answer is always what the hit needs
        if note(wanted, (yield wanted)):
            return length
        length = longest()  # some have left meanwhile
    return 0


def served_lengths(groups: Sequence[tuple[GroupRule, Held]], limit: int) -> list[int]:
    """All hits of 1 to ``limit`` tokens that every group can serve with what is held of it, the longest last:
    for an engine that chooses among them, because several of its ranks have to agree.

    >>> served_lengths([(GroupRule.window(2), [range(0, 3), range(6, 9)]), (GroupRule.all(), [range(9)])], 9)
    [1, 2, 3, 8, 9]
    """
    lengths = set(range(1, limit + 1))
    for rule, held in groups:
        lengths.intersection_update(rule._served(held, limit))
    return sorted(lengths)


def page_ranges(pages: Sequence[int], chunk_tokens: int) -> list[range]:
    """The tokens of whole pages, each by itself, from their places in the prompt (in any order)."""
    return [range(page * chunk_tokens, (page + 1) * chunk_tokens) for page in sorted(set(pages))]


def _merged(held: Held) -> list[range]:
    """Ranges that follow one another as one."""
    runs: list[range] = []
    for each in held:
        if runs and runs[-1].stop >= each.start:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, each.stop))
        elif each:
            runs.append(each)
    return runs
