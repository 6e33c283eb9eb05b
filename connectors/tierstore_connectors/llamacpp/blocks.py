"""A model's sequences in a store: a sequence's state is divided into pages by tokens, and restored from
pages.

A page has the rows of ``chunk_tokens`` tokens: ``[row of a layer's K or V][token][bytes]``, all keys before
all values. Two sequences with a common prefix share the prefix's pages. A model with sliding windows has
pages of two layer groups, and a hit needs pages of both groups (:mod:`tierstore.groups`).

If the store is unavailable, slow or full, :class:`LlamaBlocks` finds and stores less, but does not raise.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import tierstore
from tierstore.errors import UsageError
from tierstore.groups import Group
from tierstore.keys import Identity
from tierstore.spec import DEFAULT_CHUNK_TOKENS, KVSpec, LayerGroup, LayerKind
from tierstore.store import Hit
from tierstore_connectors.common.guard import Breaker
from tierstore_connectors.llamacpp.state import (
    FILE_VERSION,
    Bytes,
    CacheRows,
    CellLayout,
    LlamaSequence,
    StateLayout,
    Tokens,
)

_CODEC = f"llamacpp-state{FILE_VERSION}-pages1"
_SAVE_S = 60.0  # the most seconds that a save may take


@dataclass(frozen=True)
class BlockSettings:
    """The settings of a :class:`LlamaBlocks`. Raises :class:`UsageError` for invalid values.

    - ``store``: the daemon's address. ``keys``, ``server_key``: key files for ``tcp://``.
    - ``namespace``: processes with different namespaces share no pages.
    - ``chunk_tokens``: tokens per page. ``least_tokens``: fewer tokens are neither looked up nor loaded.
    - ``lookup_s``, ``load_s``: the most seconds that a lookup and a load may take.
    """

    store: str
    namespace: str = ""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    least_tokens: int = 128
    lookup_s: float = 0.5
    load_s: float = 10.0
    keys: str = ""
    server_key: str = ""

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1 or self.least_tokens < 1:
            raise UsageError(
                "chunk_tokens and least_tokens must be at least 1, got "
                f"{self.chunk_tokens} and {self.least_tokens}"
            )
        if not (self.lookup_s > 0 and self.load_s > 0):
            raise UsageError(f"lookup_s and load_s must be positive, got {self.lookup_s} and {self.load_s}")


@dataclass(frozen=True)
class ModelFacts:
    """The identity of a model's KV: a digest of the ``weights``, and in ``engine`` a digest of everything
    else that changes KV. ``window`` is the length of the sliding window in tokens, 0 without one. ``name`` is
    shown to users."""

    weights: str
    engine: str
    window: int = 0
    name: str = ""


@dataclass(frozen=True)
class FoundPrefix:
    """The length in tokens of the longest stored prefix of a prompt, and its state if it was loaded."""

    tokens: int
    state: LlamaSequence | None = None


class LlamaBlocks:
    """The sequences of one model in a store. Thread-safe. Raises :class:`UsageError` for a model that is not
    supported, or an invalid address."""

    def __init__(
        self, settings: BlockSettings, layout: StateLayout, facts: ModelFacts, log: logging.Logger
    ) -> None:
        self.settings = settings
        self.layout = layout
        self._window = facts.window
        self._log = log
        self._breaker = Breaker()
        self._lock = threading.Lock()  # guards the breaker
        spec = spec_of(layout, facts.window, settings.chunk_tokens)
        identity = Identity.of(
            spec,
            model=f"{facts.engine} {layout.describe()}",
            revision=facts.weights,
            codec=_CODEC,
            tenant=settings.namespace,
        )
        self._store = tierstore.connect(
            settings.store,
            spec,
            identity=identity,
            lookup_s=settings.lookup_s,
            keys=settings.keys or None,
            server_key=settings.server_key or None,
            model_name=facts.name,
            wait_s=0,
            log=log,
        )

    @property
    def identity(self) -> Identity:
        return self._store.identity

    def wait_connected(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the daemon's answer. Return whether it has answered."""
        return self._store.wait_connected(seconds)

    def close(self) -> None:
        self._store.close()

    def find(self, tokens: Tokens, *, known: int = 0) -> FoundPrefix:
        """Return the longest stored prefix of ``tokens`` that leaves at least one token to compute.

        The prefix is loaded if it has at least ``least_tokens`` tokens more than ``known``, the number of
        leading tokens whose KV the engine already has. A load that takes longer than ``load_s`` returns a
        shorter prefix.
        """
        most = len(tokens) - 1
        if most < self.settings.least_tokens or not self._may_ask():
            return FoundPrefix(0)
        began = time.monotonic()
        with self._store.lookup(tokens, max_tokens=most) as hit:
            self._answered(late=not hit.tokens and time.monotonic() - began >= self.settings.lookup_s)
            # llama-server recomputes a sequence that is shorter than its window.
            least = max(known + self.settings.least_tokens, self._window + 1 if self.windowed else 0)
            if hit.tokens < least:
                return FoundPrefix(hit.tokens)
            return self._loaded(tokens, hit)

    def _loaded(self, tokens: Tokens, hit: Hit) -> FoundPrefix:
        groups = self._store.groups
        chunks = [hit.chunks(group.number) for group in groups]
        memory = [
            np.empty((len(some), group.page_bytes), np.uint8)
            for some, group in zip(chunks, groups, strict=True)
        ]
        into = [[page.data for page in pages] for pages in memory]
        held = hit.tokens
        loading = self._store.load(hit, into if len(into) > 1 else into[0], deadline_s=self.settings.load_s)
        length = loading.wait().tokens
        if length < held and (len(groups) > 1 or length < self.settings.least_tokens):
            return FoundPrefix(held)
        caches = tuple(
            self._rows(cache, pages, some.start, length, windowed=group.named)
            for cache, pages, some, group in zip(self.layout.caches, memory, chunks, groups, strict=True)
        )
        return FoundPrefix(held, LlamaSequence(tokens[:length], caches))

    def _rows(
        self, layout: CellLayout, pages: Bytes, first_chunk: int, length: int, *, windowed: bool
    ) -> CacheRows:
        chunk = self.settings.chunk_tokens
        first = first_chunk * chunk
        # llama-server continues a sequence only if it also has the two cells before the window. No later
        # token attends to these cells, so their bytes do not matter.
        start = min(first, max(length - self._window - 1, 0)) if windowed else first
        rows, at = [], 0
        for row in layout.rows:
            some = pages[:, at : at + chunk * row.nbytes].reshape(-1, row.nbytes)[: length - first]
            if start < first:
                some = np.concatenate([np.zeros((first - start, row.nbytes), np.uint8), some])
            rows.append(some)
            at += chunk * row.nbytes
        return CacheRows(layout, start, tuple(rows))

    @property
    def windowed(self) -> bool:
        """Whether the model has sliding windows."""
        return len(self.layout.caches) > 1

    def save(self, state: LlamaSequence, *, held: int = 0) -> int:
        """Store the pages of ``state`` after the first ``held`` tokens, which are stored already. Return the
        number of stored tokens, counted from the prompt's start. The method waits for the save, so call it on
        a separate thread.

        Raises :class:`UsageError` for a state of another layout.
        """
        if state.layout.describe() != self.layout.describe():
            raise UsageError(f"the state's layout is {state.layout.describe()}, not {self.layout.describe()}")
        if not self._may_ask():
            return 0
        prompt = self._store.prompt(state.tokens)
        total, stored = len(state.tokens), held
        for group, cache in zip(self._store.groups, state.caches, strict=True):
            chunks = self._savable(group, cache, total, held)
            pages = self._pages(cache, chunks)
            saving = self._store.save(prompt, list(pages), first=chunks.start, group=group.number)
            try:
                saved = saving.wait(_SAVE_S)
            except TimeoutError:
                saving.cancel()
                return 0
            if not group.named:
                stored = chunks.start * self.settings.chunk_tokens + saved
        if held and stored < total:  # pages of the first ``held`` tokens may have been evicted
            return self.save(state)
        return stored

    def _savable(self, group: Group, cache: CacheRows, total: int, held: int) -> range:
        """Return the chunks of a cache to save. If the window begins inside a page, this page is not saved,
        because another hit could need its missing tokens."""
        chunk = self.settings.chunk_tokens
        if not group.named:
            return range(held // chunk, -(-total // chunk))
        needed = group.chunks(total)
        complete = -(-cache.first // chunk)
        return range(max(needed.start, complete), needed.stop)

    def _pages(self, cache: CacheRows, chunks: range) -> Iterator[memoryview]:
        """Return the pages of ``chunks``. If the last chunk is incomplete, its page is padded with zeros."""
        chunk = self.settings.chunk_tokens
        pages = np.zeros((len(chunks), chunk * cache.layout.token_bytes), np.uint8)
        at = 0
        for row, data in zip(cache.layout.rows, cache.rows, strict=True):
            some = data[chunks.start * chunk - cache.first : chunks.stop * chunk - cache.first]
            whole = len(some) // chunk
            part = slice(at, at + chunk * row.nbytes)
            pages[:whole, part] = some[: whole * chunk].reshape(whole, chunk * row.nbytes)
            rest = some[whole * chunk :].reshape(-1)
            if len(rest):
                pages[whole, at : at + len(rest)] = rest
            at += chunk * row.nbytes
        return (page.data for page in pages)

    def _may_ask(self) -> bool:
        with self._lock:
            return self._breaker.allows(time.monotonic())

    def _answered(self, *, late: bool) -> None:
        with self._lock:
            if late:
                self._breaker.failed(time.monotonic())
            else:
                self._breaker.succeeded()


def spec_of(layout: StateLayout, window: int, chunk_tokens: int) -> KVSpec:
    """Return the spec of a model's pages, which has a layer group for each cache. Raise :class:`UsageError`
    for a model that is not supported."""
    if any(cache.token_bytes % 2 for cache in layout.caches):
        raise UsageError("the state has an odd number of bytes per token, which is not supported")
    groups = [LayerGroup(LayerKind.FULL_ATTENTION, (0,), 1, layout.caches[0].token_bytes // 2)]
    if len(layout.caches) > 1:
        if not window:
            raise UsageError("the model has sliding windows of an unknown length, which is not supported")
        token_bytes = layout.caches[1].token_bytes
        groups.append(LayerGroup(LayerKind.SLIDING_WINDOW, (1,), 1, token_bytes // 2, window))
    return KVSpec(tuple(groups), "uint8", chunk_tokens)
