"""Saves of one worker: KV blocks to the daemon's arena, while vLLM goes on.

A save reads blocks that vLLM owns and may give to another request in any step. :meth:`Saves.fence` is called
before the step that would write to them: it waits a little for the saves that read them, and then gives them
up. What they had copied by then is stored, the rest is not.

A save begins a moment after its step, unless a fence waits for it: beginning one takes a millisecond of
Python, for which the model's thread would have to wait with the tokens that it has just computed (on two
cores, 0.8 of the 2 ms by which the connector delayed the first one).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from tierstore.daemon.connected import ConnectedStore
from tierstore.hints import Hint
from tierstore.keys import Prompt
from tierstore.transfer import Transfer
from tierstore_connectors.vllm.copies import SavedBlocks
from tierstore_connectors.vllm.guard import Faults
from tierstore_connectors.vllm.stats import Counts

_SETTLE_S = 0.004  # after a step, in which vLLM samples and hands out its tokens


@dataclass(slots=True, eq=False)
class Save:
    """Pages of one group of one request."""

    request: str
    store: ConnectedStore
    prompt: Prompt
    source: SavedBlocks
    first: int
    count: int
    blocks: frozenset[int]
    hint: Hint | None = None
    due: float = 0.0  # when it is to begin
    lock: threading.Lock = field(default_factory=threading.Lock)
    transfer: Transfer[int] | None = None  # guarded by lock
    stopped: bool = False  # likewise
    ended: threading.Event = field(default_factory=threading.Event)


class Saves:
    """All of a worker's. The model's thread begins and fences, ``threads`` (one thread, in order) do the
    rest."""

    def __init__(
        self, threads: Executor, counts: Counts, faults: Faults, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threads = threads
        self._counts = counts
        self._faults = faults
        self._clock = clock
        self._lock = threading.Lock()
        self._fenced = threading.Condition(self._lock)
        self._fences = 0  # that wait; guarded by _lock
        self._reading: dict[int, list[Save]] = {}  # by block; guarded by _lock, as is the next
        self._under_way: dict[str, list[Save]] = {}  # by request

    def __len__(self) -> int:
        """Saves under way."""
        with self._lock:
            return sum(map(len, self._under_way.values()))

    def begin(self, save: Save) -> None:
        """Copy these blocks soon; they are read until the save has ended, or been fenced."""
        save.due = self._clock() + _SETTLE_S
        with self._lock:
            for block in save.blocks:
                self._reading.setdefault(block, []).append(save)
            self._under_way.setdefault(save.request, []).append(save)
        self._threads.submit(self._start, save)

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

    def _end_by(self, saves: Iterable[Save], ends: float) -> None:
        """Wait for these saves until then, and give up those that take longer."""
        for save in saves:
            if save.stopped or save.ended.wait(max(ends - self._clock(), 0.0)):
                continue
            self._counts.add("fenced_saves")
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

    def _start(self, save: Save) -> None:
        self._let_vllm_go_on(save)
        try:
            save.store.introduce(save.prompt.identity)  # so that nothing below waits for the daemon
            with save.lock:
                if not save.stopped:
                    save.transfer = save.store.save_from(
                        save.prompt, save.source, save.count, first=save.first, hint=save.hint
                    )
        except Exception as error:  # noqa: BLE001  # on a thread of its own nobody else would see it
            self._faults.note("starting a save", error)
        transfer = save.transfer
        if transfer is None:
            self._ended(save, 0)
        else:
            transfer.on_end(lambda: self._ended(save, transfer.wait()))

    def _let_vllm_go_on(self, save: Save) -> None:
        with self._lock:
            self._fenced.wait_for(lambda: self._fences, max(save.due - self._clock(), 0.0))

    def _stop(self, save: Save) -> None:
        with save.lock:
            save.stopped = True
            transfer = save.transfer
        if transfer is not None:  # else it has read nothing, and is not going to
            transfer.cancel()  # waits for copies that are under way

    def _ended(self, save: Save, tokens: int) -> None:
        wanted = save.count * save.prompt.chunk_tokens
        self._counts.add("saves")
        self._counts.add("saved_tokens", tokens)
        self._counts.add("not_saved_tokens", max(wanted - tokens, 0))
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
