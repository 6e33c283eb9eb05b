"""A smaller index: for a life whose share for the index is below the size the file has grown to.

LMDB's file never shrinks, so the records that are worth keeping are copied to a new file, which then takes
the old one's name. While both exist they count against the larger of the new capacity and what the directory
took before. So this goes in steps, each of which is durable before the next one begins:

1. Pages are copied, the most recently used first, as long as there is room beside the old file. Mostly that
   is all, and until the new file has the name the old one is the index, whole and unchanged.
2. When the room ends, the pages that will not be kept are removed from the old file, and the blocks that it
   has no use for go back to the file system, as holes (free_pages.py).
3. When it ends again, the old file is marked as *moving*, and what has been copied is removed from it, too.
   From now on a page is in one of the two files, or in both. Whoever opens the directory goes on from there
   (:func:`resume`), also with another cap; earlier versions of this program take the mark for a newer format
   and refuse.

**Rejected**: keeping in memory what has no room (a crash loses it); exceeding the cap for a moment.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from tierstore.memory import ALIGNMENT
from tierstore.tiers.disk.catalog import Catalog, IndexUsage
from tierstore.tiers.disk.change import Change
from tierstore.tiers.disk.directory import StoreDirectory
from tierstore.tiers.disk.free_pages import free_pages, runs
from tierstore.tiers.disk.io import FileIO
from tierstore.tiers.disk.records import INLINE, PageRecord, PageUse
from tierstore.tiers.disk.space import index_cost, index_room, tree_headroom
from tierstore.units import KIB, MIB

_log = logging.getLogger(__name__)

_BATCH_PAGES = 64
_BATCH_FRACTION = 32  # of the new index
_MOST_BATCH = 32 * MIB
_RECORD_BYTES = index_cost(0, 0)
_TWO_EMPTY = 96 * KIB  # indexes, with their lock files …
_EMPTY_TREES = 64 * KIB  # … and the trees in both
_SPARE = 32 * KIB  # for lists of free pages
_MOST_BYTES = b"most_bytes"  # that a directory may take until a move is over


class _Row(NamedTuple):
    """A page, as the facts know it."""

    serial: int
    cost: int  # bytes of the index, at most
    use: PageUse


class _Page(NamedTuple):
    record: PageRecord
    payload: memoryview | None  # if that is in the index
    use: PageUse


def rebuild(
    directory: StoreDirectory,
    old: Catalog,
    known: Collection[int],
    *,
    map_bytes: int,
    capacity_bytes: int,
    most_bytes: int,
    meta: dict[bytes, bytes],
    io: FileIO,
) -> None:
    """Replace the index by one of at most ``map_bytes`` that holds as many of the ``known`` pages as fit, the
    most recently used first. The directory never takes more than ``most_bytes`` meanwhile. Which pages fit
    follows from ``capacity_bytes``, which is not more: so it is the same after a crash, when the directory
    may take less than before.

    Closes ``old``. Raises :class:`OSError`: then the old index stays, or :func:`resume` can go on.
    """
    remove_leftovers(directory, io)
    old.close()
    with ExitStack() as opened:
        old = opened.enter_context(_open_old(directory))
        new = opened.enter_context(Catalog(directory.new_index, map_bytes=map_bytes))
        new.put_meta(meta | {_MOST_BYTES: most_bytes.to_bytes(8, "big")})
        new.apply(Change(roots=old.roots(), next_serial=old.next_serial, tick=old.tick))
        io.sync_directory(directory.path)
        rows = [row for row in _latest_first(old) if row.serial in known]
        kept = _that_fit(rows, map_bytes, capacity_bytes - _without_index(directory))
        move = _Move(directory, old, new, io, most_bytes)
        move.run(rows[:kept], lost=[row.serial for row in rows[kept:]])
    _install(directory, io)


def resume(directory: StoreDirectory, *, most_bytes: int, io: FileIO) -> None:
    """Finish a rebuild that was interrupted while the old index was ``moving``, with the sizes that it had
    been begun with if those are larger. Raises :class:`OSError`."""
    with ExitStack() as opened:
        old = opened.enter_context(_open_old(directory))
        if not directory.new_index.exists():  # taken away by somebody: what is left is an index again
            old.set_moving(moving=False)
            return
        new = opened.enter_context(Catalog(directory.new_index, map_bytes=0))
        rows = _latest_first(old)
        there = [record is not None for record in new.records(row.serial for row in rows)]
        begun_with = int.from_bytes(new.get_meta(_MOST_BYTES) or b"", "big")
        move = _Move(directory, old, new, io, max(most_bytes, begun_with))
        move.moved = [row.serial for row, moved in zip(rows, there, strict=True) if moved]
        move.run([row for row, moved in zip(rows, there, strict=True) if not moved], lost=[])
    _install(directory, io)


def remove_leftovers(directory: StoreDirectory, io: FileIO) -> None:
    """Delete what a rebuild left behind, finished or not."""
    for path in (directory.new_index, directory.path / f"{directory.new_index.name}-lock"):
        if path.exists():
            io.unlink(path)


def _open_old(directory: StoreDirectory) -> Catalog:
    """The old index, with a little more room than it has: without any, nothing can be removed."""
    size = directory.index.stat().st_size
    return Catalog(directory.index, map_bytes=size + tree_headroom(size) + _SPARE)


class _Move:
    """The steps of one rebuild. ``moved`` are pages that are in both indexes."""

    def __init__(
        self, directory: StoreDirectory, old: Catalog, new: Catalog, io: FileIO, most_bytes: int
    ) -> None:
        self.moved: list[int] = []
        self._directory = directory
        self._old = old
        self._new = new
        self._io = io
        self._most_bytes = most_bytes
        self._lost: Sequence[int] | None = None  # not removed yet

    def run(self, rows: Sequence[_Row], *, lost: Sequence[int]) -> None:
        """Move the pages of ``rows``. What finds no room, once the ``lost`` ones have left, stays behind."""
        self._lost = lost
        left = len(rows)
        for batch in _batches(rows, _batch_bytes(self._new.map_bytes)):
            if not self._has_room(batch):
                _log.warning("disk tier: %d pages do not fit into the smaller index", left)
                return
            self._copy(batch)
            left -= len(batch)

    def _has_room(self, batch: Sequence[_Row]) -> bool:
        """Whether a batch fits into the new index and into the directory, which is made true if it can be."""
        cost = sum(row.cost for row in batch)
        if cost > index_room(self._new.map_bytes, self._new.usage):
            return False
        # Removing writes to the old index before it frees anything, so room for that has to be left.
        needed = cost + tree_headroom(self._new.usage.tree_bytes + len(batch) * _RECORD_BYTES)
        needed += tree_headroom(self._old.usage.tree_bytes) + _SPARE
        return (
            needed <= self._room()
            or (self._let_lost_go() and needed <= self._room())
            or (self._let_moved_go() and needed <= self._room())
        )

    def _room(self) -> int:
        return self._most_bytes - self._directory.allocated_bytes()

    def _copy(self, batch: Sequence[_Row]) -> None:
        pages = [page for page in self._pages(batch) if page is not None]
        added = [(page.record, page.payload) for page in pages]
        used = {page.record.serial: page.use for page in pages}
        self._new.apply(
            Change(added=added, used=used, next_serial=self._new.next_serial, tick=self._new.tick)
        )
        self.moved += [page.record.serial for page in pages]

    def _pages(self, batch: Sequence[_Row]) -> Iterator[_Page | None]:
        """What the old index has of a batch; None for a page that is damaged."""
        records = list(self._old.records(row.serial for row in batch))  # no reader must be left behind
        for record, row in zip(records, batch, strict=True):
            if record is None:
                yield None
                continue
            payload = memoryview(bytearray(record.nbytes)) if record.place == INLINE else None
            whole = payload is None or self._old.read_payload(record, payload)
            yield _Page(record, payload, row.use) if whole else None

    def _let_lost_go(self) -> bool:
        """Remove what is not kept. False when that brings no room."""
        lost, self._lost = self._lost, None
        # Also when there is nothing to remove: whoever did that may have been killed before he made holes.
        return lost is not None and self._remove(lost)

    def _let_moved_go(self) -> bool:
        """Remove what the new index has. False when that brings no room."""
        moved, self.moved = self.moved, []
        if not moved:
            return False
        if not self._old.moving:
            self._old.set_moving(moving=True)
        return self._remove(moved)

    def _remove(self, serials: Sequence[int]) -> bool:
        before = self._room()
        try:
            self._old.forget(sorted(serials))
            self._give_back()
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSPC):
                raise
            _log.warning("disk tier: the index that is left makes no room: %s", error)
        return self._room() > before

    def _give_back(self) -> None:
        """Make holes where the old index holds nothing. Raises :class:`OSError`."""
        fd = self._io.open(self._directory.index, os.O_RDWR)
        try:
            for first, count in runs(free_pages(self._directory.index)):
                self._io.punch(fd, first * ALIGNMENT, count * ALIGNMENT)
            self._io.sync(fd)  # else a power loss could bring the blocks back
        finally:
            self._io.close(fd)


def _install(directory: StoreDirectory, io: FileIO) -> None:
    io.rename(directory.new_index, directory.index)
    io.sync_directory(directory.path)
    remove_leftovers(directory, io)


def _without_index(directory: StoreDirectory) -> int:
    """What the directory takes, its indexes not counted."""
    indexes = sum(path.stat().st_blocks * 512 for path in (directory.index, directory.new_index))
    return directory.allocated_bytes() - indexes


def _that_fit(rows: Sequence[_Row], map_bytes: int, both_bytes: int) -> int:
    """How many of the first rows fit into an index of ``map_bytes``, and into ``both_bytes`` while they are
    being moved there from another."""
    used = _TWO_EMPTY + _SPARE
    tree = _EMPTY_TREES
    for count, row in enumerate(rows):
        used += row.cost
        tree += _RECORD_BYTES
        moving = used + 2 * tree_headroom(tree // 2) + _batch_bytes(map_bytes)
        if index_room(map_bytes, IndexUsage(used, tree)) < 0 or moving > both_bytes:
            return count
    return len(rows)


def _batch_bytes(map_bytes: int) -> int:
    return min(map_bytes // _BATCH_FRACTION, _MOST_BATCH)


def _latest_first(catalog: Catalog) -> list[_Row]:
    """All pages, the most recently used first, each after its parent."""
    facts = catalog.facts()
    facts = facts[np.lexsort((facts["serial"], -facts["tick"].astype(np.int64)))]
    columns = (facts[name].tolist() for name in ("serial", "place", "nbytes", "tick", "used_s", "hits"))
    return [
        _Row(serial, index_cost(nbytes, place), PageUse(tick, used_s, hits))
        for serial, place, nbytes, tick, used_s, hits in zip(*columns, strict=True)
    ]


def _batches(rows: Iterable[_Row], nbytes: int) -> Iterator[list[_Row]]:
    batch: list[_Row] = []
    cost = 0
    for row in rows:
        batch.append(row)
        cost += row.cost
        if len(batch) == _BATCH_PAGES or cost >= nbytes:
            yield batch
            batch, cost = [], 0
    if batch:
        yield batch
