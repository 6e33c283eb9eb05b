"""Fill the daemon of a new host from an object store, with the most used bundles first.

Each bundle contains the prompt of its pages (``bundles.py``). A bundle is skipped if its page names do not
follow from this prompt. Pages of a tenant are accepted only from sealed (encrypted) bundles. All pages are
fetched as usual: read, compared, saved (``fetching.py``).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from tierstore.cluster import orders as o
from tierstore.cluster.bundle_store import BundleStore
from tierstore.cluster.bundles import Bundle, BundleError
from tierstore.cluster.fetching import DaemonStores, Fetcher, objects_of, prompt_of
from tierstore.cluster.forms import ObjectForms
from tierstore.cluster.objects import name_digest
from tierstore.cluster.staging import StagingMemory
from tierstore.errors import TierStoreError
from tierstore.keys import KEY_BYTES, TOKEN_BYTES
from tierstore.store import Store
from tierstore.units import MIB

_End: TypeAlias = Literal["whole", "beyond", "failed"]
_AT_A_TIME = 4  # bundles that are fetched at the same time
_STAGING_BYTES = 128 * MIB
_BUNDLE_S = 60.0
_FLUSH_S = 300.0
_FLUSH_BYTES = 64 * MIB  # bytes between two flushes, if the size of the host tier is unknown


@dataclass(slots=True)
class WarmUp:
    """The progress of a warm-up in pages and bytes. The daemon already held ``held_pages`` before.
    ``left_out_pages`` did not arrive or are not trusted. ``beyond_pages`` would have exceeded the limits."""

    fetched_pages: int = 0
    fetched_bytes: int = 0
    held_pages: int = 0
    left_out_pages: int = 0
    beyond_pages: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Warmer:
    """Fetches the most used bundles of ``bundles`` into a daemon. It calls ``progress`` after each bundle,
    from one thread at a time."""

    def __init__(
        self,
        bundles: BundleStore,
        stores: DaemonStores,
        secret: bytes = b"",
        progress: Callable[[WarmUp], None] = lambda done: None,
    ) -> None:
        self._bundles = bundles
        self._stores = stores
        self._forms = ObjectForms(secret, bundles.keys)
        self._progress = progress
        self._fetcher = Fetcher(bundles, StagingMemory(_STAGING_BYTES), stores, self._forms)
        self._lock = threading.Lock()  # guards the fields below
        self._left: int | None = None  # bytes of room in the daemon's tiers; None before the first bundle
        self._unflushed = 0
        self.done = WarmUp()

    def run(self, top_bytes: int) -> WarmUp:
        """Fetch bundles of at most ``top_bytes`` bytes in total, and at most as many bytes as the daemon has
        room for."""
        came: dict[str, Future[_End]] = {}
        left = top_bytes
        with ThreadPoolExecutor(_AT_A_TIME, "tierstore-warm-up") as pool:
            for bundle in self._bundles.index.by_use(self._bundles.uses()):
                left -= bundle.nbytes
                if left < 0:
                    self.done.beyond_pages += bundle.pages
                    continue
                parent = self._bundles.index.parent(bundle)
                before = came.get(parent.name) if parent is not None else None
                came[bundle.name] = pool.submit(self._fetch, bundle, before)
        for each in came.values():
            each.result()
        return self.done

    def _fetch(self, bundle: Bundle, before: Future[_End] | None) -> _End:
        """Fetch a bundle after its parent. ``before`` is the result of fetching the parent."""
        counts: Counter[str] = Counter()
        held = beyond = came = 0
        try:
            if bundle.has_parent:
                end = before.result() if before is not None else "failed"
                beyond = bundle.pages if end == "beyond" else 0
                if end != "whole":
                    return end
            origin = self._checked(bundle)
            first = len(origin.pages.keys) // KEY_BYTES - origin.count
            store = self._stores.of(origin.pages)
            held = _held(store, origin, first)
            if held < origin.count:
                wanted = (origin.count - held) * origin.pages.page_bytes
                beyond = 0 if self._take_room(store, wanted) else origin.count - held
            if held < origin.count and not beyond:
                came = self._fetcher.fetch(origin.pages, first + held, origin.count - held, _BUNDLE_S, counts)
            whole = held + came == origin.count
            return "beyond" if beyond else "whole" if whole else "failed"
        except TierStoreError:
            counts["failed_bundles"] += 1
            return "failed"
        finally:
            with self._lock:
                self.done.counts += counts
                self.done.fetched_pages += came
                self.done.fetched_bytes += counts["fetched_bytes"]
                self.done.held_pages += held
                self.done.beyond_pages += beyond
                self.done.left_out_pages += bundle.pages - came - held - beyond
                self._progress(self.done)

    def _checked(self, bundle: Bundle) -> o.Origin:
        """Read the origin (prompt and identity) of a bundle. Raise :class:`TierStoreError` if it cannot be
        trusted."""
        if self._bundles.keys is not None:
            self._bundles.keys.refresh(self._bundles.bucket.address.refresh_s)
        origin = self._bundles.origin(bundle)
        pages = origin.pages
        chunks, rest = divmod(len(pages.keys), KEY_BYTES)
        whole = not rest and len(pages.tokens) == chunks * pages.chunk_tokens * TOKEN_BYTES
        form = self._forms.of(pages)
        plain_tenant = pages.identity.get("tenant") and not bundle.key_id
        if not whole or not 0 < origin.count <= chunks or plain_tenant or form is None:
            raise BundleError(f"the origin of bundle {bundle.name} is malformed")
        try:
            objects = objects_of(pages, form)[chunks - origin.count :]
        except TypeError:  # an identity of another version
            raise BundleError(f"the origin of bundle {bundle.name} is of another version") from None
        if b"".join([name_digest(each.name) for each in objects]) != bundle.names:
            raise BundleError(f"the origin of bundle {bundle.name} belongs to other pages")
        return origin

    def _take_room(self, store: Store, nbytes: int) -> bool:
        """Take ``nbytes`` of the room in the daemon's tiers. Return False if they have less. Wait sometimes
        until the daemon has written its pages to disk, because pages that arrive faster would be lost."""
        with self._lock:
            tiers = store.stats().tiers
            host, disk = tiers.get("host"), tiers.get("disk")  # a client with a tenant gets no tiers
            if self._left is None:
                last = disk or host
                self._left = 1 << 60 if last is None else last.capacity_bytes - last.used_bytes
            if nbytes > self._left:
                return False
            self._left -= nbytes
            self._unflushed += nbytes
            if (disk is not None or host is None) and self._unflushed > (
                host.capacity_bytes // 4 if host is not None else _FLUSH_BYTES
            ):
                store.flush(_FLUSH_S)
                self._unflushed = 0
        return True


def _held(store: Store, origin: o.Origin, first: int) -> int:
    """Return how many of the leading pages of an origin the daemon holds."""
    prompt, start = prompt_of(origin.pages, first, origin.count)
    with store.lookup(prompt, counted=False) as hit:
        held = hit.whole_chunks
    places = range(start, start + origin.count)
    return next((at for at, chunk in enumerate(places) if chunk not in held), origin.count)
