"""The connections of one half: one for each page size (groups of one size share one)."""

from __future__ import annotations

from collections.abc import Callable

from tierstore.daemon.connected import ConnectedStore
from tierstore.keys import Identity
from tierstore.spec import KVSpec
from tierstore.tiers.pinned import Pin
from tierstore_connectors.vllm.settings import Settings

_RENEW_S = 0.1  # a daemon that is well has answered by then


class Stores:
    """``reach`` is :class:`~tierstore.daemon.connected.ConnectedStore`'s.

    Belongs to the thread that opens them; the stores themselves are thread-safe. The daemon remembers what
    identities it was told of for as long as a session lasts, and takes so many only: who changes them begins
    new sessions.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        threads: int,
        reach: Callable[[Pin], None] | None = None,
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._reach = reach
        self._stores: dict[KVSpec, ConnectedStore] = {}

    def open(self, identity: Identity, page_bytes: int, chunk_tokens: int) -> ConnectedStore:
        """The store for such pages; ``identity`` is the first to be known to the daemon. Raises
        :class:`~tierstore.errors.UsageError` for an address that is none."""
        spec = KVSpec.opaque(page_bytes, chunk_tokens=chunk_tokens)
        store = self._stores.get(spec)
        if store is None:
            settings = self._settings
            store = self._stores[spec] = ConnectedStore.connect(
                settings.store,
                spec,
                identity=identity,
                lookup_s=settings.lookup_s,
                mover_threads=self._threads,
                keys=settings.keys,
                server_key=settings.server_key,
                reach=self._reach,
            )
        return store

    def renew(self, reopen: Callable[[], None]) -> None:
        """Begin new sessions; ``reopen`` opens what is to be open. Who still uses the stores of before gets
        misses."""
        self.close()
        reopen()
        self.wait_connected(_RENEW_S)

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the daemon to be there; False when it is not."""
        return all(store.wait_connected(timeout) for store in self._stores.values())

    @property
    def connected(self) -> bool:
        """Whether the daemon is there, and answers."""
        return all(store.connection.session is not None for store in self._stores.values())

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()
