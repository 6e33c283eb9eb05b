"""Identities and keys: what decides a page's bytes besides its tokens, and how a page is found.

A **key** is the XXH3-128 of the parent's key and the chunk's token ids; the first parent is the digest of the
identity. So a key stands for a whole prefix under one identity. XXH3 is not cryptographic, and need not be,
because a key only *finds* a page. The store then compares the tokens and the identity that are stored with
the page, and they decide whether it is the right page. (Three CVEs of inference engines came from trusting
the hash alone.)

Computing the keys of 100K tokens in 64-token chunks takes 0.4 ms (on the 2-core development machine).
"""

from __future__ import annotations

import array
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from typing import NewType, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tierstore import native
from tierstore.arguments import text, whole_number
from tierstore.errors import SpecError, UsageError
from tierstore.groups import Group, GroupRule, Past, groups_of
from tierstore.spec import KVSpec, has_whole_pages, is_cross

PageKey = NewType("PageKey", bytes)
"""The 16-byte key of a page."""

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer]
Digest = Callable[[bytes], bytes]

KEY_BYTES = 16
_WORTH_A_CALL = 32  # least number of chunks for the compiled part
TOKEN_BYTES = 4
TOKEN_DTYPE = np.dtype("<u4")
NAME_BYTES = 32
LEAST_NAMED_TOKENS = NAME_BYTES // TOKEN_BYTES
"""Least chunk size of named pages, because a page's name is stored in the place of its tokens."""


@dataclass(frozen=True)
class Identity:
    """Everything besides tokens that changes a page's bytes or the right to read them.

    Two pages with the same tokens are interchangeable only if all fields of their identities are equal.
    ``layout`` is ``KVSpec.describe()``, which covers layers, heads, dtype and chunk size. Raise
    :class:`UsageError` for a field that is not text.
    """

    model: str  # a digest of the configuration, or a name for one set of weights
    layout: str
    revision: str = ""  # revision of the weights
    adapter: str = ""  # LoRA or similar
    codec: str = "raw"
    rope: str = ""
    shard: str = "tp0/1,pp0/1"
    tenant: str = ""  # a salt: pages of one tenant are invisible to all other tenants

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            text(f"an identity's {name}", value)

    @classmethod
    def of(cls, spec: KVSpec, *, model: str, **fields: str) -> Identity:
        """Return the identity of pages with the layout of ``spec``."""
        return cls(model=model, layout=spec.describe(), **fields)

    @cached_property
    def whole_pages(self) -> bool:
        """Whether a page is found only as a whole, by its key: pages of an opaque or hashed layout, and pages
        with a recurrent state. The page of a partial chunk is not stored in such a layout.

        An engine that keeps opaque pages also makes their keys, which may stand for more than tokens (an
        image, an adapter). Equal tokens under another key are another page.
        """
        return has_whole_pages(self.layout)

    @cached_property
    def groups(self) -> tuple[Identity, ...]:
        """The identity of each layer group's pages: this identity with the layout of one group's pages. A
        model with a single group of chained pages has only this identity."""
        layouts = [layout for layout, _ in _page_layouts(self.layout)]
        return tuple(self if layout == self.layout else replace(self, layout=layout) for layout in layouts)

    @cached_property
    def chain(self) -> Identity:
        """The identity whose digest is the root of a prompt's keys: the identity of the first group with
        chained pages, or this identity if no group has chained pages."""
        pairs = zip(self.groups, _page_layouts(self.layout), strict=True)
        return next((identity for identity, (_, named) in pairs if not named), self)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over all fields, in 32 bytes. Equal digests mean equal identities."""
        return hashlib.sha256(msgspec.json.encode(sorted(asdict(self).items()))).digest()


def nested_tenant(outer: str, inner: str) -> str:
    """Return the tenant of an identity in which a client with the tenant ``outer`` has set the tenant
    ``inner``. A client may distinguish its own tenants, but cannot leave the tenant of its key."""
    return msgspec.json.encode([outer, inner]).decode()


def outer_tenant(tenant: str) -> str | None:
    """Return the client's tenant in a :func:`nested_tenant`; None for a tenant that is not nested."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(tenant, type=tuple[str, str])[0]
    return None


@lru_cache(maxsize=1024)
def _page_layouts(layout: str) -> tuple[tuple[str, bool], ...]:
    """Return the layout of each layer group's pages, and whether the pages are named. A text that is not a
    layout counts as one group."""
    try:
        groups = groups_of(KVSpec.parse(layout))
    except SpecError:
        return ((layout, False),)
    return tuple((group.spec.describe(), group.named) for group in groups)


@dataclass(frozen=True, slots=True)
class PromptInput:
    """An input of a prompt that cross-attention layers read, such as an image. A hit of more than ``start``
    tokens needs the input's pages. ``content`` is a SHA-256 over everything that changes the encoder's
    ``rows`` rows. Raise :class:`UsageError` for other types, and for less than one row."""

    start: int
    content: bytes
    rows: int

    def __post_init__(self) -> None:
        whole_number("start", self.start, least=0)
        if not isinstance(self.content, bytes) or len(self.content) != NAME_BYTES:
            raise UsageError(f"content must be a digest of {NAME_BYTES} bytes, got {self.content!r:.80}")
        whole_number("rows", self.rows, least=1)


class Prompt:
    """A token sequence cut into chunks, with the keys and names of its pages in every layer group. It grows
    as tokens are generated.

    **Chained pages** are found by ``keys``, one for each full chunk. (If a second group has chained pages,
    :meth:`keys_of` returns the keys of its pages.)

    **Named pages** are found by :meth:`names_at`. A name is a SHA-256 over the model's identity and the
    tokens of all chunks up to the page's end. The name is stored in the place of the tokens, so all of its
    256 bits are compared. (XXH3 would not be enough: an attacker can construct collisions, and a chunk's own
    tokens say nothing about earlier tokens.) The name of the page of a partial last chunk covers the tokens
    of that chunk. Such a page is found only by a hit that ends exactly at the page's end.

    **Cross attention** has named pages for each of the prompt's ``inputs``. The name of such a page depends
    on the input alone, and not on tokens. Other keys and names do not depend on the inputs, so the tokens
    behind an input must differ between inputs.

    **Embeddings** are named pages, too (:meth:`of_input`). Their names hash the content of the input
    (``root``) in the place of tokens.

    Tokens are stored as little-endian uint32. Not thread-safe: a prompt belongs to one sequence.
    """

    __slots__ = (
        "_data",
        "_digest",
        "_input_names",
        "_more_keys",
        "_names",
        "chunk_tokens",
        "identity",
        "inputs",
        "keys",
        "named",
        "pages_before",
        "points",
        "root",
    )

    def __init__(
        self,
        identity: Identity,
        tokens: TokenIds = (),
        *,
        chunk_tokens: int,
        digest: Digest = xxhash.xxh3_128_digest,
    ) -> None:
        self.identity = identity
        self.named = False
        """Whether the caller has named these pages: see :meth:`named_pages`."""
        self.pages_before = 0
        self.root = identity.digest
        """32 bytes that take the place of a parent's name for the first page."""
        self.chunk_tokens = whole_number("chunk_tokens", chunk_tokens, least=1)
        self.inputs: tuple[PromptInput, ...] = ()
        """The inputs of cross-attention layers, in prompt order. Set by :meth:`place`."""
        self.keys: list[PageKey] = []
        self.points: dict[int, list[int]] = {}
        """Save points (tokens) of the conversation that this prompt continues, by group with named pages."""
        self._digest = digest
        self._data = bytearray()
        # Computed when first requested:
        self._input_names: dict[int, list[bytes]] = {}  # names of inputs' pages by group
        self._names: list[bytes] = []  # names of whole chunks
        # keys by group, for all groups with chained pages but the first
        self._more_keys: dict[int, list[PageKey]] = {}
        self.extend(tokens)

    @classmethod
    def with_keys(
        cls, identity: Identity, token_bytes: bytes, keys: Sequence[PageKey], *, chunk_tokens: int
    ) -> Prompt:
        """Return a prompt whose keys were computed elsewhere. There is one key for each full chunk."""
        prompt = cls(identity, chunk_tokens=chunk_tokens)
        prompt._data += token_bytes
        prompt.keys.extend(keys)
        return prompt

    @classmethod
    def with_names(
        cls,
        identity: Identity,
        token_bytes: bytes,
        keys: Sequence[PageKey],
        *,
        chunk_tokens: int,
        pages_before: int = 0,
    ) -> Prompt:
        """Return a list of pages that the caller has named. Each page is found by its own key and token
        bytes, independently of all other pages, so any page may be missing. This is for whole pages (opaque
        pages, and states) of a caller that has no chain, or keeps only the chain's end. The last pages of a
        prompt are evicted first, so pass the number of earlier pages of the prompt as ``pages_before``, if it
        is known. Raise :class:`UsageError` unless there is a key for each chunk.

        >>> spec = KVSpec.opaque(4096, chunk_tokens=8)
        >>> windows = Identity.of(spec, model="m")
        >>> keys = [PageKey(b"1" * 16), PageKey(b"2" * 16)]
        >>> Prompt.with_names(windows, bytes(64), keys, chunk_tokens=8)
        Prompt(16 tokens, 2 full chunks)
        """
        if not identity.whole_pages:
            raise UsageError("named pages are found whole: their layout must be opaque, hashed, or a state")
        if len(token_bytes) != len(keys) * chunk_tokens * TOKEN_BYTES:
            raise UsageError(
                f"{len(keys)} named pages need {chunk_tokens} tokens each, got {len(token_bytes)} bytes"
            )
        prompt = cls.with_keys(identity, token_bytes, keys, chunk_tokens=chunk_tokens)
        prompt.named = True
        prompt.pages_before = pages_before
        return prompt

    @classmethod
    def named_pages(
        cls, identity: Identity, names: Sequence[bytes], *, chunk_tokens: int, pages_before: int = 0
    ) -> Prompt:
        """Return named pages as :meth:`with_names` does. Each page is found by a name of :data:`NAME_BYTES`,
        such as a cryptographic hash of everything that changes the page's bytes. The name is stored in the
        place of the tokens and compared as a whole, so a chunk must have at least :data:`LEAST_NAMED_TOKENS`
        tokens."""
        keys, token_bytes = named_chunks(names, chunk_tokens)
        return cls.with_names(
            identity, token_bytes, keys, chunk_tokens=chunk_tokens, pages_before=pages_before
        )

    @classmethod
    def of_input(cls, identity: Identity, content: bytes, rows: int, *, chunk_tokens: int) -> Prompt:
        """Return the pages of the embedding of one input, which has ``rows`` rows. ``content`` is a SHA-256
        over all parts of the input that change the embedding. The identity covers the encoder's weights and
        the processor's configuration. The prompt's length is ``rows``, rounded up to whole pages of
        ``chunk_tokens`` rows. Raise :class:`UsageError` for other types, and for less than one row.

        >>> import tierstore
        >>> spec = KVSpec.embedding(width=64, dtype="float32")
        >>> with tierstore.open(None, spec, host_bytes=1 << 20) as store:
        ...     image = store.embedding(hashlib.sha256(b"pixels").digest(), rows=100)
        ...     _ = store.save(image, [bytes(spec.page_bytes)] * 2).wait()
        ...     with store.lookup(image) as hit:
        ...         image, hit.tokens
        (Prompt(128 tokens, 2 full chunks), 128)
        """
        rows = PromptInput(0, content, rows).rows
        prompt = cls(identity, chunk_tokens=chunk_tokens)
        prompt.root = hashlib.sha256(identity.digest + content + rows.to_bytes(8, "little")).digest()
        prompt._data += bytes(-(-rows // chunk_tokens) * chunk_tokens * TOKEN_BYTES)
        prompt._extend_keys(prompt.keys, identity.chain)
        return prompt

    def part(self, chunks: Sequence[int]) -> Prompt:
        """Return some whole chunks of this prompt as a prompt: the leading chunks if pages are chained, any
        chunks if they are named."""
        keys = [self.keys[at] for at in chunks]
        tokens = b"".join(map(self.chunk, chunks))
        part = Prompt.with_keys(self.identity, tokens, keys, chunk_tokens=self.chunk_tokens)
        part.named, part.root = self.named, self.root
        return part

    def copy(self) -> Prompt:
        """Return a prompt that begins like this one and grows independently. No key is computed again."""
        twin = Prompt.with_keys(self.identity, bytes(self._data), self.keys, chunk_tokens=self.chunk_tokens)
        twin._digest = self._digest
        twin.named, twin.pages_before, twin.root = self.named, self.pages_before, self.root
        twin._names = list(self._names)
        twin._more_keys = {group: list(keys) for group, keys in self._more_keys.items()}
        twin.inputs = self.inputs
        twin.points = {group: list(points) for group, points in self.points.items()}
        return twin

    def __len__(self) -> int:
        """Return the number of tokens in the prompt."""
        return len(self._data) // TOKEN_BYTES

    def __repr__(self) -> str:
        return f"Prompt({len(self)} tokens, {len(self.keys)} full chunks)"

    def extend(self, tokens: TokenIds) -> None:
        """Append ``tokens``. Raise :class:`UsageError` for ids outside 0 … 2³²-1, and for the prompt of an
        input, which cannot grow."""
        if self.root != self.identity.digest:
            raise UsageError(
                "the embedding of an input does not grow: give all of its rows to Store.embedding"
            )
        self._data += encode_tokens(tokens)
        self._extend_keys(self.keys, self.identity.chain)

    def chunk(self, index: int) -> bytes:
        """Return the token bytes of chunk ``index``. The last chunk may be partial."""
        width = self.chunk_tokens * TOKEN_BYTES
        return bytes(self._data[index * width : (index + 1) * width])

    def chunks(self, first: int = 0) -> Iterator[bytes]:
        """Return the token bytes of each full chunk from ``first`` on."""
        width = self.chunk_tokens * TOKEN_BYTES
        data = bytes(self._data)
        return (data[start : start + width] for start in range(first * width, len(self.keys) * width, width))

    @property
    def tail(self) -> bytes:
        """The token bytes after the last full chunk."""
        return bytes(self._data[len(self.keys) * self.chunk_tokens * TOKEN_BYTES :])

    @property
    def tokens(self) -> npt.NDArray[np.uint32]:
        """A copy of the token ids."""
        return np.frombuffer(bytes(self._data), TOKEN_DTYPE)

    @property
    def token_bytes(self) -> bytes:
        """A copy of the token ids, as little-endian uint32."""
        return bytes(self._data)

    # -- keys and names of its pages -----------------------------------------------------------------

    @property
    def identities(self) -> Sequence[Identity]:
        """The identity of each layer group's pages."""
        return self.identity.groups

    def identity_of(self, group: int) -> Identity:
        """Return the identity of a layer group's pages. Named pages belong to one group, so the result is the
        same for any ``group``."""
        return self.identity if self.named else self.identities[group]

    def keys_of(self, group: int) -> list[PageKey]:
        """Return the keys of the full chunks in a group with chained pages."""
        identity = self.identities[group]
        if identity is self.identity.chain:
            return self.keys
        keys = self._more_keys.setdefault(group, [])
        self._extend_keys(keys, identity)
        return keys

    def tail_key(self, group: int = 0) -> PageKey:
        """Return the key of the partial chunk at the end. (The hash covers the chunk's length.)"""
        keys = self.keys_of(group)
        return PageKey(self._digest(self._parent_key(keys, self.identity.groups[group]) + self.tail))

    def place(self, inputs: Sequence[PromptInput]) -> None:
        """Set the inputs that cross-attention layers read. Tokens behind an input must differ between inputs,
        because keys depend on tokens only. Raise :class:`UsageError` for a model without cross attention, and
        for inputs that are not in order or not within the prompt."""
        if inputs and not any(is_cross(each.layout) for each in self.identities):
            raise UsageError("this model has no cross-attention layers, which read the inputs of a prompt")
        starts = [-1, *(each.start for each in inputs), len(self)]
        if any(one >= other for one, other in pairwise(starts)):
            raise UsageError(f"inputs must begin at ascending tokens of the prompt, got {starts[1:-1]}")
        self.inputs = tuple(inputs)
        self._input_names = {}

    def bound(self, group: Group) -> Group:
        """Return a layer group of the model with its rule for this prompt; a rule for cross attention depends
        on the prompt's inputs."""
        if group.rule.past is not Past.CROSS:
            return group
        inputs = ((each.start, each.rows) for each in self.inputs)
        return replace(group, rule=GroupRule.cross(inputs, self.chunk_tokens))

    def names_of(self, group: int, ends: Sequence[int]) -> list[bytes]:
        """Return the names of the pages of a group that end at these tokens, which are at least 1. For cross
        attention, ``ends`` counts rows."""
        if self.named or not is_cross(self.identities[group].layout):
            return self.names_at(ends)
        names = self._input_names.get(group)
        if names is None:
            names = [name for number in range(len(self.inputs)) for name in self._names_in(group, number)]
            self._input_names[group] = names
        return [names[end // self.chunk_tokens - 1] for end in ends]

    def _names_in(self, group: int, number: int) -> list[bytes]:
        given, identity = self.inputs[number], self.identities[group]
        pages = Prompt.of_input(identity, given.content, given.rows, chunk_tokens=self.chunk_tokens)
        return pages.names(len(pages.keys))

    def names_at(self, ends: Sequence[int]) -> list[bytes]:
        """Return the names of the pages that end at these tokens, which are at least 1."""
        names = self.names(max(ends, default=0) // self.chunk_tokens)
        return names_at(ends, self.chunk_tokens, names, self.root, self.chunk)

    def names(self, chunks: int) -> list[bytes]:
        """Return the names of at least the first ``chunks`` whole chunks."""
        if self.named:
            return [chunk[:NAME_BYTES] for chunk in self.chunks()]
        known = len(self._names)
        if known < chunks:
            before = self._names[-1] if self._names else self.root
            self._names += [
                before := page_name(before, chunk) for chunk in islice(self.chunks(known), chunks - known)
            ]
        return self._names

    def pages_at(self, group: int, ends: Sequence[int]) -> Prompt:
        """Return those pages of a layer group (one with named pages) that end at the tokens ``ends``."""
        # No ``pages_before``: superseded pages are evicted first, wherever they are in the prompt.
        names = self.names_of(group, ends)
        return Prompt.named_pages(self.identities[group], names, chunk_tokens=self.chunk_tokens)

    def pages_of_input(self, group: int, number: int) -> Prompt:
        """Return the pages of input ``number`` in a group of cross-attention layers. The pages of an input
        are the same at any position in any prompt of the model."""
        names = self._names_in(group, number)
        return Prompt.named_pages(self.identities[group], names, chunk_tokens=self.chunk_tokens)

    def pages_of(self, group: int) -> Prompt:
        """Return the pages of all whole chunks in one group, chained or named, to copy them to another store
        (:mod:`tierstore.packs`)."""
        layout, named = _page_layouts(self.identity.layout)[group]
        if not named and layout == self.identity.layout:
            return self
        if named:
            whole = len(self.keys) * self.chunk_tokens
            rule = self.bound(groups_of(KVSpec.parse(self.identity.layout))[group]).rule
            if rule.past is not Past.CROSS:
                rule = GroupRule.all()
            return self.pages_at(group, rule.ends(whole, self.chunk_tokens))
        identity = self.identity.groups[group]
        keys = self.keys_of(group)
        return Prompt.with_keys(identity, self.token_bytes, keys, chunk_tokens=self.chunk_tokens)

    def _parent_key(self, keys: Sequence[PageKey], identity: Identity) -> bytes:
        return keys[-1] if keys else self._digest(identity.digest)

    def _extend_keys(self, keys: list[PageKey], identity: Identity) -> None:
        width = self.chunk_tokens * TOKEN_BYTES
        data = bytes(memoryview(self._data)[len(keys) * width :])
        keys.extend(chunk_keys(self._parent_key(keys, identity), data, width, self._digest))


def page_name(before: bytes, tokens: bytes) -> bytes:
    """Return the name of the page with ``tokens`` (the token bytes of one chunk, or of its beginning) that
    follows the page named ``before``. For the first page of a prompt, ``before`` is the digest of the model's
    identity.

    A name is a SHA-256, so comparing names is as safe as comparing all tokens up to the page's end.

    >>> len(page_name(bytes(NAME_BYTES), bytes(64)))
    32
    """
    return hashlib.sha256(before + tokens).digest()


def names_at(
    ends: Sequence[int],
    chunk_tokens: int,
    names: Sequence[bytes],
    root: bytes,
    chunk: Callable[[int], bytes],
) -> list[bytes]:
    """Return the names of the pages that end at these tokens. ``names`` has the names of all whole chunks,
    ``root`` takes the place of a name before the first chunk, and ``chunk(i)`` returns the token bytes of
    chunk ``i``."""
    found = []
    for end in ends:
        whole, tokens = divmod(end, chunk_tokens)
        before = names[whole - 1] if whole else root
        # A partial chunk is shorter than a whole chunk, so its name differs from all names of whole chunks.
        found.append(page_name(before, chunk(whole)[: tokens * TOKEN_BYTES]) if tokens else before)
    return found


def named_chunks(names: Sequence[bytes], chunk_tokens: int) -> tuple[list[PageKey], bytes]:
    """Return the keys of pages with these names, and the bytes that are stored in the place of their
    tokens."""
    width = chunk_tokens * TOKEN_BYTES
    token_bytes = b"".join([name.ljust(width, b"\0") for name in names])
    return [PageKey(name[:KEY_BYTES]) for name in names], token_bytes


def root_key(identity: Identity) -> bytes:
    """Return the key that takes the place of a parent's key for a prompt's first chunk."""
    return xxhash.xxh3_128_digest(identity.digest)


def chunk_keys(
    parent: bytes, data: bytes, width: int, digest: Digest = xxhash.xxh3_128_digest
) -> list[PageKey]:
    """Return the keys of the full chunks of ``data``, which have ``width`` bytes each. ``parent`` is the key
    of the chunk before ``data``."""
    if len(data) < width:
        return []
    count = len(data) // width
    fits = native.LEAST_HASHED - KEY_BYTES <= width <= native.MOST_CHUNK and count >= _WORTH_A_CALL
    if native.LIBRARY is not None and fits and digest is xxhash.xxh3_128_digest:
        keys = np.empty(count, f"V{KEY_BYTES}")
        native.LIBRARY.tierstore_chunk_keys(parent, data, count, width, keys.ctypes.data)
        return cast(list[PageKey], keys.tolist())
    # numpy cuts the chunks and the loop only hashes them, which takes 0.2 µs a chunk.
    chunks = np.frombuffer(data, f"V{width}", count).tolist()
    return cast(list[PageKey], [parent := digest(parent + chunk) for chunk in chunks])


def encode_tokens(tokens: TokenIds) -> bytes:
    """Return token ids as little-endian uint32 bytes. A list of 100K ints takes 1–2 ms; an array of uint32
    takes almost no time."""
    if isinstance(tokens, np.ndarray) and tokens.dtype == TOKEN_DTYPE and tokens.ndim == 1:
        return tokens.tobytes()
    if isinstance(tokens, list) and tokens and not isinstance(tokens[0], bool):
        try:
            return array.array("I", tokens).tobytes()  # numpy takes five times as long for a list
        except (TypeError, OverflowError):
            pass  # the code below raises with a reason
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError) as error:
        raise UsageError("tokens must be a flat sequence of integers") from error
    if ids.size == 0:
        return b""
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"tokens must be a flat sequence of integers, got {ids.dtype} of shape {ids.shape}")
    if ids.dtype != TOKEN_DTYPE and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF):
        raise UsageError("token ids must be between 0 and 2³²-1")
    return ids.astype(TOKEN_DTYPE, copy=False).tobytes()
