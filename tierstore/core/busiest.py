"""Which prefixes are found most often, without a look at the whole tree.

Whoever finds a page finds those before it, so hits fall from the root on: the page with the most hits of all
that are left is always the next to look at. A prefix *ends* where none of the pages behind it is found
more than half as often: prompts part there (a system prompt's end), or stop.

What comes out has no tokens and no keys. A key is a hash of tokens, and whoever can guess a prompt could
check the guess by it; the name of a prefix is another hash, of this life.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tierstore.core.state import StoreState
from tierstore.index.page import Page
from tierstore.keys import Identity

_LOOKS = 4096  # pages looked at: some milliseconds of one thread
_CONTINUED = 0.5  # of a page's hits: the one behind it has more if the prefix goes on
_MOST_IDENTITIES = 1024
_SALT = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class BusyPrefix:
    """A prefix that is found often. ``tier`` is the fastest that has its last page; ``hits`` are of that
    page, since it was saved."""

    name: str
    model: str
    tenant: str
    tokens: int
    bytes: int
    hits: int
    tier: str


@dataclass(order=True, slots=True)
class _Next:
    """A page to look at. The one with the most hits comes first, then the one that was seen first."""

    cold: int  # its hits, negative
    number: int
    page: Page
    tokens: int


def busiest(state: StoreState, identities: Mapping[bytes, Identity], count: int) -> list[BusyPrefix]:
    """The ``count`` prefixes that are found most often, the busiest first; fewer where no more are found at
    all, or after looking at some thousands of pages. ``identities`` are by digest. From any thread; the
    state's lock is held for one page, or to copy one list, at a time."""
    number = itertools.count()
    with state.lock:
        roots = state.index.tree.roots()[:_MOST_IDENTITIES]
    waiting: list[_Next] = []
    for root in roots:
        waiting += [
            _Next(-page.hits, next(number), page, page.num_tokens) for page in _found_below(state, root)
        ]
    heapq.heapify(waiting)
    found: dict[tuple[bytes, int], BusyPrefix] = {}
    for _ in range(_LOOKS):
        if not waiting or len(found) == count:
            break
        at = heapq.heappop(waiting)
        children = _found_below(state, at.page)
        for child in children:
            heapq.heappush(waiting, _Next(-child.hits, next(number), child, at.tokens + child.num_tokens))
        if max((child.hits for child in children), default=0) <= _CONTINUED * -at.cold:
            _add(state, identities, found, at)
    return list(found.values())


def _found_below(state: StoreState, page: Page) -> Sequence[Page]:
    # Named pages are all children of one root, hundreds of thousands of them: a copy is quick, a look at each
    # is not, and saves and lookups wait for the lock.
    with state.lock:
        children = list(page.children.values())
    return [child for child in children if child.hits]


def _add(
    state: StoreState,
    identities: Mapping[bytes, Identity],
    found: dict[tuple[bytes, int], BusyPrefix],
    at: _Next,
) -> None:
    page = at.page
    with state.lock:
        identity = identities.get(page.identity) or state.identities.get(page.identity)
        tier = page.ready_tier()
    if identity is None or tier is None:
        return  # it has left meanwhile
    # Pages without a chain (SGLang's) are found one by one: of those of one prompt the last one stands for
    # all.
    named = page.depth > 1 and page.parent is not None and page.parent.parent is None
    tokens = page.depth * page.num_tokens if named else at.tokens
    key = (page.identity, page.hits) if named else (page.key, 0)
    known = found.get(key)
    if known is not None and known.tokens >= tokens:
        return
    model = state.names.get(page.identity, identity.model)
    name = hashlib.blake2b(page.identity + page.key, key=_SALT, digest_size=4).hexdigest()
    found[key] = BusyPrefix(
        name, model, identity.tenant, tokens, page.depth * page.nbytes, page.hits, tier.label
    )
