"""Every crash that a recording can have: at each event, for each thing that may then be on the disk.

=================  ===============================================================================
fault              what the crash leaves
=================  ===============================================================================
crash              everything that was done: the process died, the machine did not
lost write         the last few, or all, of the unsynced changes are lost; names too
reordered write    a later unsynced change arrived without an earlier one
torn write         of the write under way the sectors before any boundary of two, or behind one of blocks
torn commit        of the LMDB transaction under way any of its data pages or sectors, in any order
=================  ===============================================================================

Small choices are made exhaustively. Of large ones there are too many: of many pending changes none, each
alone and all but each are tried, of a transaction's pages each alone, missing or torn in turn, and besides a
seeded sample of subsets.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tierstore.testing.faults.disk import (
    LMDB_PAGE,
    SECTOR,
    Disk,
    Image,
    changed_sectors,
    torn_commit,
    torn_write,
)
from tierstore.testing.faults.journal import Committed, Created, Event, Written

CRASHES = ("crash", "lost write", "reordered write", "torn write", "torn commit")

_ALL_SUBSETS_OF = 4  # changes, of which every subset is tried
_SAMPLED_SUBSETS = 12
_SAMPLED_COMMITS = 4
_PAGE_SECTORS = LMDB_PAGE // SECTOR


@dataclass(frozen=True, slots=True)
class Crash:
    """One crash: after the first ``position`` events, and possibly in the middle of the next.

    ``kept`` are the pending changes that survive, by position (None: all). ``sectors`` are those of the event
    under way that arrived (None: it had not begun).
    """

    fault: str
    position: int
    kept: frozenset[int] | None = None
    names: bool = True
    sectors: Sequence[int] | None = None

    def image(self, events: Sequence[Event]) -> Image:
        """The files that this crash of a recording leaves."""
        image = Disk(events[: self.position]).image(self.kept, names=self.names)
        if self.sectors is not None:
            event = events[self.position]
            if isinstance(event, Written):
                image[event.name] = torn_write(image[event.name], event, self.sectors)
            elif isinstance(event, Created):
                image[event.name] = _torn_creation(event, self.sectors)
            else:
                assert isinstance(event, Committed), f"{event} cannot be torn"
                image[event.name] = torn_commit(event, self.sectors)
        return image

    def describe(self, events: Sequence[Event]) -> str:
        """One line for whoever has to find out why it did harm."""
        under_way = type(events[self.position]).__name__ if self.position < len(events) else "the end"
        kept = "all" if self.kept is None else sorted(self.kept)
        sectors = "none" if self.sectors is None else _ranges(self.sectors)
        return (
            f"{self.fault} before event {self.position} ({under_way}): kept {kept} of the unsynced changes, "
            f"names {'kept' if self.names else 'lost'}, sectors of the event: {sectors}"
        )


def crashes(events: Sequence[Event], *, seed: int = 0, tear_step: int = 1) -> Iterator[Crash]:
    """All of them, in order of events; ``seed`` chooses the samples. Writes are torn at every
    ``tear_step``-th boundary of their sectors."""
    chance = random.Random(seed)
    disk = Disk()
    for position in range(len(events) + 1):
        yield Crash("crash", position)
        yield from _losses(disk, position, chance)
        if position < len(events):
            yield from _tears(events[position], position, chance, tear_step)
            disk.apply(events[position])


def _losses(disk: Disk, position: int, chance: random.Random) -> Iterator[Crash]:
    pending = disk.pending
    if disk.names_pending:
        yield Crash("lost write", position, frozenset(), names=False)
    if not pending:
        return
    for kept in _subsets(pending, chance):
        in_order = kept == frozenset(pending[: len(kept)])
        yield Crash("lost write" if in_order else "reordered write", position, kept)


def _tears(event: Event, position: int, chance: random.Random, step: int) -> Iterator[Crash]:
    if isinstance(event, Written):
        sectors = -(-len(event.data) // SECTOR)
        for border in range(1, sectors, step):
            yield Crash("torn write", position, sectors=range(border))
            if border % _PAGE_SECTORS == 0 or border == sectors - 1:
                yield Crash("torn write", position, sectors=range(border, sectors))
    elif isinstance(event, Created) and event.data:
        for count in range(len(event.data) // LMDB_PAGE):
            yield Crash("torn write", position, sectors=range(count * _PAGE_SECTORS))
    elif isinstance(event, Committed):
        yield from _commit_tears(event, position, chance)


def _commit_tears(commit: Committed, position: int, chance: random.Random) -> Iterator[Crash]:
    sectors = changed_sectors(commit)
    pages = [sectors[at : at + _PAGE_SECTORS] for at in range(0, len(sectors), _PAGE_SECTORS)]
    chosen: list[list[int]] = [sectors]
    for number, page in enumerate(pages):
        if number % 3 == 0:
            chosen.append(page)
        elif number % 3 == 1:
            chosen.append([sector for sector in sectors if sector not in page])
        else:
            chosen.append(page[: chance.randrange(1, _PAGE_SECTORS)])
    for _ in range(_SAMPLED_COMMITS):
        chosen.append([sector for sector in sectors if chance.random() < 0.5])
    for each in chosen:
        yield Crash("torn commit", position, sectors=each)


def _torn_creation(event: Created, sectors: Collection[int]) -> bytes:
    return event.data[: len(sectors) * SECTOR]


def _subsets(pending: Sequence[int], chance: random.Random) -> Iterator[frozenset[int]]:
    if len(pending) <= _ALL_SUBSETS_OF:
        for size in range(len(pending)):
            yield from map(frozenset, itertools.combinations(pending, size))
        return
    yield frozenset()
    for position in pending:
        yield frozenset([position])
        yield frozenset(pending) - {position}
    for _ in range(_SAMPLED_SUBSETS):
        yield frozenset(position for position in pending if chance.random() < 0.5)


def _ranges(sectors: Sequence[int]) -> str:
    if len(sectors) > 1 and sectors[-1] - sectors[0] == len(sectors) - 1:
        return f"{sectors[0]}–{sectors[-1]}"
    return ", ".join(map(str, sectors)) or "–"
