"""What an engine that computes in paged KV memory asks of a cache. One class; the store behind it varies.

The bundled engine is written against :class:`Connector` and nothing else, so that the store can be absent
(:class:`~tierstore_connectors.bundled.NoStore`), embedded or a daemon.

Pages are ints: indices into ``pool``, the engine's HBM page pool. Who may touch one:

* ``allocate`` hands out *private* pages. The engine writes KV into them and calls ``release`` at the end.
* ``load`` hands out pages that hold a hit. All but the last may be *shared* with other sequences and with
  the cache: read-only. If the hit ends inside a page, that last page is a private copy the engine writes on.
* ``save`` publishes a private page whose chunk is complete: it stays where it is, becomes read-only, and
  after ``release`` it is cached until its room is needed. Publishing moves no byte on the engine's thread.

**Layer groups.** A model whose layers remember the past in different ways has a pool of pages for each group
of them (``pools``), and what a hit needs of a group is its rule's (``rules``, see :mod:`tierstore.groups`).
Group 0 is the one that every token before the hit is needed of, where there is one. Verbs about pages take
the ``group`` that they are about. With several groups a load brings of each group what the hit needs
(``Loaded.groups``). A hit may end inside of a page where all groups were saved to that very token; in groups
beside the first that page is shared and read-only, too, and whoever goes on copies it.

No verb raises because the cache is full, slow or broken: fewer tokens come back, or nothing is stored.
None of them blocks on a colder tier: whatever has to be waited for is a
:class:`~tierstore.transfer.Transfer`. All are called from the engine's one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from tierstore.groups import GroupRule
from tierstore.keys import Prompt, TokenIds
from tierstore.planner import Plan
from tierstore.stats import StoreStats
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.large_pages import PoolSize
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, Promise


class ConnectorHit(Protocol):
    """How many leading tokens of a prompt are held, where, and a lease on them."""

    @property
    def tokens(self) -> int:
        """Leading tokens that can be loaded."""

    @property
    def by_tier(self) -> Mapping[str, int]:
        """The same tokens by the fastest tier that holds them: ``{"hbm": …, "host": …, "disk": …}``. Of
        several layer groups the slowest tier counts that a page which is needed lies in."""

    @property
    def hbm_pages(self) -> int:
        """Whole leading pages of group 0 that are in HBM: a load shares them. More than ``by_tier`` has
        tokens for, where other groups' pages are colder."""

    @property
    def branch(self) -> int:
        """How many leading tokens the groups hold of which every token is needed: at least ``tokens``. Where
        it is more, the others lack what a hit there needs: a place worth saving them."""

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        """Bring what is on disk into host memory; the result is the tokens now above disk."""

    def release(self) -> None:
        """Give the lease back. Repeating it is harmless; ``load`` releases by itself when it ends."""


class Connector(ABC):
    """The adapter between the bundled engine and a store."""

    pools: tuple[PagePool, ...]
    """By layer group."""

    @property
    def pool(self) -> PagePool:
        """The first group's."""
        return self.pools[0]

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        """What hits need of each layer group."""
        return tuple(GroupRule.of(pool.spec.groups[0]) for pool in self.pools)

    @abstractmethod
    def prompt(self, tokens: TokenIds) -> Prompt:
        """``tokens`` with their keys, under this engine's identity. The engine extends it as it generates."""

    @abstractmethod
    def lookup(self, prompt: Prompt, *, max_tokens: int | None = None, counted: bool = True) -> ConnectorHit:
        """Return the longest held prefix of ``prompt``, at most ``max_tokens`` long, under a lease.

        ``counted`` is False for a second look on behalf of one request: the statistics leave it out."""

    @property
    def shared(self) -> bool:
        """Whether other engines could have what is saved now."""
        return False

    def expect(self, prompt: Prompt, promise: Promise) -> Transfer[None]:
        """Wait for pages of ``prompt`` that another engine has promised to save, as long as it said: a later
        lookup finds what has come. Ends at once where nothing can come."""
        return Transfer.completed(None)

    @property
    def remote(self) -> bool:
        """Whether other hosts may have pages that can be brought."""
        return False

    def fetch_remote(self, hit: ConnectorHit) -> Transfer[int] | None:
        """Have pages that other hosts have behind a hit come, where that is worth it: a later lookup finds
        them. None where nothing is brought. Ends by itself, and soon."""
        return None

    @abstractmethod
    def load(self, hit: ConnectorHit, *, deadline_s: float | None = None) -> Transfer[Loaded]:
        """Bring a hit into HBM pages. At the deadline it ends with the leading pages that have arrived; after
        ``cancel()`` with none. The caller owns the pages of the result and releases each once."""

    @abstractmethod
    def load_part(
        self, hit: ConnectorHit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        """:meth:`load` of pages ``first … stop`` of a hit: the result has the leading ones of these. Parts
        may be loaded in any order. The hit is released with its ``last`` load, or by the caller."""

    @abstractmethod
    def plan(self, hit: ConnectorHit, prompt_tokens: int, *, block: int) -> Plan:
        """How much of a hit is worth loading, by what was measured; see :mod:`tierstore.planner`. ``block``
        is what the engine computes at a time where it can begin at the hit's front meanwhile, else 0."""

    @abstractmethod
    def meeting_point(self, hit: ConnectorHit, front: int, back: int) -> int:
        """Where computing from token ``front`` on would meet loading from ``back`` towards the front."""

    @abstractmethod
    def decline(self, hit: ConnectorHit, plan: Plan) -> None:
        """A plan is followed: what it does not use is counted."""

    @abstractmethod
    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """A prefill step of ``tokens`` tokens after ``behind`` others took so long: plans compare with it."""

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Whether what is saved can be found at all."""

    @abstractmethod
    def save(
        self,
        prompt: Prompt,
        pages: Sequence[int],
        *,
        first: int,
        group: int = 0,
        hint: Hint | None = None,
        session: str | None = None,
    ) -> Transfer[int]:
        """Publish ``pages`` as chunks ``first, first + 1, …`` of ``prompt`` and copy them to the colder tiers
        behind the engine's back. Chunks before ``first`` must have been saved or loaded before; the last
        page may hold the prompt's incomplete last chunk. The engine must not write to a saved page again;
        the result is the number of tokens stored below HBM. ``hint`` and ``session`` are advice to the
        store's policy (see :mod:`tierstore.types`) and change nothing else; no pages may carry them, too. Of
        a group that needs not every token, any chunks may be saved."""

    @abstractmethod
    def finish(self, session: str) -> None:
        """This session is over: the pages that only it has used may leave first."""

    @abstractmethod
    def allocate(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        """``count`` private pages, evicting cached ones where needed; None when that many cannot be had.
        ``near`` are pages of the same sequence and group: those that go together are kept together."""

    @abstractmethod
    def release(self, pages: Sequence[int], *, group: int = 0) -> None:
        """The engine is done with these pages (one call for each time it came to own one)."""

    @abstractmethod
    def evict(self, count: int, *, group: int = 0) -> int:
        """Drop up to ``count`` cached pages from HBM (colder copies stay); how many were dropped."""

    @abstractmethod
    def available(self, *, group: int = 0) -> int:
        """Pages that ``allocate`` could hand out now: free ones and cached ones that nobody uses."""

    @abstractmethod
    def has_room(self, counts: Sequence[int]) -> bool:
        """Return whether ``allocate`` could hand out so many pages of each group, all of them together.
        Groups share a memory: ``available`` may say enough for each group alone where this is False."""

    @abstractmethod
    def resize(self, nbytes: int) -> PoolSize:
        """Have ``nbytes`` of memory for pages, of all groups, from now on. More is
        had at once, less as pages become free: those that are cached leave, those in use stay. Raises
        :class:`~tierstore.errors.UsageError` for a size that cannot be."""

    @abstractmethod
    def stats(self) -> StoreStats | None:
        """What the store below has counted; None where there is none. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back: finish or drop what is under way, close what this connector opened."""
