"""The interface between an engine that computes in paged KV memory and a cache.

The bundled engine uses :class:`Connector` only, so it also runs with an embedded store, a daemon, or no store
(:class:`~tierstore_connectors.bundled.NoStore`).

A page is an int: an index into ``pool``, the engine's HBM page pool. Pages are accessed by these rules:

* ``allocate`` returns *private* pages. The engine may write KV into its private pages, and releases them when
  the sequence ends.
* ``load`` returns the pages of a hit. All pages of a load except its last may be *shared* with other
  sequences and with the cache, and are read-only. If the hit ends inside a page, this last page is a private
  copy that the engine continues to write.
* ``save`` publishes a private page whose chunk is complete. A published page stays in place, becomes
  read-only, and stays cached after ``release`` until its memory is needed. Publishing copies no bytes on the
  engine's thread.

**Layer groups.** A layer group is a set of layers that use earlier tokens in the same way, for example all
sliding-window layers. Each layer group has its own page pool (``pools``), and its rule says which pages a hit
needs (``rules``, see :mod:`tierstore.groups`). Group 0 is the group that needs every token before the hit, if
a group does. Methods about pages take the number of a ``group``. With several groups, a load returns the
pages that the hit needs of each group (``Loaded.groups``). A hit may end inside a page if all groups were
saved up to exactly that token. In groups other than group 0 the page with the hit's end is shared and
read-only, and the caller copies it before writing.

A connector method never raises because the cache is full, slow or broken: it returns fewer tokens, or stores
nothing. A connector method never waits for a colder tier: the caller waits on the
:class:`~tierstore.transfer.Transfer` that the method returns. All methods except :meth:`Connector.explain`
are called from the engine's one thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from tierstore.explanation import Explanation, Miss, MissReason
from tierstore.groups import GroupRule
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.planner import Plan
from tierstore.spec import KVSpec
from tierstore.stats import StoreStats
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.large_pages import PoolSize
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, Promise

if TYPE_CHECKING:
    from tierstore import Store


class ConnectorHit(Protocol):
    """The result of a lookup: how many leading tokens of a prompt are stored, in which tiers, and a lease on
    their pages."""

    @property
    def tokens(self) -> int:
        """Return the number of leading tokens that can be loaded."""

    @property
    def by_tier(self) -> Mapping[str, int]:
        """Return the hit's tokens by the fastest tier that holds them: ``{"hbm": …, "host": …, "disk": …}``.

        With several layer groups, a token counts for the slowest tier among the pages that it needs.
        """

    @property
    def hbm_pages(self) -> int:
        """Return the number of whole leading pages of group 0 in HBM, which a load shares. These pages may
        hold more tokens than ``by_tier`` counts for HBM if pages of other groups are in colder tiers."""

    @property
    def positions(self) -> Sequence[int]:
        """Return, for a lookup of named pages, the index of each found page among the requested pages: pages
        in HBM come first. Empty for a prompt's prefix."""

    @property
    def branch(self) -> int:
        """Return how many leading tokens are held by the groups that need every token, at least ``tokens``.

        If ``branch`` exceeds ``tokens``, a hit of ``branch`` tokens lacks only pages of the groups with a
        window or state. Saving these pages at token ``branch`` is worthwhile.
        """

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        """Read pages from disk into host memory. The transfer's result is the number of tokens that are then
        in host memory or HBM."""

    def release(self) -> None:
        """Release the lease, as ``load`` does at its end. Repeated calls are harmless."""


class Connector(ABC):
    """The adapter between the bundled engine and a store."""

    pools: tuple[PagePool, ...]
    """The page pools, by layer group."""

    @property
    def pool(self) -> PagePool:
        """Return the first group's pool."""
        return self.pools[0]

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        """Return the rule of each layer group: which pages a hit needs."""
        return tuple(GroupRule.of(pool.spec.groups[0]) for pool in self.pools)

    @abstractmethod
    def prompt(self, tokens: TokenIds, *, adapter: str = "") -> Prompt:
        """Return ``tokens`` with their keys under this engine's identity. The engine extends the prompt as it
        generates. ``adapter`` is the digest of the LoRA adapter that computes the prompt, "" without one;
        each adapter has separate pages."""

    def embeddings(self, spec: KVSpec, identity: Identity) -> Store | None:
        """Open a store of embeddings in the tiers of this connector's store. The connector closes the new
        store. Return None if the connector stores nothing."""
        return None

    @abstractmethod
    def register(self, adapter: str) -> None:
        """Register a LoRA adapter with the store, so that the adapter's first prompt need not wait for it."""

    @abstractmethod
    def lookup(self, prompt: Prompt, *, max_tokens: int | None = None, counted: bool = True) -> ConnectorHit:
        """Return the longest stored prefix of ``prompt``, at most ``max_tokens`` long, under a lease.

        ``counted`` is False for a repeated lookup of the same request, which the statistics leave out.
        """

    def explain(self, prompt: Prompt, *, max_tokens: int, timeout_s: float) -> Explanation:
        """Return why a lookup of the first ``max_tokens`` tokens of ``prompt`` would miss tokens now, without
        loading or counting anything.

        This method may be called from any thread, and waits at most ``timeout_s`` seconds for a colder tier.
        A connector that stores nothing need not override this method.
        """
        tokens = len(prompt)
        missed = Miss(MissReason.NEVER_SAVED, 0, tokens, why="the engine has no store")
        return Explanation(tokens, 0, (missed,) if tokens else ())

    @property
    def shared(self) -> bool:
        """Return whether other engines can find the pages that this engine saves now."""
        return False

    def expect(self, prompt: Prompt, promise: Promise) -> Transfer[None]:
        """Wait for pages of ``prompt`` that another engine has promised to save, as long as the promise says.
        A later lookup finds the pages that arrived. The transfer ends at once if no page can arrive."""
        return Transfer.completed(None)

    @property
    def remote(self) -> bool:
        """Return whether other hosts may have pages to fetch."""
        return False

    def fetch_remote(self, hit: ConnectorHit) -> Transfer[int] | None:
        """Fetch the pages after the end of ``hit`` from other hosts if fetching is worthwhile. A later lookup
        finds the fetched pages.

        Return None if nothing is fetched. The transfer needs no deadline: it ends soon by itself.
        """
        return None

    @abstractmethod
    def load(self, hit: ConnectorHit, *, deadline_s: float | None = None) -> Transfer[Loaded]:
        """Load a hit into HBM pages. At the deadline the load ends with the leading pages that have arrived;
        after ``cancel()`` it ends without pages. The caller owns the returned pages and releases each page
        once."""

    @abstractmethod
    def load_part(
        self, hit: ConnectorHit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        """Load pages ``first … stop`` (exclusive) of a hit like :meth:`load`. The result has the leading
        pages of this range.

        The ranges of a hit may be loaded in any order. The load with ``last=True`` releases the hit.
        Without such a load, the caller releases it.
        """

    @abstractmethod
    def plan(self, hit: ConnectorHit, prompt_tokens: int, *, block: int) -> Plan:
        """Return how much of a hit is worth loading, based on measurements; see :mod:`tierstore.planner`.

        ``block`` is the number of tokens of one prefill step, if the engine can compute the first tokens of
        the hit while it loads the last ones; otherwise 0.
        """

    @abstractmethod
    def meeting_point(self, hit: ConnectorHit, front: int, back: int) -> int:
        """Return the token at which prefill from token ``front`` on and loading from token ``back`` downwards
        are expected to meet."""

    @abstractmethod
    def decline(self, hit: ConnectorHit, plan: Plan) -> None:
        """Count the tokens of a hit that a plan does not use."""

    @abstractmethod
    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """Report that a prefill step of ``tokens`` tokens, at position ``behind`` of the prompt, took
        ``seconds``. :meth:`plan` uses the measurement."""

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Return whether later lookups can find saved pages."""

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
        """Publish ``pages`` as chunks ``first, first + 1, …`` of ``prompt``, and copy them to colder tiers in
        the background.

        Chunks before ``first`` must have been saved or loaded before, except in groups that do not need every
        token. The last page may hold the prompt's incomplete last chunk. The engine must not write to a saved
        page again. The transfer's result is the number of tokens stored in tiers below HBM.

        ``hint`` and ``session`` only advise the store's eviction policy (see :mod:`tierstore.types`). A call
        with empty ``pages`` may give both.
        """

    @abstractmethod
    def finish(self, session: str) -> None:
        """End a session: pages that only this session used may be evicted first."""

    @abstractmethod
    def allocate(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        """Return ``count`` private pages, and evict cached pages if necessary. Return None if fewer than
        ``count`` pages are available.

        ``near`` are pages of the same sequence and group, close to which the new pages are placed.
        """

    @abstractmethod
    def release(self, pages: Sequence[int], *, group: int = 0) -> None:
        """Release pages. The engine releases a page as often as ``allocate`` or a load returned it."""

    @abstractmethod
    def lose(self, pages: Sequence[int], *, group: int = 0) -> None:
        """Drop pages with lost content from the cache. The caller still releases the pages that it owns."""

    @abstractmethod
    def evict(self, count: int, *, group: int = 0) -> int:
        """Evict up to ``count`` cached pages from HBM only. Return the number of evicted pages."""

    @abstractmethod
    def available(self, *, group: int = 0) -> int:
        """Return how many pages ``allocate`` could return now: free pages, and cached pages not in use."""

    @abstractmethod
    def has_room(self, counts: Sequence[int]) -> bool:
        """Return whether ``allocate`` could return ``counts[group]`` pages of every group at once.

        Groups share memory. The result can be False although ``available`` is large enough for each group.
        """

    @abstractmethod
    def resize(self, nbytes: int) -> PoolSize:
        """Set the memory for pages of all groups to ``nbytes``.

        The pools grow at once, and shrink as pages become free: cached pages are evicted, and pages in use
        stay. Raise :class:`~tierstore.errors.UsageError` for an impossible size.
        """

    @abstractmethod
    def stats(self) -> StoreStats | None:
        """Return the statistics of the store; None without a store. Any thread may call this method."""

    @abstractmethod
    def close(self) -> None:
        """End all transfers, and close everything that this connector opened."""
