"""Loads and saves of one worker: pages between KV blocks and the daemon's arena, while vLLM goes on.

**A load** looks the prompt up again, for all groups at once, under this worker's own identities: the one that
copies has to hold the lease. A thread does that, and others copy; the model's thread polls once a step. When
a load has ended, in whatever way, nothing writes to its blocks any more.

**A save** reads blocks that vLLM owns and may give to another request in any step. :meth:`Saves.fence` is
called before the step that would write to them: it waits a little for the saves that read them, and then
gives them up. What they had copied by then is stored, the rest is not.

A step's saves begin a moment after it, unless a fence waits for one: beginning them takes a millisecond of
Python, for which the model's thread would have to wait with the tokens that it has just computed (on two
cores, 0.8 of the 2 ms by which the connector delayed the first one).
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

_SETTLE_S = 0.004  # after a step, in which vLLM samples and hands out its tokens


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The pages of one group: those of ``prompt`` from page ``first`` on."""

    store: Store
    prompt: Prompt
    blocks: GroupBlocks
    target: LoadedBlocks
    first: int

    @property
    def pages(self) -> int:
        """How many of the prompt's pages have to be held."""
        return self.first + len(self.blocks.chunks)

    def loaded(self, pages: int, first: int) -> int:
        """Up to which chunk the prompt can be used with the first ``pages`` pages. ``first``: up to which
        one without any."""
        if pages >= self.pages:
            return self.blocks.end
        return self.blocks.first if self.prompt.named else max(pages, first)


class BlockLoad:
    """One request's load. ``poll`` is for the model's thread, the rest happens on others."""

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
        self._transfers: list[Transfer[Loaded]] = []  # guarded by _lock, as is all below
        self._started = False
        self._stopped = False

    def start(self, threads: Executor, moved: Callable[[], None]) -> None:
        """Begin; ``moved`` is called whenever it may have ended."""
        threads.submit(self._start, moved)

    def _start(self, moved: Callable[[], None]) -> None:
        try:
            # All groups at once: each is a question under another identity, and all have to be held.
            hits = lookup_all((part.store, part.prompt) for part in self._parts)
            for transfer in self._start_parts(hits):
                transfer.on_end(moved)
        except StoreClosedError:
            self._stop()  # the session has been given up
        except Exception as error:  # noqa: BLE001  # on this thread it would go unseen
            self._errors.caught("starting a load", error)
            self._stop()
        finally:
            with self._lock:
                self._started = True
            moved()

    def _start_parts(self, hits: Sequence[Hit]) -> list[Transfer[Loaded]]:
        """Start the transfers; none when a group lacks a page, or the load has been stopped. Release the hits
        that are not loaded."""
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
        """The chunks of the prompt that are loaded, in every group; None while it is under way."""
        with self._lock:
            transfers = list(self._transfers)
            ready = self._started and all(transfer.done for transfer in transfers)
        if not ready:
            if self._clock() < self._ends:
                return None
            self._stop()  # no copy is under way after this
            transfers = self._transfers
        return self._outcome(transfers)

    def _outcome(self, transfers: Sequence[Transfer[Loaded]]) -> int:
        if not self._parts:
            return self.order.chunks  # a pipeline stage without layers of these groups
        first = min(part.blocks.first for part in self._parts)
        if len(transfers) < len(self._parts) or any(part.target.failed for part in self._parts):
            return first
        loaded = self.order.chunks
        for part, transfer in zip(self._parts, transfers, strict=True):
            result = transfer.wait()
            self.nbytes += result.moved_bytes
            loaded = min(loaded, part.loaded(result.tokens // part.prompt.chunk_tokens, first))
        return loaded

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            transfers = list(self._transfers)
        for transfer in transfers:
            transfer.cancel()

    def cancel(self) -> None:
        """End it now; when this returns nothing writes to its blocks any more."""
        self._stop()


@dataclass(slots=True, eq=False)
class BlockSave:
    """Pages of one group of one request."""

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
    stopped: bool = False  # likewise
    ended: threading.Event = field(default_factory=threading.Event)


class Saves:
    """All of a worker's. The model's thread begins and fences, ``threads`` (one thread, in order) do the
    rest."""

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
        self._fences = 0  # that wait; guarded by _lock
        self._reading: dict[int, list[BlockSave]] = {}  # by block; guarded by _lock, as is the next
        self._under_way: dict[str, list[BlockSave]] = {}  # by request

    def __len__(self) -> int:
        """Saves under way."""
        with self._lock:
            return sum(map(len, self._under_way.values()))

    def begin(self, saves: Sequence[BlockSave]) -> None:
        """Copy these blocks soon; they are read until their save has ended, or been fenced."""
        if not saves:
            return
        with self._lock:
            for save in saves:
                for block in save.blocks:
                    self._reading.setdefault(block, []).append(save)
                self._under_way.setdefault(save.request, []).append(save)
        self._threads.submit(self._start_all, saves, self._clock() + _SETTLE_S)

    def fence(self, blocks: Iterable[int] | None, within_s: float) -> None:
        """When this returns nothing reads these blocks (None: any) any more."""
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
        """Wait for these saves until then, and give up those that take longer."""
        for save in saves:
            if save.stopped or save.ended.wait(max(ends - self._clock(), 0.0)):
                continue
            self._counters.add("fenced_saves")
            self._stop(save)

    def wait(self, request: str, timeout: float) -> None:
        """Wait for a request's saves."""
        with self._lock:
            saves = list(self._under_way.get(request, ()))
        ends = self._clock() + timeout
        for save in saves:
            save.ended.wait(max(ends - self._clock(), 0.0))

    def close(self, timeout: float) -> None:
        """Wait for all of them, and give up those that take longer."""
        self.fence(None, timeout)

    def _start_all(self, saves: Sequence[BlockSave], due: float) -> None:
        with self._lock:
            self._fenced.wait_for(lambda: self._fences, max(due - self._clock(), 0.0))
        for save in saves:
            self._start(save)

    def _start(self, save: BlockSave) -> None:
        try:
            save.store.register(save.prompt.identity)  # so that nothing below waits for the daemon
            with save.lock:
                if not save.stopped:
                    save.transfer = save.store.save_from(
                        save.prompt, save.source, save.count, first=save.first, hint=save.hint
                    )
        except Exception as error:  # noqa: BLE001  # on this thread it would go unseen
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
        if transfer is not None:  # else it has read nothing, and is not going to
            transfer.cancel()  # waits for copies that are under way

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


def blocks_of(chunks: Sequence[Sequence[int]]) -> frozenset[int]:
    """The blocks of chunks."""
    return frozenset(block for chunk in chunks for block in chunk)
