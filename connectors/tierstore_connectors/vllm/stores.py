"""The connector's side of the store: connections, lookups, loads and saves. No other module here calls it.

Pages are opaque, and each has a key of its own (``identity.py``): nothing is matched inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tierstore
from tierstore import Hit, Store, lookup_all
from tierstore.core.clients import MOST_IDENTITIES
from tierstore.keys import TOKEN_BYTES, Identity, PageKey, Prompt
from tierstore.spec import KVSpec
from tierstore.store.buffers import PageSource, PageTarget, copied_frames
from tierstore.tiers.pinned import Pin
from tierstore.transfer import Transfer
from tierstore.types import Hint, Loaded
from tierstore_connectors.vllm.config import Settings

__all__ = [
    "MOST_IDENTITIES",
    "Hit",
    "Loaded",
    "Store",
    "Stores",
    "copied_frames",
    "look_up",
    "prompt_of",
    "start_load",
    "start_save",
]

_RENEW_S = 0.1  # a daemon that is well has answered by then


class Stores:
    """The connections of one half: one for each page size (groups of one size share one). ``reach`` is called
    with each arena that is mapped, so that a device can be made to reach it.

    Belongs to the thread that opens them; the stores themselves are thread-safe. The daemon keeps a client's
    identities for as long as it is connected, and takes so many only: a change of identities begins new
    connections.
    """

    def __init__(
        self, settings: Settings, *, threads: int, reach: Callable[[Pin], None] | None = None
    ) -> None:
        self._settings = settings
        self._threads = threads
        self._reach = reach
        self._stores: dict[tuple[int, int], Store] = {}

    def open(self, identity: Identity, page_bytes: int, chunk_tokens: int) -> Store:
        """The store for such pages; ``identity`` is the first that the daemon hears of. Raises
        :class:`~tierstore.errors.UsageError` for an address that is none."""
        store = self._stores.get((page_bytes, chunk_tokens))
        if store is None:
            settings = self._settings
            store = self._stores[page_bytes, chunk_tokens] = tierstore.connect(
                settings.store,
                KVSpec.opaque(page_bytes, chunk_tokens=chunk_tokens),
                identity=identity,
                lookup_s=settings.lookup_s,
                mover_threads=self._threads,
                keys=settings.keys,
                server_key=settings.server_key,
                reach=self._reach,
                model_name=settings.model_name,
                wait_s=0,
            )
        return store

    def renew(self, reopen: Callable[[], None]) -> None:
        """Begin new connections; ``reopen`` opens what is to be open. Those who still use the old stores
        get misses."""
        self.close()
        reopen()
        self.wait_connected(_RENEW_S)

    def wait_connected(self, timeout: float) -> bool:
        """Wait for the daemon; False when it does not come."""
        return all(store.wait_connected(timeout) for store in self._stores.values())

    @property
    def connected(self) -> bool:
        """Whether the daemon is there, and answers."""
        return all(store.connected for store in self._stores.values())

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()


def prompt_of(identity: Identity, keys: Sequence[PageKey], tokens: bytes, chunk_tokens: int) -> Prompt:
    """The first chunks of a prompt, as many as there are keys. ``tokens`` are uint32, little-endian."""
    data = tokens[: len(keys) * chunk_tokens * TOKEN_BYTES]
    return Prompt.with_keys(identity, data, list(keys), chunk_tokens=chunk_tokens)


def look_up(wanted: Iterable[tuple[Store, Prompt]], *, gain: int = 0) -> Sequence[Hit]:
    """What the daemon has of these prompts: all are asked for before any answer is waited for. ``gain``: see
    :func:`~tierstore.lookup_all`. Raises :class:`~tierstore.errors.StoreClosedError`."""
    return lookup_all(wanted, gain=gain)


def start_load(
    store: Store, hit: Hit, target: PageTarget, *, first: int, deadline_s: float
) -> Transfer[Loaded]:
    """Load pages ``first …`` of a hit. When the transfer has ended nothing is written to ``target`` any more;
    the tokens of its result count from the prompt's start."""
    if hit.positions:
        store.offer(hit)
    return store.load_to(hit, target, first=first, deadline_s=deadline_s)


def start_save(
    store: Store, prompt: Prompt, source: PageSource, count: int, *, first: int, hint: Hint | None
) -> Transfer[int]:
    """Save ``count`` pages as chunks ``first …``. After ``cancel()`` the source is not read any more; what it
    had given by then is stored. The result is the number of stored tokens."""
    return store.save_from(prompt, source, count, first=first, hint=hint)
