"""What is on a disk when the power fails: the part that is sure, and the part that may be.

A :class:`Disk` replays a journal. Of each file it knows the *durable* content and the changes that are
*pending*: done, and not covered by a sync yet. :meth:`Disk.image` gives the content for any choice of what
became of the pending ones. See the package's essay for what this model guarantees and leaves out.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tierstore.testing.faults.journal import (
    INDEX,
    Committed,
    Created,
    DirectorySynced,
    Event,
    Punched,
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

_Change: TypeAlias = Written | Resized | Punched


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
    """Make a store directory of an image. Every byte gets its block, as the preallocated original has, but
    for the pages of an index that hold nothing: those are holes there, too."""
    for name, content in image.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if name.startswith(INDEX):
            _write_sparse(path, content)
        else:
            path.write_bytes(content)


def _write_sparse(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        for start in range(0, len(content), LMDB_PAGE):
            page = content[start : start + LMDB_PAGE]
            if page.strip(b"\0"):
                file.seek(start)
                file.write(page)
        file.truncate(len(content))


def _apply(content: bytearray, change: _Change) -> None:
    if isinstance(change, Punched):
        _apply(content, Written(change.name, change.offset, bytes(change.nbytes)))
        return
    if isinstance(change, Resized):
        del content[change.nbytes :]
        content.extend(bytes(change.nbytes - len(content)))
        return
    end = change.offset + len(change.data)
    content.extend(bytes(max(end - len(content), 0)))
    content[change.offset : end] = change.data
