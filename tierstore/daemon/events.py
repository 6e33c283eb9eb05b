"""KV events in vLLM's format, and the mapping from pages to blocks.

An event is a map with its ``type``, or with ``array`` encoding (vLLM up to 0.23) an array that begins with
it. A page is reported as one block of ``chunk_tokens`` tokens, named by the last 64 bits of its key, or as
several smaller blocks. Then the last block has the page's name, and the others have names derived from it.
``medium`` is ``CPU`` for the host tier and ``STORAGE`` for the disk. (Format: vllm/distributed/kv_events.py
of vLLM 0.32.)

An engine whose model is split over workers has one page per worker for each block. With several KV cache
groups of full attention it has one page for each group. It can use a block only with all of these pages. So a
block is reported when its last page has arrived, and removed with the first page that leaves. Pages of
sliding windows are not reported: a hit needs few of them, and followers do not know which.
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
_PART = re.compile(r"[a-z]+(\d+)/(\d+)")  # in an identity's shard: number and count
_WINDOWED = re.compile(r"\bwindow\d")


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """The base of all events, with their encoding."""


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
    """Return an event as followers of vLLM up to 0.23 read it: its name and then the fields known there."""
    fields = list(msgspec.structs.astuple(event))
    known = {BlockStored: 8, BlockRemoved: 2}.get(type(event), 0)
    return [type(event).__name__, *fields[:known]]


def block_hash(key: bytes) -> int:
    """Return the name of a page for followers: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def block_hashes(key: bytes, blocks: int) -> list[int]:
    """Return the names of the ``blocks`` blocks of a page."""
    inner = [xxhash.xxh3_64_intdigest(key + bytes([at])) for at in range(blocks - 1)]
    return [*inner, block_hash(key)]


@dataclass(frozen=True, slots=True)
class _PageEvents:
    """How pages of an identity are reported. They are part ``rank`` of ``parts``. Identities of one
    ``family`` differ only in their rank."""

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
        # Workers' pages may have different layouts: a pipeline stage may have one more layer.
        same = (identity.model, identity.revision, identity.adapter, identity.rope, identity.tenant)
        family = msgspec.json.encode((same, parts, followed.chunk_tokens))
        return cls(identity, tokens, followed.chunk_tokens // tokens, rank, parts, family)


class EventBlocks:
    """Converts changes of pages to events. ``block_tokens`` is the size of a block (0: a page's). Pages whose
    size is not a multiple of it are not reported."""

    def __init__(self, block_tokens: int = 0) -> None:
        self._block_tokens = block_tokens
        self._pages: dict[bytes, _PageEvents] = {}
        self._families: dict[bytes, dict[int, bytes]] = {}  # rank → identity
        # Only with several parts: a block in a tier → one bit for each part that is there.
        self._ranks: dict[int, int] = {}

    def add(self, digest: bytes, followed: Followed) -> list[bytes]:
        """Add an identity. Return the identities whose pages can be reported from now on: the identity
        itself, or all identities of its family if it is the last part."""
        if self._block_tokens and followed.chunk_tokens % self._block_tokens:
            return []
        if _WINDOWED.search(followed.identity.shard):
            return []
        pages = self._pages[digest] = _PageEvents.of(followed, self._block_tokens)
        family = self._families.setdefault(pages.family, {})
        family[pages.rank] = digest
        return list(family.values()) if len(family) == pages.parts else []

    def tells(self, identity: bytes) -> bool:
        """Return whether pages of an identity are reported: all parts are known."""
        pages = self._pages.get(identity)
        return pages is not None and len(self._families[pages.family]) == pages.parts

    def afresh(self) -> EventBlocks:
        """Return a copy that reports every page again, for another follower."""
        other = EventBlocks(self._block_tokens)
        other._pages, other._families = self._pages, self._families
        return other

    def events(self, changes: Iterable[Stored | PageRemoved]) -> Iterator[KvEvent]:
        """Yield the events for ``changes``, in order. Pages that follow one another share an event."""
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
        """Return whether followers are told of a change: the last page of a block has arrived, or one has
        left."""
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
        return True  # also for followers of a snapshot, who may know of more blocks

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
    """Return vLLM's extra keys: the adapter for every block, the salt for a prompt's first block."""
    adapter = [identity.adapter] if identity.adapter else []
    salt = [identity.tenant] if identity.tenant and begins else []
    keys = [adapter + salt or None, *([adapter or None] * (blocks - 1))]
    return keys if any(keys) else None
