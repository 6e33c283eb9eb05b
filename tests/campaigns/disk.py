"""What is on a disk when the power fails: the part that is sure, and the part that may be.

A :class:`Disk` replays a journal. Of each file it knows the *durable* content and the changes that are
*pending*: done, and not covered by a sync yet. :meth:`Disk.image` gives the content for any choice of what
became of the pending ones. See the package's essay for what this model guarantees and leaves out.
"""

from __future__ import annotations

import itertools
import posixpath
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tests.campaigns.recording import (
    INDEX,
    Committed,
    Created,
    DirectorySynced,
    Event,
    Freed,
    Removed,
    Renamed,
    Resized,
    Synced,
    Written,
)

SECTOR = 512  # bytes that a disk writes whole or not at all
LMDB_PAGE = 4096
_META_PAGES = (0, 1)

Image: TypeAlias = dict[str, bytes]
"""The files of a store directory: name → content."""

_Change: TypeAlias = Written | Resized | Freed


@dataclass(slots=True)
class _File:
    durable: bytearray
    pending: list[tuple[int, _Change]] = field(default_factory=list)  # with their positions


class Disk:
    """The disk after some events of a journal."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._files: dict[str, _File] = {}  # as the names are now
        self._durable_names: dict[str, _File] = {}  # as they are after a crash in which no name was kept
        self._position = 0
        for event in events:
            self.apply(event)

    @property
    def pending(self) -> list[int]:
        """The positions of the changes to files that a crash may lose, in order."""
        return sorted(position for file in self._files.values() for position, _ in file.pending)

    @property
    def names_pending(self) -> bool:
        """Whether files have been made, removed or renamed since their directory was synced."""
        return {name: id(file) for name, file in self._files.items()} != {
            name: id(file) for name, file in self._durable_names.items()
        }

    def apply(self, event: Event) -> None:
        """The next event happens, wholly."""
        if isinstance(event, Created):
            self._files[event.name] = _File(bytearray(event.data))
        elif isinstance(event, Removed):
            del self._files[event.name]
        elif isinstance(event, Renamed):
            self._files[event.to] = self._files.pop(event.name)
        elif isinstance(event, Synced):
            self._settle(self._files[event.name], lambda position: position < event.began)
        elif isinstance(event, DirectorySynced):
            self._settle_names(event.name)
        elif isinstance(event, Committed):
            self._files[event.name].durable[:] = event.after
        else:
            self._files[event.name].pending.append((self._position, event))
        self._position += 1

    def image(self, kept: Collection[int] | None = None, *, names: bool = True) -> Image:
        """What a crash now leaves, if of the pending changes those at the positions ``kept`` (None: all)
        reached the disk, and of the names' changes all or none."""
        files = self._files if names else self._durable_names
        image = {}
        for name, file in files.items():
            content = bytearray(file.durable)
            for position, change in file.pending:
                if kept is None or position in kept:
                    _apply(content, change)
            image[name] = bytes(content)
        return image

    @staticmethod
    def _settle(file: _File, covered: Callable[[int], bool]) -> None:
        waiting = []
        for position, change in file.pending:
            if covered(position):
                _apply(file.durable, change)
            else:
                waiting.append((position, change))
        file.pending = waiting

    def _settle_names(self, directory: str) -> None:
        for name in {*self._files, *self._durable_names}:
            if posixpath.dirname(name) == directory:
                if name in self._files:
                    self._durable_names[name] = self._files[name]
                else:
                    del self._durable_names[name]


def torn_write(content: bytes, write: Written, sectors: Collection[int]) -> bytes:
    """``content`` after only those ``sectors`` (from 0, at the write's beginning) of a write arrived."""
    result = bytearray(content)
    for sector in sectors:
        start = sector * SECTOR
        part = write.data[start : start + SECTOR]
        if part:
            _apply(result, Written(write.name, write.offset + start, part))
    return bytes(result)


def changed_sectors(commit: Committed) -> list[int]:
    """The sectors, from the file's beginning, in data pages that a transaction changed."""
    sectors: list[int] = []
    for page in range(len(_META_PAGES), -(-len(commit.after) // LMDB_PAGE)):
        span = slice(page * LMDB_PAGE, (page + 1) * LMDB_PAGE)
        if commit.before[span] != commit.after[span]:
            first = page * LMDB_PAGE // SECTOR
            sectors += range(first, first + LMDB_PAGE // SECTOR)
    return sectors


def torn_commit(commit: Committed, sectors: Collection[int]) -> bytes:
    """The index after those ``sectors`` of a transaction arrived, and its meta page did not."""
    result = bytearray(commit.before)
    for sector in sectors:
        start = sector * SECTOR
        _apply(result, Written(commit.name, start, commit.after[start : start + SECTOR]))
    return bytes(result)


def write_image(image: Image, directory: Path) -> None:
    """Make a store directory of an image. Every byte of an extent gets its block, as the preallocated
    original has. A page of an index that is all zeros gets none: it was freed, or never written."""
    for name, content in image.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not name.startswith(INDEX):
            path.write_bytes(content)
            continue
        with path.open("wb") as file:
            for start in range(0, len(content), LMDB_PAGE):
                page = content[start : start + LMDB_PAGE]
                if page.strip(b"\0"):
                    file.seek(start)
                    file.write(page)
            file.truncate(len(content))


def _apply(content: bytearray, change: _Change) -> None:
    if isinstance(change, Resized):
        del content[change.nbytes :]
        content.extend(bytes(change.nbytes - len(content)))
        return
    data = bytes(change.nbytes) if isinstance(change, Freed) else change.data
    end = change.offset + len(data)
    content.extend(bytes(max(end - len(content), 0)))
    content[change.offset : end] = data


# -- crashes --------------------------------------------------------------------------------------------
#
# Every crash that a recording can have: at each event, for each thing that may then be on the disk.
#
# =================  ===============================================================================
# fault              what the crash leaves
# =================  ===============================================================================
# crash              everything that was done: the process died, the machine did not
# lost write         the last few, or all, of the unsynced changes are lost; names too
# reordered write    a later unsynced change arrived without an earlier one
# torn write         of the write under way the sectors before any boundary of two, or behind one of blocks
# torn commit        of the LMDB transaction under way any of its data pages or sectors, in any order
# =================  ===============================================================================
#
# Small choices are made exhaustively. Of large ones there are too many: of many pending changes none, each
# alone and all but each are tried, of a transaction's pages each alone, missing or torn in turn, and besides
# a seeded sample of subsets.


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
