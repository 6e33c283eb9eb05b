"""What the daemon holds of one request's prompt: asked once, looked at in every step.

A probe goes through two stages. It is *asked* on a thread: one lookup for each KV cache group on each worker,
since a chunk that one of them lacks cannot be loaded. Then what is on disk is *brought* into memory, with a
deadline, before anything is promised to vLLM: a page that turns out to be damaged is then a shorter hit and
not a failed load. All along the daemon keeps what was found from leaving.

Groups with a sliding window are not brought: vLLM reads the last pages of them only, and those come from disk
when they are loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from tierstore.errors import StoreClosedError
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.store.base import Hit, Store
from tierstore.transfer import Transfer
from tierstore_connectors.vllm.guard import Faults

Wanted = Sequence[tuple[Store, Identity, bool]]  # the last: only a window of it is read


class Probe:
    """One question. Asked on one thread, looked at from another."""

    def __init__(
        self,
        wanted: Wanted,
        keys: Sequence[PageKey],
        tokens: Callable[[], bytes],
        chunk_tokens: int,
        now: float,
    ) -> None:
        """``tokens`` gives those of the chunks that ``keys`` stand for; it is called on the asking thread."""
        self.began = now
        self.first_looked: float | None = None  # when vLLM first wanted to know
        self.on_disk = 0  # tokens that came from there
        self._wanted = wanted
        self._keys = keys
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._answered = threading.Event()
        self._lock = threading.Lock()
        self._hits: list[Hit] = []  # guarded by _lock, as is all below
        self._brought: list[Transfer[int]] = []
        self._found = 0
        self._released = False

    @property
    def answered(self) -> bool:
        """Whether the daemon has said what it has (or was away)."""
        return self._answered.is_set()

    def wait(self, timeout: float) -> None:
        """Wait for what comes next: the answer, or pages on their way."""
        if not self._answered.is_set():
            self._answered.wait(timeout)
            return
        with self._lock:
            brought = list(self._brought)
        for transfer in brought:
            if not transfer.done:
                with suppress(TimeoutError):
                    transfer.wait(timeout)
                return

    def ask(self, threads: Executor, prefetch_s: float, faults: Faults) -> None:
        """Begin."""

        def run() -> None:
            try:
                self._ask(prefetch_s)
            except StoreClosedError:
                self.release()  # asked of a session that has been given up
            except Exception as error:  # noqa: BLE001  # on a thread of its own nobody else would see it
                faults.note("looking up a prompt", error)
                self.release()
            finally:
                self._answered.set()

        threads.submit(run)

    def tokens(self) -> int | None:
        """How many leading tokens can be loaded; None while it is not known, or they are on their way."""
        if not self._answered.is_set():
            return None
        with self._lock:
            if self._released:
                return 0
            brought = list(self._brought)
        if not all(transfer.done for transfer in brought):  # ends those whose time is over
            return None
        least = min((transfer.wait() for transfer in brought), default=self._found)
        return min(least, self._found) // self._chunk_tokens * self._chunk_tokens

    def release(self) -> None:
        """Nobody wants to know any more. Repeating it is harmless."""
        with self._lock:
            self._released = True
            hits, self._hits = self._hits, []
            brought, self._brought = self._brought, []
        for transfer in brought:
            transfer.cancel()
        for hit in hits:
            hit.release()

    def _ask(self, prefetch_s: float) -> None:
        data = self._tokens()
        found = len(self._keys) * self._chunk_tokens
        hits: list[tuple[Hit, bool]] = []
        for store, identity, windowed in self._wanted:
            if not found or self._released:
                break
            keys = self._keys[: found // self._chunk_tokens]
            prompt = Prompt.with_keys(identity, data, keys, chunk_tokens=self._chunk_tokens)
            hit = store.lookup(prompt, max_tokens=found)
            hits.append((hit, windowed))
            found = min(found, hit.tokens)
        found = found if len(hits) == len(self._wanted) else 0
        brought = []
        for hit, windowed in hits:
            if found and not windowed and hit.by_tier.get("disk"):
                self.on_disk = max(self.on_disk, hit.by_tier["disk"])
                brought.append(hit.prefetch(deadline_s=prefetch_s))
        with self._lock:
            self._found = found
            self._hits = [hit for hit, _ in hits]
            self._brought = brought
            released = self._released or not found
        if released:
            self.release()
