"""Finding out whether a disk that failed is in order again, before anybody's pages depend on it.

The probe is a page like any other, through the same calls: a place is reserved (growing the files, which is
what a full disk refuses), its bytes are written, synced together with a transaction of the index, and read
back. Nothing names the place, so it is free again afterwards. A probe file of its own would have been simpler
and would have said less: it needs no preallocation, no O_DIRECT and no index.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from tierstore.memory import Memory
from tierstore.tiers.disk.payloads import Payloads
from tierstore.tiers.disk.records import PageRecord
from tierstore.tiers.disk.space import Space
from tierstore.tiers.disk.watch import Watch

_PAGE_BYTES = 4096


class Presence:
    """Whether a directory is still the one it was. (A file system that was unmounted lives on for whoever has
    its files open: reads and writes succeed, and nobody may ever see what was written.)"""

    def __init__(self, path: Path, watch: Watch) -> None:
        self._path = path.absolute()  # the process may go elsewhere
        self._watch = watch
        self._id = self._found()

    def require(self) -> None:
        """Raises :class:`OSError` when something else, or nothing, is at the directory's path."""
        if self._found() != self._id:
            raise OSError(errno.ENODEV, f"{self._path} is not the directory that was opened: not mounted")

    def _found(self) -> tuple[int, int]:
        with self._watch.call():
            found = os.stat(self._path)
        return found.st_dev, found.st_ino


def try_out(space: Space, payloads: Payloads, commit: Callable[[], None]) -> None:
    """Write, make durable (``commit`` syncs the files and the index), read back. Raises :class:`OSError`."""
    place = space.reserve_outside(_PAGE_BYTES)
    if place is None:  # no files, or full of pages: then they have all the blocks they can ever have
        commit()
        return
    try:
        page = (_record(place), Memory(_PAGE_BYTES, shared=False).view(0, _PAGE_BYTES))
        page[1][:] = os.urandom(_PAGE_BYTES)  # other bytes each time: what comes back is this probe's
        payloads.write([page])
        commit()
        read = payloads.read([page])
    finally:
        space.unreserve(place, _PAGE_BYTES)
    if not read.all_good:
        raise read.error or OSError(errno.EIO, "what was written did not come back")


def _record(place: int) -> PageRecord:
    return PageRecord(
        serial=0, parent=0, key=bytes(16), identity=bytes(32), tokens=b"", nbytes=_PAGE_BYTES, place=place
    )
