"""The class that SGLang loads: a ``HiCacheStorage`` whose pages are in a tierstore daemon.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config \
      '{"backend_name": "tierstore", "module_path": "tierstore_connectors.sglang.backend",
        "class_name": "TierStoreHiCache", "interface_v1": 1}'

After the engine's start no method raises, because up to SGLang 0.5.20 an exception ended SGLang's save thread
for good. After two unanswered requests the daemon gets no request for a while (:class:`Breaker`), so that it
does not delay prompts. Each call has a time limit (:class:`SglangSettings`), because ranks wait for one
another.

Threads of SGLang call these methods: one looks up, one reads, one writes, and the scheduler may look up too.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

import tierstore
from tierstore import Store
from tierstore.core.clients import MOST_IDENTITIES
from tierstore.errors import UsageError
from tierstore.explanation import Explanation, Miss, MissReason
from tierstore.groups import GroupRule, page_ranges, served_lengths
from tierstore.keys import Identity, Prompt
from tierstore.spec import KVSpec
from tierstore_connectors.common.counters import ConnectorCounters
from tierstore_connectors.common.explaining import MissReporter
from tierstore_connectors.common.facts import under_epoch
from tierstore_connectors.common.guard import Breaker, ErrorLog, guarded
from tierstore_connectors.sglang.config import SglangSettings
from tierstore_connectors.sglang.identity import model_digest, weights_revision
from tierstore_connectors.sglang.pools import HostPool, PagePlaces, PoolPages
from tierstore_connectors.sglang.queries import Queries, Query
from tierstore_connectors.sglang.sharing import PageTokens, SharedPages, require_plain, shared_pool
from tierstore_connectors.sglang.weights import WeightsWatch, epoch_of

_log = logging.getLogger("sglang.tierstore")

_KV = "kv"
_LEAST_VERSION = (0, 5, 20)  # earlier versions of SGLang ignore a request's salt in the names of pages
_FEW_TOKENS = 16
_EXPLAIN_S = 5.0
_CONNECT_S = 1.0  # the engine's start waits this long; a daemon that starts later is used as well


class TierStoreHiCache(HiCacheStorage):
    """The storage backend; see the module. Raises :class:`~tierstore.errors.UsageError` at the engine's start
    for settings, an SGLang version or weights that it does not support."""

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any]) -> None:
        version = tuple(int(part) for part in sglang.__version__.split(".post")[0].split(".")[:3])
        if version < _LEAST_VERSION:
            raise UsageError(
                f"SGLang {sglang.__version__} gives one name to pages of requests with different salts: "
                "use 0.5.20 or newer"
            )
        self._config = storage_config
        self._settings = SglangSettings.parse(storage_config.extra_config)
        self._lock = threading.Lock()  # guards the attributes below that change
        self._pools: dict[str, tuple[HostPool | SharedPages, ...]] = {}
        self._stores: dict[str, Store] = {}  # by page layout
        self._identities: dict[tuple[str, str, str], Identity] = {}  # by pool, layout and epoch
        self._breaker = Breaker()
        self._stats = _Transfers()
        self._queries = Queries()
        self.errors = ErrorLog(_log)
        self.counters = ConnectorCounters()
        self._misses = MissReporter(_log, self.counters, self.errors) if self._settings.explain else None
        arguments = _arguments()
        if storage_config.should_split_heads:
            raise UsageError("tierstore does not support pages split by heads: leave tp_lcm_size out")
        seed = arguments.get("random_seed")
        shared = storage_config.is_mla_model and storage_config.tp_size > 1
        self._weights = WeightsWatch(_weight_version, lambda n: epoch_of(n, shared=shared, seed=seed))
        self._first_epoch = self._weights.look()
        self._arguments = arguments
        if self._settings.share_engines:
            require_plain(arguments, at_start=_at_start())
        else:
            namespace, sampled = self._settings.namespace, self._settings.hash_weights == "sample"
            self._revision = weights_revision(arguments, namespace, sampled=sampled)
            self._model = model_digest(sglang.__version__, arguments, namespace, sampled=sampled)
        if arguments.get("hicache_host_memory_mode") == "buffer_only":
            _save_missed_pages_again()
        if arguments.get("enable_lora"):
            _watch_adapters(server=epoch_of(0, shared=True, seed=seed))

    # -- pools ---------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the KV pool, or the KV pool of a group of pools."""
        super().register_mem_pool_host(mem_pool_host)
        entry = vars(mem_pool_host).get("anchor_entry")
        self._register(_KV, mem_pool_host if entry is None else entry.host_pool)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    def _register(self, name: str, pool: Any) -> None:
        if vars(pool).get("kv_buffer", pool) is None:
            return  # a placeholder pool without memory
        if pool.page_size < _FEW_TOKENS:
            self.errors.warn("page_size", f"pages of {pool.page_size} tokens are slow: use --page-size 64")
        known = self._pages_of(name, pool)
        with self._lock:
            self._pools[name] = known
            for pages in known:
                identity = self._identity_of(pages)
                if identity.layout not in self._stores:
                    self._stores[identity.layout] = self._connect(identity)
                    connected = self._stores[identity.layout].wait_connected(_CONNECT_S)
                    _log.info(
                        "tierstore: pages of %s go to %s (%s) under identity %s",
                        name,
                        self._settings.store,
                        "connected" if connected else "no daemon answers yet",
                        identity.digest.hex()[:8],
                    )

    def _pages_of(self, name: str, pool: Any) -> tuple[HostPool | SharedPages, ...]:
        """Return the page format of a pool. If engines share pages, there is one for each layer group."""
        if not self._settings.share_engines:
            return (HostPool(name, pool, torch.arange(pool.page_size)),)
        known = self._pools.get(name, ())
        if known and known[0].pool is pool:
            return known
        tokens = PageTokens(int(pool.page_size))
        found = shared_pool(
            name,
            pool,
            tokens,
            folder=Path(str(self._arguments.get("model_path", ""))),
            settings=self._settings,
            rank=self._config.tp_rank,
            ranks=self._config.tp_size,
        )
        tokens.watch(self.errors)
        return found

    def _connect(self, identity: Identity) -> Store:
        settings = self._settings
        return tierstore.connect(
            settings.store,
            KVSpec.parse(identity.layout),
            identity=identity,
            lookup_s=settings.lookup_s,
            mover_threads=settings.threads,
            keys=settings.keys,
            server_key=settings.server_key,
            model_name=self._config.model_name or "",
            wait_s=0,
            log=None if self._stores else _log,  # only the first store logs the connection
        )

    def _places(self, name: str) -> list[_BufferPlace]:
        """Return the pages of a pool with their stores and identities. Raise :class:`KeyError` for a pool
        that was not registered."""
        with self._lock:
            places = []
            for pages in self._pools[name]:
                identity = self._identity_of(pages)
                places.append(_BufferPlace(pages, self._stores[identity.layout], identity))
            return places

    def _identity_of(self, pages: HostPool | SharedPages) -> Identity:
        """Return the current identity of pages, which changes with the weights. The caller holds the lock."""
        epoch = self._weights.look()
        place = pages.name, pages.layout, epoch
        identity = self._identities.get(place)
        if identity is None:
            if len(self._identities) >= MOST_IDENTITIES:  # the daemon's limit per client connection
                self._identities.clear()
                self._queries.clear()
                for layout, store in list(self._stores.items()):
                    store.close()
                    self._stores[layout] = self._connect(store.identity)
            if isinstance(pages, SharedPages):
                identity = pages.identity
                if epoch != self._first_epoch:  # the weights differ from the model's files
                    identity = under_epoch(identity, epoch)
            else:
                identity = pages.identity(
                    model=self._model,
                    revision=f"{self._revision} {epoch}",
                    shard=self._shard(pages.name),
                )
            self._identities[place] = identity
        return identity

    def _shard(self, pool: str) -> str:
        """Return this rank's part of the model. Latent vectors (MLA) are equal on all tensor-parallel ranks;
        recurrent states are not."""
        config = self._config
        whole = config.is_mla_model and pool != "mamba"
        tensor = "all" if whole else f"{config.tp_rank}/{config.tp_size}"
        return (
            f"tp{tensor},pp{config.pp_rank}/{config.pp_size},cp{config.attn_cp_rank}/{config.attn_cp_size},"
            f"dcp{config.dcp_rank}/{config.dcp_size}"
        )

    # -- lookups --------------------------------------------------------------------------------------

    @guarded(lambda self, keys, extra_info=None: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return how many leading pages of ``keys`` the daemon has."""
        pages = _leading(self._held(_KV, keys, extra_info))
        self._explain(keys, extra_info, pages)
        return pages

    @guarded(lambda self, keys, pool_transfers=None, extra_info=None: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the prefixes for which the daemon has the needed pages of all pools. The store's rule for
        layer groups decides which pages a prefix needs."""
        pages = _leading(self._held(_KV, keys, extra_info)) if _KV in self._pools else len(keys)
        restorable = list(range(1, pages + 1))
        groups = [(GroupRule.all(), [range(pages)])]
        hits = {_KV: pages} if pages else {}
        lacking = ""
        for transfer in pool_transfers or ():
            if not restorable:
                break
            name = str(transfer.name)
            if str(getattr(transfer.hit_policy, "value", "")) == "block_groups":
                continue  # a second copy of the KV pages, which does not shorten the hit
            rule = _rule(transfer)
            if rule is None:
                self.errors.warn("hit_policy", f"pools with {transfer.hit_policy} are not stored")
                return PoolTransferResult(0, hits, [])
            held = self._held(name, keys[:pages], extra_info)
            groups.append((rule, page_ranges([at for at, there in enumerate(held) if there], 1)))
            if own := rule.longest(groups[-1][1], pages):
                hits[name] = own
            before, restorable = restorable, served_lengths(groups, pages)
            if restorable[-1:] != before[-1:]:
                lacking = f"pool {name}"
        longest = restorable[-1] if restorable else 0
        if _KV in self._pools:
            self._explain(keys, extra_info, longest, lacking)
        return PoolTransferResult(longest, hits, restorable)

    def _explain(self, keys: Sequence[str], extra_info: Any, pages: int, lacking: str = "") -> None:
        """Report why a lookup missed pages after the first ``pages``, on a background thread. ``lacking``
        names the pool whose missing pages limit the hit, "" if it is the KV pool."""
        misses = self._misses
        if misses is None or pages == len(keys):
            return
        place = self._places(_KV)[0]
        asked = place.prompt(keys, extra_info)
        if asked is None:
            return
        prompt, reused = asked[0], (asked[1] + pages) * place.pages.chunk_tokens

        def ask() -> Explanation:
            found = place.store.explain(prompt, timeout_s=_EXPLAIN_S)
            if not lacking or found.hit_tokens <= reused:
                return found
            group = Miss(MissReason.GROUP, reused, found.hit_tokens - reused, why=lacking)
            return Explanation(found.prompt_tokens, reused, (group, *found.misses)).check()

        misses.explain(keys[-1][:8], len(prompt), reused, ask)

    def _held(self, name: str, keys: Sequence[str], extra_info: Any = None) -> list[bool]:
        """Return for each of ``keys`` whether the daemon has the page. Found pages are leased, and pages on
        disk are read into memory in the background."""
        held = [True] * len(keys)
        for place in self._places(name):
            query = self._find(place, keys, extra_info)
            there = set(query.positions) if query is not None else ()
            held = [both and at in there for at, both in enumerate(held)]
            if query is not None:
                query.hit.prefetch(deadline_s=self._settings.load_s)
        return held

    def _find(self, place: _BufferPlace, keys: Sequence[str], extra_info: Any) -> Query | None:
        """Look up pages. Return None if no page is found, or if the breaker allows no request."""
        with self._lock:
            if not keys or not self._breaker.allows(time.monotonic()):
                return None
        asked = place.prompt(keys, extra_info)
        if asked is None:
            self._warn_unknown()
            return None
        prompt, before = asked
        hit = place.store.lookup(prompt)
        self._answered(place.store)
        if hit.num_pages <= before:
            hit.release()
            return None
        query = Query(place.store, place.identity, keys, hit, before)
        self._queries.add(query)
        return query

    def _answered(self, store: Store) -> None:
        with self._lock:
            if store.connected:
                self._breaker.succeeded()
            else:
                self._breaker.failed(time.monotonic())

    # -- reading and writing -------------------------------------------------------------------------

    @guarded(lambda self, keys, host_indices, extra_info=None: [False] * len(keys))
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Read pages into the KV pool. Return for each page whether it was read."""
        return self._load(_KV, keys, host_indices, extra_info)

    @guarded(lambda self, keys, host_indices, extra_info=None: [False] * len(keys))
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Save pages of the KV pool. Return for each page whether it is stored."""
        return self._save(_KV, keys, host_indices, extra_info)

    @guarded(lambda self, transfers, extra_info=None: _none_done(transfers))
    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages of several pools, as :meth:`batch_get_v1` does for the KV pool."""
        return {
            each.name: self._load(str(each.name), each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    @guarded(lambda self, transfers, extra_info=None: _none_done(transfers))
    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        """Save pages of several pools, as :meth:`batch_set_v1` does for the KV pool."""
        return {
            each.name: self._save(str(each.name), each.keys or [], each.host_indices, extra_info)
            for each in transfers
        }

    def _load(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        came = [True] * len(keys)
        for place in self._places(name):
            began = time.monotonic()
            loaded: set[int] = set()
            known = self._queries.find(place.identity, keys) if keys else None
            if known is not None:
                loaded = self._load_held(place, *known, keys, indices)
            if not loaded and (query := self._find(place, keys, extra_info)) is not None:
                loaded = self._load_held(place, query, 0, keys, indices)
            self._stats.record(len(loaded), place.pages.page_bytes, time.monotonic() - began, load=True)
            came = [both and at in loaded for at, both in enumerate(came)]
        return came

    def _load_held(
        self, place: _BufferPlace, query: Query, first: int, keys: Sequence[str], indices: Any
    ) -> set[int]:
        """Load the pages ``keys`` that the hit of ``query`` has. ``keys[0]`` is page ``first`` of the query.
        Return the indices in ``keys`` of the loaded pages."""
        held = query.positions
        wanted = query.held(first, len(keys))
        if not wanted:
            return set()
        places = {at: held[at] - first for at in wanted}
        target = PagePlaces(place.pages, indices, len(keys), self.errors.caught, places)
        load = query.store.load_to(
            query.hit,
            target,
            first=wanted.start,
            count=len(wanted),
            keep=True,
            deadline_s=self._settings.load_s,
        )
        pages = load.wait().tokens // place.pages.chunk_tokens
        if wanted.stop == len(held):
            self._queries.drop(query)  # SGLang reads pages in order and only once
        return set() if target.failed else {places[at] for at in wanted if at < pages}

    def _save(self, name: str, keys: Sequence[str], indices: Any, extra_info: Any) -> list[bool]:
        places = self._places(name)
        nothing = [False] * len(keys)
        if not keys or not all(place.store.connected for place in places):
            return nothing
        if not self._weights.may_save():
            self.errors.warn(
                "weights",
                "pages computed before a weights update are not stored; if this continues, the engine "
                "did not flush its cache after the update (POST /flush_cache)",
            )
            return nothing
        ends = time.monotonic() + self._settings.save_s
        stored = [self._save_pages(place, keys, indices, extra_info, ends) for place in places]
        return [at < min(stored) for at in range(len(keys))]

    def _save_pages(
        self, place: _BufferPlace, keys: Sequence[str], indices: Any, extra_info: Any, ends: float
    ) -> int:
        """Save the pages ``keys``, at most until ``ends``. Return how many leading pages are stored."""
        began = time.monotonic()
        asked = place.prompt(keys, extra_info)
        if asked is None:
            self._warn_unknown()
            return 0
        prompt, first = asked
        source = PagePlaces(place.pages, indices, len(keys), self.errors.caught)
        transfer = place.store.save_from(prompt, source, len(keys), first=first)
        with contextlib.suppress(TimeoutError):
            transfer.wait(max(ends - began, 0.0))
        transfer.cancel()  # SGLang may overwrite the pages after this method returns
        pages = transfer.wait() // place.pages.chunk_tokens
        self._stats.record(pages, place.pages.page_bytes, time.monotonic() - began, load=False)
        return pages

    def _warn_unknown(self) -> None:
        self.errors.warn(
            "tokens",
            "pages with unknown tokens are not shared: pages of requests with a cache_salt, or all pages if "
            '"hicache_storage_pass_prefix_keys": true is not in hicache-storage-backend-extra-config',
        )

    # -- the rest of SGLang's interface ----------------------------------------------------------------

    @guarded(lambda self, key, target_location=None, target_sizes=None: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Warn that ``interface_v1`` is missing: SGLang calls this unsupported method only without it."""
        self._warn_v1()

    @guarded(lambda self, keys, target_locations=None, target_sizes=None: [])
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        self._warn_v1()
        return [None] * len(keys)

    @guarded(lambda self, key, value=None, target_location=None, target_sizes=None: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self._warn_v1()
        return False

    @guarded(lambda self, keys, values=None, target_locations=None, target_sizes=None: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        self._warn_v1()
        return False

    @guarded(lambda self, key: False)
    def exists(self, key: str) -> bool:
        """Return whether the daemon has a page of the KV pool."""
        return self._held(_KV, [key]) == [True]

    def _warn_v1(self) -> None:
        self.errors.warn(
            "interface_v1", 'no page is stored: set "interface_v1": 1 in hicache-storage-backend-extra-config'
        )

    @guarded(lambda self: None)
    def clear(self) -> None:
        """Make earlier pages unfindable, because the weights may have changed. The daemon's eviction policy
        frees them later."""
        self._weights.begin_epoch()
        self._queries.clear()

    @guarded(lambda self: None)
    def get_stats(self) -> Any:
        """Return statistics of the transfers since the last call, as SGLang's ``StorageMetrics``."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return self._stats.take(StorageMetrics())

    @guarded(lambda self: None)
    def close(self) -> None:
        """Close the stores when SGLang detaches the storage."""
        self._queries.clear()
        if self._misses is not None:
            self._misses.close()
        with self._lock:
            stores, self._stores = list(self._stores.values()), {}
            self._pools.clear()
        for store in stores:
            store.close()


@dataclass(frozen=True, slots=True)
class _BufferPlace:
    """The pages of a pool, with their store and current identity."""

    pages: PoolPages
    store: Store
    identity: Identity

    def prompt(self, keys: Sequence[str], extra_info: Any) -> tuple[Prompt, int] | None:
        """Return a prompt that finds the pages ``keys``, and the index of the first of them in the prompt, or
        None if the pages' tokens are unknown."""
        before = len(extra_info.prefix_keys or ()) if extra_info is not None else 0
        return self.pages.prompt(self.identity, keys, before)


class _Transfers:
    """The number of pages and the rate (GB/s) of each read and write, for SGLang's metrics."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: list[tuple[int, float]] = []
        self._saves: list[tuple[int, float]] = []

    def record(self, pages: int, page_bytes: int, seconds: float, *, load: bool) -> None:
        """Record a read into the host pool (``load``) or a write of ``pages`` pages."""
        with self._lock:
            batches = self._loads if load else self._saves
            if len(batches) < 10_000:  # bounds the list if SGLang never calls take()
                batches.append((pages, pages * page_bytes / max(seconds, 1e-9) / 1e9))

    def take(self, metrics: Any) -> Any:
        with self._lock:
            loads, self._loads = self._loads, []
            saves, self._saves = self._saves, []
        metrics.prefetch_pgs.extend(pages for pages, _ in loads)
        metrics.prefetch_bandwidth.extend(rate for _, rate in loads)
        metrics.backup_pgs.extend(pages for pages, _ in saves)
        metrics.backup_bandwidth.extend(rate for _, rate in saves)
        return metrics


def _arguments() -> dict[str, Any]:
    """Return SGLang's server arguments, with defaults filled in."""
    known = runtime_context.get_server_args()
    # SGLang has ``resolved_dict`` from 0.5.22 on. Earlier versions fill defaults into the object itself.
    resolved = getattr(known, "resolved_dict", None)
    return dict(resolved() if resolved is not None else vars(known))


def _save_missed_pages_again() -> None:
    """Patch SGLang so that it saves pages again that a lookup found but a read missed.

    In the mode ``buffer_only``, SGLang remembers which pages are stored and does not save them again. For a
    model with one pool, SGLang also remembers pages that a read missed, because they were evicted or damaged
    after the lookup. The patch runs on every rank at the same step, with the same number of pages.
    """
    from sglang.srt.mem_cache.buffer_mode.pipeline import BufferModePipeline

    stage = BufferModePipeline.stage_completed_prefetch
    if hasattr(stage, "__wrapped__"):
        return  # this process has patched SGLang already

    @functools.wraps(stage)
    def staging(self: Any, request: Any, num_tokens: int, hash_value: list[str]) -> Any:
        cache = self._cache
        came = num_tokens // cache.page_size
        late = cache.ongoing_prefetch[request].operation.deadline_expired  # pages may still be stored
        result = stage(self, request, num_tokens, hash_value)
        if came < len(hash_value) and not late:
            cache.storage_existence_cache.pool(_KV).invalidate_beyond(hash_value, came)
        return result

    BufferModePipeline.stage_completed_prefetch = staging


def _watch_adapters(*, server: str) -> None:
    """Identify adapters by their files. ``server`` identifies this server."""
    from tierstore_connectors.sglang.adapters import ADAPTERS  # this import loads SGLang's large LoRA modules

    # If this storage is attached to a running server, the files of an adapter may have changed since the
    # server loaded it.
    ADAPTERS.watch((runtime_context.get_lora().lora_paths or ()) if _at_start() else (), server=server)


def _at_start() -> bool:
    """Return whether this storage was given at the server's start, not attached to a running server."""
    return runtime_context.get_server_args().hicache_storage_backend is not None


def _weight_version() -> str:
    return str(getattr(runtime_context.get_serving(), "weight_version", ""))


def _leading(held: Sequence[bool]) -> int:
    """Return the number of pages before the first missing page."""
    return next((at for at, here in enumerate(held) if not here), len(held))


def _rule(transfer: Any) -> GroupRule | None:
    """Return a pool's rule, in units of pages, or None for an unknown policy. The length of a window is the
    number of pages that SGLang reads: one for recurrent states."""
    if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
        return GroupRule.all()
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return GroupRule.window(max(len(transfer.keys or ()), 1))
    return None


def _none_done(transfers: Any) -> dict[str, list[bool]]:
    return {each.name: [False] * len(each.keys or ()) for each in transfers}
