"""The bytes of a pack: pure functions without I/O. Numbers are little-endian.

A pack is a head (sizes, signer), an index (identity, prompts), blocks (a table of checksums, then pages) and
a footer. The head with the index, each table, and the footer end with a *seal*: a SHA-256 over them and over
the previous seal, and the signature of that hash. A seal therefore covers everything before it. A block is
verified when its pages match its table, and a truncated pack is still good up to its last whole block.

All sizes follow from the head: the place of each page and the length of the pack. The sizes in the head are
compared with fixed limits before anything is allocated.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from tierstore.errors import SpecError, TierStoreError, UsageError
from tierstore.keys import KEY_BYTES, TOKEN_BYTES, Identity, PageKey, Prompt, chunk_keys, root_key
from tierstore.packs.hashing import PageHash
from tierstore.spec import KVSpec
from tierstore.units import GIB, MIB, format_size, round_up

MAGIC = b"TSKV\r\n\x1a\n"  # the line end shows whether a transfer in text mode has changed the file
ENCRYPTED_MAGIC = b"TSKVENC1"  # the beginning of an encrypted pack (encryption.py)
# Magic, version, number of following packs, bytes of the index, bytes of a page, pages, the signer's public
# key.
HEAD = struct.Struct("<8sIIQQQ32s24x")
SEAL = struct.Struct("<32s64s")  # SHA-256, Ed25519 signature (zeros: unsigned)
FOOTER = struct.Struct("<8sQ")  # magic, pages; then a seal
FOOTER_MAGIC = b"TSKVEND\n"
FOOTER_BYTES = FOOTER.size + SEAL.size
ENTRY = np.dtype([("xxh3", "<u8"), ("digest", "V32")])  # one page
UNSIGNED = bytes(32)

ALIGNMENT = 4096  # the format of a table: of every block, and of the pages in it
BLOCK_BYTES = 16 * MIB  # the bytes of pages in a block, which has at least one page
MOST_BLOCK_PAGES = 4096
MOST_INDEX_BYTES = 64 * MIB
MOST_PAGE_BYTES = GIB
MOST_PAGES = 1 << 32
MOST_PROMPTS = 1 << 16
MOST_FOLLOWING = 63
_MOST_LAYOUT_CHARS = 1 << 16
_IDENTITY_FIELDS = {field.name for field in fields(Identity)}

# msgspec checks the number of entries in an index against these limits before it allocates them.
_Bytes: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=MOST_INDEX_BYTES)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_MOST_LAYOUT_CHARS)]
_Fields: TypeAlias = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=64)]


class PackError(TierStoreError):
    """The file is not a pack, or it is damaged, truncated, not signed by the right key, or of another
    model."""


class PackedPrompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A prompt of whole chunks. Its first ``shared`` chunks equal those of the earlier prompt ``like``, with
    which their pages are packed. The pages of its other chunks follow one another in the pack. ``named``
    prompts have named pages, without parents (:meth:`Prompt.with_names`)."""

    tokens: _Bytes
    keys: _Bytes
    like: int = -1
    shared: int = 0
    # the name of this field in packs of earlier versions
    named: bool = msgspec.field(default=False, name="loose")

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def to_find(self, first: int, count: int) -> range:
        """Return the chunks to request from a store in order to find ``count`` pages from chunk ``first``
        on."""
        return range(first, first + count) if self.named else range(self.chunks)


class _Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    identity: _Fields
    prompts: Annotated[list[PackedPrompt], msgspec.Meta(min_length=1, max_length=MOST_PROMPTS)]
    following: Annotated[list[_Fields], msgspec.Meta(max_length=MOST_FOLLOWING)] = []


@dataclass(frozen=True)
class PageRun:
    """Pages ``page … page + count`` of a pack are the chunks ``chunk …`` of the prompt ``prompt``."""

    prompt: int
    chunk: int
    page: int
    count: int


@dataclass(frozen=True)
class Manifest:
    """The content of a head and an index: the identity of a pack's pages, and the place of each page.
    ``following`` are the identities of the packs that come after this one in the file. They belong to the
    other layer groups of the model.
    """

    identity: Identity
    spec: KVSpec
    prompts: tuple[PackedPrompt, ...]
    signer: bytes = UNSIGNED
    hash: PageHash = PageHash.SHA256  # also decides the version
    following: tuple[Identity, ...] = ()

    @classmethod
    def of(
        cls,
        spec: KVSpec,
        prompts: Sequence[Prompt],
        signer: bytes = UNSIGNED,
        *,
        hash: PageHash = PageHash.SHA256,
        following: Sequence[Identity] = (),
    ) -> Manifest:
        """Make a manifest of the whole chunks of ``prompts``, either all chains or all named pages. A prefix
        that prompts share is packed once, and so is each named page. Raise :class:`UsageError` for prompts
        without a whole chunk, or of several identities."""
        kinds = {(prompt.identity, prompt.named) for prompt in prompts}
        if len(kinds) > 1:
            raise UsageError(
                "the prompts of a pack must have one identity, and be either chains or named pages"
            )
        if not can_have(hash, prompts):
            raise UsageError("packs of named pages or of several layer groups need the hash blake3")
        packed = _named(prompts) if has_named(prompts) else _chains(prompts, spec.chunk_tokens * TOKEN_BYTES)
        if not packed:
            raise UsageError(f"nothing to pack: no prompt has at least {spec.chunk_tokens} stored tokens")
        return cls(prompts[0].identity, spec, tuple(packed), signer, hash, tuple(following))

    # -- sizes ---------------------------------------------------------------------------------------

    @cached_property
    def runs(self) -> tuple[PageRun, ...]:
        runs, page = [], 0
        for number, prompt in enumerate(self.prompts):
            runs.append(PageRun(number, prompt.shared, page, prompt.chunks - prompt.shared))
            page += prompt.chunks - prompt.shared
        return tuple(runs)

    @property
    def pages(self) -> int:
        return self.runs[-1].page + self.runs[-1].count

    @property
    def tokens(self) -> int:
        """The number of tokens of the pack's pages."""
        return self.pages * self.spec.chunk_tokens

    @property
    def page_bytes(self) -> int:
        return self.spec.page_bytes

    @property
    def block_pages(self) -> int:
        return block_pages(self.page_bytes)

    @property
    def blocks(self) -> int:
        return -(-self.pages // self.block_pages)

    def pages_of(self, block: int) -> int:
        """Return the number of pages of a block. The last one may have fewer."""
        return min(self.block_pages, self.pages - block * self.block_pages)

    def block_at(self, block: int) -> int:
        """Return the offset of a block. For the number after the last block, return the offset of the
        footer."""
        whole = table_bytes(self.block_pages) + round_up(self.block_pages * self.page_bytes, ALIGNMENT)
        if block < self.blocks or not block:
            return len(self.encoded) + block * whole
        last = self.pages_of(block - 1)
        return self.block_at(block - 1) + table_bytes(last) + round_up(last * self.page_bytes, ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """The length of the pack in bytes."""
        return self.block_at(self.blocks) + FOOTER_BYTES

    def runs_of(self, first: int, count: int) -> Iterator[PageRun]:
        """Yield the pages ``first … first + count`` of the pack, by prompt."""
        for run in self.runs:
            start, stop = max(run.page, first), min(run.page + run.count, first + count)
            if start < stop:
                yield PageRun(run.prompt, run.chunk + start - run.page, start, stop - start)

    def prompt(self, number: int) -> Prompt:
        return self._prompt(number, range(self.prompts[number].chunks))

    def _prompt(self, number: int, chunks: range) -> Prompt:
        packed, width = self.prompts[number], self.spec.chunk_tokens * TOKEN_BYTES
        tokens = packed.tokens[chunks.start * width : chunks.stop * width]
        keys = _keys(packed.keys[chunks.start * KEY_BYTES : chunks.stop * KEY_BYTES])
        prompt = Prompt.with_keys(self.identity, tokens, keys, chunk_tokens=self.spec.chunk_tokens)
        prompt.named = packed.named
        return prompt

    def pages_to_find(self, run: PageRun) -> tuple[Prompt, int]:
        """Return the prompt to request from a store in order to find the pages of a run, and the chunk of it
        that is the run's first page. For named pages, the prompt has only the run's pages."""
        chunks = self.prompts[run.prompt].to_find(run.chunk, run.count)
        return self._prompt(run.prompt, chunks), run.chunk - chunks.start

    # -- bytes ---------------------------------------------------------------------------------------

    @cached_property
    def head(self) -> bytes:
        """The bytes of head and index without their seal."""
        index = msgspec.msgpack.encode(
            _Index(asdict(self.identity), list(self.prompts), [asdict(each) for each in self.following])
        )
        if len(index) > MOST_INDEX_BYTES:
            raise UsageError(
                f"the tokens of these prompts take {format_size(len(index))}, but a pack has room for "
                f"{format_size(MOST_INDEX_BYTES)}: use several packs"
            )
        return (
            HEAD.pack(
                MAGIC,
                self.hash,
                len(self.following),
                len(index),
                self.page_bytes,
                self.pages,
                self.signer,
            )
            + index
        )

    @cached_property
    def encoded(self) -> bytes:
        """Return head and index with room for the seal, padded to the beginning of the first block."""
        return self.head.ljust(round_up(len(self.head) + SEAL.size, ALIGNMENT), b"\0")


@dataclass(frozen=True)
class Head:
    """A head that was read before its index. Its sizes are within the limits."""

    index_bytes: int
    page_bytes: int
    pages: int
    signer: bytes
    hash: PageHash
    following: int

    @classmethod
    def decode(cls, data: bytes) -> Head:
        """Decode a head. Raise :class:`PackError` if the head is malformed."""
        if data.startswith(ENCRYPTED_MAGIC):
            raise PackError("the pack is encrypted: give --key")
        if len(data) < HEAD.size or not data.startswith(MAGIC):
            raise PackError("this is not a pack: the beginning is wrong")
        _, version, following, index_bytes, page_bytes, pages, signer = HEAD.unpack_from(data)
        if version not in (versions := [each.value for each in PageHash]):
            raise PackError(
                f"the pack has version {version}, this tierstore reads {', '.join(map(str, versions))}"
            )
        if not (
            following <= (MOST_FOLLOWING if version > PageHash.SHA256 else 0)
            and 0 < index_bytes <= MOST_INDEX_BYTES
            and 0 < page_bytes <= MOST_PAGE_BYTES
            and 0 < pages <= MOST_PAGES
        ):
            raise PackError("the pack is damaged: its head has impossible sizes")
        return cls(index_bytes, page_bytes, pages, signer, PageHash(version), following)

    def manifest(self, index: bytes) -> Manifest:
        """Return the manifest of head and index. Raise :class:`PackError` if they are inconsistent."""
        try:
            decoded = msgspec.msgpack.decode(index, type=_Index)
            identity, *following = map(_identity, [decoded.identity, *decoded.following])
            spec = KVSpec.parse(identity.layout)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise PackError(f"the pack is damaged: its index cannot be read ({error})") from error
        except (SpecError, UsageError) as error:
            raise PackError(f"the pack's pages have a layout from another version: {error}") from error
        if not can_have(self.hash, decoded.prompts):
            raise PackError("the pack is damaged: version 1 has no named pages")
        _check_prompts(identity, spec, decoded.prompts)
        manifest = Manifest(identity, spec, tuple(decoded.prompts), self.signer, self.hash, tuple(following))
        if (manifest.pages, manifest.page_bytes, len(following)) != (
            self.pages,
            self.page_bytes,
            self.following,
        ):
            raise PackError("the pack is damaged: its index does not match its head")
        return manifest


def has_named(prompts: Iterable[Prompt | PackedPrompt]) -> bool:
    """Return whether any of these prompts has named pages."""
    return any(prompt.named for prompt in prompts)


def can_have(hash: PageHash, prompts: Iterable[Prompt | PackedPrompt]) -> bool:
    """Return whether a pack of these pages may have this hash. A pack with the hash of version 1 has no named
    pages."""
    return hash is not PageHash.SHA256 or not has_named(prompts)


def block_pages(page_bytes: int) -> int:
    """Return the number of pages in a whole block."""
    return max(min(BLOCK_BYTES // page_bytes, MOST_BLOCK_PAGES), 1)


def table_bytes(pages: int) -> int:
    """Return the size of a block's seal and table, up to its first page."""
    return round_up(SEAL.size + pages * ENTRY.itemsize, ALIGNMENT)


def head_digest(head: bytes) -> bytes:
    """Return the digest that the seal of head and index signs."""
    return hashlib.sha256(b"tskv head" + head).digest()


def block_digest(before: bytes, table: bytes) -> bytes:
    """Return the digest that the seal of a block signs. ``before`` is the digest in the previous seal."""
    return hashlib.sha256(b"tskv block" + before + table).digest()


def footer_digest(before: bytes, footer: bytes) -> bytes:
    return hashlib.sha256(b"tskv end" + before + footer).digest()


def encode_table(checksums: Sequence[int], digests: Sequence[bytes]) -> bytes:
    """Return a block's table, which has the XXH3-64 and the digest of each page."""
    table = np.empty(len(checksums), ENTRY)
    table["xxh3"] = checksums
    table["digest"] = np.frombuffer(b"".join(digests), "V32")
    return table.tobytes()


def decode_table(table: bytes) -> tuple[list[int], list[bytes]]:
    entries: npt.NDArray[np.void] = np.frombuffer(table, ENTRY)
    return entries["xxh3"].tolist(), entries["digest"].tolist()


def _identity(of: dict[str, str]) -> Identity:
    if of.keys() != _IDENTITY_FIELDS:
        raise PackError("the pack's identity has other fields than in this version")
    identity = Identity(**of)
    if len(identity.layout) > _MOST_LAYOUT_CHARS:
        raise PackError("the pack's page layout is too long")
    return identity


def _keys(keys: bytes) -> list[PageKey]:
    return [PageKey(keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


def _chains(prompts: Sequence[Prompt], width: int) -> list[PackedPrompt]:
    packed: list[PackedPrompt] = []
    for prompt in prompts:
        keys = b"".join(prompt.keys)
        tokens = prompt.token_bytes[: len(prompt.keys) * width]
        likeness = [_common(tokens, keys, other, width) for other in packed]
        shared = max(likeness, default=0)
        like = likeness.index(shared) if shared else -1
        if shared * KEY_BYTES < len(keys):
            packed.append(PackedPrompt(tokens, keys, like, shared))
    return packed


def _named(prompts: Sequence[Prompt]) -> list[PackedPrompt]:
    """Return the named pages of all prompts, each once."""
    pages = {
        key: chunk for prompt in prompts for key, chunk in zip(prompt.keys, prompt.chunks(), strict=True)
    }
    return [PackedPrompt(b"".join(pages.values()), b"".join(pages), named=True)] if pages else []


def _common(tokens: bytes, keys: bytes, other: PackedPrompt, width: int) -> int:
    """Return the number of leading chunks with equal keys and tokens."""
    most = min(len(keys), len(other.keys)) // KEY_BYTES
    ours, theirs = np.frombuffer(keys, "V16", most), np.frombuffer(other.keys, "V16", most)
    differ = np.flatnonzero(ours != theirs)
    count = int(differ[0]) if len(differ) else most
    while count and tokens[: count * width] != other.tokens[: count * width]:
        count -= 1  # reached if two different chunks have the same key
    return count


def _check_prompts(identity: Identity, spec: KVSpec, prompts: Sequence[PackedPrompt]) -> None:
    width, named = spec.chunk_tokens * TOKEN_BYTES, has_named(prompts)
    for number, prompt in enumerate(prompts):
        fits = (
            len(prompt.keys) % KEY_BYTES == 0
            and len(prompt.tokens) == prompt.chunks * width
            and 0 <= prompt.shared < prompt.chunks
            and (0 <= prompt.like < number if prompt.shared else prompt.like == -1)
            and not (named and (prompt.shared or not identity.whole_pages))
        )
        if fits and prompt.shared:
            other, shared = prompts[prompt.like], prompt.shared
            fits = (
                other.chunks >= shared
                and prompt.tokens[: shared * width] == other.tokens[: shared * width]
                and prompt.keys[: shared * KEY_BYTES] == other.keys[: shared * KEY_BYTES]
            )
        if not fits:
            raise PackError(f"the pack is damaged: its prompt {number} is inconsistent")
        if not identity.whole_pages:  # the keys of whole pages come from the engine and cannot be checked
            keys = b"".join(chunk_keys(root_key(identity), prompt.tokens, width))
            if keys != prompt.keys:
                raise PackError(f"the pack is damaged: the keys of prompt {number} do not match its tokens")
