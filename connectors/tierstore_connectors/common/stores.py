"""A store for single prompts whose failures do not reach the engine.

If the store is full, slow or unavailable, a method finds, loads or saves nothing and logs the reason once,
but does not raise. After two unanswered requests the daemon gets no request for a while
(:class:`~tierstore_connectors.common.guard.Breaker`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import torch

from tierstore import Hit, Store, copying
from tierstore.keys import Prompt, TokenIds
from tierstore.transfer import Transfer
from tierstore_connectors.common.counters import ConnectorCounters, added
from tierstore_connectors.common.guard import Breaker, ErrorLog

_WAITING_BYTES = 1 << 30  # the most bytes of pages waiting to be saved; further pages are not stored


class GuardedStore:
    """An open store for an engine that computes a prompt if the store fails.

    A lookup waits at most ``lookup_s`` seconds, and a load at most ``load_s``. ``errors`` is an
    :class:`ErrorLog`, or the logger of a new one. ``counters`` is a new object by default. Lookups and loads
    are called from one thread, saves from any thread.
    """

    def __init__(
        self,
        store: Store,
        *,
        lookup_s: float,
        load_s: float,
        errors: ErrorLog | logging.Logger,
        counters: ConnectorCounters | None = None,
    ) -> None:
        self.errors = errors if isinstance(errors, ErrorLog) else ErrorLog(errors)
        self.counters = ConnectorCounters() if counters is None else counters
        self.losses = 0
        """The number of saves that did not store all their tokens."""
        self._store = store
        self._lookup_s = lookup_s
        self._load_s = load_s
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._saving: set[Transfer[int]] = set()
        self._saving_bytes = 0
        self._totals: Mapping[str, float] = {}

    @property
    def connected(self) -> bool:
        """Whether the store is embedded, or connected to its daemon now."""
        return self._store.connected

    def find(
        self, prompt: Prompt | TokenIds, *, max_tokens: int | None = None, counted: bool = True
    ) -> Hit | None:
        """Return the longest hit for ``prompt``, which the caller loads or releases. Return None if the
        lookup fails."""
        if not self._breaker.allows(time.monotonic()):
            return None
        began = time.monotonic()
        try:
            hit = self._store.lookup(prompt, max_tokens=max_tokens, counted=counted)
        except Exception as error:  # noqa: BLE001  # a broken store is a miss
            self.errors.caught("looking up a prompt", error)
            self._breaker.failed(time.monotonic())
            return None
        now = time.monotonic()
        if not hit.tokens and now - began >= self._lookup_s:
            self.errors.warn("late lookups", "the store does not answer in time: prompts are computed")
            self._breaker.failed(now)
        else:
            self._breaker.succeeded()
        return hit

    def load(self, hit: Hit) -> tuple[int, list[torch.Tensor], list[range]]:
        """Load a hit within ``load_s`` seconds. Return the number of loaded tokens, and for each layer group
        a tensor of pages and their range of chunks."""
        chunks = [hit.chunks(group.number) for group in self._store.groups]
        pages = [
            torch.zeros((len(each), group.page_bytes), dtype=torch.uint8)
            for each, group in zip(chunks, self._store.groups, strict=True)
        ]
        into = [[page.data for page in each.numpy()] for each in pages]
        try:
            flat = into if len(into) > 1 else into[0]
            loaded = self._store.load(hit, flat, deadline_s=self._load_s).wait().tokens
        except Exception as error:  # noqa: BLE001  # the prompt is computed
            self.errors.caught("loading a prompt", error)
            hit.release()
            loaded = 0
        if loaded < hit.tokens:
            self.counters.add("failed_loads")
        return loaded, pages, chunks

    def load_pages(self, hit: Hit, first: int, count: int) -> torch.Tensor:
        """Load ``count`` pages of a hit of one layer group, from page ``first`` on, within ``load_s``
        seconds. Release the hit. Return the loaded pages before the first missing page."""
        target = _PageRows(first, count, self._store.groups[0].page_bytes)
        try:
            loading = self._store.load_to(hit, target, first=first, count=count, deadline_s=self._load_s)
            arrived = min(max(loading.wait().tokens // hit.chunk_tokens - first, 0), count)
        except Exception as error:  # noqa: BLE001  # the prompt is computed
            self.errors.caught("loading a prompt", error)
            arrived = 0
        finally:
            hit.release()
        if arrived < count:
            self.counters.add("failed_loads")
        return target.pages[:arrived]

    def save(self, prompt: Prompt | TokenIds, pages: torch.Tensor, *, first: int, group: int = 0) -> None:
        """Start to save pages of a prompt, without waiting. ``pages`` must not change afterwards."""
        if not len(pages):
            return
        expected = len(prompt) - first * self._store.spec.chunk_tokens
        with self._lock:
            waiting = self._saving_bytes
            if fits := waiting + pages.nbytes <= _WAITING_BYTES or not waiting:
                self._saving_bytes += pages.nbytes
        if not fits:
            self.errors.warn(
                "saves", "pages are computed faster than the store can save them: some are not stored"
            )
            self.counters.add("not_saved_tokens", len(pages) * self._store.spec.chunk_tokens)
            self.losses += 1
            return
        try:
            saving = self._store.save(prompt, [page.data for page in pages.numpy()], first=first, group=group)
        except Exception as error:  # noqa: BLE001  # the caller has its KV
            self.errors.caught("saving a prompt", error)
            with self._lock:
                self._saving_bytes -= pages.nbytes
            self.losses += 1
            return

        def ended() -> None:
            stored = saving.wait()
            with self._lock:
                self._saving.discard(saving)
                self._saving_bytes -= pages.nbytes
                self.losses += stored < expected
            self.counters.add("saved_tokens", stored)
            if stored < expected:
                self.counters.add("not_saved_tokens", expected - stored)

        with self._lock:
            self._saving.add(saving)
        saving.on_end(ended)

    def totals(self) -> Mapping[str, float]:
        """Return the counters since the store was opened, and the number of ``errors``."""
        with self._lock:
            self._totals = added(self._totals, self.counters.take())
            return {**self._totals, "errors": self.errors.counts.total()}

    def wait_saved(self, timeout: float | None) -> bool:
        """Wait until all saves have ended, at most ``timeout`` seconds. Return whether they have ended."""
        ends = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            saving: Sequence[Transfer[int]] = list(self._saving)
        try:
            for each in saving:
                each.wait(None if ends is None else max(ends - time.monotonic(), 0.0))
        except TimeoutError:
            return False
        return True

    def flush(self, timeout: float | None) -> bool:
        """Wait until all saved pages are in the store, and on its disk if it has a disk tier. Wait at most
        ``timeout`` seconds, and return whether all pages are there."""
        ends = None if timeout is None else time.monotonic() + timeout
        if not self.wait_saved(timeout):
            return False
        return self._store.flush(None if ends is None else max(ends - time.monotonic(), 0.0))

    def close(self) -> None:
        self._store.close()


class _PageRows:
    """A new tensor as the target of a load: row 0 takes page ``first`` of a hit, and so on."""

    def __init__(self, first: int, count: int, page_bytes: int) -> None:
        self.pages = torch.empty((count, page_bytes), dtype=torch.uint8)
        self._first = first
        self._page_bytes = page_bytes

    def write(self, pages: Sequence[tuple[int, int]]) -> None:
        base = self.pages.data_ptr() - self._first * self._page_bytes
        copying.scatter(
            [(address, [base + at * self._page_bytes]) for at, address in pages], [self._page_bytes]
        )
