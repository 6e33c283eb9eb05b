"""The store of one model, which all caches of that model share: lookups, loads and saves of single prompts.

No method raises because the store is full, slow or unavailable: it finds nothing, loads nothing or saves
nothing, and the log says why once.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import torch

import tierstore
from tierstore import Hit, Store
from tierstore.defaults import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES
from tierstore.errors import UsageError
from tierstore.transfer import Transfer
from tierstore_connectors.common.counters import ConnectorCounters, added
from tierstore_connectors.common.guard import Breaker, ErrorLog
from tierstore_connectors.common.options import checked_options
from tierstore_connectors.transformers.identity import identity_of, weights_mark
from tierstore_connectors.transformers.layers import CacheLayout

_log = logging.getLogger("tierstore_connectors.transformers")
_WAITING_BYTES = 1 << 30  # copies of pages that are being saved; more are not stored


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The settings of a :class:`TierStoreCache`.

    - ``namespace``: separates models that nothing else separates.
    - ``chunk_tokens``: tokens of a page.
    - ``lookup_s``, ``load_s``: the longest that a prompt waits for the daemon's answer, and for its pages.
    - ``host_bytes``, ``disk_bytes``: sizes of a store in a directory.
    - ``hash_weights``: "whole", or "sample" if reading all weight files once takes too long.
    - ``keys``, ``server_key``: key files for ``tcp://``.
    """

    namespace: str = ""
    chunk_tokens: int = 64
    lookup_s: float = 0.5
    load_s: float = 10.0
    host_bytes: int = DEFAULT_HOST_BYTES
    disk_bytes: int = DEFAULT_DISK_BYTES
    hash_weights: str = "whole"
    keys: str | None = None
    server_key: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> CacheOptions:
        """Check the options. Raise :class:`UsageError` for an unknown name or an invalid value."""
        long = {each.name for each in fields(cls) if each.name.endswith("_bytes")}
        options = checked_options("TierStoreCache", cls, {k: v for k, v in given.items() if k not in long})
        found = cls(**options, **{name: given[name] for name in long if name in given})
        if found.hash_weights not in ("whole", "sample"):
            raise UsageError(
                f'TierStoreCache: hash_weights must be "whole" or "sample", got {found.hash_weights!r}'
            )
        return found


class ModelStore:
    """The open store of one model. Close it once for each :meth:`open`."""

    _opened: ClassVar[weakref.WeakKeyDictionary[Any, dict[object, ModelStore]]] = weakref.WeakKeyDictionary()
    _opening: ClassVar = threading.Lock()

    def __init__(self, model: Any, place: str, options: CacheOptions) -> None:
        self.options = options
        self.errors = ErrorLog(_log)
        self.counters = ConnectorCounters()
        self.layout = CacheLayout(model, options.chunk_tokens)
        self.users = 0
        self.losses = 0
        """The number of saves that have not stored everything."""
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._saving: set[Transfer[int]] = set()
        self._saving_bytes = 0
        self._totals: Mapping[str, float] = {}
        self._mark = weights_mark(model)
        self._store = self._open(model, place)

    @classmethod
    def open(cls, model: Any, place: str | Path, options: CacheOptions) -> ModelStore:
        """Return the store of ``model`` at ``place``, a directory or a daemon's URL. All callers with equal
        arguments share it."""
        where = str(place) if "://" in str(place) else str(Path(place).absolute())
        with cls._opening:
            stores = cls._opened.setdefault(model, {})
            found = stores.get((where, options))
            if found is None or found.users == 0:
                found = stores[where, options] = cls(model, where, options)
            found.users += 1
            return found

    def share(self) -> None:
        """Count one more user, who closes the store as well."""
        with self._opening:
            self.users += 1

    def close(self) -> None:
        """Close the store when its last user closes it. Wait up to 5 s for running saves."""
        with self._opening:
            self.users -= 1
            if self.users:
                return
        self._store.close()

    def _open(self, model: Any, place: str) -> Store:
        options, spec = self.options, self.layout.spec
        identity = identity_of(
            model, spec, namespace=options.namespace, sampled=options.hash_weights == "sample"
        )
        name = str(model.config._name_or_path or type(model).__name__)
        if "://" not in place:
            return tierstore.open(
                place,
                spec,
                identity=identity,
                host_bytes=options.host_bytes,
                disk_bytes=options.disk_bytes,
                model_name=name,
            )
        store = tierstore.connect(
            place,
            spec,
            identity=identity,
            lookup_s=options.lookup_s,
            keys=options.keys,
            server_key=options.server_key,
            model_name=name,
            wait_s=0,
            log=_log,
        )
        store.wait_connected(options.lookup_s)  # without a daemon every lookup misses
        return store

    def changed(self, model: Any) -> bool:
        """Return whether the model's weights have changed since the store was opened."""
        return weights_mark(model) != self._mark

    def find(self, tokens: torch.Tensor, *, counted: bool) -> Hit | None:
        """Return the longest hit for ``tokens``, which the caller loads or releases. Return None if the store
        does not answer."""
        if not self._breaker.allows(time.monotonic()):
            return None
        began = time.monotonic()
        try:
            hit = self._store.lookup(tokens.numpy(), counted=counted)
        except Exception as error:  # noqa: BLE001  # a broken store is a miss
            self.errors.caught("looking up a prompt", error)
            self._breaker.failed(time.monotonic())
            return None
        now = time.monotonic()
        if not hit.tokens and now - began >= self.options.lookup_s:
            self.errors.warn("late lookups", "the store does not answer in time: prompts are computed")
            self._breaker.failed(now)
        else:
            self._breaker.succeeded()
        return hit

    def load(self, hit: Hit) -> tuple[int, list[torch.Tensor], list[range]]:
        """Load a hit within ``load_s``. Return how many tokens arrived, and the pages of each layer group
        with their chunks."""
        chunks = [hit.chunks(group.number) for group in self._store.groups]
        pages = [
            torch.zeros((len(each), group.page_bytes), dtype=torch.uint8)
            for each, group in zip(chunks, self._store.groups, strict=True)
        ]
        into = [[page.data for page in each.numpy()] for each in pages]
        try:
            flat = into if len(into) > 1 else into[0]
            loaded = self._store.load(hit, flat, deadline_s=self.options.load_s).wait().tokens
        except Exception as error:  # noqa: BLE001  # the prompt is computed
            self.errors.caught("loading a prompt", error)
            hit.release()
            loaded = 0
        if loaded < hit.tokens:
            self.counters.add("failed_loads")
        return loaded, pages, chunks

    def save(self, tokens: torch.Tensor, pages: torch.Tensor, *, first: int, group: int) -> None:
        """Start to store pages of a prompt, and return. ``pages`` must not change any more."""
        if not len(pages):
            return
        with self._lock:
            waiting = self._saving_bytes
            if fits := waiting + pages.nbytes <= _WAITING_BYTES or not waiting:
                self._saving_bytes += pages.nbytes
        if not fits:
            self.errors.warn(
                "saves", "pages are computed faster than the store takes them: some are not stored"
            )
            self.counters.add("not_saved_tokens", len(pages) * self.options.chunk_tokens)
            self.losses += 1
            return
        try:
            saving = self._store.save(
                tokens.numpy(), [page.data for page in pages.numpy()], first=first, group=group
            )
        except Exception as error:  # noqa: BLE001  # the caller has its KV
            self.errors.caught("saving a prompt", error)
            with self._lock:
                self._saving_bytes -= pages.nbytes
            self.losses += 1
            return
        expected = len(tokens) - first * self.options.chunk_tokens

        def ended() -> None:
            stored = saving.wait()
            with self._lock:
                self._saving.discard(saving)
                self._saving_bytes -= pages.nbytes
                self.losses += stored < expected
            self.counters.add("saved_tokens", stored)
            if stored < expected:
                self.counters.add("not_saved_tokens", expected - stored)

        with self._lock:
            self._saving.add(saving)
        saving.on_end(ended)

    def totals(self) -> Mapping[str, float]:
        """Return the counters since the store was opened, with ``errors``."""
        with self._lock:
            self._totals = added(self._totals, self.counters.take())
            return {**self._totals, "errors": self.errors.counts.total()}

    def flush(self, timeout: float | None) -> bool:
        """Wait until all saved pages are in the store, and on its disk if it has one."""
        ends = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            saving: Sequence[Transfer[int]] = list(self._saving)
        try:
            for each in saving:
                each.wait(None if ends is None else max(ends - time.monotonic(), 0.0))
            return self._store.flush(None if ends is None else max(ends - time.monotonic(), 0.0))
        except TimeoutError:
            return False
