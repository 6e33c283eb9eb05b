"""KV events as vLLM writes them, and how pages become the blocks that they tell of.

An event is a map with its ``type``, or with ``array`` encoding (vLLM up to 0.23) an array that begins with
it. A page is told of as one block of ``chunk_tokens`` tokens, by the last 64 bits of its key, or as several
smaller ones: then the last of them has the page's name, and the others names made from it. ``medium`` is
``CPU`` for the host tier and ``STORAGE`` for the disk. (Format: vllm/distributed/kv_events.py of vLLM 0.32.)

An engine whose model is split over workers keeps a page for each of them, one with several KV cache groups of
full attention a page for each of those, and it can use a block only when it has all of these. So a block is
told of when the last one has come, and is gone with the first that leaves. Pages of sliding windows are not
told of: a hit needs few of them, and followers do not know which."""

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
_PART = re.compile(r"[a-z]+(\d+)/(\d+)")  # of an identity's shard: which of how many
_WINDOWED = re.compile(r"\bwindow\d")


class KvEvent(msgspec.Struct, tag=True, omit_defaults=True):
    """What all events have in common: nothing but their encoding."""


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
    """What followers of vLLM up to 0.23 can read: the name, then the fields these have."""
    fields = list(msgspec.structs.astuple(event))
    known = {BlockStored: 8, BlockRemoved: 2}.get(type(event), 0)
    return [type(event).__name__, *fields[:known]]


def block_hash(key: bytes) -> int:
    """What others call a page by: the last 64 bits of its key."""
    return int.from_bytes(key[-8:], "big")


def block_hashes(key: bytes, blocks: int) -> list[int]:
    """The names of the ``blocks`` blocks of a page."""
    inner = [xxhash.xxh3_64_intdigest(key + bytes([at])) for at in range(blocks - 1)]
    return [*inner, block_hash(key)]


@dataclass(frozen=True, slots=True)
class _PageEvents:
    """What the pages of an identity are to followers. They are part ``rank`` of ``parts``; identities of one
    ``family`` differ in that only."""

    identity: Identity
    block_tokens: int
    blocks: int  # of a page
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
        # Workers' pages may be laid out differently: a stage of a pipeline may have a layer more.
        same = (identity.model, identity.revision, identity.adapter, identity.rope, identity.tenant)
        family = msgspec.json.encode((same, parts, followed.chunk_tokens))
        return cls(identity, tokens, followed.chunk_tokens // tokens, rank, parts, family)


class EventBlocks:
    """From what happens to pages to events. ``block_tokens`` is the size of a block (0: a page's); pages that
    are no multiple of it are not told of."""

    def __init__(self, block_tokens: int = 0) -> None:
        self._block_tokens = block_tokens
        self._pages: dict[bytes, _PageEvents] = {}
        self._families: dict[bytes, dict[int, bytes]] = {}  # rank → identity
        # Where there are several parts: a block in a tier → a bit for each of them that is there.
        self._ranks: dict[int, int] = {}

    def add(self, digest: bytes, followed: Followed) -> list[bytes]:
        """Pages of an identity may come and go now. The identities whose pages can be told of from here on,
        and could not before: itself, and those of the other parts once it is the last one."""
        if self._block_tokens and followed.chunk_tokens % self._block_tokens:
            return []
        if _WINDOWED.search(followed.identity.shard):
            return []
        pages = self._pages[digest] = _PageEvents.of(followed, self._block_tokens)
        family = self._families.setdefault(pages.family, {})
        family[pages.rank] = digest
        return list(family.values()) if len(family) == pages.parts else []

    def tells(self, identity: bytes) -> bool:
        """Whether pages of an identity are told of: all parts are known."""
        pages = self._pages.get(identity)
        return pages is not None and len(self._families[pages.family]) == pages.parts

    def afresh(self) -> EventBlocks:
        """For telling of everything from the beginning, to somebody else."""
        other = EventBlocks(self._block_tokens)
        other._pages, other._families = self._pages, self._families
        return other

    def events(self, changes: Iterable[Stored | PageRemoved]) -> Iterator[KvEvent]:
        """The events that tell of ``changes``, in order. Pages that follow one another share one."""
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
        """Whether followers are told of this: the last page of a block has come, or one has left."""
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
        return True  # to followers of a snapshot, too, who may have been told of more than we know

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
    """As vLLM has them: the adapter with every block, the salt with a prompt's first."""
    adapter = [identity.adapter] if identity.adapter else []
    salt = [identity.tenant] if identity.tenant and begins else []
    keys = [adapter + salt or None, *([adapter or None] * (blocks - 1))]
    return keys if any(keys) else None
