"""The search in a core for the longest hit that all layer groups of a prompt support.

The groups that need every token are searched first. The shortest of these groups' stored prefixes is the
*branch*: no hit is longer. The pages of the other groups are found by name, and
:func:`tierstore.groups.search` decides which names to look up. Most names are found in the tree. If the disk
may have a page that the tree lacks, the search stops. The caller then reads the disk without the lock and
continues the search.

All functions and methods of this module need the state's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tierstore.backend import NamedGroup
from tierstore.core.prompts import ChainView, FoundPages, NamedView
from tierstore.core.state import StoreState
from tierstore.explanation import Miss
from tierstore.groups import Past, Search, search
from tierstore.index.leases import PageLease
from tierstore.keys import named_chunks


@dataclass(slots=True)
class HitView:
    """A :class:`~tierstore.backend.HitRequest` whose ``chains`` may refer to prefixes that this client has
    looked up before."""

    chunk_tokens: int
    num_tokens: int
    chains: Sequence[ChainView]
    here: Sequence[int]
    named: Sequence[NamedGroup]
    names: Sequence[bytes]
    root: bytes
    tail: bytes
    counted: bool = True
    explain: bool = False

    @property
    def caller_named(self) -> NamedGroup | None:
        """The group of a request for pages that the caller has named and needs all of; None for a model's
        prompt."""
        group = self.named[0] if self.named and not self.chains else None
        return group if group is not None and group.rule.past is Past.ALL else None

    def pages(self, group: NamedGroup, ends: Sequence[int]) -> NamedView:
        """Return the named pages of a group that end at these token positions."""
        names = group.names_at(ends, self.chunk_tokens, self.names, self.root, self._chunk)
        return NamedView(group.registration, *named_chunks(names, self.chunk_tokens))

    def _chunk(self, index: int) -> bytes:
        return self.chains[0].chunk(index)[1] if self.chains else self.tail


class HitSearch:
    """One search. ``found`` returns the pages of a chain's first tokens that are in the tree.

    ``length`` is the length of the hit in tokens, None until it is known. When ``length`` is known,
    ``founds`` has each chain's pages in the tree, ``reached`` is the length of each chain's prefix including
    the client's own pages, and ``branch`` is the shortest of these lengths.
    """

    def __init__(
        self, state: StoreState, view: HitView, found: Callable[[ChainView, int], FoundPages]
    ) -> None:
        self.view = view
        self.branch = 0
        self.length: int | None = None
        self.founds: Sequence[FoundPages] = ()
        self.reached: Sequence[int] = ()
        self.explained: tuple[int, list[Miss]] | None = None
        """The hit's length and the reasons for the misses after the hit; None until they are known."""
        self.looks: list[Callable[[], PageLease]] = []
        """The disk lookups that the search needs before it can continue; empty if it stopped after ``most``
        names."""
        self._state = state
        self._found = found
        self._here = [frozenset(group.here) for group in view.named]
        self._looked: list[set[int]] = [set() for _ in view.named]
        self._last: list[tuple[Sequence[int], NamedView, FoundPages] | None] = [None for _ in view.named]
        self._looked_for_chains = False
        self._concluding = False
        self._changes = -1  # ``index.changes`` when ``founds`` was made
        self._search: Search | None = None
        self._wanted: Mapping[int, Sequence[int]] = {}

    def go_on(self, most: int) -> bool:
        """Search until ``length`` is known. Return False if the search stops before that: for a disk lookup,
        or after ``most`` names."""
        self.looks = []
        if self.length is not None:
            return True
        if self._search is None:
            self._find_chains()
            if not self._looked_for_chains:
                self._looked_for_chains = True
                pairs = zip(self.view.chains, self.founds, strict=True)
                self.looks = [
                    chain.disk_look(self._state, self.view.num_tokens)
                    for chain, found in pairs
                    if found.look_on_disk
                ]
                if self.looks:
                    return False
        self.length = self._search_names(self.branch, most)
        return self.length is not None

    def conclude(self) -> int:
        """Return the hit's length for the pages in the tree now, without another disk lookup."""
        if self.length is not None and self._changes == self._state.index.changes:
            return self.length
        self._find_chains()
        limit = self.branch if self.length is None else min(self.length, self.branch)
        self._search, self._concluding = None, True
        self.looks = []  # the deadline passed during a disk lookup: the search must not stop for it
        self._last = [None for _ in self.view.named]
        length = None
        while length is None:
            length = self._search_names(limit, self.view.num_tokens)
        self.length = length
        return length

    def needed(self, at: int) -> tuple[Sequence[int], NamedView, FoundPages]:
        """Return the pages of named group ``at`` that the hit needs and the caller lacks: their ends, and
        which of these pages are in the tree. The search usually looks up the needed pages last, so its last
        result is used again if it fits."""
        ends = self.view.named[at].rule.ends(self.length or 0, self.view.chunk_tokens)
        lacking, last = self._lacking(at, ends), self._last[at]
        return last if last is not None and last[0] == lacking else self._ask(at, lacking)

    def _lacking(self, at: int, ends: Sequence[int]) -> list[int]:
        return [end for end in ends if end not in self._here[at]]

    def _ask(self, at: int, ends: Sequence[int]) -> tuple[Sequence[int], NamedView, FoundPages]:
        pages = self.view.pages(self.view.named[at], ends)
        self._last[at] = asked = ends, pages, pages.find(self._state, pages.num_tokens)
        return asked

    def _find_chains(self) -> None:
        self._changes = self._state.index.changes
        self.founds = [self._found(chain, self.view.num_tokens) for chain in self.view.chains]
        pairs = zip(self.founds, self.view.here, strict=True)
        self.reached = [max(found.tokens, here) for found, here in pairs]
        self.branch = min([*self.reached, self.view.num_tokens])

    @property
    def shortest(self) -> int | None:
        """The number of the chain that limits the hit; None if there are no chains."""
        return self.reached.index(min(self.reached)) if self.reached else None

    def _search_names(self, limit: int, most: int) -> int | None:
        """Return the hit's length; None if the search stops before it is known."""
        if not self.view.named:
            return limit
        try:
            if self._search is None:
                rules = {at: group.rule for at, group in enumerate(self.view.named)}
                self._search = search(rules, limit, self.view.chunk_tokens)
                self._wanted = next(self._search)
            asked = 0
            while asked <= most:
                held = {at: self._held(at, ends) for at, ends in self._wanted.items()}
                if self.looks:
                    return None
                asked += sum(map(len, self._wanted.values()))
                self._wanted = self._search.send(held)
        except StopIteration as end:
            return int(end.value)
        return None

    def _held(self, at: int, ends: Sequence[int]) -> list[int]:
        """Return the ends of a group's stored pages. Plan one disk lookup for each page that is missing."""
        looked = self._looked[at]
        asked, pages, found = self._ask(at, self._lacking(at, ends))
        missing = {asked[position] for position in pages.missing(found, pages.num_tokens)}
        if found.look_on_disk and not self._concluding and not looked.issuperset(missing):
            self.looks.append(pages.disk_look(self._state, pages.num_tokens))
        looked |= missing
        return [end for end in ends if end not in missing]
