"""A cache of a store's recent prompts: their keys and the backend's handles for them.

Most prompts begin like an earlier one: the next turn of a conversation, or another request about the same
document. Comparing 100K tokens with a remembered prompt takes 20–40 µs. Hashing 100K tokens takes 500 µs.
Sending and matching them again takes a daemon several milliseconds. So a prompt that begins like a remembered
one reuses its keys. For the chunks that the backend remembers, messages contain the remembered prompt's
handle instead of keys and tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore.backend import KnownPrompt, LookupRequest, PrefixHandle
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, Identity, PageKey, Prompt, chunk_keys, root_key

_MOST_BYTES = 64 << 20  # size of all remembered tokens
_MOST_PROMPTS = 1024
_TRIED = 8  # prompts with the same first chunk that are compared, most recent first
_COMPARED_AT_ONCE = 64 << 10  # pairs of tokens
_WORTH = 16  # a prompt is remembered if at least 1/16 of its chunks are new
_PAIR = np.dtype("<u8")


@dataclass(slots=True)
class PromptCache:
    """Prompts by identity and first chunk, least recently used first. Thread-safe."""

    chunk_tokens: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _buckets: dict[bytes, OrderedDict[int, KnownPrompt]] = field(default_factory=dict)
    _order: OrderedDict[int, KnownPrompt] = field(default_factory=OrderedDict)
    _nbytes: int = 0

    def prompt(self, identity: Identity, data: bytes) -> Prompt:
        """Return the prompt with these token bytes. Only the chunks after the longest remembered prefix are
        hashed."""
        known, common = self._recall(self._bucket(identity.chain, data), data)
        if known is None or identity.chain.whole_pages:  # with whole pages, keys may cover more than tokens
            return Prompt(identity, np.frombuffer(data, TOKEN_DTYPE), chunk_tokens=self.chunk_tokens)
        prompt = Prompt.with_keys(identity, data, known.keys[:common], chunk_tokens=self.chunk_tokens)
        prompt.extend(())  # adds the keys of the remaining chunks
        return prompt

    def request_of(self, identity: Identity, page_bytes: int, data: bytes) -> LookupRequest:
        """Return ``request`` for ``prompt(identity, data)``, without making the prompt."""
        known, common = self._recall(self._bucket(identity, data), data)
        width = self.chunk_tokens * TOKEN_BYTES
        keys: list[PageKey] = []
        if known is not None and not identity.whole_pages:
            keys = known.keys[:common]
        parent = keys[-1] if keys else root_key(identity)
        keys += chunk_keys(parent, data[len(keys) * width :], width)
        if known is not None and identity.whole_pages:
            common = common_keys(known.keys, keys[:common])
        return LookupRequest(identity, page_bytes, self.chunk_tokens, data, len(data), keys, known, common)

    def request(self, identity: Identity, page_bytes: int, data: bytes, keys: list[PageKey]) -> LookupRequest:
        """Return the request for the chained pages of these token bytes. ``keys`` has a key for each whole
        chunk."""
        known, common = self._recall(self._bucket(identity, data), data)
        if known is not None and identity.whole_pages:
            # Keys may cover more than tokens, so equal tokens are not enough.
            common = common_keys(known.keys, keys[:common])
        return LookupRequest(identity, page_bytes, self.chunk_tokens, data, len(data), keys, known, common)

    def remember(self, request: LookupRequest, handle: PrefixHandle | None) -> None:
        """Remember a prompt after a lookup or a save. ``handle`` is the daemon's name for it; None if the
        daemon does not remember it."""
        if not request.keys:
            return
        known = request.known
        with self._lock:
            if known is not None and (len(request.keys) - request.common) * _WORTH < len(request.keys):
                # Storing the prompt again takes 4 bytes a token, and too few of its chunks are new.
                _renew_handle(known, handle, request.common)
                return
            if known is not None and request.common == len(known.keys):
                self._drop(known)  # the new prompt begins with the whole remembered one
            bucket = self._bucket(request.identity, request.data)
            new = KnownPrompt(bucket, request.data, request.keys, handle)
            self._buckets.setdefault(bucket, OrderedDict())[id(new)] = new
            self._order[id(new)] = new
            self._nbytes += len(new.data)
            while len(self._order) > 1 and (self._nbytes > _MOST_BYTES or len(self._order) > _MOST_PROMPTS):
                self._drop(next(iter(self._order.values())))

    def clear(self) -> None:
        with self._lock:
            self._buckets.clear()
            self._order.clear()
            self._nbytes = 0

    def _bucket(self, identity: Identity, data: bytes) -> bytes:
        return identity.digest + data[: self.chunk_tokens * TOKEN_BYTES]

    def _recall(self, bucket: bytes, data: bytes) -> tuple[KnownPrompt | None, int]:
        """Return the remembered prompt that shares the most chunks with ``data``, and the number of these
        chunks."""
        width = self.chunk_tokens * TOKEN_BYTES
        with self._lock:
            candidates = list(self._buckets.get(bucket, {}).values())[: -_TRIED - 1 : -1]
        best: KnownPrompt | None = None
        most = 0
        for known in candidates:
            # Compare the rest only if the next chunk after the best match so far is equal, too.
            start = most * width
            if known.data[start : start + width] != data[start : start + width]:
                continue
            common = min(common_bytes(known.data, data) // width, len(known.keys))
            if common > most:
                best, most = known, common
        if best is not None:
            self._touch(best)
        return best, most

    def _touch(self, known: KnownPrompt) -> None:
        with self._lock:
            if id(known) in self._order:
                self._order.move_to_end(id(known))
                self._buckets[known.bucket].move_to_end(id(known))

    def _drop(self, known: KnownPrompt) -> None:
        if self._order.pop(id(known), None) is None:
            return
        self._nbytes -= len(known.data)
        bucket = self._buckets[known.bucket]
        del bucket[id(known)]
        if not bucket:
            del self._buckets[known.bucket]


def _renew_handle(known: KnownPrompt, handle: PrefixHandle | None, common: int) -> None:
    """Give ``known`` the new handle if the handle covers more chunks. ``known`` and the new prompt share
    their first ``common`` chunks."""
    old = known.handle
    if handle is None:
        return
    chunks = min(handle.chunks, common)
    if chunks and (old is None or old.owner is not handle.owner or chunks >= old.chunks):
        known.handle = PrefixHandle(handle.owner, handle.number, chunks)


def common_keys(a: Sequence[PageKey], b: Sequence[PageKey]) -> int:
    """Return the number of leading keys that two prompts share."""
    shorter = min(len(a), len(b))
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), shorter)


def common_bytes(a: bytes, b: bytes) -> int:
    """Return the number of leading bytes that two token strings share."""
    shorter = min(len(a), len(b))
    if a.startswith(b) or b.startswith(a):
        return shorter
    pairs = shorter // _PAIR.itemsize  # comparing eight bytes takes as long as comparing one
    x, y = np.frombuffer(a, _PAIR, pairs), np.frombuffer(b, _PAIR, pairs)
    for start in range(0, pairs, _COMPARED_AT_ONCE):
        differ = x[start : start + _COMPARED_AT_ONCE] != y[start : start + _COMPARED_AT_ONCE]
        first = int(differ.argmax())
        if differ[first]:
            at = (start + first) * _PAIR.itemsize
            return at + TOKEN_BYTES * (a[at : at + TOKEN_BYTES] == b[at : at + TOKEN_BYTES])
    return pairs * _PAIR.itemsize
