"""Write-behind: copy pages from the host tier to disk in batches, in the background.

One thread takes a batch from the queue, finds room on disk and starts to write the payloads. The thread
evicts many pages at once, so that one commit frees space for many pages. If more pages are queued, it starts
another batch while the first is being written. When enough is written, or the queue is empty, one commit
makes all written batches durable. The disk copies of the pages are ready only after that commit. Nothing is
written during a commit: a commit during other writes took 30 ms and delayed them; a commit after them takes 3
ms.

The queue (``write_queue.py``) is bounded. Pages that do not fit are put off. If a page has left the host tier
before it can be queued, it is not written and counts as ``disk_dropped_pages``. This counter shows that the
disk is slower than the engine.

If the disk fails, the batch is undone, the queue is emptied, and nothing is written until the disk works
again. The writing thread also probes a failed disk, because it has nothing else to do then and no caller
waits for it. Pages that were not written while the disk had failed are written later, if the host tier still
has them.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from tierstore.core.disk_moves import MoveStats
from tierstore.core.disk_room import DiskPlacement, parent_on_disk
from tierstore.core.state import StoreState
from tierstore.core.write_queue import WriteQueue
from tierstore.index import Page, Tier
from tierstore.policy import NO_HINT
from tierstore.tiers.disk import DiskTier, PageRecord
from tierstore.tiers.disk.encoding import Encoded, PageBytes
from tierstore.tiers.disk.io_threads import IOThreads
from tierstore.tiers.disk.records import INLINE

_log = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20  # largest batch; also at most a quarter of the queue
_LEAST_BESIDE = 1 << 20  # queued bytes from which on another write is started while others run
# Written bytes after which they are committed (at most half of the queue). A commit takes several
# milliseconds.
_COMMIT_BYTES = 256 << 20
_WRITES_AT_ONCE = 3  # writes at the same time, so that the disk has work when one of them ends
_AT_ONCE = 128  # pages that are marked as ready under one hold of the lock
_STALLED_LOOK_S = 1.0  # interval of checks whether a stalled disk answers again
_USE_FLUSH_S = 30.0  # longest time until uses of pages are committed if nothing else is written


@dataclass(frozen=True, slots=True)
class _Write:
    """A batch of pages whose payloads are being written."""

    pages: list[Page]
    over: Future[None]

    @property
    def nbytes(self) -> int:
        return sum(page.nbytes for page in self.pages)


class WriteBehind:
    """The queue from host to disk, and the thread that empties it."""

    def __init__(self, state: StoreState, disk: DiskTier, *, queue_bytes: int) -> None:
        self._state = state
        self._disk = disk
        self._batch_bytes = min(_BATCH_BYTES, queue_bytes // 4)
        self._behind_bytes = queue_bytes // 2
        # encoded payloads of pages being written; used only by the writer
        self._encoded: dict[Page, Encoded] = {}
        self._commit_bytes = min(_COMMIT_BYTES, queue_bytes // 2)
        self._write_pool = IOThreads(_WRITES_AT_ONCE, name="tierstore-payloads")
        # Guarded by the state's lock.
        self._queue = WriteQueue(state, most_bytes=queue_bytes)
        self._placement = DiskPlacement(state, disk, self._queue, lambda: self._commit([]))
        self._closing = False
        self._writer = threading.Thread(target=self._write_batches, name="tierstore-writer", daemon=True)
        self._writer.start()

    # -- for the store (under the lock) ---------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Number of pages that are queued or being written."""
        return self._queue.pending

    @property
    def idle(self) -> bool:
        """Whether no page is queued, being written, or waiting for room in the queue."""
        return not self._queue.pending and not self._queue.late

    def enqueue(self, pages: Sequence[Page]) -> None:
        """Queue these pages of the host tier for writing, or drop some of them."""
        self._queue.put(pages)
        self._state.changed.notify_all()

    def move_stats(self) -> MoveStats:
        """Return how many pages were moved on disk to make room."""
        return self._placement.room.moves.stats()

    # -- for the store (without the lock) -------------------------------------------------------------

    def close(self) -> None:
        """Write the queue and the uses of pages, then stop the thread."""
        with self._state.lock:
            self._closing = True
            self._state.changed.notify_all()
        self._writer.join()

    # -- the writer ----------------------------------------------------------------------------------

    def _write_batches(self) -> None:
        scanned = self._disk.wait_scanned()
        keyring = self._disk.keyring
        with self._state.lock:
            if scanned:
                self._state.scanned()
            if scanned and keyring is not None and keyring.locked:
                self._state.health.never_write(
                    f"the disk key does not open {keyring.path}: give the key that made it"
                )
            if not scanned:
                # Without the index, it is not known which space on disk is free.
                self._state.health.never_write("the index could not be read")
        health = self._state.health
        closing = False
        while not closing:
            self._state.stall_detector.poll()
            with self._state.lock:
                self._wait_for_work()
                if self._queue.owes:
                    self._queue.put_owed()
                probing = health.probe_due and not self._closing
            if probing:
                self._probe()
            under_way: list[Page] = []
            try:
                self._write_queued(under_way)
            except Exception as error:  # noqa: BLE001  # whatever fails, this thread must continue
                self._failed(under_way, error)
            with self._state.lock:
                closing = self._closing and not self._queue
        self._write_pool.close()

    def _write_queued(self, under_way: list[Page]) -> None:
        """Write until the queue is empty. ``under_way`` collects the pages that were taken from the queue and
        are not durable yet. If this method raises, the caller undoes these pages."""
        writes: deque[_Write] = deque()  # running writes, oldest first
        written: list[Page] = []  # pages that are written but not durable
        durable: list[Page] = []  # pages that are durable but not marked as ready
        nbytes = 0  # bytes of running writes and of written pages
        try:
            while True:
                full = nbytes >= self._commit_bytes or len(writes) == _WRITES_AT_ONCE
                beginning = not full and (not writes or self._worth_beginning())
                if beginning and (write := self._write_next(under_way)) is not None:
                    writes.append(write)
                    nbytes += write.nbytes
                elif writes:
                    self._wait_for(writes[0], alone=full)
                    while writes and writes[0].over.done():
                        writes[0].over.result()
                        self._forget_encoded(writes[0].pages)
                        written += writes.popleft().pages
                elif written:
                    verified = self._verified(written)
                    durable = verified if self._commit(verified) else []
                    under_way.clear()
                    written, nbytes = [], 0
                    continue  # the disk is idle, so start the next write before marking pages as ready
                elif not durable:
                    break
                served, durable = durable, []
                self._finish(served)
        finally:
            for write in writes:
                write.over.exception()  # wait: even a write that fails uses its slots until it ends
            self._forget_encoded([*self._encoded])
            self._finish(durable)
        if self._housekeeping_due():
            self._commit([])
        self._disk.session_keys.free(self._disk.page_table)

    def _write_next(self, under_way: list[Page]) -> _Write | None:
        """Start to write the next batch. Return None if no queued page can be written."""
        while self._queue:
            placed = self._place_next(under_way)
            if placed:
                over = self._write_pool.submit(partial(self._disk.write, self._payloads(placed)))
                over.add_done_callback(self._wake)
                return _Write(placed, over)
        return None

    def _wake(self, over: Future[None]) -> None:
        with self._state.lock:
            self._state.changed.notify_all()

    def _wait_for(self, write: _Write, *, alone: bool) -> None:
        """Wait until this write has ended. Unless ``alone``, also return when another write is worth
        starting."""
        with self._state.lock:
            self._state.changed.wait_for(lambda: write.over.done() or (not alone and self._worth_beginning()))

    def _worth_beginning(self) -> bool:
        return self._queue.waiting_bytes >= _LEAST_BESIDE

    def _place_next(self, under_way: list[Page]) -> list[Page]:
        with self._state.lock:
            batch = self._queue.take(self._batch_bytes)
            self._state.eviction.leaving.leave()
        before = len(under_way)
        under_way += batch
        encoded = self._encode(batch)
        placed = self._placement.give(batch, encoded)
        under_way[before:] = placed
        self._encoded.update((page, encoded.pop(page)) for page in placed if page in encoded)
        if self._disk.encoder is not None:
            self._disk.encoder.give_back([*encoded.values()])
        return placed

    def _encode(self, batch: Sequence[Page]) -> dict[Page, Encoded]:
        """Return the encoded payloads that replace some of these pages. The result is empty while more is
        queued than the encoder can process in time."""
        if self._disk.encoder is None:
            return {}
        with self._state.lock:
            if self._queue.waiting_bytes > self._behind_bytes:
                return {}
            identities = self._state.identities
            pages = [PageBytes(self._view(page), identities[page.identity]) for page in batch]
        encoded = self._disk.encoder.encode(pages)
        return {page: one for page, one in zip(batch, encoded, strict=True) if one is not None}

    def _forget_encoded(self, pages: Sequence[Page]) -> None:
        encoded = [self._encoded.pop(page) for page in pages if page in self._encoded]
        if self._disk.encoder is not None:
            self._disk.encoder.give_back(encoded)

    def _wait_for_work(self) -> None:
        """Wait until there is something to write or to probe, or for at most ``_USE_FLUSH_S`` seconds."""
        health = self._state.health
        give_up = time.monotonic() + _USE_FLUSH_S
        while not self._work_to_do() and (left := give_up - time.monotonic()) > 0:
            if health.stalled:
                self._state.changed.wait(_STALLED_LOOK_S)
                return
            retry_s = health.retry_s  # read again, because a failed read may have changed it
            self._state.changed.wait(left if retry_s is None else min(left, retry_s))

    def _work_to_do(self) -> bool:
        health = self._state.health
        due = (self._state.residency.removed and health.writable) or self._queue.owes or health.probe_due
        return bool(self._queue or self._closing or due)

    def _probe(self) -> None:
        state = self._state
        try:
            self._disk.probe(state.index.tick)
        except Exception as error:  # noqa: BLE001  # as in _write_batches
            with state.lock:
                state.counters.disk_write_errors += 1
                state.health.probe_failed(_as_os_error(error))
        else:
            with state.lock:
                state.health.probe_succeeded()
                state.changed.notify_all()

    def _housekeeping_due(self) -> bool:
        state = self._state
        with state.lock:
            return state.health.writable and bool(state.access_log.waiting or state.residency.removed)

    def _verified(self, written: Sequence[Page]) -> list[Page]:
        """Return the pages whose bytes have the checksum that their client computed. Drop any other page in
        all tiers; the pages behind it are not written."""
        good = []
        with self._state.lock:
            for page in written:
                assert page.record is not None
                wrong = page.checksum not in (None, page.record.checksum)
                if not wrong and parent_on_disk(page):
                    good.append(page)
                    continue
                self._undo(page)
                if wrong:
                    self._state.residency.damaged_in_host(page)
            self._state.changed.notify_all()
        return good

    def _payloads(self, batch: Sequence[Page]) -> list[tuple[PageRecord, memoryview]]:
        """Return each page's record and payload. The queue's lease keeps the bytes in the host tier."""
        with self._state.lock:
            return [
                (page.record, self._encoded[page].payload if page in self._encoded else self._view(page))
                for page in batch
                if page.record is not None
            ]

    def _additions(self, batch: Sequence[Page]) -> list[tuple[PageRecord, memoryview | None]]:
        """Return each page's record for a commit; with the page's bytes if they are stored in the index."""
        with self._state.lock:
            return [
                (page.record, self._view(page) if page.record.place == INLINE else None)
                for page in batch
                if page.record is not None
            ]

    def _view(self, page: Page) -> memoryview:
        host = self._state.host
        assert host is not None
        return host.view(self._state.index.copy(page, Tier.HOST).place, page.nbytes)

    def _commit(self, batch: Sequence[Page]) -> bool:
        """Make these written pages durable, together with pending removals and uses of pages. If the disk
        fails, commit nothing and return False."""
        state = self._state
        with state.lock:
            used = state.access_log.take(batch)
            removed, state.residency.removed = state.residency.removed, []
            state.residency.committing = len(removed)
            tick = state.index.tick
            followed = bool(state.residency.followers)
        try:
            left = self._disk.commit(self._additions(batch), removed, used, tick)
        except Exception as error:  # noqa: BLE001  # as in _write_batches
            with state.lock:
                state.residency.removed = removed + state.residency.removed
                state.residency.committing = 0
                state.access_log.put_back(used)
            self._failed(batch, error)
            return False
        with state.lock:
            state.residency.committing = 0
            state.residency.was_removed(removed, left, report=followed)
            state.changed.notify_all()
        return True

    def _finish(self, durable: Sequence[Page]) -> None:
        """Mark these durable pages as ready on disk, in batches, so that lookups do not wait until all are
        marked."""
        state = self._state
        for start in range(0, len(durable), _AT_ONCE):
            some = durable[start : start + _AT_ONCE]
            with state.lock:
                forgotten: list[Page] = []
                kept: list[Page] = []
                for page in some:
                    (forgotten if state.index.copy(page, Tier.DISK).damaged else kept).append(page)
                state.index.complete(kept, Tier.DISK, release=True)
                state.leases.release_all(forgotten, Tier.DISK)  # this also drops them
                for page in some:
                    if page.hint is not NO_HINT:
                        state.access_log.pass_hint_on(page)
                state.residency.stored(kept, Tier.DISK)
                self._queue.finish(some)
                state.eviction.leaving.leave()
                state.counters.disk_written_pages += len(some)
                for page in some:
                    if page.record is not None and page.record.codec:
                        state.counters.disk_encoded_pages += 1
                        state.counters.disk_saved_bytes += page.nbytes - page.record.room
                state.health.written()
                state.changed.notify_all()
            state.yield_lock()

    # -- giving up -----------------------------------------------------------------------------------

    def _failed(self, batch: Sequence[Page], error: Exception) -> None:
        state = self._state
        with state.lock:
            state.counters.disk_write_errors += 1
            state.health.write_failed(_as_os_error(error))
            for page in reversed(batch):
                self._undo(page)
            self._queue.give_up_all()
            state.changed.notify_all()
        state.stall_detector.poll()

    def _undo(self, page: Page) -> None:
        if page not in self._queue:
            return  # the page was given up before it had a place on disk
        copy = page.copies[Tier.DISK]
        if copy is not None and not copy.ready:
            self._state.index.release_all([(page, Tier.DISK)])
            assert page.record is not None
            room = page.record.room
            self._disk.unreserve(self._state.residency.unwrite(page), room)
        self._queue.give_up(page)


def _as_os_error(error: Exception) -> OSError:
    """Return the error as an ``OSError``. Any other exception is a bug in this package and is logged."""
    if isinstance(error, OSError):
        return error
    _log.error("disk tier: internal error while writing", exc_info=error)
    return OSError(errno.EIO, f"internal error: {error!r}")
