"""KV events in vLLM's format, and the mapping from pages to blocks.

An event is a map that contains its ``type``. With ``array`` encoding (for vLLM up to 0.23) an event is an
array that begins with the type. A page is reported as one block of ``chunk_tokens`` tokens, or as several
smaller blocks. A block's hash is the last 64 bits of the page's key. If a page has several blocks, this is
the hash of the last block, and the hashes of the other blocks are derived from the key. ``medium`` is ``CPU``
for the host tier and ``STORAGE`` for the disk. (Format: vllm/distributed/kv_events.py of vLLM 0.32.)

If a model is split over several workers, a block has one page per worker. If a model has several KV cache
groups of full attention, a block has one page per group. An engine can use a block only if all of its pages
are stored. So a block is reported as stored when its last page is stored, and as removed when one of its
pages is removed. Pages of sliding windows are not reported, because a follower does not know which of them a
hit needs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from tierstore.core.change_log import Followed, PageRemoved, Stored
from tierstore.index import Tier
from tierstore.keys import TOKEN_BYTES, TOKEN_DTYPE, Identity

_MEDIUM = {Tier.HBM: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE"}
_PART = re.compile(r"[a-z]+(\d+)/(\d+)")  # rank and number of ranks in an identity's ``shard``
_WINDOWED = re.compile(r"\bwindow\d")


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """The base class of all events, which defines their encoding."""


class BlockStored(KvEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(KvEvent):
    block_hashes: list[int]
    medium: str
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(KvEvent):
    pass


def as_array(event: KvEvent) -> list[object]:
    """Return an event as followers of vLLM up to 0.23 read it: its type and then the fields of that
    version."""
    fields = list(msgspec.structs.astuple(event))
    known = {BlockStored: 8, BlockRemoved: 2}.get(type(event), 0)
    return [type(event).__name__, *fields[:known]]


def block_hash(key: bytes) -> int:
    """Return the hash of a page's last block: the last 64 bits of the page's key."""
    return int.from_bytes(key[-8:], "big")


def block_hashes(key: bytes, blocks: int) -> list[int]:
    """Return the hashes of the ``blocks`` blocks of a page."""
    inner = [xxhash.xxh3_64_intdigest(key + bytes([at])) for at in range(blocks - 1)]
    return [*inner, block_hash(key)]


@dataclass(frozen=True, slots=True)
class _PageEvents:
    """How the pages of an identity are reported. A block consists of ``parts`` pages, and pages of this
    identity are number ``rank`` of them. Identities of one ``family`` differ only in their rank."""

    identity: Identity
    block_tokens: int
    blocks: int  # blocks of a page
    rank: int
    parts: int
    family: bytes

    @classmethod
    def of(cls, followed: Followed, block_tokens: int) -> _PageEvents:
        identity = followed.identity
        rank, parts = 0, 1
        for number, of in _PART.findall(identity.shard):
            rank, parts = rank * int(of) + int(number), parts * int(of)
        tokens = block_tokens or followed.chunk_tokens
        # The layout is not part of a family, because one pipeline stage may have more layers than another.
        same = (identity.model, identity.revision, identity.adapter, identity.rope, identity.tenant)
        family = msgspec.json.encode((same, parts, followed.chunk_tokens))
        return cls(identity, tokens, followed.chunk_tokens // tokens, rank, parts, family)


class EventBlocks:
    """Converts changes of pages to events. ``block_tokens`` is the number of tokens of a block (0: as many as
    a page has). Pages whose tokens are not a multiple of ``block_tokens`` are not reported."""

    def __init__(self, block_tokens: int = 0) -> None:
        self._block_tokens = block_tokens
        self._pages: dict[bytes, _PageEvents] = {}
        self._families: dict[bytes, dict[int, bytes]] = {}  # rank → identity
        # For blocks of several pages: hash of block and tier → one bit for each stored page.
        self._ranks: dict[int, int] = {}

    def add(self, digest: bytes, followed: Followed) -> list[bytes]:
        """Add an identity. Return the identities whose pages can be reported from now on: all identities of
        its family if the family is complete with this one; otherwise none."""
        if self._block_tokens and followed.chunk_tokens % self._block_tokens:
            return []
        if _WINDOWED.search(followed.identity.shard):
            return []
        pages = self._pages[digest] = _PageEvents.of(followed, self._block_tokens)
        family = self._families.setdefault(pages.family, {})
        family[pages.rank] = digest
        return list(family.values()) if len(family) == pages.parts else []

    def tells(self, identity: bytes) -> bool:
        """Return whether pages of an identity are reported: all identities of its family must be known."""
        pages = self._pages.get(identity)
        return pages is not None and len(self._families[pages.family]) == pages.parts

    def afresh(self) -> EventBlocks:
        """Return a copy that has reported no page yet, for another follower."""
        other = EventBlocks(self._block_tokens)
        other._pages, other._families = self._pages, self._families
        return other

    def events(self, changes: Iterable[Stored | PageRemoved]) -> Iterator[KvEvent]:
        """Yield the events for ``changes``, in order. Consecutive pages of one prompt share an event."""
        run: list[Stored | PageRemoved] = []
        for change in changes:
            if not self._whole(change):
                continue
            if run and not _continues(run[-1], change):
                yield self._event(run)
                run = []
            run.append(change)
        if run:
            yield self._event(run)

    def _whole(self, change: Stored | PageRemoved) -> bool:
        """Return whether to report a change: it stores the last missing page of a block, or removes a
        page."""
        if not self.tells(change.identity):
            return False
        pages = self._pages[change.identity]
        if pages.parts == 1:
            return True
        block = xxhash.xxh3_64_intdigest(bytes([change.tier]) + pages.family + change.key)
        ranks = self._ranks.get(block, 0)
        if isinstance(change, Stored):
            self._ranks[block] = ranks = ranks | 1 << pages.rank
            return ranks == (1 << pages.parts) - 1
        if ranks := ranks & ~(1 << pages.rank):
            self._ranks[block] = ranks
        else:
            self._ranks.pop(block, None)
        return True  # even if the block was incomplete: a snapshot may have reported it as complete

    def _event(self, run: Sequence[Stored | PageRemoved]) -> KvEvent:
        first, pages = run[0], self._pages[run[0].identity]
        hashes = [name for change in run for name in block_hashes(change.key, pages.blocks)]
        medium = _MEDIUM[first.tier]
        if isinstance(first, PageRemoved):
            return BlockRemoved(hashes, medium, group_idx=0, locality="LOCAL")
        tokens = b"".join(change.tokens for change in run if isinstance(change, Stored))
        assert len(tokens) == len(hashes) * pages.block_tokens * TOKEN_BYTES
        return BlockStored(
            hashes,
            block_hash(first.parent) if first.parent else None,
            np.frombuffer(tokens, TOKEN_DTYPE).tolist(),
            pages.block_tokens,
            None,
            medium,
            pages.identity.adapter or None,
            extra_keys=_extra_keys(pages.identity, len(hashes), begins=not first.parent),
            group_idx=0,
            locality="LOCAL",
        )


def _continues(before: Stored | PageRemoved, change: Stored | PageRemoved) -> bool:
    if change.tier is not before.tier or change.identity != before.identity:
        return False
    if isinstance(change, Stored):
        return isinstance(before, Stored) and change.parent == before.key
    return isinstance(before, PageRemoved)


def _extra_keys(identity: Identity, blocks: int, *, begins: bool) -> list[list[str] | None] | None:
    """Return vLLM's extra keys: the adapter for every block, and the tenant as cache salt for a prompt's
    first block."""
    adapter = [identity.adapter] if identity.adapter else []
    salt = [identity.tenant] if identity.tenant and begins else []
    keys = [adapter + salt or None, *([adapter or None] * (blocks - 1))]
    return keys if any(keys) else None
