"""The bundled engine's connectors: one over a :class:`tierstore.Store`, and one that reuses nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import tierstore
from tierstore import (
    DEFAULT_DISK_BYTES,
    DEFAULT_HOST_BYTES,
    Store,
    open_overflow_pools,
    open_pools,
)
from tierstore import Hit as StoreHit
from tierstore.codec import NONE
from tierstore.errors import UsageError
from tierstore.explanation import Explanation
from tierstore.groups import GroupRule
from tierstore.keys import Identity, Prompt, TokenIds
from tierstore.planner import Plan
from tierstore.spec import KVSpec
from tierstore.stats import StoreStats
from tierstore.tiers.group_pools import bytes_for, room_for
from tierstore.tiers.hbm import PagePool
from tierstore.tiers.large_pages import PoolSize
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded, Promise
from tierstore_connectors.base import Connector, ConnectorHit
from tierstore_connectors.common.handover import BOTH, Role

if TYPE_CHECKING:
    from tierstore.tiers.overflow import Overflow

_CONNECT_S = 2.0  # how long open_connector waits for a daemon


@dataclass(frozen=True, slots=True)
class NoHit:
    """An empty hit."""

    tokens: int = 0
    by_tier: Mapping[str, int] = field(default_factory=dict)
    branch: int = 0
    hbm_pages: int = 0
    positions: Sequence[int] = ()

    def prefetch(self, *, deadline_s: float | None = None) -> Transfer[int]:
        return Transfer.completed(0)

    def release(self) -> None:
        """Do nothing: there is no lease."""


class NoStore(Connector):
    """A connector without a store: pools of pages (one per layer group), and no reuse."""

    def __init__(self, pools: PagePool | Sequence[PagePool], identity: Identity) -> None:
        self.pools = (pools,) if isinstance(pools, PagePool) else tuple(pools)
        self._identity = identity

    def prompt(self, tokens: TokenIds, *, adapter: str = "") -> Prompt:
        identity = replace(self._identity, adapter=adapter) if adapter else self._identity
        return Prompt(identity, tokens, chunk_tokens=self.pool.spec.chunk_tokens)

    def register(self, adapter: str) -> None:
        """Do nothing: there is no store."""

    def lookup(self, prompt: Prompt, *, max_tokens: int | None = None, counted: bool = True) -> ConnectorHit:
        return NoHit()

    def load(self, hit: ConnectorHit, *, deadline_s: float | None = None) -> Transfer[Loaded]:
        return Transfer.completed(Loaded(0))

    def load_part(
        self, hit: ConnectorHit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        return Transfer.completed(Loaded(0))

    def plan(self, hit: ConnectorHit, prompt_tokens: int, *, block: int) -> Plan:
        return Plan(0, 0, 0.0, 0.0, None)

    def meeting_point(self, hit: ConnectorHit, front: int, back: int) -> int:
        return back

    def decline(self, hit: ConnectorHit, plan: Plan) -> None:
        """Do nothing: this connector has no hits to decline."""

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        """Do nothing: no load is planned."""

    keeps = False

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
        return Transfer.completed(0)

    def finish(self, session: str) -> None:
        """Do nothing: no page is stored."""

    def allocate(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        return self.pools[group].allocate(count, near=near)

    def release(self, pages: Sequence[int], *, group: int = 0) -> None:
        self.pools[group].free(pages)

    def lose(self, pages: Sequence[int], *, group: int = 0) -> None:
        """Do nothing: no page is cached."""

    def evict(self, count: int, *, group: int = 0) -> int:
        return 0

    def available(self, *, group: int = 0) -> int:
        return self.pools[group].free_pages

    def has_room(self, counts: Sequence[int]) -> bool:
        return room_for(self.pools, counts, [0] * len(self.pools), lambda group: 0)

    def resize(self, nbytes: int) -> PoolSize:
        self.pool.resize(nbytes)
        self.pool.settle(wait=True)
        return self.pool.large_pages.size

    def stats(self) -> StoreStats | None:
        return None

    def close(self) -> None:
        for pool in self.pools:
            pool.close()


class StoreConnector(Connector):
    """A connector over a store that shares the engine's page pools: the store finds and caches pages in HBM
    like pages in other tiers."""

    def __init__(
        self,
        store: Store,
        *,
        daemon: bool = False,
        beside: Callable[..., Store] | None = None,
    ) -> None:
        """``daemon`` says whether ``store`` is connected to a daemon, where other engines find its pages.
        ``beside`` opens a store of embeddings in the same tiers (None: :func:`tierstore.open_beside`)."""
        if not store.pools:
            raise UsageError("the bundled engine needs a store with a page pool")
        self.pools = store.pools
        self.store = store
        self._daemon = daemon
        self._open_beside = beside or partial(tierstore.open_beside, store)
        self._beside: list[Store] = []

    @property
    def rules(self) -> tuple[GroupRule, ...]:
        return self.store.rules

    def prompt(self, tokens: TokenIds, *, adapter: str = "") -> Prompt:
        if not adapter:
            return self.store.prompt(tokens)
        return Prompt(self._identity_of(adapter), tokens, chunk_tokens=self.pool.spec.chunk_tokens)

    def embeddings(self, spec: KVSpec, identity: Identity) -> Store | None:
        self._beside.append(self._open_beside(spec, identity=identity))
        return self._beside[-1]

    def register(self, adapter: str) -> None:
        self.store.register(self._identity_of(adapter))

    def _identity_of(self, adapter: str) -> Identity:
        return replace(self.store.identity, adapter=adapter)

    def lookup(self, prompt: Prompt, *, max_tokens: int | None = None, counted: bool = True) -> ConnectorHit:
        return self.store.lookup(prompt, max_tokens=max_tokens, counted=counted)

    def explain(self, prompt: Prompt, *, max_tokens: int, timeout_s: float) -> Explanation:
        return self.store.explain(prompt, max_tokens=max_tokens, timeout_s=timeout_s)

    @property
    def shared(self) -> bool:
        return self._daemon and self.store.backend.reserve_bytes > 0

    def expect(self, prompt: Prompt, promise: Promise) -> Transfer[None]:
        return self.store.expect(prompt, promise)

    @property
    def remote(self) -> bool:
        return self.store.remote

    def fetch_remote(self, hit: ConnectorHit) -> Transfer[int] | None:
        return self.store.fetch_remote(_of_store(hit))

    def load(self, hit: ConnectorHit, *, deadline_s: float | None = None) -> Transfer[Loaded]:
        return self.store.load(_of_store(hit), deadline_s=deadline_s)

    def load_part(
        self, hit: ConnectorHit, first: int, stop: int, *, deadline_s: float | None = None, last: bool = False
    ) -> Transfer[Loaded]:
        return self.store.load_part(_of_store(hit), first, stop, deadline_s=deadline_s, last=last)

    def plan(self, hit: ConnectorHit, prompt_tokens: int, *, block: int) -> Plan:
        return self.store.plan(_of_store(hit), prompt_tokens, block=block)

    def meeting_point(self, hit: ConnectorHit, front: int, back: int) -> int:
        return self.store.meeting_point(_of_store(hit), front, back)

    def decline(self, hit: ConnectorHit, plan: Plan) -> None:
        self.store.decline(_of_store(hit), plan)

    def computed(self, tokens: int, behind: int, seconds: float) -> None:
        self.store.computed(tokens, behind, seconds)

    keeps = True

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
        return self.store.save_hbm(prompt, pages, first=first, group=group, hint=hint, session=session)

    def finish(self, session: str) -> None:
        self.store.finish(session)

    def allocate(self, count: int, *, group: int = 0, near: Sequence[int] = ()) -> list[int] | None:
        return self.store.allocate_hbm(count, group=group, near=near)

    def release(self, pages: Sequence[int], *, group: int = 0) -> None:
        self.store.release_hbm(pages, group=group)

    def lose(self, pages: Sequence[int], *, group: int = 0) -> None:
        self.store.lose_hbm(pages, group=group)

    def evict(self, count: int, *, group: int = 0) -> int:
        return self.store.evict("hbm", count, group=group)

    def available(self, *, group: int = 0) -> int:
        return self.store.available_hbm(group=group)

    def has_room(self, counts: Sequence[int]) -> bool:
        return self.store.has_room_hbm(counts)

    def resize(self, nbytes: int) -> PoolSize:
        return self.store.resize_hbm(nbytes)

    def stats(self) -> StoreStats | None:
        return self.store.stats()

    def close(self) -> None:
        for store in (*self._beside, self.store):
            store.close()
        for pool in self.pools:
            pool.close()


def _of_store(hit: ConnectorHit) -> StoreHit:
    assert isinstance(hit, StoreHit), "a hit must come from this connector's lookup"
    return hit


def open_connector(
    spec: KVSpec,
    identity: Identity,
    *,
    pool_pages: int | Sequence[int],
    most_bytes: int | None = None,
    overflow: Overflow | None = None,
    store: str | None,
    prefix_cache: bool = True,
    host_bytes: int = DEFAULT_HOST_BYTES,
    disk_bytes: int = DEFAULT_DISK_BYTES,
    disk_codec: str = NONE,
    device: str = "cpu",
    shared_parts: int = 0,
    device_heads: Sequence[range] = (),
    model_name: str = "",
    role: Role = BOTH,
) -> Connector:
    """Create the page pools on ``device``, and return the connector to ``store``.

    ``pool_pages`` is the pool's size in pages: one number, or one per layer group of ``spec``. The pools of
    several groups share one memory, which holds this many pages of each group at once. ``most_bytes`` is the
    largest size that the pools may be resized to (None: on a CPU their first size; pools on another device
    are not resizable). With ``overflow``, the first group's pool has ``pool_pages`` pages in memory and
    further pages in the overflow file (:mod:`tierstore.tiers.overflow`), on a GPU also in host memory. On a
    CPU, other processes can map the memory of pools with ``shared_parts``. ``device_heads`` has one entry per
    GPU, from ``device`` on: the KV heads of all pages (or of the pages of its part) that this GPU stores.

    ``store`` is a daemon's address (``ipc://PATH``, ``tcp://HOST:PORT``) or a directory for an embedded
    store. With None, only pages in the pool are reused, until the connector is closed. Without
    ``prefix_cache`` no page is reused, not even a page in the pool; then ``store`` must be None.
    ``disk_codec`` is the codec of an embedded store's pages on disk. ``model_name`` is the model's public
    name. ``role`` says whether the engine loads and saves pages that it shares with other engines through a
    daemon. Raise the errors of :func:`tierstore.open` and :func:`tierstore.connect`.
    """
    if disk_codec != NONE and (store is None or "://" in store):
        raise UsageError(
            "disk_codec needs a store directory. For a store at a daemon, give the codec to the daemon: "
            "`tierstore serve --disk-codec`"
        )
    if role != BOTH and "://" not in (store or ""):
        raise UsageError(
            "kv_role is only for engines that share a daemon: give the daemon's address as the store"
        )
    if store is not None and not prefix_cache:
        raise UsageError("prefix_cache is off, so a store would never be used: leave out the store")
    counts = [pool_pages] if isinstance(pool_pages, int) else list(pool_pages)
    parts = spec.split()
    if len(counts) != len(parts):
        raise UsageError(
            f"pool_pages needs one number for each of {len(parts)} layer groups, got {len(counts)}"
        )
    pools = _open_pools(
        spec, counts, most_bytes, overflow, device, shared_parts=shared_parts, device_heads=device_heads
    )
    if not prefix_cache:
        return NoStore(pools, identity)
    if store is not None and "://" in store:
        url = store

        def connect(spec: KVSpec, identity: Identity, pools: Sequence[PagePool] | None = None) -> Store:
            store = tierstore.connect(
                url,
                spec,
                identity=identity,
                pools=pools,
                model_name=model_name,
                loads=role.loads,
                saves=role.saves,
                wait_s=0,
            )
            store.wait_connected(_CONNECT_S)  # if no daemon answers, the engine starts, and lookups miss
            return store

        return StoreConnector(connect(spec, identity, pools), daemon=True, beside=connect)
    opened = tierstore.open(
        store,
        spec,
        identity=identity,
        pools=pools,
        host_bytes=0 if store is None else host_bytes,
        disk_bytes=disk_bytes,
        disk_codec=disk_codec,
        model_name=model_name,
    )
    return StoreConnector(opened)


def _open_pools(
    spec: KVSpec,
    counts: Sequence[int],
    most_bytes: int | None,
    overflow: Overflow | None,
    device: str,
    *,
    shared_parts: int,
    device_heads: Sequence[range],
) -> Sequence[PagePool]:
    if overflow is None:
        return open_pools(
            spec,
            bytes_for(spec.split(), counts),
            device=device,
            most_bytes=most_bytes,
            shared_parts=shared_parts,
            device_heads=device_heads,
        )
    if most_bytes is not None:
        raise UsageError("a pool with an overflow file cannot be resized: leave out most_bytes or overflow")
    return open_overflow_pools(spec, counts, overflow, device=device)
