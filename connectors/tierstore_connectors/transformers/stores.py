"""The store of one model, which all caches of the model share."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import tierstore
from tierstore import Store
from tierstore.defaults import DEFAULT_DISK_BYTES, DEFAULT_HOST_BYTES
from tierstore_connectors.common.options import checked_options
from tierstore_connectors.common.stores import GuardedStore
from tierstore_connectors.transformers.identity import identity_of, weights_mark
from tierstore_connectors.transformers.layers import CacheLayout

_log = logging.getLogger("tierstore_connectors.transformers")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The settings of a :class:`TierStoreCache`.

    - ``namespace``: caches with different namespaces share no pages.
    - ``chunk_tokens``: tokens per page.
    - ``lookup_s``, ``load_s``: the most seconds that a prompt waits for a lookup and for a load.
    - ``host_bytes``, ``disk_bytes``: the capacities of a store in a directory.
    - ``hash_weights``: "whole" hashes weight files completely, "sample" only samples of them.
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
        """Return the options in ``given``. Raise :class:`UsageError` for an unknown name or an invalid
        value."""
        long = {each.name for each in fields(cls) if each.name.endswith("_bytes")}
        options = checked_options("TierStoreCache", cls, {k: v for k, v in given.items() if k not in long})
        return cls(**options, **{name: given[name] for name in long if name in given})


class ModelStore(GuardedStore):
    """The open store of one model. Its users call :meth:`close` once for each :meth:`open`."""

    _opened: ClassVar[weakref.WeakKeyDictionary[Any, dict[object, ModelStore]]] = weakref.WeakKeyDictionary()
    _opening: ClassVar = threading.Lock()

    def __init__(self, model: Any, place: str, options: CacheOptions) -> None:
        self.options = options
        self.layout = CacheLayout(model, options.chunk_tokens)
        self.users = 0
        self._mark = weights_mark(model)
        super().__init__(
            self._open(model, place), lookup_s=options.lookup_s, load_s=options.load_s, errors=_log
        )

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
        """Count one more user, which must call :meth:`close`."""
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
        store.wait_connected(options.lookup_s)  # if no daemon answers, lookups miss
        return store

    def changed(self, model: Any) -> bool:
        """Return whether the model's weights have changed since the store was opened."""
        return weights_mark(model) != self._mark
