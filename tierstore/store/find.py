"""Finding a prompt's pages: in the tree first, and where the tree ends, in the index on disk.

The tree is read under the store's lock, the disk is not: a page fault must never hold up the other engines.
So what was found on disk is checked once more when it is brought into the tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierstore.index import Match, Page, Tier, common_tokens
from tierstore.keys import Prompt
from tierstore.store.state import StoreState

_MOST_LOOKS = 4  # at the disk; more than one only while others evict or save the same prompt


@contextmanager
def find(state: StoreState, prompt: Prompt, max_tokens: int, page_bytes: int) -> Iterator[Match]:
    """The longest held prefix of ``prompt``. The block runs under the store's lock, and all that was found is
    in the tree during it.

    Raises :class:`~tierstore.errors.StoreClosedError`.
    """
    looks = 0
    match: Match | None = None
    seen = -1
    while True:
        with state.lock:
            state.require_open()
            root = state.root(prompt.identity, page_bytes)
            if match is None or state.index.changes != seen:
                match = state.index.match(root, prompt, max_tokens)
                seen = state.index.changes
            parent = _frontier(state, root, match, prompt.chunk_tokens) if looks < _MOST_LOOKS else None
            if parent is None or match.tokens >= max_tokens:
                yield match
                return
        woken = _wake_below(state, parent, prompt, max_tokens)
        looks = looks + 1 if woken else _MOST_LOOKS


def _frontier(state: StoreState, root: Page, match: Match, chunk_tokens: int) -> Page | None:
    """The last whole page of a match, if there may be pages below it that are only on disk."""
    whole = match.tokens // chunk_tokens
    page = match.pages[whole - 1] if whole else root
    on_disk = page.copies[Tier.DISK] is not None or page.parent is None
    return page if state.disk is not None and page.serial and on_disk else None


def _wake_below(state: StoreState, parent: Page, prompt: Prompt, max_tokens: int) -> bool:
    """Bring what the disk has of a prompt below ``parent`` into the tree. Whether a second look could find
    more."""
    assert state.disk is not None
    first = parent.depth  # the root's is 0
    identity = prompt.identity.digest
    wanted = min(max_tokens // prompt.chunk_tokens, len(prompt.keys))
    chunks = zip(prompt.keys[first:wanted], prompt.chunks(first), strict=False)
    records = state.disk.find(parent.serial, identity, chunks)
    last = records[-1].serial if records else parent.serial
    rest = prompt.chunk(first + len(records))
    similar = state.disk.find_similar(last, identity, rest)
    best = max(similar, key=lambda record: common_tokens(record.tokens, rest), default=None)
    path = [*records, best] if best is not None else records
    with state.lock:
        return not state.wake(parent, path)
