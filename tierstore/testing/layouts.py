"""Models with one layer group or several, for the conformance suites, with the page bytes and hits that the
suites expect.

>>> from tierstore.testing.layouts import LAYOUTS
>>> [layout.name for layout in LAYOUTS]
['full', 'full+window', 'full+state', 'full+window+state']
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tierstore import Hit, KVSpec, LayerGroup, LayerKind, Loaded, PagePool, Prompt, Store, open_pools
from tierstore.groups import Group, groups_of
from tierstore.testing import pages
from tierstore.tiers.group_pools import bytes_for
from tierstore.transfer import Transfer

FULL = LayerGroup(LayerKind.FULL_ATTENTION, (0, 1), 1, 32)
WINDOW = LayerGroup(LayerKind.SLIDING_WINDOW, (2, 3), 1, 32, window=40)
STATE = LayerGroup(LayerKind.RECURRENT_STATE, (4,), state_bytes=8192)
CHUNK = 16
_WAIT_S = 30.0

ByGroup: TypeAlias = "list[list[bytes]]"


@dataclass(frozen=True)
class Layout:
    """A model whose pages have 8 KiB for 16 tokens in each layer group."""

    name: str
    spec: KVSpec
    groups: tuple[Group, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", groups_of(self.spec))

    def __str__(self) -> str:
        return self.name

    @property
    def single(self) -> bool:
        """Whether the model has only one layer group, so that a hit may end at any token."""
        return len(self.groups) == 1

    @property
    def chunk_bytes(self) -> int:
        """The bytes of the pages of one chunk, in all groups together."""
        return sum(group.page_bytes for group in self.groups)

    def pools(self, count: int) -> tuple[PagePool, ...]:
        """Return HBM pools, one for each group, with room for ``count`` pages each."""
        return open_pools(self.spec, bytes_for(self.spec.split(), [count] * len(self.groups)))

    # -- pages -------------------------------------------------------------------------------------------

    def pages_of(self, tokens: Sequence[int], group: int = 0) -> list[bytes]:
        """Return the bytes of a group's page for each chunk. The last chunk may be incomplete."""
        return pages.pages_of(tokens, self.groups[group].spec)

    def hit_of(self, same: int, saved: int) -> int:
        """Return the expected hit of a prompt that shares its first ``same`` tokens with a saved prompt of
        ``saved`` tokens."""
        return same if self.single or same == saved else same // CHUNK * CHUNK

    def chunks(self, tokens: int) -> list[range]:
        """Return the chunks that a hit of ``tokens`` tokens needs, by group."""
        return [group.chunks(tokens) for group in self.groups]

    def num_pages(self, tokens: int) -> int:
        """Return the number of pages that a hit of ``tokens`` tokens needs."""
        return sum(map(len, self.chunks(tokens)))

    def right(self, tokens: Sequence[int], count: int) -> ByGroup:
        """Return the expected bytes, by group, of a load of the first ``count`` tokens."""
        found = []
        for group in self.groups:
            content = self.pages_of(tokens[:count], group.number)
            found.append(self._matched(group, group.chunks(count), content, count))
        return found

    def _matched(
        self, group: Group, chunks: Iterable[int], by_chunk: Sequence[bytes], tokens: int
    ) -> list[bytes]:
        """Return the pages of a hit of ``tokens`` tokens. The last page is cut at the end of the hit, because
        a store guarantees no bytes behind it."""
        counts = {chunk: min(tokens - chunk * CHUNK, CHUNK) for chunk in chunks}
        return [pages.leading_tokens(by_chunk[chunk], count, group.spec) for chunk, count in counts.items()]

    # -- saving ------------------------------------------------------------------------------------------

    def start_save(
        self, store: Store, prompt: Prompt | Sequence[int], content: Sequence[Sequence[Any]], **options: Any
    ) -> list[Transfer[int]]:
        """Start to save the pages ``content[group]`` of every group."""
        return [store.save(prompt, each, group=group, **options) for group, each in enumerate(content)]

    def save(self, store: Store, tokens: Sequence[int], **options: Any) -> int:
        """Save all pages of a prompt. Return the number of tokens that every group has stored."""
        return self.save_prompt(store, tokens, tokens, **options)

    def save_prompt(
        self,
        store: Store,
        prompt: Prompt | Sequence[int],
        tokens: Sequence[int],
        *,
        first: int = 0,
        stop: int | None = None,
        **options: Any,
    ) -> int:
        """Save the chunks from ``first`` up to ``stop`` of a prompt, with the page bytes of ``tokens``."""
        content = [self.pages_of(tokens, group.number)[first:stop] for group in self.groups]
        saves = self.start_save(store, prompt, content, first=first, **options)
        return min([save.wait(_WAIT_S) for save in saves])

    def compute(self, store: Store, tokens: Sequence[int]) -> tuple[list[list[int]], int]:
        """Act as an engine: allocate HBM pages, write a prompt's bytes to them and save them. Return the
        pages by group, which the caller must release, and the number of tokens that every group has
        stored."""
        owned, stored = [], []
        prompt = store.prompt(tokens)
        for group in self.groups:
            content = self.pages_of(tokens, group.number)
            hbm_pages = store.allocate_hbm(len(content), group=group.number)
            assert hbm_pages is not None, "the pool is full"
            self.write_hbm(store, group.number, hbm_pages, content)
            saved = store.save_hbm(prompt, hbm_pages, group=group.number)
            owned.append(hbm_pages)
            stored.append(saved.wait(_WAIT_S))
        return owned, min(stored)

    def write_hbm(self, store: Store, group: int, hbm_pages: Sequence[int], content: Sequence[bytes]) -> None:
        """Write ``content`` to pages of a group's pool."""
        for page, data in zip(hbm_pages, content, strict=True):
            store.pools[group].array[page] = np.frombuffer(data, np.uint8)

    # -- loading -----------------------------------------------------------------------------------------

    def buffers(self, hit: Hit) -> list[list[bytearray]]:
        """Return new buffers for the pages of a hit, by group."""
        return [[bytearray(group.page_bytes) for _ in hit.chunks(group.number)] for group in self.groups]

    def start_load(
        self, store: Store, hit: Hit, buffers: Sequence[Sequence[bytearray]], **options: Any
    ) -> Transfer[Loaded]:
        """Start to load a hit into buffers."""
        return store.load(hit, buffers[0] if self.single else buffers, **options)

    def load(self, store: Store, hit: Hit, **options: Any) -> tuple[int, ByGroup]:
        """Load a hit into new buffers. Return the number of loaded tokens, and the pages' bytes by group."""
        buffers = self.buffers(hit)
        loaded = self.start_load(store, hit, buffers, **options).wait(_WAIT_S)
        return loaded.tokens, self.came(hit.tokens, loaded.tokens, buffers)

    def came(self, asked: int, tokens: int, buffers: Sequence[Sequence[bytearray]]) -> ByGroup:
        """Return the loaded bytes by group, after a load of a hit of ``asked`` tokens that loaded
        ``tokens``."""
        found = []
        for group, into in zip(self.groups, buffers, strict=True):
            first = group.chunks(asked).start
            by_chunk = [b""] * first + [bytes(each) for each in into]
            found.append(self._matched(group, group.chunks(tokens), by_chunk, tokens))
        return found

    def read_hbm(self, store: Store, loaded: Loaded) -> ByGroup:
        """Return the bytes, by group, that a load into HBM has loaded."""
        found = []
        for group, part in zip(self.groups, loaded.groups, strict=True):
            chunks = range(part.first, part.first + len(part.pages))
            array = store.pools[group.number].array
            by_chunk = [b""] * part.first + [array[page].tobytes() for page in part.pages]
            found.append(self._matched(group, chunks, by_chunk, loaded.tokens))
        return found

    def release(self, store: Store, owned: Sequence[Sequence[int]]) -> None:
        """Release the HBM pages ``owned[group]`` of every group."""
        for group, hbm_pages in enumerate(owned):
            store.release_hbm(hbm_pages, group=group)

    def release_loaded(self, store: Store, loaded: Loaded) -> None:
        """Release the HBM pages of a load."""
        self.release(store, [part.pages for part in loaded.groups])

    def room(self, store: Store) -> list[int]:
        """Return the number of HBM pages that can be allocated, by group."""
        return [store.available_hbm(group=group.number) for group in self.groups]


LAYOUTS = (
    Layout("full", KVSpec((FULL,), "float32", CHUNK)),
    Layout("full+window", KVSpec((FULL, WINDOW), "float32", CHUNK)),
    Layout("full+state", KVSpec((FULL, STATE), "float32", CHUNK)),
    Layout("full+window+state", KVSpec((FULL, WINDOW, STATE), "float32", CHUNK)),
)
