"""Loads and saves of one worker: copies between KV blocks and the daemon's arena, while vLLM computes.

**A load** looks the prompt up again, for all groups at once and under this worker's identities, because the
copying process must hold the lease. One thread looks up, other threads copy, and the model's thread polls
once a step. After a load has ended, for any reason, the load writes no more blocks.

**A save** reads blocks that vLLM may give to another request in any step. :meth:`Saves.fence` is called
before a step writes such blocks. The fence waits up to ``fence_s`` for the saves that read these blocks, and
then cancels the saves. Pages that were copied before the cancellation are stored.

A step's saves start 4 ms after the step, or earlier if a fence waits for one of them. Starting the saves
takes a millisecond of Python. If they started at once, the step's tokens would be sent a millisecond later.
(On two cores this was 0.8 ms of the 2 ms by which the connector delayed the first token.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tierstore import Hint, Hit, Loaded, Prompt, Store, Transfer, lookup_all
from tierstore.errors import StoreClosedError
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.guard import ErrorLog
from tierstore_connectors.vllm.copies import LoadedBlocks, SavedBlocks
from tierstore_connectors.vllm.orders import GroupBlocks, LoadOrder

_SETTLE_S = 0.004  # after a step, while vLLM samples and sends its tokens


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The part of a load for one group: the pages of ``prompt`` from page ``first`` on."""

    store: Store
    prompt: Prompt
    blocks: GroupBlocks
    target: LoadedBlocks
    first: int

    @property
    def pages(self) -> int:
        """Return how many pages of ``prompt`` a hit must have."""
        return self.first + len(self.blocks.chunks)

    def loaded(self, pages: int, first: int) -> int:
        """Return how many leading chunks of the request's prompt have their KV in blocks if the first
        ``pages`` pages of ``prompt`` were loaded. ``first`` is this number without the load."""
        if pages >= self.pages:
            return self.blocks.end
        return self.blocks.first if self.prompt.named else max(pages, first)


class BlockLoad:
    """The load of one request. The model's thread calls ``poll``; everything else runs on other threads."""

    def __init__(
        self,
        order: LoadOrder,
        parts: Sequence[LoadPart],
        *,
        deadline_s: float,
        errors: ErrorLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order = order
        self.began = clock()
        self.nbytes = 0
        self._ends = self.began + deadline_s
        self._parts = parts
        self._errors = errors
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: list[Transfer[Loaded]] = []  # guarded by _lock, like the attributes below
        self._started = False
        self._stopped = False

    def start(self, threads: Executor, moved: Callable[[], None]) -> None:
        """Start the load. ``moved`` is called when a transfer of the load ends."""
        threads.submit(self._start, moved)

    def _start(self, moved: Callable[[], None]) -> None:
        try:
            # Each group has a separate identity, and the load needs a hit for each.
            hits = lookup_all((part.store, part.prompt) for part in self._parts)
            for transfer in self._start_parts(hits):
                transfer.on_end(moved)
        except StoreClosedError:
            self.cancel()  # the connection was replaced
        except Exception as error:  # noqa: BLE001  # the executor would discard it
            self._errors.caught("starting a load", error)
            self.cancel()
        finally:
            with self._lock:
                self._started = True
            moved()

    def _start_parts(self, hits: Sequence[Hit]) -> list[Transfer[Loaded]]:
        """Start the transfers, and release the hits that are not loaded. Start no transfer if a group lacks a
        page or the load was stopped."""
        started = 0
        try:
            with self._lock:
                short = any(
                    hit.tokens < part.pages * hit.chunk_tokens
                    for part, hit in zip(self._parts, hits, strict=True)
                )
                self._stopped = self._stopped or short
                if not self._stopped:
                    left = max(self._ends - self._clock(), 0.0)
                    for part, hit in zip(self._parts, hits, strict=True):
                        part.store.offer(hit)
                        transfer = part.store.load_to(hit, part.target, first=part.first, deadline_s=left)
                        started += 1
                        self._transfers.append(transfer)
                return list(self._transfers)
        finally:
            for hit in hits[started:]:
                hit.release()

    def poll(self) -> int | None:
        """Return how many leading chunks of the prompt are in the blocks of every group; None while the load
        is in flight."""
        with self._lock:
            transfers = list(self._transfers)
            ready = self._started and all(transfer.done for transfer in transfers)
        if not ready:
            if self._clock() < self._ends:
                return None
            self.cancel()  # waits until no copy is in flight
            transfers = self._transfers
        return self._outcome(transfers)

    def _outcome(self, transfers: Sequence[Transfer[Loaded]]) -> int:
        if not self._parts:
            return self.order.chunks  # a pipeline stage without layers of the groups to load
        first = min(part.blocks.first for part in self._parts)
        if len(transfers) < len(self._parts) or any(part.target.failed for part in self._parts):
            return first
        loaded = self.order.chunks
        for part, transfer in zip(self._parts, transfers, strict=True):
            result = transfer.wait()
            self.nbytes += result.moved_bytes
            loaded = min(loaded, part.loaded(result.tokens // part.prompt.chunk_tokens, first))
        return loaded

    def cancel(self) -> None:
        """End the load now. The load writes no block after the call."""
        with self._lock:
            self._stopped = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()


@dataclass(slots=True, eq=False)
class BlockSave:
    """A save of pages of one group of one request."""

    request: str
    store: Store
    prompt: Prompt
    source: SavedBlocks
    first: int
    count: int
    blocks: frozenset[int]
    hint: Hint | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    transfer: Transfer[int] | None = None  # guarded by lock
    stopped: bool = False  # guarded by lock
    ended: threading.Event = field(default_factory=threading.Event)


class Saves:
    """All saves of a worker. The model's thread calls ``begin`` and ``fence``. ``threads`` has one thread,
    which starts the saves in order."""

    def __init__(
        self,
        threads: Executor,
        counters: ConnectorCounters,
        errors: ErrorLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads = threads
        self._counters = counters
        self._errors = errors
        self._clock = clock
        self._lock = threading.Lock()
        self._fenced = threading.Condition(self._lock)
        self._fences = 0  # waiting fences; guarded by _lock
        self._reading: dict[int, list[BlockSave]] = {}  # by block; guarded by _lock
        self._under_way: dict[str, list[BlockSave]] = {}  # by request; guarded by _lock

    def __len__(self) -> int:
        """Return the number of saves in flight."""
        with self._lock:
            return sum(map(len, self._under_way.values()))

    def begin(self, saves: Sequence[BlockSave]) -> None:
        """Start ``saves`` soon. A save may read its blocks until the save has ended or was fenced."""
        if not saves:
            return
        with self._lock:
            for save in saves:
                for block in save.blocks:
                    self._reading.setdefault(block, []).append(save)
                self._under_way.setdefault(save.request, []).append(save)
        self._threads.submit(self._start_all, saves, self._clock() + _SETTLE_S)

    def fence(self, blocks: Iterable[int] | None, within_s: float) -> None:
        """Wait up to ``within_s`` seconds for all saves that read ``blocks`` (None: any block), then cancel
        them and wait for copies in flight."""
        with self._lock:
            if not self._reading:
                return
            reading = self._reading if blocks is None else self._reading.keys() & set(blocks)
            saves = list({id(save): save for block in reading for save in self._reading[block]}.values())
            if not saves:
                return
            self._fences += 1
            self._fenced.notify_all()
        try:
            self._end_by(saves, self._clock() + within_s)
        finally:
            with self._lock:
                self._fences -= 1

    def _end_by(self, saves: Iterable[BlockSave], ends: float) -> None:
        """Wait for ``saves`` until ``ends``, then cancel the saves that have not ended."""
        for save in saves:
            if save.stopped or save.ended.wait(max(ends - self._clock(), 0.0)):
                continue
            self._counters.add("fenced_saves")
            self._stop(save)

    def wait(self, request: str, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a request's saves."""
        with self._lock:
            saves = list(self._under_way.get(request, ()))
        ends = self._clock() + timeout
        for save in saves:
            save.ended.wait(max(ends - self._clock(), 0.0))

    def _start_all(self, saves: Sequence[BlockSave], due: float) -> None:
        with self._lock:
            self._fenced.wait_for(lambda: self._fences, max(due - self._clock(), 0.0))
        for save in saves:
            self._start(save)

    def _start(self, save: BlockSave) -> None:
        try:
            save.store.register(save.prompt.identity)  # so that save_from does not wait for the daemon
            with save.lock:
                if not save.stopped:
                    save.transfer = save.store.save_from(
                        save.prompt, save.source, save.count, first=save.first, hint=save.hint
                    )
        except Exception as error:  # noqa: BLE001  # the executor would discard it
            self._errors.caught("starting a save", error)
        transfer = save.transfer
        if transfer is None:
            self._ended(save, 0)
        else:
            transfer.on_end(lambda: self._ended(save, transfer.wait()))

    def _stop(self, save: BlockSave) -> None:
        with save.lock:
            save.stopped = True
            transfer = save.transfer
        if transfer is not None:  # otherwise the save has read no block and will read none
            transfer.cancel()  # waits for copies in flight

    def _ended(self, save: BlockSave, tokens: int) -> None:
        wanted = save.count * save.prompt.chunk_tokens
        self._counters.add("saves")
        self._counters.add("saved_tokens", tokens)
        self._counters.add("not_saved_tokens", max(wanted - tokens, 0))
        with self._lock:
            for block in save.blocks:
                others = [each for each in self._reading[block] if each is not save]
                if others:
                    self._reading[block] = others
                else:
                    del self._reading[block]
            others = [each for each in self._under_way[save.request] if each is not save]
            if others:
                self._under_way[save.request] = others
            else:
                del self._under_way[save.request]
        save.ended.set()
