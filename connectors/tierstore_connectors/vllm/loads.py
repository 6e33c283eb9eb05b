"""Loads of one worker: each request's pages, from the daemon's arena into KV blocks.

The prompt is looked up again here, for all groups at once, under this worker's own identities: a lease is
held by who copies. That is done by a thread, and so are the copies; the model's thread looks once a step
whether a load has ended. When a load has ended, in whatever way, nothing writes to its blocks any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from tierstore.daemon.connected import ConnectedStore, lookup_all
from tierstore.errors import StoreClosedError
from tierstore.keys import Identity, Prompt
from tierstore.store.base import Hit
from tierstore.store.load import Loaded
from tierstore.transfer import Transfer
from tierstore_connectors.vllm.copies import LoadedBlocks
from tierstore_connectors.vllm.guard import Faults
from tierstore_connectors.vllm.work import GroupBlocks, LoadOrder


@dataclass(frozen=True, slots=True)
class LoadPart:
    """The pages of one group. ``page_bytes`` of each, for the statistics."""

    store: ConnectedStore
    prompt: Prompt
    blocks: GroupBlocks
    target: LoadedBlocks


class Load:
    """One request's load. ``poll`` is for the model's thread, the rest happens on others."""

    def __init__(
        self,
        order: LoadOrder,
        parts: Sequence[LoadPart],
        *,
        deadline_s: float,
        faults: Faults,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order = order
        self.began = clock()
        self.nbytes = 0
        self._ends = self.began + deadline_s
        self._parts = parts
        self._faults = faults
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
        except Exception as error:  # noqa: BLE001  # on a thread of its own nobody else would see it
            self._faults.note("starting a load", error)
            self._stop()
        finally:
            with self._lock:
                self._started = True
            moved()

    def _start_parts(self, hits: Sequence[Hit]) -> list[Transfer[Loaded]]:
        """The transfers; none when one of the groups lacks what is wanted, or the load has been stopped. What
        is not going to be loaded is given back."""
        started = 0
        try:
            with self._lock:
                short = any(
                    hit.tokens < part.blocks.end * hit.chunk_tokens
                    for part, hit in zip(self._parts, hits, strict=True)
                )
                self._stopped = self._stopped or short
                if not self._stopped:
                    left = max(self._ends - self._clock(), 0.0)
                    for part, hit in zip(self._parts, hits, strict=True):
                        transfer = part.store.load_to(
                            hit, part.target, first=part.blocks.first, deadline_s=left
                        )
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
            chunks = result.tokens // part.prompt.chunk_tokens
            if chunks < part.blocks.end:
                loaded = min(loaded, max(chunks, first))
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


def prompt_of(identity: Identity, keys: Sequence[bytes], tokens: bytes, chunk_tokens: int) -> Prompt:
    """The first chunks of a prompt, as many as there are keys."""
    data = tokens[: len(keys) * chunk_tokens * 4]
    return Prompt.with_keys(identity, data, list(keys), chunk_tokens=chunk_tokens)  # type: ignore[arg-type]
