"""Write-behind: pages go from the host tier to disk in batches, without anybody waiting.

One thread takes a batch from the queue, finds room (evicting in bulk, so that one commit frees space for many
pages) and has the payloads written; as soon as more pages have come it does the same with them, beside the
first. When enough has been written, or nothing waits, all of it is made durable with one commit, and only
then the copies are ready. Nothing is written during a commit: beside other writes it took 30 ms and stalled
them, after them it takes 3 ms.

The queue (``write_queue.py``) is bounded: what does not fit is put off, and what has left the host tier by
its turn is not written (counted in ``disk_dropped_pages``), which is how a disk slower than the engine shows.
When the disk fails, the batch is undone, the queue is emptied, and nothing is written until the disk is in
order again. This thread finds that out: it is the one that has nothing else to do then, and nobody waits for
it. What it missed meanwhile it writes as far as the host tier still has it.
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
from tierstore.tiers.disk import DiskTier, PageRecord, Removal
from tierstore.tiers.disk.encoding import Encoded, PageBytes
from tierstore.tiers.disk.io_threads import IOThreads
from tierstore.tiers.disk.records import INLINE

_log = logging.getLogger(__name__)

_BATCH_BYTES = 32 << 20  # at most, and a quarter of the queue
_LEAST_BESIDE = 1 << 20  # bytes that wait while others are being written: fewer wait for more
_COMMIT_BYTES = 256 << 20  # … and half of the queue: each commit costs some milliseconds
_WRITES_AT_ONCE = 3  # so that the disk has something to do while one of them ends
_AT_ONCE = 128  # pages that become ready while the store is locked
_STALLED_LOOK_S = 1.0  # how often this thread looks whether a disk that had stopped answering does again
_USE_FLUSH_S = 30.0  # use times reach the disk at least this often while nothing else is written


@dataclass(frozen=True, slots=True)
class _Write:
    """Pages whose payloads are being written."""

    pages: list[Page]
    over: Future[None]

    @property
    def nbytes(self) -> int:
        return _bytes(self.pages)


class WriteBehind:
    """The queue from host to disk and the thread that empties it."""

    def __init__(self, state: StoreState, disk: DiskTier, *, queue_bytes: int) -> None:
        self._state = state
        self._disk = disk
        self._batch_bytes = min(_BATCH_BYTES, queue_bytes // 4)
        self._behind_bytes = queue_bytes // 2
        self._encoded: dict[Page, Encoded] = {}  # what is written of pages under way; the writer's own
        self._commit_bytes = min(_COMMIT_BYTES, queue_bytes // 2)
        self._write_pool = IOThreads(
            _WRITES_AT_ONCE, name="tierstore-payloads"
        )  # write what this thread has placed
        # Guarded by the state's lock.
        self._queue = WriteQueue(state, most_bytes=queue_bytes)
        self._placement = DiskPlacement(state, disk, self._queue, lambda: self._commit([]))
        self._closing = False
        self._writer = threading.Thread(target=self._write_batches, name="tierstore-writer", daemon=True)
        self._writer.start()

    # -- for the store (under the lock) ---------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Pages queued or being written."""
        return self._queue.pending

    @property
    def idle(self) -> bool:
        """Whether nothing is queued, being written, or put off until there is room in the queue."""
        return not self._queue.pending and not self._queue.late

    def enqueue(self, pages: Sequence[Page]) -> None:
        """Write these pages, which are in the host tier, sooner or later or not at all."""
        self._queue.put(pages)
        self._state.changed.notify_all()

    def move_stats(self) -> MoveStats:
        """What making room on disk has cost."""
        return self._placement.room.moves.stats()

    # -- for the store (without the lock) -------------------------------------------------------------

    def close(self) -> None:
        """Write what is queued, record the use times, stop."""
        with self._state.lock:
            self._closing = True
            self._state.changed.notify_all()
        self._writer.join()

    # -- the writer ----------------------------------------------------------------------------------

    def _write_batches(self) -> None:
        scanned = self._disk.wait_scanned()
        with self._state.lock:
            if scanned:
                self._state.scanned()
            else:
                self._state.health.never_write("the index could not be read")  # nobody knows what is free
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
            except Exception as error:  # noqa: BLE001  # the disk failed or we did: this thread has to live on
                self._failed(under_way, error)
            with self._state.lock:
                closing = self._closing and not self._queue
        self._write_pool.close()

    def _write_queued(self, under_way: list[Page]) -> None:
        """Write what waits, until nothing does. ``under_way`` are the pages taken from the queue that are not
        durable yet, for whoever has to undo it."""
        writes: deque[_Write] = deque()  # under way, the oldest first
        written: list[Page] = []  # not durable yet
        durable: list[Page] = []  # not served yet
        nbytes = 0  # of writes and written
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
                    durable = self._make_durable(written)
                    under_way.clear()
                    written, nbytes = [], 0
                    continue  # with the next write: the disk has nothing to do
                elif not durable:
                    break
                served, durable = durable, []
                self._finish(served)
        finally:
            for write in writes:
                write.over.exception()  # it holds on to the slots until it is over, however it goes
            self._forget_encoded([*self._encoded])
            self._finish(durable)
        if self._housekeeping_due():
            self._commit([])

    def _make_durable(self, written: Sequence[Page]) -> list[Page]:
        """Those of the written pages that are."""
        verified = self._verified(written)
        return verified if self._commit(verified) else []

    def _write_next(self, under_way: list[Page]) -> _Write | None:
        """Begin to write what waits, or some of it. None when nothing does."""
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
        """Until this write is over or, unless it is for that ``alone``, another one is worth beginning."""
        with self._state.lock:
            self._state.changed.wait_for(lambda: write.over.done() or (not alone and self._worth_beginning()))

    def _worth_beginning(self) -> bool:
        """Whether enough waits for a write beside others."""
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
        """What to write instead of some of these pages. Nothing while more waits than there is time for."""
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
        """Their payloads have been written, or will not be."""
        encoded = [self._encoded.pop(page) for page in pages if page in self._encoded]
        if self._disk.encoder is not None:
            self._disk.encoder.give_back(encoded)

    def _wait_for_work(self) -> None:
        """Until there is something to write, to try or to look at, or use times have waited long enough."""
        health = self._state.health
        give_up = time.monotonic() + _USE_FLUSH_S
        while not self._work_to_do() and (left := give_up - time.monotonic()) > 0:
            if health.stalled:
                self._state.changed.wait(_STALLED_LOOK_S)
                return
            retry_s = health.retry_s  # may have changed: a read failed
            self._state.changed.wait(left if retry_s is None else min(left, retry_s))

    def _work_to_do(self) -> bool:
        health = self._state.health
        due = (self._state.residency.removed and health.writable) or self._queue.owes or health.probe_due
        return bool(self._queue or self._closing or due)

    def _probe(self) -> None:
        """Find out whether a disk that failed is in order again."""
        state = self._state
        try:
            self._disk.probe(state.index.tick)
        except Exception as error:  # noqa: BLE001  # as in the writer
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
        """Those whose bytes are what their writer said they are. The others are dropped everywhere; what
        comes behind them is not written."""
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
        """Each page's record and its bytes in the host tier, which the queue's lease keeps there."""
        with self._state.lock:
            return [
                (page.record, self._encoded[page].payload if page in self._encoded else self._view(page))
                for page in batch
                if page.record is not None
            ]

    def _additions(self, batch: Sequence[Page]) -> list[tuple[PageRecord, memoryview | None]]:
        """The same for a commit, which writes only the bytes of inline pages."""
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
        """Make these written pages durable, together with the removals and use times that have come up.
        False when the disk failed: then none of it is."""
        state = self._state
        with state.lock:
            used = state.access_log.take(batch)
            removed, state.residency.removed = state.residency.removed, []
            tick = state.index.tick
            followed = bool(state.residency.followers)
        try:
            leaving = self._leaving(removed) if followed else ()
            self._disk.commit(self._additions(batch), removed, used, tick)
        except Exception as error:  # noqa: BLE001  # as in the writer
            with state.lock:
                state.residency.removed = removed + state.residency.removed
                state.access_log.put_back(used)
            self._failed(batch, error)
            return False
        with state.lock:
            for record in leaving:
                state.residency.left(Tier.DISK, record.identity, record.key, record.tokens)
            state.changed.notify_all()
        return True

    def _leaving(self, removed: Sequence[Removal]) -> list[PageRecord]:
        """The records of pages that are about to leave. Raises :class:`OSError`."""
        records = self._disk.records(removal.serial for removal in removed)
        return [
            record
            for record, removal in zip(records, removed, strict=True)
            if record is not None and record.place == removal.place
        ]

    def _finish(self, durable: Sequence[Page]) -> None:
        """These pages can be served from the disk. Who looks something up should not wait for all of them."""
        state = self._state
        for start in range(0, len(durable), _AT_ONCE):
            some = durable[start : start + _AT_ONCE]
            with state.lock:
                state.index.complete(some, Tier.DISK, release=True)
                for page in some:
                    if page.hint is not NO_HINT:
                        state.access_log.pass_hint_on(page)
                state.residency.stored(some, Tier.DISK)
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
        """Take back what a page that did not become durable was given."""
        if page not in self._queue:
            return  # given up before it had a place
        copy = page.copies[Tier.DISK]
        if copy is not None and not copy.ready:
            self._state.index.release_copy(page, Tier.DISK)
            assert page.record is not None
            room = page.record.room
            self._disk.unreserve(self._state.residency.unwrite(page), room)
        self._queue.give_up(page)


def _bytes(pages: Sequence[Page]) -> int:
    return sum(page.nbytes for page in pages)


def _as_os_error(error: Exception) -> OSError:
    """What went wrong, as a disk would say it. What no disk says is our own bug, and is written down."""
    if isinstance(error, OSError):
        return error
    _log.error("disk tier: a bug in writing", exc_info=error)
    return OSError(errno.EIO, f"internal error: {error!r}")
