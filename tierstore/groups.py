"""Find the longest hit in a model whose layers need different parts of the past. Pure.

A *layer group* has the layers that need the same earlier tokens. After a hit of length L, the engine may
continue with token L (the first token is token 0) as if it had computed all tokens before it. The group's
rule defines which tokens a hit of length L needs:

* ``Past.ALL`` (full attention and latents (MLA)) needs every token before L.
* ``Past.WINDOW`` needs the ``tokens`` tokens before L. With a window of ``w``, each token attends ``w``
  tokens including itself, so a hit needs ``w - 1``.
* ``Past.CHUNK`` needs the tokens before L in L's own attention chunk of ``tokens``; none if L begins a chunk.
* ``Past.STATE`` needs the snapshot that was taken at exactly L, behind token L - 1.
* ``Past.CROSS`` (cross attention) needs the pages of all inputs that begin before L. These pages hold rows of
  an encoder instead of tokens. Ranges and ends of such a group count the rows of all inputs of the prompt,
  each input rounded up to whole pages.
* ``Past.INPUT`` is for embeddings. A page's "tokens" are rows of one input. A hit is the whole input, or 0.

The longest hit is the largest L that all groups support (:func:`longest_hit`). The store then loads exactly
what L needs from each group (:meth:`GroupRule.needed`). Every group supports L = 0.

The held tokens of a group are given as ascending and disjoint ranges, one range for each page or for several
consecutive pages (the leading tokens of a prompt are one range). In a group with states, there is a snapshot
at the *stop* of each range. If pages can be divided by tokens, a range may end inside a page, and so may a
hit. If not, ``align`` is the chunk length.

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
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

from tierstore.errors import SpecError, UsageError
from tierstore.spec import KVSpec, LayerGroup, LayerKind

Held: TypeAlias = Sequence[range]
"""The ranges of tokens that are held in a group: ascending, disjoint, none empty."""

Search: TypeAlias = "Generator[Mapping[int, Sequence[int]], Mapping[int, Sequence[int]], int]"
"""See :func:`search`."""

_SCANNED = 64  # chunks in the first request of a scan towards the front of the prompt
_LOOKS = 3  # attempts to find all pages of a hit, if some of them are evicted meanwhile


class Past(enum.Enum):
    """The earlier tokens that the next token needs."""

    ALL = "all"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    CROSS = "cross"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class GroupRule:
    """A rule for the tokens that a hit needs in one layer group; the module describes all rules."""

    past: Past
    tokens: int = 0  # length of the window or of an attention chunk
    inputs: tuple[tuple[int, int], ...] = ()
    """For cross attention: the inputs of one prompt. For each input, its first token and the row at which its
    pages end."""

    def __post_init__(self) -> None:
        pairs = list(pairwise(((-1, 0), *self.inputs)))
        if any(one[0] >= other[0] or one[1] >= other[1] for one, other in pairs) or (
            self.inputs and self.past is not Past.CROSS
        ):
            raise UsageError(
                "the inputs of a prompt must be in order, each with rows, and only cross attention has them"
            )
        least = {Past.WINDOW: 0, Past.CHUNK: 1}.get(self.past)
        if (least is None and self.tokens) or (least is not None and self.tokens < least):
            raise UsageError(
                f"tokens={self.tokens} is invalid for a {self.past.value!r} rule: a window needs at least 0, "
                "a chunk at least 1, and all others 0"
            )

    @classmethod
    def all(cls) -> GroupRule:
        """Return the rule for full attention and latents."""
        return cls(Past.ALL)

    @classmethod
    def window(cls, tokens: int) -> GroupRule:
        """Return the rule for a sliding window. A hit needs the last ``tokens`` tokens before it: one less
        than the number of tokens that each token attends, including itself."""
        return cls(Past.WINDOW, tokens)

    @classmethod
    def chunked(cls, tokens: int) -> GroupRule:
        """Return the rule for attention within chunks of ``tokens``."""
        return cls(Past.CHUNK, tokens)

    @classmethod
    def state(cls) -> GroupRule:
        """Return the rule for a recurrent state."""
        return cls(Past.STATE)

    @classmethod
    def cross(cls, inputs: Iterable[tuple[int, int]] = (), chunk_tokens: int = 1) -> GroupRule:
        """Return the rule for cross attention in a prompt with these inputs. Each input is given as its first
        token and the number of its rows. A page has ``chunk_tokens`` rows.

        >>> rule = GroupRule.cross([(5, 100), (40, 64)], chunk_tokens=64)
        >>> [rule.needed(tokens) for tokens in (5, 6, 50)]
        [range(0, 0), range(0, 128), range(0, 192)]
        >>> rule.longest([range(0, 128)], 50)
        40
        """
        placed, end = [], 0
        for start, rows in inputs:
            end += -(-rows // chunk_tokens) * chunk_tokens
            placed.append((start, end))
        return cls(Past.CROSS, inputs=tuple(placed))

    @classmethod
    def input(cls) -> GroupRule:
        """Return the rule for the embedding of an input.

        >>> rule, held = GroupRule.input(), [range(0, 128)]
        >>> [rule.longest(held, rows) for rows in (128, 192)]
        [128, 0]
        """
        return cls(Past.INPUT)

    @classmethod
    def of(cls, group: LayerGroup) -> GroupRule:
        """Return the rule of a layer group of a spec. A hit needs all opaque pages before it."""
        if group.kind is LayerKind.SLIDING_WINDOW:
            return cls.window(max((group.window or 1) - 1, 0))
        if group.kind is LayerKind.CHUNKED_ATTENTION:
            return cls.chunked(group.window or 1)
        if group.kind is LayerKind.RECURRENT_STATE:
            return cls.state()
        if group.kind is LayerKind.CROSS_ATTENTION:
            return cls.cross()
        if group.kind is LayerKind.EMBEDDING:
            return cls.input()
        return cls.all()

    @property
    def chained(self) -> bool:
        """Whether a page is found as the child of the page before it, because a hit needs all pages. The
        pages of other groups are found by name, because the pages before them may be missing."""
        return self.past is Past.ALL

    def needed(self, length: int) -> range:
        """Return the range of tokens before ``length`` whose pages a hit of ``length`` tokens needs. For a
        state, this is the last token, because the snapshot behind it is on its page."""
        if self.past in (Past.ALL, Past.INPUT):
            return range(length)
        if self.past is Past.CROSS:
            begun = bisect_left(self.inputs, length, key=_first_token)
            return range(self.inputs[begun - 1][1] if begun else 0)
        if self.past is Past.WINDOW:
            return range(max(length - self.tokens, 0), length)
        if self.past is Past.CHUNK:
            return range(length - length % self.tokens, length)
        return range(max(length - 1, 0), length)

    def pages(self, length: int, chunk_tokens: int) -> range:
        """Return the pages of ``chunk_tokens`` tokens each that a hit of ``length`` tokens needs."""
        needed = self.needed(length)
        return range(needed.start // chunk_tokens, -(-needed.stop // chunk_tokens)) if needed else range(0)

    def ends(self, length: int, chunk_tokens: int) -> Sequence[int]:
        """Return the tokens at which the pages that a hit needs end. All pages are whole, except the last
        page of a hit that ends inside a page."""
        needed, whole = self.needed(length), length - length % chunk_tokens
        if not needed:
            return range(0)
        if self.past is Past.CROSS:
            return range(chunk_tokens, needed.stop + 1, chunk_tokens)
        first = (needed.start // chunk_tokens + 1) * chunk_tokens
        ends = range(first, whole + 1, chunk_tokens)
        return ends if whole == length else [*ends, length]

    def chunk_of(self, end: int, chunk_tokens: int) -> int:
        """Return the first chunk of the prompt from which on a hit needs the page that ends at ``end``.

        >>> GroupRule.all().chunk_of(128, 64), GroupRule.cross([(5, 128)]).chunk_of(128, 64)
        (1, 0)
        """
        if self.past is not Past.CROSS:
            return (end - 1) // chunk_tokens
        return self.inputs[bisect_left(self.inputs, end, key=_end_of_rows)][0] // chunk_tokens

    def serves(self, held: Held, length: int) -> bool:
        """Return whether the held ranges support a hit of exactly ``length``."""
        return self.longest(held, length) == length

    def longest(self, held: Held, limit: int) -> int:
        """Return the length of the longest hit, at most ``limit``, that the held ranges support."""
        return self._longest(held if self.past is Past.STATE else _merged(held), limit)

    def _served(self, held: Held, limit: int) -> Iterator[int]:
        """Yield the hit lengths from 1 to ``limit`` that the held ranges support, some of them twice."""
        if self.past is Past.STATE:
            yield from (run.stop for run in held if run.stop <= limit)
            return
        if self.past is Past.INPUT:
            yield from {self._longest(_merged(held), limit)} - {0}
            return
        if self.past is Past.CROSS:
            yield from range(1, self._longest(_merged(held), limit) + 1)
            return
        # Lengths at which the next token needs no earlier token:
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
                # Lengths whose attention chunk begins in this run:
                yield from range(run.start + -run.start % self.tokens + 1, stop + 1)

    def _longest(self, runs: Held, limit: int) -> int:
        """Return the result of :meth:`longest` for ``runs``, whose adjacent ranges are merged (except for
        states)."""
        if limit <= 0:
            return 0
        if self.past is Past.STATE:
            at = bisect_right(runs, limit, key=lambda run: run.stop)
            return runs[at - 1].stop if at else 0
        if not self.needed(limit):  # the next token needs no earlier token
            return limit
        if self.past is Past.CROSS:
            reached = runs[0].stop if runs and runs[0].start == 0 else 0
            missing = bisect_right(self.inputs, reached, key=_end_of_rows)
            return min(limit, self.inputs[missing][0]) if missing < len(self.inputs) else limit
        if self.past in (Past.ALL, Past.INPUT):
            reached = min(limit, runs[0].stop) if runs and runs[0].start == 0 else 0
            return reached if self.past is Past.ALL or reached == limit else 0
        # Search from the last run for one that covers what a hit at its end (or at the limit) needs.
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
    """A layer group of a model. ``spec`` is the layout of the group's pages. With ``named``, pages are found
    by name, and a page stores its name (32 bytes of SHA-256) in the place of its tokens."""

    number: int
    rule: GroupRule
    spec: KVSpec
    named: bool

    @property
    def page_bytes(self) -> int:
        return self.spec.page_bytes

    def chunks(self, tokens: int) -> range:
        """Return the chunks whose pages a hit of ``tokens`` tokens needs."""
        return self.rule.pages(tokens, self.spec.chunk_tokens)


@lru_cache(maxsize=256)
def groups_of(spec: KVSpec) -> tuple[Group, ...]:
    """Return the layer groups of a model. If an engine names all pages (a hashed layout), they form one
    group.

    >>> full, window = LayerGroup(LayerKind.FULL_ATTENTION, (1,), 1, 64), LayerGroup(
    ...     LayerKind.SLIDING_WINDOW, (0,), 1, 64, window=128
    ... )
    >>> [(group.rule.past.value, group.named) for group in groups_of(KVSpec((full, window), "float16"))]
    [('all', False), ('window', True)]
    """
    if spec.hashed:
        return (Group(0, GroupRule.all(), spec, named=False),)
    if all(group.kind is LayerKind.CROSS_ATTENTION for group in spec.groups):
        raise SpecError("cross attention reads inputs of a prompt: its model needs layers that read tokens")
    groups = []
    for number, part in enumerate(spec.split()):
        rule = GroupRule.of(part.groups[0])
        page = part if rule.chained else replace(part, hashed=True)
        groups.append(Group(number, rule, page, named=not rule.chained))
    return tuple(groups)


def by_kind(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """Return the groups with chained pages, and the groups with named pages."""
    chained: list[Group] = []
    named: list[Group] = []
    for group in groups:
        (named if group.named else chained).append(group)
    return chained, named


def longest_hit(groups: Sequence[tuple[GroupRule, Held]], limit: int, *, align: int = 1) -> int:
    """Return the length of the longest hit, at most ``limit`` tokens, that every group supports with its held
    ranges. It is a multiple of ``align``.

    Each group in turn lowers the length to one that it supports, until all groups agree. This finds the
    longest hit, because a hit that all groups support is never longer than the longest hit of any single
    group.
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
    """Return the length of the longest hit, at most ``limit`` tokens, that every group supports with its held
    pages. A page is given by the token at which it ends. The hit has a whole number of chunks, or ends in the
    chunk in which ``limit`` lies.

    >>> groups = [(GroupRule.all(), {16, 32, 41}), (GroupRule.state(), {32, 39, 41})]
    >>> [longest_of_pages(groups, limit, chunk_tokens=16) for limit in (41, 40)]
    [41, 32]
    """
    if any(rule.past is Past.INPUT for rule, _ in groups):
        return limit if all(_ends_held(rule, held, limit, chunk_tokens) for rule, held in groups) else 0
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
    here = rule.past is Past.CROSS or length in held
    return here and set(rule.ends(length, chunk_tokens)) <= held


def search(rules: Mapping[int, GroupRule], branch: int, chunk_tokens: int) -> Search:
    """Find the longest hit of at most ``branch`` tokens in groups with named pages, by asking the caller
    which pages are held.

    The chained groups were searched before, and support ``branch`` tokens. The generator yields the ends of
    pages to look up, by group, without groups that have none. The caller sends the ends of the held pages.
    The generator returns the length of the hit, as :func:`longest_of_pages` does. The held pages in the last
    answer are exactly the pages that the hit needs; none for an empty hit.

    The generator first asks for the pages that a hit of ``branch`` tokens needs. They are usually held,
    because a prompt usually continues where an earlier prompt ended. If not, the generator asks for pages
    from ``branch`` towards the front, twice as many each time.

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
    # A hit of ``branch`` needs all rows that any shorter hit needs, so cross attention is not scanned.
    scanned = [group for group, rule in rules.items() if rule.past is not Past.CROSS]

    def needed(length: int) -> dict[int, Sequence[int]]:
        ends = {group: rule.ends(length, chunk_tokens) for group, rule in rules.items()}
        return {group: each for group, each in ends.items() if each}

    def note(asked: Mapping[int, Sequence[int]], answer: Mapping[int, Sequence[int]]) -> bool:
        """Record an answer. Return whether all pages in the question are held."""
        for group, ends in asked.items():
            held[group].difference_update(ends)
            held[group].update(answer[group])
        return all(held[group].issuperset(ends) for group, ends in asked.items())

    def longest() -> int:
        return longest_of_pages([(rules[group], ends) for group, ends in held.items()], branch, chunk_tokens)

    wanted = needed(branch)
    if note(wanted, (yield wanted)):
        return branch
    if any(rule.past is Past.INPUT for rule in rules.values()):
        return 0
    if branch > whole:
        inside = range(whole + 1, branch)  # other prompts may have ended inside the last chunk
        wanted = needed(whole)
        both = {**wanted, **{group: [*wanted.get(group, ()), *inside] for group in scanned}}
        asked: dict[int, Sequence[int]] = {group: ends for group, ends in both.items() if ends}
        answer = yield asked
        note(asked, answer)
        found_inside = any(end > whole for group in scanned for end in answer.get(group, ()))
        if whole and longest() == whole and not found_inside:
            return whole
    low, step, length = whole // chunk_tokens, _SCANNED, longest()
    # A longer hit needs no earlier pages than a shorter one. So a hit found behind ``low`` is the longest.
    while scanned and low and length < max(low * chunk_tokens, 1):
        first = max(low - step, 0)
        asked = dict.fromkeys(
            scanned, range((first + 1) * chunk_tokens, low * chunk_tokens + 1, chunk_tokens)
        )
        low, step = first, 2 * step
        note(asked, (yield asked))
        length = longest()
    for _ in range(_LOOKS):
        if not length:
            break
        wanted = needed(length)  # asked for even if empty: the last answer must be what the hit needs
        if note(wanted, (yield wanted)):
            return length
        length = longest()  # some pages were evicted meanwhile
    return 0


def served_lengths(groups: Sequence[tuple[GroupRule, Held]], limit: int) -> list[int]:
    """Return the lengths of all hits from 1 to ``limit`` tokens that every group supports with its held
    ranges, in ascending order. An engine with several ranks needs all lengths, because its ranks must agree
    on one.

    >>> served_lengths([(GroupRule.window(2), [range(0, 3), range(6, 9)]), (GroupRule.all(), [range(9)])], 9)
    [1, 2, 3, 8, 9]
    """
    lengths = set(range(1, limit + 1))
    for rule, held in groups:
        lengths.intersection_update(rule._served(held, limit))
    return sorted(lengths)


def page_ranges(pages: Sequence[int], chunk_tokens: int) -> list[range]:
    """Return the tokens of whole pages, one range for each page. ``pages`` are positions in the prompt, in
    any order."""
    return [range(page * chunk_tokens, (page + 1) * chunk_tokens) for page in sorted(set(pages))]


def _first_token(given: tuple[int, int]) -> int:
    return given[0]


def _end_of_rows(given: tuple[int, int]) -> int:
    return given[1]


def _merged(held: Held) -> list[range]:
    """Return the ranges, with adjacent ranges merged."""
    runs: list[range] = []
    for each in held:
        if runs and runs[-1].stop >= each.start:
            runs[-1] = range(runs[-1].start, max(runs[-1].stop, each.stop))
        elif each:
            runs.append(each)
    return runs
