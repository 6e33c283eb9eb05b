"""The notes about forgets in a directory's index: pages that must still be removed, and the log of forgets.

A session's pages share the root and the key of their tenant. So a forget notes their serials, durably, before
it returns. The background removes the pages, and the next opening those that are left after a crash. Serial
and creation time name a page, because a damaged page that is saved again keeps its serial."""

from __future__ import annotations

import errno
import itertools
import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from tierstore.tiers.disk.index_db import IndexDB
from tierstore.tiers.disk.index_file import DamagedIndexError, IndexFile
from tierstore.tiers.disk.io import FileIO

_log = logging.getLogger(__name__)

_FORGOTTEN = b"forgotten "
_FORGETS = b"forgets "
_SHARED = b"shared keys "
_PAGE = struct.Struct("<Qd")  # serial, created_s


class ForgetNotes:
    """The notes of an open directory. Thread-safe. ``changing`` surrounds each change of the index. Methods
    raise :class:`OSError` if the disk fails."""

    def __init__(
        self, index_db: IndexDB, changing: Callable[[], AbstractContextManager[None]], io: FileIO
    ) -> None:
        self._index_db = index_db
        self._changing = changing
        self._io = io
        self._lock = threading.Lock()
        self._pages: dict[int, float] = {}  # guarded by _lock

    def note(self, pages: Mapping[int, float]) -> None:
        """Note durably that these pages are about to be removed: the creation time of each, by serial. After
        a failure, the next call notes them again."""
        with self._lock:
            self._pages.update(pages)
            if self._pages:
                self._write()

    def settle(self, gone: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Take pages out of the note whose removal is durable: ``gone`` returns those of the given
        serials."""
        with self._lock:
            noted = sorted(self._pages)
        left = gone(noted)
        if left:
            with self._lock:
                for serial in left:
                    self._pages.pop(serial, None)
                self._write()

    def _write(self) -> None:
        with self._changing():
            note_forgotten(self._index_db, self._pages)

    def log(self) -> bytes:
        """Return the value of :meth:`keep_log`; empty if there is none, or it cannot be read."""
        return self._kept(_FORGETS)

    def shared_keys(self) -> bytes:
        """Return the value of :meth:`keep_shared_keys`; empty if there is none, or it cannot be read."""
        return self._kept(_SHARED)

    def keep_shared_keys(self, dump: bytes) -> None:
        """Store the ids of the keys in the shared store, durably."""
        with self._changing():
            self._index_db.put_extra(_SHARED, dump)

    def _kept(self, name: bytes) -> bytes:
        try:
            return self._index_db.get_extra(name)
        except OSError as error:
            _log.warning("disk tier: a note about forgets cannot be read: %s", error)
            return b""

    def keep_log(self, dump: bytes) -> None:
        """Store the log of forgets, durably."""
        with self._changing():
            self._index_db.put_extra(_FORGETS, dump)

    def discard_freed(self) -> None:
        """See :func:`discard_freed`."""
        with self._changing():
            discard_freed(self._index_db, self._io)


def forgotten_in(index_db: IndexDB) -> dict[int, float]:
    """Return the pages that :func:`note_forgotten` has noted. Raise :class:`OSError` if they cannot be
    read."""
    note = index_db.get_extra(_FORGOTTEN)
    whole = len(note) // _PAGE.size * _PAGE.size
    return dict(_PAGE.iter_unpack(note[:whole]))


def note_forgotten(index_db: IndexDB, pages: Mapping[int, float]) -> None:
    """Replace the note by these pages, durably: the creation time of each, by serial. Raise :class:`OSError`
    if that fails."""
    index_db.put_extra(_FORGOTTEN, b"".join(itertools.starmap(_PAGE.pack, pages.items())))


def discard_freed(index_db: IndexDB, io: FileIO) -> None:
    """Free the blocks of index pages that hold only what was removed, so that they read as zeros. (LMDB does
    not erase the unused part of a page that it keeps: a piece of a removed record may stay there.) Raise
    :class:`OSError` if the disk fails, or the file system cannot do it."""
    index_db.settle_free_pages()
    try:
        IndexFile(index_db.path).give_back_free_pages(io)
    except DamagedIndexError as error:
        raise OSError(errno.EIO, str(error)) from error
