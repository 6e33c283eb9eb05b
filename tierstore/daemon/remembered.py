"""What the client remembers of the prompts it has asked about: their keys, and the daemon's name for them.

Most prompts begin like an earlier one: the next turn of a conversation, another question about one document.
Comparing 100K tokens with a remembered prompt takes 20–40 µs, hashing them 500 µs, and sending them and
having them matched once more takes the daemon milliseconds. So a prompt that begins like a remembered one
takes its keys from there, and refers to the daemon's ``path`` for as many chunks as the daemon remembers.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tierstore.daemon.greeting import Session
from tierstore.daemon.protocol import Found, PromptPart, Reserved
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, Identity, PageKey, Prompt, chunk_keys, root_key

_MOST_BYTES = 64 << 20  # of tokens
_MOST_PROMPTS = 1024
_TRIED = 8  # of the prompts with the same first chunk, the last used first
_COMPARED_AT_ONCE = 64 << 10
_WORTH = 16  # remembered is what has at least 1/16 that is new
_PAIR = np.dtype("<u8")


@dataclass(frozen=True, slots=True)
class Name:
    """The daemon knows the first ``chunks`` of a prompt as ``path``, in one session."""

    session: Session
    path: int
    chunks: int

    @classmethod
    def of(cls, session: Session, answer: Found | Reserved) -> Name | None:
        """The one that an answer gives, if it gives one."""
        return cls(session, answer.path, answer.known) if answer.path and answer.known > 0 else None


@dataclass(slots=True, eq=False)
class _Known:
    """A prompt asked about earlier; ``data`` may go on behind its last key. ``name`` is how the daemon knows
    it, replaced in one piece."""

    bucket: bytes
    data: bytes
    keys: list[PageKey]
    name: Name | None = None


@dataclass(slots=True)
class Question:
    """A prompt as it was when somebody asked: it may grow meanwhile. Its tokens are the first ``nbytes`` of
    ``data`` (copying a long prompt costs more than matching it), ``keys`` are those of its full chunks."""

    identity: Identity
    chunk_tokens: int
    data: bytes
    nbytes: int
    keys: list[PageKey]
    known: _Known | None = None
    common: int = 0  # chunks shared with it

    @property
    def width(self) -> int:
        return self.chunk_tokens * TOKEN_BYTES

    @property
    def num_tokens(self) -> int:
        return self.nbytes // TOKEN_BYTES

    @property
    def num_chunks(self) -> int:
        """The partial tail included."""
        return -(-self.nbytes // self.width)

    def tokens_from(self, chunk: int) -> bytes:
        """Token bytes from a chunk on."""
        return self.data[chunk * self.width : self.nbytes]

    def chunk(self, index: int) -> bytes:
        """Token bytes of a chunk; the last one may be the partial tail."""
        return self.data[index * self.width : min((index + 1) * self.width, self.nbytes)]

    def cut(self, tokens: int) -> Question:
        """The first ``tokens`` of it."""
        if tokens >= self.num_tokens:
            return self
        chunks = tokens // self.chunk_tokens
        return Question(
            self.identity,
            self.chunk_tokens,
            self.data,
            tokens * TOKEN_BYTES,
            self.keys[:chunks],
            self.known,
            min(self.common, chunks),
        )

    def part(self, session: Session, *, refer_to: int | None = None, name: Name | None = None) -> PromptPart:
        """As a message describes it: by reference to a remembered path for up to ``refer_to`` chunks (None:
        as many as it has), the rest in full. ``name`` is one that the caller knows to be of this prompt."""
        identity = session.identities[self.identity.digest]
        if name is None and self.known is not None and (known := self.known.name) is not None:
            name = Name(known.session, known.path, min(self.common, known.chunks))
        if name is not None and name.session is session:
            chunks = name.chunks if refer_to is None else min(name.chunks, refer_to)
            if chunks:
                keys = b"".join(self.keys[chunks:])
                return PromptPart(identity, keys, self.tokens_from(chunks), name.path, chunks)
        return PromptPart(identity, b"".join(self.keys), self.tokens_from(0))

    def forgotten(self) -> None:
        """The daemon does not know the path any more."""
        if self.known is not None:
            self.known.name = None


@dataclass(slots=True)
class Remembered:
    """Prompts by their identity and first chunk, the last used last. Thread-safe."""

    chunk_tokens: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _buckets: dict[bytes, OrderedDict[int, _Known]] = field(default_factory=dict)
    _order: OrderedDict[int, _Known] = field(default_factory=OrderedDict)
    _nbytes: int = 0

    def prompt(self, identity: Identity, data: bytes) -> Prompt:
        """A prompt of these token bytes, hashing only what no remembered one begins with."""
        known, common = self._recall(self._bucket(identity, data), data)
        if known is None or identity.whole_pages:  # whose remembered keys stand for more than tokens
            return Prompt(identity, np.frombuffer(data, TOKEN_DTYPE), chunk_tokens=self.chunk_tokens)
        prompt = Prompt.with_keys(identity, data, known.keys[:common], chunk_tokens=self.chunk_tokens)
        prompt.extend(())  # the keys of the chunks behind those
        return prompt

    def question_of(self, identity: Identity, data: bytes) -> Question:
        """What :meth:`question` is for :meth:`prompt`, without a prompt in between."""
        known, common = self._recall(self._bucket(identity, data), data)
        width = self.chunk_tokens * TOKEN_BYTES
        keys: list[PageKey] = []
        if known is not None and not identity.whole_pages:
            keys = known.keys[:common]
        parent = keys[-1] if keys else root_key(identity)
        keys += chunk_keys(parent, data[len(keys) * width :], width)
        if known is not None and identity.whole_pages:
            common = common_keys(known.keys, keys[:common])
        return Question(identity, self.chunk_tokens, data, len(data), keys, known, common)

    def question(self, prompt: Prompt) -> Question:
        """``prompt`` as it is now."""
        data = prompt.token_bytes
        known, common = self._recall(self._bucket(prompt.identity, data), data)
        keys = list(prompt.keys)
        if known is not None and prompt.identity.whole_pages:
            # Equal tokens are not enough where keys stand for more than tokens.
            common = common_keys(known.keys, keys[:common])
        return Question(prompt.identity, prompt.chunk_tokens, data, len(data), keys, known, common)

    def remember(self, question: Question, name: Name | None) -> None:
        """A question was asked (or its pages were saved), and the daemon calls it ``name``, if it remembers
        it."""
        if not question.keys:
            return
        known = question.known
        with self._lock:
            if known is not None and (len(question.keys) - question.common) * _WORTH < len(question.keys):
                _rename(known, name, question.common)  # little new: not worth 4 bytes a token once more
                return
            if known is not None and question.common == len(known.keys):
                self._drop(known)  # the new one begins with all of it
            bucket = self._bucket(question.identity, question.data)
            new = _Known(bucket, question.data, question.keys, name)
            self._buckets.setdefault(bucket, OrderedDict())[id(new)] = new
            self._order[id(new)] = new
            self._nbytes += len(new.data)
            while len(self._order) > 1 and (self._nbytes > _MOST_BYTES or len(self._order) > _MOST_PROMPTS):
                self._drop(next(iter(self._order.values())))

    def _bucket(self, identity: Identity, data: bytes) -> bytes:
        return identity.digest + data[: self.chunk_tokens * TOKEN_BYTES]

    def _recall(self, bucket: bytes, data: bytes) -> tuple[_Known | None, int]:
        """The remembered prompt that shares the most chunks with ``data``, and how many."""
        width = self.chunk_tokens * TOKEN_BYTES
        with self._lock:
            candidates = list(self._buckets.get(bucket, {}).values())[: -_TRIED - 1 : -1]
        best: _Known | None = None
        most = 0
        for known in candidates:
            # One chunk more than the best so far, or it is not worth comparing the rest.
            start = most * width
            if known.data[start : start + width] != data[start : start + width]:
                continue
            common = min(common_bytes(known.data, data) // width, len(known.keys))
            if common > most:
                best, most = known, common
        if best is not None:
            self._touch(best)
        return best, most

    def _touch(self, known: _Known) -> None:
        with self._lock:
            if id(known) in self._order:
                self._order.move_to_end(id(known))
                self._buckets[known.bucket].move_to_end(id(known))

    def _drop(self, known: _Known) -> None:
        if self._order.pop(id(known), None) is None:
            return
        self._nbytes -= len(known.data)
        bucket = self._buckets[known.bucket]
        del bucket[id(known)]
        if not bucket:
            del self._buckets[known.bucket]


def _rename(known: _Known, name: Name | None, common: int) -> None:
    """``known`` shares ``common`` chunks with what the daemon calls ``name``: use that, if it says more."""
    old = known.name
    if name is None:
        return
    chunks = min(name.chunks, common)
    if chunks and (old is None or old.session is not name.session or chunks >= old.chunks):
        known.name = Name(name.session, name.path, chunks)


def common_keys(a: Sequence[PageKey], b: Sequence[PageKey]) -> int:
    """How many leading keys two prompts share."""
    shorter = min(len(a), len(b))
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), shorter)


def common_bytes(a: bytes, b: bytes) -> int:
    """How many leading bytes two strings of tokens share."""
    shorter = min(len(a), len(b))
    if a.startswith(b) or b.startswith(a):
        return shorter
    pairs = shorter // _PAIR.itemsize  # of tokens: eight bytes are compared as quickly as one
    x, y = np.frombuffer(a, _PAIR, pairs), np.frombuffer(b, _PAIR, pairs)
    for start in range(0, pairs, _COMPARED_AT_ONCE):
        differ = x[start : start + _COMPARED_AT_ONCE] != y[start : start + _COMPARED_AT_ONCE]
        first = int(differ.argmax())
        if differ[first]:
            at = (start + first) * _PAIR.itemsize
            return at + TOKEN_BYTES * (a[at : at + TOKEN_BYTES] == b[at : at + TOKEN_BYTES])
    return pairs * _PAIR.itemsize
