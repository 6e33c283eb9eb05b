"""The interface between an engine that computes in paged KV memory and a cache.

The bundled engine is written against :class:`Connector` only, so the store can be absent
(:class:`~tierstore_connectors.bundled.NoStore`), embedded or a daemon.

Pages are ints: indices into ``pool``, the engine's HBM page pool. The rules of access are:

* ``allocate`` returns *private* pages. The engine writes KV into them and calls ``release`` at the end.
* ``load`` returns pages that hold a hit. All except the last may be *shared* with other sequences and with
  the cache, and are read-only. If the hit ends inside a page, the last page is a private copy that the engine
  continues to write.
* ``save`` publishes a private page whose chunk is complete. The page stays in place, becomes read-only, and
  stays cached after ``release`` until its room is needed. Publishing copies no bytes on the engine's thread.

**Layer groups.** If a model's layers remember the past in different ways, each group of like layers has its
own pool of pages (``pools``). The group's rule says which pages a hit needs (``rules``, see
:mod:`tierstore.groups`). Group 0 is the group that needs every token before the hit, if there is one. Methods
about pages take a ``group``. With several groups a load returns, for each group, the pages that the hit needs
(``Loaded.groups``). A hit may end inside a page if all groups were saved up to exactly that token. In groups
other than the first that page is also shared and read-only, and the caller copies it before writing.

No method raises because the cache is full, slow or broken: it returns fewer tokens, or stores nothing. No
method waits for a colder tier: waiting is done through a :class:`~tierstore.transfer.Transfer`. All methods
except :meth:`Connector.explain` are called from the engine's one thread.
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
    """The result of a lookup: how many leading tokens of a prompt are held, where, and a lease on them."""

    @property
    def tokens(self) -> int:
        """Return the number of leading tokens that can be loaded."""

    @property
    def by_tier(self) -> Mapping[str, int]:
        """Return the same tokens by the fastest tier that holds them: ``{"hbm": …, "host": …, "disk": …}``.

        With several layer groups, the slowest tier of the needed pages counts.
        """

    @property
    def hbm_pages(self) -> int:
        """Return the number of whole leading pages of group 0 in HBM, which a load shares. They may hold more
        tokens than ``by_tier`` counts if pages of other groups are colder."""

    @property
    def positions(self) -> Sequence[int]:
        """Return, for pages that the caller has named, the place of each loaded page among them: pages in HBM
        come first. Empty for a prompt's prefix."""

    @property
    def branch(self) -> int:
        """Return how many leading tokens are held by the groups that need every token. This is at least
        ``tokens``. If it is more, the other groups lack pages for a hit there, and saving them there is
        worthwhile."""

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        """Read pages from disk into host memory. The result is the number of tokens that are now above
        disk."""

    def release(self) -> None:
        """Release the lease. Repeated calls are harmless; ``load`` releases it at its end."""


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
        generates. ``adapter`` is the digest of a LoRA adapter that computes them, whose pages are its own."""

    def embeddings(self, spec: KVSpec, identity: Identity) -> Store | None:
        """Open a store of embeddings in the tiers of this connector's store. The connector closes it. None if
        the connector stores nothing."""
        return None

    @abstractmethod
    def register(self, adapter: str) -> None:
        """Prepare for prompts of an adapter, so that the first one need not wait."""

    @abstractmethod
    def lookup(self, prompt: Prompt, *, max_tokens: int | None = None, counted: bool = True) -> ConnectorHit:
        """Return the longest held prefix of ``prompt``, at most ``max_tokens`` long, under a lease.

        ``counted`` is False for a repeated lookup for one request, which the statistics leave out.
        """

    def explain(self, prompt: Prompt, *, max_tokens: int, timeout_s: float) -> Explanation:
        """Return why a lookup of the first ``max_tokens`` tokens of ``prompt`` would miss tokens now. Nothing
        is loaded or counted.

        It may be called from any thread, and waits at most ``timeout_s`` seconds for a colder tier. A
        connector that stores nothing need not override it.
        """
        tokens = len(prompt)
        missed = Miss(MissReason.NEVER_SAVED, 0, tokens, why="the engine has no store")
        return Explanation(tokens, 0, (missed,) if tokens else ())

    @property
    def shared(self) -> bool:
        """Return whether other engines can now find saved pages."""
        return False

    def expect(self, prompt: Prompt, promise: Promise) -> Transfer[None]:
        """Wait for pages of ``prompt`` that another engine has promised to save, as long as the promise says.
        A later lookup finds those that arrived. Ends at once if none can arrive."""
        return Transfer.completed(None)

    @property
    def remote(self) -> bool:
        """Return whether other hosts may have pages to fetch."""
        return False

    def fetch_remote(self, hit: ConnectorHit) -> Transfer[int] | None:
        """Fetch pages after the hit from other hosts if that is worthwhile. A later lookup finds them.

        Returns None if nothing is fetched. The transfer ends soon without a deadline.
        """
        return None

    @abstractmethod
    def load(self, hit: ConnectorHit, *, deadline_s: float | None = None) -> Transfer[Loaded]:
        """Load a hit into HBM pages. At the deadline the load ends with the leading pages that have arrived;
        after ``cancel()`` with none. The caller owns the pages of the result and releases each of them
        once."""

    @abstractmethod
    def load_part(
        self, hit: ConnectorHit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        """Load pages ``first … stop`` of a hit like :meth:`load`. The result has the leading pages of this
        part.

        Parts may be loaded in any order. The hit is released by the load with ``last``, or by the caller.
        """

    @abstractmethod
    def plan(self, hit: ConnectorHit, prompt_tokens: int, *, block: int) -> Plan:
        """Return how much of a hit is worth loading, based on measurements; see :mod:`tierstore.planner`.

        ``block`` is the number of tokens that the engine computes at a time, if it can compute the hit's
        front during the load; otherwise 0.
        """

    @abstractmethod
    def meeting_point(self, hit: ConnectorHit, front: int, back: int) -> int:
        """Return the token where computing from ``front`` on meets loading from ``back`` towards the
        front."""

    @abstractmethod
    def decline(self, hit: ConnectorHit, plan: Plan) -> None:
        """Count the tokens of a hit that a plan does not use."""

    @abstractmethod
    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """Report the time of a prefill step of ``tokens`` tokens after ``behind`` earlier ones. Plans use
        it."""

    @property
    @abstractmethod
    def keeps(self) -> bool:
        """Return whether saved pages can be found later."""

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
        page again. The result is the number of tokens stored below HBM.

        ``hint`` and ``session`` advise the store's policy (see :mod:`tierstore.types`) and change nothing
        else. They may be given without pages.
        """

    @abstractmethod
    def finish(self, session: str) -> None:
        """End a session: pages that only this session used may be evicted first."""

    @abstractmethod
    def allocate(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        """Return ``count`` private pages, and evict cached pages if necessary. Return None if there are not
        that many.

        ``near`` are pages of the same sequence and group: related pages are placed together.
        """

    @abstractmethod
    def release(self, pages: Sequence[int], *, group: int = 0) -> None:
        """Release pages: one call for each time that the engine came to own a page."""

    @abstractmethod
    def lose(self, pages: Sequence[int], *, group: int = 0) -> None:
        """Serve pages no more whose content is lost. The caller still releases those that it owns."""

    @abstractmethod
    def evict(self, count: int, *, group: int = 0) -> int:
        """Evict up to ``count`` cached pages from HBM; colder copies stay. Return how many were evicted."""

    @abstractmethod
    def available(self, *, group: int = 0) -> int:
        """Return how many pages ``allocate`` could return now: free pages and unused cached ones."""

    @abstractmethod
    def has_room(self, counts: Sequence[int]) -> bool:
        """Return whether ``allocate`` could return this many pages of every group at once.

        Groups share memory: this can be False although ``available`` is large enough for each group alone.
        """

    @abstractmethod
    def resize(self, nbytes: int) -> PoolSize:
        """Set the memory for pages of all groups to ``nbytes``.

        Growing takes effect at once. Shrinking continues as pages become free: cached pages are evicted,
        pages in use stay. Raises :class:`~tierstore.errors.UsageError` for an impossible size.
        """

    @abstractmethod
    def stats(self) -> StoreStats | None:
        """Return the statistics of the store; None without a store. Can be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Finish or drop transfers, and close everything that this connector opened."""
