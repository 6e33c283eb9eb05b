"""Recent lookups with their leases.

SGLang looks up all pages of a prompt at once, but reads them in batches of 128, and may skip the first pages.
The lease of the lookup prevents that a page is evicted before it is read, and saves a new lookup for each
batch.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tierstore import Hit, Store
from tierstore.keys import Identity

_MOST = 256


@dataclass(slots=True, eq=False)
class Query:
    """A lookup of the pages ``keys``. ``hit`` may also have pages of the prompt before ``keys``. ``before``
    is the index of the first of ``keys`` in the prompt."""

    store: Store
    identity: Identity
    keys: Sequence[str]
    hit: Hit
    before: int = 0

    @property
    def positions(self) -> Sequence[int]:
        """The index in ``keys`` of each page of the hit, ascending. Pages before ``keys`` have negative
        indices."""
        if self.before:
            return range(-self.before, self.hit.num_pages - self.before)
        return self.hit.positions or range(self.hit.num_pages)

    def held(self, at: int, count: int) -> range:
        """Return the range of indices in the hit of the pages ``keys[at : at + count]`` that the hit has."""
        held = self.positions
        return range(bisect.bisect_left(held, at), bisect.bisect_left(held, at + count))

    def find(self, keys: Sequence[str]) -> int | None:
        """Return the index of the pages ``keys`` in ``self.keys``, or None if they are not a part of it."""
        try:
            at = self.keys.index(keys[0])
        except ValueError:
            return None
        return at if list(self.keys[at : at + len(keys)]) == list(keys) else None


class Queries:
    """The last ``most`` queries. Thread-safe."""

    def __init__(self, most: int = _MOST) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._queries: list[Query] = []  # the last is the newest

    def __len__(self) -> int:
        return len(self._queries)

    def add(self, query: Query) -> None:
        """Add a query. If there are more than ``most``, drop the oldest and release its lease."""
        with self._lock:
            self._queries.append(query)
            gone = self._queries[: -self._most]
            del self._queries[: -self._most]
        for each in gone:
            each.hit.release()

    def find(self, identity: Identity, keys: Sequence[str]) -> tuple[Query, int] | None:
        """Return the newest query with the pages ``keys``, and the index of the first of them in it."""
        with self._lock:
            queries = self._queries[::-1]
        for query in queries:
            if query.identity == identity and (at := query.find(keys)) is not None:
                return query, at
        return None

    def drop(self, query: Query) -> None:
        """Drop a query and release its lease."""
        with self._lock:
            self._queries = [each for each in self._queries if each is not query]
        query.hit.release()

    def clear(self) -> None:
        """Drop all queries and release their leases."""
        with self._lock:
            queries, self._queries = self._queries, []
        for query in queries:
            query.hit.release()
