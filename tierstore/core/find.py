"""Find a prompt's pages: first in the tree and, where the tree ends, in the index on disk.

The tree is read under the store's lock. The disk is read without the lock, because a page fault must never
delay other engines. The records found on disk are therefore checked again when they are added to the tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tierstore.core.state import StoreState
from tierstore.index import Match, Page, Tier, common_tokens
from tierstore.keys import Identity, PageKey, Prompt
from tierstore.tiers.disk import PageRecord

_LOOK_S = 2.0  # longest wait for a disk lookup; the disk finishes it later, which helps the next lookup
_MOST_LOOKS = 4  # disk lookups per call: more than one only if others evict or save the same prompt meanwhile
_MOST_COUNTED = 16  # most children in the tree that are counted to find out if a disk lookup can be skipped

ChunkAt = Callable[[int], "tuple[PageKey | None, bytes]"]
"""Return the key and the token bytes of the prompt's chunk with this number. The partial chunk at the end has
no key. Chunks beyond the end are empty."""


@contextmanager
def find(state: StoreState, prompt: Prompt, max_tokens: int, page_bytes: int) -> Iterator[Match]:
    """Yield the longest stored prefix of ``prompt``. The ``with`` block runs under the store's lock, and the
    match stays in the tree while it runs. Raise :class:`~tierstore.errors.StoreClosedError`."""

    def chunk(index: int) -> tuple[PageKey | None, bytes]:
        return prompt.keys[index] if index < len(prompt.keys) else None, prompt.chunk(index)

    looks = 0
    match: Match | None = None
    seen = -1
    while True:
        with state.lock:
            state.require_open()
            root = state.root(prompt.identity, page_bytes)
            if match is None or state.index.changes != seen:
                match = state.index.tree.match(root, prompt, max_tokens)
                seen = state.index.changes
            parent = None
            if looks < _MOST_LOOKS:
                parent = frontier(state, root, match, prompt.identity, prompt.chunk_tokens, chunk)
            if parent is None or match.tokens >= max_tokens:
                yield match
                return
        woken = _load_below(state, parent, prompt, max_tokens)
        looks = looks + 1 if woken else _MOST_LOOKS


def frontier(
    state: StoreState, root: Page, match: Match, identity: Identity, chunk_tokens: int, chunk: ChunkAt
) -> Page | None:
    """Return the last whole page of a match below ``root`` (which may be any page) if the disk may have the
    next page of the prompt; None otherwise. ``chunk(0)`` is the prompt's chunk right below ``root``. Needs
    the lock."""
    whole = match.tokens // chunk_tokens
    page = match.pages[whole - 1] if whole else root
    on_disk = page.copies[Tier.DISK] is not None or page.parent is None
    if state.disk is None or not state.health.readable or not state.may_reload:
        return None
    if not page.serial or not on_disk:
        return None
    if not state.disk.may_lead(page.serial, identity.digest, *chunk(whole), whole=identity.whole_pages):
        return None
    return None if _all_loaded(state, page) else page


def _all_loaded(state: StoreState, page: Page) -> bool:
    """Return whether all children that the disk has of ``page`` are already in the tree; False for a root,
    whose children are not counted."""
    if state.page_table is None or page.parent is None:
        return False
    below = state.page_table.children(page.serial)
    if len(page.children) > _MOST_COUNTED:
        return not below
    ready = (copy for child in page.all_children() if (copy := child.copies[Tier.DISK]) is not None)
    return sum(copy.ready for copy in ready) >= below


def _load_below(state: StoreState, parent: Page, prompt: Prompt, max_tokens: int) -> bool:
    """Load the pages of a prompt that the disk has below ``parent`` into the tree. Return whether another
    disk lookup could find more."""
    assert state.disk is not None
    disk = state.disk
    first = parent.depth  # the root's is 0
    identity = prompt.identity.digest
    wanted = min(max_tokens // prompt.chunk_tokens, len(prompt.keys))
    chunks = zip(prompt.keys[first:wanted], prompt.chunks(first), strict=False)

    def look() -> list[PageRecord]:
        records = disk.find(parent.serial, identity, chunks)
        if prompt.identity.whole_pages:
            return records
        last = records[-1].serial if records else parent.serial
        rest = prompt.chunk(first + len(records))
        similar = disk.find_similar(last, identity, rest)
        best = max(similar, key=lambda record: common_tokens(record.tokens, rest), default=None)
        return [*records, best] if best is not None else records

    path = _looked(state, look)
    with state.lock:
        return path is not None and not state.reload(parent, path)


def load_named(
    state: StoreState, root: Page, identity: Identity, chunks: Sequence[tuple[PageKey, bytes]]
) -> None:
    """Load named pages that are on disk into the tree, as children of ``root``. ``chunks`` has the keys and
    tokens of these pages."""
    assert state.disk is not None
    disk = state.disk

    def look() -> list[PageRecord]:
        return [record for chunk in chunks for record in disk.find(root.serial, identity.digest, [chunk])]

    records = _looked(state, look) or []
    with state.lock:
        for record in records:
            state.reload(root, [record])


def _looked(state: StoreState, look: Callable[[], list[PageRecord]]) -> list[PageRecord] | None:
    """Return the records that ``look`` finds on disk; None if the disk fails or takes too long."""
    assert state.disk is not None
    try:
        found = state.disk.within(_LOOK_S, look)
    except TimeoutError:
        with state.lock:
            state.counters.disk_slow_lookups += 1
        return None
    except OSError as error:
        with state.lock:
            state.counters.disk_read_errors += 1
            state.health.read_failed(error, "records")
        return None
    with state.lock:
        state.health.was_read("records")
    return found
