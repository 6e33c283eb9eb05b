"""Payloads that were written and are in no commit yet: whether the disk can have lost them since."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable

from tierstore.tiers.disk.records import INLINE, PageRecord


class Unsynced:
    """Thread-safe.

    The kernel reports a lost write once. Whatever was written before a sync that failed may be gone, though
    the next sync will say that it succeeded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written: dict[int, int] = {}  # place -> number of failed syncs before the write
        self._failed_syncs = 0

    def begin(self) -> int:
        """To be given to :meth:`written` when what is written from now on has been."""
        return self._failed_syncs

    def written(self, places: Iterable[int], begun: int) -> None:
        with self._lock:
            for place in places:
                self._written[place] = begun

    def sync_failed(self) -> None:
        with self._lock:
            self._failed_syncs += 1

    def require(self, records: Iterable[PageRecord]) -> None:
        """Raises :class:`OSError` if one of these pages was written before a sync that failed."""
        with self._lock:
            for record in records:
                if record.place == INLINE:
                    continue
                assert record.place in self._written, f"page {record.serial} was never written"
                if self._written[record.place] != self._failed_syncs:
                    raise OSError(errno.EIO, "the disk failed after this page was written")

    def forget(self, places: Iterable[int]) -> None:
        """They are durable now, or were given back."""
        with self._lock:
            for place in places:
                self._written.pop(place, None)
