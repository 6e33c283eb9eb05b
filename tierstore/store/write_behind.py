"""Write-behind: pages go from the host tier to disk in batches, without anybody waiting.

One thread takes a batch from the queue, finds room (evicting in bulk, so that one commit frees space for many
pages), writes the payloads, makes them durable, and only then calls the copies ready. A second thread that
committed one batch while the next was written made it slower: beside other writes a commit took 30 ms and
stalled them, after them it takes 3 ms.

The queue is bounded in bytes: what does not fit is not written (counted in ``disk_dropped_pages``), which is
how a disk slower than the engine shows. A page is only written after its parent, since nothing could find it
otherwise; a later save of the same prefix makes up for gaps. When the disk fails, the batch is undone, the
queue is emptied, and nothing is written for a while.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence

from tierstore.index import Page, Tier
from tierstore.store.state import StoreState
from tierstore.tiers.disk import DiskTier, PageRecord

_log = logging.getLogger(__name__)

_BATCH_BYTES = 128 << 20  # at most, and half of the queue: each batch costs a commit
_EVICT_FRACTION = 1 / 64  # of the disk's capacity, freed at once when it is full …
_EVICT_PAGES = 512  # … but no more pages than this: the store is locked meanwhile
_RETRY_S = 10.0  # after a write error
_USE_FLUSH_S = 30.0  # use times reach the disk at least this often while nothing else is written


class WriteBehind:
    """The queue from host to disk and the thread that empties it."""

    def __init__(self, state: StoreState, disk: DiskTier, *, queue_bytes: int) -> None:
        self._state = state
        self._disk = disk
        self._queue_bytes = queue_bytes
        self._batch_bytes = min(_BATCH_BYTES, queue_bytes // 2)
        # Guarded by the state's lock.
        self._queue: deque[Page] = deque()
        self._queued: set[Page] = set()  # in the queue or in a batch
        self._queued_bytes = 0
        self._offline_until = 0.0
        self._closing = False
        self._writer = threading.Thread(target=self._write_batches, name="tierstore-writer", daemon=True)
        self._writer.start()

    # -- for the store (under the lock) ---------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Pages queued or being written."""
        return len(self._queued)

    @property
    def writable(self) -> bool:
        return self._state.clock() >= self._offline_until

    def enqueue(self, pages: Sequence[Page]) -> None:
        """Write these pages, which are in the host tier, with any ancestors the disk has lost or never got,
        and any descendants that came before them (copies end in no particular order)."""
        for page in pages:
            missing = self._missing(page)
            if missing is None:
                continue
            if missing and all(self._append(each) for each in missing):
                self._append_below(page)
        self._state.changed.notify_all()

    def _append_below(self, page: Page) -> None:
        waiting = [page]
        while waiting:
            for child in waiting.pop().all_children():
                if self._unwritten(child) and self._append(child):
                    waiting.append(child)

    def _append(self, page: Page) -> bool:
        full = self._queued and self._queued_bytes + page.nbytes > self._queue_bytes
        if full or not self.writable:
            self._state.counters.disk_dropped_pages += 1
            return False
        self._state.index.lease(page, Tier.HOST)
        self._queue.append(page)
        self._queued.add(page)
        self._queued_bytes += page.nbytes
        return True

    def _unwritten(self, page: Page) -> bool:
        """Whether a page could be written, and has not been."""
        on_host = page.copies[Tier.HOST]
        written = page.copies[Tier.DISK] is not None or page in self._queued
        return on_host is not None and on_host.ready and not written

    def _missing(self, page: Page) -> list[Page] | None:
        """``page`` and those of its ancestors that have to be written first, top down. None if one of them
        cannot be: it is on its way, and will bring this page along, or it is lost."""
        missing: list[Page] = []
        node: Page | None = page
        while node is not None and node.parent is not None:
            if node.copies[Tier.DISK] is not None or node in self._queued:
                break
            if not self._unwritten(node):
                self._state.counters.disk_dropped_pages += node.copies[Tier.HOST] is None
                return None
            missing.append(node)
            node = node.parent
        return missing[::-1]

    # -- for the store (without the lock) -------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything queued is durable or given up; False when ``timeout`` seconds pass first."""
        with self._state.lock:
            return self._state.changed.wait_for(lambda: not self._queued, timeout)

    def close(self) -> None:
        """Write what is queued, record the use times, stop."""
        with self._state.lock:
            self._closing = True
            self._state.changed.notify_all()
        self._writer.join()

    # -- the writer ----------------------------------------------------------------------------------

    def _write_batches(self) -> None:
        surveyed = self._disk.wait_surveyed()
        with self._state.lock:
            if surveyed:
                self._state.surveyed()
            else:
                self._offline_until = math.inf  # nobody knows what is free
        closing = False
        while not closing:
            with self._state.lock:
                self._state.changed.wait_for(self._work_to_do, _USE_FLUSH_S)
                batch = self._next_batch()
                closing = self._closing and not self._queue
            try:
                placed = self._place(batch)
                if placed or self._housekeeping_due():
                    self._disk.write(self._payloads(placed))
                    self._commit(placed)
            except Exception as error:  # noqa: BLE001  # the disk failed or we did: this thread has to live on
                self._failed(batch, error)

    def _work_to_do(self) -> bool:
        return bool(self._queue or self._closing or (self._state.removed and self.writable))

    def _next_batch(self) -> list[Page]:
        batch: list[Page] = []
        room = self._batch_bytes
        while self._queue and (not batch or self._queue[0].nbytes <= room):
            batch.append(self._queue.popleft())
            room -= batch[-1].nbytes
        return batch

    def _housekeeping_due(self) -> bool:
        with self._state.lock:
            return bool(self._state.used or self._state.noted or self._state.removed)

    def _place(self, batch: Sequence[Page]) -> list[Page]:
        """Give each page of a batch its place on disk. Returns those that got one."""
        state = self._state
        placed = []
        for page in batch:
            place = self._reserve(page.nbytes) if self.writable else None
            with state.lock:
                # Only now: making room may have taken the parent.
                if place is not None and self._parent_on_disk(page) and page.copies[Tier.DISK] is None:
                    state.index.put_on_disk(page, self._record(page, place), ready=False, leases=1)
                    placed.append(page)
                    continue
                if place is not None:
                    self._disk.unreserve(place, page.nbytes)
                self._give_up(page)
        return placed

    def _parent_on_disk(self, page: Page) -> bool:
        assert page.parent is not None
        return page.parent.parent is None or page.parent.copies[Tier.DISK] is not None

    def _record(self, page: Page, place: int) -> PageRecord:
        parent = page.parent
        assert parent is not None
        if parent.parent is None and not parent.serial:
            parent.serial = self._disk.add_root(self._state.identities[page.identity])
        return PageRecord(
            serial=page.serial or self._disk.new_serial(),
            parent=parent.serial,
            key=page.key,
            identity=page.identity,
            tokens=page.tokens,
            nbytes=page.nbytes,
            place=place,
            created_s=time.time(),
        )

    def _reserve(self, nbytes: int) -> int | None:
        """A place for one page, evicting when the disk is full; None when nothing may leave."""
        place = self._disk.reserve(nbytes)
        if place is None:
            with self._state.lock:
                share = int(self._disk.stats().capacity_bytes * _EVICT_FRACTION / nbytes)
                evicted = self._state.evict(Tier.DISK, min(max(share, 1), _EVICT_PAGES))
            if evicted and self._commit([]):
                place = self._disk.reserve(nbytes)
        return place

    def _payloads(self, batch: Sequence[Page]) -> list[tuple[PageRecord, memoryview]]:
        """Each page's record and its bytes in the host tier, which the queue's lease keeps there."""
        state = self._state
        assert state.host is not None
        with state.lock:
            return [
                (page.record, state.host.view(state.index.copy(page, Tier.HOST).place, page.nbytes))
                for page in batch
                if page.record is not None
            ]

    def _commit(self, batch: Sequence[Page]) -> bool:
        """Make a written batch durable together with the removals and use times that have come up."""
        state = self._state
        with state.lock:
            state.used.update(batch)
            state.note_uses()
            removed, state.removed = state.removed, []
            used, state.noted = state.noted, {}
            tick = state.index.tick
        try:
            self._disk.commit(self._payloads(batch), removed, used, tick)
        except Exception as error:  # noqa: BLE001  # as in the writer
            with state.lock:
                state.removed = removed + state.removed
                state.noted = used | state.noted
            self._failed(batch, error)
            return False
        with state.lock:
            for page in batch:
                state.index.set_ready(page, Tier.DISK)
                state.unlease(page, Tier.DISK)
                self._finish(page)
            state.counters.disk_written_pages += len(batch)
            state.changed.notify_all()
        return True

    # -- giving up -----------------------------------------------------------------------------------

    def _failed(self, batch: Sequence[Page], error: Exception) -> None:
        state = self._state
        if isinstance(error, OSError):
            _log.warning("disk tier: write failed (%s); not writing for %.0f s", error, _RETRY_S)
        else:
            _log.error("disk tier: write failed", exc_info=error)
        with state.lock:
            state.counters.disk_write_errors += 1
            self._offline_until = state.clock() + _RETRY_S
            for page in reversed(batch):
                self._undo(page)
            while self._queue:
                self._give_up(self._queue.pop())
            state.changed.notify_all()

    def _undo(self, page: Page) -> None:
        """Take back what a page that did not become durable was given."""
        if page not in self._queued:
            return  # given up before it had a place
        copy = page.copies[Tier.DISK]
        if copy is not None and not copy.ready:
            self._state.index.unlease(page, Tier.DISK)
            self._disk.unreserve(self._state.unwrite(page), page.nbytes)
        self._give_up(page)

    def _give_up(self, page: Page) -> None:
        self._state.counters.disk_dropped_pages += 1
        self._finish(page)

    def _finish(self, page: Page) -> None:
        if page in self._queued:
            self._queued.remove(page)
            self._queued_bytes -= page.nbytes
        self._state.unlease(page, Tier.HOST)
        self._state.changed.notify_all()
