"""Find the prefixes with the most hits, without walking the whole tree.

A lookup that finds a page also finds all pages before it, so a page never has more hits than its parent. The
unvisited page with the most hits is therefore always a child of a visited page. A prefix *ends* at a page if
no page behind it has more than half as many hits: prompts diverge there (the end of a system prompt) or stop.

The result has no tokens and no keys. A key is a hash of tokens, so a reader could use it to check a guess of
a prompt. A prefix's name is a different hash, with a new salt in each process.
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

_LOOKS = 4096  # most pages visited: several milliseconds of one thread
_CONTINUED = 0.5  # a prefix continues behind a page if a child has more than this share of the page's hits
_MOST_IDENTITIES = 1024
_SALT = secrets.token_bytes(16)


@dataclass(frozen=True, slots=True)
class BusyPrefix:
    """A prefix that lookups often find. ``tier`` is the fastest tier that has its last page. ``hits`` are the
    hits of that page since it was saved."""

    name: str
    model: str
    tenant: str
    tokens: int
    bytes: int
    hits: int
    tier: str


@dataclass(order=True, slots=True)
class _Next:
    """A page to visit. The page with the most hits sorts first, and among equals the page that was seen
    first."""

    cold: int  # negative hits
    number: int
    page: Page
    tokens: int


def busiest(state: StoreState, identities: Mapping[bytes, Identity], count: int) -> list[BusyPrefix]:
    """Return the ``count`` prefixes with the most hits, in descending order. The list is shorter if fewer
    prefixes have hits, or if the search ends after ``_LOOKS`` pages.

    ``identities`` are by digest. Thread-safe: the state's lock is held only for one page, or for copying one
    list, at a time.
    """
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
    # The root can have hundreds of thousands of named pages as children. Copying their list under the lock is
    # fast. Examining each page under the lock would delay saves and lookups.
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
        return  # the page has left the tiers meanwhile
    # Each named page (SGLang's) is found separately. The last named page of a prompt represents all pages of
    # the prompt.
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
