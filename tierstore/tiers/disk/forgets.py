"""The entries about forgets in a directory's index: pages that must still be removed, and the log of forgets.

Without session keys, the pages of a session have the root and the key of their tenant, so dropping a key
cannot forget them. So a forget stores the serials of these pages, durably, before it returns. A background
thread then removes the pages. After a crash, the next opening removes the remaining pages. A page is
identified by its serial and its creation time, because a damaged page that is saved again keeps its
serial."""

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
    """Reads and writes these entries of an open directory. Thread-safe. The index is changed only inside of
    the context manager that ``changing`` returns. Methods raise :class:`OSError` if the disk fails."""

    def __init__(
        self, index_db: IndexDB, changing: Callable[[], AbstractContextManager[None]], io: FileIO
    ) -> None:
        self._index_db = index_db
        self._changing = changing
        self._io = io
        self._lock = threading.Lock()
        self._pages: dict[int, float] = {}  # guarded by _lock

    def note(self, pages: Mapping[int, float]) -> None:
        """Store durably that these pages (serial → creation time) must be removed. If that fails, the next
        call stores them again."""
        with self._lock:
            self._pages.update(pages)
            if self._pages:
                self._write()

    def settle(self, gone: Callable[[Sequence[int]], Sequence[int]]) -> None:
        """Delete the stored serials of pages whose removal is durable. ``gone`` returns which of the given
        serials these are."""
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
        """Return the log stored by :meth:`keep_log`; empty if there is none, or it cannot be read."""
        return self._kept(_FORGETS)

    def shared_keys(self) -> bytes:
        """Return the ids stored by :meth:`keep_shared_keys`; empty if there are none, or they cannot be
        read."""
        return self._kept(_SHARED)

    def keep_shared_keys(self, dump: bytes) -> None:
        """Store the ids of this host's keys in the shared store, durably."""
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
        """Run :func:`discard_freed` without a commit at the same time."""
        with self._changing():
            discard_freed(self._index_db, self._io)


def forgotten_in(index_db: IndexDB) -> dict[int, float]:
    """Return the pages stored by :func:`note_forgotten`. Raise :class:`OSError` if the index cannot be
    read."""
    note = index_db.get_extra(_FORGOTTEN)
    whole = len(note) // _PAGE.size * _PAGE.size
    return dict(_PAGE.iter_unpack(note[:whole]))


def note_forgotten(index_db: IndexDB, pages: Mapping[int, float]) -> None:
    """Store the pages that must still be removed (serial → creation time), durably, in place of the pages
    stored before. Raise :class:`OSError` if the index cannot be written."""
    index_db.put_extra(_FORGOTTEN, b"".join(itertools.starmap(_PAGE.pack, pages.items())))


def discard_freed(index_db: IndexDB, io: FileIO) -> None:
    """Return the disk blocks of free LMDB pages to the file system, so that removed records read as zeros.
    A part of a removed record may stay in the unused part of an LMDB page that is still in use. Raise
    :class:`OSError` if the disk fails, or the file system cannot free a part of a file."""
    index_db.settle_free_pages()
    try:
        IndexFile(index_db.path).give_back_free_pages(io)
    except DamagedIndexError as error:
        raise OSError(errno.EIO, str(error)) from error
